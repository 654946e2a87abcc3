// Exercises in the page: a file to write in, the same tests as on the command line, hints, quick questions, and progress,
// which stays in this browser.

import { Engine, data, h } from "./engine.js";
import { prose } from "./prose.js";
import { quiz } from "./quiz.js";

const SECONDS = 60; // that a check may take
const KEY = "nano-serving.course";
const MARKS = { passed: "✓", failed: "✗", "syntax error": "✗", "region missing": "✗" };

const kept = Object.assign({ files: {}, progress: {}, quiz: {} }, JSON.parse(localStorage.getItem(KEY) ?? "{}"));
const keep = () => localStorage.setItem(KEY, JSON.stringify(kept));
const progress = (id) => (kept.progress[id] ??= { hints: 0 });

export async function begin(place) {
  const [{ Editor }, course] = await Promise.all([import("./editor.js"), fetch(data("course.json")).then((answer) => answer.json())]);
  const page = new Page(place, course, Editor);
  addEventListener("hashchange", () => page.open());
  page.open();
}

class Page {
  constructor(place, course, Editor) {
    this.course = course;
    this.engine = new Engine();
    this.exercises = new Map(course.chapters.flatMap(({ exercises }) => exercises.map((each) => [each.id, each])));
    this.menu = h("nav", { className: "ex-menu", "aria-label": "Exercises" });
    this.title = h("h2", {});
    this.question = h("div", { className: "ex-question" });
    this.hints = h("ol", { className: "ex-hints" });
    const desk = h("div", { className: "ex-editor" });
    this.editor = new Editor(desk, (text) => {
      kept.files[this.exercise.file] = text;
      keep();
      this.prepared ??= this.engine.call("prepare").catch(() => {}); // so that the first check begins at once
    });
    const button = (text, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, text);
    this.checking = button("Check", () => this.check(), { className: "ex-check" });
    this.hint = button("Hint", () => this.giveHint());
    this.result = h("div", { className: "ex-result", role: "status" });
    this.questions = h("div", { className: "ex-quiz" });
    this.path = h("p", { className: "ex-path" });
    place.append(this.menu, h("div", { className: "ex-main" }, this.title, this.question, this.hints, this.path, desk,
      h("div", { className: "ex-actions" }, this.checking, this.hint, button("Show the answer", () => this.showAnswer()),
        button("Start over", () => this.reset()), button("Export all", () => this.exported())),
      this.result, this.questions));
    this.engine.addEventListener("test", ({ detail }) => (this.running = detail));
  }

  open() {
    const wanted = location.hash.slice(1), chapter = this.course.chapters.find(({ number }) => `${number}` === wanted);
    const id = this.exercises.has(wanted) ? wanted : (chapter ?? this.course.chapters[0]).exercises[0].id;
    this.exercise = this.exercises.get(id);
    const { title, file, question } = this.exercise;
    this.title.textContent = `${id} ${title}`;
    this.question.replaceChildren(...prose(question));
    this.path.textContent = file;
    this.editor.show(kept.files[file] ?? this.course.files[file], `# region exercise ${id}`);
    this.result.replaceChildren();
    this.refresh();
    const its = this.course.chapters.find(({ exercises }) => exercises.includes(this.exercise));
    this.questions.replaceChildren(quiz(its.number, its.quiz, (kept.quiz[its.number] ??= {}), keep));
  }

  refresh() {
    this.menu.replaceChildren(...this.course.chapters.map(({ number, title, exercises }) =>
      h("details", { open: exercises.includes(this.exercise) }, h("summary", {}, title),
        h("ul", {}, ...exercises.map(({ id, title: name }) => {
          const { status } = progress(id), current = id === this.exercise.id;
          const link = h("a", { href: `#${id}`, className: `ex-${status?.split(" ")[0] ?? "new"}` }, `${MARKS[status] ?? "·"} ${id} ${name}`);
          if (current) link.setAttribute("aria-current", "page");
          return h("li", {}, link);
        })))));
    const { hints } = this.exercise, seen = progress(this.exercise.id).hints;
    this.hints.replaceChildren(...hints.slice(0, seen).map((hint) => h("li", {}, ...prose(hint)[0].childNodes)));
    this.hint.textContent = seen < hints.length ? `Hint ${seen + 1} of ${hints.length}` : "No more hints";
    this.hint.disabled = seen >= hints.length;
  }

  giveHint() {
    progress(this.exercise.id).hints++;
    keep();
    this.refresh();
  }

  async check() {
    const { id, file } = this.exercise, text = this.editor.text;
    this.checking.disabled = true;
    const began = performance.now();
    this.running = "";
    this.say("running", "Loading Python and pytest: 16 MB, once…");
    const clock = setInterval(() => {
      if (!this.running) return;
      this.say("running", this.running.split("::").slice(1).join("::"));
    }, 200);
    let limit;
    const watch = () => {
      if (this.running) limit = setTimeout(() => this.engine.end(`${this.running}: did not end within ${SECONDS} s`), SECONDS * 1000);
      else limit = setTimeout(watch, 200);
    };
    watch();
    let found;
    try {
      found = await this.engine.call("check", id, text);
    } catch (error) {
      found = { status: "failed", note: error.message, line: "", text: "" };
    }
    clearTimeout(limit);
    clearInterval(clock);
    this.checking.disabled = false;
    Object.assign(progress(id), { status: found.status, passed: progress(id).passed || found.status === "passed" });
    keep();
    this.refresh();
    if (this.exercise.file !== file || this.exercise.id !== id) return;
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    this.say(found.status.split(" ")[0], `${found.status}: ${found.note || "write it where it raises NotImplementedError"} (${seconds} s)`,
      found.text ? h("pre", {}, found.text) : h("p", {}, found.line));
  }

  async showAnswer() {
    if (!progress(this.exercise.id).passed && !confirm("Show the reference's answer, before yours has passed?")) return;
    this.say("running", "Loading…");
    this.say("answer", "From the blank to the reference:", h("pre", {}, await this.engine.call("answer", this.exercise.id)));
  }

  reset() {
    const { file, id } = this.exercise;
    if (!confirm(`Forget what you wrote in ${file}, for all exercises of this file?`)) return;
    delete kept.files[file];
    delete kept.progress[id];
    keep();
    this.open();
  }

  async exported() {
    const begun = new Set(Object.keys(kept.files).map((file) => file.split("/")[0])); // phases: a workspace has all files of one
    const blank = Object.entries(this.course.files).filter(([file]) => begun.has(file.split("/")[0]));
    const zip = await this.engine.call("exported", { ...Object.fromEntries(blank), ...kept.files });
    const link = h("a", { href: URL.createObjectURL(new Blob([zip], { type: "application/zip" })), download: "workspace.zip" });
    link.click();
    this.say("answer", "Unpack workspace.zip in a checkout; `python -m chapters check` goes on from there.");
  }

  say(kind, text, ...more) {
    this.result.dataset.kind = kind;
    this.result.replaceChildren(h("p", {}, text), ...more.filter(Boolean));
  }
}
