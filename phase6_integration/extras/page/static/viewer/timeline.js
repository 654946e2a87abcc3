// The batch over time: a lane a request, each step's composition against its token budget, and the series below.

import { fit, hueOf, onHueOf, short, stripe, tintOf, type } from "./dom.js";
import { Axis } from "./axis.js";
import { DECODE, PREEMPTED, PREFILL } from "./lanes.js";
import { drawSeries, rule, scale, seriesHeight } from "./series.js";

const BUDGET = 60, GAP = 22; // heights
const SHOWN_WAITING = 12; // rows for requests that have not been admitted yet

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.axis = new Axis();
    this.marks = []; // mechanisms, and where their names are
    this.rows = []; // what is drawn where, for the pointer
  }

  draw({ history, at, state, colours, lit, width, room, pages }) {
    const { axis } = this;
    const { unit } = colours;
    axis.place(history, at, width, unit);
    const rows = this.#arrange(history, state, at);
    const pitch = Math.max(2, Math.min(Math.round(16 * unit), Math.floor(room / Math.max(rows.count, 4))));
    this.top = 18;
    this.pitch = pitch;
    const lanes = Math.max(rows.count, 4) * pitch;
    this.high = Math.round(BUDGET * unit);
    this.height = this.top + lanes + GAP + this.high + GAP + Math.round(seriesHeight(history) * unit);
    this.width = width;
    const context = fit(this.canvas, width, this.height);
    context.clearRect(0, 0, width, this.height);
    this.context = context;
    this.colours = colours;
    this.#steps(history);
    this.rows = rows.list;
    for (const row of rows.list) this.#lane(row, state, at, lit);
    this.budgetTop = this.top + lanes + GAP;
    const scales = [this.#composition(history, state, lit)], series = drawSeries(context, { axis, history, colours, top: this.budgetTop + this.high + GAP, pages });
    this.marks = [["budget", this.budgetTop], ...series.marks];
    this.#future(history, at);
    for (const [text, y] of [...scales, ...series.scales]) scale(context, colours, axis, text, y);
    this.#cursor(at);
    if (lit?.line >= axis.first && lit.line <= axis.last) this.#drawn(lit);
  }

  // The step that computed the token at the pointer, on the lane of its request.
  #drawn({ line, request }) {
    const { context, axis, colours, pitch } = this, row = this.rows.find(({ lane }) => lane.r === request)?.row;
    if (row === undefined) return;
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.strokeRect(axis.x(line) - 1, this.top + row * pitch - 1, Math.max(4, axis.column) + 2, Math.max(4, pitch - 1));
  }

  /** The lanes that the view shows, and under them the next requests in the queue. */
  #arrange(history, state, at) {
    const { first, last } = this.axis, begin = (lane) => lane.spans[0]?.[1] ?? 0; // a lane may have no span yet
    const list = history.lanes.all.filter((lane) => lane.until >= first && begin(lane) <= last).map((lane) => ({ lane, row: lane.row }));
    const used = new Set(list.filter(({ lane }) => lane.until >= at - 2 && begin(lane) <= at).map(({ row }) => row));
    const placed = new Set(list.map(({ lane }) => lane.r));
    let row = 0;
    for (const { r } of state.all("waiting").filter((request) => !placed.has(request.r)).slice(0, SHOWN_WAITING)) {
      while (used.has(row)) row++;
      used.add(row);
      const before = list.filter((other) => other.row === row).map(({ lane }) => (begin(lane) <= at ? lane.until + 3 : 0));
      const lane = history.lanes.of.get(r);
      if (lane) list.push({ lane, row, since: Math.max(0, ...before), queued: true });
    }
    return { list, count: Math.max(0, ...list.map((each) => each.row + 1)) };
  }

  #steps(history) {
    const { context, axis, colours } = this;
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((step) => step * axis.column >= 56) ?? 1000;
    context.font = type(colours, 11);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = colours.quiet;
    context.fillText("step", 0, 8);
    let free = 0;
    for (let line = axis.first; line <= axis.last; line++) {
      const { step } = history.line(line), x = axis.x(line);
      if (step === undefined || step % every || x < free) continue;
      free = x + 40;
      context.fillStyle = colours.line;
      context.fillRect(x, 14, 1, this.height - 14);
      context.fillStyle = colours.quiet;
      const width = context.measureText(`${step}`).width;
      context.fillText(`${step}`, Math.min(x + 3, this.width - width), 8); // the last has no room to its right
    }
  }

  #lane({ lane, row, since = lane.since, queued }, state, at, lit) {
    const { context, axis, colours, pitch } = this;
    const y = this.top + row * pitch, high = pitch > 6 ? pitch - 3 : Math.max(pitch - 1, 2), middle = y + high / 2;
    const request = state.requests.get(lane.r) ?? lane, hue = hueOf(colours, lane), tint = tintOf(colours, lane);
    context.globalAlpha = lit && !lit.requests.has(lane.r) ? 0.18 : 1;
    const admitted = lane.spans[0]?.[1] ?? Infinity;
    const from = Math.max(lane.arrived, since, axis.first), to = Math.min(admitted, queued ? at + 1 : Infinity, axis.last + 1);
    if (to > from) this.#dotted(axis.x(from), axis.x(to), middle, colours.quiet);
    for (const [kind, first, last, tokens] of lane.spans) {
      if (last < axis.first || first > axis.last) continue;
      const x = axis.x(Math.max(first, axis.first)), end = axis.x(Math.min(last, axis.last + 1));
      if (kind === PREFILL) this.#block(x, y, end - x, high, lane, tokens);
      else if (kind === DECODE) {
        const thick = Math.max(1, Math.round(high * 0.36));
        context.fillStyle = hue;
        context.fillRect(x, Math.round(middle - thick / 2), end - x, thick);
        if (thick > 2) stripe(context, colours, lane, x, Math.round(middle - thick / 2), end - x, thick);
      }
      else if (kind === PREEMPTED) this.#preempted(x, end, y, high);
      else { context.fillStyle = tint; context.fillRect(x, middle - 0.5, end - x, 1); }
    }
    if (pitch >= 9 * colours.unit) this.#onBar(lane, y, high);
    if (lane.until <= axis.last && lane.row >= 0 && lane.until >= axis.first) this.#end(lane, axis.x(lane.until + 1), y, high, hue);
    const present = queued || (admitted <= at && lane.until >= at);
    if (present && pitch >= 9 * colours.unit) this.#name(lane, request, middle, hue, queued);
    context.globalAlpha = 1;
  }

  // Rows and colours are used again: each bar begins with its request's name, after the chunks of its prompt.
  #onBar(lane, y, high) {
    const { context, axis, colours } = this;
    context.font = type(colours, Math.min(10, high / colours.unit), 600);
    const text = `r${lane.r}`, width = context.measureText(text).width + 5, begin = ([, first]) => axis.x(Math.max(axis.first, first)) + 1;
    const fits = (span) => begin(span) + width <= axis.x(Math.min(span[2], axis.last + 1));
    const span = lane.spans.find((each) => each[0] !== PREFILL && fits(each));
    if (!span) return;
    const x = begin(span);
    context.fillStyle = colours.ground;
    context.fillRect(x, y, width, high);
    context.fillStyle = colours.ink;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, x + 2, y + high / 2 + 0.5);
  }

  #block(x, y, width, high, lane, tokens) {
    const { context, colours } = this;
    context.fillStyle = hueOf(colours, lane);
    context.fillRect(x, y, Math.max(width - 1, 1.5), high);
    if (width >= 26 && high >= 10) {
      context.font = type(this.colours, 9.5);
      context.fillStyle = onHueOf(colours, lane);
      context.textAlign = "center";
      context.fillText(short(tokens), x + (width - 1) / 2, y + high / 2 + 0.5);
      context.textAlign = "left";
    }
  }

  #dotted(x, end, y, colour) {
    const { context } = this;
    if (this.pitch < 8) { // dashes are slow to draw, and not to be seen
      context.fillStyle = colour === this.colours.quiet ? this.colours.line : colour;
      context.fillRect(x, Math.floor(y), end - x, 1);
      return;
    }
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.setLineDash([1, 3]);
    context.beginPath();
    context.moveTo(x, Math.round(y) + 0.5);
    context.lineTo(end, Math.round(y) + 0.5);
    context.stroke();
    context.setLineDash([]);
  }

  #preempted(x, end, y, high) {
    const { context, colours } = this;
    this.#dotted(x, end, y + high / 2, colours.alarm);
    context.fillStyle = colours.alarm;
    context.fillRect(x, y, 2, high);
  }

  #end(lane, x, y, high, hue) {
    const { context, colours } = this;
    const good = lane.reason === "stop" || lane.reason === "length";
    context.fillStyle = good ? hue : colours.alarm;
    context.fillRect(x, y, good ? 2 : 3, high);
  }

  #name(lane, request, y, hue, queued) {
    const { context, colours, axis } = this;
    context.fillStyle = queued ? colours.quiet : hue;
    if (!queued) context.fillRect(axis.labels - 14, y - 4, 8, 8);
    if (!queued) stripe(context, colours, lane, axis.labels - 14, y - 4, 8, 8);
    context.font = type(colours, Math.min(11, this.pitch / colours.unit));
    context.fillStyle = queued ? colours.quiet : colours.ink;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const said = queued ? "waits" : request.state === "preempted" ? "preempted" : `${request.out ?? 0}/${request.max ?? ""}`;
    context.fillText(said, axis.labels - 19, y + 0.5, axis.labels - 44);
    context.textAlign = "left";
    context.fillText(`r${lane.r}`, 0, y + 0.5);
  }

  /** A bar a step: decodes below, then each prompt's chunk in the colour of its request. */
  #composition(history, state, lit) {
    const { context, axis, colours, high } = this, top = this.budgetTop;
    const budget = history.header.budget ?? 0;
    let peak = 1;
    for (let line = axis.first; line <= axis.last; line++) {
      const fact = history.fact(line);
      peak = Math.max(peak, fact.prefill + fact.decode + fact.drafted);
    }
    const most = budget && peak > budget / 4 ? Math.max(budget, peak) : Math.max(8, Math.ceil(peak * 1.2));
    const toY = (tokens) => top + high - (tokens / most) * high;
    context.fillStyle = colours.line;
    context.fillRect(axis.labels, top + high, axis.right - axis.labels, 1);
    for (let line = axis.first; line <= axis.last; line++) {
      const fact = history.fact(line), x = axis.x(line), width = Math.max(1, axis.column - 1);
      let tokens = fact.decode + fact.drafted;
      context.globalAlpha = lit ? 0.3 : 1;
      context.fillStyle = colours.ink;
      const least = tokens ? Math.max(2, (tokens / most) * high) : 0;
      context.fillRect(x, top + high - least, width, least);
      for (const [r, , length] of history.line(line).prefill ?? []) {
        context.globalAlpha = lit && !lit.requests.has(r) ? 0.18 : 1;
        context.fillStyle = hueOf(colours, history.lanes.of.get(r) ?? state.requests.get(r));
        const y = toY(tokens + length);
        context.fillRect(x, y, width, Math.max(1, toY(tokens) - y - 0.5));
        tokens += length;
      }
    }
    context.globalAlpha = 1;
    rule(context, colours, axis, toY(most));
    if (budget && most >= budget) {
      context.strokeStyle = colours.alarm;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(axis.labels, Math.round(toY(budget)) + 0.5);
      context.lineTo(axis.right, Math.round(toY(budget)) + 0.5);
      context.stroke();
      context.setLineDash([]);
    }
    const fact = history.fact(axis.cursor);
    this.#label("tokens", fact ? `${fact.prefill + fact.decode + fact.drafted}` : "", budget ? `of ${budget} a step` : "", top);
    return [short(most), toY(most)];
  }

  #label(name, value, note, top) {
    const { context, colours } = this, { unit } = colours;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.font = type(colours, 11);
    context.fillStyle = colours.quiet;
    context.fillText(name, 0, top + 10 * unit);
    context.fillText(note, 0, top + 42 * unit, this.axis.labels - 8);
    context.font = type(colours, 14, 600);
    context.fillStyle = colours.ink;
    context.fillText(value, 0, top + 27 * unit);
  }

  // What comes after the shown line is veiled.
  #future(history, at) {
    const { context, axis, colours } = this, x = axis.x(at + 1);
    if (at >= axis.last) return;
    context.globalAlpha = 0.72;
    context.fillStyle = colours.ground;
    context.fillRect(x, 14, axis.right - x + 8, this.height - 14);
    context.globalAlpha = 1;
  }

  #cursor(at) {
    const { context, axis, colours } = this;
    const x = axis.x(at);
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.14;
    context.fillRect(x, 14, axis.column, this.height - 14);
    context.globalAlpha = 1;
    context.fillRect(x + axis.column - 1, 14, 1, this.height - 14);
    context.beginPath();
    context.moveTo(x + axis.column - 5, 12);
    context.lineTo(x + axis.column + 4, 12);
    context.lineTo(x + axis.column - 0.5, 17);
    context.fill();
  }

  /** What is at a point: a line of the record, and the request whose lane it is. */
  at(x, y) {
    const line = this.axis.lineAt(x), row = Math.floor((y - this.top) / this.pitch);
    const at = line < 0 ? this.axis.cursor : line;
    const found = this.rows.find((each) => each.row === row && Math.max(each.lane.arrived, each.since ?? each.lane.since ?? 0) <= at && at <= each.lane.until + 1);
    return { line, request: found?.lane.r ?? -1 };
  }
}
