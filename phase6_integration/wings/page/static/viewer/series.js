// Small series on the axis of the lanes: each a name, the present value, and a line of its own scale.

import { LABELS } from "./axis.js";
import { short } from "./dom.js";

const HIGH = 34, GAP = 14, RATE = 16; // a rate is of so many lines

const SERIES = [
  { name: "tokens/s", value: (history, line) => rate(history, line), show: short },
  { name: "first token, ms", value: (history, line) => history.fact(line).ttft, show: short, dots: true },
  { name: "between tokens, ms", value: (history, line) => history.fact(line).itl, show: short },
  { name: "prefix hits", value: (history, line) => history.fact(line).reused, show: (value) => `${Math.round(value * 100)} %`, most: 1 },
  { name: "queue", value: (history, line) => history.fact(line).queue, show: short, area: true },
];

const STACK = "pages";
export const SERIES_HEIGHT = (SERIES.length + 1) * (HIGH + GAP);

function rate(history, line) {
  const from = Math.max(history.base, line - RATE);
  const now = history.fact(line), before = history.fact(from);
  const time = now.t + now.ms / 1000 - (before.t + before.ms / 1000);
  return time > 0 ? (now.out - before.out) / time : null;
}

export function drawSeries(context, { axis, history, colours, top, pages }) {
  stack(context, { axis, history, colours, top, pages });
  SERIES.forEach((series, index) => one(context, series, { axis, history, colours, top: top + (index + 1) * (HIGH + GAP) }));
}

function one(context, { name, value, show, dots, area, most }, { axis, history, colours, top }) {
  const points = [];
  for (let line = axis.first; line <= axis.last; line++) {
    const found = value(history, line);
    if (found !== null && found !== undefined) points.push([line, found]);
  }
  const high = most ?? Math.max(1e-9, ...points.map(([, found]) => found)) * 1.08;
  const x = (line) => axis.x(line) + axis.column / 2, y = (found) => top + HIGH - (found / high) * HIGH;
  context.fillStyle = colours.line;
  context.fillRect(LABELS, top + HIGH, axis.right - LABELS, 1);
  context.strokeStyle = context.fillStyle = colours.ink;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  if (dots) for (const [line, found] of points) { context.beginPath(); context.arc(x(line), y(found), 2, 0, 7); context.fill(); }
  else {
    context.beginPath();
    points.forEach(([line, found], index) => (index ? context.lineTo(x(line), y(found)) : context.moveTo(x(line), y(found))));
    context.stroke();
    if (area && points.length) {
      context.lineTo(x(points.at(-1)[0]), top + HIGH);
      context.lineTo(x(points[0][0]), top + HIGH);
      context.globalAlpha = 0.12;
      context.fill();
      context.globalAlpha = 1;
    }
  }
  const now = points.findLast(([line]) => line <= axis.cursor);
  label(context, colours, name, now ? show(now[1]) : "–", top);
}

/** The pool: pages of one request, shared, cached, and above them the free ones. */
function stack(context, { axis, history, colours, top, pages }) {
  const parts = [[3, colours.ink], [2, colours.accent], [1, colours.cached]];
  context.fillStyle = colours.free;
  context.fillRect(LABELS, top, axis.x(axis.last + 1) - LABELS, HIGH);
  for (let line = axis.first; line <= axis.last; line++) {
    const { counts } = history.fact(line);
    let y = top + HIGH;
    for (const [kind, colour] of parts) {
      const high = (counts[kind] / pages) * HIGH;
      context.fillStyle = colour;
      context.fillRect(axis.x(line), y - high, axis.column, high);
      y -= high;
    }
  }
  const counts = history.fact(axis.cursor)?.counts;
  label(context, colours, STACK, counts ? `${Math.round(((counts[2] + counts[3]) / pages) * 100)} % in use` : "", top);
}

function label(context, colours, name, value, top) {
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.quiet;
  context.fillText(name, 0, top + 10, LABELS - 4);
  context.font = `600 14px ${colours.font}`;
  context.fillStyle = colours.ink;
  context.fillText(value, 0, top + 27, LABELS - 4);
}
