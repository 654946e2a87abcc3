// The radix tree of cached pages, to the right of a root: a run of cells a node, at the depth of its pages.
//
// The first child goes on in its parent's row, the others branch off below. The pages of running requests that are not
// in the tree yet follow as outlines, so that a row is the whole page table of a request.

import { fit, hueOf, stripe, tintOf, type } from "./dom.js";

const LEFT = 26, MOTION = 180; // milliseconds

/** The nodes of a state: { pages, depth, tail, children, live, recent, row }, a run of pages without a branch each. */
export function nodesOf(state) {
  const count = state.header.num_pages, root = count; // the children of each page, as lists linked through arrays
  const first = new Int32Array(count + 1).fill(-1), last = new Int32Array(count + 1).fill(-1), next = new Int32Array(count).fill(-1);
  const age = new Int32Array(count); // when each page was added
  let added = 0;
  for (const [page, parent] of state.tree) {
    const above = parent ?? root;
    if (last[above] < 0) first[above] = page;
    else next[last[above]] = page;
    last[above] = page;
    age[page] = added++;
  }
  const tails = new Map(); // pages that are not in the tree, after the last one that is
  for (const [r, table] of state.tables) {
    const from = table.findIndex((page) => !state.stored[page]);
    if (from < 0) continue;
    const above = from ? table[from - 1] : root;
    if (!tails.has(above)) tails.set(above, []);
    tails.get(above).push({ pages: table.slice(from), tail: r, depth: from, children: [], live: true, recent: added });
  }
  const below = (page) => {
    const children = [];
    for (let child = first[page]; child >= 0; child = next[child]) children.push(node(child));
    return children;
  };
  const node = (page) => {
    const pages = [page];
    let end = page;
    while (first[end] >= 0 && next[first[end]] < 0 && !tails.has(end)) pages.push((end = first[end]));
    const children = [...below(end), ...(tails.get(end) ?? [])];
    const recent = Math.max(age[end], ...children.map((child) => child.recent));
    return { pages, tail: null, depth: 0, children, recent, live: state.users[end] > 0 || children.some((each) => each.live) };
  };
  return [...below(root), ...(tails.get(root) ?? [])];
}

/** Give each node a row. Branches that no request uses and that are older than `from` become one stub. */
function arrange(nodes, from) {
  let row = 0;
  const list = [];
  const place = (node, parent) => {
    node.row = row;
    node.parent = parent;
    node.depth = parent.depth + parent.pages.length;
    list.push(node);
    const hidden = node.children.filter((child) => !child.live && child.recent < from), pages = hidden.reduce((sum, child) => sum + weight(child), 0);
    const shown = hidden.length ? node.children.filter((child) => child.live || child.recent >= from) : node.children.slice();
    if (hidden.length) shown.push({ stub: hidden.length, pages: [], hidden: pages, children: [], live: false });
    shown.forEach((child, index) => { if (index) row += 1; place(child, node); });
  };
  place({ pages: [], depth: 0, children: nodes, live: true }, { pages: [], depth: 0 });
  const [root] = list.splice(0, 1);
  for (const node of list) if (node.parent === root) node.parent = null;
  return { list, rows: row + 1 };
}

/** As many branches that no request uses as there are rows for, the latest of them. */
function fitted(nodes, most) {
  const ages = [];
  const visit = (node) => { if (!node.live) ages.push(node.recent); node.children.forEach(visit); };
  nodes.forEach(visit);
  ages.sort((one, other) => one - other);
  let low = 0, high = ages.length; // how many of the oldest are hidden
  while (low < high) {
    const middle = (low + high) >> 1;
    if (arrange(nodes, ages[middle]).rows <= most) high = middle;
    else low = middle + 1;
  }
  return arrange(nodes, ages[low] ?? Infinity);
}

const weight = (node) => node.pages.length + node.children.reduce((sum, child) => sum + weight(child), 0);

export class Tree {
  constructor(canvas) {
    this.canvas = canvas;
    this.cells = null; // where each page is drawn: x, y, x, y ...
    this.nodes = [];
  }

  draw(options) {
    const { state, colours, lit, width, room, moving } = (this.options = options);
    const all = nodesOf(state);
    const laid = fitted(all, Math.floor(room / 12));
    const pitch = Math.max(3, Math.min(Math.round((state.vocab.size ? 30 : 20) * colours.unit), Math.floor((room - 8) / Math.max(laid.rows, 1))));
    const depth = Math.max(8, ...laid.list.map((node) => node.depth + node.pages.length));
    const step = Math.max(2, Math.min(24 * colours.unit, Math.floor((width - LEFT - 70) / depth * 4) / 4));
    Object.assign(this, { pitch, step, width, state, colours, lit, high: pitch >= 24 ? Math.round(13 * colours.unit) : Math.max(3, Math.min(12, pitch - 3)) });
    this.height = Math.max(room, laid.rows * pitch + 12);
    this.nodes = laid.list;
    this.#move(moving);
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

  // Cells that come fade in, and those that have left fade out unless another is in their place: nothing ever overlaps.
  // What is drawn at the end depends on the state alone.
  #move(moving) {
    const count = this.state.header.num_pages, at = new Float32Array(2 * count).fill(-1), before = this.cells;
    for (const node of this.nodes) {
      for (let index = 0; index < node.pages.length; index++) {
        at[2 * node.pages[index]] = this.#x(node.depth + index);
        at[2 * node.pages[index] + 1] = this.#y(node.row);
      }
    }
    this.cells = at;
    if (!moving) this.from = null;
    else if (before?.length === at.length && at.some((value, index) => value !== before[index])) {
      this.from = before;
      this.left = this.#vacated(before, at);
      this.began = performance.now();
    }
    const share = this.from ? Math.min(1, (performance.now() - this.began) / MOTION) : 1;
    if (share === 1) this.from = null;
    else {
      const { options } = this; // of another draw, if one comes before the next frame
      requestAnimationFrame(() => options === this.options && this.draw({ ...options }));
    }
    this.ease = 1 - (1 - share) ** 3;
  }

