// What tokens attend to, head by head, with the sink set apart, and a mask editor: which slots a token may see, as runs in both
// polarities, which pages attention skips, and the effect on the distribution.

import { unpack } from "./api.js";
import { bars, logKey, logTint, withOthers } from "./charts.js";
import { announce, chip, fill, h, percent, settled, shares, table, tokenName, whole } from "./dom.js";
import { Row } from "./sampling.js";

const QUERIES = 24; // rows of the matrix: the last tokens
const VALUES = 1_000_000; // attention values in one response
const LISTED = 12; // slots to list
const SINK = 0.2; // weight from which the first slot counts as a sink
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

/** A layer's attention: `at(head, row)` is a row of weights over the slots; the last row is the last token's. */
async function scoresOf(lab, now, layer) {
  const known = (now.extra.attention ??= new Map());
  if (!known.has(layer)) {
    const { tokens, prompt_tokens: count, attention } = now.trace;
    const most = Math.max(1, Math.min(QUERIES, tokens.length, Math.floor(VALUES / (lab.source.model.heads * tokens.length))));
    const result = attention ?? (await lab.source.trace({ prompt: tokens.slice(0, count), take: tokens.slice(count), logits: false, attention: { layers: [layer], rows: most } })).attention;
    const [, rows, heads, slots] = result.array.shape;
    const all = unpack(result.array);
    result.layers.forEach((one, i) => known.set(one, { heads, rows, slots, at: (head, row = rows - 1) => all.subarray(((i * rows + row) * heads + head) * slots, ((i * rows + row) * heads + head + 1) * slots) }));
  }
  return known.get(layer);
}

async function drawHeads(lab, place) {
  const now = lab.now;
  const { layers, heads } = lab.source.model;
  const picture = h("div", { class: "picture" });
  const rest = h("div", { class: "rest" });
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
      fill(picture, headMatrix(lab, scores, now.trace.texts));
      fill(rest, headNumbers(lab, scores, now.trace.texts));
    } catch (error) {
      if (now === lab.now) fill(picture, h("div", { class: "note" }, h("p", {}, error.message)));
    }
  };
  const again = settled(60, show);
  fill(place, h("h2", {}, "Attention"), h("p", { class: "soft" }, "Each head of each layer spreads a weight of 100% over the slots that a token may see."),
    h("div", { class: "attention-view" }, picture, h("div", { class: "pickers" }, pick("layer", "Layer", layers), pick("head", "Head", heads)), rest));
  await show();
}

/** One head of a layer: what each token attends to. */
function headMatrix(lab, scores, texts) {
  const first = scores.slots - scores.rows;
  const rows = Array.from({ length: scores.rows }, (_, i) => ({ name: chip(texts[first + i]), cells: scores.at(lab.head, i), own: first + i }));
  return [h("h3", {}, `Layer ${lab.layer}, head ${lab.head}`), matrix("Rows are tokens, columns are the slots they attend to.", rows, texts), logKey()];
}

/** The sink, the last token's weights in this head, and in the other heads. */
function headNumbers(lab, scores, texts) {
  const heads = Array.from({ length: scores.heads }, (_, head) => ({ name: head, cells: scores.at(head), own: scores.slots - 1, chosen: head === lab.head }));
  return [h("p", { id: "sink" }, sinkText(lab, scores, texts[0])),
    h("div", { class: "two" }, h("div", {}, h("h3", {}, "The last token"), lastRow(Array.from(scores.at(lab.head)), texts)),
      h("div", {}, h("h3", {}, `The last token, every head of layer ${lab.layer}`), matrix("Rows are heads, columns are slots.", heads, texts)))];
}

/** The first slot, by its name where it is one. */
function sinkText(lab, scores, first) {
  if (scores.slots === 1) return "There is only one slot, and it has all the weight.";
  const here = scores.at(lab.head)[0];
  let mean = 0;
  for (let head = 0; head < scores.heads; head++) mean += scores.at(head)[0] / scores.heads;
  const figures = `${percent(here)} of the last token's weight in this head, ${percent(mean)} on average over the heads of this layer`;
  return Math.max(here, mean) >= SINK
    ? [h("strong", {}, "The sink: "), "the first slot, ", chip(first), `, has ${figures}. Heads leave there what they do not need, whatever its token is, so it is set apart.`]
    : ["The first slot, ", chip(first), `, often a sink, has ${figures}. It is set apart all the same.`];
}

