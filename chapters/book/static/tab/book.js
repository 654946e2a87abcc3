// What runs on a page of the book, if it has any of it.

const root = document.documentElement;

// The theme that the reader chose is on the body here, and on the root where the viewer looks for it.
function theme() {
  const chosen = document.body.dataset.theme;
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  else delete root.dataset.theme;
}

theme();
new MutationObserver(theme).observe(document.body, { attributeFilter: ["data-theme"] });

const parts = { ".scene": "scene.js", ".guess": "guess.js", "#exercises-here": "exercises.js", "#try-here": "try.js" };
for (const [selector, module] of Object.entries(parts)) {
  const found = document.querySelectorAll(selector);
  if (found.length) import(`./${module}`).then(({ begin }) => found.forEach(begin));
}
