// The page: what its parts do when they are pressed, and the line about the server.

import { hasKey, send, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { curl, python } from "./code.js";
import * as crowd from "./crowd.js";
import { $, copier, load, store } from "./dom.js";
import { First } from "./first.js";
import { watch } from "./live.js";
import { own } from "./own.js";
import { Settings } from "./settings.js";
import { Touch } from "./touch.js";
import { Tour } from "./tour.js";
import { Viewer } from "./viewer/viewer.js";

const text = $("text"), narrow = matchMedia("(max-width: 60rem)"), dark = matchMedia("(prefers-color-scheme: dark)");
const settings = new Settings($("settings"));
const SMALL = 96;  // pages that a few requests fill
let schema = null, model = "", locked = false, last = null, wanted = null;

const sources = fetch("static/viewer/sources.json").then((found) => found.json());
const viewer = new Viewer($("viewer"), { title: "Engine", sources });
const first = new First(viewer, (recorded) => { $("recorded").hidden = !recorded; });
first.show();
const touch = new Touch(viewer, find);
const tour = new Tour($("tour"), viewer, first);
for (const each of document.querySelectorAll(".tour")) each.addEventListener("click", () => { view("both"); tour.start(); });

const chat = new Chat({
  request: (messages) => settings.request(messages),
  sent: (body) => { last = body; showCode(); now(); },
  failed,
  find,
  touch,
});

/** Select the request of this name, and play it from its admission on. */
function find(name) {
  if (first.touring) tour.leave();
  if (document.body.dataset.view === "chat") view("both");
  const { live, history, player } = viewer, request = live ? Array.from(history.head.requests.values()).find(({ id }) => id === name) : null;
  viewer.select(request ? { request: request.r } : null);
  wanted = live ? null : name;  // its lines have not come yet
  const from = request && history.lanes.of.get(request.r)?.spans[0]?.[1];
  if (from >= history.base) player.playFrom(from);
}

/** What is asked for now is seen now, whatever the view has not shown yet. */
function now() {
  if (first.touring) tour.leave();
  if (viewer.player.following) viewer.player.follow();
}

// The key.

function failed(error) {
  if (error.status !== 401) return;
  locked = true;
  $("keys").hidden = false;
  $("key").focus();
}

$("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  locked = false;
  $("keys").hidden = true;
  useKey($("key").value);
  $("key").value = "";
  refresh();
  text.focus();
});

// The line about the server, once a second while someone looks.

function show(stats) {
  const { requests, pages } = stats, number = (value) => value.toLocaleString("en");
  model = stats.model;
  $("model").textContent = model;
  document.title = `${model} \u2013 nano-serving`;
  $("bundled").hidden = model !== "tiny_chat";
  $("small").hidden = $("bundled").hidden || pages.total > SMALL;
  $("fill").disabled = pages.total > SMALL;
  $("fill").title = pages.total > SMALL ? `It has ${number(pages.total)} pages here; with \`nanoserve serve --demo\` it has 52` : "";
  const waiting = requests.waiting ? `, ${requests.waiting} waiting` : "";
  $("load").textContent = `now: ${requests.running} running${waiting} \u00b7 ${number(pages.used)} of ${number(pages.total)} pages`;
  say(stats.health === "ready" ? "ready" : `${stats.health}: ${stats.reason}`, stats.health);
}

function say(words, state) {
  const health = $("health");
  if (health.textContent !== words) health.textContent = words;
  health.className = { ready: "good", loading: "wait", draining: "wait" }[state] ?? "bad";
  if (!["ready", "draining"].includes(state)) $("load").textContent = "";
}

async function refresh() {
  if (document.hidden || locked) return;
  try {
    show(await (await send("stats", { signal: AbortSignal.timeout(5000) })).json());
    schema ?? describe();
  } catch (error) {
    failed(error);
    say(error.status === 401 ? "needs an API key" : error.message ?? "no answer", "bad");
  }
}

async function describe() {
  schema = {};  // asked for once
  schema = (await (await send("openapi.json")).json()).components.schemas.ChatRequest;
  settings.build(schema);
}

