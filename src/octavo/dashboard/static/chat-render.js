// Markdown on the page. Owns: elements for blocks. Does not: parse (chat-markdown does).
// Invariants: only the elements below are made; a text is never read as HTML; unchanged elements are kept, so
// that a selection in them survives the stream.

import { copyButton, make } from "./chat-dom.js";
import { GrowingText } from "./chat-markdown.js";

const SHOWN_EVERY_MS = 250; // a long block that grows, such as a paragraph of 100 KB
const LONG = 4096; // characters that are parsed again with each piece of a stream
const GROWTH = 32; // or once it grew by 1/32

/** The elements that a text can become. */
export const ELEMENTS = [
  "A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "LI", "OL", "P", "PRE",
  "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL",
];

/** Show a text in a container, again and again as it grows. */
export class Markdown {
  #container;
  #sources = [];
  #growing = new GrowingText();
  #length = 0; // of the text that is shown
  #shownMs = 0;

  constructor(container) {
    this.#container = container;
  }

  /** Show a growing text, a long one at most some times a second; return true if it was shown. */
  showGrowing(text) {
    const unsettled = this.#growing.unsettled(text);
    const isLittle = unsettled > LONG && text.length - this.#length < unsettled / GROWTH;
    if (isLittle && text.length >= this.#length && performance.now() - this.#shownMs < SHOWN_EVERY_MS) return false;
    this.show(text);
    return true;
  }

  /** Show the text; keep blocks with unchanged source. */
  show(text) {
    const blocks = this.#growing.parse(text);
    [this.#length, this.#shownMs] = [text.length, performance.now()];
    let same = 0;
    while (same < blocks.length && same < this.#sources.length && blocks[same].raw === this.#sources[same]) same += 1;
    while (this.#container.childNodes.length > same) this.#container.lastChild.remove();
    for (const block of blocks.slice(same)) this.#container.append(blockElement(block));
    this.#sources = blocks.map((block) => block.raw);
  }
}

function blockElement(block) {
  switch (block.type) {
    case "heading":
      return make(`h${Math.min(6, block.level + 2)}`, { dir: "auto" }, inlineNodes(block.inlines)); // below the page's own
    case "code":
      return codeElement(block);
    case "quote":
      return make("blockquote", { dir: "auto" }, block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    case "rule":
      return make("hr");
    default:
      return make("p", { dir: "auto" }, inlineNodes(block.inlines));
  }
}

function codeElement(block) {
  const head = make(
    "div",
    { class: "code-head" },
    make("span", { class: "muted" }, block.language.slice(0, 32) || "text"),
    copyButton("Copy", () => block.text, { class: "button quiet small", "aria-label": "Copy this code" }),
  );
  return make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, block.text)));
}

function listElement(block) {
  const items = block.items.map((item) => {
    const only = item.blocks.length && item.blocks[0].type === "paragraph" ? inlineNodes(item.blocks[0].inlines) : null;
    const inner = only ? [...only, ...item.blocks.slice(1).map(blockElement)] : item.blocks.map(blockElement);
    if (item.isDone === null) return make("li", { dir: "auto" }, inner);
    const box = make("span", { class: "task", role: "img", "aria-label": item.isDone ? "done" : "to do" }, item.isDone ? "☑" : "☐");
    return make("li", { class: "task-item", dir: "auto" }, box, " ", inner);
  });
  return block.isOrdered ? make("ol", { start: block.start === 1 ? null : block.start }, items) : make("ul", {}, items);
}

function tableElement(block) {
  const cell = (tag, inlines, column) =>
    make(tag, { class: `side-${block.sides[column] ?? "left"}`, scope: tag === "th" ? "col" : null, dir: "auto" }, inlineNodes(inlines));
  const row = (tag, cells) => make("tr", {}, cells.map((inlines, column) => cell(tag, inlines, column)));
  const body = make("tbody", {}, block.rows.map((cells) => row("td", cells)));
  return make("div", { class: "table", tabindex: "0", role: "group", "aria-label": "table" }, make("table", {}, make("thead", {}, row("th", block.head)), body));
}

function inlineNodes(inlines, isInLink = false) {
  return inlines.flatMap((node) => {
    if (typeof node === "string") return [node];
    if (node.type === "break") return [make("br")];
    if (node.type === "code") return [make("code", {}, node.text)];
    if (node.type !== "link" && node.type !== "image") return [make(node.type, {}, inlineNodes(node.children, isInLink))];
    const children = inlineNodes(node.children, true);
    if (isInLink) return children; // a link holds no link
    const isImage = node.type === "image"; // nothing is fetched for a model: its picture is a link
    const label = isImage ? ["picture: ", ...(children.length ? children : [node.address])] : children;
    return [make("a", { href: node.address, rel: "noopener noreferrer nofollow", target: "_blank", title: node.address }, label)];
  });
}
