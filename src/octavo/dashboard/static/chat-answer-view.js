// One answer on the page: its thinking, text and calls, token by token if requested, and its figures.
// Owns: these elements. Does not: know conversations.

import { button, make } from "./chat-dom.js";
import { Markdown } from "./chat-render.js";
import { callsOf } from "./chat-request.js";
import { answerParts, number, requestParts } from "./chat-stats.js";
import { TokensView } from "./chat-tokens.js";

/** The view of an answer that grows. */
export class AnswerView {
  #text = null; // the text shown
  #thought = null;
  #figures = null;
  #numTokens = -1;
  #settled = null; // the data from which an ended answer was drawn
  #place = " false";

  constructor(answer) {
    this.answer = answer;
    this.showsTokens = false;
    this.title = make("div", { class: "answer-head", hidden: true });
    this.thoughtLine = make("summary", {});
    this.thoughtText = make("div", { class: "markdown" });
    this.thought = make("details", { class: "reasoning", hidden: true }, this.thoughtLine, this.thoughtText);
    this.text = make("div", { class: "markdown" });
    this.tokens = new TokensView();
    this.tokens.element.hidden = true;
    this.calls = make("div", { class: "calls" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.figures = make("p", { class: "figures muted" });
    this.element = make("div", { class: "answer" }, this.title, this.thought, this.text, this.tokens.element, this.calls, this.error, this.figures);
    this.markdown = new Markdown(this.text);
    this.thoughtMarkdown = new Markdown(this.thoughtText);
    this.thought.addEventListener("toggle", () => this.#showThought());
  }

  /** Show its current state. `rate` is tokens a second so far; `place` [number, of, pick] if it is one of several. */
  update({ isRunning, rate, place }) {
    const { answer } = this;
    const settled = isRunning ? null : [answer.content, answer.finish, answer.error, answer.stats, place ? `${place[0]} ${place[1]}` : ""];
    if (settled && this.#settled?.every((value, index) => value === settled[index])) return; // unchanged
    this.#settled = settled;
    this.element.classList.toggle("running", isRunning);
    this.#showPlace(place);
    this.#showThought(isRunning);
    if (answer.content !== this.#text && show(this.markdown, answer.content, isRunning)) this.#text = answer.content;
    if (this.showsTokens && answer.tokens.length !== this.#numTokens) this.tokens.show(answer.tokens);
    this.#numTokens = this.showsTokens ? answer.tokens.length : -1;
    this.#showCalls();
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error?.message ?? "";
    this.#showFigures(isRunning, rate, place !== null);
  }

  /** Change between the text and its tokens; return whether the tokens are shown now. */
  toggleTokens() {
    this.showsTokens = !this.showsTokens;
    this.tokens.element.hidden = !this.showsTokens;
    this.text.hidden = this.showsTokens;
    this.thought.classList.toggle("off", this.showsTokens);
    if (this.showsTokens) this.tokens.show(this.answer.tokens);
    return this.showsTokens;
  }

  #showPlace(place) {
    const words = place ? `Answer ${place[0]} of ${place[1]}` : "";
    const key = `${words} ${this.answer.tokens.length > 0}`;
    if (key === this.#place) return;
    this.#place = key;
    this.title.hidden = !place;
    if (!place) return;
    const use = button("Use this", { class: "button small", "data-action": "use", "aria-label": `Go on with answer ${place[0]}` }, () => place[2]());
    const toggle = (event) => event.currentTarget.setAttribute("aria-pressed", String(this.toggleTokens()));
    const tokens = button("Tokens", { class: "button quiet small", "data-action": "tokens", "aria-pressed": String(this.showsTokens) }, toggle);
    this.title.replaceChildren(make("span", {}, words), ...(this.answer.tokens.length ? [tokens] : []), use);
  }

  #showThought(isRunning = false) {
    const { answer } = this;
    this.thought.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    this.thoughtLine.textContent = isRunning && !answer.content ? "Thinking…" : "Thoughts";
    if (this.thought.open && answer.reasoning !== this.#thought) {
      if (show(this.thoughtMarkdown, answer.reasoning, isRunning)) this.#thought = answer.reasoning;
    }
  }

  #showCalls() {
    callsOf(this.answer).forEach((call, index) => {
      if (!this.calls.children[index]) {
        const line = make("summary", {}, "Calls ", make("code", {}, call.name));
        this.calls.append(make("details", { class: "call", open: true }, line, make("pre", { tabindex: "0" }, make("code"))));
      }
      const shown = this.calls.children[index].querySelector("pre code");
      const words = pretty(call.arguments);
      if (shown.textContent !== words) shown.textContent = words;
    });
  }

  #showFigures(isRunning, rate, isOneOfSeveral) {
    const running = rate && !isOneOfSeveral ? [{ label: "rate", words: `≈ ${number(rate)} tokens/s`, title: "as they come" }] : [];
    const ended = () => [...(isOneOfSeveral ? [] : requestParts(this.answer.stats)), ...answerParts(this.answer)];
    const parts = isRunning ? running : ended();
    const key = parts.map((part) => part.words).join("|");
    if (key === this.#figures) return;
    this.#figures = key;
    this.figures.replaceChildren(...figures(parts));
  }
}

function show(markdown, text, isRunning) {
  if (isRunning) return markdown.showGrowing(text);
  markdown.show(text);
  return true;
}

/** Make the elements of figures. */
export const figures = (parts) => parts.map(({ label, words, title }) => make("span", { class: `figure ${label}`, title }, words));

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete, or no JSON
  }
}
