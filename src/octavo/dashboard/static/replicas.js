// The replicas of a fleet: a table above the views, and the replica whose steps the views show.
import { count, element, percent, seconds, setText, syncChildren } from "./format.js";

const REPLICA_COLUMNS = ["replica", "state", "running", "waiting", "KV in use", "prefix hits", "tokens/s", "restarts", "link"];

export class Replicas {
  /** `choose` is called with a replica's number. */
  constructor(choose) {
    this.panel = document.getElementById("replicas");
    this.body = this.panel.querySelector("tbody");
    this.chosen = 0;
    this.previous = new Map(); // number -> [time, output tokens] of the last look
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-name]");
      if (!row || Number(row.dataset.name) === this.chosen) return;
      this.chosen = Number(row.dataset.name);
      choose(this.chosen);
      this.#mark();
    });
  }

  /** Show these rows, by number, and those of their ranks; a server with one replica and one rank has no table. */
  take(found, now = performance.now() / 1000) {
    const rows = Object.values(found);
    const lines = rows.flatMap((each) => [[each, null], ...(each.ranks || []).map((rank) => [each, rank])]);
    this.panel.hidden = lines.length < 2;
    if (this.panel.hidden) return;
    syncChildren(this.body, lines, () => this.#newRow(), (row, [each, rank]) => this.#fill(row, rank ? rankTexts(rank) : this.#texts(each, now), rank ? "" : String(each.number)));
    this.#mark();
  }

  hide() { this.panel.hidden = true; }

  #mark() {
    for (const row of this.body.rows) {
      const isChosen = row.dataset.name === String(this.chosen);
      row.classList.toggle("chosen", isChosen);
      row.cells[0].firstChild.setAttribute("aria-pressed", String(isChosen));
    }
  }

  #newRow() {
    return element("tr", {}, ...REPLICA_COLUMNS.map((name, i) => {
      const td = element("td", {}, ...(i === 0 ? [element("button", { type: "button", className: "link" })] : []));
      td.dataset.label = name;
      if (i > 1) td.className = "num";
      return td;
    }));
  }

  #texts(each, now) {
    const before = this.previous.get(each.number), tokens = each.output_tokens;
    this.previous.set(each.number, [now, tokens]);
    const rate = before && tokens >= before[1] && now > before[0] ? (tokens - before[1]) / (now - before[0]) : NaN;
    return [`${each.number}  ${each.where}`, each.state, count(each.running), count(each.waiting), percent(each.kv_usage, 1),
      percent(each.hit_tokens, each.queried_tokens), count(rate), count(each.restarts), each.rtt_s ? seconds(each.rtt_s) : "–"];
  }

  #fill(row, texts, name) {
    if (name) row.dataset.name = name; else delete row.dataset.name;
    setText(row.cells[0].firstChild, texts[0]);
    texts.slice(1).forEach((text, i) => setText(row.cells[i + 1], text));
    row.cells[1].className = texts[1] === "ready" ? "good" : "bad";
  }
}

function rankTexts(rank) { return [`rank ${rank.rank}  ${rank.where}`, rank.state, "", "", "", "", "", "", ""]; }
