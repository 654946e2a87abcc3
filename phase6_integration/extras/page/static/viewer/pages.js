// The pool as a map: a cell a page, in the order of page numbers.
//
// A cell's picture depends on nothing outside it, so only cells that changed are drawn again.

import { fit, hueOf, onHueOf, stripe, tintOf, type } from "./dom.js";
import { CACHED, FREE, PRIVATE, SHARED } from "./state.js";

const MOST = 60, LEAST = 4; // pixels of a cell
const GUTTER = 34; // for the number of each row's first page

export class Pages {
  constructor(canvas) {
    this.canvas = canvas;
    this.cursor = -1; // the cell that the keyboard is at
    this.drawn = null; // of each cell, what its picture depends on
  }

  /** Lay the cells out for a width and a height to stay within, if that is possible. */
  layout(count, width, height) {
    let best = { pitch: 0, columns: 8 };
    for (let columns = 8; columns <= 512; columns += columns < 32 ? 4 : 8) {
      const wide = Math.floor((width - GUTTER) / columns);
      const pitch = Math.min(MOST, wide, Math.floor(height / Math.ceil(count / columns)));
      if (pitch > best.pitch) best = { pitch, columns };
    }
    if (best.pitch < LEAST) best = { pitch: LEAST, columns: Math.max(8, Math.floor((width - GUTTER) / LEAST / 8) * 8) };
    this.count = count;
    Object.assign(this, best);
    this.rows = Math.ceil(count / this.columns);
    this.width = width;
    this.height = this.rows * this.pitch + 2;
    this.drawn = null;
  }

  /** Where the cell of a page begins. */
  corner(page) { return [GUTTER + (page % this.columns) * this.pitch, 1 + Math.floor(page / this.columns) * this.pitch]; }

  at(x, y) {
    const column = Math.floor((x - GUTTER) / this.pitch), row = Math.floor((y - 1) / this.pitch);
    const page = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && page < this.count ? page : -1;
  }

  draw({ state, line, colours, lit }) {
    const context = fit(this.canvas, this.width, this.height);
    const { owner, other, filled } = state.owners();
    const size = state.header.page_size, touched = touchedBy(line, state.header.num_pages);
    if (this.colours !== colours || !this.drawn) {
      this.colours = colours;
      this.drawn = new Float64Array(2 * this.count).fill(-1);
      this.#numbers(context, colours);
    }
    for (let page = 0; page < this.count; page++) {
      const kind = state.kind(page), dim = lit !== null && !lit.pages.has(page), users = state.users[page];
      const mark = page === this.cursor ? 3 : lit?.page === page || lit?.held?.has(page) ? 2 : touched[page];
      const look = ((((users * 257 + filled[page]) * 4 + kind) * 5 + mark + 1) * 2 + dim), held = (owner[page] + 1) * 2 ** 24 + other[page] + 1;
      if (this.drawn[2 * page] === look && this.drawn[2 * page + 1] === held) continue;
      this.drawn[2 * page] = look;
      this.drawn[2 * page + 1] = held;
      const first = state.requests.get(owner[page]), second = state.requests.get(other[page]);
      this.#cell(context, colours, page, { kind, first, second, users, full: filled[page] / size, dim, mark });
    }
  }

  #numbers(context, colours) {
    context.clearRect(0, 0, this.width, this.height);
    context.fillStyle = colours.quiet;
    context.font = type(colours, 10);
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(12 / this.pitch);
    for (let row = 0; row < this.rows; row += every) context.fillText(`${row * this.columns}`, GUTTER - 6, 1 + row * this.pitch + Math.max(this.pitch, 10) / 2);
  }

  #cell(context, colours, page, { kind, first, second, users, full, dim, mark }) {
    const { pitch } = this, gap = pitch >= 12 ? 2 : 1, size = pitch - gap;
    const [x, y] = this.corner(page);
    context.clearRect(x, y, pitch, pitch);
    context.globalAlpha = dim ? 0.22 : 1;
    if (kind === FREE) fill(context, colours.free, x, y, size);
    if (kind === CACHED) fill(context, colours.cached, x, y, size);
    if (kind === PRIVATE) {
      fill(context, tintOf(colours, first), x, y, size);
      const high = Math.round(size * full);
      context.fillStyle = hueOf(colours, first);
      context.fillRect(x, y + size - high, size, high);
      if (size >= 8) stripe(context, colours, first, x, y + size * 0.7, size, size * 0.3);
    }
    if (kind === SHARED) this.#shared(context, colours, x, y, size, first, second);
    if (size >= 18 && kind === SHARED) this.#label(context, colours, `${users}×`, x, y, size, colours.ground, colours.ink);
    if (size >= 18 && kind === PRIVATE) this.#label(context, colours, `${first?.r ?? ""}`, x, y, size, ...(full > 0.75 ? [onHueOf(colours, first)] : [colours.ink, tintOf(colours, first)]));
    context.globalAlpha = 1;
    if (mark) {
      context.lineWidth = mark > 1 ? 2 : 1.5;
      context.strokeStyle = mark === 3 ? colours.accent : mark === -1 ? colours.quiet : colours.ink;
      const inset = context.lineWidth / 2;
      context.strokeRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
    }
  }

  // A frame in ink around the colours of two of the requests that share it.
  #shared(context, colours, x, y, size, first, second) {
    const frame = Math.max(1, Math.round(size / 9));
    fill(context, colours.ink, x, y, size);
    context.fillStyle = hueOf(colours, first);
    context.fillRect(x + frame, y + frame, size - 2 * frame, size - 2 * frame);
    context.fillStyle = hueOf(colours, second);
    context.beginPath();
    context.moveTo(x + size - frame, y + frame);
    context.lineTo(x + size - frame, y + size - frame);
    context.lineTo(x + frame, y + size - frame);
    context.fill();
  }

  // On a plate, where what is below it has more than one colour.
  #label(context, colours, text, x, y, size, colour, plate) {
    const high = size >= 24 ? 11 : 9.5;
    context.font = type(colours, high, 600);
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (plate) {
      const width = Math.min(size, context.measureText(text).width + 4), tall = Math.min(size, (high + 2) * colours.unit);
      context.fillStyle = plate;
      context.fillRect(x + (size - width) / 2, y + (size - tall) / 2, width, tall);
    }
    context.fillStyle = colour;
    context.fillText(text, x + size / 2, y + size / 2 + 0.5, size - 2);
  }
}

function fill(context, colour, x, y, size) {
  context.fillStyle = colour;
  context.fillRect(x, y, size, size);
}

/** The pages that a line allocated or attached (1), and those that it freed or evicted (-1). */
function touchedBy(line, count) {
  const touched = new Int8Array(count);
  for (const [name, first, ...rest] of line?.snapshot ? [] : line?.pages ?? []) {
    if (name === "attach" || name === "grow") for (const page of rest[0]) touched[page] = 1;
    if (name === "swap") for (const page of rest[1]) touched[page] = 1;
    if (name === "evict") for (const page of first) touched[page] = -1;
  }
  return touched;
}
