// The chat page. Owns: the shown conversation, the actions of buttons and keys, and the open requests.
// Does not: render, store or send; the other chat-*.js modules do.

import { addressOf, explain, listModels } from "./chat-client.js";
import { emptyAnswer } from "./chat-answer.js";
import { ConversationList, download, pickFile } from "./chat-list.js";
import { CodeDialog, toast } from "./chat-dialogs.js";
import { bodyOf, DEFAULTS, FieldError, messagesOf, shownAnswer } from "./chat-request.js";
import { Run } from "./chat-run.js";
import { SettingsForm } from "./chat-settings.js";
import { number } from "./chat-stats.js";
import { fileOf, newConversation, readFile, Store, titleOf, userMessage } from "./chat-store.js";
import { Attachments } from "./chat-images.js";
import { installKeys } from "./chat-keys.js";
import { MessagesView } from "./chat-view.js";
import { Panels } from "./chat-panels.js";
import { make } from "./chat-dom.js";
import { loadTheme } from "./theme.js";

const SIGNED_IN = "octavo-signed-in"; // a second cookie: no script can read the session's
const $ = (id) => document.getElementById(id);

function storageOrNull() {
  try {
    return window.localStorage;
  } catch {
    return null; // the browser has no storage for this page
  }
}

class Chat {
  constructor() {
    this.store = new Store(storageOrNull());
    this.runs = new Map(); // conversation id -> its open request
    this.models = [];
    this.usesKey = false;
    this.frame = null;
    this.current = this.store.all.get(this.store.currentId) ?? this.store.list()[0] ?? newConversation();
    this.messages = new MessagesView($("messages"), $("scroller"), this.actions());
    this.settings = new SettingsForm($("settings"), (settings) => this.#settingsChanged(settings));
    this.code = new CodeDialog(() => this.#codeParts());
    this.list = new ConversationList($("conversations"), $("filter"), {
      open: (id) => this.open(id),
      rename: (id, title) => this.#rename(id, title),
      remove: (id) => this.#remove(id),
      save: (id) => download("conversation.json", fileOf([this.store.all.get(id)])),
    });
    this.panels = new Panels();
    this.attachments = new Attachments($("attached"), toast);
  }

  start() {
    const text = $("text");
    text.value = this.store.draft;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.attachments.listen(text, $("attach"), $("image-file"));
    text.addEventListener("input", () => {
      this.store.draft = text.value;
      this.#sizeField();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("new").addEventListener("click", () => this.begin());
    $("reset").addEventListener("click", () => this.#settingsChanged({ ...DEFAULTS }, true));
    $("export-all").addEventListener("click", () => download("conversations.json", fileOf(this.store.list())));
    $("delete-all").addEventListener("click", () => this.#removeAll());
    $("import").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => this.#import());
    $("to-end").addEventListener("click", () => this.messages.toEnd());
    $("scroller").addEventListener("scroll", () => ($("to-end").hidden = this.messages.isAtEnd));
    $("show-code").addEventListener("click", () => this.code.open());
    $("show-help").addEventListener("click", () => $("help-dialog").showModal());
    window.addEventListener("storage", () => this.#otherTab());
    window.addEventListener("pagehide", () => [...this.runs.values()].forEach((run) => this.store.save(run.conversation)));
    installKeys(this);
    this.open(this.current.id);
    text.focus();
    this.#askServer();
  }

  /** The handlers of the messages' buttons. */
  actions() {
    return {
      redraw: () => this.draw(),
      resend: (message, text) => this.#resend(message, text),
      rewrite: (message, text) => {
        shownAnswer(message).content = text;
        shownAnswer(message).tokens = [];
        this.messages.edit(null);
        this.#keep();
      },
      pick: (message, index) => {
        message.picked = index;
        this.#keep();
      },
      regenerate: (message) => this.regenerate(message),
      goOn: (message) => this.#goOn(message),
      giveResults: (message, results) => {
        this.current.messages.push(...results);
        this.#answer();
      },
      explain,
    };
  }

  get run() {
    return this.runs.get(this.current.id) ?? null;
  }

  /** Show a conversation. */
  open(id) {
    this.current = this.store.all.get(id) ?? this.current;
    this.store.all.set(this.current.id, this.current);
    this.store.currentId = this.current.id;
    this.settings.set(this.current.settings);
    this.draw();
    this.messages.toEnd();
    this.panels.closeDrawers();
  }

  /** Start a new conversation, with the settings of this one. */
  begin() {
    if (this.current.messages.length) this.current = newConversation(this.current.settings);
    this.open(this.current.id);
    $("text").focus();
  }

  /** Send the text in the message field. */
  send() {
    const text = $("text").value;
    if ((!text.trim() && !this.attachments.urls.length) || this.run) return;
    const last = this.current.messages.at(-1);
    if (last?.role === "assistant" && last.picked === null) last.picked = last.from; // continuing picks the first
    this.current.messages.push(userMessage(text, this.attachments.take()));
    if (!this.#answer()) {
      this.attachments.put(this.current.messages.pop().images ?? []);
      this.draw();
      return;
    }
    $("text").value = this.store.draft = "";
    this.#sizeField();
    this.messages.toEnd();
  }

  stop() {
    this.run?.stop();
  }

  /** Add another answer to the existing ones; drop the messages after it. */
  regenerate(message = this.current.messages.findLast((one) => one.role === "assistant")) {
    if (this.run || !message) return;
    const index = this.current.messages.indexOf(message);
    this.#cut(index + 1);
    this.#answer(message);
  }

  toggleTokens() {
    const buttons = document.querySelectorAll('#messages [data-action="tokens"]');
    buttons[buttons.length - 1]?.click();
  }

  editLast() {
    const message = this.current.messages.findLast((one) => one.role === "user");
    if (message && !this.run) this.messages.edit(message);
  }

  /** Draw everything that may have changed. */
  draw() {
    const { current, run } = this;
    this.messages.show(current, run);
    $("empty").hidden = current.messages.length > 0;
    this.list.show(this.store.list().filter((one) => one.messages.length || one.title || one === current), current.id, new Set(this.runs.keys()));
    document.title = `${titleOf(current)} · Octavo`;
    $("to-end").hidden = this.messages.isAtEnd;
    this.attachments.offerTo(this.models, $("model").value);
    const hadFocus = document.activeElement === $("send") || document.activeElement === $("stop");
    $("send").hidden = run !== null;
    $("stop").hidden = run === null;
    if (hadFocus) (run ? $("stop") : $("send")).focus();
    this.#showContext();
  }

  // At most once per frame, at any rate of chunks.
  #drawSoon(run) {
    if (run.conversation !== this.current || this.frame !== null) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.messages.show(this.current, this.run);
      $("to-end").hidden = this.messages.isAtEnd;
    });
  }

  // Answer the conversation: in a new message, or as further answers of one. Return false if it cannot be sent.
  #answer(message = null) {
    const until = message ? this.current.messages.indexOf(message) : this.current.messages.length;
    const body = this.#body(messagesOf(this.current.messages.slice(0, until)));
    if (body === null) return false;
    const answers = Array.from({ length: body.n ?? 1 }, emptyAnswer);
    const target = message ?? { role: "assistant", answers: [], from: 0, picked: 0 };
    target.from = target.answers.length;
    target.answers.push(...answers);
    target.picked = answers.length === 1 ? target.from : null;
    if (!message) this.current.messages.push(target);
    this.#begin(target, answers, body);
    return true;
  }

  #goOn(message) {
    const until = this.current.messages.indexOf(message) + 1;
    const body = this.#body(messagesOf(this.current.messages.slice(0, until)));
    if (body === null) return;
    const answer = shownAnswer(message);
    delete answer.error;
    answer.finish = null;
    delete body.n;
    this.#begin(message, [answer], { ...body, continue_final_message: true, add_generation_prompt: false });
  }

  #body(messages) {
    try {
      return bodyOf($("model").value, this.current.settings, messages);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.#complain(error.field, error.message);
      return null;
    }
  }

  #begin(message, answers, body) {
    const run = new Run(this.current, message, answers, body, (changed) => this.#drawSoon(changed));
    this.runs.set(this.current.id, run);
    this.settings.clear();
    this.#keep();
    $("live").textContent = "Answering";
    run.go().then(() => this.#ended(run));
  }

  #ended(run) {
    this.runs.delete(run.conversation.id);
    this.#keep(run.conversation);
    const { error } = run;
    if (error?.status === 401) {
      this.#takeBack(run);
      location.reload(); // shows the login form
      return;
    }
    if (error) this.settings.mark(error.param, error.message);
    const count = run.assembly.usage?.completion_tokens;
    $("live").textContent = error ? "" : `Answer ended${count ? `, ${count} tokens` : ""}`;
  }

  // An unsent message is back in the message field when the page is opened again.
  #takeBack({ conversation, message }) {
    const { messages } = conversation;
    if (message.answers.length > 1 || messages.at(-1) !== message) return;
    messages.pop();
    if (messages.at(-1)?.role === "user") this.store.draft = messages.pop().content;
    this.store.save(conversation);
  }

