// The viewer of an engine's record: live, replayed, or of an engine in the same tab.
//
//   const viewer = new Viewer(element, { title, book, sources });
//       // book: the URL of the book's pages, to link to; sources: the text of each mechanism, or a promise of it
//   viewer.push([header, ...lines]);                         // parsed; again and again as lines come
//   viewer.live = true;                                      // follows the newest line
//   viewer.select({ request | page | node | token });        // "select" events say the same of the user's choice

import { Details } from "./details.js";
import { h, palette } from "./dom.js";
import { History } from "./history.js";
import { Keys } from "./keys.js";
import { MECHANISMS } from "./mechanisms.js";
import { Pages } from "./pages.js";
import { Player } from "./player.js";
import { Timeline } from "./timeline.js";
import { Tree } from "./tree.js";
import { Words } from "./said.js";

const still = window.matchMedia("(prefers-reduced-motion: reduce)");
const dark = window.matchMedia("(prefers-color-scheme: dark)");

const LEAST_PAGES = 256; // that are drawn, if the pool has them

export class Viewer {
  #live = false;
  #asked = false; // a frame

  /** With a `player`, that one moves several viewers, and this one has no transport of its own. */
  constructor(element, { title = "", book = "", sources = {}, player = null } = {}) {
    this.element = element;
    this.title = title;
    this.history = null;
    this.index = undefined; // the shown line
    this.selected = null; // what was clicked
    this.hovered = null;
    this.frames = 0;
    this.known = new Map(); // of `know`
    this.vocab = new Map();
    this.#build(book, sources, player);
    const sight = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) [this.pages, this.tree, this.timeline].find(({ canvas }) => canvas === target).visible = isIntersecting;
      this.#ask();
    });
    for (const { canvas } of [this.pages, this.tree, this.timeline]) sight.observe(canvas);
    new ResizeObserver(() => this.#resize()).observe(this.body);
    new ResizeObserver(() => { this.said.line = null; this.#ask(); }).observe(this.said.list);
    const repaint = () => { this.colours = null; this.#ask(); };
    dark.addEventListener("change", repaint);
    new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  push(lines) {
    for (const line of lines) {
      if ("record" in line) this.#begin(line);
      else this.history.push(line);
    }
    if (!this.history?.lines.length) return;
    if (this.#live) this.history.trim();
    this.player.grown();
    if (this.index === undefined) this.player.seek(this.player.first);
  }

  /** The tokens of a request that the page itself has sent, where the record has no text; `vocab` is id -> text. */
  know(id, { tokens, ids, vocab = {} }) {
    this.known.set(id, { tokens, ids });
    for (const [token, text] of Object.entries(vocab)) this.vocab.set(+token, text);
    this.#ask();
  }

  get live() { return this.#live; }
  set live(live) {
    this.#live = this.player.live = live;
    if (live) this.player.follow();
    else this.player.pause();
  }

  /** Show a line of the record. */
  show(index, announce = false) {
    this.index = index;
    this.announce ||= announce;
    this.#ask();
  }

  select(what, { tell = true } = {}) {
    this.selected = what;
    this.#ask();
    if (tell) this.element.dispatchEvent(new CustomEvent("select", { detail: what, bubbles: true }));
  }

  /** Draw attention to some panels, of pages, tree, time and who, above all to the first; none ends it. Only the viewer's
   *  own scrolling moves: what a page has around it stays in sight. */
  light(...names) {
    const lit = names.map((name) => this.body.querySelector(`.v-${name}`));
    for (const panel of this.body.children) panel.classList.toggle("v-dim", lit.length > 0 && !lit.includes(panel));
    let place = this.element;
    while (place.parentElement && getComputedStyle(place).overflowY === "visible") place = place.parentElement;
    if (!lit.length) place.scrollTop = 0;
    const covered = getComputedStyle(this.top).position === "sticky" ? this.top.offsetHeight : 0;
    for (const panel of lit.reverse()) {
      const frame = place.getBoundingClientRect(), { top, bottom } = panel.getBoundingClientRect();
      place.scrollTop += Math.min(top - frame.top - covered, Math.max(0, bottom - frame.bottom));
    }
  }

  hover(what) {
    if (JSON.stringify(what) === JSON.stringify(this.hovered)) return;
    this.hovered = what;
    this.#ask();
    this.element.dispatchEvent(new CustomEvent("lit", { detail: this.history?.lines.length ? this.lit(this.state) : null }));
  }

  get state() { return this.history.at(this.index); }
  get line() { return this.history.line(this.index); }

  #begin(header) {
    if (header.record !== 1) throw new Error(`this viewer reads version 1 of the record, and this is version ${header.record}`);
    this.open(new History(header, { known: this.known, vocab: this.vocab }));
  }

  /** Show another record, or go back to one that was shown before. */
  open(history) {
    const { header } = history;
    this.history = history;
    this.index = undefined;
    this.selected = this.hovered = null;
    if (history.lines.length) this.player.seek(this.player.last);
    const facts = [header.model, `${header.num_pages} pages of ${header.page_size} tokens`, header.policy, header.budget ? `${header.budget} tokens a step` : null];
    this.about.replaceChildren(facts.filter(Boolean).join(" · "), " ", header.policy ? this.said.where("policy") : "");
    this.layout = null;
    this.#ask();
  }

  #build(book, sources, player) {
    const choose = (what) => this.select(what), hover = (what) => this.hover(what);
    const canvas = (label) => h("canvas", { tabIndex: 0, role: "img", "aria-label": label });
    this.pages = new Pages(canvas("The pool of pages"));
    this.tree = new Tree(canvas("The radix tree of cached pages"));
    this.timeline = new Timeline(canvas("The batch over time"));
    this.said = new Words(MECHANISMS, { book, sources }, choose, hover);
    this.details = new Details(choose, hover, (mechanism) => this.said.where(mechanism));
    this.player = player ?? new Player([this], () => this.#ask());
    this.about = h("p", { className: "v-about" });
    this.counts = h("ul", { className: "v-legend" });
    const panel = (name, mechanism, title, ...content) => h("section", { className: `v-panel v-${name}`, "aria-label": title },
      h("h3", {}, title, this.said.where(mechanism)), ...content);
    const scroll = (view) => h("div", { className: "v-scroll" }, view.canvas);
    this.body = h("div", { className: "v-body" },
      panel("pages", "page", "Pages", this.counts, scroll(this.pages), (this.more = h("p", { className: "v-quiet" }))),
      panel("tree", "tree", "Prefix tree", scroll(this.tree)),
      panel("time", "decode", "Batch over time", lanesLegend(), scroll(this.timeline)),
      panel("who", null, "Requests", this.details.element));
    const keys = (this.keys = new Keys(this));
    this.top = h("header", { className: "v-top" },
      h("div", { className: "v-name" }, this.title ? h("h2", {}, this.title) : null, this.about, player ? null : keys.button),
      player ? null : this.player.element, this.said.element);
    if (!player) this.said.element.append(this.said.moment); // over the sentences, so that it hides no panel
    this.element.classList.add("viewer");
    this.element.tabIndex = -1; // a click anywhere in it gives it the keys
    this.element.append(this.top, this.body, keys.dialog, this.said.popover);
    this.#listen();
  }

  #listen() {
    const pointer = ({ canvas }, find, seeks = () => false) => {
      const place = (event) => [event.offsetX, event.offsetY];
      canvas.addEventListener("pointermove", (event) => {
        const found = this.history?.lines.length ? find(...place(event), event) : null;
        canvas.style.cursor = found || seeks(...place(event)) ? "pointer" : "";
        this.hover(found);
      });
      canvas.addEventListener("pointerleave", () => this.hover(null));
      canvas.addEventListener("click", (event) => { if (this.history?.lines.length) this.select(find(...place(event), event)); });
    };
    const owned = (page) => {
      const [request] = this.state.holders(page);
      return request === undefined ? { page } : { page, request };
    };
    pointer(this.pages, (x, y) => { const page = this.pages.at(x, y); return page < 0 ? null : owned(page); });
    pointer(this.tree, (x, y) => { const found = this.tree.at(x, y); return found && { ...owned(found.page), node: found.node }; });
    pointer(this.timeline, (x, y, event) => {
      const { line, request } = this.timeline.at(x, y);
      if (event.type === "click" && line >= 0) { this.player.step(line - this.index); }
      return request < 0 ? null : { request };
    }, (x) => this.timeline.axis.lineAt(x) >= 0);
  }

  /** The requests and pages to light up for what is hovered, or else selected. */
  lit(state) {
    const what = this.hovered ?? this.selected, { moment } = this.player;
    if (!what) return moment && { requests: moment.requests, pages: moment.pages, held: moment.pages };
    const requests = new Set(), pages = new Set();
    const node = what.node === undefined ? [] : this.tree.pagesWith(what.node);
    const request = state.requests.get(what.request), pagesOf = (r) => (state.requests.has(r) ? state.pagesOf(state.requests.get(r)) : []);
    const page = what.page ?? (what.token === undefined ? undefined : pagesOf(what.request)[Math.floor(what.token / state.header.page_size)]);
    for (const each of node.length ? node : [page]) {
      if (each === undefined) continue;
      pages.add(each);
      for (const r of state.holders(each)) requests.add(r);
    }
    if (what.request !== undefined) requests.add(what.request);
    for (const r of requests) for (const each of pagesOf(r)) if (each !== undefined) pages.add(each);
    return { requests, pages, page, request: what.request, token: what.token, line: request && what.token !== undefined ? this.history.lineOf(request, what.token) : undefined };
  }

  #resize() {
    const width = this.body.clientWidth;
    if (width === this.width) return;
    this.width = width;
    this.layout = null;
    this.#ask();
  }

  #ask() {
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => { this.#asked = false; this.#draw(); });
  }

  #measure() {
    const inner = (view) => view.canvas.parentElement.clientWidth;
    this.colours = palette(this.element);
    const room = parseFloat(getComputedStyle(this.body).getPropertyValue("--v-room")) * this.colours.unit;
    this.layout = { pages: inner(this.pages), tree: inner(this.tree), time: inner(this.timeline), room };
    this.layout.pagesShown = this.#pagesShown();
    this.pages.layout(this.layout.pagesShown, this.layout.pages, room);
    if (this.pages.pitch < 8) this.pages.layout(this.layout.pagesShown, this.layout.pages, room * 1.7);
    const more = this.history.header.num_pages - this.layout.pagesShown;
    this.more.textContent = more ? `and ${more.toLocaleString("en")} more, never used` : "";
  }

  // Of a large pool the part that has been used, and at most as much again.
  #pagesShown() {
    const { used, header } = this.history;
    let shown = LEAST_PAGES;
    while (shown < used) shown *= 2;
    return Math.min(shown, header.num_pages);
  }

  #draw() {
    if (!this.history?.lines.length || this.index === undefined || !this.element.isConnected) return;
    this.colours ??= palette(this.element);
    if (this.layout?.pagesShown !== this.#pagesShown()) this.#measure();
    const { history, colours, layout, index: at } = this, state = this.state, line = this.line, lit = this.lit(state);
    const { playing, following, speed } = this.player;
    const moving = !still.matches && (!playing || following || speed <= 1);
    const fast = playing && !following && speed > 2; // then tree and lanes take turns, and words change more rarely
    const due = (view) => !playing || view.visible !== false || this.frames % 12 < 2; // what is out of sight can lag
    if (due(this.pages)) this.pages.draw({ state, line, colours, lit });
    if (due(this.tree) && !(fast && this.frames % 2 === 0)) this.tree.draw({ state, colours, lit, width: layout.tree, room: layout.room, moving });
    if (due(this.timeline) && !(fast && this.frames % 2 === 1)) this.timeline.draw({ history, at, state, colours, lit, width: layout.time, room: layout.room * 0.8, pages: layout.pagesShown });
    this.#legend(state, colours);
    this.#terms();
    if (!fast || this.frames % 6 === 0) this.details.draw({ state, colours, selected: this.hovered ?? this.selected });
    if (!fast || this.frames % 6 === 3) this.said.draw({ line, state, colours, playing, announce: this.announce && !playing });
    this.said.tell(this.player.moment);
    this.announce = false;
    this.frames += 1;
  }

  // Beside each name on the time axis, what it means.
  #terms() {
    const { marks, axis } = this.timeline, names = marks.map(([name]) => name).join(), places = `${axis.labels} ${marks.map(([, top]) => top)}`;
    if (this.termNames !== names) {
      for (const term of this.terms ?? []) term.remove();
      this.timeline.canvas.after(...(this.terms = marks.map(([mechanism]) => this.said.where(mechanism))));
    } else if (this.termPlaces === places) return;
    Object.assign(this, { termNames: names, termPlaces: places });
    marks.forEach(([, top], index) => Object.assign(this.terms[index].style, { top: `${top - 4}px`, left: `${axis.labels - 24}px` }));
  }

  #legend(state, colours) {
    const [free, cached, one, shared] = state.counts;
    const key = [free, cached, one, shared].join();
    if (this.legendKey === key) return;
    this.legendKey = key;
    const item = (name, number, title) => h("li", { title }, h("i", { className: `v-key v-key-${name.split(" ")[0]}` }), `${name} `, h("b", {}, `${number}`));
    this.counts.replaceChildren(item("shared", shared, "in the page tables of two or more requests"), item("one request", one, "in one page table, in the colour of its request; filled as far as it is computed"),
      item("cached", cached, "no request uses it; the tree keeps its tokens for the next that begins alike"), item("free", free, "holds nothing"));
    this.pages.canvas.setAttribute("aria-label", `The pool: ${shared} pages shared, ${one} of one request, ${cached} cached, ${free} free`);
  }
}

function lanesLegend() {
  const item = (name, text) => h("li", {}, h("i", { className: `v-mark v-mark-${name}` }), text);
  return h("ul", { className: "v-legend" }, item("waiting", "waiting"), item("prefill", "prefill chunk"), item("decode", "decode"), item("preempted", "preempted"),
    item("drawn", "tokens of decodes, in the bars below"), item("budget", "token budget"));
}
