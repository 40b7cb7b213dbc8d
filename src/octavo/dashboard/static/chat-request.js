// Requests: from a conversation and its settings to a body, to curl and to Python.
// Pure. Does not: check ranges (the server does, and names the field) or send anything.

/** The settings that are numbers: [name, label, step, hint]. An empty one takes the model's own default. */
export const NUMBERS = [
  ["temperature", "Temperature", 0.1, "0 takes the likeliest token; higher is more varied"],
  ["top_p", "Top p", 0.05, "only the likeliest tokens that have this probability together"],
  ["top_k", "Top k", 1, "only so many of the likeliest tokens"],
  ["min_p", "Min p", 0.01, "only tokens at least so likely, beside the likeliest"],
  ["max_tokens", "Max tokens", 1, "how long an answer may get"],
  ["seed", "Seed", 1, "the same seed and settings give the same answer"],
  ["presence_penalty", "Presence penalty", 0.1, "for tokens that were generated before"],
  ["frequency_penalty", "Frequency penalty", 0.1, "for each time that a token was generated before"],
  ["repetition_penalty", "Repetition penalty", 0.05, "1 is none; above it, against what the prompt or the answer has"],
  ["n", "Answers", 1, "several answers at once, side by side"],
];
const WHOLE = new Set(["top_k", "max_tokens", "seed", "n"]);
const OF_OPENAI = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "n", "stop",
  "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "reasoning_effort", "stream", "stream_options",
]);

/** The default settings. */
export const DEFAULTS = Object.freeze({
  ...Object.fromEntries(NUMBERS.map(([name]) => [name, ""])),
  system: "", stop: "", logprobs: false, top_logprobs: "5", response_format: "text", schema: "", tools: "",
  tool_choice: "auto", reasoning_effort: "", extra: "",
});

/** A setting with an invalid value. */
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Make the body of a request. Throws FieldError. */
export function bodyOf(model, settings, messages) {
  const body = {};
  if (model) body.model = model;
  body.messages = settings.system.trim() ? [{ role: "system", content: settings.system }, ...messages] : messages;
  for (const [name, label] of NUMBERS) {
    const text = String(settings[name]).trim();
    if (text !== "") body[name] = numberOf(name, label, text);
  }
  const stops = settings.stop.split("\n").filter((line) => line !== "").map(unescaped);
  if (stops.length) body.stop = stops;
  if (settings.logprobs) {
    body.logprobs = true;
    body.top_logprobs = numberOf("top_logprobs", "Alternatives", String(settings.top_logprobs).trim() || "0");
  }
  if (settings.response_format === "json_object") body.response_format = { type: "json_object" };
  if (settings.response_format === "json_schema") {
    const schema = jsonOf("schema", "The schema", settings.schema, (value) => typeof value === "object" && !Array.isArray(value));
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.tools.trim()) {
    body.tools = jsonOf("tools", "Tools", settings.tools, Array.isArray);
    if (settings.tool_choice !== "auto") body.tool_choice = settings.tool_choice;
  }
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.extra.trim()) {
    Object.assign(body, jsonOf("extra", "Other fields", settings.extra, (value) => typeof value === "object" && !Array.isArray(value)));
  }
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

function numberOf(name, label, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new FieldError(name, `${label} is ${JSON.stringify(text)}: give a number`);
  if ((WHOLE.has(name) || name === "top_logprobs") && !Number.isInteger(value)) throw new FieldError(name, `${label} is ${text}: give a whole number`);
  return value;
}

function jsonOf(name, label, text, fits) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `${label}: this is no JSON (${error.message})`);
  }
  if (value === null || !fits(value)) throw new FieldError(name, `${label}: give a JSON ${fits === Array.isArray ? "list" : "object"}`);
  return value;
}

const unescaped = (line) => line.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]);

/** Turn a conversation's messages into those of a request: the picked choice of each answer, calls and their results. */
export function messagesOf(messages) {
  return messages.flatMap((message) => {
    if (message.role === "tool") return [{ role: "tool", tool_call_id: message.callId, content: message.content }];
    if (message.role !== "assistant") return [{ role: message.role, content: contentOf(message) }];
    const answer = shownAnswer(message);
    const calls = callsOf(answer).map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    if (!answer.content && !calls.length) return []; // an empty answer
    return [{ role: "assistant", content: answer.content, ...(calls.length ? { tool_calls: calls } : {}) }];
  });
}

function contentOf({ content, images }) {
  if (!images?.length) return content;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content.trim() ? [...parts, { type: "text", text: content }] : parts;
}

/** Return the answer of a message with which the conversation continues. */
export const shownAnswer = (message) => message.answers[message.picked ?? message.from ?? 0];

/** Return the calls of an answer that have a name. */
export const callsOf = (answer) => answer.calls.filter((call) => call?.name);

/** Write a request as a command for a shell. */
export function curlOf(base, body, usesKey) {
  const key = usesKey ? ` \\\n  -H "Authorization: Bearer $OCTAVO_API_KEY"` : "";
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${shellWord(`${base}v1/chat/completions`)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`;
}

const shellWord = (text) => (/^[\w.:/@%+=~-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** Write a request as a program for OpenAI's Python client. */
export function pythonOf(base, body, usesKey) {
  const known = Object.entries(body).filter(([name]) => OF_OPENAI.has(name));
  const others = Object.entries(body).filter(([name]) => !OF_OPENAI.has(name));
  const lines = known.map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`);
  if (others.length) lines.push(`    extra_body=${pythonValue(Object.fromEntries(others), 1)},`);
  const key = usesKey ? 'os.environ["OCTAVO_API_KEY"]' : '"none"';
  return `${usesKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${pythonValue(`${base}v1`)}, api_key=${key})
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
`;
}

/** Write a JSON value in Python's syntax. */
export function pythonValue(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return pythonText(value);
  if (typeof value === "number") return String(value);
  const items = Array.isArray(value)
    ? value.map((item) => pythonValue(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${pythonText(name)}: ${pythonValue(item, depth + 1)}`);
  const [begin, end] = Array.isArray(value) ? "[]" : "{}";
  const line = begin + items.join(", ") + end;
  if (line.length <= 88 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  return `${begin}\n${items.map((item) => `${indent}${item},\n`).join("")}${"    ".repeat(depth)}${end}`;
}

// JSON's escapes are Python's, but for a slash and for halves of a pair, which JSON.stringify writes as \ud800.
const pythonText = (text) => JSON.stringify(text).replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029").replaceAll("\x7f", "\\x7f");
