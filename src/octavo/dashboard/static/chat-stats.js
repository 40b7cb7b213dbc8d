// Figures of an answer: rates, times, probabilities, in words. Pure.

/** Return the stored figures of a finished request: the server's, and those measured here. */
export function statsOf(assembly, nowMs) {
  const { usage, timings } = assembly;
  return {
    promptTokens: usage?.prompt_tokens ?? null,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
    completionTokens: usage?.completion_tokens ?? null,
    numAnswers: assembly.answers.length,
    tokensPerS: timings?.tokens_per_s ?? seenRate(assembly),
    isMeasuredHere: timings?.tokens_per_s === undefined || timings?.tokens_per_s === null,
    firstS: assembly.firstMs === null ? null : (assembly.firstMs - assembly.startedMs) / 1000,
    totalS: (nowMs - assembly.startedMs) / 1000,
    queueS: timings?.queue_s ?? null,
    prefillS: timings?.prefill_s ?? null,
    decodeS: timings?.decode_s ?? null,
    preemptedS: timings?.preempted_s ?? null,
  };
}

/** Return the rate of pieces per second after the first; null with fewer than two. */
export function seenRate({ pieces, firstMs, lastMs }) {
  return pieces > 1 && lastMs > firstMs ? ((pieces - 1) * 1000) / (lastMs - firstMs) : null;
}

/** Return seconds for people. */
export function seconds(value) {
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 99.95 ? `${value.toFixed(value < 9.995 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

/** Return a number as text, with three significant digits or as a whole number. */
export function number(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

const ENDS = { stop: "ended by itself", length: "ended at the limit of tokens", tool_calls: "calls tools", stopped: "stopped", cut: "cut off", refused: "refused", failed: "failed", unsent: "not sent" };

/** Return the figures of a request, as parts [{label, words, title}]. */
export function requestParts(stats) {
  const parts = [];
  const add = (label, words, title) => parts.push({ label, words, title });
  if (stats === null) return parts;
  if (stats.tokensPerS !== null) add("rate", `${stats.isMeasuredHere ? "≈ " : ""}${number(stats.tokensPerS)} tokens/s`, "tokens a second behind the first one, of all answers of the request");
  if (stats.firstS !== null) add("first", `first after ${seconds(stats.firstS)}`, firstTitle(stats));
  if (stats.promptTokens !== null) {
    const cached = stats.cachedTokens ? `, ${number(stats.cachedTokens)} cached` : "";
    add("prompt", `${number(stats.promptTokens)} prompt tokens${cached}`, "cached ones were not computed again");
  }
  if (stats.completionTokens !== null) add("completion", `${number(stats.completionTokens)} completion tokens`, "tokens generated, in all answers of the request");
  if (stats.preemptedS) add("preempted", `set aside for ${seconds(stats.preemptedS)}`, "others needed the memory, or came first by the policy");
  add("total", seconds(stats.totalS), "from sending to the end, as seen by this page");
  return parts;
}

/** Return the figures of one answer. */
export function answerParts(answer) {
  const parts = [];
  const doubt = perplexity(answer.tokens);
  if (doubt !== null) parts.push({ label: "perplexity", words: `perplexity ${number(doubt)}`, title: "exp of the mean negative log-probability: 1 is certain" });
  if (!answer.finish) return parts;
  const words = answer.stopped && answer.finish === "stop" ? `ended at ${JSON.stringify(answer.stopped)}` : (ENDS[answer.finish] ?? answer.finish);
  return [...parts, { label: "finish", words, title: "why it ended" }];
}

function firstTitle(stats) {
  if (stats.queueS === null) return "time to the first token";
  return `time to the first token, as seen by this page; the server: ${seconds(stats.queueS)} in the queue, ${seconds(stats.prefillS)} for the prompt`;
}

/** Return exp of the mean negative log-probability; null without any. */
export function perplexity(tokens) {
  if (!tokens?.length) return null;
  return Math.exp(-tokens.reduce((sum, token) => sum + token.p, 0) / tokens.length);
}

/** Return how surprising a token is, 0 (sure) to 4. */
export function surprise(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.9 ? 0 : p >= 0.6 ? 1 : p >= 0.3 ? 2 : p >= 0.1 ? 3 : 4;
}

/** Return a probability for people. */
export function percent(logprob) {
  const p = Math.exp(logprob) * 100;
  return p >= 99.95 ? "100 %" : p >= 0.1 ? `${p.toFixed(1)} %` : p >= 0.001 ? `${Number(p.toPrecision(1))} %` : "< 0.001 %";
}

/** Return the texts of tokens: a letter that several make up is shown at the last of them, the others have "". */
export function tokenTexts(tokens) {
  let decoder = null;
  return tokens.map((token) => {
    if (!token.b) {
      decoder = null;
      return token.t;
    }
    decoder ??= new TextDecoder();
    return decoder.decode(new Uint8Array(token.b), { stream: true });
  });
}
