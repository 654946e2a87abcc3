// What the engine view shows before the engine has done anything: a recorded run, again and again. The tour goes through
// it too; what the engine does meanwhile is kept, and shown afterwards.

import { History } from "./viewer/history.js";

// An engine that is idle shows nothing that moves, whatever its cache holds.
const happened = ({ step, new: come, snapshot }) => Boolean(come?.length || (!snapshot && step !== undefined));

export class First {
  /** `tell(recorded)` is called when the recorded run comes, and when it goes. */
  constructor(viewer, tell) {
    this.viewer = viewer;
    this.tell = tell;
    this.from = 0;
    this.began = false;
    this.touring = false;
    this.own = null; // the history of this server's engine, while the recorded run is shown
    this.waiting = []; // what it has written before it did anything
    this.recorded = fetch(new URL("viewer/first.jsonl", import.meta.url)).then((found) => found.text()).then((text) => text.trim().split("\n").map((line) => JSON.parse(line)));
  }

  /** Lines of the engine. */
  push(lines) {
    if (this.viewer.live) { this.viewer.push(lines); return; }
    for (const line of lines) this.#keep(line);
    if (!this.touring && this.own && this.began) this.leave();
  }

  #keep(line) {
    if ("record" in line) {
      const { known, vocab } = this.viewer;
      this.own = new History(line, { known, vocab });
      this.began = false;
    } else {
      if (!this.began) this.from = this.own.end - 1; // the last line before anything happened
      this.own.push(line);
      this.own.trim();
      this.began ||= happened(line);
    }
  }

  /** Show the recorded run, from the first sharing on; `touring`: whatever the engine does. */
  async show(touring = false) {
    const { viewer } = this, lines = await this.recorded;
    this.touring = touring;
    if (!touring && this.began) return;
    if (viewer.live) { this.own = viewer.history; this.began = true; this.from = Infinity; }
    viewer.live = false;
    viewer.push(lines);
    viewer.player.loops = !touring;
    this.tell(true);
    const sharing = lines.findIndex(({ admitted }) => admitted?.some(([, cached]) => cached)) - 1;  // the header is no line of the history
    if (touring || matchMedia("(prefers-reduced-motion: reduce)").matches) viewer.player.seek(sharing);
    else viewer.player.playFrom(sharing);
  }

  /** Back to this server's engine, or to the recorded run if that has done nothing. */
  leave() {
    const { viewer, own } = this;
    this.touring = false;
    if (!this.began) { this.show(); return; }
    this.own = null;
    viewer.player.loops = false;
    viewer.open(own);
    viewer.live = true;
    viewer.player.follow(this.from);
    this.tell(false);
  }
}
