// Where each request is drawn on the batch's time axis, and what it did there: spans of lines with a kind.

export const PREFILL = 1, DECODE = 2, IDLE = 3, PREEMPTED = 4;

export class Lanes {
  constructor() {
    this.all = []; // in the order of the first admission
    this.of = new Map(); // request -> its lane, once it has arrived
    this.free = []; // for each row, the first line from which another request may use it
  }

  add(line, at, state) {
    if (line.snapshot) for (const lane of this.of.values()) if (lane.until === Infinity && !state.requests.has(lane.r)) this.#end(lane, at, "gone");
    for (const { r } of line.new ?? []) if (!this.of.has(r)) this.of.set(r, { r, row: -1, arrived: at, until: Infinity, reason: null, spans: [], slot: -1 });
    const did = new Map();
    for (const [r, , length] of line.prefill ?? []) did.set(r, [PREFILL, length]);
    for (const r of line.decode ?? []) did.set(r, [DECODE, 1]);
    for (const [r, drafted] of line.verify ?? []) did.set(r, [DECODE, 1 + drafted]);
    const lost = new Set((line.preempted ?? []).map(([r]) => r));
    for (const [r, [kind, tokens]] of did) if (lost.has(r)) this.#extend(this.of.get(r), at, kind, tokens);
    for (const r of lost) this.#extend(this.of.get(r), at + (did.has(r) ? 1 : 0), PREEMPTED, 0);
    for (const [r] of line.admitted ?? []) this.#admit(this.of.get(r), at, state);
    for (const [r, [kind, tokens]] of did) if (!lost.has(r)) this.#extend(this.of.get(r), at, kind, tokens);
    for (const [r, reason] of line.done ?? []) this.#end(this.of.get(r), at, reason);
  }

  #admit(lane, at, state) {
    if (lane.row >= 0) { this.#extend(lane, at, IDLE, 0); return; }
    let row = this.free.findIndex((from) => from <= at);
    if (row < 0) row = this.free.length;
    lane.row = row;
    lane.since = this.free[row] ?? 0; // what it waited is drawn from here on: before, another used the row
    lane.slot = state.requests.get(lane.r).slot;
    this.free[row] = Infinity;
    this.all.push(lane);
  }

  // A span is [kind, first line, line after the last, tokens]. Decodes in a row are one span, chunks are one each.
  #extend(lane, at, kind, tokens) {
    const last = lane.spans.at(-1);
    if (last && last[0] === kind && kind !== PREFILL && last[2] >= at) last[2] = Math.max(last[2], at + 1);
    else {
      if (last && last[0] === PREEMPTED) last[2] = Math.max(last[2], at);
      lane.spans.push([kind, at, at + 1, tokens]);
    }
  }

  #end(lane, at, reason) {
    const last = lane.spans.at(-1);
    if (last?.[0] === PREEMPTED) last[2] = at;
    lane.until = at;
    lane.reason = reason;
    if (lane.row >= 0) this.free[lane.row] = at + 3; // two lines of air
  }

  /** Forget the requests that ended before a line. */
  trim(base) {
    this.all = this.all.filter((lane) => lane.until >= base);
    for (const [r, lane] of this.of) {
      if (lane.until < base) this.of.delete(r);
      else while (lane.spans.length > 1 && lane.spans[0][2] < base) lane.spans.shift();
    }
  }
}
