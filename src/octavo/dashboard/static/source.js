// Sources of frames: the server's feed, a file, or the page itself.

const RETRY_MS = 1500;
const BATCH = 2000; // frames that are added at once, before other events run

/** Splits a stream of server-sent events into their data; keeps an incomplete event for the next call. */
export class EventParser {
  constructor() { this.rest = ""; }

  /** Return [kind, data] of the events that a piece of text completes. */
  push(text) {
    const blocks = (this.rest + text).split("\n\n");
    this.rest = blocks.pop();
    return blocks.map((block) => {
      let kind = "message";
      const data = [];
      for (const each of block.split("\n")) {
        if (each.startsWith("event:")) kind = each.slice(6).trim();
        else if (each.startsWith("data:")) data.push(each.slice(5).trimStart());
      }
      return [kind, data.join("\n")];
    }).filter(([, data]) => data);
  }
}

/**
 * Follows the server's feed until stopped. `tell` is called with (state, words): "live", "trouble" or "refused";
 * `takeReplicas` with the statuses of a fleet's replicas.
 */
export class Feed {
  constructor(url, take, tell, takeReplicas) {
    this.url = url;
    this.take = take;
    this.tell = tell;
    this.takeReplicas = takeReplicas;
    this.abort = null;
    this.timer = 0;
  }

  start() { this.stop(); this.#follow(); }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async #follow() {
    const abort = this.abort = new AbortController();
    let again = true;
    try {
      const answer = await fetch(this.url, { signal: abort.signal, headers: { accept: "text/event-stream" }, cache: "no-store" });
      if (answer.status === 401) { location.reload(); return; }
      if (!answer.ok) {
        const message = (await answer.json().catch(() => ({}))).error?.message || `the server answered ${answer.status}`;
        again = answer.status === 429 || answer.status >= 500;
        this.tell(again ? "trouble" : "refused", message);
      } else await this.#read(answer);
    } catch (error) {
      if (abort.signal.aborted) return;
      this.tell("trouble", "the server does not answer");
    }
    if (again && !abort.signal.aborted) this.timer = setTimeout(() => this.#follow(), RETRY_MS);
  }

  async #read(answer) {
    const parser = new EventParser(), decoder = new TextDecoder(), reader = answer.body.getReader();
    this.tell("live", "");
    for (;;) {
      const { done, value: bytes } = await reader.read();
      if (done) break;
      for (const [kind, data] of parser.push(decoder.decode(bytes, { stream: true }))) {
        const value = JSON.parse(data);
        if (kind === "trouble") this.tell("trouble", value.message);
        else if (kind === "replicas") this.takeReplicas(value);
        else {
          this.tell("live", "");
          this.take(value);
        }
      }
    }
    this.tell("trouble", "the feed ended");
  }
}

/** Pass frames from bytes of JSON lines, gzipped or not, to `take` in batches. Throws SyntaxError for other data. */
export async function readFrames(bytes, take) {
  const head = bytes.subarray(0, 2), isPacked = head[0] === 0x1f && head[1] === 0x8b;
  let stream = new Blob([bytes]).stream();
  if (isPacked) stream = stream.pipeThrough(new DecompressionStream("gzip"));
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", batch = [], number = 0;
  const flush = async () => { take(batch); number += batch.length; batch = []; await new Promise((go) => setTimeout(go)); };
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value || "")).split("\n");
    rest = done ? "" : lines.pop();
    for (const each of lines) {
      if (!each.trim()) continue;
      const frame = JSON.parse(each);
      if (typeof frame?.k !== "string") throw new SyntaxError("a line is no frame");
      batch.push(frame);
      if (batch.length >= BATCH) await flush();
    }
    if (done) break;
  }
  await flush();
  return number;
}

/** Return the frames in the page itself, or null. */
export function embeddedFrames() {
  const holder = document.getElementById("frames");
  return holder ? unpackBase64(holder.textContent) : null;
}

function unpackBase64(text) {
  const raw = atob(text.trim()), found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

/** Return a chosen file's frames: JSON lines, gzipped or not, or a page that was written with frames in it. */
export async function fileBytes(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes[0] !== 0x3c) return bytes; // it does not begin with "<"
  const held = /<script type="application\/octet-stream" id="frames">([^<]*)</.exec(new TextDecoder().decode(bytes));
  if (!held) throw new SyntaxError("this page holds no frames");
  return unpackBase64(held[1]);
}
