// Server-sent events from bytes (WHATWG HTML, "Server-sent events").
// Owns: lines, fields, the end of an event. Does not: know what an event's data means.
// Invariant: the same bytes give the same events, however they are split into pieces.

export const MAX_EVENT_CHARACTERS = 32 * 1024 * 1024;

export class SseParser {
  #decoder = new TextDecoder();
  #pieces = []; // of a line that has not ended
  #data = [];
  #type = "";
  #held = 0; // characters of the event so far
  #skipsLineFeed = false; // the last character was a carriage return

  /** Add bytes; return the events that they complete: [{type, data}]. */
  push(bytes) {
    return this.#take(this.#decoder.decode(bytes, { stream: true }));
  }

  /** Return true if an event is incomplete: the stream was cut. */
  get isOpen() {
    return this.#data.length > 0 || this.#pieces.length > 0;
  }

  #take(text) {
    const events = [];
    let start = 0;
    if (this.#skipsLineFeed && text) {
      if (text[0] === "\n") start = 1;
      this.#skipsLineFeed = false;
    }
    const breaks = /\r\n|\r|\n/g;
    breaks.lastIndex = start;
    for (let found = breaks.exec(text); found !== null; found = breaks.exec(text)) {
      this.#pieces.push(text.slice(start, found.index));
      this.#line(this.#pieces.length === 1 ? this.#pieces[0] : this.#pieces.join(""), events);
      this.#pieces = [];
      start = breaks.lastIndex;
      this.#skipsLineFeed = found[0] === "\r" && start === text.length;
    }
    if (start < text.length) this.#pieces.push(text.slice(start));
    this.#held += text.length;
    if (this.#held > MAX_EVENT_CHARACTERS) throw new Error("an event of the stream is too long");
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length) events.push({ type: this.#type || "message", data: this.#data.join("\n") });
      this.#data = [];
      this.#type = "";
      this.#held = 0;
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) {
      this.#held = 0; // a comment keeps the connection alive
      return;
    }
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#type = value;
  }
}

/** Yield the events of a response's body. Throws its reader's errors, and an Error if the body ends within an event. */
export async function* readEvents(body) {
  const parser = new SseParser();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      yield* parser.push(value);
    }
  } finally {
    reader.releaseLock();
  }
  if (parser.isOpen) throw new Error("the stream was cut");
}
