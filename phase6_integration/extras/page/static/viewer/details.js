// The panel of what is selected: a request with its tokens by page, a page with its text, or who is there to select.

import { count, h, hueOf, seconds, secondOf } from "./dom.js";
import { CACHED, FREE, SHARED } from "./state.js";

const TERMS = { Tenant: "tenant", "First token": "ttft", "From the cache": "prefix", Preempted: "preemption" }; // their mechanisms
const MOST_PAGES = 24, MOST_CHIPS = 60;

export class Details {
  /** `choose(what)` selects, `hover(what)` lights up; null ends it. `where(mechanism)` is a button that explains it. */
  constructor(choose, hover, where) {
    this.where = where;
    this.choose = choose;
    this.hover = hover;
    this.element = h("div", { className: "v-details" });
    this.shown = "";
  }

  draw({ state, colours, selected }) {
    const key = this.#key(state, selected);
    if (key === this.shown) return;
    this.shown = key;
    const focus = document.activeElement?.closest?.(".v-details") === this.element ? document.activeElement.dataset.key : null;
    const request = state.requests.get(selected?.request);
    let content;
    if (request) content = this.#request(state, colours, request, selected);
    else if (selected?.page !== undefined) content = this.#page(state, colours, selected.page);
    else content = this.#all(state, colours);
    this.element.replaceChildren(...content);
    if (focus) this.element.querySelector(`[data-key="${focus}"]`)?.focus();
  }

