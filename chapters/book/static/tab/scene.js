// A scene of a chapter: controls, and the viewer of what the engine did with them.

import { Engine, data, h, view } from "./engine.js";

const CONTROLS = {
  requests: ["Requests", 1, 60],
  every: ["Steps between arrivals", 0, 12],
  prompt: ["Prompt, tokens", 4, 400],
  answer: ["Answer, tokens", 2, 120],
  shared: ["Shared beginning, tokens", 0, 256, 16],
  groups: ["Groups that share one", 1, 8],
  long: ["One long prompt, tokens", 0, 960, 16],
  greedy: ["A second client's requests", 0, 40],
  pages: ["Pages", 8, 256, 8],
  page_size: ["Tokens of a page", [4, 8, 16, 32]],
  running: ["Running at once, at most", 1, 32],
  budget: ["Tokens of a step, at most", 8, 512, 8],
  chunk: ["Tokens of a chunk, at most", 8, 512, 8],
  policy: ["Policy", ["fcfs", "priority", "longest-prefix"]],
  cache: ["Cache", { prefix: "prefixes are shared", paged: "nothing is shared" }],
  batching: ["Batching", { continuous: "continuous", static: "static" }],
};

// What there is to see in each chapter's scene, what a reader can set in it, and the rest of it.
const SCENES = {
  0: {
    title: "A batch that changes",
    look: "A static batch keeps its places to the end of its longest answer. Choose continuous: who takes a place that becomes free, and how many steps does that save?",
    set: { batching: "static", requests: 12, answer: 24, running: 4 },
    rest: { every: 0, prompt: 12, pages: 96, cache: "paged" },
  },
  1: {
    title: "A pool of pages",
    look: "A request takes a page when its tokens need one, and gives all of them back at its end. What happens when no page is free? Try half as many pages, then twice as many.",
    set: { pages: 40, page_size: 16, requests: 14, prompt: 60, answer: 40 },
    rest: { every: 3, cache: "paged", running: 16 },
  },
  2: {
    title: "Prefill, then decodes",
    look: "The first step of a batch computes all of its prompts, each later one a token for every request. Let eight run at once: how much longer does each step take, and how many steps are needed?",
    set: { requests: 8, prompt: 60, answer: 30, running: 4 },
    rest: { every: 0, pages: 96, cache: "paged", batching: "static" },
  },
  3: {
    title: "A long prompt among decodes",
    look: "A long prompt arrives while others write their answers. It is cut into chunks, so that each step still has a token for them. Set both limits to 512: what becomes of the ITL, the time between two tokens?",
    set: { budget: 64, chunk: 32, long: 480, requests: 8 },
    rest: { every: 1, prompt: 20, answer: 50, pages: 96, cache: "paged", running: 16 },
  },
  4: {
    title: "A tree of prefixes",
    look: "The requests of a group begin with the same tokens. The first of them computes these; the others find their pages in the tree. Share nothing: how much time and how many pages does that cost? With few pages, cached ones make way: which?",
    set: { shared: 96, groups: 3, pages: 48, requests: 18, cache: "prefix" },
    rest: { every: 3, prompt: 30, answer: 16, running: 4, budget: 128, chunk: 128 },
  },
  recorded: {
    title: "A recorded run of the server",
    look: "The bundled model on a CPU: chats that share instructions, two long prompts, a client that leaves, and a pool that is too small.",
    set: {},
  },
  5: {
    title: "Admission, preemption, fairness",
    look: "In the middle a second client, the tenant “greedy”, sends eight requests at once: whose turn is it then? With so few pages requests are preempted. Who, for whom, and does it go away with 120 pages?",
    set: { policy: "fcfs", pages: 40, requests: 16, greedy: 8, budget: 64, running: 12 },
    rest: { every: 2, prompt: 50, answer: 40, shared: 32 },
  },
};

const engine = new Engine(); // one for all scenes of a page

// The lines of a record in a file.
async function recorded() {
  const text = await (await fetch(data("record.jsonl"))).text();
  return text.trim().split("\n").map((line) => JSON.parse(line));
}

export async function begin(place) {
  const { title, look, set, rest } = SCENES[place.dataset.scene];
  const state = h("p", { className: "scene-state", role: "status" }, rest ? "The engine's own scheduler and cache run in this tab, with a model that computes nothing." : "");
  const start = h("button", { type: "button", className: "scene-start" }, rest ? "Run it here" : "Show it");
  const controls = h("form", { className: "scene-controls", hidden: true, "aria-label": `${title}: what to set` });
  const stage = h("div", { className: "scene-stage" });
  place.append(
    h("div", { className: "scene-head" }, h("strong", {}, title), start),
    h("p", { className: "scene-look" }, look),
    controls, state, stage);
  controls.append(...Object.entries(set).map(([name, value]) => control(name, value)));
  controls.onsubmit = (event) => event.preventDefault();

  let viewer, runs = 0, timer;
  const run = async () => {
    const number = ++runs;
    state.textContent = viewer || !rest ? "Running…" : "Loading Python: 14 MB, once…";
    try {
      const lines = rest ? await engine.call("play", { ...rest, ...values(controls) }) : await recorded();
      if (number !== runs) return; // a control has moved since
      const steps = lines.filter((line) => "step" in line).length;
      state.textContent = `${steps} steps, ${lines.at(-1).t.toFixed(2)} seconds${rest ? " of virtual time: a step takes 8 ms and 0.1 ms a token" : ""}`;
      place.dataset.steps = steps;
      viewer ??= await view(stage, "");
      viewer.push(lines);
      viewer.player.play();
    } catch (error) {
      if (number === runs) state.textContent = `It could not run: ${error.message}`;
    }
  };
  controls.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(run, 250);
  };
  start.onclick = () => {
    start.remove();
    controls.hidden = !controls.elements.length;
    run();
  };
}

function control(name, value) {
  const [label, low, high, step = 1] = CONTROLS[name];
  if (typeof low === "number") {
    const shown = h("output", {}, value);
    const range = h("input", { type: "range", name, min: low, max: high, step, value });
    range.addEventListener("input", () => (shown.value = range.value));
    return h("label", {}, h("span", {}, label, " ", shown), range);
  }
  const options = Object.entries(Array.isArray(low) ? Object.fromEntries(low.map((each) => [each, each])) : low);
  const select = h("select", { name }, ...options.map(([key, text]) => h("option", { value: key }, `${text}`)));
  select.value = value;
  return h("label", {}, h("span", {}, label), select);
}

function values(form) {
  const given = Object.fromEntries(new FormData(form));
  for (const name in given) if (/^\d+$/.test(given[name])) given[name] = Number(given[name]);
  return given;
}
