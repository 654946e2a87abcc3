// A tour of the recorded run in five stops, forward in time. Each goes to a step, lights the panels that it speaks of, and
// asks what happens next; then the viewer plays it. What is asked and told is read from the record.

import { button } from "./dom.js";
import { count, h } from "./viewer/dom.js";
import { SHARED } from "./viewer/state.js";

const operation = (line, name) => (line.pages ?? []).find(([each]) => each === name);
const shared = (state) => state.counts[SHARED];

/** `find` is the line that answers, the first after that of the stop before. The viewer asks `lead` lines before it, and plays
 *  from there to `after` lines after it. `ask` is told how many pages are free or cached where it asks. The first choice is
 *  right. */
const STOPS = [
  {
    title: "Pages", mechanism: "page", panels: ["pages"], lead: 1, after: 8,
    find: (line) => line.decode?.length === 1 && operation(line, "grow"),
    ask: (line, state) => `In the recorded run r${line.decode[0]} writes its answer, token by token. Keys and values of ${state.header.page_size} tokens fill a page, and its last page is full. Where does the next token go?`,
    choices: ["Into any free page", "Over its oldest tokens", "All its pages move to a larger place"],
    tell: (line) => `Page ${operation(line, "grow")[2][0]} was free, and r${line.decode[0]} has it now. A page table lists the pages of a request in their order, wherever they are: nothing moves, and less than a page is wasted.`,
  },
  {
    title: "Sharing", mechanism: "prefix", panels: ["tree", "pages"], lead: 1, after: 0,
    find: (line) => (line.admitted ?? []).filter(([, cached]) => cached).length > 3,
    ask: (line) => `${line.admitted.length} more requests wait. They begin with the same ${line.admitted[0][1]} tokens as r${line.admitted[0][0] - 1}, which has just computed those. How many of these does each compute again?`,
    choices: ["None", "All, as it has a cache of its own", "Half, as two share one copy"],
    tell: (line, state) => `The page tables of these requests begin with the same ${shared(state)} pages, framed and marked ${line.admitted.length + 1}\u00d7, and each request computes only what follows. The tree finds the pages by their tokens.`,
  },
  {
    title: "The batch", mechanism: "decode", panels: ["time"], lead: 1, after: 8,
    find: (line) => line.decode?.length > 7 && !line.pages,
    ask: (line) => `${line.decode.length} requests write at once, and each needs its next token. How many steps does that take?`,
    choices: ["One for all", "One for each", "As many as fit in a page"],
    tell: (line) => `A step computes ${line.decode.length} tokens, one of each request. It reads all weights of the model once, for one token or for many, so a batch costs little more than one request. When a request ends, another can join in the next step.`,
  },
  {
    title: "Chunks", mechanism: "chunk", panels: ["time"], lead: 1, after: 3,
    find: (line, state) => line.decode && line.prefill?.length === 1 && line.prefill[0][2] === state.header.chunk,
    ask: (line, state) => `r${line.prefill[0][0]} brings a prompt of ${state.requests.get(line.prefill[0][0]).prompt} tokens, and a chunk has at most ${state.header.chunk}. When does it write its first token?`,
    choices: ["After its last chunk", "In this step", "After each chunk, one"],
    tell: (line, state) => `It takes ${Math.ceil(state.requests.get(line.prefill[0][0]).prompt / state.header.chunk)} steps, and the last chunk brings the first token. A long prompt never fills a step by itself, so other requests go on decoding in the same steps.`,
  },
  {
    title: "Preemption", mechanism: "preemption", panels: ["pages", "tree", "time"], lead: 12, after: 0,
    find: (line) => line.preempted?.length,
    ask: (line, state, left) => `The pool has only ${count(left, "page")} left, free or cached, and other requests take them all. Then r${line.preempted[0][1]} needs one to write on. What does the engine do?`,
    choices: ["It takes the pages of the last request", "It lets all requests wait until one ends", "It ends the longest answer"],
    tell: (line) => `r${line.preempted[0][0]}, which came last, loses its pages, and r${line.preempted[0][1]} gets one. Its tokens are kept: when there is room again, it computes those that are no longer cached, many in a step, like a prompt. The client sees a pause, and no token twice.`,
  },
];

/** Say of a choice that it was right, or wrong: by more than a colour. */
function mark(choice, verdict, sign) {
  choice.classList.add(verdict);
  choice.prepend(h("b", {}, sign), h("span", { className: "v-unseen" }, `${verdict}: `));
}

export class Tour {
  /** `first` shows the recorded run in the viewer, and this server's engine afterwards. */
  constructor(place, viewer, first) {
    Object.assign(this, { place, viewer, first });
  }

  async start() {
    await this.first.show(true);
    this.place.hidden = false;
    this.#stop(0);
  }

  leave() {
    this.place.hidden = true;
    this.viewer.light();
    this.first.leave();
  }

  // What had the focus is gone with the tour.
  #end() {
    this.leave();
    this.viewer.element.focus({ preventScroll: true });
  }

  #stop(number) {
    const { viewer } = this, { history, player } = viewer, stop = STOPS[number];
    let at = number ? this.at + 1 : history.base;
    while (at < history.end - 1 && !stop.find(history.line(at), history.head)) at++;
    const line = history.line((this.at = at));
    player.pause();
    player.seek(at - stop.lead, true);
    viewer.light(...stop.panels);
    const answer = h("div", { role: "status" }), [free, cached] = history.at(at - stop.lead).counts, state = history.at(at);
    const question = stop.ask(line, state, free + cached), told = stop.tell(line, state), last = number === STOPS.length - 1;
    const play = () => player.playFrom(at - stop.lead, at + stop.after);
    const choose = (choice) => {
      for (const each of choices) each.disabled = true;
      mark(choices[0], "right", "\u2713");
      if (choice) mark(choices[choice], "wrong", "\u2717");
      answer.replaceChildren(h("p", {}, h("b", {}, choice ? "No. " : "Yes. "), told), h("div", { className: "row" },
        button("Again", play), button(last ? "To the engine" : "Next", () => (last ? this.#end() : this.#stop(number + 1)), { className: "first" })));
      viewer.light(...stop.panels);  // what is told takes some of their room
      this.place.scrollIntoView({ block: "nearest", behavior: "instant" });
      answer.querySelector(".first").focus();
      play();
    };
    const choices = stop.choices.map((text, choice) => button(text, () => choose(choice)));
    const order = [...choices.slice(number % 3), ...choices.slice(0, number % 3)];
    this.place.replaceChildren(
      h("p", { className: "tour-head" }, h("b", {}, `${number + 1} of ${STOPS.length}: ${stop.title}`), viewer.said.where(stop.mechanism), button("Leave the tour", () => this.#end(), { className: "plain" })),
      h("p", {}, question), h("div", { className: "choices" }, order), answer);
    this.place.scrollIntoView({ block: "nearest", behavior: "instant" });
    order[0].focus({ preventScroll: true });
  }
}
