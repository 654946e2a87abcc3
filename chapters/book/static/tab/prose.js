// The little Markdown of questions and answers: paragraphs, lists, `code`.

import { h } from "./engine.js";

export function prose(text) {
  return text.trim().split(/\n\s*\n/).flatMap((block) => {
    const lines = block.split("\n");
    const first = lines.findIndex((line) => line.startsWith("- "));
    if (first < 0) return [h("p", {}, ...spans(lines.join(" ")))];
    const items = lines.slice(first).join("\n").split(/^- /m).slice(1);
    const list = h("ul", {}, ...items.map((item) => h("li", {}, ...spans(item.replace(/\s+/g, " ")))));
    return first ? [h("p", {}, ...spans(lines.slice(0, first).join(" "))), list] : [list];
  });
}

export const spans = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
