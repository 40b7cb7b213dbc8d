// View 4: a lane for each request: queued, prefill, decode, preempted, swapped.
import { Surface, hideTip, showTip, timeAxis } from "./canvas.js";
import { count, seconds, shortName } from "./format.js";
import { LANE_KINDS, PREEMPTED, QUEUED } from "./store.js";

const LANE = 18, LABEL = 168, BELOW = 20;

export class Lanes {
  constructor(app) {
    this.app = app;
    this.surface = new Surface(document.getElementById("lanes"), () => app.draw());
    this.scroller = document.getElementById("lanes-scroller");
    this.spacer = document.getElementById("lanes-spacer");
    this.note = document.getElementById("lanes-note");
    this.hideEnded = document.getElementById("hide-ended");
    this.listed = [];
    this.scroller.addEventListener("scroll", () => app.draw());
    this.hideEnded.addEventListener("change", () => app.draw());
    this.surface.canvas.addEventListener("click", (event) => {
      const request = this.#under(event.offsetY);
      if (request) app.showRequest(request.name);
    });
  }

  #under(y) { return this.listed[Math.floor((y + this.scroller.scrollTop) / LANE)]; }

  draw(view, palette) {
    const { surface } = this, { context } = surface, store = this.app.store;
    const listed = [];
    for (const request of store.order) {
      if (request.arrival > view.to) continue;
      if (request.end < view.from || (this.hideEnded.checked && request.end <= view.to)) continue;
      if (this.app.matches(request.name, request.tenant, request.finish)) listed.push(request);
    }
    if (this.app.mode === "live") { // open requests on top, then those that ended last
      const open = listed.filter((request) => Number.isNaN(request.end)), ended = listed.filter((request) => request.end >= 0);
      listed.splice(0, listed.length, ...open, ...ended.sort((a, b) => b.end - a.end));
    }
    this.listed = listed;
    const tall = Math.max(listed.length * LANE + BELOW, surface.height);
    if (this.tall !== tall) { this.spacer.style.height = `${tall}px`; this.tall = tall; }
    const text = `${count(listed.length)} requests in this window.`;
    if (text !== this.text) { this.note.textContent = text; this.text = text; }
    surface.clear(palette);
    const width = surface.width - LABEL - 8, bottom = surface.height - BELOW;
    if (width < 50) return; // it is not shown yet
    timeAxis(surface, palette, { left: LABEL, width, top: 0, bottom }, view);
    const top = this.scroller.scrollTop, first = Math.floor(top / LANE), last = Math.min(listed.length, Math.ceil((top + bottom) / LANE));
    context.save();
    context.beginPath();
    context.rect(0, 0, surface.width, bottom);
    context.clip();
    for (let i = first; i < last; i++) this.#lane(listed[i], i * LANE - top, view, palette, width);
    context.restore();
    if (surface.pointer) this.#hover(view, palette, width);
  }

  #lane(request, y, view, palette, width) {
    const { context } = this.surface, scale = width / (view.to - view.from);
    const colours = [palette.idle, palette.prefill, palette.decode, palette.bad, palette.swap];
    context.textAlign = "left";
    context.fillStyle = this.app.chosen === request.name ? palette.accent : palette["fg-2"];
    context.fillText(shortName(request.name, 22), 4, y + LANE / 2);
    const { kinds, starts, ends } = request, num = kinds.length;
    for (let k = num - 1; k >= 0; k--) {
      const kind = kinds[k], isOpen = k === num - 1 && Number.isNaN(request.end) && (kind === QUEUED || kind >= PREEMPTED);
      const start = Math.max(starts[k], view.from), end = Math.min(isOpen ? view.to : ends[k], view.to);
      if (ends[k] < view.from && !isOpen) break;
      if (end < start) continue;
      const thin = kind === QUEUED || kind >= PREEMPTED;
      context.fillStyle = colours[kind];
      context.fillRect(LABEL + (start - view.from) * scale, y + (thin ? 7 : 3), Math.max(1, (end - start) * scale), LANE - (thin ? 14 : 6));
    }
    const mark = (time, colour) => {
      if (!(time >= view.from && time <= view.to)) return;
      context.fillStyle = colour;
      context.fillRect(LABEL + (time - view.from) * scale - 1, y + 1, 2, LANE - 2);
    };
    mark(request.first, palette.fg);
    mark(request.end, request.finish === "error" || request.finish === "timeout" ? palette.bad : palette.good);
  }

  #hover(view, palette, width) {
    const { pointer } = this.surface, request = this.#under(pointer.y);
    if (!request || pointer.y > this.surface.height - BELOW) { hideTip(); return; }
    const time = view.from + ((pointer.x - LABEL) / width) * (view.to - view.from);
    let doing = "";
    for (let k = 0; k < request.kinds.length; k++) if (request.starts[k] <= time) doing = LANE_KINDS[request.kinds[k]];
    if (time >= request.end) doing = request.finish;
    showTip(this.surface, request.name, requestFacts(request, view.to, pointer.x >= LABEL ? doing : ""));
  }
}

/** Return the numbers of a request as rows. */
export function requestFacts(request, now, doing) {
  const rows = doing ? [["there", doing]] : [];
  rows.push(["tenant", request.tenant || "–"], ["prompt, cached", `${count(request.prompt)}, ${count(request.cached)}`]);
  if (request.first >= 0) rows.push(["to the first token", seconds(request.first - request.arrival)], ["outputs", count(request.tokens) + (request.maxTokens ? ` of ${count(request.maxTokens)} at most` : "")]);
  if (request.priority) rows.push(["priority", String(request.priority)]);
  if (request.choices > 1) rows.push(["choices", count(request.choices)]);
  if (request.preemptions) rows.push(["preempted", `${count(request.preemptions)} times`]);
  rows.push(request.end >= 0 ? ["ended", `${request.finish} after ${seconds(request.end - request.arrival)}`] : ["open for", seconds(now - request.arrival)]);
  return rows;
}
