// What the last token attends to, head by head, and a mask editor: which slots a token may see, as runs in both
// polarities, which pages attention skips, and the effect on the distribution.

import { unpack } from "./api.js";
import { bars, tint } from "./charts.js";
import { announce, chip, fill, h, percent, settled, tokenName, whole } from "./dom.js";
import { Row } from "./sampling.js";

const WIDE = 64; // slots to draw
const SQUARE = 40; // at most this many tokens to paint every row
const ROWS = 512;

export function attentionPanel(lab, body) {
  const heads = h("div", { class: "panel" });
  const editor = h("div", { class: "panel" });
  fill(body, heads, editor);
  lab.layer = Math.min(lab.layer ?? Math.floor(lab.source.model.layers / 2), lab.source.model.layers - 1);
  lab.head = Math.min(lab.head ?? 0, lab.source.model.heads - 1);
  drawHeads(lab, heads);
  drawEditor(lab, editor);
  return {};
}

// -- attention --------------------------------------------------------------------------------------------------------

async function scoresOf(lab, now, layer) {
  const known = (now.extra.attention ??= new Map());
  if (!known.has(layer)) {
    const { tokens, prompt_tokens: count, attention } = now.trace;
    const result = attention ?? (await lab.source.trace({ prompt: tokens.slice(0, count), take: tokens.slice(count), logits: false, attention: { layers: [layer] } })).attention;
    const [, heads, slots] = result.array.shape;
    const all = unpack(result.array);
    result.layers.forEach((one, i) => known.set(one, { heads, slots, at: (head) => all.subarray((i * heads + head) * slots, (i * heads + head + 1) * slots) }));
  }
  return known.get(layer);
}

async function drawHeads(lab, place) {
  const now = lab.now;
  const { layers, heads } = lab.source.model;
  const grid = h("div", {});
  const pick = (name, label, count) => {
    const shown = h("output", { for: `pick-${name}` }, lab[name]);
    const slider = h("input", { type: "range", id: `pick-${name}`, min: 0, max: count - 1, step: 1, value: lab[name] });
    slider.addEventListener("input", () => { lab[name] = Number(slider.value); shown.textContent = lab[name]; again(); });
    return h("div", { class: "param" }, h("label", { for: `pick-${name}` }, label), shown, slider);
  };
  const show = async () => {
    try {
      const scores = await scoresOf(lab, now, lab.layer);
      if (now !== lab.now || !place.isConnected) return;
      const from = Math.max(0, scores.slots - WIDE);
      const texts = now.trace.texts.slice(from);
      const mine = Array.from(scores.at(lab.head).subarray(from));
      const many = texts.length > 20;
      const lines = texts.map((text, i) => ({ text, value: mine[i], label: percent(mine[i]) }));
      const half = Math.ceil(lines.length / 2);
      fill(grid, h("div", { class: many ? "heads stacked" : "heads" }, heat(scores, from, texts, lab.head), h("div", {}, h("h3", {}, `Layer ${lab.layer}, head ${lab.head}`),
        from > 0 && h("p", { class: "soft small" }, `The last ${WIDE} of ${whole(scores.slots)} slots; those before have ${percent(scores.at(lab.head).subarray(0, from).reduce((a, b) => a + b, 0))}.`),
        many ? h("div", { class: "two" }, [lines.slice(0, half), lines.slice(half)].map((part) => bars(part, { max: 1, dense: true }))) : bars(lines, { max: 1, dense: texts.length > 12 }))));
    } catch (error) {
      if (now === lab.now) fill(grid, h("div", { class: "note" }, h("p", {}, error.message)));
    }
  };
  const again = settled(60, show);
  fill(place, h("h2", {}, "Attention of the last token"), h("p", { class: "soft" }, "Each head of each layer spreads a weight of 1 over the slots it may see."),
    h("div", { class: "two" }, pick("layer", "Layer", layers), pick("head", "Head", heads)), grid);
  await show();
}

