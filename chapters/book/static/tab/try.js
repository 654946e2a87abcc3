// The whole engine in this tab: a chat with the bundled model, and what the engine does meanwhile.

import { First } from "../../tab/first.js"; // the page's, packed
import { Tour } from "../../tab/tour.js";
import { Engine, h, view } from "./engine.js";

const QUESTIONS = [
  "What is a KV cache?",
  "Why is the cache cut into pages?",
  "What is continuous batching?",
  "What does a scheduler do when no page is free?",
  "Why are prompts computed in chunks?",
];
const INSTRUCTION = "You are a careful assistant of a course. Its students build an engine that serves language models, and they ask you about its cache, "
  + "its batches and its scheduler. They read your answer once, so be brief and exact. You answer questions about serving language models in one plain sentence.";
const FILLING = ["the Sun", "the Moon", "a star", "a comet", "gravity", "a volcano", "a rainbow", "a glacier", "an atom", "a magnet"];
const MOST = 96; // tokens of an answer
const REMEMBERED = 8; // messages of a conversation: the pool is small

export async function begin(place) {
  const engine = new Engine(), answers = new Map(), history = [];
  const state = h("p", { className: "try-state", role: "status" }, "A recorded run plays until you ask. The first question loads Python and the model: 24 MB, once.");
  const log = h("ol", { className: "try-log" });
  const input = h("input", { name: "question", placeholder: "Ask about LLM serving", autocomplete: "off", "aria-label": "Your message" });
  const warmth = h("input", { type: "range", min: 0, max: 1.5, step: 0.1, value: 0, name: "temperature" });
  const warm = h("output", {}, "0");
  warmth.oninput = () => (warm.value = warmth.value);
  const button = (text, onclick, more) => h("button", { type: "button", onclick, ...more }, text);
  const stop = button("Stop", () => [...answers.keys()].forEach((id) => engine.call("stop", id)), { disabled: true });
  const again = button("Replay", () => viewer.player.playFrom(from), { hidden: true, title: "What the engine did for the last questions, again" });
  const form = h("form", { className: "try-form" }, input, h("button", {}, "Send"), stop);
  const offered = h("div", { className: "try-offered" },
    button("Take the tour: 5 stops, 3 minutes", () => shown.then(() => tour.start()), { className: "try-first" }),
    ...QUESTIONS.map((question) => button(question, () => ask(question))),
    button("All five at once, with one instruction: they share its pages", () => QUESTIONS.forEach((question) => ask(question, [["system", INSTRUCTION], ["user", question]]))),
    button("Fill the pool: ten long answers at once, and one is preempted", () => FILLING.forEach((thing) => ask(`What is ${thing}?`, [["user", `What is ${thing}?`]], true))));
  const stage = h("div", { className: "try-stage" }), guide = h("section", { className: "try-tour", "aria-label": "Tour", hidden: true });
  place.append(h("section", { className: "try-chat", "aria-label": "Chat" }, guide, state, again, log, offered, form,
    h("label", { className: "try-warmth" }, "Temperature ", warmth, warm)), stage);

  let viewer, first, tour, ready, opened, from = 0, number = 0;
  const say = (text) => (state.textContent = text);
  const shown = view(stage, "The engine").then((made) => {
    viewer = made;
    first = new First(viewer, (recorded) => stage.toggleAttribute("data-recorded", recorded));
    tour = new Tour(guide, viewer, first);
    first.show();
  });

  /** Load Python and the model: at the first question, or once someone is about to ask it. */
  function load() {
    if (ready) return ready;
    opened = performance.now();
    say("Loading Python and the model: 24 MB, once… Until then the recorded run plays.");
    ready = Promise.all([engine.call("load"), shown]).then(() => {
      say(`Ready after ${seconds(opened)} s. The model has 4 million parameters and knows this book's subject, a little. Ask, and watch its pages.`);
    });
    ready.catch((error) => say(`It could not start: ${error.message}`));
    return ready;
  }

  /** What is asked for now is seen now, whatever has not been shown yet. */
  function now() {
    if (answers.size) return;
    if (first?.touring) tour.leave();
    from = viewer?.live ? viewer.history.end : 0;
    if (viewer?.live) viewer.player.follow();
  }

  /** Ask in the conversation, or in one of its own; `toTheEnd`: the answer has all tokens that it may have. */
  async function ask(text, alone, toTheEnd = false) {
    now();
    const messages = alone ?? [...history, ["user", text]];
    const id = number++;
    const said = h("p", { className: "try-said" }), facts = h("p", { className: "try-facts" }, "waits for the model");
    log.append(h("li", { className: "try-question" }, h("p", {}, text)), h("li", { className: "try-answer" }, said, facts));
    answers.set(id, { said, facts, tokens: 0, messages: alone ? null : messages, past: toTheEnd ? "; it goes on past its end, to fill the pool" : "" });
    stop.disabled = false;
    again.hidden = true;
    log.scrollTop = log.scrollHeight;
    try {
      await load();
      answers.get(id).began = performance.now();
      await engine.call("ask", id, messages, MOST, Number(warmth.value), toTheEnd);
    } catch (error) {
      facts.textContent = error.message;
      ended(id);
    }
  }

  function ended(id) {
    answers.delete(id);
    stop.disabled = !answers.size;
    again.hidden = answers.size > 0 || !first?.began; // an engine that could not start has nothing to replay
  }

  engine.addEventListener("lines", ({ detail }) => first.push(detail));
  input.addEventListener("focus", load);
  engine.addEventListener("text", ({ detail: [id, text, reason] }) => {
    const answer = answers.get(id);
    answer.first ??= performance.now();
    place.dataset.first ??= seconds(opened); // when the first token of all came
    answer.said.textContent += text;
    answer.tokens++;
    const after = (performance.now() - answer.first) / 1000, rate = after && ((answer.tokens - 1) / after).toFixed(1);
    const ttft = Math.round(answer.first - answer.began);
    answer.facts.textContent = `first after ${ttft} ms, ${answer.tokens} tokens${rate ? `, ${rate} a second` : ""}${reason ? `, ${reason}` : ""}${answer.past}`;
    log.scrollTop = log.scrollHeight;
    if (!reason) return;
    ended(id);
    if (answer.messages) history.splice(0, Infinity, ...[...answer.messages, ["assistant", answer.said.textContent]].slice(-REMEMBERED));
    place.dataset.answered = Number(place.dataset.answered ?? 0) + 1;
    if (answers.size) return;
    say("The engine is followed in slow motion. Pages that stay grey are cached, for the next prompt that begins alike.");
  });

  form.onsubmit = (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (text) ask(text);
    input.value = "";
  };
}

const seconds = (since) => ((performance.now() - since) / 1000).toFixed(1);
