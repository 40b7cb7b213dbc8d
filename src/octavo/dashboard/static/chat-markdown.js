// Models' Markdown to plain data: its blocks. No DOM here, so that it can be tested alone.
// Owns: paragraphs, lists, tables, code, quotes. Does not: make elements (chat-render does), know HTML (it is text).
// Invariants: time is linear in the text, nesting is bounded, no word of the text is lost. So no expression has two
// parts in a row that take the same characters, and none searches for an end from every place of a line.

import { inlinesOf } from "./chat-inlines.js";

const MAX_DEPTH = 8; // of quotes and lists
const MAX_COLUMNS = 64;
const FENCE = /^ {0,3}(?:(`{3,})(?!`)|(~{3,})(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]([^]*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(?! )([^]*)|)$/;
const TASK = /^\[([ xX])\] +/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*(?:\|[ \t]*)?$/;
const LINE_END = /\r\n|\r|\n/;

/** Parse a text to blocks. Each of the outermost has `raw`, its source: equal sources are equal blocks. */
export function parse(text) {
  return blocksOf(linesOf(text), 0).map(([block]) => block);
}

/** Parses a text again and again as it grows; blocks that more text cannot change are parsed once. */
export class GrowingText {
  #settled = []; // blocks
  #start = ""; // their text

  /** Return the blocks of a text. */
  parse(text) {
    if (!text.startsWith(this.#start)) [this.#settled, this.#start] = [[], ""];
    const rest = text.slice(this.#start.length);
    const lines = linesOf(rest);
    const found = blocksOf(lines, 0);
    // The end of a block is known from the next block's first line and the line below; the last line may still grow.
    let num = 0;
    while (num + 1 < found.length && found[num + 1][1] + 1 < lines.length - 1) num += 1;
    const blocks = [...this.#settled, ...found.map(([block]) => block)];
    if (num > 0) {
      for (const [block] of found.slice(0, num)) this.#settled.push(block);
      this.#start = text.slice(0, this.#start.length + lengthOf(rest, found[num][1]));
    }
    return blocks;
  }

  /** Characters that each call parses again. */
  unsettled(text) {
    return text.length - this.#start.length;
  }
}

const linesOf = (text) => text.split(LINE_END).map(untabbed);

// The length of the first lines, line ends included.
function lengthOf(text, numLines) {
  const ends = new RegExp(LINE_END, "g");
  for (let line = 0; line < numLines; line += 1) ends.exec(text);
  return ends.lastIndex;
}

function untabbed(line) {
  const lead = /^[ \t]*/.exec(line)[0];
  return lead.includes("\t") ? lead.replaceAll("\t", "    ") + line.slice(lead.length) : line;
}

const isBlank = (line) => /^[ \t]*$/.test(line);
const startsItem = (line) => ITEM.test(line) && indentOf(line) < 4;
const indentOf = (line) => /^ */.exec(line)[0].length;

function startsBlock(line, next) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item && item[4]) return !/^\d/.test(item[2]) || /^1[.)]/.test(item[2]);
  return next !== undefined && isTableHead(line, next);
}

function isTableHead(line, next) {
  return line.includes("|") && next.includes("-") && DELIMITERS.test(next) && cellsOf(next).length === cellsOf(line).length;
}

// The blocks, each with the number of its first line.
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at, depth);
    if (depth === 0) block.raw = lines.slice(at, end).join("\n");
    blocks.push([block, at]);
    at = end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    return [{ type: "heading", level: heading[1].length, inlines: inlinesOf(title(heading[2] ?? "")) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && startsItem(line)) return readList(lines, at, depth);
  if (at + 1 < lines.length && isTableHead(line, lines[at + 1])) return readTable(lines, at);
  return readParagraph(lines, at);
}

// The words of a heading, without the # that may close it.
function title(text) {
  const words = text.trim();
  let end = words.length;
  while (words[end - 1] === "#") end -= 1;
  const closes = end < words.length && (end === 0 || words[end - 1] === " " || words[end - 1] === "\t");
  return closes ? words.slice(0, end).trim() : words;
}

function readFence(lines, at, fence) {
  const [mark, indent] = [fence[1] ?? fence[2], indentOf(lines[at])];
  let end = at + 1;
  while (end < lines.length && !closesFence(lines[end], mark)) end += 1;
  const inner = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  const language = fence[3].trim().split(/\s/, 1)[0];
  const isOpen = end >= lines.length;
  return [{ type: "code", language, text: inner.join("\n"), isOpen }, Math.min(end + 1, lines.length)];
}

function closesFence(line, mark) {
  if (indentOf(line) > 3) return false;
  const words = line.trim();
  return words.length >= mark.length && words.startsWith(mark) && words === mark[0].repeat(words.length);
}

function readQuote(lines, at, depth) {
  const inner = [];
  let end = at;
  while (end < lines.length && !isBlank(lines[end])) {
    if (!QUOTE.test(lines[end]) && startsBlock(lines[end])) break;
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [{ type: "quote", blocks: innerBlocks(inner, depth) }, end];
}

const innerBlocks = (lines, depth) => blocksOf(lines, depth + 1).map(([block]) => block);

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const kind = isOrdered ? first[2].at(-1) : first[2];
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > first[1].length + 1 || RULE.test(lines[end])) break;
    const own = /\d/.test(item[2]) ? item[2].at(-1) : item[2];
    if (own !== kind) break;
    const [content, next] = readItem(lines, end, item);
    items.push(content);
    end = next;
    let ahead = end;
    while (ahead < lines.length && isBlank(lines[ahead])) ahead += 1;
    if (ahead > end && !(ahead < lines.length && ITEM.test(lines[ahead]))) break;
    end = ahead;
  }
  const start = isOrdered ? Number.parseInt(first[2], 10) : 1;
  return [{ type: "list", isOrdered, start, items: items.map((inner) => itemOf(inner, depth)) }, end];
}

