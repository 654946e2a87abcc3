// The transport: which line is shown, and how it moves on. One clock drives one viewer, or two side by side.

import { h, icon, seconds } from "./dom.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16, 64];
const STEPS_A_SECOND = 8; // at speed 1

export class Player {
  /** `views` have { history, show(index) }. By time, all show the same moment; by step, the same number of lines. */
  constructor(views, changed = () => {}) {
    this.views = views;
    this.changed = changed;
    this.playing = false;
    this.live = false;
    this.following = false;
    this.byTime = false;
    this.speed = 1;
    this.position = 0; // lines since the beginning, or seconds of the record by time
    this.#build();
  }

  get lead() { return this.views.reduce((longest, view) => ((view.history?.end ?? 0) > (longest.history?.end ?? 0) ? view : longest)); }
  get first() { return this.byTime ? 0 : this.lead.history?.base ?? 0; }
  get last() {
    const histories = this.views.map(({ history }) => history).filter(Boolean);
    return Math.max(0, ...histories.map((history) => (this.byTime ? history.facts.at(-1)?.t ?? 0 : history.end - 1)));
  }

  seek(position, announce = false) {
    this.position = Math.max(this.first, Math.min(this.last, position));
    for (const view of this.views) {
      if (!view.history?.lines.length) continue;
      const index = this.byTime ? view.history.indexAt(this.position) : Math.floor(this.position);
      view.show(Math.max(view.history.base, Math.min(view.history.end - 1, index)), announce);
    }
    this.refresh();
  }

  step(by) {
    this.pause();
    if (!this.byTime) { this.seek(Math.floor(this.position) + by, true); return; }
    const { history, index } = this.lead;
    const target = Math.max(history.base, Math.min(history.end - 1, index + by));
    this.seek(history.fact(target).t, true);
  }

  /** Go on from where it is. At the end a live view follows, and a replay begins again. */
  play() {
    if (this.position >= this.last) {
      if (this.live) { this.follow(); return; }
      this.seek(this.first);
    }
    this.playing = true;
    this.before = null;
    this.refresh();
    requestAnimationFrame((now) => this.#tick(now));
    this.changed();
  }

  /** Show the newest line, and each that comes. */
  follow() {
    this.playing = this.following = true;
    this.seek(this.last);
    this.changed();
  }

  /** To the end: a live view follows from there. */
  end() {
    if (this.live) { this.follow(); return; }
    this.pause();
    this.seek(this.last, true);
  }

  pause() {
    this.playing = this.following = false;
    this.refresh();
    this.changed();
  }

  toggle() { if (this.playing) this.pause(); else this.play(); }

  faster(by) {
    this.speed = SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, SPEEDS.indexOf(this.speed) + by))];
    this.speeds.value = `${this.speed}`;
  }

  /** New lines have come. */
  grown() {
    if (this.following) this.seek(this.last);
    else if (!this.playing) this.seek(this.position);
    else this.refresh();
  }

  #tick(now) {
    if (!this.playing || this.following) return;
    const passed = this.before === null ? 0 : Math.min(0.25, (now - this.before) / 1000);
    this.before = now;
    const was = Math.floor(this.position);
    this.position = Math.min(this.last, this.position + passed * this.speed * (this.byTime ? 1 : STEPS_A_SECOND));
    if (this.byTime || Math.floor(this.position) !== was) this.seek(this.position);
    if (this.position >= this.last) this.live ? this.follow() : this.pause();
    else requestAnimationFrame((next) => this.#tick(next));
  }

  #build() {
    const button = (name, label, act) => h("button", { type: "button", className: "v-button", "aria-label": label, title: label, onclick: act }, icon(name));
    this.toggleButton = button("play", "Play", () => this.toggle());
    this.range = h("input", {
      type: "range", className: "v-scrub", min: 0, max: 0, step: 1, value: 0, "aria-label": "Step of the record",
      oninput: () => { this.pause(); this.seek(+this.range.value, true); },
    });
    this.speeds = h("select", { className: "v-select", "aria-label": "Speed", onchange: () => (this.speed = +this.speeds.value) },
      SPEEDS.map((speed) => h("option", { value: `${speed}`, selected: speed === 1 }, `${speed === 0.25 ? "¼" : speed === 0.5 ? "½" : speed}×`)));
    this.mode = h("select", { className: "v-select", "aria-label": "Synchronise by", onchange: () => this.setMode(this.mode.value === "time") },
      h("option", { value: "step" }, "by step"), h("option", { value: "time" }, "by time"));
    this.where = h("output", { className: "v-where" });
    this.element = h("div", { className: "v-transport", role: "group", "aria-label": "Playback" },
      h("span", { className: "v-buttons" },
        button("first", "To the beginning", () => { this.pause(); this.seek(this.first, true); }),
        button("back", "A step back", () => this.step(-1)), this.toggleButton,
        button("forward", "A step forward", () => this.step(1)),
        button("last", "To the end", () => this.end())),
      this.range, this.where, h("span", { className: "v-rate" }, this.speeds, this.mode));
  }

  setMode(byTime) {
    const { history, index } = this.lead;
    this.byTime = byTime;
    this.mode.value = byTime ? "time" : "step";
    if (history) this.seek(byTime ? history.fact(index).t : index);
  }

  refresh() {
    const { history, index } = this.lead;
    const name = this.playing ? "Pause" : "Play";
    if (this.toggleButton.title !== name) {
      this.toggleButton.title = name;
      this.toggleButton.setAttribute("aria-label", name);
      this.toggleButton.replaceChildren(icon(this.playing ? "pause" : "play"));
    }
    this.element.classList.toggle("v-is-live", this.live);
    if (!history?.lines.length || index === undefined) { this.where.textContent = "no steps yet"; return; }
    const line = history.line(index);
    Object.assign(this.range, { min: this.first, max: this.last, step: this.byTime ? "any" : 1 });
    this.range.value = this.position;
    this.range.setAttribute("aria-valuetext", `step ${line.step ?? "none"}, ${seconds(history.fact(index).t)}`);
    this.where.replaceChildren(h("b", {}, line.step === undefined ? "between steps" : `step ${line.step}`), ` ${seconds(history.fact(index).t)}`);
  }
}
