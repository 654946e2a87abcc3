// What a line of the record says, in words: a list of { mechanism, text, r }, the most telling first.

import { count } from "./dom.js";
import { SHARED } from "./state.js";

const ORDER = ["broken", "gap", "preemption", "eviction", "error", "held", "prefix", "admission", "finish", "arrival", "duplicate", "draft", "chunk", "publish", "decode", "experts"];

/** `state` is the state after the line. */
export function words(line, state) {
  const said = [];
  const say = (mechanism, text, r) => said.push({ mechanism, text, r });
  if (line.broken) say("broken", `broken: ${line.broken}`);
  if (line.gone) say("gap", `${count(line.gone.dropped, "step")} left out: this page reads slower than the engine works`);
  if (line.snapshot) say("gap", "the record begins here, in the middle of the engine's work");
  else {
    for (const { r, prompt = 0, max, tenant } of line.new ?? []) {
      say("arrival", `r${r} arrives${tenant ? ` from ${tenant}` : ""}: a prompt of ${count(prompt, "token")}, ${max ? `up to ${max} to generate` : "nothing to generate"}`, r);
    }
    for (const [r, cached] of line.admitted ?? []) say(cached ? "prefix" : "admission", admitted(state.requests.get(r), cached, line.out), r);
    for (const [r, by] of line.preempted ?? []) say("preemption", `r${r} preempted: ${cause(r, by ?? null, line, state)}`, r);
    pages(line, say);
  }
  for (const [r, start, length] of line.prefill ?? []) say("chunk", prefill(state.requests.get(r), start, length), r);
  for (const [r, drafted, accepted] of line.verify ?? []) say("draft", `r${r}: ${accepted} of ${count(drafted, "drafted token")} accepted`, r);
  if (line.decode) say("decode", line.decode.length === 1 ? `r${line.decode[0]} decodes a token` : `${line.decode.length} requests decode a token each`, line.decode.length === 1 ? line.decode[0] : undefined);
  if (line.experts) say("experts", experts(line.experts, state.header.experts));
  for (const [r, reason, error] of line.done ?? []) say(reason === "error" ? "error" : "finish", finished(state.requests.get(r), r, reason, error), r);
  for (const why of line.held ?? []) say("held", held(state, ...why), why[0]);
  return said.sort((a, b) => ORDER.indexOf(a.mechanism) - ORDER.indexOf(b.mechanism));
}

/** What is worth a pause at a line: { at, mechanism, text, requests, pages }; null for most lines. */
export function momentOf(history, at) {
  const { preempted = [], admitted = [], snapshot } = history.line(at) ?? {};
  const lost = at > history.base ? preempted.filter(([, by]) => by !== null).map(([r]) => r) : [], found = admitted.filter(([, cached]) => cached).map(([r]) => r);
  if (snapshot || !(lost.length || found.length)) return null;
  const state = history.at(lost.length ? at - 1 : at); // preempted, they have no pages any more
  const tables = (lost.length ? lost : found).map((r) => state.tables.get(r) ?? []);
  const moment = (mechanism, requests, pages, text) => ({ at, mechanism, requests: new Set(requests), pages: new Set(pages), text });
  if (lost.length) {
    const pages = tables.flat().filter((page) => state.users[page] === 1), one = lost.length === 1; // the others have more users
    return moment("preemption", lost, pages, `${names(lost)} ${one ? "is" : "are"} preempted: the pool is full, and ${count(pages.length, "page")} ${pages.length === 1 ? "goes" : "go"} back`);
  }
  const shared = [...new Set(tables.flat().filter((page) => state.kind(page) === SHARED))];
  if (!shared.length) return null;
  const holders = state.holders(shared[0]), pages = shared.filter((page) => `${state.holders(page)}` === `${holders}`);
  return moment("prefix", holders, pages, `${names(holders)} share ${count(pages.length, "page")}: they begin alike`);
}

