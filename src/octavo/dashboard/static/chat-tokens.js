// An answer token by token, coloured by how sure the model was, with the likeliest others of each.
// Owns: the tokens' elements and the card of the selected one. Does not: compute probabilities (chat-stats does).

import { make } from "./chat-dom.js";
import { percent, surprise, tokenTexts } from "./chat-stats.js";

export const MAX_SHOWN_TOKENS = 10_000;
const LEVELS = ["≥ 90 %", "≥ 60 %", "≥ 30 %", "≥ 10 %", "less"];
let numViews = 0;

/** The tokens of one answer, in a container. */
export class TokensView {
  #tokens = [];
  #current = -1;

  constructor() {
    numViews += 1;
    const id = `token-card-${numViews}`;
    this.card = make("div", { class: "token-card panel", id, role: "status", hidden: true });
    this.list = make("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-describedby": id,
      "aria-label": "Tokens of the answer. Arrow keys go from one to the next and tell its probability.",
    });
    const legend = make(
      "p", { class: "legend muted" }, "probability: ",
      LEVELS.map((words, level) => make("span", { class: `token s${level}` }, words)),
    );
    this.element = make("div", { class: "token-view" }, legend, this.list, this.card);
    this.list.addEventListener("mouseover", (event) => this.#look(indexOf(event.target)));
    this.list.addEventListener("click", (event) => this.#look(indexOf(event.target)));
    this.list.addEventListener("mouseleave", () => this.#look(-1));
    this.list.addEventListener("blur", () => this.#look(-1));
    this.list.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Show the tokens; keep the elements of those already shown. */
  show(tokens) {
    if (tokens.length < this.#tokens.length || tokens[0] !== this.#tokens[0]) {
      this.list.replaceChildren();
      this.#look(-1);
    }
    const shown = tokens.slice(0, MAX_SHOWN_TOKENS);
    const texts = tokenTexts(shown);
    for (let i = this.list.querySelectorAll(".token").length; i < shown.length; i += 1) {
      this.list.append(make("span", { class: `token s${surprise(shown[i].p)}`, "data-name": i }, visible(texts[i])));
      if (texts[i].includes("\n")) this.list.append(make("br"));
    }
    this.#tokens = shown;
  }

  #key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const last = this.#tokens.length - 1;
    let next = null;
    if (event.key in steps) next = Math.max(0, Math.min(last, this.#current + (this.#current < 0 ? 1 : steps[event.key])));
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = last;
    if (event.key === "Escape" && this.#current >= 0) next = -1;
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    this.#look(next);
  }

  #look(index) {
    if (index === this.#current || index === null) return;
    this.#at(this.#current)?.classList.remove("current");
    this.#current = index;
    const token = this.#tokens[index];
    this.card.hidden = !token;
    if (!token) return;
    const element = this.#at(index);
    element.classList.add("current");
    this.card.replaceChildren(...cardOf(token));
    const [inner, outer] = [element.getBoundingClientRect(), this.element.getBoundingClientRect()];
    const left = Math.max(0, Math.min(inner.left - outer.left, outer.width - this.card.offsetWidth));
    this.card.style.left = `${left}px`;
    this.card.style.top = `${inner.bottom - outer.top + 4}px`;
  }

  #at(index) {
    return index < 0 ? null : this.list.querySelector(`[data-name="${index}"]`);
  }
}

const indexOf = (target) => (target.classList.contains("token") ? Number(target.dataset.name) : null);

const visible = (text) => (text === "" ? "◦" : text.replaceAll("\n", "↵").replaceAll("\t", "→"));

const named = (text) => visible(text).replaceAll(" ", "·");

function cardOf(token) {
  const others = token.a ?? [];
  const rank = others.findIndex(([text, p]) => text === token.t && p === token.p);
  const head = make(
    "p", {}, make("code", {}, named(token.t)), ` ${percent(token.p)} `,
    make("span", { class: "muted" }, `log-probability ${token.p}${rank >= 0 ? `, number ${rank + 1}` : ""}`),
  );
  if (!others.length) return [head];
  const rows = others.map(([text, p]) =>
    make(
      "tr", { class: text === token.t ? "chosen" : null }, make("td", {}, make("code", {}, named(text))),
      make("td", {}, make("meter", { min: 0, max: 1, value: Math.exp(p), "aria-label": percent(p) })), make("td", { class: "side-right" }, percent(p)),
    ),
  );
  return [head, make("table", {}, make("tbody", {}, rows))];
}
