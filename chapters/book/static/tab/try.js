// The whole engine in this tab: a chat with the bundled model, and what the engine does meanwhile.

import { Engine, h, recorded, view } from "./engine.js";

const QUESTIONS = [
  "What is a KV cache?",
  "Why is the cache cut into pages?",
  "What is continuous batching?",
  "What does a scheduler do when no page is free?",
  "Why are prompts computed in chunks?",
];
const INSTRUCTION = "You are a careful assistant. You answer questions about serving language models in one plain sentence.";
const MOST = 96; // tokens of an answer

export async function begin(place) {
  const engine = new Engine(), answers = new Map(), history = [];
  const state = h("p", { className: "try-state", role: "status" }, "A recorded run plays until you ask. The first question loads Python and the model: 24 MB, once.");
  const log = h("ol", { className: "try-log" });
  const input = h("input", { name: "question", placeholder: "Ask about LLM serving", autocomplete: "off", "aria-label": "Your message" });
  const warmth = h("input", { type: "range", min: 0, max: 1.5, step: 0.1, value: 0, name: "temperature" });
  const warm = h("output", {}, "0");
  warmth.oninput = () => (warm.value = warmth.value);
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const form = h("form", { className: "try-form" }, input, h("button", {}, "Send"), stop);
  const several = h("button", { type: "button" }, "All five at once, with one instruction: they share its pages");
  const offered = h("div", { className: "try-offered" }, ...QUESTIONS.map((question) =>
    h("button", { type: "button", onclick: () => ask(question) }, question)), several);
  const stage = h("div", { className: "try-stage" });
  place.append(h("section", { className: "try-chat", "aria-label": "Chat" }, state, log, offered, form,
    h("label", { className: "try-warmth" }, "Temperature ", warmth, warm)), stage);

  let viewer, ready, opened, number = 0;
  const say = (text) => (state.textContent = text);
  const shown = Promise.all([view(stage, "Its engine"), recorded("viewer/first.jsonl")]).then(([made, lines]) => {
    viewer = made;
    viewer.push(lines);
    viewer.player.loops = true;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) viewer.player.seek(viewer.player.last * 0.6);
    else viewer.player.playFrom(viewer.player.first);
  });

  /** Load Python and the model: at the first question, or once someone is about to ask it. */
  function load() {
    if (ready) return ready;
    opened = performance.now();
    say("Loading Python and the model: 24 MB, once…");
    ready = Promise.all([engine.call("load"), shown]).then(() => {
      say(`Ready after ${seconds(opened)} s. The model has 4 million parameters and knows this book's subject, a little. Ask, and watch its pages.`);
    });
    ready.catch((error) => say(`It could not start: ${error.message}`));
    return ready;
  }

  async function ask(text, messages = [...history, ["user", text]]) {
    const id = number++;
    const said = h("p", { className: "try-said" }), facts = h("p", { className: "try-facts" }, "waits for the model");
    log.append(h("li", { className: "try-question" }, h("p", {}, text)), h("li", { className: "try-answer" }, said, facts));
    answers.set(id, { said, facts, tokens: 0, text, messages });
    stop.disabled = false;
    log.scrollTop = log.scrollHeight;
    try {
      await load();
      answers.get(id).began = performance.now();
      await engine.call("ask", id, messages, MOST, Number(warmth.value));
    } catch (error) {
      facts.textContent = error.message;
      answers.delete(id);
      stop.disabled = !answers.size;
    }
  }

  engine.addEventListener("lines", ({ detail }) => {
    viewer.push(detail);
    if (!viewer.live) { // the first of them
      viewer.live = true;
      viewer.player.setFast(true); // it is slow enough
    }
  });
  input.addEventListener("focus", load);
  engine.addEventListener("text", ({ detail: [id, text, reason] }) => {
    const answer = answers.get(id);
    answer.first ??= performance.now();
    place.dataset.first ??= seconds(opened); // when the first token of all came
    answer.said.textContent += text;
    answer.tokens++;
    const after = (performance.now() - answer.first) / 1000, rate = after && ((answer.tokens - 1) / after).toFixed(1);
    const ttft = Math.round(answer.first - answer.began);
    answer.facts.textContent = `first after ${ttft} ms, ${answer.tokens} tokens${rate ? `, ${rate} a second` : ""}${reason ? `, ${reason}` : ""}`;
    log.scrollTop = log.scrollHeight;
    if (!reason) return;
    answers.delete(id);
    stop.disabled = !answers.size;
    history.splice(0, Infinity, ...answer.messages, ["assistant", answer.said.textContent]);
    place.dataset.answered = Number(place.dataset.answered ?? 0) + 1;
  });

  form.onsubmit = (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (text) ask(text);
    input.value = "";
  };
  several.onclick = () => QUESTIONS.forEach((question) => ask(question, [["system", INSTRUCTION], ["user", question]]));
  stop.onclick = () => [...answers.keys()].forEach((id) => engine.call("stop", id));
}

const seconds = (since) => ((performance.now() - since) / 1000).toFixed(1);
