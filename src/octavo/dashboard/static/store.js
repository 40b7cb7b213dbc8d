// Received frames (docs/statistics.md) as columns: steps, requests, snapshots of the queue and the pool. Draws nothing.
// Counts are kept as sums from the beginning, so that any span of time costs two look-ups.

const LIVE_STEPS = 60_000; // kept of a live engine, about
const FILE_STEPS = 300_000; // kept of a file
const MAX_REQUESTS = 20_000; // beyond, the oldest ended ones are dropped
const MAX_LOOKS = 2_400; // snapshots of the queue, and of the pool: beyond, every other one is dropped
const MAX_SEGMENTS = 512; // of one request
const MAX_EVENTS = 64; // of one request
const MAX_SAMPLES = 100_000;
const MAX_HOLDERS = 4096; // of one slot, that are remembered

export const PARTS = ["schedule", "prepare", "forward", "sample", "emit"];
export const QUEUED = 0, PREFILL = 1, DECODE = 2, PREEMPTED = 3, SWAPPED = 4;
export const LANE_KINDS = ["queued", "prefill", "decode", "preempted", "swapped"];
const SUMS = ["prefill", "decode", "drafted", "accepted", "out", "busy", "idle", ...PARTS, "unknown", "swapOut", "swapIn",
  "copies", "preempted", "finished", "failed", "cachedTokens", "promptTokens"];
const GAUGES = ["run", "wait", "swapped", "used", "cachedBlocks", "host", "number", "rows"];
const TOTALS = ["finished", "preempted", "looked_up", "found"]; // since the engine's start, by its own count

/** Return the first index within [0, count) of sorted numbers whose value is above x. */
export function indexAbove(values, x, count = values.length) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1; else high = middle;
  }
  return low;
}

/** Return the q-quantile of numbers, which are sorted in place; NaN without numbers. */
export function quantile(values, q) {
  if (!values.length) return NaN;
  values.sort();
  return values[Math.min(values.length - 1, Math.floor(q * values.length))];
}

/** Columns of equal length that grow; `keep` gives the last ones only. */
class Columns {
  constructor(names) {
    this.names = names;
    this.count = 0;
    this.room = 1024;
    for (const name of names) this[name] = new Float64Array(this.room);
  }

  push(values) {
    if (this.count === this.room) {
      this.room *= 2;
      for (const name of this.names) { const wider = new Float64Array(this.room); wider.set(this[name]); this[name] = wider; }
    }
    for (const name of this.names) this[name][this.count] = values[name] || 0;
    this.count += 1;
  }

  dropFirst(num) {
    for (const name of this.names) this[name].copyWithin(0, num, this.count);
    this.count -= num;
  }
}

function newRequest([name, arrival, tenant, prompt, priority, maxTokens]) {
  return {
    name, tenant: tenant || "", prompt: prompt || 0, priority: priority || 0, maxTokens: maxTokens || 0, arrival, first: NaN, end: NaN, finish: "", message: "", cached: 0, tokens: 0, position: 0,
    preemptions: 0, kind: QUEUED, lastStep: -2, choices: 1, kinds: [QUEUED], starts: [arrival], ends: [arrival], events: [],
  };
}

export class Store {
  constructor(isLive) {
    this.maxSteps = isLive ? LIVE_STEPS : FILE_STEPS;
    this.reset();
  }

  reset() {
    this.head = null;
    this.steps = new Columns(["t", "s", ...SUMS, ...GAUGES, ...TOTALS.map((name) => `all_${name}`)]);
    this.totals = null; // the last received, with their time
    this.totalsTime = NaN;
    this.rows = []; // of each step: flat triples, or null if they continue
    this.events = []; // of each step: decisions, or null
    this.fails = [];
    this.base = null; // sums before the first kept step
    this.numDropped = 0; // steps dropped
    this.numAll = 0;
    this.sums = Object.fromEntries(SUMS.map((name) => [name, 0]));
    this.requests = new Map();
    this.order = []; // requests in order of arrival
    this.slots = new Map(); // slot -> {request, choice, prompt}
    this.log = new Map(); // slot -> {times, names}: its requests, from these times on
    this.current = []; // rows of the last step: [slot, next position, tokens]
    this.queues = [];
    this.pools = [];
    this.gaps = [];
    this.ttft = new Columns(["t", "value"]);
    this.tpot = new Columns(["t", "value"]);
    this.begin = NaN;
    this.end = NaN;
    this.isComplete = false;
    this.numCut = 0;
    this.version = 0; // grows with every frame
  }

