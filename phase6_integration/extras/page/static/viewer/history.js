// The lines of a record and the states between them, so that any line can be shown again.

import { State } from "./state.js";
import { Lanes } from "./lanes.js";

const SPACING = 256; // lines between two kept states
export const LIVE_LINES = 1000; // how far back a live view can step

export class History {
  /** `texts` are { known, vocab } of the state, if they outlive this record. */
  constructor(header, texts = {}) {
    this.header = header;
    this.base = 0; // the number of the oldest line that is kept
    this.lines = [];
    this.facts = []; // a line's figures, for the series
    this.head = Object.assign(new State(header), texts);
    this.kept = [{ at: 0, state: this.head.clone() }]; // the states before line `at`
    this.lanes = new Lanes();
    this.shown = null;
    this.used = 0; // pages up to the highest that any line has named: pools are large, and filled from page 0 on
  }

  get end() { return this.base + this.lines.length; }

  push(line) {
    if (this.end % SPACING === 0 && this.end > 0) this.kept.push({ at: this.end, state: this.head.clone() });
    this.head.apply(line);
    for (const [name, , pages, swapped] of line.pages ?? []) {
      if (name !== "free" && name !== "evict") for (const page of name === "swap" ? swapped : pages) this.used = Math.max(this.used, page + 1);
    }
    this.lanes.add(line, this.end, this.head);
    this.facts.push(factsOf(line, this.head, this.facts.at(-1)));
    this.lines.push(line);
  }

  /** Forget the oldest lines, in blocks that end at a kept state. */
  trim(most = LIVE_LINES) {
    while (this.kept.length > 1 && this.end - this.kept[1].at >= most) this.kept.shift();
    const gone = this.kept[0].at - this.base;
    if (!gone) return;
    this.lines.splice(0, gone);
    this.facts.splice(0, gone);
    this.base += gone;
    this.lanes.trim(this.base);
  }

  line(index) { return this.lines[index - this.base]; }
  fact(index) { return this.facts[index - this.base]; }

  /** The state after line `index`, to read only. */
  at(index) {
    if (index === this.end - 1) return this.head;
    let from = this.kept.findLast(({ at }) => at <= index + 1);
    if (this.shown && this.shown.at <= index + 1 && this.shown.at >= from.at) from = this.shown;
    else from = { at: from.at, state: from.state.clone() };
    for (; from.at <= index; from.at++) from.state.apply(this.line(from.at));
    this.shown = from;
    return from.state;
  }

  /** The line that computed a token of a prompt, or drew one of an answer; undefined if it is not there. */
  lineOf(request, token) {
    const step = request.steps[token - request.prompt];
    const found = token < request.prompt
      ? this.lines.findLastIndex(({ prefill = [] }) => prefill.some(([r, start, length]) => r === request.r && start <= token && token < start + length))
      : this.lines.findLastIndex((line) => step !== undefined && line.step === step);
    return found < 0 ? undefined : this.base + found;
  }

  /** The last line that began at or before a time. */
  indexAt(t) {
    let low = 0, high = this.lines.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.facts[middle].t <= t) low = middle;
      else high = middle - 1;
    }
    return this.base + low;
  }
}

/** The figures of a line that the series show. Rates are of about the last second of the record. */
function factsOf(line, state, before) {
  const ms = (line.ms ?? []).reduce((sum, part) => sum + part, 0);
  const prefill = (line.prefill ?? []).reduce((sum, [, , length]) => sum + length, 0);
  const drafted = (line.verify ?? []).reduce((sum, [, length]) => sum + length, 0);
  const facts = {
    t: state.t, ms, counts: state.counts.slice(), running: state.in.running, queue: state.in.waiting + state.in.preempted,
    prefill, drafted,
    decode: (line.decode?.length ?? 0) + (line.verify?.length ?? 0),
    out: (before?.out ?? 0) + (line.out?.length ?? 0),
    asked: before?.asked ?? 0, hits: before?.hits ?? 0,
    ttft: null, itl: null, reused: null, experts: line.experts?.[0] ?? null,
  };
  if (!line.snapshot) {
    for (const [r, cached] of line.admitted ?? []) {
      facts.asked += state.requests.get(r).total;
      facts.hits += cached;
    }
  }
  const drew = Array.from(new Set(line.out), (r) => state.requests.get(r)).filter(Boolean);
  const waits = drew.filter(({ firstOut, lastOut, arrived }) => firstOut === lastOut && arrived !== null).map(({ firstOut, arrived }) => firstOut - arrived);
  const gaps = drew.map(({ gap }) => gap).filter((gap) => gap !== null);
  if (waits.length) facts.ttft = Math.max(...waits) * 1000;
  if (gaps.length) facts.itl = (gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length) * 1000;
  facts.reused = facts.asked ? facts.hits / facts.asked : null;
  return facts;
}