/** All heads of a layer: rows are heads, columns are slots. */
function heat(scores, from, texts, chosen) {
  const lines = Array.from({ length: scores.heads }, (_, head) => {
    const row = Array.from(scores.at(head).subarray(from));
    return h("tr", { class: head === chosen ? "chosen" : "" }, h("th", { scope: "row", class: "num" }, head), row.map((value) => h("td", { style: tint(Math.sqrt(value)), title: percent(value) }, h("span", { class: "unseen" }, percent(value)))));
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Attention of all heads of this layer" },
    h("p", { class: "soft small" }, "Rows are heads, columns are slots. Dark is 0, yellow is 1; the numbers of the selected head are next to it."),
    h("table", { class: "heat" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "head"), texts.map((text) => h("th", { scope: "col" }, h("span", { class: "slanted" }, chip(text)))))), h("tbody", {}, lines)));
}

// -- the mask ---------------------------------------------------------------------------------------------------------

/** What each row attends to by a rule: booleans over the slots up to its own. */
function cellsOf(mask, count) {
  const rows = mask.bind === "last" ? 1 : count;
  return Array.from({ length: rows }, (_, i) => {
    const slot = count - rows + i;
    if (mask.kind === "cells") return fromRuns(mask.runs[i] ?? [slot + 1], slot + 1);
    return Array.from({ length: slot + 1 }, (__, j) => j > slot - mask.window || (mask.kind === "sink" && j < mask.sink));
  });
}

/** Raw runs, zeros first, 0 = attend, 1 = masked. */
export function rawRuns(cells) {
  return runs(cells.map((sees) => !sees));
}

/** Runs of booleans, false first. */
export function runs(bits) {
  const result = [0];
  for (const bit of bits) {
    if ((result.length - 1) % 2 === Number(bit)) result[result.length - 1]++;
    else result.push(1);
  }
  return result;
}

function fromRuns(list, length) {
  const cells = [];
  list.forEach((run, i) => { for (let n = 0; n < run && cells.length < length; n++) cells.push(i % 2 === 0); });
  while (cells.length < length) cells.push(true);
  return cells;
}

function drawEditor(lab, place) {
  const count = lab.now.trace.tokens.length;
  const square = count <= SQUARE;
  const mask = lab.state.mask;
  const bind = mask?.bind ?? "last";
  const result = h("div", { id: "mask-result", "aria-live": "polite" });
  const grid = h("div", {});
  const sizes = { window: mask?.window ?? Math.min(4, count), sink: mask?.sink ?? 1 };
  const compute = settled(200, () => compare(lab, result));
  const set = (next) => {
    lab.state.mask = next;
    lab.remember();
    drawEditor(lab, place);
  };
  const number = (name, label, low) => {
    const box = h("input", { type: "number", id: `mask-${name}`, min: low, step: 1, value: sizes[name] });
    box.addEventListener("change", () => {
      const value = box.valueAsNumber;
      if (Number.isInteger(value) && value >= low && lab.state.mask && lab.state.mask.kind !== "cells") set({ ...lab.state.mask, [name]: value });
      else if (Number.isInteger(value) && value >= low) sizes[name] = value;
    });
    return h("label", { class: "mini" }, label, box);
  };
  const kind = (value, label) => h("button", { type: "button", id: `mask-kind-${value}`, class: "small", "aria-pressed": String((mask?.kind ?? "causal") === value), onclick: () => {
    if (value === "causal") set(null);
    else if (value === "cells") set({ kind: "cells", bind, runs: cellsOf(mask ?? { kind: "window", bind, window: count }, count).map(rawRuns) });
    else set({ kind: value, bind, window: sizes.window, ...(value === "sink" ? { sink: sizes.sink } : {}) });
  } }, label);
  const binds = (value, label, disabled = false) => h("label", { class: "row inline" }, h("input", { type: "radio", name: "bind", id: `bind-${value}`, checked: bind === value, disabled, onchange: () => {
    if (!lab.state.mask) return set({ kind: "window", bind: value, window: count });
    const next = { ...lab.state.mask, bind: value };
    if (next.kind === "cells") next.runs = cellsOf({ kind: "window", bind: value, window: count }, count).map(rawRuns);
    set(next);
  } }), label);
  fill(place, h("h2", {}, "Mask editor"),
    h("p", { class: "soft" }, "Causal lets a token see itself and all before it. Narrow it, or paint cells: press or drag, or move with the arrow keys and press space."),
    h("div", { class: "row", role: "group", "aria-label": "Kind of mask" }, kind("causal", "Causal"), kind("window", "Window"), kind("sink", "Sink + window"), kind("cells", "Paint cells"),
      number("window", "window", 1), number("sink", "sink", 0)),
    h("div", { class: "row", role: "radiogroup", "aria-label": "Which tokens it applies to" }, h("span", { class: "soft small" }, "applies to"), binds("last", "the last token (a decode step)"), binds("all", square ? "every token" : `every token (up to ${SQUARE}; here are ${whole(count)})`, !square)),
    grid, result);
  const cells = cellsOf(mask ?? { kind: "window", bind, window: count }, count);
  paintGrid(lab, grid, cells, count, () => {
    lab.state.mask = { kind: "cells", bind, runs: cells.map(rawRuns) };
    lab.remember();
    for (const button of place.querySelectorAll("[aria-pressed]")) button.setAttribute("aria-pressed", String(button.id === "mask-kind-cells"));
    drawRuns(place, cells, count);
    compute();
  });
  drawRuns(place, cells, count);
  if (mask) compute();
  else fill(result, h("p", { class: "soft" }, "This is the causal mask: the distribution does not change."));
}

