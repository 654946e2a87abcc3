// The start of a replay that opens from disk: its records are in the page, gzipped, in base64.

import { Compare } from "./compare.js";
import { h } from "./dom.js";
import { Viewer } from "./viewer.js";

async function linesOf(element) {
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  return text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

async function start(main) {
  const sources = JSON.parse(document.querySelector("script[type='application/json']").textContent);
  const records = [];
  for (const element of document.querySelectorAll("script[type='application/gzip']")) {
    records.push({ title: element.dataset.title, lines: await linesOf(element) });
  }
  if (records.length > 1) return new Compare(main, records, { sources });
  const viewer = new Viewer(main.appendChild(h("div")), { title: records[0].title, sources });
  viewer.push(records[0].lines);
  if (records[0].lines.at(-1).broken) viewer.player.end(); // a story told for its last step
  viewer.element.focus();
  return viewer;
}

/** Light or dark, whatever the system has. */
function themeButton() {
  const root = document.documentElement, isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  return h("button", { type: "button", className: "v-why v-keys", "aria-label": "Light or dark", title: "Light or dark", onclick: () => (root.dataset.theme = isDark() ? "light" : "dark") }, "◐");
}

const main = document.querySelector("main");
start(main).then((shown) => {
  main.querySelector(".v-name, .v-transport").append(themeButton());
  globalThis.shown = shown;
}, (error) => main.append(h("p", { role: "alert" }, `This record cannot be shown: ${error.message}`)));
