// Two records of one trace side by side, moved by one clock: by step, or by the time since each began.

import { h } from "./dom.js";
import { Player } from "./player.js";
import { Viewer } from "./viewer.js";

export class Compare {
  /** `records` are { title, lines } each, the header first. */
  constructor(element, records, options = {}) {
    const views = [];
    this.player = new Player(views);
    this.element = element;
    element.classList.add("v-compare");
    this.player.element.addEventListener("keydown", (event) => views[0].keys.down(event));
    const sides = records.map(() => h("div"));
    element.append(h("div", { className: "viewer v-shared" }, this.player.element), h("div", { className: "v-sides" }, sides));
    this.views = views;
    records.forEach(({ title }, index) => views.push(new Viewer(sides[index], { ...options, title, player: this.player })));
    records.forEach(({ lines }, index) => views[index].push(lines));
    this.player.setMode(true);
    this.player.seek(0);
  }
}
