// Creates elements from data. Text is only ever inserted as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("button", {class: "x", onclick: f, hidden: false}, "text", child, [children]). */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Replace the children of an element. The element that had the focus gets it back, by its id. */
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren();
  add(element, children);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  return element;
}

/** A token with visible whitespace: spaces as dots, line ends as arrows. */
export function tokenText(text) {
  const parts = [];
  for (const piece of text.split(/( |\n|\t|\r)/)) {
    if (piece === "") continue;
    const mark = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" }[piece];
    parts.push(mark ? h("span", { class: "blank", "aria-hidden": "true" }, mark) : piece);
  }
  if (!parts.length) parts.push(h("span", { class: "blank", "aria-hidden": "true" }, "∅"));
  if (text.trim() === "") parts.push(h("span", { class: "unseen" }, tokenName(text)));
  return parts;
}

/** A token's name for screen readers. */
export function tokenName(text) {
  if (text.trim() === "") return text === "" ? "empty token" : { " ": "space", "\n": "newline", "\t": "tab" }[text] ?? "whitespace";
  return (text.startsWith(" ") ? "space " : "") + text.trim();
}

/** A token in a box. */
export function chip(text, attributes = {}, ...more) {
  const { class: extra = "", ...rest } = attributes;
  const tag = attributes.onclick ? "button" : "span";
  return h(tag, { class: `chip ${extra}`, ...(tag === "button" ? { type: "button" } : {}), ...rest },
    h("span", { class: "chip-text" }, tokenText(text)), ...more);
}

/**
 * A table: columns are titles, or [title, "num"]; rows are lists of cells, or {class, cells}. On a narrow screen each
 * row is a block in which every cell has its column's title, so nothing scrolls sideways.
 */
export function table(label, columns, rows, { class: kind = "" } = {}) {
  const titles = columns.map((column) => (Array.isArray(column) ? column : [column, ""]));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: `stack ${kind}`, role: "table" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, titles.map(([title, number]) => h("th", { scope: "col", role: "columnheader", class: number }, title)))),
    h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { role: "row", class: row.class ?? "" }, (row.cells ?? row).map((cell, i) =>
      h("td", { role: "cell", class: titles[i][1], "data-title": titles[i][0] }, h("div", {}, cell))))))));
}

/** A count and its noun: 1 page, 2 pages. */
export const many = (n, noun, plural = `${noun}s`) => `${whole(n)} ${n === 1 ? noun : plural}`;

export const whole = (n) => Math.round(n).toLocaleString("en-US");

/** A probability as a percentage with a sensible number of digits. */
export function percent(p) {
  if (!Number.isFinite(p)) return "–";
  if (p === 0) return "0%";
  if (p >= 0.99995) return "100%";
  const v = p * 100;
  if (v >= 10) return `${v.toFixed(1)}%`;
  if (v >= 0.1) return `${v.toFixed(2)}%`;
  if (v >= 0.001) return `${v.toFixed(4)}%`;
  return `${v.toExponential(1)}%`;
}

/**
 * Parts of a whole as percentages with one decimal that add up to exactly 100%; what rounds to nothing is "< 0.1%".
 * With `rest` the last part is everything else and takes the rounding errors; without, the largest remainders do.
 */
export function shares(values, { rest = false } = {}) {
  const units = tenths(values, rest);
  return units.map((unit, i) => (unit === 0 && values[i] > 0 ? "< 0.1%" : `${(unit / 10).toFixed(1)}%`));
}

/** The same as integers, in tenths of a percent. */
export function tenths(values, rest = false) {
  const exact = values.map((value) => value * 1000);
  const goal = Math.round(exact.reduce((sum, value) => sum + value, 0));
  const total = (units) => units.reduce((sum, unit) => sum + unit, 0);
  if (rest) {
    const first = exact.slice(0, -1).map(Math.round);
    if (goal >= total(first)) return [...first, goal - total(first)];
  }
  const units = exact.map(Math.floor);
  const order = exact.map((_, i) => i).sort((a, b) => exact[b] - units[b] - (exact[a] - units[a]));
  for (const i of order.slice(0, goal - total(units))) units[i]++;
  return units;
}

/** A percentage that may exceed 100%. */
export const ratio = (x) => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`;

export function fixed(x, digits = 2) {
  if (x === Infinity) return "∞";
  if (x === -Infinity) return "−∞";
  return Number.isNaN(x) ? "NaN" : x.toFixed(digits).replace("-", "−");
}

export function seconds(t) {
  if (t >= 1) return `${t.toFixed(2)} s`;
  return t >= 1e-3 ? `${(t * 1e3).toFixed(1)} ms` : `${(t * 1e6).toFixed(0)} µs`;
}

export function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
  return `${n} B`;
}

/** Debounces: calls once, `wait` milliseconds after the last call. */
export function settled(wait, call) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...args), wait);
  };
}

/** Calls at most once per frame. */
export function perFrame(call) {
  let scheduled = false;
  return () => {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      call();
    });
  };
}

/** Announce a text to screen readers. */
export function announce(text) {
  const place = document.getElementById("announce");
  place.textContent = "";
  setTimeout(() => { place.textContent = text; }, 30);
}

/** A button that copies a text. */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "quiet small" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
      button.textContent = "Copied";
      announce("Copied");
    } catch {
      button.textContent = "Select and copy it manually";
    }
    setTimeout(() => { button.textContent = label; }, 1600);
  });
  return button;
}

let next = 0;
/** A fresh id for a label and what it labels. */
export const freshId = (stem) => `${stem}-${++next}`;
