// The radix tree of cached pages, to the right of a root: a run of cells a node, at the depth of its pages.
//
// The first child goes on in its parent's row, the others branch off below. The pages of running requests that are not
// in the tree yet follow as outlines, so that a row is the whole page table of a request.

import { fit, hueOf, tintOf } from "./dom.js";

const LEFT = 26, MOTION = 180; // milliseconds

/** The nodes of a state: { pages, depth, tail, children, live, row }, a run of pages without a branch each. */
export function nodesOf(state) {
  const children = new Map([[null, []]]);
  for (const [page, parent] of state.tree) {
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push({ page });
  }
  for (const [r, table] of state.tables) {
    const first = table.findIndex((page) => !state.stored[page]);
    if (first < 0) continue;
    const parent = first ? table[first - 1] : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push({ tail: r, pages: table.slice(first) });
  }
  const build = (child, depth) => {
    if (child.pages) return { pages: child.pages, tail: child.tail, depth, children: [], live: true };
    const pages = [child.page];
    let next = children.get(child.page) ?? [];
    while (next.length === 1 && !next[0].pages) {
      pages.push(next[0].page);
      next = children.get(next[0].page) ?? [];
    }
    const node = { pages, depth, tail: null, live: state.users[pages.at(-1)] > 0 };
    node.children = next.map((each) => build(each, depth + pages.length));
    node.live ||= node.children.some((each) => each.live);
    return node;
  };
  return children.get(null).map((child) => build(child, 0));
}

/** Give each node a row. Of branches that no request uses only the first `most` are kept, the others become one stub. */
function arrange(nodes, most) {
  let row = 0;
  const list = [];
  const place = (node, parent) => {
    node.row = row;
    node.parent = parent;
    list.push(node);
    const idle = node.children.filter((child) => !child.live);
    const hidden = new Set(idle.slice(most));
    const shown = node.children.filter((child) => !hidden.has(child));
    if (hidden.size) shown.push({ stub: hidden.size, pages: [], hidden: [...hidden].reduce((sum, child) => sum + weight(child), 0), depth: node.depth + node.pages.length, children: [], live: false });
    shown.forEach((child, index) => { if (index) row += 1; place(child, node); });
  };
  const root = { pages: [], depth: 0, children: nodes, live: true };
  place(root, null);
  list.shift();
  for (const node of list) if (node.parent === root) node.parent = null;
  return { list, rows: row + 1 };
}

const weight = (node) => node.pages.length + node.children.reduce((sum, child) => sum + weight(child), 0);

export class Tree {
  constructor(canvas) {
    this.canvas = canvas;
    this.cells = new Map(); // page -> where it was drawn last
    this.nodes = [];
  }

  draw({ state, colours, lit, width, room, moving, again }) {
    const all = nodesOf(state);
    let laid = arrange(all, Infinity);
    if (laid.rows * 8 > room) laid = arrange(all, 1);
    const pitch = Math.max(4, Math.min(state.header.text ? 30 : 20, Math.floor((room - 8) / Math.max(laid.rows, 1))));
    const depth = Math.max(8, ...laid.list.map((node) => node.depth + node.pages.length));
    const step = Math.max(2, Math.min(16, (width - LEFT - 60) / depth));
    Object.assign(this, { pitch, step, width, state, colours, lit, high: pitch >= 24 ? 12 : Math.max(3, Math.min(12, pitch - 3)) });
    this.height = Math.max(room, laid.rows * pitch + 12);
    this.nodes = laid.list;
    this.#move(moving, again);
    const context = (this.context = fit(this.canvas, width, this.height));
    context.clearRect(0, 0, width, this.height);
    this.#root(laid.list);
    for (const node of laid.list) this.#join(node);
    const owners = state.owners();
    for (const node of laid.list) this.#node(node, owners);
    this.#leaving();
  }

  #y(row) { return 6 + row * this.pitch; }
  #x(depth) { return LEFT + depth * this.step; }

