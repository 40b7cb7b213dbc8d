// The dashboard: the shown time and selection, and every control. The views draw; the store holds the data.
import { hideTip } from "./canvas.js";
import { count, element, moment, percent, readPalette, seconds, setText } from "./format.js";
import { Lanes, requestFacts } from "./lanes.js";
import { Plots, sampleQuantile } from "./plots.js";
import { Pool } from "./pool.js";
import { Queue, reasonInWords } from "./queue.js";
import { Replicas } from "./replicas.js";
import { Scrub } from "./scrub.js";
import { Feed, embeddedFrames, fileBytes, readFrames } from "./source.js";
import { Store, quantile } from "./store.js";
import { Timeline } from "./timeline.js";
import { loadTheme, toggleTheme } from "./theme.js";

const VIEWS = ["steps", "pool", "queue", "lanes", "plots"];
const LAG_S = 0.3; // delay after the last frame, so that live time flows
const MIN_SPAN_S = 0.002;
const TOTALS_MS = 250;
const RATE_S = 5; // window of the rates in the totals
const FIRST_S = 60; // window of the times to the first token in the totals
const COSTS = 600; // frames whose cost is kept

const byId = (id) => document.getElementById(id);

/** Return the feed's address: for the model that the page's own address names (?model=...), else the default one. */
function feedUrl(replica = null) {
  const words = new URLSearchParams();
  const model = new URLSearchParams(location.search).get("model");
  if (model) words.set("model", model);
  if (replica !== null) words.set("replica", replica);
  return String(words) ? `dashboard/feed?${words}` : "dashboard/feed";
}

class Dashboard {
  constructor() {
    this.store = new Store(true);
    this.isLiveSource = false;
    this.hasServer = false;
    this.mode = "live"; // live, paused, playing
    this.time = NaN; // the right end of the shown window
    this.span = 10;
    this.filter = "";
    this.chosen = "";
    this.costs = new Float64Array(COSTS);
    this.numCosts = 0;
    this.isDirty = true;
    this.palette = readPalette();
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.views = { steps: new Timeline(this), pool: new Pool(this), queue: new Queue(this), lanes: new Lanes(this), plots: new Plots(this) };
    this.scrub = new Scrub(this);
    this.replicas = new Replicas((number) => this.#chooseReplica(number));
    this.feed = new Feed(feedUrl(), (frames) => this.take(frames), (state, words) => this.tell(state, words), (rows) => this.replicas.take(rows));
    this.shownTotals = 0;
    this.last = performance.now();
    this.#connect();
    this.show(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "steps");
    this.tick = this.tick.bind(this);
    requestAnimationFrame(this.tick);
  }

  // --- input

  /** Add frames; live ones are drawn with the next picture. */
  take(frames) {
    const began = performance.now();
    for (const frame of Array.isArray(frames) ? frames : [frames]) this.store.add(frame);
    this.isDirty = true;
    if (this.isLiveSource) this.takeMs = (this.takeMs || 0) + performance.now() - began;
  }

  goLive() {
    this.hasServer = true;
    byId("live").hidden = true;
    if (!this.isLiveSource) { this.store = new Store(true); this.time = NaN; this.isLiveSource = true; this.span = 10; }
    this.mode = "live";
    this.#playLabel();
    this.feed.start();
  }

  /** Show another replica's steps, from the ones that its engine still has. */
  #chooseReplica(number) {
    this.feed.url = feedUrl(number);
    this.isLiveSource = false; // so that its frames do not follow the other's
    this.goLive();
    this.#newData();
  }

  /** Show a file, from its beginning to its end. */
  async openBytes(bytes, name) {
    this.feed.stop();
    this.replicas.hide();
    const before = this.store;
    this.store = new Store(false);
    this.isLiveSource = false;
    this.tell("", `reading ${name}`);
    try {
      const number = await readFrames(bytes, (frames) => this.take(frames));
      if (!number || !this.store.head) throw new SyntaxError("there are no frames in it");
    } catch (error) {
      this.store = before;
      this.tell("trouble", `${name} cannot be shown: ${error.message}`);
      return;
    }
    this.mode = "paused";
    byId("live").hidden = !this.hasServer;
    this.#playLabel();
    this.#newData();
    this.fit();
    this.time = this.store.end;
    const kind = this.store.head.source === "simulation" ? "simulation" : "recording", { numCut } = this.store;
    this.tell("paused", `${kind}${name ? ` ${name}` : ""}, ${count(this.store.numAll)} steps${numCut ? ` (${count(numCut)} more were not written)` : ""}`);
  }

