// Elements without markup in strings, and canvases that are sharp on every screen.

const SVG = "http://www.w3.org/2000/svg";

/** An element: properties, `on...` listeners, `aria...` and `data...` attributes, then children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const ICONS = {
  play: "M6 4l13 8-13 8z",
  pause: "M6 4h4v16H6zM14 4h4v16h-4z",
  back: "M17 5l-9 7 9 7zM5 5h2v14H5z",
  forward: "M7 5l9 7-9 7zM17 5h2v14h-2z",
  first: "M20 5l-7 7 7 7zM12 5l-7 7 7 7zM3 5h2v14H3z",
  last: "M4 5l7 7-7 7zM12 5l7 7-7 7zM19 5h2v14h-2z",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("v-icon");
  const path = svg.appendChild(document.createElementNS(SVG, "path"));
  path.setAttribute("d", ICONS[name]);
  return svg;
}

/** A canvas of a size in CSS pixels, cleared, with a context that draws in CSS pixels. */
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  const [w, hgt] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== hgt) {
    canvas.width = w;
    canvas.height = hgt;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

const COLOURS = ["ground", "raised", "ink", "quiet", "faint", "line", "accent", "free", "cached", "alarm"];
export const HUES = 8;

/** The colours of the style sheet as the theme has them now: a probe resolves `light-dark()`. */
export function palette(element) {
  const probe = element.appendChild(h("i", { hidden: true }));
  const resolve = (name) => {
    probe.style.color = `var(--v-${name})`;
    return getComputedStyle(probe).color;
  };
  const colours = Object.fromEntries(COLOURS.map((name) => [name, resolve(name)]));
  colours.hues = Array.from({ length: HUES }, (_, index) => resolve(`hue-${index}`));
  const ground = parts(colours.raised);
  colours.onHues = colours.hues.map((hue) => (lightness(parts(hue)) > 0.18 ? "#000000" : "#ffffff")); // one of them has a contrast of 4.5
  colours.tints = colours.hues.map((hue) => mix(parts(hue), ground, 0.3));
  colours.font = getComputedStyle(element).fontFamily;
  colours.unit = parseFloat(getComputedStyle(element.querySelector(".v-body")).fontSize) / 13;
  probe.remove();
  return colours;
}

const parts = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number);
const lightness = (rgb) => rgb.reduce((sum, part, index) => sum + [0.2126, 0.7152, 0.0722][index] * (part / 255) ** 2.2, 0);
const mix = (a, b, share) => `rgb(${a.map((value, index) => Math.round(value * share + b[index] * (1 - share))).join(" ")})`;

export const hueOf = (colours, request) => (request && request.slot >= 0 ? colours.hues[request.slot % HUES] : colours.quiet);
/** There are eight hues: the next eight requests have a stripe, and those after them two. */
export const stripesOf = (request) => (request && request.slot >= HUES ? Math.min(2, Math.floor(request.slot / HUES)) : 0);
export const secondOf = (request) => `v-dot v-stripes-${stripesOf(request)}`;

/** Draw the stripes of a request across what has been filled with its hue. */
export function stripe(context, colours, request, x, y, width, high) {
  const count = width < 4 || high < 4 ? 0 : stripesOf(request); // nobody sees smaller ones
  if (!count) return;
  const thick = Math.max(1, Math.round(high / 9));
  context.fillStyle = colours.raised;
  for (let index = 1; index <= count; index++) context.fillRect(x, Math.round(y + (high * index) / (count + 1) - thick / 2), width, thick);
}

export const onHueOf = (colours, request) => (request && request.slot >= 0 ? colours.onHues[request.slot % HUES] : colours.ink);
export const tintOf = (colours, request) => (request && request.slot >= 0 ? colours.tints[request.slot % HUES] : colours.line);

/** The font of a canvas, larger on large screens. */
export const type = (colours, size, weight = 400) => `${weight} ${size * colours.unit}px ${colours.font}`;

/** 1234567 -> "1.23 M"; small numbers keep two digits. */
export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (value >= 100 || Number.isInteger(value)) return `${Math.round(value)}`;
  return value.toPrecision(2);
}

export const seconds = (value) => (value < 1 ? `${(value * 1000).toFixed(1)} ms` : value >= 100 ? `${value.toFixed(0)} s` : `${value.toFixed(2)} s`);
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