  #keep(conversation = this.current, hasChanged = true) {
    if (!this.store.save(conversation, hasChanged)) {
      toast("This browser has no room left: the conversation is not kept. Export it, or delete others.");
    }
    this.draw();
  }

  // Drop messages from an index on; the toast can restore them.
  #cut(index) {
    const { current } = this;
    if (index >= current.messages.length) return;
    const before = structuredClone(current.messages);
    current.messages.length = index;
    toast("What came after it was dropped.", "Undo", () => {
      this.runs.get(current.id)?.stop();
      const copy = { ...newConversation(current.settings), title: titleOf(current), messages: before };
      this.store.save(copy);
      this.open(copy.id);
    });
  }

  #resend(message, text) {
    const index = this.current.messages.indexOf(message);
    this.messages.editing = null;
    this.#cut(index + 1);
    this.current.messages[index] = userMessage(text, message.images);
    if (!this.#answer()) this.#keep();
    $("text").focus();
  }

  #settingsChanged(settings, isReset = false) {
    this.current.settings = settings;
    if (isReset) this.settings.set(settings);
    this.attachments.offerTo(this.models, $("model").value);
    this.store.save(this.current, false);
  }

  #complain(field, message) {
    this.panels.show("settings");
    const input = this.settings.mark(field, message);
    toast(message);
    input?.focus();
  }

  #rename(id, title) {
    const conversation = this.store.all.get(id);
    conversation.title = title.trim().slice(0, 120);
    this.#keep(conversation, false);
  }

  #remove(id) {
    const conversation = this.store.all.get(id);
    this.runs.get(id)?.stop();
    this.store.remove(id);
    toast(`"${titleOf(conversation)}" was deleted.`, "Undo", () => {
      this.store.save(conversation, false);
      this.open(id);
    });
    if (conversation === this.current) {
      this.current = this.store.list()[0] ?? newConversation(conversation.settings);
      this.open(this.current.id);
    } else this.draw();
  }

  #removeAll() {
    const all = this.store.list();
    for (const { id } of all) {
      this.runs.get(id)?.stop();
      this.store.remove(id);
    }
    this.current = newConversation(this.current.settings);
    this.open(this.current.id);
    toast("All conversations were deleted.", "Undo", () => {
      for (const conversation of all) this.store.save(conversation, false);
      this.open(all[0].id);
    });
  }

  async #import() {
    try {
      const found = readFile(await pickFile($("file")));
      for (const conversation of found) this.store.save(conversation, false);
      this.open(found[0].id);
      toast(`${found.length === 1 ? "One conversation was" : `${found.length} conversations were`} imported.`);
    } catch (error) {
      toast(error.message);
    }
  }

  #otherTab() {
    this.store.reload(new Set([...this.runs.keys(), ...(this.messages.editing ? [this.current.id] : [])]));
    const now = this.store.all.get(this.current.id);
    if (now) this.current = now;
    else this.store.all.set(this.current.id, this.current);
    this.draw();
  }

  #codeParts() {
    const text = $("text").value.trim();
    const messages = messagesOf(this.current.messages);
    if (text || !messages.length) messages.push({ role: "user", content: text || "Hello" });
    const body = this.#body(messages);
    return body && { base: addressOf("./"), body, usesKey: this.usesKey };
  }

  #sizeField() {
    const text = $("text");
    text.rows = Math.min(12, Math.max(1, text.value.split("\n").length));
  }

  #showContext() {
    const model = this.models.find((one) => one.id === $("model").value);
    const statsOf = (message) => (message.role === "assistant" ? shownAnswer(message).stats : null);
    const stats = statsOf(this.current.messages.findLast((message) => statsOf(message)?.promptTokens) ?? { role: "none" });
    const used = stats ? stats.promptTokens + Math.round((stats.completionTokens ?? 0) / (stats.numAnswers ?? 1)) : null;
    const room = model?.maxModelLen ? number(model.maxModelLen) : null;
    const words = used === null ? (room ? `${room} tokens fit` : "") : `${number(used)}${room ? ` of ${room}` : ""} tokens used`;
    $("context").textContent = words;
  }

  async #askServer() {
    try {
      this.models = await listModels();
      const select = $("model");
      const wanted = select.value;
      select.replaceChildren(...this.models.map(({ id }) => make("option", { value: id, selected: id === wanted }, id)));
      this.usesKey = document.cookie.includes(SIGNED_IN);
      $("sign-out").hidden = !this.usesKey;
      this.draw();
    } catch (error) {
      if (error.status === 401) location.reload();
      else toast(error.message, "Try again", () => this.#askServer());
    }
  }
}

loadTheme();
new Chat().start();