  #newData() {
    this.chosen = "";
    byId("details").hidden = true;
    for (const view of Object.values(this.views)) view.shown = null;
  }

  tell(state, words) {
    const text = words || (state === "live" ? (this.mode === "live" ? "live" : "live, paused here") : state);
    const box = byId("state");
    if (box.textContent !== text) box.textContent = text;
    box.className = state;
  }

  // --- time

  get view() {
    const to = Number.isNaN(this.time) ? 1 : this.time;
    return { from: to - this.span, to, began: this.store.head?.began ?? null, zero: Number.isNaN(this.store.begin) ? 0 : this.store.begin };
  }

  moveTo(time) {
    const { begin, end } = this.store;
    if (this.mode === "live") this.pause();
    this.time = Math.min(Math.max(time, Number.isNaN(begin) ? 0 : begin), Number.isNaN(end) ? 0 : end);
    this.draw();
  }

  pause() {
    this.mode = "paused";
    this.#playLabel();
    if (this.isLiveSource) this.tell("paused", "paused; what comes is kept");
  }

  play() {
    if (this.isLiveSource && !(this.time < this.store.end - 1)) { this.toEnd(); return; }
    if (this.time >= this.store.end - 1e-9) this.time = this.store.begin;
    this.mode = "playing";
    this.#playLabel();
    if (this.isLiveSource) this.tell("paused", "playing what came before");
  }

  playOrPause() { if (this.mode === "paused") this.play(); else this.pause(); this.draw(); }

  toEnd() {
    this.time = this.store.end;
    if (this.isLiveSource) { this.mode = "live"; this.tell("live", ""); } else this.mode = "paused";
    this.#playLabel();
    this.draw();
  }

  /** Move to the end of the next or previous step. */
  stepBy(number) {
    const { steps } = this.store;
    if (!steps.count) return;
    const at = this.store.stepAt(this.time) - 1, index = Math.min(steps.count - 1, Math.max(0, at + number));
    this.moveTo(number > 0 && at + number >= steps.count ? this.store.end : steps.t[index] + 1e-9);
  }

  zoomBy(factor, anchor = this.time) {
    const most = Math.max(1, this.store.end - this.store.begin) * 1.02;
    const span = Math.min(Math.max(this.span * factor, MIN_SPAN_S), most);
    const share = (this.time - anchor) / this.span;
    this.span = span;
    if (this.mode !== "live" && anchor !== this.time) this.time = Math.min(anchor + share * span, this.store.end);
    this.draw();
  }

  fit() {
    this.span = Math.max(0.05, (this.store.end - this.store.begin) * 1.01) || 10;
    if (this.mode !== "live") this.time = this.store.end;
    this.draw();
  }

  #playLabel() { byId("play").textContent = this.mode === "paused" ? "Play" : "Pause"; }

  #advance(seconds_) {
    const { end } = this.store;
    if (Number.isNaN(end)) return;
    if (this.mode === "playing") {
      this.time += seconds_ * Number(byId("speed").value);
      this.isDirty = true;
      if (this.time >= end) { this.time = end; if (this.isLiveSource) this.toEnd(); else this.pause(); }
    } else if (this.mode === "live" && this.time !== end) {
      const behind = end - LAG_S - this.time;
      if (this.calm.matches || !(Math.abs(behind) < 3)) this.time = end;
      else this.time = Math.min(end, this.time + Math.max(0, seconds_ * (1 + Math.max(-0.9, Math.min(3, behind * 2)))));
      this.isDirty = true;
    }
  }

  // --- pictures

  draw() { this.isDirty = true; }

  tick(now) {
    requestAnimationFrame(this.tick);
    this.#advance(Math.min(0.25, (now - this.last) / 1000));
    this.last = now;
    if (!this.isDirty) return;
    this.isDirty = false;
    this.render(performance.now());
  }

  /** Draw the views; record the cost of that and of adding frames since the last time. */
  render(began) {
    const view = this.view, name = this.shownView;
    const hasWritten = this.views[name].draw(view, this.palette, began) === true;
    this.scrub.draw(view, this.palette);
    this.#clock(view);
    const isDue = began - this.shownTotals > TOTALS_MS;
    if (isDue && hasWritten) this.draw(); // one text per picture: the next picture gets the other
    else if (isDue) {
      this.#totals(view);
      this.shownTotals = began;
    } else if (!this.later) this.later = setTimeout(() => { this.later = 0; this.draw(); }, TOTALS_MS); // texts follow, too
    this.costs[this.numCosts++ % COSTS] = performance.now() - began + (this.takeMs || 0);
    this.takeMs = 0;
  }

  /** Return the script time of pictures in milliseconds: {number, p50, p95, most}. */
  cost() {
    const kept = this.costs.slice(0, Math.min(this.numCosts, COSTS));
    return { number: kept.length, p50: quantile(kept, 0.5), p95: quantile(kept, 0.95), most: quantile(kept, 1) };
  }

  #clock(view) {
    const time = moment(view.to, view.began, view.zero), span = seconds(this.span);
    if (byId("clock").value !== time) byId("clock").value = time;
    if (byId("span").value !== span) byId("span").value = span;
  }

  #totals(view) {
    const { store } = this, { steps } = store, to = store.stepAt(view.to), from = store.stepAt(view.to - RATE_S), last = to - 1;
    const since = Math.max(view.to - RATE_S, store.begin), per = (name) => (view.to > since ? store.sum(name, from, to) / (view.to - since) : NaN);
    const sample = last < 0 ? new Float64Array() : steps.s.slice(Math.max(from, to - 512), to), at = (name) => (last < 0 ? NaN : steps[name][last]);
    const blocks = (store.head?.limits.num_blocks || []).reduce((a, b) => a + b, 0);
    const read = (name) => store.sum(name, 0, to), rate = `last ${RATE_S} s`, now = "now", kept = "on this page";
    const totals = store.totalsAt(view.to), over = totals ? "since start" : kept;
    const all = totals ?? { finished: read("finished"), preempted: read("preempted"), found: read("cachedTokens"), looked_up: read("promptTokens") };
    const rows = [
      ["decode tokens/s", count(per("decode")), rate], ["prefill tokens/s", count(per("prefill")), rate],
      ["step p50", seconds(quantile(sample, 0.5)), rate], ["first token p50", seconds(sampleQuantile(store.ttft, view.to - FIRST_S, view.to, 0.5)), `last ${FIRST_S} s`],
      ["running", count(at("run")), now], ["waiting", count(at("wait")), now], ["swapped", count(at("swapped")), now], ["KV in use", percent(at("used"), blocks), now],
      ["finished", count(all.finished), over], ["prefix hits", percent(all.found, all.looked_up), over], ["preemptions", count(all.preempted), over],
    ];
    if (read("drafted")) rows.push(["drafts accepted", percent(read("accepted"), read("drafted")), kept]);
    if (read("failed")) rows.push(["failed steps", count(read("failed")), kept]);
    const box = byId("totals");
    if (box.children.length !== rows.length) {
      box.replaceChildren(...rows.map(() => element("div", {}, element("dt"), element("dd"), element("dd", { className: "over" }))));
    }
    rows.forEach((texts, i) => texts.forEach((text, j) => setText(box.children[i].children[j], text)));
    const model = store.head ? [store.head.model, store.head.device, store.head.limits.policy].filter(Boolean).join(" · ") : "";
    setText(byId("model"), model);
    this.#unused();
    if (!byId("details").hidden) this.#detailFacts();
  }

  /** Show, in place of empty views, that there was no request yet and how to send one. */
  #unused() {
    const isUnused = this.isLiveSource && this.store.isUnused, box = byId("unused");
    if (box.hidden === !isUnused) return;
    box.hidden = !isUnused;
    byId("views").classList.toggle("unused", isUnused);
    if (!isUnused) return;
    const usesKey = hasSignedIn();
    byId("first-key").hidden = !usesKey;
    byId("first-request").textContent = firstRequest(this.store.head.model, usesKey);
  }

  show(name) {
    this.shownView = name;
    for (const each of VIEWS) {
      byId(`view-${each}`).hidden = each !== name;
      const tab = byId(`tab-${each}`);
      tab.setAttribute("aria-selected", String(each === name));
      tab.tabIndex = each === name ? 0 : -1;
    }
    this.views[name].shown = null;
    hideTip();
    history.replaceState(null, "", `#${name}`);
    this.draw();
  }

  matches(...texts) {
    if (!this.filter) return true;
    return texts.some((text) => String(text || "").toLowerCase().includes(this.filter));
  }

  // --- one request

  showRequest(name) {
    const request = this.store.requests.get(name);
    if (!request) return;
    this.chosen = name;
    this.before = document.activeElement;
    byId("details-name").textContent = name;
    const facts = element("dl", { id: "details-facts" }), why = element("div", { id: "details-why" }), story = element("ol", { id: "details-events" });
    byId("details-body").replaceChildren(facts, why, element("h3", {}, "Decisions"), story);
    byId("details").hidden = false;
    this.numEvents = -1;
    this.#detailFacts();
    byId("details-close").focus();
    if (this.isLiveSource && Number.isNaN(request.end)) this.#explain(name, why);
    this.draw();
  }

  #detailFacts() {
    const request = this.store.requests.get(this.chosen), facts = byId("details-facts");
    if (!request || !facts) return;
    facts.replaceChildren(...requestFacts(request, this.view.to, "").flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    const view = this.view, known = request.events.filter(([, fields]) => !(fields.t > view.to));
    if (known.length === this.numEvents) return;
    this.numEvents = known.length;
    byId("details-events").replaceChildren(...known.map(([kind, fields]) => element("li", {},
      element("b", {}, `${moment(fields.t, view.began, view.zero)} ${kind.replace("_", " ")}`), eventInWords(fields))));
  }

  async #explain(name, place) {
    const answer = await fetch(`v1/requests/${encodeURIComponent(name)}/explain`).catch(() => null);
    if (!answer?.ok || this.chosen !== name) return; // ended by now, or another tenant's: the decisions below have its facts
    const body = await answer.json();
    place.replaceChildren(element("h3", {}, "Why"), element("pre", { className: "explained" }, explanationText(body)));
  }

  closeDetails() {
    byId("details").hidden = true;
    this.chosen = "";
    this.before?.focus?.();
    this.draw();
  }

  // --- controls

  #connect() {
    const click = (id, act) => byId(id).addEventListener("click", act);
    for (const [i, name] of VIEWS.entries()) {
      click(`tab-${name}`, () => this.show(name));
      byId(`tab-${name}`).addEventListener("keydown", (event) => {
        const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!turn) return;
        event.stopPropagation();
        const next = VIEWS[(i + turn + VIEWS.length) % VIEWS.length];
        this.show(next);
        byId(`tab-${next}`).focus();
      });
    }
    click("play", () => this.playOrPause());
    click("to-begin", () => this.moveTo(this.store.begin));
    click("to-end", () => this.toEnd());
    click("step-back", () => this.stepBy(-1));
    click("step-on", () => this.stepBy(1));
    click("zoom-in", () => this.zoomBy(0.5));
    click("zoom-out", () => this.zoomBy(2));
    click("fit", () => this.fit());
    click("theme", () => this.#retheme(toggleTheme));
    click("help", () => this.#help());
    click("menu", () => this.#menu(byId("menu").getAttribute("aria-expanded") !== "true"));
    click("live", () => { this.goLive(); this.#newData(); });
    click("open", () => byId("file").click());
    click("details-close", () => this.closeDetails());
    byId("file").addEventListener("change", () => this.#openFile(byId("file").files[0]));
    byId("filter").addEventListener("input", () => { this.filter = byId("filter").value.trim().toLowerCase(); this.draw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#retheme(() => {}));
    document.addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
    document.addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("dropping"); this.#openFile(event.dataTransfer.files[0]); });
    for (const id of ["timeline", "lanes"]) this.#dragAndZoom(byId(id));
  }

  #retheme(change) {
    change();
    this.palette = readPalette();
    for (const view of Object.values(this.views)) view.shown = null;
    this.draw();
  }

  #help() {
    const { number, p50, most } = this.cost();
    byId("cost").textContent = number ? `Pictures cost ${p50.toFixed(1)} ms of script, at most ${most.toFixed(1)} ms.` : "";
    byId("keys").showModal();
  }

  /** Show or hide the header's controls on a narrow screen; on others they are always shown. */
  #menu(isOpen) {
    byId("menu").setAttribute("aria-expanded", String(isOpen));
    byId("actions").classList.toggle("open", isOpen);
  }

  async #openFile(file) {
    byId("file").value = "";
    if (!file) return;
    try { await this.openBytes(await fileBytes(file), file.name); } catch (error) { this.tell("trouble", `${file.name} cannot be shown: ${error.message}`); }
  }

  /** Zoom around the pointer by the wheel, move by dragging. The lanes scroll by the wheel: there ctrl zooms. */
  #dragAndZoom(canvas) {
    const left = canvas.id === "timeline" ? 64 : 168;
    canvas.addEventListener("wheel", (event) => {
      if (canvas.id === "lanes" && !event.ctrlKey) return;
      event.preventDefault();
      const width = canvas.clientWidth - left - 8, at = this.view.from + ((event.offsetX - left) / width) * this.span;
      this.zoomBy(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), this.mode === "live" ? this.time : at);
    }, { passive: false });
    let from = null;
    canvas.addEventListener("pointerdown", (event) => { if (event.button === 0) from = { x: event.clientX, time: this.time }; });
    canvas.addEventListener("pointermove", (event) => {
      if (!from || Math.abs(event.clientX - from.x) < 3) return;
      canvas.setPointerCapture(event.pointerId);
      this.moveTo(from.time - ((event.clientX - from.x) / (canvas.clientWidth - left - 8)) * this.span);
    });
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => { from = null; });
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    if (event.key === "Escape") {
      if (document.activeElement === byId("filter")) byId("filter").blur(); else if (!byId("details").hidden) this.closeDetails(); else this.#menu(false);
      return;
    }
    if (event.target.closest("input, select, textarea")) return;
    const far = event.shiftKey ? 1 : 0, acts = {
      " ": () => this.playOrPause(), ArrowLeft: () => (far ? this.moveTo(this.time - this.span / 10) : this.stepBy(-1)),
      ArrowRight: () => (far ? this.moveTo(this.time + this.span / 10) : this.stepBy(1)), Home: () => this.moveTo(this.store.begin), End: () => this.toEnd(),
      "+": () => this.zoomBy(0.5), "=": () => this.zoomBy(0.5), "-": () => this.zoomBy(2), 0: () => this.fit(), "/": () => { this.#menu(true); byId("filter").focus(); },
      "?": () => this.#help(), d: () => this.#retheme(toggleTheme), o: () => byId("open").click(), l: () => { if (!byId("live").hidden) byId("live").click(); },
    };
    VIEWS.forEach((name, i) => { acts[i + 1] = () => this.show(name); });
    const act = acts[event.key];
    if (!act || (event.key === " " && event.target.closest("button, a"))) return;
    event.preventDefault();
    act();
  }
}

