// View 1: the steps, with their tokens, phases of time, block moves, and the pool's use.
import { Surface, hideTip, showTip, timeAxis } from "./canvas.js";
import { count, element, percent, seconds, setText, syncChildren } from "./format.js";
import { PARTS, quantile } from "./store.js";

const GUTTER = 64, AXIS = 20;
const TABLE_S = 0.25; // between two updates of the table

export class Timeline {
  constructor(app) {
    this.app = app;
    this.surface = new Surface(document.getElementById("timeline"), () => app.draw());
    this.table = document.querySelector("#parts tbody");
    this.facts = document.getElementById("step-facts");
    this.renewed = 0;
  }

  draw(view, palette, now) {
    const { surface } = this, { context } = surface, store = this.app.store;
    surface.clear(palette);
    const width = surface.width - GUTTER - 8, free = surface.height - AXIS;
    if (width < 50 || free < 100) return false; // it is not shown yet
    const room = free - 62, tokens = 6 + Math.round(room * 0.42), time = tokens + 14 + Math.round(room * 0.32);
    const bands = {
      tokens: { top: 6, bottom: tokens }, time: { top: tokens + 14, bottom: time },
      moves: { top: time + 6, bottom: time + 20 }, pool: { top: time + 34, bottom: free - 4 },
    };
    timeAxis(surface, palette, { left: GUTTER, width, top: 2, bottom: free }, view);
    const from = Math.max(0, store.stepAt(view.from) - 1), to = store.stepAt(view.to);
    const x = (time) => GUTTER + ((time - view.from) / (view.to - view.from)) * width;
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width, free);
    context.clip();
    if (to - from <= width / 4) {
      this.#steps(bands, palette, from, to, x);
      this.#moves(bands.moves, palette, from, to, x);
    } else this.#pixels(bands, palette, view, width);
    this.#pool(bands.pool, palette, view, width);
    this.#gaps(palette, free, x);
    context.restore();
    this.#labels(bands, palette);
    if (surface.pointer && surface.pointer.x >= GUTTER) this.#hover(view, palette, width, free);
    if (now - this.renewed <= TABLE_S * 1000) return false;
    this.#renewTable(view, palette, from, to);
    this.renewed = now;
    return true;
  }

  #most() { return Math.max(1, this.app.store.head?.limits.max_batch_tokens || 1); }

  /** Return the scale of tokens: the largest step of this window (sampled), which is rarely near the bound. */
  #scale(from, to) {
    const { steps } = this.app.store;
    let most = 1;
    const stride = Math.max(1, Math.floor((to - from) / 2000));
    for (let i = Math.max(1, from); i < to; i += stride) {
      const tokens = steps.prefill[i] - steps.prefill[i - 1] + steps.decode[i] - steps.decode[i - 1] + steps.drafted[i] - steps.drafted[i - 1];
      if (tokens > most) most = tokens;
    }
    this.most = Math.min(this.#most(), 2 ** Math.ceil(Math.log2(most * 1.05)));
    return this.most;
  }

  #steps(bands, palette, from, to, x) {
    const { context } = this.surface, store = this.app.store, { steps } = store, most = this.#scale(from, to);
    const high = bands.tokens.bottom - bands.tokens.top, tall = bands.time.bottom - bands.time.top;
    for (let i = from; i < to; i++) {
      const left = x(steps.t[i]), right = Math.max(left + 1, x(steps.t[i] + steps.s[i]) - 0.5);
      let y = bands.tokens.bottom;
      for (const [name, colour] of [["prefill", palette.prefill], ["decode", palette.decode], ["drafted", palette.draft]]) {
        const part = (store.sum(name, i, i + 1) / most) * high;
        if (part <= 0) continue;
        context.fillStyle = colour;
        context.fillRect(left, y - Math.max(1, part), right - left, Math.max(1, part));
        y -= part;
      }
      let at = steps.t[i];
      const idle = store.sum("idle", i, i + 1);
      if (idle > 0) { context.fillStyle = palette.idle; context.fillRect(x(at - idle), bands.time.top + tall * 0.35, x(at) - x(at - idle), tall * 0.3); }
      for (const part of PARTS) {
        const taken = store.sum(part, i, i + 1);
        if (taken <= 0) continue;
        context.fillStyle = palette[part];
        context.fillRect(x(at), bands.time.top, Math.max(0.5, x(at + taken) - x(at)), tall);
        at += taken;
      }
      if (at < steps.t[i] + steps.s[i]) {
        context.fillStyle = palette.shared;
        context.fillRect(x(at), bands.time.top, Math.max(0, right - x(at)), tall);
      }
      if (store.fails[i]) { context.fillStyle = palette.bad; context.fillRect(left, bands.time.top, right - left, tall); }
    }
  }

  /** Draw many steps per pixel: mean tokens, shares of time, moves. A pixel without a step's beginning shows the current step. */
  #pixels(bands, palette, view, width) {
    const { context } = this.surface, store = this.app.store, span = (view.to - view.from) / width, number = Math.ceil(width);
    const most = this.#scale(store.stepAt(view.from), store.stepAt(view.to)), from = new Int32Array(number), to = new Int32Array(number);
    let index = store.stepAt(view.from);
    for (let px = 0; px < number; px++) {
      const next = store.stepAt(view.from + (px + 1) * span), goesOn = next === index && index > 0
        && store.steps.t[index - 1] + store.steps.s[index - 1] > view.from + px * span;
      from[px] = goesOn ? index - 1 : index;
      to[px] = next;
      index = next;
    }
    const high = bands.tokens.bottom - bands.tokens.top, tall = bands.time.bottom - bands.time.top;
    const heights = new Float32Array(number), all = new Float64Array(number);
    const stack = (name, colour, bottom, height) => {
      const part = store.sumsOf(name), before = store.before(name);
      context.fillStyle = colour;
      context.beginPath();
      for (let px = 0; px < number; px++) {
        const a = from[px], b = to[px];
        if (b <= a) continue;
        const value = height(px, part[b - 1] - (a > 0 ? part[a - 1] : before));
        if (!(value > 0)) continue;
        context.rect(GUTTER + px, bottom - heights[px] - value, 1, value);
        heights[px] += value;
      }
      context.fill();
    };
    for (const [name, colour] of [["prefill", palette.prefill], ["decode", palette.decode], ["drafted", palette.draft]]) {
      stack(name, colour, bands.tokens.bottom, (px, sum) => (sum / (to[px] - from[px]) / most) * high);
    }
    for (let px = 0; px < number; px++) all[px] = store.sum("busy", from[px], to[px]) + store.sum("idle", from[px], to[px]);
    heights.fill(0);
    for (const part of [...PARTS, "unknown", "idle"]) {
      stack(part, part === "unknown" ? palette.shared : palette[part], bands.time.bottom, (px, sum) => (sum / all[px]) * tall);
    }
    this.#moveBars(bands.moves, palette, from, to);
  }

  /** Blocks out above, back in below, as bars against the most of them; a line at each preemption. */
  #moveBars(band, palette, from, to) {
    const { context } = this.surface, store = this.app.store, middle = (band.top + band.bottom) / 2, reach = (band.bottom - band.top) / 2;
    for (const [name, colour, turn] of [["swapOut", palette.swap, -1], ["swapIn", palette.host, 1]]) {
      const values = Float64Array.from(from, (a, px) => store.sum(name, a, to[px]));
      let most = 0;
      for (const value of values) most = Math.max(most, value);
      if (!most) continue;
      context.fillStyle = colour;
      for (let px = 0; px < values.length; px++) if (values[px] > 0) context.fillRect(GUTTER + px, middle, 1, turn * Math.max(1.5, (values[px] / most) * reach));
    }
    context.fillStyle = palette.bad;
    for (let px = 0; px < from.length; px++) if (store.sum("preempted", from[px], to[px]) > 0 || store.sum("failed", from[px], to[px]) > 0) context.fillRect(GUTTER + px, band.bottom, 1, 4);
  }

  #moves(band, palette, from, to, x) {
    const { context } = this.surface, store = this.app.store, middle = (band.top + band.bottom) / 2;
    const mark = (time, colour, turn) => {
      const at = x(time);
      context.fillStyle = colour;
      context.beginPath();
      context.moveTo(at - 4, middle + 4 * turn); context.lineTo(at + 4, middle + 4 * turn); context.lineTo(at, middle - 4 * turn);
      context.fill();
    };
    for (let i = from; i < to; i++) {
      const time = store.steps.t[i];
      if (store.sum("swapOut", i, i + 1) > 0) mark(time, palette.swap, 1);
      if (store.sum("swapIn", i, i + 1) > 0) mark(time, palette.host, -1);
      if (store.sum("preempted", i, i + 1) > 0) { context.fillStyle = palette.bad; context.fillRect(x(time) - 1, band.top, 2, band.bottom - band.top); }
    }
  }

  #pool(band, palette, view, width) {
    const { context } = this.surface, store = this.app.store;
    const most = (store.head?.limits.num_blocks || [1]).reduce((a, b) => a + b, 0) || 1, high = band.bottom - band.top;
    const area = (value, colour) => {
      context.fillStyle = colour;
      context.beginPath();
      context.moveTo(GUTTER, band.bottom);
      for (let px = 0; px <= width; px += 2) {
        const index = store.stepAt(view.from + (px / width) * (view.to - view.from)) - 1;
        context.lineTo(GUTTER + px, band.bottom - (index < 0 ? 0 : Math.min(1, value(index) / most)) * high);
      }
      context.lineTo(GUTTER + width, band.bottom);
      context.fill();
    };
    area((i) => store.steps.used[i] + store.steps.cachedBlocks[i], palette.cached);
    area((i) => store.steps.used[i], palette.forward);
  }

  #gaps(palette, bottom, x) {
    const { context } = this.surface;
    context.fillStyle = palette.bad;
    for (const gap of this.app.store.gaps) context.fillRect(x(gap.t), 0, 1.5, bottom);
  }

  #labels(bands, palette) {
    const { context } = this.surface;
    context.textAlign = "right";
    context.fillStyle = palette["fg-2"];
    const put = (text, y) => context.fillText(text, GUTTER - 8, y);
    put(count(this.most || 0), bands.tokens.top + 6);
    put("tokens", (bands.tokens.top + bands.tokens.bottom) / 2);
    put("0", bands.tokens.bottom - 5);
    put("time", (bands.time.top + bands.time.bottom) / 2);
    put("moves", (bands.moves.top + bands.moves.bottom) / 2);
    put("KV in use", (bands.pool.top + bands.pool.bottom) / 2);
  }

  #hover(view, palette, width, bottom) {
    const { context, pointer } = this.surface, store = this.app.store;
    const time = view.from + ((pointer.x - GUTTER) / width) * (view.to - view.from);
    context.fillStyle = palette.accent;
    context.fillRect(pointer.x, 0, 1, bottom);
    const span = ((view.to - view.from) / width) * 2;
    let index = store.stepOver(time);
    if (index < 0) {
      const near = store.stepAt(time);
      if (near < store.steps.count && store.steps.t[near] - time <= store.sum("idle", near, near + 1)) {
        showTip(this.surface, "idle", [["nothing in flight for", seconds(store.sum("idle", near, near + 1)), palette.idle]]);
        return;
      }
      index = near - 1;
      if (index < 0 || time - store.steps.t[index] - store.steps.s[index] > Math.max(span, 0.02)) { hideTip(); return; }
    }
    showTip(this.surface, `step ${store.steps.number[index]}`, this.factsOf(index, palette));
  }

  /** Return the numbers of a step as rows. */
  factsOf(index, palette) {
    const store = this.app.store, { steps } = store, of = (name) => store.sum(name, index, index + 1);
    const rows = [
      ["took", seconds(steps.s[index])],
      ...PARTS.map((part) => [part, seconds(of(part)), palette[part]]).filter((row) => row[1] !== "0"),
      ["idle before", seconds(of("idle")), palette.idle],
      ["prefill tokens", count(of("prefill")), palette.prefill],
      ["decode tokens", count(of("decode")), palette.decode],
    ];
    if (of("drafted")) rows.push(["drafts, accepted", `${count(of("drafted"))}, ${count(of("accepted"))}`, palette.draft]);
    if (of("swapOut") || of("swapIn")) rows.push(["blocks out, in", `${count(of("swapOut"))}, ${count(of("swapIn"))}`, palette.swap]);
    rows.push(["rows, waiting", `${steps.rows[index]}, ${steps.wait[index]}`], ["KV blocks in use", count(steps.used[index])]);
    if (of("preempted")) rows.push(["preempted", count(of("preempted")), palette.bad]);
    if (store.fails[index]) rows.push(["failed", store.fails[index].slice(0, 120), palette.bad]);
    return rows;
  }

  /** Show the window's time by phase, as a table, and the step at its end in words. */
  #renewTable(view, palette, from, to) {
    const store = this.app.store, { steps } = store;
    const first = store.stepAt(view.from), idle = store.idleWithin(view.from, first, to), all = store.sum("busy", first, to) + idle, number = to - first;
    const parts = [...PARTS, "unknown", "idle"].map((part) => [part, part === "idle" ? idle : store.sum(part, first, to)])
      .filter(([part, taken]) => taken > (part === "unknown" ? all * 0.001 : 0));
    const make = () => element("tr", {}, element("th", { scope: "row" }, element("i", { className: "dot" }), element("span")), element("td"), element("td"),
      element("td", { className: "bars" }, element("i", { className: "bar" })));
    syncChildren(this.table, parts, make, ({ cells }, [part, taken]) => {
      const bar = cells[3].firstChild;
      cells[0].firstChild.style.background = bar.style.background = part === "unknown" ? palette.shared : palette[part];
      setText(cells[0].lastChild, part === "unknown" ? "other" : part);
      setText(cells[1], percent(taken, all));
      setText(cells[2], number ? seconds(taken / number) : "–");
      bar.style.width = `${all > 0 ? (100 * taken) / all : 0}%`;
    });
    const stride = Math.max(1, Math.floor(number / 4096)), sample = new Float64Array(Math.ceil(Math.max(0, number) / stride));
    for (let i = 0; i < sample.length; i++) sample[i] = steps.s[first + i * stride];
    const summary = number > 0 ? `${count(number)} steps: p50 ${seconds(quantile(sample, 0.5))}, p95 ${seconds(quantile(sample, 0.95))}, `
      + `longest ${seconds(quantile(sample, 1))}.` : "No steps in this window.";
    const last = to - 1;
    const now = last >= 0 ? ` Step ${steps.number[last]}: ${count(store.sum("prefill", last, to))} prefill and `
      + `${count(store.sum("decode", last, to))} decode tokens in ${seconds(steps.s[last])}, ${steps.rows[last]} rows.` : "";
    setText(this.facts, summary + now);
  }
}