function names(requests) {
  const [first, ...rest] = requests.map((r) => `r${r}`);
  return rest.length > 2 ? `${first} and ${rest.length} more` : rest.length ? `${[first, ...rest.slice(0, -1)].join(", ")} and ${rest.at(-1)}` : first;
}

function experts([read, most, rows], number) {
  return `a layer reads ${read} of ${number} experts on average: the one with the most tokens has ${most}, an even spread would be ${+(rows / number).toPrecision(2)}`;
}

function admitted(request, cached, out = []) {
  const verb = request.preemptions ? "resumes" : "admitted";
  const total = request.total - out.filter((r) => r === request.r).length; // before this step drew its token
  if (!cached) return `r${request.r} ${verb}: none of its ${count(total, "token")} is cached`;
  return `r${request.r} ${verb}: ${cached} of its ${count(total, "token")} are cached`;
}

function prefill(request, start, length) {
  const last = start + length;
  const rest = request.total - last;
  const what = request.preemptions ? "tokens again" : "prompt tokens";
  return `r${request.r} computes ${length} ${what}${rest > 1 ? `, ${rest} are left` : ""}`;
}

function pages(line, say) {
  const stored = [];
  (line.pages ?? []).forEach(([name, first, ...rest], index) => {
    if (name === "evict") {
      const next = line.pages.slice(index + 1).find(([other]) => other === "grow");
      say("eviction", `${count(first.length, "cached page")} evicted${next ? `: r${next[1]} needs ${first.length === 1 ? "it" : "them"}` : ""}`, next?.[1]);
    } else if (name === "swap") {
      say("duplicate", `r${first} computed ${count(rest[1].length, "page")} that the tree has already: it shares ${rest[1].length === 1 ? "that" : "those"} and frees its own`, first);
    } else if (name === "store") stored.push(...rest[0]);
  });
  if (stored.length) say("publish", `${count(stored.length, "full page")} ${stored.length === 1 ? "joins" : "join"} the tree`);
}

function cause(r, by, line, state) {
  if (by === r) return "the pool has no page for it";
  if (by !== null) return `r${by} needs a page and none is free`;
  const together = line.preempted.length > 1, tenants = new Set(Array.from(state.requests.values(), ({ tenant }) => tenant));
  return together || tenants.size < 2 ? "its step failed, and it starts again" : "another tenant, which runs fewer, is next in turn";
}

const REASONS = { stop: "it drew its stop token", length: "it has all the tokens it asked for", abort: "aborted", timeout: "out of time" };

function finished(request, r, reason, error) {
  if (reason === "error") return `r${r} fails: ${error ?? "no reason given"}`;
  return `r${r} ends after ${count(request?.out ?? 0, "token")}: ${REASONS[reason] ?? reason}`;
}

function held(state, r, why, first, second) {
  const reasons = {
    tokens: () => "the step's tokens are used up",
    places: () => "as many requests run as may",
    pages: () => `it needs ${count(first, "page")}${besides(state, r, first)}, ${second} can be had`,
    watermark: () => `it needs ${count(first, "page")}; ${second} ${second === 1 ? "is" : "are"} available, some reserved for running requests`,
    prefix: () => `r${first} is computing the prefix that both have`,
    fairness: () => `tenant ${first || "without a name"} is next in turn`,
    long: () => "the step has no tokens left for long prompts",
  };
  return `r${r} waits: ${reasons[why]?.() ?? why}`;
}

// The pages of its own prefix are cached, but are no help: they would not be evicted for it.
function besides(state, r, needed) {
  const request = state.requests.get(r), size = state.header.page_size;
  if (!request) return ""; // it arrived in lines that were left out
  let own = 0, last = null;
  for (const [page, above] of state.tree) { // a page comes after the page before it
    if (above === last && state.contents.get(page)?.every((id, index) => id === state.token(request, own * size + index))) { own += 1; last = page; }
  }
  return own && own + needed === Math.ceil(request.total / size) ? ` besides its ${own} cached` : "";
}
