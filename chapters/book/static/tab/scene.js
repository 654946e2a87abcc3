// A scene of a chapter: controls, and the viewer of what the engine did with them.

import { Engine, data, h, recorded, view } from "./engine.js";
import { SCENES } from "./scenes.js";

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

const still = matchMedia("(prefers-reduced-motion: reduce)");
const engine = new Engine(); // one for all scenes of a page

// The run that a scene begins with is in a file, and plays as soon as the scene is seen. Python is loaded when a control moves.
export async function begin(place) {
  const { title, look, set, rest } = SCENES[place.dataset.scene];
  const state = h("p", { className: "scene-state", role: "status" });
  const controls = h("form", { className: "scene-controls", hidden: !Object.keys(set).length, "aria-label": `${title}: what to set` });
  const stage = h("div", { className: "scene-stage" });
  place.append(h("div", { className: "scene-head" }, h("strong", {}, title)), h("p", { className: "scene-look" }, look), stage, controls, state);
  controls.append(...Object.entries(set).map(([name, value]) => control(name, value)));
  controls.onsubmit = (event) => event.preventDefault();

  let viewer, runs = 0, timer, python = false, before = "";
  const run = async (find, wait) => {
    const number = ++runs;
    state.textContent = wait;
    try {
      const lines = await find();
      if (number !== runs) return; // a control has moved since
      viewer ??= await view(stage, "");
      const steps = lines.filter((line) => "step" in line).length;
      const computed = rest ? " of virtual time: a step takes 8 ms and 0.1 ms a token. It is the engine's own scheduler and cache, with a model that computes nothing" : "";
      const took = `${steps} steps, ${lines.at(-1).t.toFixed(2)} seconds`;
      state.textContent = `${took}${before && ` (with the previous settings: ${before})`}${computed}.`;
      before = took;
      place.dataset.steps = steps;
      viewer.push(lines);
      if (still.matches) viewer.player.seek(Math.floor(viewer.player.last / 2));
      else viewer.player.playFrom(viewer.player.first);
    } catch (error) {
      if (number === runs) state.textContent = `It could not run: ${error.message}`;
    }
  };
  controls.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      run(() => engine.call("play", { ...rest, ...values(controls) }), python ? "Running…" : "Loading Python: 14 MB, once…");
      python = true;
    }, 250);
  };
  const sight = new IntersectionObserver(([{ isIntersecting }]) => {
    if (!isIntersecting) return;
    sight.disconnect();
    run(() => recorded(`scenes/${place.dataset.scene}.jsonl`), "");
  });
  sight.observe(place);
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
