// Several requests at once, so that the engine has something to schedule. One HTTP request carries them all: a browser
// opens only six connections to a server.

import { stream } from "./api.js";
import { $ } from "./dom.js";
import { asking, Listener, tokens } from "./own.js";
import { h } from "./viewer/dom.js";

const ABOUT = `You are the guide of a small museum of computing. Be kind, brief and exact. The first room shows how a request
becomes tokens, and how tokens become numbers. The second room shows the paged cache: keys and values live in pages of
sixteen tokens, and a page table says where they are. The third room shows the scheduler, which plans a new batch for
every step under one budget of tokens. The fourth room shows the tree of prefixes: what many requests begin with is
computed once, and its pages are shared. The fifth room shows what happens when no page is free. Visitors ask a question
in each room; answer it in one or two sentences, and say which room has more about it.`;
const QUESTIONS = [
  "What is a page?", "What is a token?", "What is a prefill?", "What is a decode?", "What is a page table?", "What is preemption?",
  "What is a step?", "What is a KV cache?",
];
// The bundled model knows these as they stand: with anything after them it answers nonsense.
const SHORT = [
  "the Sun", "the Moon", "a planet", "a star", "a galaxy", "a comet", "gravity", "the water cycle", "a volcano", "an earthquake", "a rainbow",
  "a glacier", "a desert", "an island", "a river", "the atmosphere", "the tide", "a fossil", "an atom", "a molecule", "electricity", "a magnet",
  "light", "sound", "a battery", "a lever", "friction", "salt", "iron", "gold", "glass", "photosynthesis",
].map((thing) => `What is ${thing}?`);

const CROWDS = {
  prefix: {
    name: "8 that share a prefix", about: "the same system prompt, computed once",
    chats: () => QUESTIONS.map((question) => [{ role: "system", content: ABOUT }, { role: "user", content: question }]),
    note: "Each answer has 48 to 96 tokens, so that all run side by side for a while. What comes after its natural end may be nonsense.",
    fields: { max_tokens: 96, min_tokens: 48 },
  },
  long: {
    name: "A long one", about: "a prompt in chunks, then many tokens",
    chats: () => [[{ role: "system", content: Array(3).fill(ABOUT).join("\n\n") }, { role: "user", content: "Tell me about all the rooms." }]],
    note: "The answer goes on to 240 tokens on purpose. What comes after its natural end may be nonsense: it only keeps the engine busy.",
    fields: { max_tokens: 240, ignore_eos: true },
  },
  many: {
    name: "32 short ones", about: "more than one step can begin",
    chats: () => SHORT.map((content) => [{ role: "user", content }]),
    note: "Each answer has 16 to 48 tokens. A longer one is cut there on purpose.",
    fields: { max_tokens: 48, min_tokens: 16 },
  },
  fill: {
    name: "Fill the pool", about: "more than its pages hold, so that requests are preempted and cached pages evicted",
    chats: () => SHORT.slice(0, 10).map((content) => [{ role: "user", content }]),
    note: "Each answer goes on to 96 tokens on purpose. What comes after its natural end may be nonsense: it only fills the pool.",
    fields: { max_tokens: 96, ignore_eos: true },
  },
};

let current = null;

/** Starts one of the crowds; one that runs is aborted. Returns whether it has ended well. */
export async function start(kind, failed, touch) {
  stop();
  const { name, about, note, chats, fields } = CROWDS[kind], controller = (current = new AbortController());
  const all = chats(), texts = all.map(() => ""), ends = all.map(() => null);
  const rows = all.map((messages) => h("li", {}, h("b", {}, messages.at(-1).content), " ", h("span")));
  $("crowd").hidden = false;
  $("crowd-name").textContent = `${name}: ${about}.`;
  $("crowd-note").textContent = note;
  $("crowd-list").replaceChildren(...rows);
  $("abort-all").disabled = false;
  $("log").scrollTop = 0;  // they are above the conversation
  let asked = null, fault = null;
  const show = () => {
    rows.forEach((row, index) => { row.lastChild.textContent = texts[index]; row.className = ends[index] ?? ""; });
    const done = ends.filter(Boolean).length;
    $("crowd-count").textContent = fault ?? (controller.signal.aborted ? `Aborted; ${done} of ${all.length} had ended.` : `${done} of ${all.length} have ended.`);
  };
  const later = () => { asked ??= requestAnimationFrame(() => { asked = null; show(); }); };
  show();
  const listener = new Listener(), { signal } = controller;
  try {
    const prompt = await Promise.all(all.map((messages) => tokens({ messages }, signal)));
    const hear = (text, index, reason) => { texts[index] += text; ends[index] ??= reason; };
    let named = false;
    const name = ({ id }) => {
      named = true;
      rows.forEach((row, index) => { row.lastChild.dataset.request = `${id}-${index}`; row.prepend(touch.chip(`${id}-${index}`)); });
    };
    await stream("v1/completions", asking({ ...fields, prompt, temperature: 0.7 }), signal, hear, (chunk) => { if (!named) name(chunk); listener.hear(chunk); later(); });
  } catch (error) {
    if (!signal.aborted) {
      fault = error.message;
      failed(error);
    }
  }
  if (current === controller) end();
  show();
  listener.end().catch(() => {});  // only the viewer lacks some words
  return !fault && !signal.aborted;
}

function end() {
  current = null;
  $("abort-all").disabled = true;
}

export function stop() {
  current?.abort();
  end();
}