  add(frame) {
    this.version += 1;
    switch (frame.k) {
      case "head": this.#head(frame); break;
      case "step": this.#step(frame); break;
      case "note": this.#news(frame, frame.t); this.#tell(frame); this.#reach(frame.t); break;
      case "queue": this.#look(this.queues, frame); break;
      case "blocks": this.#look(this.pools, frame); break;
      case "end": this.isComplete = true; this.numCut = frame.cut || 0; this.#reach(frame.t); break;
      default: break; // a later version's
    }
  }

  /** Return the index after the last step that began by this time. */
  stepAt(time) { return indexAbove(this.steps.t, time, this.steps.count); }

  /** Return the index of the step whose span holds a time, or -1. */
  stepOver(time) {
    const index = this.stepAt(time) - 1;
    return index >= 0 && time <= this.steps.t[index] + this.steps.s[index] ? index : -1;
  }

  /** Return a sum over the steps [from, to). */
  sum(name, from, to) {
    const column = this.steps[name];
    return to <= from ? 0 : column[to - 1] - (from > 0 ? column[from - 1] : this.before(name));
  }

  /** Return sums over the steps [from, to) of a window that begins at a time; the first step's idle time counts from there. */
  idleWithin(begin, from, to) {
    if (to <= from) return 0;
    const first = this.sum("idle", from, from + 1);
    return Math.min(first, Math.max(0, this.steps.t[from] - begin)) + this.sum("idle", from + 1, to);
  }

  /** Return the totals since the engine's start, at a time; null if the stream does not have them. */
  totalsAt(time) {
    const last = this.stepAt(time) - 1;
    if (this.totals === null || last < 0 || time >= this.totalsTime) return this.totals;
    return Object.fromEntries(TOTALS.map((name) => [name, this.steps[`all_${name}`][last]]));
  }

  /** Return true if no request is known. */
  get isUnused() { return this.head !== null && !this.numAll && !this.order.length && !this.totals?.finished; }

  /** Return the sums after each step, and (`before`) those before the first kept step. */
  sumsOf(name) { return this.steps[name]; }

  before(name) { return this.base ? this.base[name] : 0; }

  /** Return the last snapshot by this time, or null. */
  lookAt(looks, time) {
    let low = 0, high = looks.length;
    while (low < high) { const middle = (low + high) >> 1; if (looks[middle].t <= time) low = middle + 1; else high = middle; }
    return low ? looks[low - 1] : null;
  }

  /** Return the rows of a step as [slot, position, tokens], also if its frame says that they continue. */
  rowsOf(index) {
    let from = index;
    while (from >= 0 && this.rows[from] === null) from -= 1;
    if (from < 0) return [];
    const flat = this.rows[from], found = [];
    for (let i = 0; i < flat.length; i += 3) {
      const behind = index - from;
      found.push(behind ? [flat[i], flat[i + 1] + flat[i + 2] + behind - 1, 1] : [flat[i], flat[i + 1], flat[i + 2]]);
    }
    return found;
  }

