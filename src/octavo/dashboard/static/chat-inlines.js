// Markdown within a line: emphasis, code, links, to plain data.
// Owns: which characters are marks. Does not: make elements, know HTML (it is text, but for <br>), load images.
// Invariants: time is linear but for bounded looks back and ahead; nesting is bounded; every address that a link or an
// image has passed `safeAddress`.

const MAX_OPEN = 32; // marks without their closing mark yet
const MAX_RUN = 3; // longer runs of * and _ are text
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const ADDRESS = /https?:\/\/[^\s<>"'`\\]{1,2000}/y;
const PROTOCOLS = ["http:", "https:", "mailto:"];
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };

/** Return an address that may be clicked, normalised, or null. */
export function safeAddress(text) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    const url = new URL(text);
    return PROTOCOLS.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Parse a line of text to [string | {type, children | text | address}]. */
export function inlinesOf(text) {
  return new Inlines(text).read();
}

class Inlines {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.out = []; // strings, nodes, and marks {mark, count} that may become text
    this.open = []; // the marks among them, outermost first
    this.ticks = null; // length of a run of backticks -> where such runs start
  }

  read() {
    const plain = /[^\\`*_~[\]!<&\nh]+/y;
    while (this.at < this.text.length) {
      plain.lastIndex = this.at;
      const run = plain.exec(this.text);
      if (run) {
        this.out.push(run[0]);
        this.at += run[0].length;
      } else if (!this.special(this.text[this.at])) {
        this.out.push(this.text[this.at]);
        this.at += 1;
      }
    }
    return settled(this.out);
  }

  special(c) {
    if (c === "\\") return this.escape();
    if (c === "`") return this.code();
    if (c === "*" || c === "_" || c === "~") return this.emphasis(c);
    if (c === "[" || (c === "!" && this.text[this.at + 1] === "[")) return this.bracket(c);
    if (c === "]") return this.link();
    if (c === "\n") return this.take(1, { type: "break" });
    if (c === "h") return this.bareAddress();
    if (c === "<") return this.angle();
    if (c === "&") return this.entity();
    return false;
  }

  take(length, node) {
    this.out.push(node);
    this.at += length;
    return true;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.take(2, { type: "break" });
    return next !== undefined && PUNCTUATION.test(next) && this.take(2, next);
  }

  entity() {
    const found = /^&(?:amp|lt|gt|quot|#39|nbsp);/.exec(this.text.slice(this.at, this.at + 8));
    return found !== null && this.take(found[0].length, ENTITIES[found[0]]);
  }

  code() {
    const length = runLength(this.text, this.at, "`");
    if (this.ticks === null) this.ticks = tickRuns(this.text);
    const runs = this.ticks.get(length) ?? []; // none if a mark before it was escaped
    while (runs.length && runs.at(-1) < this.at + length) runs.pop(); // kept last first
    if (!runs.length) return this.take(length, "`".repeat(length));
    const end = runs.at(-1);
    let inner = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && /[^ ]/.test(inner)) inner = inner.slice(1, -1);
    this.out.push({ type: "code", text: inner });
    this.at = end + length;
    return true;
  }

  emphasis(c) {
    const count = runLength(this.text, this.at, c);
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[this.at + count] ?? " "];
    this.at += count;
    if (count > MAX_RUN || (c === "~" && count !== 2)) {
      this.out.push(c.repeat(count));
      return true;
    }
    const isInWord = c === "_" && WORD.test(before) && WORD.test(after);
    let left = count;
    if (!/\s/.test(before) && !isInWord) left = this.close(c, left);
    if (left > 0) {
      const mark = { mark: c, count: left };
      this.out.push(mark);
      if (!/\s/.test(after) && !isInWord && this.open.length < MAX_OPEN) this.open.push(mark);
    }
    return true;
  }

  close(c, count) {
    while (count > 0) {
      let index = this.open.length - 1;
      while (index >= 0 && this.open[index].mark !== c && this.open[index].mark !== "[") index -= 1;
      if (index < 0 || this.open[index].mark !== c) return count;
      const opener = this.open[index];
      const size = Math.min(count, opener.count, 2);
      const place = this.out.lastIndexOf(opener);
      if (place === this.out.length - 1) return count; // no text between them
      const type = c === "~" ? "del" : size === 2 ? "strong" : "em";
      const children = settled(this.out.splice(place + 1));
      opener.count -= size;
      this.open.length = opener.count ? index + 1 : index;
      if (!opener.count) this.out.pop();
      this.out.push({ type, children });
      count -= size;
    }
    return 0;
  }

  bracket(c) {
    const mark = { mark: "[", count: 1, isImage: c === "!" };
    this.out.push(mark);
    if (this.open.length < MAX_OPEN) this.open.push(mark);
    this.at += c === "!" ? 2 : 1;
    return true;
  }

  link() {
    let index = this.open.length - 1;
    while (index >= 0 && this.open[index].mark !== "[") index -= 1;
    if (index < 0) return false;
    const opener = this.open[index];
    const target = destination(this.text, this.at + 1);
    this.open.length = index; // marks left open within it become text
    if (target === null) return false;
    const place = this.out.lastIndexOf(opener);
    const children = settled(this.out.splice(place + 1));
    this.out.pop();
    this.out.push({ type: opener.isImage ? "image" : "link", address: target.address, children });
    this.at = target.end;
    return true;
  }

  bareAddress() {
    if (WORD.test(this.text[this.at - 1] ?? " ")) return false;
    ADDRESS.lastIndex = this.at;
    const found = ADDRESS.exec(this.text);
    if (!found) return false;
    let words = withoutEnd(found[0]);
    if (words.endsWith(")") && !words.includes("(")) words = words.slice(0, -1);
    const address = safeAddress(words);
    return address !== null && this.take(words.length, { type: "link", address, children: [words] });
  }

  angle() {
    const rest = this.text.slice(this.at, this.at + 2048);
    const line = /^<br ?\/?>/i.exec(rest);
    if (line) return this.take(line[0].length, { type: "break" });
    const found = /^<((?:https?:\/\/|mailto:)[^\s<>]*)>/i.exec(rest);
    const address = found && safeAddress(found[1]);
    return Boolean(address) && this.take(found[0].length, { type: "link", address, children: [found[1]] });
  }
}

