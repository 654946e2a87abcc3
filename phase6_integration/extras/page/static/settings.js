// Settings: the fields of a chat request. Types and bounds are those of /openapi.json, so that the server alone has them.

import { button, load, store } from "./dom.js";
import { h } from "./viewer/dom.js";

const GROUPS = {
  Sampling: ["temperature", "top_p", "top_k", "min_p", "seed", "n"],
  Length: ["max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"],
  Penalties: ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids"],
  Engine: ["priority", "cache_salt", "truncate_prompt_tokens", "skip_special_tokens"],
};
const LISTS = { stop: "one on each line", bad_words: "one on each line" };
const JSON_OF = { stop_token_ids: "[1, 2]", allowed_token_ids: "[1, 2]", logit_bias: '{"5": -100}' };
const FORMATS = {
  text: { name: "Text" },
  json: { name: "JSON", field: () => ({ response_format: { type: "json_object" } }) },
  schema: {
    name: "JSON of a schema", hint: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
    field: (text) => ({ response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } } }),
  },
  choice: {
    name: "One of these", hint: "yes\nno", field: (text) => ({ structured_outputs: { choice: lines(text) } }),
  },
  regex: { name: "A regular expression", hint: "[0-9]{3}", field: (text) => ({ structured_outputs: { regex: text } }) },
};
const FIRST = { temperature: "0.5", max_tokens: "256" };  // what a new visitor begins with

const lines = (text) => text.split("\n").filter(Boolean);

export class Settings {
  constructor(form) {
    this.form = form;
    this.values = load("settings", FIRST);
    this.read = {};  // how the text of a field becomes its value
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Makes the fields. `schema` is the ChatRequest of /openapi.json; null: it cannot be had yet. */
  build(schema) {
    const area = (name, label, hint, rows = 2) => h("label", { className: "wide" }, label, this.#keep(h("textarea", { rows, name, placeholder: hint ?? "" })));
    const formats = this.#keep(h("select", { name: "format" }, Object.entries(FORMATS).map(([value, { name }]) => h("option", { value }, name))));
    this.format = area("format_text", "It must follow");
    const show = () => {
      const { hint } = FORMATS[formats.value];
      this.format.hidden = !hint;
      this.format.querySelector("textarea").placeholder = hint ?? "";
    };
    formats.addEventListener("change", show);
    show();
    this.form.replaceChildren(
      h("div", { className: "row" }, button("Reset", () => this.reset(schema)), h("small", {}, "An empty field is the server's default. They are kept in this browser.")),
      area("system", "System message"),
      h("fieldset", {}, h("legend", {}, "Form of the answer"), h("label", { className: "wide" }, "The answer is ", formats), this.format),
      ...Object.entries(GROUPS).map(([group, names]) => h("fieldset", {}, h("legend", {}, group), names.map((name) => this.#field(name, schema?.properties[name])))),
    );
  }

  reset(schema) {
    this.values = { ...FIRST };
    store("settings", null);
    this.build(schema);
    this.form.querySelector("button").focus();
  }

  // What is written into an element is its value the next time too.
  #keep(element) {
    const { name } = element;
    if (element.type === "checkbox") element.checked = this.values[name] === "true";
    else if (this.values[name] !== undefined) element.value = this.values[name];
    element.addEventListener("input", () => {
      this.values[name] = element.type === "checkbox" ? (element.checked ? "true" : "") : element.value;
      store("settings", this.values);
      this.#check(element);
    });
    return element;
  }

  #check(element) {
    if (element.setCustomValidity === undefined || !this.read[element.name]) return;
    element.setCustomValidity("");
    try { if (element.value) this.read[element.name](element.value); } catch (error) { element.setCustomValidity(error.message); }
  }

  #field(name, schema) {
    if (!schema) return null;
    const kinds = schema.anyOf ?? [schema], kind = kinds.find(({ type }) => type && type !== "null") ?? kinds[0];
    if (kind.type === "boolean") {
      const unlike = name === "skip_special_tokens";  // it is on, unless it is turned off
      this.read[name] = () => !unlike;
      return h("label", { className: "check" }, this.#keep(h("input", { type: "checkbox", name })), unlike ? "keep special tokens" : name);
    }
    if (kind.type === "number" || kind.type === "integer") {
      const integer = kind.type === "integer", low = kind.minimum ?? kind.exclusiveMinimum, high = kind.maximum ?? kind.exclusiveMaximum;
      const bounded = Math.abs(low) < 2 ** 53;  // else it is a seed: a browser has no numbers so large
      this.read[name] = (text) => number(text, integer, kind.exclusiveMinimum);
      const input = h("input", { type: "number", name, step: integer ? 1 : "any", inputMode: integer ? "numeric" : "decimal", placeholder: "any" });
      if (bounded) Object.assign(input, { min: low, max: high, placeholder: `${kind.exclusiveMinimum === undefined ? "" : "above "}${short(low)} to ${short(high)}` });
      return h("label", {}, name, this.#keep(input));
    }
    this.read[name] = name in LISTS ? lines : name in JSON_OF ? (text) => json(text, JSON_OF[name]) : (text) => text;
    const most = (kinds.find(({ maxItems }) => maxItems) ?? kind).maxItems;
    const hint = `${LISTS[name] ?? JSON_OF[name] ?? ""}${most && name in LISTS ? `, up to ${most}` : ""}`;
    if (!(name in LISTS)) return h("label", {}, name, this.#keep(h("input", { type: "text", name, placeholder: hint || `up to ${kind.maxLength} characters`, maxLength: kind.maxLength })));
    return h("label", {}, name, this.#keep(h("textarea", { name, rows: 1, placeholder: hint })));
  }

  /** Whether every field has a value that the server takes; shows the first that has not. */
  valid(reveal) {
    if (this.form.checkValidity()) return true;
    reveal();
    this.form.reportValidity();
    return false;
  }

  /** The fields of a request for these messages. */
  request(messages) {
    const { system, format = "text", format_text: text = "", ...rest } = this.values;
    const body = { messages: system?.trim() ? [{ role: "system", content: system }, ...messages] : messages };
    for (const [name, value] of Object.entries(rest)) {
      if (value !== "") body[name] = (this.read[name] ?? guess)(value);  // the schema may not be there yet
    }
    try {
      return { ...body, ...FORMATS[format].field?.(text || FORMATS[format].hint) };
    } catch (error) {
      throw new Error(`The schema of the answer is no JSON: ${error.message}`);
    }
  }
}

function guess(text) {
  try { return JSON.parse(text); } catch { return text; }
}

const short = (value) => (Math.abs(value) >= 1e5 ? value.toExponential(0).replace("e+", "e") : `${value}`);

function number(text, integer, above) {
  if (+text === above) throw new Error(`It must be above ${above}.`);
  if (integer && !Number.isSafeInteger(+text)) throw new Error("It must be an integer of at most 15 digits.");
  return +text;
}

function json(text, example) {
  try { return JSON.parse(text); } catch { throw new Error(`It must be JSON, such as ${example}`); }
}
