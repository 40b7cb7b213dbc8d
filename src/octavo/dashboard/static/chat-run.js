// One request, from sending to its end: it is retried if the server says so, and can be stopped.
// Owns: the request's state and its clock. Does not: show anything; `onChange` is called after each change.
// Stages: waiting (sent, no text yet), refused (to be sent again), answering, ended.

import { Assembly, ServerError } from "./chat-answer.js";
import { chat, countdown, engineTrouble, explain, MAX_RETRIES, retryDelay } from "./chat-client.js";
import { randomName } from "./chat-dom.js";
import { seenRate, statsOf } from "./chat-stats.js";

const WHY_EVERY_MS = 1000;
const SILENT_MS = 1500; // without a chunk, before the server is asked for the engine's state
const TROUBLE_EVERY_MS = 1000;
const NOT_THERE = "The engine has not got it yet: its prompt is being read, or it waits for a place.";

export class Run {
  #abort = new AbortController();
  #skip = () => {};

  /** `answers` are the answers to fill; those with text are continued. */
  constructor(conversation, message, answers, body, onChange) {
    Object.assign(this, { conversation, message, body, onChange });
    this.assembly = new Assembly(answers.length, performance.now());
    this.assembly.answers = answers;
    this.stage = "waiting";
    this.words = "";
    this.reasons = null; // why it waits, if requested
    this.requestId = null;
    this.trouble = ""; // why the engine makes no progress, while it makes none
    this.error = null;
    this.heardMs = performance.now(); // when the server last sent anything of this request
    this.askedMs = 0;
  }

  /** The approximate rate of tokens per second. */
  get rate() {
    return seenRate(this.assembly);
  }

  /** Stop it; keep the text so far. */
  stop() {
    this.#abort.abort(new DOMException("stopped", "AbortError"));
  }

  /** Retry a refused request now. */
  tryNow() {
    this.#skip();
  }

  /** Update `reasons`, why it waits, each second; or stop that. */
  async why() {
    if (this.reasons) {
      this.reasons = null;
      this.onChange(this);
      return;
    }
    this.reasons = ["Asking…"];
    while (this.reasons && this.stage === "waiting") {
      const reasons = await reasonsOf(this.requestId);
      if (!this.reasons) break;
      this.reasons = reasons;
      this.onChange(this);
      await new Promise((resolve) => setTimeout(resolve, WHY_EVERY_MS));
    }
  }

  /** Run the request; never throws. */
  async go() {
    const clock = setInterval(() => this.#tick(), 500);
    try {
      for (let attempt = 0; ; attempt += 1) {
        const error = await this.#once();
        if (error === null) break;
        const waitS = this.assembly.firstMs === null ? retryDelay(error, attempt) : null;
        if (waitS === null) throw error;
        await this.#wait(error, waitS, attempt);
      }
      this.#end("cut", null);
    } catch (error) {
      if (this.#abort.signal.aborted) this.#end("stopped", null);
      else this.#end(endOf(error), error);
    } finally {
      clearInterval(clock);
      this.stage = "ended";
      this.trouble = "";
      this.onChange(this);
    }
  }

  async #once() {
    this.requestId = `chat-${randomName(20)}`;
    this.assembly.startedMs = this.heardMs = performance.now();
    this.#tick("waiting");
    try {
      for await (const chunk of chat(this.body, this.requestId, this.#abort.signal)) {
        this.heardMs = performance.now();
        this.trouble = "";
        this.assembly.push(chunk, this.heardMs);
        if (this.assembly.firstMs !== null) this.stage = "answering";
        this.onChange(this);
      }
      return null;
    } catch (error) {
      if (error instanceof ServerError && !this.#abort.signal.aborted) return error;
      throw error;
    }
  }

  async #wait(error, waitS, attempt) {
    const skip = new Promise((resolve) => (this.#skip = resolve));
    const again = (left) => `${error.message} Trying again in ${left} s (${attempt + 1} of ${MAX_RETRIES}).`;
    this.stage = "refused";
    this.reasons = null;
    await countdown(waitS, this.#abort.signal, (left) => this.#say(again(left)), skip);
  }

  #tick(stage = this.stage) {
    this.stage = stage;
    this.#lookForTrouble();
    if (stage !== "waiting" || this.trouble) return;
    const waitedS = (performance.now() - this.assembly.startedMs) / 1000;
    this.#say(waitedS < 1 ? "Waiting for the first token…" : `Waiting for the first token, ${Math.floor(waitedS)} s so far.`);
  }

  // A stream is silent while the engine is replaced: ask the server if that is the reason.
  async #lookForTrouble() {
    const now = performance.now();
    if (this.stage === "refused" || now - this.heardMs < SILENT_MS || now - this.askedMs < TROUBLE_EVERY_MS) return;
    this.askedMs = now;
    const trouble = await engineTrouble();
    if (this.heardMs > now || this.stage === "ended" || this.stage === "refused") return; // it continued meanwhile
    this.trouble = trouble ?? "";
    if (trouble) this.#say(`${trouble[0].toUpperCase()}${trouble.slice(1)}… The answer continues when it is ready.`);
    else this.onChange(this);
  }

  #say(words) {
    this.words = words;
    this.onChange(this);
  }

  #end(finish, error) {
    this.error = error;
    const stats = this.assembly.firstMs === null && !this.assembly.usage ? null : statsOf(this.assembly, performance.now());
    for (const answer of this.assembly.answers) {
      answer.finish ??= finish;
      answer.stats = stats;
      answer.requestId = this.requestId;
      if (error) answer.error = { message: error.message };
    }
  }
}

// The end of an answer whose request failed.
function endOf(error) {
  if (!(error instanceof ServerError)) return "cut";
  if (error.status === 0) return error.code === "unreachable" ? "unsent" : "cut";
  return error.status < 500 || error.status === 503 ? "refused" : "failed";
}

async function reasonsOf(requestId) {
  try {
    const explanations = await explain(requestId);
    return explanations?.length ? explanations.map((one) => one.text) : [NOT_THERE];
  } catch (error) {
    return [error.message];
  }
}