// Lines two or more columns further in than the mark belong to the item: models are not exact about three or four.
function readItem(lines, at, item) {
  const mark = item[1].length;
  const content = mark + item[2].length + Math.min(item[3]?.length ?? 1, 4);
  const inner = [item[4] ?? ""];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (isBlank(line)) {
      let ahead = end + 1;
      while (ahead < lines.length && isBlank(lines[ahead])) ahead += 1;
      if (ahead === lines.length || indentOf(lines[ahead]) < mark + 2) break;
      for (; end < ahead; end += 1) inner.push("");
      continue;
    }
    if (indentOf(line) < mark + 2 && (isBlank(lines[end - 1]) || startsItem(line) || startsBlock(line, lines[end + 1]))) break;
    inner.push(line.slice(Math.min(content, indentOf(line))));
    end += 1;
  }
  return [inner, end];
}

function itemOf(lines, depth) {
  const task = TASK.exec(lines[0]);
  const inner = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  return { isDone: task ? task[1] !== " " : null, blocks: innerBlocks(inner, depth) };
}

function cellsOf(line) {
  const cells = [];
  let cell = "";
  const row = line.trim().replace(/^\|/, "");
  for (let i = 0; i < row.length && cells.length < MAX_COLUMNS; i += 1) {
    if (row[i] === "\\" && row[i + 1] === "|") {
      cell += "|";
      i += 1;
    } else if (row[i] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else cell += row[i];
  }
  if (cell.trim() && cells.length < MAX_COLUMNS) cells.push(cell.trim());
  return cells;
}

function readTable(lines, at) {
  const head = cellsOf(lines[at]);
  const sides = cellsOf(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return "left";
  });
  const rows = [];
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && lines[end].includes("|")) {
    const cells = cellsOf(lines[end]);
    rows.push(cells.slice(0, head.length).map((cell) => inlinesOf(cell))); // extra cells are dropped
    end += 1;
  }
  return [{ type: "table", sides, head: head.map((cell) => inlinesOf(cell)), rows }, end];
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines[end], lines[end + 1])) end += 1;
  const words = lines.slice(at, end).map((line) => line.replace(/^ +/, ""));
  return [{ type: "paragraph", inlines: inlinesOf(words.join("\n")) }, end];
}
