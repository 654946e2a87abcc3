// The present of an engine, rebuilt from its record: requests, page tables, the tree of cached pages, text.
//
// Pure: integers and strings, no page. `apply` takes the lines one by one; everything drawn follows from the result.

export const FREE = 0, CACHED = 1, PRIVATE = 2, SHARED = 3;

export class Request {
  constructor(r, { id = `r${r}`, prompt = 0, max = 0, output = 0, priority = 0, tenant = "", salted = false, tokens = null }, t) {
    Object.assign(this, { r, id, prompt, max, priority, tenant, salted });
    this.tokens = tokens?.slice(0, prompt) ?? null; // the prompt, if the record has text
    this.steps = []; // the step that drew each output token; shared likewise
    this.held = []; // the pages that it had at its end
    this.ids = tokens?.slice(prompt) ?? []; // output tokens by position; shared between copies: replaying writes the same
    this.state = "waiting"; // waiting, running, preempted, done
    this.reason = null; // why it is done
    this.error = null;
    this.computed = 0;
    this.cached = 0; // tokens that the last admission found in the cache
    this.out = output;
    this.preemptions = 0;
    this.slot = -1; // its colour: the lowest number that no other live request has
    this.arrived = t; // null: before the record began, as far as it is known
    this.firstOut = output ? 0 : null; // times of its first and its last token
    this.lastOut = null;
    this.gap = null; // between the last two
  }

  get total() { return this.prompt + this.out; }
}

const ENDED = 1000; // so many requests that are done are remembered

export class State {
  constructor(header) {
    this.header = header;
    this.vocab = new Map(); // text of token ids; only grows, so copies share it
    this.known = new Map(); // request id -> { tokens, ids } that the page knows of its own requests; shared likewise
    this.reset();
  }

  reset() {
    const count = this.header.num_pages;
    this.step = null;
    this.t = 0;
    this.requests = new Map();
    this.in = { waiting: 0, running: 0, preempted: 0, done: 0 }; // how many requests are in each state
    this.tables = new Map(); // request -> its pages in order
    this.tree = new Map(); // cached page -> the page before it, or null; in the order of insertion
    this.contents = new Map(); // cached page -> the ids of its tokens, if the record has text
    this.users = new Uint16Array(count); // how many tables name a page
    this.stored = new Uint8Array(count); // whether the tree holds it
    this.counts = [count, 0, 0, 0]; // pages that are free, cached, held by one request, shared
    this.slots = [];
    this.ending = new Set();
  }

  clone() {
    const copy = Object.assign(new State(this.header), this);
    copy.requests = new Map();
    for (const [r, request] of this.requests) {
      const ended = request.state === "done"; // it does not change any more
      copy.requests.set(r, ended ? request : Object.assign(Object.create(Request.prototype), request));
    }
    copy.in = { ...this.in };
    copy.tables = new Map(Array.from(this.tables, ([r, pages]) => [r, pages.slice()]));
    copy.tree = new Map(this.tree);
    copy.contents = new Map(this.contents);
    for (const name of ["users", "stored", "counts", "slots"]) copy[name] = this[name].slice();
    return copy;
  }

  apply(line) {
    if (line.snapshot) this.reset();
    if ("step" in line) this.step = line.step;
    this.t = line.t ?? this.t;
    for (const [id, text] of Object.entries(line.vocab ?? {})) this.vocab.set(+id, text);
    for (const fields of line.new ?? []) this.#arrive(new Request(fields.r, fields, line.snapshot ? null : this.t));
    this.ending = new Set((line.done ?? []).map(([r]) => r)); // with this line: what they computed counts to the end
    for (const operation of line.pages ?? []) this.#operate(operation);
    for (const [r, cached] of line.admitted ?? []) Object.assign(this.#request(r), { cached, computed: cached });
    for (const [r] of line.preempted ?? []) this.#preempt(this.#request(r));
    const lost = new Set((line.preempted ?? []).map(([r]) => r)); // what its slice computed is gone
    const computed = (r, to) => { const request = this.#request(r); if (!lost.has(r)) request.computed = to(request.computed); };
    for (const [r, start, length] of line.prefill ?? []) computed(r, () => start + length);
    for (const r of line.decode ?? []) computed(r, (before) => before + 1);
    for (const [r, , accepted] of line.verify ?? []) computed(r, (before) => before + 1 + accepted);
    const end = this.t + (line.ms ?? []).reduce((sum, ms) => sum + ms, 0) / 1000;
    (line.out ?? []).forEach((r, index) => this.#output(this.#request(r), line.ids?.[index], end));
    for (const [r, reason, error] of line.done ?? []) this.#finish(this.#request(r), reason, error);
    return this;
  }

  #arrive(request) {
    this.requests.set(request.r, request);
    this.in.waiting += 1;
  }

  #become(request, state) {
    this.in[request.state] -= 1;
    this.in[state] += 1;
    request.state = state;
  }

  #request(r) {
    const request = this.requests.get(r);
    if (!request) throw new Error(`the record names request ${r} before it arrived`);
    return request;
  }

