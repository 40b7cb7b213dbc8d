// What keys do on the chat page. Owns: the keys. Does not: do it.

const FIELDS = "input, textarea, select, dialog[open], [contenteditable]";

/** Listen for keys; `chat` is what they act on. */
export function installKeys(chat) {
  const text = document.getElementById("text");
  text.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229) return; // a letter that is being put together
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      chat.send();
    } else if (event.key === "ArrowUp" && text.value === "") {
      event.preventDefault();
      chat.editLast();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.key === "Escape") {
      if (document.querySelector("dialog[open]")) return; // it closes by itself
      if (!chat.panels.closeDrawers()) chat.stop();
      return;
    }
    const act = event.target.closest(FIELDS) ? null : keys(chat)[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

const keys = (chat) => ({
  "/": () => document.getElementById("text").focus(),
  "?": () => document.getElementById("help-dialog").showModal(),
  n: () => chat.begin(),
  r: () => chat.regenerate(),
  t: () => chat.toggleTokens(),
  s: () => chat.panels.toggle("settings"),
  c: () => chat.code.open(),
});
