// Small series on the axis of the lanes: each a name, the present value, and a line of its own scale.

import { short, type } from "./dom.js";

const HIGH = 34, GAP = 14, RATE = 16; // a rate is of so many lines

const SERIES = [
  { name: "tokens/s", mechanism: "throughput", value: (history, line) => rate(history, line), show: short },
  { name: "TTFT, ms", mechanism: "ttft", value: (history, line) => history.fact(line).ttft, show: short, dots: true },
  { name: "ITL, ms", mechanism: "itl", value: (history, line) => history.fact(line).itl, show: short },
  { name: "hit rate", mechanism: "hits", value: (history, line) => history.fact(line).reused, show: (value) => `${Math.round(value * 100)} %`, most: 1 },
  { name: "queue", mechanism: "queue", value: (history, line) => history.fact(line).queue, show: short, area: true },
];
const EXPERTS = { name: "experts read", mechanism: "experts", value: (history, line) => history.fact(line).experts, show: short }; // of a layer

const STACK = "pages";

/** The series of a record. */
function seriesOf({ header }) { return header.experts ? [...SERIES, EXPERTS] : SERIES; }

export function seriesHeight(history) { return (seriesOf(history).length + 1) * (HIGH + GAP); }

// Of the last lines, or of those since the engine was idle: that time is no request's.
function rate(history, line) {
  const idle = ({ running, queue }) => running + queue === 0;
  let from = line;
  while (from > Math.max(history.base, line - RATE + 1) && !idle(history.fact(from - 1))) from -= 1;
  const now = history.fact(line), first = history.fact(from), time = now.t + now.ms / 1000 - first.t;
  return time > 0 ? (now.out - (history.fact(from - 1)?.out ?? 0)) / time : null;
}

/** Draws them; returns the mechanism of each and where its name is, and the highest values, with their heights. */
export function drawSeries(context, { axis, history, colours, top, pages }) {
  const high = Math.round(HIGH * colours.unit), pitch = Math.round((HIGH + GAP) * colours.unit);
  const all = seriesOf(history), place = (index) => top + (index + 1) * pitch;
  stack(context, { axis, history, colours, top, pages, high });
  const scales = all.map((series, index) => one(context, series, { axis, history, colours, top: place(index), high })).filter(Boolean);
  return { marks: [["page", top], ...all.map(({ mechanism }, index) => [mechanism, place(index)])], scales: [[`${pages}`, top], ...scales] };
}

function one(context, { name, value, show, dots, area, most }, { axis, history, colours, top, high }) {
  const points = [];
  for (let line = axis.first; line <= axis.last; line++) {
    const found = value(history, line);
    if (found !== null && found !== undefined) points.push([line, found]);
  }
  const peak = most ?? Math.max(1e-9, ...points.map(([, found]) => found)) * 1.08;
  const x = (line) => axis.x(line) + axis.column / 2, y = (found) => top + high - (found / peak) * high;
  context.fillStyle = colours.line;
  context.fillRect(axis.labels, top + high, axis.right - axis.labels, 1);
  context.strokeStyle = context.fillStyle = colours.ink;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  if (dots) for (const [line, found] of points) { context.beginPath(); context.arc(x(line), y(found), 2, 0, 7); context.fill(); }
  else {
    context.beginPath();
    points.forEach(([line, found], index) => (index ? context.lineTo(x(line), y(found)) : context.moveTo(x(line), y(found))));
    context.stroke();
    if (area && points.length) {
      context.lineTo(x(points.at(-1)[0]), top + high);
      context.lineTo(x(points[0][0]), top + high);
      context.globalAlpha = 0.12;
      context.fill();
      context.globalAlpha = 1;
    }
  }
  const now = points.findLast(([line]) => line <= axis.cursor);
  label(context, colours, axis, name, now ? show(now[1]) : "–", top);
  if (!points.some(([, found]) => found > 0)) return null; // nothing to scale
  const highest = most ? top : top + high * (1 - 1 / 1.08);
  rule(context, colours, axis, highest);
  return [show(peak / (most ? 1 : 1.08)), highest];
}

/** The pool: pages of one request, shared, cached, and above them the free ones. */
function stack(context, { axis, history, colours, top, pages, high }) {
  const parts = [[3, colours.ink], [2, colours.accent], [1, colours.cached]];
  context.fillStyle = colours.free;
  context.fillRect(axis.labels, top, axis.x(axis.last + 1) - axis.labels, high);
  for (let line = axis.first; line <= axis.last; line++) {
    const { counts } = history.fact(line);
    let y = top + high;
    for (const [kind, colour] of parts) {
      const part = (counts[kind] / pages) * high;
      context.fillStyle = colour;
      context.fillRect(axis.x(line), y - part, axis.column, part);
      y -= part;
    }
  }
  rule(context, colours, axis, top);
  const counts = history.fact(axis.cursor)?.counts;
  label(context, colours, axis, STACK, counts ? `${counts[2] + counts[3]} used` : "", top);
}

/** A line at the height of the highest value, */
export function rule(context, colours, axis, y) {
  context.fillStyle = colours.line;
  context.fillRect(axis.labels, Math.round(y), axis.right - axis.labels, 1);
}

/** and that value, over everything else. */
export function scale(context, colours, axis, text, y) {
  context.font = type(colours, 10);
  context.textAlign = "right";
  context.textBaseline = "top";
  const width = context.measureText(text).width + 6;
  context.fillStyle = colours.ground;
  context.fillRect(axis.right - width, y + 1, width, 12 * colours.unit);
  context.fillStyle = colours.quiet;
  context.fillText(text, axis.right - 3, y + 2);
}

function label(context, colours, axis, name, value, top) {
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.font = type(colours, 11);
  context.fillStyle = colours.quiet;
  context.fillText(name, 0, top + 10 * colours.unit, axis.labels - 4);
  context.font = type(colours, 14, 600);
  context.fillStyle = colours.ink;
  context.fillText(value, 0, top + 27 * colours.unit, axis.labels - 4);
}
