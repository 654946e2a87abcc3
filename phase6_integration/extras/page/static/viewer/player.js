// The transport: which line is shown, and how it moves on. One clock drives one viewer, or two side by side.

import { h, icon, seconds } from "./dom.js";
import { momentOf } from "./words.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16, 64];
const STEPS_A_SECOND = 8; // at speed 1
const FOLLOWED = 16; // steps a second, at most, at which a live view follows: an engine takes thousands
const HELD = 1.5; // seconds for which a moment is held

export class Player {
  /** `views` have { history, show(index) }. By time, all show the same moment; by step, the same number of lines. */
  constructor(views, changed = () => {}) {
    this.views = views;
    this.changed = changed;
    this.playing = false;
    this.live = false;
    this.following = false;
    this.fast = false; // follows at the engine's own speed
    this.loops = false; // begins again at the end
    this.moving = false; // whether a frame is asked for
    this.until = Infinity; // the line at which playing stops
    this.burst = 0; // the line from which on a live view lags behind the engine
    this.moment = null; // what is held, so that it is seen: { at, mechanism, text, requests, pages }
    this.told = []; // the first moments of each mechanism, which have been held
    this.left = 0; // seconds for which it is still held
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
      this.#again();
    }
    this.playing = true;
    this.#run();
    this.refresh();
    this.changed();
  }

  /** Play from a line on, up to another. */
  playFrom(line, until = Infinity) {
    this.pause();
    this.told = [];
    this.seek(line, true);
    this.until = until;
    this.play();
    const at = Math.floor(this.position), moment = this.#momentBetween(at - 1, at);
    if (moment) this.#hold(moment);
  }

  /** Show the newest line, or from a line on, and each that comes: in slow motion, unless it is to be fast. */
  follow(from = this.last) {
    this.playing = this.following = true;
    this.moment = null;
    this.told = [];
    this.seek(this.fast ? this.last : from);
    this.burst = Math.floor(this.position) + 1;
    this.#run();
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
    this.until = Infinity;
    this.moment = null;
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
    const slow = this.following && !this.fast && !this.byTime;
    if (slow && this.position >= this.first) {
      if (!this.moving) this.#more();
      this.#run();
      this.refresh();
    } else if (this.following) this.seek(this.last); // also where so much has come that the shown line is forgotten
    else if (!this.playing) this.seek(this.position);
    else this.refresh();
  }

  // More work than has been shown. After an engine that was idle, its moments are held again.
  #more() {
    const { waiting, running, preempted } = this.lead.state.in;
    if (!(waiting + running + preempted)) this.told = [];
    this.burst = Math.floor(this.position) + 1;
  }

  #again() {
    this.told = [];
    this.seek(this.first);
  }

  // The first sharing and the first preemption between two lines, where someone follows slowly what happens.
  #momentBetween(was, now) {
    const slow = this.following ? !this.fast : this.until === Infinity && this.speed <= 1;
    for (let at = was + 1; slow && !this.byTime && this.views.length === 1 && at <= now; at++) {
      const moment = momentOf(this.lead.history, at);
      if (moment && !this.told.some(({ mechanism }) => mechanism === moment.mechanism)) return moment;
    }
    return null;
  }

  #hold(moment) {
    this.moment = moment;
    this.told.push(moment);
    this.left = HELD;
    this.changed();
  }

  #run() {
    if (this.moving) return;
    this.moving = true;
    let before = null;
    const tick = (now) => {
      this.moving = this.playing && (this.moment !== null || !(this.following && (this.fast || this.position >= this.last)));
      if (!this.moving) { this.refresh(); return; }
      this.#move(before === null ? 0 : Math.min(0.25, (now - before) / 1000));
      before = now;
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  #move(passed) {
    if (this.moment) {
      this.left -= passed;
      if (this.left > 0) return;
      this.moment = null;
      this.changed();
    }
    const was = Math.floor(this.position), rate = this.following ? FOLLOWED : this.speed * (this.byTime ? 1 : STEPS_A_SECOND);
    const end = Math.min(this.last, this.following ? Infinity : this.until);
    const next = Math.min(end, this.position + passed * rate), moment = this.#momentBetween(was, Math.floor(next));
    this.position = moment ? moment.at : next;
    if (moment) this.#hold(moment);
    if (this.byTime || Math.floor(this.position) !== was) this.seek(this.position);
    if (this.moment || this.position < end || this.following) return;
    if (end === this.until) { this.pause(); return; }
    if (this.live) this.follow();
    else if (this.loops) this.#again();
    else this.pause();
  }

  /** How long the engine took for what is shown slowly, and how many times slower that is. */
  get slowed() {
    const { history } = this.lead;
    if (!this.following || this.fast || this.byTime || !history) return "";
    const from = Math.max(history.base, this.burst), [first, last] = [history.fact(from), history.facts.at(-1)];
    const time = first && last ? last.t + last.ms / 1000 - first.t : 0, holds = this.told.filter(({ at }) => at >= from).length, times = ((history.end - from) / FOLLOWED + holds * HELD) / time;
    return time > 0 && times >= 1.5 ? `${seconds(time)}, slowed ${Math.round(times)} times` : "";
  }

  #build() {
    const button = (name, label, act) => h("button", { type: "button", className: "v-button", "aria-label": label, title: label, onclick: act }, icon(name));
    this.toggleButton = button("play", "Play", () => this.toggle());
    this.range = h("input", {
      type: "range", className: "v-scrub", min: 0, max: 0, step: 1, value: 0, "aria-label": "Step of the record",
      oninput: () => { const to = +this.range.value; this.pause(); this.seek(to, true); }, // pausing moves it back
    });
    this.speeds = h("select", { className: "v-select", "aria-label": "Speed", onchange: () => (this.speed = +this.speeds.value) },
      SPEEDS.map((speed) => h("option", { value: `${speed}`, selected: speed === 1 }, `${speed === 0.25 ? "¼" : speed === 0.5 ? "½" : speed}×`)));
    this.mode = h("select", { className: "v-select", "aria-label": "Synchronise by", onchange: () => this.setMode(this.mode.value === "time") },
      h("option", { value: "step" }, "by step"), h("option", { value: "time" }, "by time"));
    this.where = h("output", { className: "v-where" });
    this.badge = h("span", { className: "v-slowed", title: `The engine is faster than the eye: it is followed at ${FOLLOWED} steps a second` });
    this.liveButton = h("button", { type: "button", className: "v-live", "aria-pressed": "false", title: "Follow at the engine's own speed", onclick: () => this.setFast(!this.fast) }, "Live");
    this.element = h("div", { className: "v-transport", role: "group", "aria-label": "Playback" },
      h("span", { className: "v-buttons" },
        button("first", "To the beginning", () => { this.pause(); this.seek(this.first, true); }),
        button("back", "A step back", () => this.step(-1)), this.toggleButton,
        button("forward", "A step forward", () => this.step(1)),
        button("last", "To the end", () => this.end())),
      this.range, h("span", { className: "v-place" }, this.where, this.badge), h("span", { className: "v-rate" }, this.liveButton, this.speeds, this.mode));
  }

  /** Whether a live view follows at the engine's own speed. */
  setFast(fast) {
    this.fast = fast;
    this.liveButton.setAttribute("aria-pressed", String(fast));
    this.follow();
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
    const slowed = this.slowed;
    if (this.badge.textContent !== slowed) this.badge.textContent = slowed;
    if (!history?.lines.length || index === undefined) { this.where.textContent = "no steps yet"; return; }
    const line = history.line(index);
    Object.assign(this.range, { min: this.first, max: this.last, step: this.byTime ? "any" : 1 });
    this.range.value = this.position;
    this.range.setAttribute("aria-valuetext", `step ${line.step ?? "none"}, ${seconds(history.fact(index).t)}`);
    this.where.replaceChildren(h("b", {}, line.step === undefined ? "between steps" : `step ${line.step}`), ` ${seconds(history.fact(index).t)}`);
  }
}
