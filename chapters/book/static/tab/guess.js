// A guess before a figure. The figure unfolds once there is one, and the end of the chapter says how many were close.
// Guesses stay in this browser. Without this script the figure is folded, and a click unfolds it.

import { h } from "./engine.js";

const KEY = "nano-serving.guesses";
const TIMES = 2; // a guess is close within this factor

const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}");
const score = h("p", { className: "guess-score", role: "status" });

// `place` stands before a question and what is folded.
export function begin(place, number, places) {
  const { guess, found, shown } = place.dataset;
  const folded = place.nextElementSibling.nextElementSibling;
  const input = h("input", { name: "guess", inputMode: "decimal", size: 10, autocomplete: "off" });
  const said = h("span", { role: "status" });
  const form = h("form", { className: "guess-form" }, h("label", {}, "Your guess ", input), " ", h("button", {}, "Unfold"), " ", said);
  const show = () => {
    const value = kept[guess];
    said.textContent = `It is ${shown}. You said ${value}: ${close(value, found) ? "close" : `${(value / found).toLocaleString("en", { maximumSignificantDigits: 2 })} times as much`}.`;
    count(places);
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    const value = Number(input.value.replaceAll(",", ""));
    folded.open = true;
    if (!input.value.trim() || !(value >= 0)) return;
    kept[guess] = value;
    localStorage.setItem(KEY, JSON.stringify(kept));
    show();
  };
  folded.before(form);
  if (guess in kept) {
    input.value = kept[guess];
    show();
  }
}

const close = (value, found) => value >= found / TIMES && value <= found * TIMES;

function count(places) {
  const given = [...places].filter(({ dataset }) => dataset.guess in kept);
  const right = given.filter(({ dataset }) => close(kept[dataset.guess], dataset.found));
  score.textContent = `Your guesses in this chapter: ${right.length} of ${given.length} within a factor of ${TIMES}.`;
  if (!score.isConnected) (document.querySelector("section#answers") ?? document.querySelector("article > section > section:last-of-type")).before(score);
}
