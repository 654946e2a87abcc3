// The keyboard: what each key does, and the dialog that says so.

import { h } from "./dom.js";

const HELP = [
  ["Space", "play or pause"],
  ["← →", "a step back, a step forward"],
  ["Shift ← →", "ten steps"],
  ["Home End", "to the beginning; to the end, where a live view follows"],
  ["[ ]", "slower, faster"],
  ["+ −", "wider or narrower steps"],
  ["N P", "select the next or the previous request"],
  ["Escape", "clear the selection"],
  ["Arrows in the pages", "from page to page; Enter selects"],
  ["↑ ↓ in the tree, the lanes", "from branch to branch, from lane to lane"],
  ["?", "this list"],
];

export class Keys {
  constructor(viewer) {
    this.viewer = viewer;
    this.dialog = h("dialog", { className: "v-help", "aria-label": "Keys" },
      h("dl", {}, HELP.map(([key, what]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)))),
      h("form", { method: "dialog" }, h("button", { className: "v-button v-wide" }, "Close")));
    this.button = h("button", { type: "button", className: "v-why v-keys", "aria-label": "Keys", title: "Keys (?)", onclick: () => this.dialog.showModal() }, "⌨");
    viewer.element.addEventListener("keydown", (event) => this.down(event));
  }

  down(event) {
    const { viewer } = this, { player } = viewer, { target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || !viewer.history?.lines.length || this.dialog.open) return;
    if (target.closest("select, textarea, input:not([type=range])")) return;
    if (event.key === " " && target.closest("button, a")) return;
    const inPages = target === viewer.pages.canvas, inTree = target === viewer.tree.canvas, inLanes = target === viewer.timeline.canvas;
    const up = (by) => (inPages ? this.#page(by * viewer.pages.columns) : inTree ? this.#branch(by) : this.#lane(by));
    const ten = event.shiftKey ? 10 : 1;
    const acts = {
      " ": () => player.toggle(),
      ArrowLeft: () => (inPages ? this.#page(-1) : player.step(-ten)),
      ArrowRight: () => (inPages ? this.#page(1) : player.step(ten)),
      ArrowUp: (inPages || inTree || inLanes) && (() => up(-1)),
      ArrowDown: (inPages || inTree || inLanes) && (() => up(1)),
      Enter: inPages && (() => viewer.pages.cursor >= 0 && viewer.select(viewer.hovered ?? { page: viewer.pages.cursor })),
      Home: () => { player.pause(); player.seek(player.first, true); },
      End: () => player.end(),
      "[": () => player.faster(-1),
      "]": () => player.faster(1),
      "+": () => this.#zoom(1.5), "=": () => this.#zoom(1.5),
      "-": () => this.#zoom(1 / 1.5),
      n: () => this.#request(1),
      p: () => this.#request(-1),
      Escape: () => { viewer.pages.cursor = -1; viewer.hover(null); viewer.select(null); },
      "?": () => this.dialog.showModal(),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #zoom(factor) {
    this.viewer.timeline.axis.zoom(factor);
    this.viewer.show(this.viewer.index);
  }

  #page(by) {
    const { viewer } = this, { pages } = viewer;
    pages.cursor = Math.max(0, Math.min(pages.count - 1, pages.cursor < 0 ? 0 : pages.cursor + by));
    const [request] = viewer.state.holders(pages.cursor);
    viewer.hover(request === undefined ? { page: pages.cursor } : { page: pages.cursor, request });
    viewer.said.spoken.textContent = `page ${pages.cursor}, ${["free", "cached", `of request ${request}`, `shared by ${viewer.state.users[pages.cursor]}`][viewer.state.kind(pages.cursor)]}`;
  }

  #branch(by) {
    const { viewer } = this;
    const nodes = viewer.tree.nodes.filter(({ pages }) => pages.length).sort((one, other) => one.row - other.row || one.depth - other.depth);
    const at = nodes.findIndex(({ pages }) => pages[0] === viewer.selected?.node);
    const next = nodes[at < 0 ? 0 : Math.max(0, Math.min(nodes.length - 1, at + by))];
    if (next) viewer.select({ page: next.pages[0], node: next.pages[0] });
  }

  #lane(by) {
    const { viewer } = this, { state, index } = viewer;
    const rows = viewer.timeline.rows.filter(({ lane }) => lane.arrived <= index && lane.until >= index && state.requests.has(lane.r)).sort((one, other) => one.row - other.row);
    const at = rows.findIndex(({ lane }) => lane.r === viewer.selected?.request);
    const next = rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + by))];
    if (next) viewer.select({ request: next.lane.r });
  }

  #request(by) {
    const { viewer } = this;
    const all = viewer.state.all("running", "preempted", "waiting").map(({ r }) => r);
    if (!all.length) return;
    const at = all.indexOf(viewer.selected?.request);
    viewer.select({ request: all[at < 0 ? (by > 0 ? 0 : all.length - 1) : (at + by + all.length) % all.length] });
  }
}
