// The messages of a conversation on the page. Owns: their elements, and keeping unchanged ones.
// Does not: change a conversation or ask a server; it calls `actions` for that.

import { button, copyButton, make, redrawn } from "./chat-dom.js";
import { imageOf } from "./chat-images.js";
import { AnswerView, figures } from "./chat-answer-view.js";
import { callsOf, shownAnswer } from "./chat-request.js";
import { number, requestParts } from "./chat-stats.js";
import { StoryView } from "./chat-story.js";

const NEAR_END = 48; // pixels
const UNFINISHED = new Set(["length", "stopped", "cut", "refused", "failed", "unsent"]); // these can be continued

/** Shows conversations in a container; `actions` are the buttons' handlers. */
export class MessagesView {
  #views = new WeakMap(); // message -> its view
  #conversation = null;
  #list;
  #scroller;

  constructor(list, scroller, actions) {
    this.#list = list;
    this.#scroller = scroller;
    this.actions = actions;
    this.editing = null; // the message that is being edited
  }

  /** Show a conversation. `run` is its open request, or null. */
  show(conversation, run) {
    const isNew = conversation !== this.#conversation;
    const wasAtEnd = isNew || this.isAtEnd;
    if (isNew) this.editing = null;
    this.#conversation = conversation;
    const elements = conversation.messages.map((message, index) => {
      let view = this.#views.get(message);
      if (!view) {
        view = message.role === "assistant" ? new AssistantView(message, this) : new PlainView(message, this);
        this.#views.set(message, view);
      }
      const isLast = index === conversation.messages.length - 1;
      view.update({ isLast, run: run?.message === message ? run : null, isBusy: run !== null && run !== undefined });
      return view.element;
    });
    reconcile(this.#list, elements);
    if (wasAtEnd) this.toEnd();
  }

  get isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  /** Scroll to the end. */
  toEnd() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  /** Begin or end the editing of a message. */
  edit(message) {
    this.editing = message;
    this.actions.redraw();
    if (message) {
      const area = this.#views.get(message).element.querySelector("textarea");
      area.focus();
      area.setSelectionRange(area.value.length, area.value.length);
    } else document.getElementById("text").focus();
  }
}

function reconcile(list, elements) {
  elements.forEach((element, index) => {
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
  });
  while (list.children.length > elements.length) list.lastElementChild.remove();
}

/** A message of the user or of a tool. */
class PlainView {
  constructor(message, owner) {
    this.message = message;
    this.owner = owner;
    const who = message.role === "tool" ? `Result of ${message.name || "a tool"}` : "You";
    this.body = make("div", { class: "text", dir: "auto" });
    this.buttons = make("div", { class: "buttons" });
    this.element = make("article", { class: `message ${message.role}`, tabindex: "-1", "aria-label": who }, make("h2", {}, who), this.body, this.buttons);
  }

  update({ isBusy }) {
    const { message, owner } = this;
    const isEditing = owner.editing === message;
    if (isEditing === this.wasEditing && isBusy === this.wasBusy) return;
    [this.wasEditing, this.wasBusy] = [isEditing, isBusy];
    if (isEditing) {
      this.body.replaceChildren(editor(message.content, "Send again", (text) => owner.actions.resend(message, text), () => owner.edit(null)));
      this.buttons.replaceChildren();
      return;
    }
    this.body.replaceChildren(message.content, ...(message.images ?? []).map(imageOf));
    const edit = button("Edit", { class: "button quiet small", "data-action": "edit", disabled: isBusy }, () => owner.edit(message));
    const copy = copyButton("Copy", () => message.content, { class: "button quiet small", "data-action": "copy" });
    redrawn(this.buttons, () => this.buttons.replaceChildren(...(message.role === "user" ? [edit] : []), copy));
  }
}

function editor(text, label, save, cancel) {
  const area = make("textarea", { class: "input", rows: Math.min(12, text.split("\n").length + 1), "aria-label": "Edit the message", dir: "auto" });
  area.value = text;
  const form = make(
    "form", { class: "editor" }, area,
    make("div", { class: "buttons" }, make("button", { class: "button primary", "data-action": "save" }, label), button("Cancel", { "data-action": "cancel" }, cancel)),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) save(area.value);
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
  });
  return form;
}