// The chat.

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = text.value.trim();
  if (!question || chat.current || !settings.valid(() => panel("settings", true))) return;
  text.value = "";
  grow();
  if (narrow.matches) panel(null);  // it takes the answer's place
  chat.ask(question);
});
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") chat.stop(); });
$("stop").addEventListener("click", () => { chat.stop(); text.focus(); });
$("fresh").addEventListener("click", () => { chat.fresh(); text.focus(); });
for (const question of $("questions").querySelectorAll("button")) {
  question.addEventListener("click", () => { chat.ask(question.textContent); text.focus(); });
}

// The panels under it.

function panel(name, open) {
  for (const each of document.querySelectorAll("[data-panel]")) {
    const shown = each.dataset.panel === name && (open ?? each.getAttribute("aria-expanded") !== "true");
    each.setAttribute("aria-expanded", String(shown));
    $(each.dataset.panel).hidden = !shown;
  }
  if (name === "code") showCode();
}

for (const each of document.querySelectorAll("[data-panel]")) each.addEventListener("click", () => panel(each.dataset.panel));
for (const each of document.querySelectorAll("[data-crowd]")) {
  each.addEventListener("click", async () => {
    now();
    $("crowd-again").hidden = true;
    if (narrow.matches) { panel(null); $("log").focus(); }  // it takes the list's place
    const from = viewer.live ? viewer.history.end : 0;
    if (!await crowd.start(each.dataset.crowd, failed, touch)) return;
    $("crowd-again").onclick = () => viewer.player.playFrom(from);
    $("crowd-again").hidden = false;
    if (viewer.player.fast) viewer.player.playFrom(from);
  });
}
$("abort-all").addEventListener("click", () => { crowd.stop(); chat.stop(); });
$("crowd-close").addEventListener("click", () => { crowd.stop(); $("crowd").hidden = true; $("log").focus(); });

// The last request as code, or the one that the first question would make.

let language = "curl";

function showCode() {
  if ($("code").hidden) return;
  const url = new URL(".", location).href;
  try {
    const body = last ?? settings.request([{ role: "user", content: text.value.trim() || $("questions").textContent.trim().split("\n")[0] }]);
    $("code-text").textContent = language === "curl" ? curl(url, body, hasKey()) : python(url, model, body, hasKey());
  } catch (error) {
    $("code-text").textContent = error.message;
  }
}

for (const each of document.querySelectorAll("[data-code]")) {
  each.addEventListener("click", () => {
    language = each.dataset.code;
    for (const other of document.querySelectorAll("[data-code]")) other.setAttribute("aria-pressed", String(other === each));
    showCode();
  });
}
$("copy-code").replaceWith(copier(() => $("code-text").textContent));

// What is shown, and how.

function view(name) {
  document.body.dataset.view = name;
  for (const each of document.querySelectorAll("#views button")) each.setAttribute("aria-pressed", String(each.dataset.view === name));
}

for (const each of document.querySelectorAll("#views button")) each.addEventListener("click", () => view(each.dataset.view));
document.querySelector('a[href="#engine"]').addEventListener("click", (event) => {
  event.preventDefault();
  if (document.body.dataset.view === "chat") view("both");
  $("engine").focus();
});

function theme() {
  const chosen = load("theme", null), isDark = chosen ? chosen === "dark" : dark.matches;
  if (chosen) document.documentElement.dataset.theme = chosen;
  $("theme").setAttribute("aria-pressed", String(isDark));
}

$("theme").addEventListener("click", () => {
  store("theme", $("theme").getAttribute("aria-pressed") === "true" ? "light" : "dark");
  theme();
});
dark.addEventListener("change", theme);
theme();

own.know = (id, request) => viewer.know(id, request);
watch((lines) => {
  for (const line of lines) if ("record" in line) own.needed = !line.text;
  first.push(lines);
  if (wanted && viewer.live) find(wanted);
  touch.refresh();
}, (words) => { $("watching").textContent = words; });
settings.build(null);
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, 1000);
refresh();
if (!narrow.matches) text.focus();  // on a phone it would open the keyboard over the first screen
