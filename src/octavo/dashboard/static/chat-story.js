// The time of an answer by the server's account: phases as a bar, and the request's events.
// Owns: these elements. Does not: call the server; `explain` does.

import { make } from "./chat-dom.js";
import { seconds } from "./chat-stats.js";

const PHASES = ["earlier", "queue", "prefill", "decode", "preempted", "recompute"];
const NOT_SHOWN = new Set(["event", "time_s", "step"]);
const GONE = "The server knows it no longer: what became of a request is kept for a while only, and not across restarts.";

/** Return the phases that took time: [{name, words, share}], shares of the whole. */
export function phasesOf(spent) {
  const total = PHASES.reduce((sum, name) => sum + (spent?.[name] ?? 0), 0);
  const found = PHASES.filter((name) => spent?.[name] > 0);
  return found.map((name) => ({ name, words: seconds(spent[name]), share: spent[name] / total }));
}

/** Return the events of a request: [{when, words}]. */
export function eventsOf(explanation) {
  const events = explanation.events ?? [];
  return events.map((event) => {
    const facts = Object.entries(event).filter(([name, value]) => !NOT_SHOWN.has(name) && value !== null && value !== 0);
    const words = facts.map(([name, value]) => `${named(name)} ${value}`).join(", ");
    return { when: seconds(event.time_s), words: `${named(event.event)}${words ? `: ${words}` : ""}` };
  });
}

const named = (name) => name.replace(/^num_/, "").replaceAll("_", " ");

/** The view of one answer's phases and events. */
export class StoryView {
  constructor(explain) {
    this.explain = explain;
    this.element = make("div", { class: "story panel", hidden: true, role: "group", "aria-label": "Where the time went" });
  }

  /** Show the events of a request, or hide them; return true if they are shown. */
  toggle(requestId) {
    this.element.hidden = !this.element.hidden;
    if (!this.element.hidden) this.#load(requestId);
    return !this.element.hidden;
  }

  /** Hide the view. */
  hide() {
    this.element.hidden = true;
  }

  async #load(requestId) {
    this.element.replaceChildren(make("p", {}, "Asking…"));
    try {
      const [explanation] = (await this.explain(requestId)) ?? [];
      this.element.replaceChildren(...(explanation ? storyOf(explanation) : [make("p", {}, GONE)]));
    } catch (error) {
      this.element.replaceChildren(make("p", { class: "error" }, error.message));
    }
    this.element.scrollIntoView({ block: "nearest" });
  }
}

function storyOf(explanation) {
  const phases = phasesOf(explanation.seconds);
  const bar = make("div", { class: "bar-of-time", "aria-hidden": "true" }, phases.map(({ name, share }) => {
    const part = make("span", { class: `phase ${name}` });
    part.style.flexGrow = share;
    return part;
  }));
  const legend = make("ul", { class: "phases" }, phases.map(({ name, words }) => make("li", {}, make("span", { class: `phase ${name}` }), `${name} ${words}`)));
  const left = explanation.num_events_left_out ? `${explanation.num_events_left_out} events in the middle are left out.` : null;
  const rows = eventsOf(explanation).map(({ when, words }) => make("tr", {}, make("td", { class: "side-right" }, when), make("td", {}, words)));
  return [make("p", {}, explanation.text), bar, legend, make("table", {}, make("tbody", {}, rows)), left && make("p", { class: "muted" }, left)].filter(Boolean);
}
