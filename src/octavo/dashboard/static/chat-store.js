// Conversations, kept in this browser and nowhere else.
// Owns: their form, their storage, files of them. Does not: show them, or send them.
// Invariants: data from storage or a file is checked member by member; one bad conversation does not affect others.

import { randomName } from "./chat-dom.js";
import { IMAGE_URL, MAX_IMAGES } from "./chat-images.js";
import { DEFAULTS } from "./chat-request.js";

const PREFIX = "octavo.chat.c.";
const DRAFT = "octavo.chat.draft";
const CURRENT = "octavo.chat.current";
export const FILE_KIND = "octavo-conversations";
export const MAX_CONVERSATIONS = 500;
export const MAX_FILE_BYTES = 32 * 1024 * 1024;
const MAX_TITLE = 120;

/** Make a conversation without messages; it keeps the settings given. */
export function newConversation(settings = DEFAULTS) {
  const now = Date.now();
  return { id: randomName(), title: "", created: now, updated: now, settings: { ...DEFAULTS, ...settings }, messages: [] };
}

/** Return a conversation's name: its own, or its first words. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user");
  const words = first?.content.trim().replaceAll(/\s+/g, " ") ?? "";
  return words ? (words.length > 48 ? `${words.slice(0, 47)}…` : words) : "New conversation";
}

/** The conversations of one browser. `storage` is like localStorage, or null where pages have none. */
export class Store {
  constructor(storage) {
    this.storage = storage;
    this.all = new Map();
    this.reload();
  }

  /** Read everything again: another tab may have changed it. `keep` are conversations that are being answered here. */
  reload(keep = new Set()) {
    const found = new Map([...this.all].filter(([id]) => keep.has(id)));
    for (let i = 0; this.storage && i < this.storage.length; i += 1) {
      const key = this.storage.key(i);
      const id = key.slice(PREFIX.length);
      if (!key.startsWith(PREFIX) || found.has(id)) continue;
      const conversation = parsed(this.storage.getItem(key));
      if (conversation) found.set(conversation.id, conversation);
    }
    this.all = found;
  }

  /** Return them, the one that changed last first. */
  list() {
    return [...this.all.values()].sort((a, b) => b.updated - a.updated || (a.id < b.id ? -1 : 1));
  }

  /** Store a conversation. Return false if it did not fit even without its log-probabilities. */
  save(conversation, hasChanged = true) {
    if (hasChanged) conversation.updated = Date.now();
    this.all.set(conversation.id, conversation);
    if (!conversation.messages.length && !conversation.title) return true;
    for (const old of this.list().slice(MAX_CONVERSATIONS)) this.remove(old.id);
    return this.#write(PREFIX + conversation.id, JSON.stringify(conversation)) || this.#write(PREFIX + conversation.id, JSON.stringify(withoutTokens(conversation)));
  }

  /** Delete a conversation. */
  remove(id) {
    this.all.delete(id);
    this.storage?.removeItem(PREFIX + id);
  }

  get draft() {
    return this.storage?.getItem(DRAFT) ?? "";
  }

  set draft(text) {
    if (text) this.#write(DRAFT, text);
    else this.storage?.removeItem(DRAFT);
  }

  get currentId() {
    return this.storage?.getItem(CURRENT) ?? null;
  }

  set currentId(id) {
    this.#write(CURRENT, id);
  }

  #write(key, text) {
    try {
      this.storage?.setItem(key, text);
      return this.storage !== null;
    } catch {
      return false; // the browser's quota
    }
  }
}

const withoutTokens = (conversation) => ({
  ...conversation,
  messages: conversation.messages.map((message) =>
    message.answers ? { ...message, answers: message.answers.map((answer) => ({ ...answer, tokens: [] })) } : message,
  ),
});

/** Return conversations as a file's text. */
export function fileOf(conversations) {
  return JSON.stringify({ kind: FILE_KIND, version: 1, conversations }, null, 1);
}

/** Read a file's text; conversations get new ids. Throws an Error in words. */
export function readFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is no JSON.");
  }
  const listed = file?.kind === FILE_KIND && Array.isArray(file.conversations) ? file.conversations : null;
  if (!listed) throw new Error("This file holds no conversations of this page.");
  const found = listed.slice(0, MAX_CONVERSATIONS).map(checked).filter((one) => one !== null);
  if (!found.length) throw new Error("No conversation in this file can be read.");
  return found.map((conversation) => ({ ...conversation, id: randomName() }));
}

