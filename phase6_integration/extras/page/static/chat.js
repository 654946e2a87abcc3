// The conversation: what was asked, the answers as they stream, and what can be done with both. The browser keeps it.

import { stream } from "./api.js";
import { $, button, copier, load, store } from "./dom.js";
import { grow } from "./markdown.js";
import { asking, Listener, own, tokens } from "./own.js";
import { h } from "./viewer/dom.js";

export class Chat {
  /** `request(messages)` makes the body of a request; `failed(error)` and `sent(body)` are called with those, and
   *  `find(id)` with the name that an answer has in the engine. `touch` ties its words to pages. */
  constructor({ request, sent, failed, find, touch }) {
    Object.assign(this, { request, sent, failed, find, touch });
    this.names = new WeakMap();  // turn -> the name of its answer in the engine, since the page was loaded
    this.turns = load("chat", []);  // { role, texts, facts, fault }
    this.current = null;  // what stops the answer that is under way
    this.hinted = null;  // the answer that says, once in this browser, what its words can do
    this.log = $("log");
    this.atEnd = true;  // the end of the conversation is in view, and stays there
    this.log.addEventListener("scroll", () => { this.atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 48; });
    const follow = new ResizeObserver(() => { if (this.atEnd && this.turns.length) this.log.scrollTop = this.log.scrollHeight; });
    follow.observe(this.log);
    follow.observe($("turns"));
    this.draw();
  }

  get messages() { return this.turns.map(({ role, texts }) => ({ role, content: texts[0] })); }

  ask(question) {
    if (this.current) return;
    this.turns.push({ role: "user", texts: [question] });
    this.answer();
  }

  stop() { this.current?.abort(); }

  fresh() {
    this.stop();
    this.turns = [];
    store("chat", null);
    this.draw();
  }

