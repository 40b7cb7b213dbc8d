// The panel of settings. Owns: its fields, and marking an invalid one. Does not: keep settings or send them.

import { make } from "./chat-dom.js";
import { DEFAULTS, NUMBERS } from "./chat-request.js";

const SCHEMA_EXAMPLE = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}';
const TOOLS_EXAMPLE = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';
const EFFORTS = ["", "none", "minimal", "low", "medium", "high", "xhigh"];
const CHOICES = ["auto", "none", "required"];
// The server's name of a field -> its name here.
const SPELLINGS = { response_format: "schema", max_completion_tokens: "max_tokens" };

/** The fields in a form; `onChange` is called with the settings after each change. */
export class SettingsForm {
  #fields = new Map(); // name -> {input, error}

  constructor(form, onChange) {
    this.form = form;
    form.append(
      this.#area("system", "System prompt", 4, "Instructions for the model"),
      group("Sampling", NUMBERS.map(([name, label, step, hint]) => this.#number(name, label, step, hint))),
      this.#area("stop", "Stop strings", 2, "One on each line; \\n is a line's end"),
      group("Form of the answer", [
        this.#choice("response_format", "Response format", [["text", "text"], ["json_object", "JSON"], ["json_schema", "JSON that obeys a schema"]]),
        this.#area("schema", "Schema", 4, SCHEMA_EXAMPLE),
        this.#choice("reasoning_effort", "Reasoning", EFFORTS.map((word) => [word, word || "default"])),
      ]),
      group("Log-probabilities", [
        this.#box("logprobs", "Token probabilities"),
        this.#number("top_logprobs", "Alternatives", 1, "0 to 20"),
      ]),
      group("Tools", [
        this.#area("tools", "Tools (JSON list)", 4, TOOLS_EXAMPLE),
        this.#choice("tool_choice", "Tool choice", CHOICES.map((word) => [word, word])),
      ]),
      this.#area("extra", "Other fields (JSON object)", 2, '{"typical_p": 0.9}'),
    );
    form.addEventListener("input", () => {
      this.clear();
      this.#arrange();
      onChange(this.read());
    });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Return the current settings. */
  read() {
    const given = {};
    for (const [name, { input }] of this.#fields) given[name] = input.type === "checkbox" ? input.checked : input.value;
    return { ...DEFAULTS, ...given };
  }

  /** Show settings. */
  set(settings) {
    for (const [name, { input }] of this.#fields) {
      if (input.type === "checkbox") input.checked = settings[name];
      else input.value = settings[name];
    }
    this.clear();
    this.#arrange();
  }

  /** Mark the field that a request failed for; return its input, or null if it is not in the form. */
  mark(param, message) {
    const root = (param ?? "").split(/[.[]/)[0];
    const field = this.#fields.get(SPELLINGS[root] ?? root);
    if (!field) return null;
    field.input.setAttribute("aria-invalid", "true");
    field.error.textContent = message;
    field.input.closest("details")?.setAttribute("open", "");
    return field.input;
  }

  /** Remove all marks. */
  clear() {
    for (const { input, error } of this.#fields.values()) {
      input.removeAttribute("aria-invalid");
      error.textContent = "";
    }
  }

  // Fields that have no effect without another are shown only with it.
  #arrange() {
    const row = (name) => this.#fields.get(name).input.closest(".field");
    row("schema").hidden = this.#fields.get("response_format").input.value !== "json_schema";
    row("top_logprobs").hidden = !this.#fields.get("logprobs").input.checked;
    row("tool_choice").hidden = !this.#fields.get("tools").input.value.trim();
  }

  #field(name, label, input, isLine = false) {
    const error = make("span", { class: "error", id: `error-${name}`, role: "status" });
    input.setAttribute("aria-describedby", error.id);
    this.#fields.set(name, { input, error });
    return make("div", { class: isLine ? "field line" : "field" }, make("label", { for: input.id }, label), input, error);
  }

  #number(name, label, step, hint) {
    const input = make("input", { class: "input", id: `set-${name}`, type: "number", step: "any", name, placeholder: name === "n" ? "1" : "default", title: hint, autocomplete: "off" });
    input.step = step >= 1 ? "1" : "any";
    return this.#field(name, label, input, true);
  }

  #area(name, label, rows, placeholder) {
    return this.#field(name, label, make("textarea", { class: "input", id: `set-${name}`, name, rows, placeholder, spellcheck: name === "system" ? "true" : "false" }));
  }

  #choice(name, label, options) {
    return this.#field(name, label, make("select", { class: "input", id: `set-${name}`, name }, options.map(([value, words]) => make("option", { value }, words))), true);
  }

  #box(name, label) {
    return this.#field(name, label, make("input", { type: "checkbox", id: `set-${name}`, name }), true);
  }
}

function group(title, fields) {
  return make("details", { open: true }, make("summary", {}, title), fields);
}