let painting = null; // what dragging over cells does: true unmasks, false masks
addEventListener("pointerup", () => { painting = null; });

/** Cells to paint: one tab stop, arrows to move, space to toggle a cell. */
function paintGrid(lab, place, cells, count, changed) {
  const texts = lab.now.trace.texts;
  const size = lab.now.trace.page_size;
  const boxes = [];
  const turn = (r, c, to) => {
    if (cells[r][c] === to || (!to && cells[r].filter(Boolean).length === 1)) return to === false && announce("A row must see at least one slot");
    cells[r][c] = to;
    dress(boxes[r][c], r, c);
    changed();
  };
  const dress = (box, r, c) => {
    const slot = count - cells.length + r;
    box.classList.toggle("sees", cells[r][c]);
    box.setAttribute("aria-label", `${tokenName(texts[slot])}, slot ${slot}, ${cells[r][c] ? "sees" : "does not see"} ${tokenName(texts[c])}, slot ${c}`);
  };
  const move = (event, r, c) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === " " || event.key === "Enter") turn(r, c, !cells[r][c]);
    else if (step) boxes[r + step[0]]?.[c + step[1]] && rove(boxes[r + step[0]][c + step[1]]);
    else return;
    event.preventDefault();
  };
  const rove = (box) => {
    for (const line of boxes) for (const one of line) one.tabIndex = -1;
    box.tabIndex = 0;
    box.focus();
  };
  cells.forEach((row, r) => boxes.push(row.map((_, c) => {
    const box = h("div", { class: `cell ${c % size === 0 && c ? "page-edge" : ""}`, role: "gridcell", tabindex: r === 0 && c === 0 ? 0 : -1, onkeydown: (event) => move(event, r, c) });
    box.addEventListener("pointerdown", (event) => { painting = !cells[r][c]; box.releasePointerCapture?.(event.pointerId); turn(r, c, painting); });
    box.addEventListener("pointerenter", (event) => { if (painting !== null && event.buttons) turn(r, c, painting); });
    dress(box, r, c);
    return box;
  })));
  const single = cells.length === 1;
  fill(place, h("div", { class: "scroll" }, h("div", { class: `mask-grid ${single ? "single" : ""}`, role: "grid", "aria-label": "Attention mask: rows are tokens, columns are the slots they may attend to" },
    boxes.map((line, r) => h("div", { class: "mask-row", role: "row" }, h("span", { class: "mask-name", role: "rowheader" }, chip(texts[count - cells.length + r])), line.map((box, c) => (single ? h("span", { class: "labelled", role: "none" }, box, h("span", { class: "mono clip soft", "aria-hidden": "true" }, texts[c])) : box))))),
  h("p", { class: "legend small soft" }, h("i", { class: "cell sees" }), "sees", h("i", { class: "cell" }), "masked")));
}