/** The answers to one message: one of them, or several side by side. */
class AssistantView {
  constructor(message, owner) {
    this.message = message;
    this.owner = owner;
    this.answerViews = new Map(); // answer -> its view
    this.who = make("h2", {}, "Answer");
    this.versions = make("div", { class: "versions" });
    this.body = make("div", { class: "answers" });
    this.figures = make("p", { class: "figures muted" }); // of the request, if its answers are side by side
    this.state = make("div", { class: "state" });
    this.story = new StoryView(owner.actions.explain);
    this.buttons = make("div", { class: "buttons" });
    this.element = make("article", { class: "message assistant", tabindex: "-1", "aria-label": "Answer" }, make("div", { class: "head" }, this.who, this.versions), this.body, this.figures, this.state, this.buttons, this.story.element);
  }

  update({ isLast, run, isBusy }) {
    const { message, owner } = this;
    const answers = message.picked === null ? message.answers.slice(message.from) : [message.answers[message.picked]];
    const isEditing = owner.editing === message;
    if (isEditing) {
      if (!this.wasEditing) {
        const save = (text) => owner.actions.rewrite(message, text);
        this.body.replaceChildren(editor(shownAnswer(message).content, "Save", save, () => owner.edit(null)));
      }
    } else {
      if (this.wasEditing) this.body.replaceChildren();
      const elements = () => answers.map((answer, index) => this.#answer(answer, index, answers.length, run));
      redrawn(this.body, () => reconcile(this.body, elements()));
    }
    this.wasEditing = isEditing;
    this.body.classList.toggle("several", answers.length > 1);
    this.element.setAttribute("aria-busy", String(Boolean(run)));
    this.#showState(run);
    this.#showFigures(answers, run);
    const key = [isLast, isBusy, isEditing, message.picked, message.answers.length, shownAnswer(message).finish, shownAnswer(message).tokens.length > 0].join();
    if (key === this.key) return;
    this.key = key;
    redrawn(this.versions, () => this.#showVersions(isBusy));
    redrawn(this.buttons, () => this.#showButtons(isLast, isBusy, isEditing));
  }

  #answer(answer, index, count, run) {
    let view = this.answerViews.get(answer);
    if (!view) {
      view = new AnswerView(answer);
      this.answerViews.set(answer, view);
    }
    const isRunning = Boolean(run) && run.assembly.answers.includes(answer) && answer.finish === null;
    const pick = () => this.owner.actions.pick(this.message, this.message.from + index);
    view.update({ isRunning, rate: isRunning ? run.rate : null, place: count > 1 ? [index + 1, count, pick] : null });
    return view.element;
  }

  #showFigures(answers, run) {
    const isShown = answers.length > 1;
    const stats = isShown ? answers[0].stats : null;
    const parts = isShown && run?.rate ? [{ label: "rate", words: `≈ ${number(run.rate)} tokens/s`, title: "as they come" }] : requestParts(stats);
    const key = parts.map((part) => part.words).join("|");
    if (key === this.figuresKey) return;
    this.figuresKey = key;
    this.figures.replaceChildren(...figures(parts));
  }

  // The reason that a request waits. The box is made once, so that its buttons keep the focus.
  #showState(run) {
    const stage = run?.stage === "answering" && run.trouble ? "stalled" : (run?.stage ?? null);
    if (stage !== this.stage) {
      this.element.classList.toggle("stalled", stage === "stalled");
      this.stage = stage;
      this.words = make("span", {});
      this.why = make("ul", { class: "why", hidden: true });
      const parts = {
        waiting: () => [this.words, " ", button("Why does it wait?", { class: "button quiet small", "data-action": "why", "aria-expanded": "false" }, (event) => tellWhy(run, event.currentTarget)), this.why],
        refused: () => [this.words, " ", button("Try now", { class: "button quiet small", "data-action": "try-now" }, () => run.tryNow())],
        stalled: () => [this.words],
      };
      this.state.replaceChildren(...(parts[stage]?.() ?? []));
    }
    if (stage !== "waiting" && stage !== "refused" && stage !== "stalled") return;
    this.words.textContent = run.words;
    this.why.hidden = !run.reasons;
    const reasons = (run.reasons ?? []).join("\n");
    if (reasons !== this.reasons) this.why.replaceChildren(...(run.reasons ?? []).map((text) => make("li", {}, text)));
    this.reasons = reasons;
  }

