// Overlays of the page: short messages, and the dialog with the request as code.
// Does not: know conversations; `parts` gives the request.

import { button, copyButton, make } from "./chat-dom.js";
import { curlOf, pythonOf } from "./chat-request.js";

const TOAST_MS = 10_000;
const MAX_TOASTS = 4;

/** Show a short message, with a button for an action. */
export function toast(words, label = null, act = null) {
  const list = document.getElementById("toasts");
  const element = make("div", { class: "toast panel" }, make("span", {}, words));
  const close = () => element.remove();
  if (label) {
    element.append(button(label, { class: "button small" }, () => {
      close();
      act();
    }));
  }
  element.append(button("×", { class: "button quiet small", "aria-label": "Close the message" }, close));
  list.append(element);
  while (list.children.length > MAX_TOASTS) list.firstElementChild.remove();
  setTimeout(close, TOAST_MS);
}

/** The dialog that shows a request as curl and Python. `parts` returns {base, body, usesKey}, or null. */
export class CodeDialog {
  constructor(parts) {
    this.parts = parts;
    this.write = curlOf;
    this.dialog = document.getElementById("code-dialog");
    this.shown = document.querySelector("#code code");
    this.keyHint = document.getElementById("code-key");
    this.tabs = [["as-curl", curlOf], ["as-python", pythonOf]].map(([id, write]) => [document.getElementById(id), write]);
    for (const [tab, write] of this.tabs) {
      tab.addEventListener("click", () => {
        this.write = write;
        this.#draw();
      });
    }
    document.getElementById("copy-code").replaceWith(copyButton("Copy", () => this.shown.textContent, { class: "button primary", "data-action": "copy-code" }));
  }

  /** Show the request as it is now. */
  open() {
    this.given = this.parts();
    if (!this.given) return;
    this.#draw();
    this.dialog.showModal();
  }

  #draw() {
    for (const [tab, write] of this.tabs) tab.setAttribute("aria-pressed", String(write === this.write));
    this.keyHint.hidden = !this.given.usesKey;
    this.shown.textContent = this.write(this.given.base, this.given.body, this.given.usesKey);
  }
}
