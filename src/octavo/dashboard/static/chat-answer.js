// A streamed answer: the chunks of /v1/chat/completions combined by choice. Plain data, no DOM.
// Owns: the data of an answer. Does not: read the network, show anything.

/** Make an empty answer. */
export function emptyAnswer() {
  return { content: "", reasoning: "", calls: [], tokens: [], finish: null, stats: null };
}

/** Combines the chunks of one request. `answers` are its choices, in order. */
export class Assembly {
  constructor(count, startedMs) {
    this.answers = Array.from({ length: count }, emptyAnswer);
    this.startedMs = startedMs;
    this.firstMs = null; // time of the first text
    this.lastMs = null;
    this.pieces = 0; // chunks with text: about the number of tokens
    this.usage = null;
    this.timings = null;
    this.id = null;
  }

  /** Add a chunk that arrived at a time; return the indexes of the choices that it changed. Throws ServerError. */
  push(chunk, nowMs) {
    if (chunk.error) throw new ServerError(chunk.error.message ?? "the server failed", { code: chunk.error.code, param: chunk.error.param });
    this.id ??= chunk.id ?? null;
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timings) this.timings = chunk.timings;
    const changed = [];
    for (const choice of chunk.choices ?? []) {
      const answer = this.answers[choice.index];
      if (!answer) continue;
      if (this.#take(answer, choice)) {
        this.firstMs ??= nowMs;
        this.lastMs = nowMs;
        this.pieces += 1;
      }
      changed.push(choice.index);
    }
    return changed;
  }

  #take(answer, choice) {
    const delta = choice.delta ?? {};
    const tokens = choice.logprobs?.content ?? [];
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    answer.content += delta.content ?? "";
    answer.reasoning += reasoning;
    for (const call of delta.tool_calls ?? []) takeCall(answer.calls, call);
    for (const token of tokens) answer.tokens.push(packed(token));
    if (choice.finish_reason) {
      answer.finish = choice.finish_reason;
      if (choice.stop_reason !== null && choice.stop_reason !== undefined) answer.stopped = String(choice.stop_reason);
    }
    return Boolean(delta.content || reasoning || delta.tool_calls?.length || tokens.length);
  }
}

function takeCall(calls, piece) {
  const call = (calls[piece.index] ??= { id: "", name: "", arguments: "" });
  if (piece.id) call.id = piece.id;
  if (piece.function?.name) call.name = piece.function.name;
  call.arguments += piece.function?.arguments ?? "";
}

/** A token's log-probability in few characters: t text, p its own, a the others [[text, p]], b bytes of half a letter. */
function packed(token) {
  const kept = { t: token.token, p: rounded(token.logprob) };
  if (token.top_logprobs?.length) kept.a = token.top_logprobs.map((other) => [other.token, rounded(other.logprob)]);
  if (token.token.includes("\ufffd") && token.bytes) kept.b = token.bytes;
  return kept;
}

const rounded = (logprob) => Math.round(logprob * 1e4) / 1e4;

/** A refusal or failure of the server; `status` is 0 if it was not reached, `retryAfterS` the wait before a retry. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null, isFinal = true } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfterS, isFinal });
  }
}
