// The list of conversations, and files of them. Owns: the list's elements, saving and reading a file in the browser.
// Does not: keep conversations; it calls `actions` for that.

import { button, make } from "./chat-dom.js";
import { MAX_FILE_BYTES, titleOf } from "./chat-store.js";

/** The list of conversations; the open one has buttons. */
export class ConversationList {
  #key = null;
  #shown = [[], null, new Set()];
  #renaming = null;

  constructor(list, filter, actions) {
    Object.assign(this, { list, filter, actions });
    filter.addEventListener("input", () => this.#draw());
  }

  /** Show them; `busy` are the ids of those that are being answered. */
  show(conversations, currentId, busy) {
    if (this.#renaming !== currentId) this.#renaming = null;
    this.#shown = [conversations, currentId, busy];
    this.#draw();
  }

  #draw() {
    const [conversations, currentId, busy] = this.#shown;
    const wanted = this.filter.value.trim().toLowerCase();
    const found = conversations.filter((one) => !wanted || hasWords(one, wanted));
    const key = JSON.stringify([found.map((one) => [one.id, titleOf(one), busy.has(one.id)]), currentId, this.#renaming]);
    if (key === this.#key) return;
    this.#key = key;
    const focused = document.activeElement?.closest?.("#conversations") ? document.activeElement.dataset.name : null;
    this.list.replaceChildren(...found.map((one) => this.#item(one, one.id === currentId, busy.has(one.id))));
    if (!found.length) this.list.append(make("li", { class: "muted" }, "None"));
    if (!focused) return;
    const same = [...this.list.querySelectorAll("button")].find((one) => one.dataset.name === focused);
    (same ?? this.list.querySelector('[aria-current="true"]') ?? this.filter).focus(); // it may have been deleted
  }

  #item(conversation, isCurrent, isBusy) {
    const { id } = conversation;
    if (this.#renaming === id) return make("li", {}, this.#renameForm(conversation));
    const title = button(titleOf(conversation), { class: "button quiet title", "aria-current": isCurrent ? "true" : null, "data-name": `open-${id}`, title: titleOf(conversation) }, () => this.actions.open(id));
    if (isBusy) title.append(make("span", { class: "busy", role: "img", "aria-label": "is being answered" }));
    if (!isCurrent) return make("li", {}, title);
    const small = (label, action, act) => button(label, { class: "button quiet small", "data-action": action, "data-name": `${action}-${id}` }, act);
    const buttons = make(
      "div", { class: "buttons" }, small("Rename", "rename", () => this.#rename(id)), small("Export", "export", () => this.actions.save(id)), small("Delete", "delete", () => this.actions.remove(id)),
    );
    return make("li", {}, title, buttons);
  }

  #rename(id) {
    this.#renaming = id;
    this.#draw();
    this.list.querySelector("input").select();
  }

  #renameForm(conversation) {
    const input = make("input", { class: "input", "aria-label": "Name of the conversation", maxlength: 120, value: titleOf(conversation) });
    const form = make("form", { class: "rename" }, input, make("button", { class: "button small" }, "Keep"));
    const end = () => {
      this.#renaming = null;
      this.#draw();
      this.list.querySelector('[aria-current="true"]')?.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#renaming = null;
      this.actions.rename(conversation.id, input.value);
      end();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end();
    });
    return form;
  }
}

function hasWords(conversation, wanted) {
  if (titleOf(conversation).toLowerCase().includes(wanted)) return true;
  const texts = conversation.messages.flatMap((message) => (message.answers ? message.answers.map((answer) => answer.content) : [message.content]));
  return texts.some((text) => text.toLowerCase().includes(wanted));
}

/** Have the browser save a text as a file. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Return the text of the file that was chosen in an input. Throws an Error in words. */
export async function pickFile(input) {
  const [file] = input.files;
  input.value = "";
  if (!file) throw new Error("No file was chosen.");
  if (file.size > MAX_FILE_BYTES) throw new Error(`The file has ${file.size} bytes; at most ${MAX_FILE_BYTES} are read.`);
  return file.text();
}
