// Keys of the chat page. Owns: the key bindings. Does not: the actions.
// Letters without a modifier are text: they are typed into the message field unless another field has the focus.

const FIELDS = "input, textarea, select, [contenteditable]";

/** Listen for keys; `chat` is what they act on. */
export function installKeys(chat) {
  const text = document.getElementById("text");
  text.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229) return; // a letter that is being composed
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      chat.send();
    } else if (event.key === "ArrowUp" && text.value === "") {
      event.preventDefault();
      chat.editLast();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return; // Esc closes it
    if (event.key === "Escape") escape(chat);
    else if (event.altKey && event.shiftKey && !event.ctrlKey && !event.metaKey) {
      const act = shortcuts(chat)[letterOf(event)];
      if (!act) return;
      event.preventDefault();
      act();
    } else if (isText(event) && !event.target.closest(FIELDS)) text.focus(); // the key's letter goes where the focus is
  });
}

// Close a panel over the page first, then stop an answer, then close the settings next to the page.
function escape(chat) {
  if (chat.panels.closeDrawers()) return;
  if (chat.run && !chat.panels.hasFocus("settings")) chat.stop();
  else chat.panels.close("settings");
}

// Alt and Shift: browsers keep them for pages (they are Firefox's access keys) but for A, B, I, T.
const shortcuts = (chat) => ({
  n: () => chat.begin(),
  r: () => chat.regenerate(),
  l: () => chat.toggleTokens(),
  s: () => chat.panels.toggle("settings"),
  c: () => chat.code.open(),
  h: () => document.getElementById("help-dialog").showModal(),
});

// With Option, macOS makes other characters of letters, and not every layout has Latin ones: then the key's place counts.
const letterOf = ({ key, code }) => (/^[a-z]$/i.test(key) ? key : (/^Key([A-Z])$/.exec(code)?.[1] ?? "")).toLowerCase();

function isText({ key, ctrlKey, metaKey, altKey }) {
  return !ctrlKey && !metaKey && !altKey && key !== " " && (key.length === 1 || key === "Dead");
}