  #showVersions(isBusy) {
    const { message, owner } = this;
    const count = message.answers.length;
    if (message.picked === null || count < 2) {
      this.versions.replaceChildren();
      return;
    }
    const step = (label, name, by) => {
      const next = message.picked + by;
      return button(label, { class: "button quiet small", "data-action": name, "aria-label": `${name} answer`, disabled: isBusy || next < 0 || next >= count }, () => owner.actions.pick(message, next));
    };
    this.versions.replaceChildren(step("‹", "previous", -1), make("span", { class: "muted" }, `${message.picked + 1} of ${count}`), step("›", "next", 1));
  }

  #showButtons(isLast, isBusy, isEditing) {
    const { message, owner } = this;
    this.story.hide();
    if (isEditing || message.picked === null) {
      const again = button("Regenerate", { class: "button quiet small", "data-action": "regenerate", disabled: isBusy }, () => owner.actions.regenerate(message));
      this.buttons.replaceChildren(...(isEditing ? [] : [again]));
      return;
    }
    const answer = shownAnswer(message);
    const view = this.answerViews.get(answer);
    const small = (label, action, act, more = {}) => button(label, { class: "button quiet small", "data-action": action, disabled: isBusy, ...more }, act);
    const parts = [
      small("Regenerate", "regenerate", () => owner.actions.regenerate(message)),
      small("Edit", "edit", () => owner.edit(message)),
      copyButton("Copy", () => answer.content, { class: "button quiet small", "data-action": "copy" }),
    ];
    if (isLast && UNFINISHED.has(answer.finish) && answer.content) {
      parts.push(small("Continue", "continue", () => owner.actions.goOn(message)));
    }
    if (answer.tokens.length) {
      parts.push(small("Tokens", "tokens", (event) => event.currentTarget.setAttribute("aria-pressed", String(view.toggleTokens())), { disabled: false, "aria-pressed": String(view.showsTokens) }));
    }
    if (answer.requestId && answer.finish !== null) {
      const tell = (event) => event.currentTarget.setAttribute("aria-expanded", String(this.story.toggle(answer.requestId)));
      parts.push(small("Time", "time", tell, { disabled: false, "aria-expanded": "false", title: "Where the time went" }));
    }
    this.buttons.replaceChildren(...parts);
    const calls = callsOf(answer);
    if (isLast && calls.length && !isBusy) this.buttons.append(resultsForm(calls, (results) => owner.actions.giveResults(message, results)));
  }
}

function tellWhy(run, opener) {
  run.why();
  opener.setAttribute("aria-expanded", String(run.reasons !== null));
}

function resultsForm(calls, send) {
  const fields = calls.map((call) => {
    const area = make("textarea", { class: "input", rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returns` });
    return [call, area];
  });
  const form = make("form", { class: "results" }, fields.map(([call, area]) => make("label", {}, make("span", {}, `Result of ${call.name}`), area)), make("button", { class: "button primary", "data-action": "results" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(fields.map(([call, area]) => ({ role: "tool", callId: call.id, name: call.name, content: area.value })));
  });
  return form;
}
