// The worker, as a page uses it: `await engine.call("check", ...)`, and `tell` events of what happens meanwhile.

import { h } from "../../tab/viewer/dom.js"; // the packed viewer's

export { h };

export class Engine extends EventTarget {
  #worker;
  #waiting = new Map();
  #number = 0;

  call(name, ...args) {
    this.#worker ??= this.#start();
    const id = this.#number++;
    this.#worker.postMessage({ id, call: name, args });
    return new Promise((resolve, reject) => this.#waiting.set(id, { resolve, reject }));
  }

  // End what runs. The next call starts anew.
  end(reason) {
    this.#worker?.terminate();
    this.#worker = undefined;
    for (const { reject } of this.#waiting.values()) reject(new Error(reason));
    this.#waiting.clear();
  }

  #start() {
    const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => {
      if ("tell" in data) {
        this.dispatchEvent(new CustomEvent(data.tell, { detail: data.value }));
        return;
      }
      const { resolve, reject } = this.#waiting.get(data.id);
      this.#waiting.delete(data.id);
      if ("error" in data) reject(new Error(data.error));
      else resolve(data.result);
    };
    worker.onerror = (event) => this.end(event.message || "the worker could not start");
    return worker;
  }
}

export const data = (name) => new URL(`../../tab/${name}`, import.meta.url);

// The lines of a record in a file.
export async function recorded(name) {
  const text = await (await fetch(data(name))).text();
  return text.trim().split("\n").map((line) => JSON.parse(line));
}

// A viewer of the engine's record in this element.
export async function view(element, title) {
  document.head.append(h("link", { rel: "stylesheet", href: data("viewer/viewer.css").href }));
  const sources = fetch(data("sources.json")).then((answer) => answer.json());
  const { Viewer } = await import(data("viewer/viewer.js"));
  return new Viewer(element, { title, book: "alone" in document.documentElement.dataset ? "" : new URL("../../", import.meta.url), sources });
}