/** The last token's weights: the sink by itself, then the others as shares of what is left. */
function lastRow(weights, texts) {
  const [sink, ...others] = weights;
  const left = others.reduce((sum, value) => sum + value, 0);
  const all = [h("p", { class: "soft small" }, "Of 100%:"), sinkBars(sink, left, texts[0])];
  if (!others.length || left <= 0) return all;
  const chosen = new Set(others.map((_, i) => i).sort((a, b) => others[b] - others[a]).slice(0, LISTED));
  const rows = others.flatMap((value, i) => (chosen.has(i) ? [{ text: texts[i + 1], value: value / left, second: true }] : []));
  return [...all, h("p", { class: "soft small" }, `The ${percent(left)} beside the sink, as 100%:`), h("div", { class: "beside" }, bars(withOthers(rows, others.length - rows.length), { dense: true }))];
}

function sinkBars(sink, left, first) {
  const labels = shares([sink, left]);
  return h("div", { class: "sink-bars" }, bars([{ text: first, value: sink, label: labels[0] }, { name: "all others", value: left, second: true, label: labels[1] }], { dense: true }));
}

/** Cells in the colors of a logarithmic scale: [{name, cells, own, chosen?}]. The first slot stands apart. */
function matrix(about, rows, texts) {
  const last = texts.length;
  const from = Math.max(1, last - (document.documentElement.clientWidth < 560 ? 20 : 40));
  const slots = [0, ...Array.from({ length: last - from }, (_, i) => from + i)];
  const cell = (row, slot) => (slot > row.own ? h("td", { class: "unreached" }) : h("td", { class: slot === 0 ? "sink" : "", style: logTint(row.cells[slot]), title: percent(row.cells[slot]) }, h("span", { class: "unseen" }, percent(row.cells[slot]))));
  return [h("p", { class: "soft small" }, about, from > 1 ? ` Slots 1 to ${whole(from - 1)} are not drawn.` : ""),
    h("table", { class: "heat", "aria-label": about, style: { "max-width": `${6 + 1.9 * slots.length}rem` } },
      h("thead", {}, h("tr", {}, h("td", {}), slots.map((slot) => h("th", { scope: "col", class: slot === 0 ? "sink" : "" }, h("span", { class: "slanted" }, chip(texts[slot])))))),
      h("tbody", {}, rows.map((row) => h("tr", { class: row.chosen ? "chosen" : "" }, h("th", { scope: "row", class: "num" }, row.name), slots.map((slot) => cell(row, slot))))))];
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
  fill(place, h("div", { class: "mask-wrap", style: { "--count": count } }, h("div", { class: `mask-grid ${single ? "single" : ""}`, role: "grid", "aria-label": "Attention mask: rows are tokens, columns are the slots they may attend to" },
    boxes.map((line, r) => h("div", { class: "mask-row", role: "row" }, h("span", { class: "mask-name", role: "rowheader" }, chip(texts[count - cells.length + r])), line.map((box, c) => (single ? h("span", { class: "labelled", role: "none" }, box, h("span", { class: "mono clip soft", "aria-hidden": "true" }, texts[c])) : box))))),
  h("p", { class: "legend small soft" }, h("i", { class: "cell sees" }), "sees", h("i", { class: "cell" }), "masked")));
}

function drawRuns(place, cells, count) {
  place.querySelector("#mask-runs")?.remove();
  const first = count - cells.length;
  const rows = cells.map((row, r) => [first + r, h("span", { class: "mono" }, `[${rawRuns(row).join(", ")}]`), h("span", { class: "mono" }, `[${runs(row).join(", ")}]`)]);
  place.querySelector("#mask-result").before(h("div", { id: "mask-runs" }, table("The mask as runs", ["Row", "Raw runs: 0 = attend, 1 = masked, zeros first", "Runs of attend: 1 = attend, zeros first"], rows)));
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
      h("div", { class: "two" }, h("div", {}, h("h3", {}, "Causal"), bars(withOthers(union.map((id) => ({ text: lab.text(id), value: now.row.probs[id] })), now.row.size - union.length))),
        h("div", {}, h("h3", {}, "With the mask"), bars(withOthers(union.map((id) => ({ text: lab.text(id), value: masked.probs[id], second: true })), now.row.size - union.length)))),
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
