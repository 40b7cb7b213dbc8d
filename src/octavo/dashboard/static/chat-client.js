// The chat page's client of the server. Owns: addresses, errors in words, when to retry, reading streams.
// Does not: know conversations or show anything.

import { ServerError } from "./chat-answer.js";
import { readEvents } from "./chat-sse.js";

export const MAX_RETRIES = 8;
export const MAX_WAIT_S = 120; // a longer Retry-After is an error

/** Return the address of a path of the API, relative to this page. */
export const addressOf = (path) => new URL(path, document.baseURI).href;

/** Return the names of the models that are served. Throws ServerError. */
export async function listModels() {
  const response = await send("v1/models", {});
  const { data } = await response.json();
  return data.map((card) => ({
    id: card.id,
    maxModelLen: card.max_model_len ?? null,
    takesImages: card.input_modalities?.includes("image") ?? true,
  }));
}

/** Return the explanation of a request, whose `text` is a sentence; null if the server does not know it. Throws ServerError. */
export async function explain(requestId) {
  const response = await send(`v1/requests/${encodeURIComponent(requestId)}/explain`, {}, [404]);
  if (response.status === 404) return null;
  const { explanations = [] } = await response.json();
  return explanations.map((one) => ({ ...one, text: one.text[0].toUpperCase() + one.text.slice(1) }));
}

/** Yield the chunks of one answer. Throws ServerError, and the signal's error when it is aborted. */
export async function* chat(body, requestId, signal) {
  const headers = { "Content-Type": "application/json", "X-Request-Id": requestId };
  const response = await send("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  let isWhole = false;
  try {
    for await (const event of readEvents(response.body)) {
      if (event.data === "[DONE]") {
        isWhole = true;
        break;
      }
      yield JSON.parse(event.data);
    }
  } catch (error) {
    if (error instanceof ServerError || signal.aborted) throw error;
    throw cutError();
  }
  if (!isWhole) throw cutError();
}

const cutError = () => new ServerError("The connection was cut in the middle of the answer.", { code: "cut" });

/** Wait until a refused request may be sent again; `onTick` is called with the seconds left, `skip` ends the wait early. */
export async function countdown(waitS, signal, onTick, skip) {
  for (let left = Math.ceil(waitS); left > 0; left -= 1) {
    onTick(left);
    const isSkipped = await Promise.race([sleep(1000, signal).then(() => false), skip.then(() => true)]);
    if (isSkipped) return;
  }
}

/** Return the seconds after which a failed request is retried automatically; null if it is not. */
export function retryDelay(error, attempt) {
  if (!(error instanceof ServerError) || error.isFinal || attempt >= MAX_RETRIES) return null;
  if (error.status !== 429 && error.status !== 503) return null;
  const waitS = error.retryAfterS ?? Math.min(30, 2 ** attempt);
  return waitS <= MAX_WAIT_S ? waitS : null;
}

/** Return why the engine makes no progress now, in the server's words; null if it does, or the state is unknown. */
export async function engineTrouble() {
  try {
    await send("readyz", {});
  } catch (error) {
    return error.code === "engine_unavailable" ? error.message : null;
  }
  return null;
}

async function send(path, init, allowed = []) {
  let response;
  try {
    response = await fetch(addressOf(path), { credentials: "same-origin", cache: "no-store", ...init });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ServerError("The server cannot be reached. Is it running?", { code: "unreachable" });
  }
  if (response.ok || allowed.includes(response.status)) return response;
  throw await errorOf(response);
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's page, or an empty body: only the status is known
  }
  const { status, headers } = response;
  const after = Number(headers.get("retry-after") ?? Number.NaN);
  return new ServerError(error.message ?? `The server answered with status ${status}.`, {
    status,
    code: error.code ?? null,
    param: error.param ?? null,
    retryAfterS: Number.isFinite(after) ? after : null,
    isFinal: headers.get("x-should-retry") === "false" || ![429, 503].includes(status),
  });
}

function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    const onAbort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort, { once: true });
  });
}