/** Return the fields of a decision as a sentence. */
function eventInWords(fields) {
  const parts = [];
  if (fields.reason) parts.push(reasonInWords(fields.reason));
  if (fields.needed || fields.available) parts.push(`needs ${count(fields.needed || 0)}, has ${count(fields.available || 0)}`);
  if (fields.by) parts.push(`for ${fields.by}`);
  if (fields.n) parts.push(`${count(fields.n)} tokens`);
  if (fields.cached) parts.push(`${count(fields.cached)} found in the cache`);
  if (fields.finish) parts.push(fields.finish);
  if (fields.message) parts.push(fields.message);
  return parts.length ? `: ${parts.join("; ")}` : "";
}

/** Return the answer of /v1/requests/{id}/explain as text: its sentences, else its fields. */
function explanationText(answer) {
  const sentences = answer.explanations || [];
  return sentences.map((each) => (typeof each === "string" ? each : each.text || each.sentence || JSON.stringify(each, null, 2))).join("\n\n")
    || JSON.stringify(answer, null, 2);
}

/** Return a shell command that sends a request to this server. */
function firstRequest(model, usesKey) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }).replace(',"messages"', ',\n       "messages"').replaceAll("'", "'\\''");
  const key = usesKey ? ` \\\n  -H "Authorization: Bearer $OCTAVO_API_KEY"` : "";
  return `curl ${new URL("v1/chat/completions", document.baseURI).href} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${body}'`;
}

/** Return true if the second cookie of a login is set: no script can read the session's. */
function hasSignedIn() { return document.cookie.includes("octavo-signed-in"); }

loadTheme();
const dashboard = window.octavo = new Dashboard();
const embedded = embeddedFrames();
if (embedded) {
  byId("chat").hidden = true;
  dashboard.openBytes(embedded, "");
} else {
  dashboard.goLive();
  byId("logout").hidden = !hasSignedIn();
}
