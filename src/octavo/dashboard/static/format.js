// Numbers and times as text, and colours for the canvas.

/** Return seconds with a fitting unit: 850 µs, 12.3 ms, 4.56 s, 3:07 min. */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (size < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (size < 120) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)}:${String(Math.floor(value % 60)).padStart(2, "0")} min`;
}

/** Return a count as text: 950, 12.3 k, 4.5 M. */
export function count(value) {
  if (!Number.isFinite(value)) return "–";
  if (Math.abs(value) < 10_000) return String(Math.abs(value) < 10 && value % 1 ? value.toFixed(1) : Math.round(value));
  return Math.abs(value) < 1e6 ? `${(value / 1e3).toFixed(1)} k` : `${(value / 1e6).toFixed(2)} M`;
}

export function percent(part, whole) {
  return whole > 0 && Number.isFinite(part) ? `${((100 * part) / whole).toFixed(part / whole < 0.0995 ? 1 : 0)} %` : "–";
}

/** Return a long name without its middle. */
export function shortName(name, most = 24) {
  const half = Math.floor((most - 1) / 2);
  return name.length > most ? `${name.slice(0, half)}…${name.slice(-half)}` : name;
}

/** Return a time as text: the time of day if the clock has one, else seconds since the beginning. */
export function moment(time, began, zero) {
  if (!Number.isFinite(time)) return "–";
  if (began === null || began === undefined) {
    const since = Math.max(0, time - zero), minutes = Math.floor(since / 60);
    return `${minutes}:${(since % 60).toFixed(2).padStart(5, "0")}`;
  }
  const date = new Date((began + time) * 1000);
  return `${date.toLocaleTimeString("en-GB")}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

/** Make an element with properties and children; text is never markup. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Update a list's children to items, with as few new nodes and changes as possible. `update` gets (node, item). */
export function syncChildren(parent, items, make, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(make());
  items.forEach((item, i) => update(parent.children[i], item));
}

/** Set a text if it changed, to avoid a layout. */
export function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

const COLOUR_NAMES = ["prefill", "decode", "draft", "swap", "idle", "schedule", "prepare", "forward", "sample", "emit", "free",
  "cached", "shared", "host", "grid"];

/** The theme's colours, read once for each theme. */
export function readPalette() {
  const style = getComputedStyle(document.documentElement), found = {};
  for (const name of COLOUR_NAMES) found[name] = style.getPropertyValue(`--c-${name}`).trim();
  for (const name of ["bg", "bg-2", "fg", "fg-2", "line", "accent", "bad", "good", "warn"]) {
    found[name] = style.getPropertyValue(`--${name}`).trim();
  }
  found.font = "12px " + style.getPropertyValue("--font").trim();
  found.isDark = style.colorScheme.includes("dark");
  return found;
}

const hues = new Map();

function hueOf(name) {
  let found = hues.get(name);
  if (found === undefined) {
    let hash = 2166136261;
    for (let i = 0; i < name.length; i++) hash = Math.imul(hash ^ name.charCodeAt(i), 16777619);
    found = [(hash >>> 0) % 360, 55 + ((hash >>> 9) % 3) * 12, ((hash >>> 13) % 3) * 9];
    if (hues.size > 50_000) hues.clear();
    hues.set(name, found);
  }
  return found;
}

/** Return a request's colour: the same in every view and visit. */
export function colourOf(name, isDark) {
  const [hue, saturation, more] = hueOf(name);
  return `hsl(${hue} ${saturation}% ${(isDark ? 48 : 40) + more}%)`;
}

/** Return the same colour as an opaque pixel of ImageData: red in the lowest byte. */
export function pixelOf(name, isDark) {
  const [hue, saturation, more] = hueOf(name), light = ((isDark ? 48 : 40) + more) / 100, reach = (saturation / 100) * Math.min(light, 1 - light);
  const of = (n) => { const k = (n + hue / 30) % 12; return Math.round(255 * (light - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); };
  return (255 << 24) | (of(4) << 16) | (of(8) << 8) | of(0);
}

/** Return a #rrggbb as a pixel of ImageData. */
export function hexPixel(colour) {
  const value = parseInt(colour.slice(1), 16);
  return (255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16);
}
