// The quick questions of a chapter.

import { h } from "./engine.js";
import { spans } from "./prose.js";

// `given` are the reader's answers, by the number of the question.
export function quiz(chapter, questions, given, keep) {
  const score = h("span", {});
  const count = () => {
    const right = questions.filter((question, i) => i in given && isRight(question, given[i])).length;
    score.textContent = Object.keys(given).length ? `, ${right} of ${questions.length} right` : "";
  };
  const items = questions.map((question, i) => {
    const why = h("div", { role: "status" });
    const form = h("form", {}, h("p", {}, ...spans(question.text)), field(question, i), why);
    const judge = (value) => {
      given[i] = value;
      keep();
      count();
      explain(why, question, value);
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      const value = new FormData(form).get("answer");
      if (value) judge(value);
    };
    if (question.number === null) form.onchange = () => judge(new FormData(form).get("answer"));
    if (i in given) {
      for (const input of form.elements) {
        if (input.type === "radio") input.checked = input.value === given[i];
        else if (input.name === "answer") input.value = given[i];
      }
      explain(why, question, given[i]);
    }
    return h("li", {}, form);
  });
  count();
  return h("details", {}, h("summary", {}, `Quick questions of chapter ${chapter}`, score), h("ol", {}, ...items));
}

function field(question, i) {
  if (question.number !== null) {
    const label = question.unit ? `A number, in ${question.unit}` : "A number";
    return h("p", {}, h("label", {}, `${label} `, h("input", { name: "answer", inputMode: "decimal", size: 12 })), " ",
      h("button", {}, "Answer"));
  }
  return h("div", {}, ...question.choices.map((choice, place) =>
    h("label", { className: "ex-choice" }, h("input", { type: "radio", name: "answer", value: `${place}` }), " ", ...spans(choice.text))));
}

function isRight({ number, tolerance, choices }, given) {
  if (number === null) return choices[given].right;
  return Math.abs(Number(`${given}`.replaceAll(",", "")) - number) <= tolerance * Math.abs(number);
}

function explain(place, question, given) {
  const right = isRight(question, given);
  const why = question.number === null ? question.choices[given].why : `${question.number} ${question.unit}. ${question.why}`;
  place.dataset.kind = right ? "passed" : "failed";
  place.replaceChildren(h("p", {}, right ? "Right. " : "No. ", ...spans(why)));
}
