// The lines that say what just happened, each with a button that shows where the source does it.

import { h, hueOf, secondOf } from "./dom.js";
import { words } from "./words.js";

const MOST = 4; // sentences: where some take two lines, fewer, so that the panels below keep their place
const LOUD = new Set(["broken", "gap", "preemption", "eviction", "error", "held", "prefix", "admission", "finish"]);

export class Words {
  constructor(mechanisms, { book, sources }, choose, hover) {
    this.mechanisms = mechanisms;
    this.book = book;
    this.sources = sources;
    this.choose = choose;
    this.hover = hover;
    this.list = h("ol", { className: "v-said" });
    this.spoken = h("p", { className: "v-unseen", "aria-live": "polite" });
    this.element = h("div", { className: "v-happened" }, this.list, this.spoken);
    this.moment = h("p", { className: "v-moment", role: "status" });
    this.popover = h("div", { className: "v-popover", popover: "auto", role: "dialog", "aria-label": "Where the source does this" });
  }

  /** A button that opens what a mechanism is and where it is done. */
  where(mechanism) {
    const about = this.mechanisms[mechanism];
    if (!about) return null;
    return h("button", { type: "button", className: "v-why", "aria-label": `${about.title}: where the source does it`, title: about.title, onclick: (event) => this.#open(mechanism, about, event.currentTarget) }, "?");
  }

  async #open(mechanism, about, from) {
    const code = (await Promise.resolve(this.sources).catch(() => ({})))[mechanism];
    const link = (path, text) => (this.book ? h("a", { href: `${this.book}${path}`, target: "_blank", rel: "noopener" }, text) : h("code", {}, text));
    const anchor = about.section.toLowerCase().replace(/[^\w -]/g, "").replaceAll(" ", "-");
    this.popover.replaceChildren(h("strong", {}, about.title), h("p", {}, about.what),
      h("p", {}, link(`source/${about.file}.html#L-${code?.line ?? 1}`, code ? `${about.file}:${code.line}` : about.file), h("br"), h("code", {}, about.name)),
      code ? h("pre", { tabIndex: 0, "aria-label": `The source of ${about.name}` }, code.text) : "",
      h("p", {}, "The book: ", link(`${about.chapter.replace(".md", ".html")}#${anchor}`, about.chapter), `, "${about.section}"`));
    this.popover.classList.toggle("v-with-code", Boolean(code));
    this.popover.showPopover();
    const { left, bottom } = from.getBoundingClientRect(), { width, height } = this.popover.getBoundingClientRect();
    this.popover.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    this.popover.style.top = `${bottom + 6 + height > innerHeight ? Math.max(8, bottom - height - 30) : bottom + 6}px`;
  }

  /** Say large what is held, or nothing. */
  tell(moment) {
    const text = moment?.text ?? "";
    if (this.moment.textContent === text) return;
    this.moment.textContent = text;
    this.moment.classList.toggle("v-alarming", moment?.mechanism === "preemption");
  }

  draw({ line, state, colours, playing, announce }) {
    if (line === this.line && colours === this.colours) return;
    this.line = line;
    this.colours = colours;
    const said = words(line, state);
    const shown = said.slice(0, MOST).map((each) => this.#sentence(each, state, colours)), more = h("li", { className: "v-quiet" });
    this.list.classList.remove("v-tight");
    this.list.replaceChildren(...shown);
    for (let cut = said.length > MOST; shown.length > 1 && (cut || this.list.scrollHeight > this.list.clientHeight); cut = false) {
      shown.pop().remove();
      more.textContent = `and ${said.length - shown.length} more`;
      this.list.append(more);
    }
    this.list.classList.toggle("v-tight", this.list.scrollHeight > this.list.clientHeight); // then its sentence has one line
    if (!said.length) this.list.replaceChildren(h("li", { className: "v-quiet" }, state.requests.size ? "Nothing changed." : "No request has come yet."));
    if (announce && !playing) this.spoken.textContent = `Step ${line.step ?? ""}. ${said.slice(0, shown.length).map(({ text }) => text).join(". ")}`;
  }

  #sentence({ mechanism, text, r }, state, colours) {
    const dot = h("i", { className: secondOf(state.requests.get(r)) });
    dot.style.backgroundColor = r === undefined ? "transparent" : hueOf(colours, state.requests.get(r));
    const known = r !== undefined && state.requests.has(r);
    const sentence = known
      ? h("button", { type: "button", className: "v-sentence", onclick: () => this.choose({ request: r }), onmouseenter: () => this.hover({ request: r }), onmouseleave: () => this.hover(null) }, dot, text)
      : h("span", { className: "v-sentence" }, dot, text);
    return h("li", { className: `v-is-${mechanism}${LOUD.has(mechanism) ? " v-loud" : ""}` }, sentence, this.where(mechanism));
  }
}
