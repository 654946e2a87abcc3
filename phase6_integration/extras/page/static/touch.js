// Text, tokens and pages are one thing: a word of an answer lights up its page, branch and step in the viewer, and a page
// lights up its words. What belongs to a request carries its name in the engine, as `data-request`.

import { h, hueOf, secondOf } from "./viewer/dom.js";

export class Touch {
  /** `find(r)` is called when a chip is pressed. */
  constructor(viewer, find) {
    Object.assign(this, { viewer, find });
    this.text = globalThis.CSS?.highlights ? new Highlight() : null;
    if (this.text) CSS.highlights.set("touched", this.text);
    for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, (event) => this.#point(event));
    viewer.element.addEventListener("lit", ({ detail }) => this.#light(detail));
  }

  /** A chip for the request with this name, which `refresh` fills in once the engine has it. */
  chip(name) {
    return h("button", { type: "button", className: "chip", "data-chip": name, hidden: true, title: "Show this request in the engine", onclick: () => this.find(name) }, h("i"), h("span"));
  }

  /** Colour the chips by what the engine says of their requests. */
  refresh() {
    const { history, colours } = this.viewer;
    if (!history || !colours || !this.viewer.live) return;
    const requests = new Map(Array.from(history.head.requests.values(), (request) => [request.id, request]));
    for (const chip of document.querySelectorAll("[data-chip]")) {
      const request = requests.get(chip.dataset.chip);
      if (!request || request.slot < 0) continue;
      chip.hidden = false;
      chip.firstChild.style.backgroundColor = hueOf(colours, request);
      chip.firstChild.className = secondOf(request);
      chip.lastChild.textContent = `r${request.r}`;
    }
  }

  #request(name) {
    const { viewer } = this;
    return viewer.live ? Array.from(viewer.history.head.requests.values()).find(({ id }) => id === name) : undefined;
  }

  #point(event) {
    const place = event.target.closest?.("[data-request]");
    if (!place && !this.inside) return;
    this.inside = Boolean(place);
    const request = place ? this.#request(place.dataset.request) : undefined;
    const token = request ? tokenAt(this.viewer.history.head, request, place.textContent, caret(place, event.clientX, event.clientY)) : -1;
    this.viewer.hover(token < 0 ? null : { request: request.r, token: request.prompt + token });
  }

  // The words of the page that is lit, in every answer that is on the screen; of a page that is gone, the one pointed at.
  #light(lit) {
    this.text?.clear();
    if (!this.viewer.live) return;
    const { head } = this.viewer.history, size = head.header.page_size;
    for (const chip of document.querySelectorAll("[data-chip]")) {
      const request = this.#request(chip.dataset.chip);
      chip.classList.toggle("lit", Boolean(lit && request && lit.requests.has(request.r)));
    }
    if (!this.text || !lit) return;
    for (const place of document.querySelectorAll("[data-request]")) {
      const request = this.#request(place.dataset.request), pointed = request && lit.request === request.r && lit.token !== undefined;
      const index = request && lit.page !== undefined ? head.pagesOf(request).indexOf(lit.page) : -1;
      if (index < 0 && !pointed) continue;
      const [first, last] = index < 0 ? [lit.token, lit.token + 1] : [index * size, (index + 1) * size];
      const range = rangeOf(place, textOf(head, request), first - request.prompt, last - request.prompt);
      if (range) this.text.add(range);
    }
  }
}

/** What each output token of a request says. */
function textOf(state, request) {
  return Array.from({ length: request.out }, (_, index) => state.vocab.get(state.token(request, request.prompt + index)) ?? "");
}

/** For each character of a text as it is shown, its place in what the model wrote, or -1: Markdown leaves some out. */
export function align(written, shown) {
  const places = new Int32Array(shown.length).fill(-1);
  for (let at = 0, from = 0; at < shown.length; at++) {
    const found = shown[at].trim() ? written.indexOf(shown[at], from) : -1;
    if (found < 0 || found > from + 40) continue;
    places[at] = found;
    from = found + 1;
  }
  return places;
}

/** The output token that a character of the shown text is of, or -1. */
function tokenAt(state, request, shown, at) {
  const texts = textOf(state, request), place = align(texts.join(""), shown)[at] ?? -1;
  if (place < 0) return -1;
  let end = 0;
  return texts.findIndex((text) => (end += text.length) > place);
}

/** The part of an element that shows output tokens from one up to another. */
function rangeOf(place, texts, first, last) {
  const before = (count) => texts.slice(0, Math.max(0, count)).join("").length;
  const [low, high] = [before(first), before(last)], places = align(texts.join(""), place.textContent);
  const start = places.findIndex((at) => at >= low && at < high), end = places.findLastIndex((at) => at >= low && at < high);
  if (start < 0) return null;
  const range = new Range();
  range.setStart(...nodeAt(place, start));
  range.setEnd(...nodeAt(place, end, 1));
  return range;
}

const nodesOf = (place) => document.createTreeWalker(place, NodeFilter.SHOW_TEXT);

function nodeAt(place, at, more = 0) {
  const nodes = nodesOf(place);
  while (nodes.nextNode()) {
    if (at < nodes.currentNode.length) return [nodes.currentNode, at + more];
    at -= nodes.currentNode.length;
  }
  return [place, place.childNodes.length];
}

/** The character of an element's text at a point of the window, or -1. */
function caret(place, x, y) {
  const found = document.caretPositionFromPoint?.(x, y), range = found ? null : document.caretRangeFromPoint?.(x, y);
  const [node, offset] = found ? [found.offsetNode, found.offset] : range ? [range.startContainer, range.startOffset] : [];
  const nodes = nodesOf(place);
  for (let before = 0; nodes.nextNode(); before += nodes.currentNode.length) {
    if (nodes.currentNode === node) return before + Math.min(offset, node.length - 1);
  }
  return -1;
}
