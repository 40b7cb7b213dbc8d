// Elements with text. Owns: the only way in which the chat page makes elements from data.
// Does not: take HTML, style attributes or handlers as text. A model's text is passed as string children.

const ATTRIBUTES = new Set([
  "class", "id", "href", "rel", "target", "type", "title", "role", "tabindex", "start", "scope", "for", "name", "value",
  "placeholder", "rows", "min", "max", "step", "disabled", "checked", "hidden", "open", "selected", "spellcheck",
  "alt", "src", "autocomplete", "inputmode", "download", "accept", "lang", "dir", "maxlength", "data-name", "data-action",
]);

/** Make an element. Attributes that are null or false are left out, and true is the empty string. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (!ATTRIBUTES.has(name) && !name.startsWith("aria-")) throw new Error(`no attribute ${name} is set here`);
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

/** Make a button with a handler. */
export function button(label, attributes, act) {
  const element = make("button", { type: "button", class: "button quiet", ...attributes }, label);
  element.addEventListener("click", act);
  return element;
}

/** Redraw the content of a container; the focus, if it was inside, stays at the same button or near it. */
export function redrawn(container, redraw) {
  const { activeElement: focused } = document;
  const had = container.contains(focused) ? (focused.dataset.action ?? "") : null;
  redraw();
  if (had === null || (container.contains(document.activeElement) && document.activeElement.checkVisibility())) return;
  const shown = [...container.querySelectorAll("button:not(:disabled)")].filter((one) => one.checkVisibility());
  (shown.find((one) => one.dataset.action === had) ?? shown[0] ?? container.closest("[tabindex]"))?.focus();
}

/** Put a text into the clipboard; return whether that worked. Pages without TLS only have the old API. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    focused?.focus?.();
    return worked;
  }
}

/** Make a button that copies what `read` gives, and says so. */
export function copyButton(label, read, attributes = {}) {
  const element = button(label, attributes, async () => {
    element.textContent = (await copyText(read())) ? "Copied" : "Not copied";
    setTimeout(() => (element.textContent = label), 1500);
  });
  return element;
}

/** Return random letters and digits, for names that cannot be guessed by accident. */
export function randomName(length = 12) {
  return Array.from(crypto.getRandomValues(new Uint8Array(length)), (byte) => "0123456789abcdefghijklmnopqrstuv"[byte & 31]).join("");
}