  #key(state, selected) {
    const request = state.requests.get(selected?.request);
    if (request) return JSON.stringify([selected, request.state, request.computed, request.out, state.pagesOf(request), request.slot, state.known.get(request.id)?.ids?.length]);
    if (selected?.page !== undefined) return JSON.stringify([selected, state.holders(selected.page), state.kind(selected.page)]);
    return JSON.stringify(["running", "preempted", "waiting"].map((each) => state.all(each).map(({ r, slot }) => [r, slot])));
  }

  #chip(state, colours, r) {
    const request = state.requests.get(r);
    const dot = h("i", { className: secondOf(request) });
    dot.style.backgroundColor = hueOf(colours, request);
    return h("button", {
      type: "button", className: "v-chip", "data-key": `r${r}`, "aria-label": `Request ${r}, ${request?.state ?? "gone"}`,
      onclick: () => this.choose({ request: r }), onmouseenter: () => this.hover({ request: r }), onmouseleave: () => this.hover(null),
    }, dot, `r${r}`);
  }

  #all(state, colours) {
    const group = (name, states) => {
      const all = state.all(...states);
      if (!all.length) return null;
      const rest = all.length - MOST_CHIPS;
      return h("div", { className: "v-group" }, h("h4", {}, `${name} `, h("span", { className: "v-number" }, `${all.length}`)),
        h("div", { className: "v-chips" }, all.slice(0, MOST_CHIPS).map(({ r }) => this.#chip(state, colours, r)), rest > 0 ? h("span", { className: "v-quiet" }, `and ${rest} more`) : null));
    };
    const groups = [group("Running", ["running"]), group("Preempted", ["preempted"]), group("Waiting", ["waiting"])].filter(Boolean);
    if (!groups.length) groups.push(h("p", { className: "v-quiet" }, "No request is here at this step."));
    return [...groups, h("p", { className: "v-quiet" }, "Point at a page, a branch, a lane or a word of an answer: its request lights up everywhere. Click to keep it.")];
  }

  #request(state, colours, request, selected) {
    const { r } = request, table = state.tables.get(r) ?? [], pages = state.pagesOf(request);
    const facts = [
      ["Prompt", count(request.prompt, "token")],
      ["From the cache", request.cached ? count(request.cached, "token") : null],
      ["Output", `${request.out} of ${request.max || "?"} tokens`],
      ["Computed", `${request.computed} of ${request.total} tokens`],
      ["Pages", `${table.length}${table.length ? `, ${table.filter((page) => state.users[page] > 1).length} shared` : ""}`],
      ["First token", request.firstOut === null || request.arrived === null ? null : `after ${seconds(request.firstOut - request.arrived)}`],
      ["Preempted", request.preemptions ? count(request.preemptions, "time") : null],
      ["Tenant", request.tenant || null],
      ["Priority", request.priority || null],
      ["Error", request.error],
    ].filter(([, value]) => value !== null && value !== undefined);
    const status = request.state === "done" ? `ended: ${request.reason}` : request.state;
    return [
      h("div", { className: "v-title" }, this.#chip(state, colours, r), h("strong", {}, status), h("code", {}, request.id),
        h("button", { type: "button", className: "v-close", "aria-label": "Clear the selection", onclick: () => this.choose(null) }, "×")),
      h("dl", { className: "v-facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name, TERMS[name] ? this.where(TERMS[name]) : null), h("dd", {}, `${value}`)))),
      this.#tokens(state, colours, request, pages, selected),
      h("p", { className: "v-quiet" }, "Click a word: its page and the step that computed it light up."),
    ];
  }

  // A block a page: its number, and its tokens; those still to be computed are pale.
  #tokens(state, colours, request, table, selected) {
    const size = state.header.page_size, pages = Math.ceil(request.total / size);
    const blocks = [];
    for (let index = 0; index < pages; index++) {
      if (pages > MOST_PAGES && index === MOST_PAGES / 2) {
        blocks.push(h("span", { className: "v-quiet" }, `… ${pages - MOST_PAGES} pages …`));
        index = pages - MOST_PAGES / 2;
      }
      blocks.push(this.#block(state, colours, request, table[index], index * size, Math.min(request.total, (index + 1) * size), selected));
    }
    return h("div", { className: "v-tokens" }, blocks);
  }

  #block(state, colours, request, page, first, last, selected) {
    const tokens = [];
    for (let at = first; at < last; at++) {
      const id = state.token(request, at);
      const kind = `v-token${at >= request.prompt ? " v-out" : ""}${at >= request.computed ? " v-todo" : ""}${selected.token === at ? " v-here" : ""}`;
      tokens.push(h("span", { className: kind, title: id === undefined ? `token ${at}` : `token ${at}, id ${id}`, "data-token": at }, id === undefined ? "·" : state.vocab.get(id) ?? "�"));
    }
    const number = page === undefined ? (request.state === "done" ? "page given back" : "no page") : `${page}${state.users[page] > 1 ? ` · shared by ${state.users[page]}` : request.state === "done" ? " · cached" : ""}`;
    const here = (page !== undefined && page === selected.page) || (selected.token >= first && selected.token < last);
    const block = h("button", {
      type: "button", className: `v-page${here ? " v-here" : ""}`, "data-key": `p${first}`,
      onmouseenter: () => page !== undefined && this.hover({ page, request: request.r }), onmouseleave: () => this.hover(null),
      onclick: (event) => this.choose(event.target.dataset.token ? { request: request.r, token: +event.target.dataset.token, page } : { request: request.r, page }),
    }, h("small", {}, number), h("span", { className: "v-text" }, tokens));
    block.style.setProperty("--v-hue", page === undefined ? colours.line : state.users[page] > 1 ? colours.ink : hueOf(colours, request));
    return block;
  }

  #page(state, colours, page) {
    const kind = state.kind(page), holders = state.holders(page);
    const said = {
      [FREE]: "free", [CACHED]: "cached: no request uses it, and its tokens are still known",
    }[kind] ?? (kind === SHARED ? `shared by ${holders.length} requests` : state.stored[page] ? "of one request, and in the tree" : "of one request");
    return [
      h("div", { className: "v-title" }, h("strong", {}, `Page ${page}`), h("span", {}, said),
        h("button", { type: "button", className: "v-close", "aria-label": "Clear the selection", onclick: () => this.choose(null) }, "×")),
      h("div", { className: "v-chips" }, holders.map((r) => this.#chip(state, colours, r))),
      kind === FREE ? null : h("p", { className: "v-prose" }, state.text(state.idsOf(page))),
    ].filter(Boolean);
  }
}