  #operate([name, first, ...rest]) {
    const table = this.tables.get(first);
    if (name === "attach") this.#attach(this.#request(first), rest[0]);
    else if (name === "grow") this.#extend(table, rest[0]);
    else if (name === "swap") this.#swap(table, ...rest);
    else if (name === "free") this.#free(this.#request(first), table);
    else if (name === "store") this.#store(first, ...rest);
    else if (name === "evict") for (const page of first) this.#evict(page);
    else throw new Error(`the record has an operation on pages that this viewer does not know: ${name}`);
  }

  #attach(request, pages) {
    this.tables.set(request.r, []);
    this.#extend(this.tables.get(request.r), pages);
    request.computed = pages.length * this.header.page_size;
    this.#become(request, "running");
    if (request.slot < 0) {
      const free = this.slots.indexOf(undefined);
      request.slot = free < 0 ? this.slots.length : free;
      this.slots[request.slot] = request.r;
    }
  }

  // A request that has not ended has lost its pages: it is preempted, unless this line ends it.
  #free(request, table) {
    for (const page of table) this.#count(page, -1);
    this.tables.delete(request.r);
    if (request.state === "done" || this.ending.has(request.r)) { request.held = table; return; }
    request.computed = 0;
    this.#become(request, "preempted");
  }

  #extend(table, pages) {
    for (const page of pages) { table.push(page); this.#count(page, 1); }
  }

  #swap(table, first, pages) {
    pages.forEach((page, index) => {
      this.#count(table[first + index], -1);
      this.#count((table[first + index] = page), 1);
    });
  }

  #store(parent, pages, tokens) {
    const size = this.header.page_size;
    pages.forEach((page, index) => {
      this.tree.set(page, parent);
      this.#count(page, 0, 1);
      if (tokens) this.contents.set(page, tokens.slice(index * size, (index + 1) * size));
      parent = page;
    });
  }

  #evict(page) {
    this.tree.delete(page);
    this.contents.delete(page);
    this.#count(page, 0, 0);
  }

  #count(page, change, stored = this.stored[page]) {
    this.counts[this.kind(page)] -= 1;
    this.users[page] += change;
    this.stored[page] = stored;
    this.counts[this.kind(page)] += 1;
  }

  #preempt(request) {
    request.preemptions += 1;
    if (!this.tables.has(request.r)) this.#become(request, "preempted"); // else it runs again already
  }

  #output(request, id, t) {
    if (id !== undefined) request.ids[request.out] = id;
    request.steps[request.out] = this.step;
    request.out += 1;
    request.firstOut ??= t;
    request.gap = request.lastOut === null ? null : t - request.lastOut;
    request.lastOut = t;
  }

  #finish(request, reason, error = null) {
    this.#become(request, "done");
    Object.assign(request, { reason, error });
    if (request.slot >= 0) this.slots[request.slot] = undefined;
    if (this.in.done > ENDED) {
      for (const { r, state } of this.requests.values()) {
        if (state === "done") { this.requests.delete(r); break; }
      }
      this.in.done -= 1;
    }
  }

  /** The requests in a state, in the order of arrival. */
  all(...states) { return Array.from(this.requests.values()).filter((request) => states.includes(request.state)); }

  kind(page) {
    if (this.users[page]) return this.users[page] > 1 ? SHARED : PRIVATE;
    return this.stored[page] ? CACHED : FREE;
  }

  /** For each page the first and the last request whose table names it, or -1, and how many of its tokens are computed. */
  owners() {
    const { num_pages: count, page_size: size } = this.header;
    const owner = new Int32Array(count).fill(-1), other = new Int32Array(count).fill(-1), filled = new Uint8Array(count);
    for (const [r, table] of this.tables) {
      const computed = this.requests.get(r)?.computed ?? 0; // of an ended request the last slice may be in flight
      for (let index = 0; index < table.length; index++) {
        const page = table[index];
        if (owner[page] < 0) owner[page] = r;
        else other[page] = r;
        filled[page] = this.stored[page] ? size : Math.max(0, Math.min(size, computed - index * size));
      }
    }
    return { owner, other, filled };
  }

  /** The requests whose page tables name a page. */
  holders(page) { return Array.from(this.tables).filter(([, table]) => table.includes(page)).map(([r]) => r); }

  /** The token id at a position of a request, or undefined if it is not known. */
  token(request, at) {
    const { tokens, ids } = this.known.get(request.id) ?? request;
    return at < request.prompt ? tokens?.[at] : ids?.[at - request.prompt];
  }

  /** The pages of a request by their place in its table; once it has ended, those whose tokens the tree still keeps. */
  pagesOf(request) {
    const size = this.header.page_size, kept = (page, index) => this.contents.get(page)?.[0] === this.token(request, index * size) && this.contents.has(page);
    return this.tables.get(request.r) ?? request.held.map((page, index) => (kept(page, index) ? page : undefined));
  }

  /** The token ids of a page as far as they are known: from the tree, or from the request that holds it. */
  idsOf(page) {
    if (this.contents.has(page)) return this.contents.get(page);
    const [r] = this.holders(page);
    if (r === undefined) return [];
    const request = this.requests.get(r), size = this.header.page_size, first = this.tables.get(r).indexOf(page) * size;
    const last = Math.min(first + size, request.total);
    return Array.from({ length: Math.max(0, last - first) }, (_, index) => this.token(request, first + index)).filter((id) => id !== undefined);
  }

  text(ids) { return ids.map((id) => this.vocab.get(id) ?? "�").join(""); }
}
