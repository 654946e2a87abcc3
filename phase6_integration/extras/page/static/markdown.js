// Markdown as elements: paragraphs, headings, lists, quotes, tables, code; emphasis, code and links within a line.
// Nothing is ever parsed as HTML, so what a model writes can be shown, and do nothing.

import { copier } from "./dom.js";
import { h } from "./viewer/dom.js";

const INLINE = /(?<!`)(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?!\w)|(?<!\w)_([^\s_](?:[^_]*[^\s_])?)_(?!\w)|\[([^[\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)]) +(.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*(\S*)/;
const STARTS = /^(?: {0,3}(?:`{3,}|~{3,}|#{1,6} |>)| *(?:[-*+]|\d{1,9}[.)]) )/;

/** Text with emphasis, code and links, as nodes. */
export function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    const [, , code, strong, star, bar, label, url] = match;
    nodes.push(text.slice(0, match.index));
    if (code !== undefined) nodes.push(h("code", {}, code));
    else if (strong !== undefined) nodes.push(h("strong", {}, inline(strong)));
    else if (url !== undefined) nodes.push(h("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, inline(label)));
    else nodes.push(h("em", {}, inline(star ?? bar)));
  }
  return [...nodes, text].filter((node) => node !== "");
}

/** The blocks of a text: each a list of its lines. They can be drawn one by one. */
export function blocks(text) {
  const found = [], lines = text.replaceAll("\r\n", "\n").split("\n");
  for (let at = 0; at < lines.length;) {
    const start = at, fence = FENCE.exec(lines[at]);
    if (!lines[at].trim()) { at += 1; continue; }
    if (fence) {
      do at += 1; while (at < lines.length && lines[at].trim() !== fence[1]);
      at += 1;
    } else if (/^#{1,6} /.test(lines[at])) at += 1;
    else if (ITEM.test(lines[at])) {
      do at += 1; while (at < lines.length && (/^ {2,}\S/.test(lines[at]) || ITEM.test(lines[at])));
    } else {
      const quoted = lines[at].startsWith(">"), table = lines[at].startsWith("|");
      do at += 1; while (at < lines.length && lines[at].trim() && (quoted ? lines[at].startsWith(">") : table ? lines[at].startsWith("|") : !STARTS.test(lines[at])));
    }
    found.push(lines.slice(start, at));
  }
  return found;
}

const DEEPEST = 20; // quotes and lists within each other; what is deeper is text: a model may write any number of ">"

function block(lines, depth = 0) {
  const [first] = lines, fence = FENCE.exec(first), heading = /^(#{1,6}) +(.*)$/.exec(first);
  if (fence) return code(lines.slice(1, lines.length > 1 && lines.at(-1).trim() === fence[1] ? -1 : undefined).join("\n"), fence[2]);
  if (heading) return h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2].trim().replace(/(?<!#)#+$/, "").trim()));
  if (first.startsWith(">") && depth < DEEPEST) return h("blockquote", {}, draw(lines.map((line) => line.replace(/^> ?/, "")).join("\n"), depth + 1));
  if (/^ {0,3}([-*_])(?: *\1){2,} *$/.test(first) && lines.length === 1) return h("hr");
  if (first.startsWith("|") && /^\|[\s|:-]+\|?$/.test(lines[1] ?? "")) return table(lines);
  if (ITEM.test(first) && depth < DEEPEST) return list(lines, depth + 1);
  return h("p", {}, inline(lines.join("\n")));
}

function code(text, language) {
  return h("figure", { className: "code" },
    h("figcaption", {}, h("span", {}, language), copier(() => text)),
    h("pre", { tabIndex: 0, "aria-label": "Code" }, h("code", {}, text)));
}

// Lines that are indented further than an item belong to it.
function list(lines, depth) {
  const [, indent, number] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), indent.length + 2)));
  }
  const properties = number && number !== "1" ? { start: +number } : {};
  return h(number ? "ol" : "ul", properties, items.map(([text, ...rest]) => h("li", {}, inline(text), rest.length ? draw(rest.join("\n"), depth) : [])));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const row = (tag) => (line) => h("tr", {}, cells(line).map((cell) => h(tag, {}, cell)));
  const [head, , ...body] = lines;
  return h("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, row("th")(head)), h("tbody", {}, body.map(row("td")))));
}

export const draw = (text, depth = 0) => blocks(text).map((lines) => block(lines, depth));

/** Shows a text that grows: blocks that have not changed keep their elements. */
export function grow(element, text) {
  const found = blocks(text);
  while (element.children.length > found.length) element.lastChild.remove();
  found.forEach((lines, index) => {
    const source = lines.join("\n"), old = element.children[index];
    if (old?.source === source) return;
    const drawn = Object.assign(block(lines), { source });
    if (old) old.replaceWith(drawn);
    else element.append(drawn);
  });
}