function drawRuns(place, cells, count) {
  place.querySelector("#mask-runs")?.remove();
  const first = count - cells.length;
  const rows = cells.map((row, r) => h("tr", {}, h("th", { scope: "row", class: "num" }, first + r), h("td", { class: "mono" }, `[${rawRuns(row).join(", ")}]`), h("td", { class: "mono" }, `[${runs(row).join(", ")}]`)));
  place.querySelector("#mask-result").before(h("div", { id: "mask-runs", class: "scroll", tabindex: "0", role: "region", "aria-label": "The mask as runs" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Row"), h("th", { scope: "col" }, "Raw runs: 0 = attend, 1 = masked, zeros first"), h("th", { scope: "col" }, "Runs of attend: 1 = attend, zeros first"))), h("tbody", {}, rows))));
}

async function compare(lab, place) {
  const now = lab.now;
  const { tokens, prompt_tokens: count } = now.trace;
  const mask = lab.state.mask;
  const cells = cellsOf(mask, tokens.length).slice(-ROWS);
  try {
    const response = await lab.source.trace({ prompt: tokens.slice(0, count), take: tokens.slice(count), mask: { runs: cells.map(rawRuns) } });
    if (now !== lab.now || mask !== lab.state.mask || !place.isConnected) return;
    const masked = new Row(unpack(response.logits));
    const union = [...new Set([...now.row.order.slice(0, 6), ...masked.order.slice(0, 6)])].slice(0, 9);
    let distance = 0;
    let surprise = 0;
    now.row.probs.forEach((p, i) => {
      distance += Math.abs(p - masked.probs[i]) / 2;
      if (p > 0) surprise += p * Math.log(p / Math.max(masked.probs[i], 1e-300));
    });
    place.dataset.distance = distance;
    fill(place, h("h3", {}, "Effect on the distribution"),
      h("p", {}, `${percent(distance)} of the probability has moved; the causal distribution is ${surprise.toFixed(3)} nats away (Kullback–Leibler).`),
      h("div", { class: "two" }, h("div", {}, h("h3", {}, "Causal"), bars(union.map((id) => ({ text: lab.text(id), value: now.row.probs[id] })), { max: 1 })),
        h("div", {}, h("h3", {}, "With the mask"), bars(union.map((id) => ({ text: lab.text(id), value: masked.probs[id], second: true })), { max: 1 }))),
      pageStrip(response));
  } catch (error) {
    if (now === lab.now) fill(place, h("div", { class: "note" }, h("p", {}, error.message)));
  }
}

/** Which pages the pass read, wrote, or skipped. */
function pageStrip(response) {
  const { trimmed, first } = response.mask;
  const size = response.page_size;
  const written = Math.floor(first / size);
  const skipped = trimmed.length ? `${trimmed.length} of ${response.pages.length} pages were skipped by attention: no row sees any of their slots.` : "No page could be skipped: a page is skipped when no row of the pass sees any of its slots and the pass does not write it.";
  return h("div", {}, h("h3", {}, "Pages"), h("p", {}, skipped),
    h("ol", { class: "chips" }, response.pages.map((_, i) => h("li", { class: `page ${trimmed.includes(i) ? "trimmed" : i >= written ? "working" : "committed"}` }, h("span", { class: "num" }, `${i * size}–${Math.min((i + 1) * size, response.tokens.length) - 1}`), h("small", {}, trimmed.includes(i) ? "trimmed" : i >= written ? "written" : "read")))));
}
