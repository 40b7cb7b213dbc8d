// The panels next to the messages, and the theme. On a narrow screen a panel lies over the page and closes again.

import { shownTheme, toggleTheme } from "./theme.js";

const KEY = "octavo.chat.panels";
const NAMES = ["list", "settings"];
const narrow = matchMedia("(max-width: 64rem)");

/** Opens and closes the panels; which are open is kept in this browser, for wide screens. */
export class Panels {
  constructor() {
    this.open = { list: !narrow.matches, settings: false };
    if (!narrow.matches) this.#load();
    for (const name of NAMES) this.#button(name).addEventListener("click", () => this.toggle(name));
    narrow.addEventListener("change", () => {
      if (narrow.matches) this.closeDrawers();
      else this.#load();
      this.#draw();
    });
    const theme = document.getElementById("theme");
    theme.addEventListener("click", () => {
      toggleTheme();
      this.#draw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    this.#draw();
  }

  /** Open or close a panel. */
  toggle(name) {
    if (this.open[name]) this.close(name);
    else {
      this.show(name);
      this.#panel(name).querySelector("button, input, textarea, select")?.focus();
    }
  }

  /** Open a panel; on a narrow screen the other one closes. */
  show(name) {
    if (narrow.matches) for (const other of NAMES) this.open[other] = false;
    this.open[name] = true;
    this.#keep();
  }

  /** Close a panel; the focus goes to its button if it was in it. */
  close(name) {
    const hadFocus = this.hasFocus(name);
    this.open[name] = false;
    this.#keep();
    if (hadFocus) this.#button(name).focus();
  }

  /** Close a panel over the page; return true if one was open. */
  closeDrawers() {
    const opened = narrow.matches ? NAMES.filter((name) => this.open[name]) : [];
    for (const name of opened) this.close(name);
    return opened.length > 0;
  }

  /** Return true if the focus is in a panel. */
  hasFocus(name) {
    return this.#panel(name).contains(document.activeElement);
  }

  #panel(name) {
    return document.getElementById(`${name}-panel`);
  }

  #button(name) {
    return document.getElementById(`toggle-${name}`);
  }

  #keep() {
    this.#draw();
    if (narrow.matches) return;
    try {
      localStorage.setItem(KEY, JSON.stringify(this.open));
    } catch {
      // no storage: only for this visit
    }
  }

  #load() {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
      for (const name of NAMES) if (typeof kept[name] === "boolean") this.open[name] = kept[name];
    } catch {
      // the defaults
    }
  }

  #draw() {
    for (const name of NAMES) {
      this.#panel(name).hidden = !this.open[name];
      this.#button(name).setAttribute("aria-expanded", String(this.open[name]));
    }
    const other = shownTheme() === "dark" ? "Light" : "Dark";
    document.getElementById("theme").textContent = other;
    document.getElementById("theme").setAttribute("aria-label", `${other} colours`);
  }
}