function parsed(text) {
  try {
    return checked(JSON.parse(text));
  } catch {
    return null;
  }
}

/** Make a user's message; `images` are data URLs. */
export function userMessage(content, images = []) {
  const kept = images.filter((url) => isText(url) && IMAGE_URL.test(url)).slice(0, MAX_IMAGES);
  return kept.length ? { role: "user", content, images: kept } : { role: "user", content };
}

const isText = (value) => typeof value === "string";
const textOr = (value, other) => (isText(value) ? value : other);
const numberOr = (value, other) => (Number.isFinite(value) ? value : other);

function checked(value) {
  if (value === null || typeof value !== "object" || !isText(value.id) || !Array.isArray(value.messages)) return null;
  const messages = value.messages.map(checkedMessage);
  if (messages.includes(null)) return null;
  const settings = { ...DEFAULTS };
  for (const [name, other] of Object.entries(DEFAULTS)) {
    const given = value.settings?.[name];
    if (typeof given === typeof other) settings[name] = given;
  }
  const now = Date.now();
  return {
    id: value.id.slice(0, 64), title: textOr(value.title, "").slice(0, MAX_TITLE), settings, messages,
    created: numberOr(value.created, now), updated: numberOr(value.updated, now),
  };
}

function checkedMessage(value) {
  if (value === null || typeof value !== "object") return null;
  if (value.role === "user" && isText(value.content)) return userMessage(value.content, Array.isArray(value.images) ? value.images : []);
  if (value.role === "tool" && isText(value.content) && isText(value.callId)) {
    return { role: "tool", callId: value.callId, name: textOr(value.name, ""), content: value.content };
  }
  if (value.role !== "assistant" || !Array.isArray(value.answers) || !value.answers.length) return null;
  const answers = value.answers.map(checkedAnswer);
  const isIndex = (index) => Number.isInteger(index) && index >= 0 && index < answers.length;
  const from = isIndex(value.from) ? value.from : 0;
  const picked = isIndex(value.picked) ? value.picked : answers.length - from === 1 ? from : null;
  return { role: "assistant", answers, from, picked };
}

function checkedAnswer(value) {
  const answer = value !== null && typeof value === "object" ? value : {};
  const calls = Array.isArray(answer.calls) ? answer.calls : [];
  const tokens = Array.isArray(answer.tokens) ? answer.tokens : [];
  const kept = {
    content: textOr(answer.content, ""),
    reasoning: textOr(answer.reasoning, ""),
    calls: calls.filter((call) => call && isText(call.name)).map((call) => ({ id: textOr(call.id, ""), name: call.name, arguments: textOr(call.arguments, "") })),
    tokens: tokens.every(isToken) ? tokens : [],
    finish: isText(answer.finish) ? answer.finish : "cut", // the page was closed during the stream
    stats: checkedStats(answer.stats),
  };
  if (isText(answer.requestId)) kept.requestId = answer.requestId.slice(0, 128);
  if (isText(answer.stopped)) kept.stopped = answer.stopped;
  if (answer.error && isText(answer.error.message)) kept.error = { message: answer.error.message };
  return kept;
}

function isToken(token) {
  if (!token || !isText(token.t) || !Number.isFinite(token.p)) return false;
  if (token.b !== undefined && !(Array.isArray(token.b) && token.b.every(Number.isInteger))) return false;
  return token.a === undefined || (Array.isArray(token.a) && token.a.every((one) => Array.isArray(one) && isText(one[0]) && Number.isFinite(one[1])));
}

const STATS = ["promptTokens", "cachedTokens", "completionTokens", "tokensPerS", "firstS", "totalS", "queueS", "prefillS", "decodeS", "preemptedS", "numAnswers"];

function checkedStats(value) {
  if (value === null || typeof value !== "object" || !Number.isFinite(value.totalS)) return null;
  const kept = Object.fromEntries(STATS.map((name) => [name, numberOr(value[name], null)]));
  return { ...kept, isMeasuredHere: value.isMeasuredHere === true };
}
