// View 3: the waiting requests, with reasons and numbers.
import { count, element, seconds, setText, syncChildren } from "./format.js";

const REASONS = {
  token_budget: "the step's tokens are spent", sequence_cap: "every sequence slot is taken", kv_blocks: "too few KV blocks are free",
  headroom: "blocks are held back for those that run", kv_read_budget: "the step reads enough KV already", encoder_budget: "the encoder's budget is spent",
  adapter_slots: "no adapter slot is free", partial_prefill_cap: "enough prompts are in parts already", modality: "its kind of input waits",
  composition: "it does not go with what runs", grammar: "its grammar is being compiled", swap_space: "no host blocks are free",
  host_load: "its blocks come back from the host", fork_blocks: "no blocks for its choices", preempted_this_step: "it was preempted in this step",
  uncommitted: "its last step is not committed", barrier: "a step has to end first", behind: "others are before it", paused: "the engine is paused",
  draining: "the engine drains", idle: "there is nothing to do", excluded: "it is set aside",
};
const COLUMNS = ["name", "tenant", "reason", "needed", "available", "waited", "tokens"];

/** The meaning of each reason, in words. */
export function reasonInWords(reason) { return REASONS[reason] || reason; }

export class Queue {
  constructor(app) {
    this.app = app;
    this.table = document.getElementById("waiting");
    this.body = this.table.querySelector("tbody");
    this.reasons = document.getElementById("reasons");
    this.note = document.getElementById("queue-note");
    this.by = -1; // column; -1: the queue's own order
    this.isDown = false;
    this.shown = null;
    this.table.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => this.#sortBy(column)));
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row?.dataset.name) app.showRequest(row.dataset.name);
    });
  }

  #sortBy(column) {
    if (this.by === column && this.isDown) { this.by = -1; this.isDown = false; }
    else { this.isDown = this.by === column; this.by = column; }
    this.table.querySelectorAll("th").forEach((th, i) => {
      th.setAttribute("aria-sort", i !== this.by ? "none" : this.isDown ? "descending" : "ascending");
    });
    this.shown = null;
    this.app.draw();
  }

  draw(view) {
    const store = this.app.store, look = store.lookAt(store.queues, view.to);
    const key = `${look && look.t}|${this.by}|${this.isDown}|${this.app.filter}`;
    if (key === this.shown) return false;
    this.shown = key;
    if (!look) { this.note.textContent = "No look at the queue by this time."; this.body.replaceChildren(); this.reasons.replaceChildren(); return true; }
    this.#reasonBars(look);
    let rows = look.top.filter(([name, tenant, reason]) => this.app.matches(name, tenant, reason));
    if (this.by >= 0) {
      const sign = this.isDown ? -1 : 1, by = this.by;
      rows = [...rows].sort((a, b) => sign * (typeof a[by] === "number" ? a[by] - b[by] : String(a[by]).localeCompare(String(b[by]))));
    }
    this.note.textContent = look.total === 0 ? "No request waits." : `${count(look.total)} wait`
      + (look.top.length < look.total ? `; the first ${look.top.length} are here` : "")
      + (rows.length < look.top.length ? `, ${rows.length} of them match the filter.` : ".");
    syncChildren(this.body, rows, () => this.#newRow(), (row, each) => this.#fill(row, each));
    return true;
  }

  #reasonBars(look) {
    const sorted = Object.entries(look.reasons).sort((a, b) => b[1] - a[1]);
    const make = () => element("li", {}, element("span"), element("b"), element("span", { className: "bars" }, element("i", { className: "bar" })));
    syncChildren(this.reasons, sorted, make, (li, [reason, number]) => {
      setText(li.children[0], reasonInWords(reason));
      setText(li.children[1], count(number));
      li.children[2].firstChild.style.width = `${(100 * number) / Math.max(1, look.total)}%`;
    });
  }

  #newRow() {
    return element("tr", {}, ...COLUMNS.map((name, i) => {
      const td = element("td", {}, ...(i === 0 ? [element("button", { type: "button", className: "link" })] : []));
      td.dataset.label = name;
      if (i > 2) td.className = "num";
      return td;
    }));
  }

  #fill(row, [name, tenant, reason, needed, available, waited, tokens]) {
    const hasNumbers = needed > 0 || available > 0;
    if (row.dataset.name !== name) { row.dataset.name = name; setText(row.cells[0].firstChild, name); }
    const texts = [tenant || "–", reasonInWords(reason), hasNumbers ? count(needed) : "–", hasNumbers ? count(available) : "–", seconds(waited), count(tokens)];
    texts.forEach((text, i) => setText(row.cells[i + 1], text));
  }
}