  // The places of pages that have left, as x and y, where none is drawn now.
  #vacated(before, at) {
    const taken = (x, y) => at.some((other, index) => index % 2 === 0 && other >= 0 && Math.abs(other - x) < this.step && Math.abs(at[index + 1] - y) < this.high);
    const left = [];
    for (let page = 0; 2 * page < at.length; page++) {
      const [x, y] = [before[2 * page], before[2 * page + 1]];
      if (x >= 0 && at[2 * page] < 0 && !taken(x, y)) left.push([x, y]);
    }
    return left;
  }

  #alpha(page) { return this.from && this.from[2 * page] < 0 ? this.ease : 1; }

  #root(list) {
    const { context, colours, high } = this;
    if (!list.length) {
      context.font = type(colours, 10);
      context.fillStyle = colours.quiet;
      context.textBaseline = "middle";
      return context.fillText("Full pages of prompts and answers come here, to be found again.", 4, 6 + high / 2, this.width - 8);
    }
    context.fillStyle = colours.ink;
    context.beginPath();
    context.arc(8, 6 + high / 2, 3.5, 0, 7);
    context.fill();
  }

  #join({ parent, row, depth, pages }) {
    if (parent?.row === row) return; // it follows without a gap
    const { context, colours, high } = this;
    const startX = parent ? this.#x(parent.depth + parent.pages.length) - this.step / 2 : 8;
    const startY = this.#y(parent ? parent.row : 0) + (parent ? high : high / 2);
    const [page] = pages;
    const x = page === undefined ? this.#x(depth) : this.cells[2 * page], y = (page === undefined ? this.#y(row) : this.cells[2 * page + 1]) + high / 2;
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
    const gap = step >= 6 ? 1.5 : step >= 4 ? 1 : 0, size = state.header.page_size;
    for (const page of node.pages) {
      const x = this.cells[2 * page], y = this.cells[2 * page + 1];
      const request = state.requests.get(owner[page]), users = state.users[page];
      context.globalAlpha = this.#alpha(page) * (lit && !lit.pages.has(page) ? 0.2 : 1);
      if (!users) { context.fillStyle = colours.cached; context.fillRect(x, y, step - gap, high); }
      else if (node.tail === null) {
        context.fillStyle = users > 1 ? colours.ink : hueOf(colours, request);
        context.fillRect(x, y, step - gap, high);
        if (users === 1) stripe(context, colours, request, x, y, step - gap, high);
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
    if (pitch < 11 && !node.stub) return;
    const end = this.#x(node.depth + node.pages.length), y = this.#y(node.row);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.globalAlpha = lit && !node.pages.some((page) => lit.pages.has(page)) ? 0.3 : 1;
    context.font = type(colours, 10);
    context.fillStyle = colours.quiet;
    if (node.stub) context.fillText(`+${node.stub} branches, ${node.hidden} pages`, end + 6, y + high / 2);
    else if (!node.children.length && pitch >= 11) {
      const names = node.tail !== null ? [node.tail] : node.live ? state.holders(node.pages.at(-1)) : [];
      context.fillStyle = colours.ink;
      context.fillText(names.map((r) => `r${r}`).join(" "), end + 4, y + high / 2 + 0.5, this.width - end - 6);
    }
    if (pitch >= 24 && state.vocab.size && node.pages.length) {
      const room = node.pages.length * step - 4;
      context.fillStyle = colours.quiet;
      context.fillText(clip(context, textOf(state, node, room), Math.max(room, node.children.length ? 0 : 60)), this.#x(node.depth), y + high + 7 * colours.unit);
    }
    context.globalAlpha = 1;
  }

  #leaving() {
    if (!this.from) return;
    const { context, colours, step, high } = this;
    context.fillStyle = colours.cached;
    context.globalAlpha = 1 - this.ease;
    for (const [x, y] of this.left) context.fillRect(x, y, Math.max(1, step - 1.5), high);
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
  return text.replace(/<\|[^|<>]*\|>/g, " ").trim().replace(/\s+/g, " "); // the markers of a chat template take too much room
}

function clip(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low > 3 ? `${text.slice(0, low)}…` : "";
}