  #tell(frame) {
    if (!frame.totals) return;
    this.totals = frame.totals;
    this.totalsTime = frame.t;
  }

  #reach(time) {
    if (!(time >= 0)) return;
    if (Number.isNaN(this.begin)) this.begin = time;
    if (!(this.end >= time)) this.end = time;
  }

  #head(frame) {
    if (this.head !== null && frame.t < this.end - 1) this.reset(); // another clock
    const before = this.head;
    this.head = frame;
    this.totals = null;
    this.#tell(frame);
    if (before !== null) this.gaps.push({ t: frame.t, isNew: before.life !== frame.life });
    this.slots.clear();
    this.current = [];
    const open = new Set((frame.open || []).map((each) => each[0]));
    for (const request of this.requests.values()) {
      if (Number.isNaN(request.end) && !open.has(request.name)) this.#finish(request, frame.t, "unknown", 0, "its end was not seen");
    }
    for (const each of frame.open || []) this.#arrive(each);
    for (const slot of this.log.keys()) this.#note(slot, frame.t, "");
    for (const each of frame.slots || []) this.#take(each, frame.t);
    this.#reach(frame.t);
  }

  #arrive(each) {
    if (this.requests.has(each[0])) return;
    const request = newRequest(each);
    this.requests.set(request.name, request);
    this.order.push(request);
    if (this.order.length > MAX_REQUESTS + 1000) this.#forget();
  }

  #forget() {
    let excess = this.order.length - MAX_REQUESTS;
    this.order = this.order.filter((request) => {
      if (excess <= 0 || Number.isNaN(request.end)) return true;
      excess -= 1;
      this.requests.delete(request.name);
      return false;
    });
  }

  #take([slot, name, choice, prompt], time) {
    let request = this.requests.get(name);
    if (!request) { this.#arrive([name, time, "", prompt, 0]); request = this.requests.get(name); }
    this.#note(slot, time, name);
    request.choices = Math.max(request.choices, choice + 1);
    this.slots.set(slot, { request, choice, prompt });
  }

  #note(slot, time, name) {
    let log = this.log.get(slot);
    if (!log) this.log.set(slot, log = { times: [], names: [] });
    log.times.push(time); log.names.push(name);
    if (log.times.length > MAX_HOLDERS) { log.times.splice(0, MAX_HOLDERS / 2); log.names.splice(0, MAX_HOLDERS / 2); }
  }

  /** Return the request's name of each slot at a time. */
  holdersAt(time) {
    const found = new Map();
    for (const [slot, { times, names }] of this.log) {
      const index = indexAbove(times, time) - 1;
      if (index >= 0 && names[index]) found.set(slot, names[index]);
    }
    return found;
  }

  #news(frame, time) {
    for (const each of frame.in || []) this.#arrive(each);
    for (const [kind, name, fields] of frame.ev || []) {
      const request = this.requests.get(name);
      if (kind === "preempted" && fields.by !== undefined) this.sums.preempted += 1; // else a row or step failed
      if (!request) continue;
      if (request.events.length === MAX_EVENTS) request.events.splice(1, 1);
      request.events.push([kind, fields]);
      this.#decide(request, kind, fields, fields.t ?? time);
    }
  }

  #decide(request, kind, fields, time) {
    if (kind === "admitted" || kind === "resumed") {
      if (kind === "admitted") {
        request.cached = fields.cached || 0;
        this.sums.cachedTokens += request.cached;
        this.sums.promptTokens += request.prompt;
      }
    } else if (kind === "preempted") { request.preemptions += fields.by !== undefined; this.#segment(request, PREEMPTED, time); }
    else if (kind === "swapped") this.#segment(request, SWAPPED, time); // sent with its preemption
    else if (kind === "finished") this.#finish(request, time, fields.finish || "", fields.n || 0, fields.message || "");
  }

  #finish(request, time, finish, tokens, message) {
    this.#extend(request, time);
    Object.assign(request, { end: time, finish, message, tokens: tokens || request.tokens });
    if (finish === "unknown") return;
    this.sums.finished += 1;
    if (request.first >= 0 && tokens > 1) pushSample(this.tpot, time, (time - request.first) / (tokens - 1));
  }

  #segment(request, kind, time) {
    this.#extend(request, time);
    request.kind = kind;
    if (request.kinds.length >= MAX_SEGMENTS) { request.ends[request.ends.length - 1] = time; return; }
    request.kinds.push(kind); request.starts.push(time); request.ends.push(time);
  }

  /** Extend the last segment of a request that is queued, preempted or swapped to a time. */
  #extend(request, time) {
    if (request.kind === QUEUED || request.kind >= PREEMPTED) request.ends[request.ends.length - 1] = time;
  }

  #step(frame) {
    const end = frame.t + frame.s, sums = this.sums;
    const previous = this.numAll;
    this.numAll += 1;
    for (const slot of frame.freed || []) { this.slots.delete(slot); this.#note(slot, frame.t, ""); }
    for (const each of frame.in || []) this.#arrive(each);
    for (const each of frame.new || []) this.#take(each, frame.t);
    if (frame.rows) this.current = triples(frame.rows);
    else for (const row of this.current) { row[1] += row[2]; row[2] = 1; }
    this.#follow(frame, end, previous);
    this.#news({ ev: frame.ev }, end);
    const [prefill, decode, drafted, accepted, out] = frame.tok;
    sums.prefill += prefill; sums.decode += decode; sums.drafted += drafted; sums.accepted += accepted; sums.out += out || 0;
    sums.busy += frame.s; sums.idle += frame.idle || 0;
    let known = 0;
    PARTS.forEach((part, i) => { const value = (frame.parts && frame.parts[i]) || 0; sums[part] += value; known += value; });
    sums.unknown += Math.max(0, frame.s - known);
    const [swapOut, swapIn, copies] = frame.moved || [0, 0, 0];
    sums.swapOut += swapOut; sums.swapIn += swapIn; sums.copies += copies;
    if (frame.fail) sums.failed += 1;
    this.#tell(frame);
    const totals = TOTALS.map((name) => [`all_${name}`, this.totals?.[name] ?? 0]);
    this.steps.push({
      ...Object.fromEntries(totals), ...sums, t: frame.t, s: frame.s, run: frame.run, wait: frame.wait, swapped: frame.swapped, used: total(frame.used),
      cachedBlocks: total(frame.cached), host: frame.host, number: frame.n, rows: this.current.length,
    });
    this.rows.push(frame.rows || (this.rows.length ? null : []));
    this.events.push(frame.ev && frame.ev.length ? frame.ev : null);
    this.fails.push(frame.fail || null);
    this.#reach(frame.t - (frame.idle || 0));
    this.#reach(end);
    if (this.steps.count > this.maxSteps * 1.25) this.#dropSteps();
  }

  /** Extend the lanes of a step's rows to its end. */
  #follow(frame, end, previous) {
    for (const row of this.current) {
      const holder = this.slots.get(row[0]);
      if (!holder) continue;
      const request = holder.request, behind = row[1] + row[2];
      const isDecode = row[1] >= holder.prompt || row[2] === 0;
      const kind = isDecode ? DECODE : PREFILL;
      if (request.kind !== kind || request.lastStep < previous - 1) this.#segment(request, kind, frame.t);
      request.ends[request.ends.length - 1] = end;
      request.lastStep = previous;
      if (holder.choice === 0) request.position = behind;
      if (behind >= holder.prompt && Number.isNaN(request.first) && !frame.fail) {
        request.first = end;
        pushSample(this.ttft, end, end - request.arrival);
      }
      if (isDecode || behind >= holder.prompt) request.tokens += 1;
    }
  }

  #dropSteps() {
    const num = this.steps.count - this.maxSteps;
    let first = this.rows[num] === null ? this.rowsOf(num).flat() : this.rows[num];
    this.base = Object.fromEntries(SUMS.map((name) => [name, this.steps[name][num - 1]]));
    this.steps.dropFirst(num);
    for (const list of [this.rows, this.events, this.fails]) list.splice(0, num);
    this.rows[0] = first;
    this.numDropped += num;
    this.begin = this.steps.t[0];
  }

  #look(looks, frame) {
    looks.push(frame);
    this.#reach(frame.t);
    if (looks.length > MAX_LOOKS) {
      const kept = looks.filter((_, i) => i % 2 === 1 || i > looks.length - 100);
      looks.length = 0;
      looks.push(...kept);
    }
  }
}

function pushSample(columns, t, value) {
  columns.push({ t, value });
  if (columns.count > MAX_SAMPLES) columns.dropFirst(MAX_SAMPLES / 4);
}

function triples(flat) {
  const found = [];
  for (let i = 0; i < flat.length; i += 3) found.push([flat[i], flat[i + 1], flat[i + 2]]);
  return found;
}

function total(counts) {
  let sum = 0;
  for (const count of counts || []) sum += count;
  return sum;
}
