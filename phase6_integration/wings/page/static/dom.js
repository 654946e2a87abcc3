// Elements, made without markup in strings.

export const $ = (id) => document.getElementById(id);

/** An element. Properties by name, `on...` listeners, and attributes that are no properties, such as `aria-...`. */
export function make(tag, properties = {}, ...children) {
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

export const button = (label, onclick, more = {}) => make("button", { type: "button", onclick, ...more }, label);

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