  /** Asks for the answer to the last question. */
  async answer() {
    const turns = this.turns, turn = { role: "assistant", texts: [""], facts: [] }, controller = new AbortController();
    let body, answer;
    try {
      body = this.request(this.messages);
      this.sent(body);
    } catch (error) {
      turn.fault = error.message;
    }
    turns.push(turn);
    this.busy(controller);
    this.draw();
    this.log.scrollTop = this.log.scrollHeight;
    const article = $("turns").lastChild;
    const listener = new Listener();
    try {
      if (body && own.needed) await tokens({ messages: body.messages }, controller.signal);
      if (body) answer = await stream("v1/chat/completions", asking(body), controller.signal, (text, index) => this.#hear(article, turn, text, index), (chunk) => {
        listener.hear(chunk);
        if (this.names.has(turn)) return;
        this.names.set(turn, chunk.id);
        if (article.isConnected) this.#name(article, turn);
      });
    } catch (error) {
      if (!controller.signal.aborted) Object.assign(turn, { fault: error.message, full: error.code === "context_length_exceeded" }), this.failed(error);
    }
    turn.facts = facts(answer, controller.signal.aborted);
    if (turn.texts[0] && this.names.get(turn) && !load("hinted", false)) { this.hinted = turn; store("hinted", true); }
    if (this.current === controller) this.busy(null);
    if (this.turns !== turns) return;  // deleted meanwhile
    this.draw();
    this.#keep();
    listener.end().catch(() => {});  // the answer is there; only the viewer lacks some words
  }

  busy(controller) {
    this.current = controller;
    $("send").hidden = Boolean(controller);
    $("stop").hidden = !controller;
  }

  #keep() {
    if (!store("chat", this.turns) && !this.told) {
      this.told = true;
      this.turns.at(-1).facts.push("this browser keeps no history");
      this.draw();
    }
  }

  // At most once a frame, whatever the number of tokens.
  #hear(article, turn, text, index) {
    turn.texts[index] = (turn.texts[index] ?? "") + text;
    turn.drawing ??= requestAnimationFrame(() => {
      delete turn.drawing;
      if (article.isConnected) this.#texts(article, turn);
    });
  }

  #texts(article, turn) {
    const { texts } = turn;
    const parts = article.querySelectorAll(".text");
    for (let index = parts.length; index < texts.length; index++) article.insertBefore(h("div", { className: "text" }), article.querySelector(".foot"));
    article.querySelectorAll(".text").forEach((part, index) => grow(part, texts[index] ?? ""));
    this.#name(article, turn);
  }

  // Its texts carry the names of their requests, and a chip before the first its colour.
  #name(article, turn) {
    const name = this.names.get(turn);
    if (!name) return;
    article.querySelectorAll(".text").forEach((part, index) => { part.dataset.request = `${name}-${index}`; });
    if (article.querySelector(".chip")) return;
    article.prepend(this.touch.chip(`${name}-0`));
    this.touch.refresh();
  }

  draw() {
    $("welcome").hidden = this.turns.length > 0;
    $("fresh").disabled = !this.turns.length;
    $("turns").replaceChildren(...this.turns.map((turn, index) => (turn.role === "user" ? this.#question(turn, index) : this.#answer(turn, index))));
  }

  #question({ texts: [text] }, index) {
    const article = h("article", { className: "turn user", "aria-label": "You" }, h("p", {}, text));
    const edit = button("Edit", () => {
      const field = h("textarea", { value: text, rows: Math.min(8, text.split("\n").length + 1), "aria-label": "Your question" });
      const send = () => { if (field.value.trim()) this.#again(index, field.value.trim()); };
      field.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
        if (event.key === "Escape") { event.stopPropagation(); this.draw(); }
      });
      article.replaceChildren(field, h("div", { className: "foot" }, button("Send", send), button("Cancel", () => this.draw())));
      field.focus();
    }, { disabled: Boolean(this.current) });
    article.append(h("div", { className: "foot" }, edit));
    return article;
  }

  // The conversation up to there, and this question in place of what followed.
  #again(index, question) {
    if (this.current) return;
    this.turns = this.turns.slice(0, index);
    this.ask(question);
  }

  #answer(turn, index) {
    const last = index === this.turns.length - 1, busy = last && Boolean(this.current);
    const article = h("article", { className: "turn assistant", "aria-label": "Answer", "aria-busy": String(busy) });
    const foot = h("div", { className: "foot" });
    article.append(foot);
    this.#texts(article, turn);
    if (turn.fault) {
      foot.before(h("p", { className: "fault", role: "alert" }, turn.fault,
        turn.full ? button("Clear", () => this.fresh()) : null));
    }
    if (!busy) {
      if (turn.texts[0]) foot.append(copier(() => turn.texts.join("\n\n")));
      if (last) foot.append(button(turn.fault ? "Try again" : "Regenerate", () => this.#again(index - 1, this.turns[index - 1].texts[0])));
      const name = this.names.get(turn);
      if (name) foot.append(button("In the engine", () => this.find(`${name}-0`), { title: "Select this request in the view of the engine" }));
      foot.append(h("span", { className: "facts" }, turn.facts.map((fact) => h("span", {}, fact))));
      if (turn === this.hinted) foot.before(h("p", { className: "hint" }, "Point at a word of this answer, or touch it: its page, branch and step light up in the engine."));
    }
    return article;
  }
}

/** What an answer took, in words. */
export function facts(answer, stopped) {
  if (!answer) return stopped ? ["stopped"] : [];
  const list = [], { began, first, last, usage, reasons } = answer;
  if (first) list.push(`${Math.round(first - began)} ms from Send to the first token`);
  if (usage?.completion_tokens && last > began) list.push(`${Math.round(usage.completion_tokens / (last - began) * 1000)} tokens/s`); // from the question on: an answer may come in one burst
  if (usage) list.push(`${usage.completion_tokens} tokens`, `${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
  if (reasons.includes("length")) list.push("cut at max_tokens");
  return list;
}
