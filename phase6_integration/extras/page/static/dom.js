// Buttons, and what the browser keeps.

import { h } from "./viewer/dom.js";

export const $ = (id) => document.getElementById(id);

export const button = (label, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, label);

/** A button that copies, and says so. */
export function copier(text, label = "Copy") {
  return button(label, async (event) => {
    const { currentTarget: pressed } = event;
    try {
      await navigator.clipboard.writeText(text());
      pressed.textContent = "Copied";
    } catch {
      pressed.textContent = "Not allowed";  // without TLS, browsers give the clipboard to 127.0.0.1 only
    }
    setTimeout(() => { pressed.textContent = label; }, 1500);
  });
}

/** What the browser keeps: a value, or a default if there is none or it cannot be read. */
export function load(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(`nanoserve.${name}`)) ?? otherwise; } catch { return otherwise; }
}

/** Keeps a value; null deletes it. Returns whether the browser did. */
export function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(`nanoserve.${name}`);
    else localStorage.setItem(`nanoserve.${name}`, JSON.stringify(value));
    return true;
  } catch { return false; }
}