  // Cells glide from where they were to where they are now. What is drawn at the end depends on the state alone.
  #move(moving, again) {
    const target = new Map();
    for (const node of this.nodes) node.pages.forEach((page, index) => target.set(page, { x: this.#x(node.depth + index), y: this.#y(node.row) }));
    if (target.size !== this.target?.size || [...target].some(([page, to]) => this.target.get(page)?.x !== to.x || this.target.get(page)?.y !== to.y)) {
      this.from = moving ? this.cells : null;
      this.began = performance.now();
    } else if (!moving) this.from = null;
    this.target = target;
    const share = this.from ? Math.min(1, (performance.now() - this.began) / MOTION) : 1;
    const ease = 1 - (1 - share) ** 3;
    this.gone = share < 1 ? [...this.from].filter(([page]) => !target.has(page)).map(([, at]) => ({ ...at, alpha: 1 - ease })) : [];
    this.cells = new Map();
    for (const [page, to] of target) {
      const was = share < 1 ? this.from.get(page) : to;
      this.cells.set(page, was ? { x: was.x + (to.x - was.x) * ease, y: was.y + (to.y - was.y) * ease, alpha: 1 } : { ...to, alpha: ease });
    }
    if (share < 1) again();
    else this.from = null;
  }

  #root(list) {
    const { context, colours } = this;
    context.fillStyle = colours.ink;
    context.beginPath();
    context.arc(8, 6 + this.high / 2, 3.5, 0, 7);
    if (list.length) context.fill();
  }

  #join({ parent, row, depth, pages }) {
    const { context, colours, high } = this;
    const startX = parent ? this.#x(parent.depth + parent.pages.length) - this.step / 2 : 8;
    const startY = this.#y(parent ? parent.row : 0) + high / 2;
    const cell = this.cells.get(pages[0]);
    const x = cell?.x ?? this.#x(depth), y = (cell?.y ?? this.#y(row)) + high / 2;
    context.strokeStyle = colours.faint;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(startX) + 0.5, startY);
    if (y > startY) {
      const bend = Math.min(4, y - startY, this.step);
      context.lineTo(Math.round(startX) + 0.5, y - bend);
      context.quadraticCurveTo(Math.round(startX) + 0.5, y, startX + bend, y);
    }
    context.lineTo(x, y);
    context.stroke();
  }

  #node(node, { owner, other, filled }) {
    const { context, colours, state, lit, high, step } = this;
    const gap = step >= 6 ? 1.5 : step >= 3 ? 1 : 0, size = state.header.page_size;
    for (const page of node.pages) {
      const { x, y, alpha } = this.cells.get(page);
      const request = state.requests.get(owner[page]), users = state.users[page];
      context.globalAlpha = alpha * (lit && !lit.pages.has(page) ? 0.2 : 1);
      if (!users) { context.fillStyle = colours.cached; context.fillRect(x, y, step - gap, high); }
      else if (node.tail === null) {
        context.fillStyle = users > 1 ? colours.ink : hueOf(colours, request);
        context.fillRect(x, y, step - gap, high);
        if (users > 1) this.#sharers(x, y, step - gap, high, request, state.requests.get(other[page]));
      } else {
        context.fillStyle = tintOf(colours, request);
        context.fillRect(x, y, step - gap, high);
        context.fillStyle = hueOf(colours, request);
        context.fillRect(x, y, (step - gap) * (filled[page] / size), high);
      }
      if (lit?.page === page) { context.strokeStyle = colours.ink; context.lineWidth = 2; context.strokeRect(x - 1, y - 1, step - gap + 2, high + 2); }
    }
    context.globalAlpha = 1;
    this.#text(node);
  }

  #sharers(x, y, width, high, first, second) {
    const { context, colours } = this, edge = Math.min(2, width / 4);
    context.fillStyle = hueOf(colours, first);
    context.fillRect(x + edge, y + edge, (width - 2 * edge) / 2, high - 2 * edge);
    context.fillStyle = hueOf(colours, second);
    context.fillRect(x + width / 2, y + edge, (width - 2 * edge) / 2, high - 2 * edge);
  }

  #text(node) {
    const { context, colours, state, pitch, high, step, lit } = this;
    const end = this.#x(node.depth + node.pages.length), y = this.#y(node.row);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.globalAlpha = lit && !node.pages.some((page) => lit.pages.has(page)) ? 0.3 : 1;
    context.font = `10px ${colours.font}`;
    context.fillStyle = colours.quiet;
    if (node.stub) context.fillText(`+${node.stub} branches, ${node.hidden} pages`, end + 6, y + high / 2);
    else if (!node.children.length && pitch >= 11) {
      const names = node.tail === null ? state.holders(node.pages.at(-1)) : [node.tail];
      context.fillStyle = colours.ink;
      context.fillText(names.map((r) => `r${r}`).join(" "), end + 4, y + high / 2 + 0.5, this.width - end - 6);
    }
    if (pitch >= 24 && state.header.text && node.pages.length) {
      const room = node.pages.length * step - 4;
      context.fillStyle = colours.quiet;
      context.fillText(clip(context, textOf(state, node, room), Math.max(room, node.children.length ? 0 : 60)), this.#x(node.depth), y + high + 7);
    }
    context.globalAlpha = 1;
  }

  #leaving() {
    const { context, colours, step, high } = this;
    context.fillStyle = colours.cached;
    for (const { x, y, alpha } of this.gone) { context.globalAlpha = alpha; context.fillRect(x, y, Math.max(1, step - 1.5), high); }
    context.globalAlpha = 1;
  }

  /** The page at a point, and the first page of its node. */
  at(x, y) {
    const row = Math.floor((y - 6 + 2) / this.pitch), depth = Math.floor((x - LEFT) / this.step);
    const node = this.nodes.find((each) => each.row === row && depth >= each.depth && depth < each.depth + each.pages.length);
    return node ? { page: node.pages[depth - node.depth], node: node.pages[0] } : null;
  }

  /** The pages of the node that a page is in. */
  pagesWith(page) { return this.nodes.find((node) => node.pages.includes(page))?.pages ?? []; }
}

/** The beginning of a node's text, enough for a width. */
function textOf(state, node, room) {
  let text = "";
  for (const page of node.pages) {
    text += state.text(state.idsOf(page));
    if (text.length * 3 > Math.max(room, 60)) break;
  }
  return text.trim().replace(/\s+/g, " ");
}

function clip(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}