// "(address)" or "(address "title")" at a place; null if it is none, or not a safe one.
function destination(text, at) {
  if (text[at] !== "(") return null;
  const found = /^\(\s?<?([^\s<>[\]]{1,2000}?)>?(?:\s+(?:"[^"\n]{0,500}"|'[^'\n]{0,500}'))?\s?\)/.exec(text.slice(at, at + 2600));
  if (!found) return null;
  let [end, words] = [at + found[0].length, found[1]];
  for (let round = 0; round < 4 && text[end] === ")" && count(words, "(") > count(words, ")"); round += 1) {
    words += ")";
    end += 1;
  }
  const address = safeAddress(words);
  return address === null ? null : { address, end };
}

// An address in a sentence, without the marks that end the sentence.
function withoutEnd(text) {
  let end = text.length;
  while (end > text.length - 64 && ".,:;!?*_~]".includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

const count = (text, c) => text.split(c).length - 1;

function runLength(text, at, c) {
  let end = at;
  while (text[end] === c) end += 1;
  return end - at;
}

function tickRuns(text) {
  const runs = new Map();
  for (const found of text.matchAll(/`+/g)) {
    const length = found[0].length;
    if (!runs.has(length)) runs.set(length, []);
    runs.get(length).push(found.index);
  }
  for (const places of runs.values()) places.reverse();
  return runs;
}

// Marks without a closing mark become text; adjacent texts are joined.
function settled(nodes) {
  const out = [];
  for (const node of nodes) {
    const one = node.mark === undefined ? node : markText(node);
    if (typeof one === "string" && typeof out.at(-1) === "string") out.push(out.pop() + one);
    else out.push(one);
  }
  return out;
}

const markText = (node) => (node.mark === "[" ? (node.isImage ? "![" : "[") : node.mark.repeat(node.count));
