// Charts, each with its numbers as text.

import { chip, fixed, h, percent, s, shares, whole } from "./dom.js";

/**
 * Bars, one line each, on the one scale of this page, 0 to 100%:
 * [{text | name, value, label?, guess?, cut?, second?, onclick?}] with values from 0 to 1. `text` is a token's, `name`
 * is plain. `cutAfter` draws a line after that many of them.
 */
export function bars(rows, { cutAfter = null, cutLabel = "", dense = false } = {}) {
  const items = rows.map((row) => h("li", { class: row.cut ? "cut" : "" }, barName(row),
    h("span", { class: "track", "aria-hidden": "true" }, fillOf(row.value, `${row.cut ? "ghost" : ""} ${row.second ? "second" : ""}`), guessMark(row.guess)),
    h("span", { class: "num" }, row.label ?? percent(row.value))));
  if (cutAfter !== null && cutAfter > 0 && cutAfter < rows.length) {
    items.splice(cutAfter, 0, h("li", { class: "cut-line", "aria-hidden": "true" }, h("span", {}, cutLabel)));
  }
  return h("ul", { class: dense ? "bars dense" : "bars" }, items, scale());
}

const barName = (row) => (row.name === undefined ? chip(row.text, row.onclick ? { onclick: row.onclick, title: row.title } : {}) : h("span", { class: "bar-name soft" }, row.name));
const fillOf = (value, kind) => h("span", { class: `fill ${kind}`, style: { width: `${Math.min(100, 100 * value)}%` } });
const guessMark = (value) => value !== undefined && h("span", { class: "guess-mark", style: { left: `${Math.min(100, 100 * value)}%` } });
const ticks = () => h("span", { class: "ticks" }, [0, 25, 50, 75, 100].map((at) => h("i", { style: { left: `${at}%` } }, at === 100 ? "100%" : at)));
const scale = () => h("li", { class: "scale", "aria-hidden": "true" }, h("span", {}), ticks(), h("span", {}));

/** Rows for `bars`: some tokens of a distribution and all others in one row, so that the labels add up to 100%. */
export function withOthers(rows, others) {
  const value = Math.max(0, 1 - rows.reduce((sum, row) => sum + row.value, 0));
  const all = others > 0 ? [...rows, { name: othersName(others), value, second: rows[0]?.second }] : rows;
  const labels = shares(all.map((row) => row.value), { rest: others > 0 });
  return all.map((row, i) => ({ ...row, label: labels[i] }));
}

export const othersName = (count) => (count === 1 ? "1 other" : `${whole(count)} others`);

/**
 * Several distributions over the same tokens in one chart, 0 to 100%: rows [{text | name, values, guesses?}] with one
 * value for each of `series`, which are [short name, name] of the distributions.
 */
export function compared(rows, series) {
  const labels = series.map((_, k) => shares(rows.map((row) => row.values[k]), { rest: rows.at(-1).name !== undefined }));
  return h("div", { class: "compared" },
    h("ul", { class: "legend-list" }, series.map(([, name], k) => h("li", {}, h("i", { class: `swatch series-${k}`, "aria-hidden": "true" }), name))),
    h("ul", { class: "bars" }, rows.map((row, i) => h("li", {}, barName(row), h("span", { class: "group" }, series.map(([short], k) => h("span", { class: "lane" },
      h("span", { class: "lane-name soft" }, short), h("span", { class: "track", "aria-hidden": "true" }, fillOf(row.values[k], `series-${k}`), guessMark(row.guesses?.[k])), h("span", { class: "num" }, labels[k][i])))))), h("li", { class: "scale", "aria-hidden": "true" }, h("span", {}), h("span", { class: "group" }, h("span", { class: "lane" }, h("span", { class: "lane-name" }), ticks(), h("span", { class: "num" }))))));
}

/** The available width, so that text in a chart is as large as text around it. */
const chartWidth = () => Math.max(280, Math.min(640, document.documentElement.clientWidth - 72));

/** How many values fall into each of `count` equal bins. */
export function histogram(values, { count = 48, marks = [], unit = "logit" } = {}) {
  const finite = Array.from(values).filter(Number.isFinite);
  const low = Math.min(...bounds(finite).slice(0, 1));
  const high = Math.max(...bounds(finite).slice(1));
  const width = chartWidth();
  const height = 200;
  const foot = 26;
  const head = 22;
  const bins = new Array(count).fill(0);
  for (const value of finite) bins[Math.min(count - 1, Math.floor((count * (value - low)) / (high - low || 1)))]++;
  const top = Math.max(...bins);
  const x = (value) => ((value - low) / (high - low || 1)) * width;
  const y = (n) => height - foot - ((height - foot - head) * n) / top;
  const parts = bins.map((n, i) => s("rect", { class: "bin", x: (i * width) / count + 1, y: y(n), width: width / count - 2, height: height - foot - y(n) }));
  const ticks = [low, low + (high - low) / 2, high];
  return h("div", {},
    s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Histogram of ${whole(finite.length)} values from ${fixed(low, 1)} to ${fixed(high, 1)}` },
      parts,
      s("line", { class: "axis", x1: 0, x2: width, y1: height - foot, y2: height - foot }),
      ticks.map((value, i) => s("text", { x: x(value), y: height - 8, "text-anchor": ["start", "middle", "end"][i] }, `${unit} ${fixed(value, 1)}`)),
      marks.map(({ value, label }) => [
        s("line", { class: "mark", x1: x(value), x2: x(value), y1: head - 4, y2: height - foot }),
        s("text", { class: "mark-text", x: x(value) > width / 2 ? x(value) - 6 : x(value) + 6, y: head - 8, "text-anchor": x(value) > width / 2 ? "end" : "start" }, label),
      ])));
}

function bounds(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** Cumulative probability by rank, on a logarithmic axis, with a cut. */
export function cumulative(sorted, cut, share, guess = null) {
  const width = chartWidth();
  const height = 240;
  const foot = 28;
  const left = 44;
  const total = sorted.length;
  const x = (rank) => left + ((width - left - 8) * Math.log10(rank)) / Math.log10(Math.max(total, 2));
  const y = (p) => 12 + (height - foot - 12) * (1 - p);
  const points = [];
  let reached = 0;
  let last = -1;
  for (let i = 0; i < total; i++) {
    reached += sorted[i];
    const at = Math.round(x(i + 1));
    if (at !== last) points.push(`${x(i + 1).toFixed(1)},${y(Math.min(1, reached)).toFixed(1)}`);
    last = at;
  }
  const inside = points.filter((point) => Number(point.split(",")[0]) <= x(cut) + 0.5);
  const decades = [];
  for (let n = 1; n <= total; n *= width < 400 ? 100 : 10) decades.push(n);
  const side = (at) => (at > width * 0.62 ? ["end", -7] : ["start", 7]);
  const line = (rank, label, above, style) => {
    const [anchor, shift] = side(x(rank));
    return [s("line", { class: "mark", x1: x(rank), x2: x(rank), y1: 12, y2: height - foot, ...(style ? { "stroke-dasharray": "2 4" } : {}) }),
      s("text", { class: "mark-text", x: x(rank) + shift, y: above, "text-anchor": anchor }, label)];
  };
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Probability of the likeliest tokens together: ${whole(cut)} tokens reach ${percent(share)}` },
    s("polyline", { class: "area", points: `${x(1)},${height - foot} ${inside.join(" ")} ${x(cut)},${height - foot}` }),
    s("polyline", { class: "line", points: points.join(" ") }),
    s("line", { class: "axis", x1: left, x2: width - 8, y1: height - foot, y2: height - foot }),
    decades.map((n) => s("text", { x: x(n), y: height - 8, "text-anchor": n === 1 ? "start" : "middle" }, whole(n))),
    [0, 0.5, 1].map((p) => s("text", { x: left - 6, y: y(p) + 4, "text-anchor": "end" }, percent(p))),
    line(cut, `cut after ${whole(cut)}`, y(share) + 34, false),
    guess !== null && line(Math.max(1, guess), `you: ${whole(guess)}`, height - foot - 10, true));
}

/** Samples as small squares; those from the tail are dots of another color. */
export function dots(flags, label) {
  return h("div", { class: "dots", role: "img", "aria-label": label }, flags.map((tail) => h("i", { class: tail ? "tail" : "" })));
}

const LEAST = 1e-3; // the dark end of the logarithmic scale

/** A color for a share on a logarithmic scale: 0.1% and less is dark, 100% is yellow. */
export const logTint = (share) => tint(share <= LEAST ? 0 : 1 - Math.log10(share) / Math.log10(LEAST));

/** The key to `logTint`. */
export function logKey() {
  const steps = [0.001, 0.01, 0.1, 1];
  return h("div", { class: "log-key" }, h("span", { class: "soft small" }, "logarithmic:"), steps.map((share) => h("span", { class: "num", style: logTint(share) }, share === LEAST ? "≤ 0.1%" : `${100 * share}%`)));
}

/** A color for a number from 0 to 1, dark blue to yellow. Callers also show the number as text. */
export function tint(x) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const at = Math.max(0, Math.min(1, x)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  const mix = stops[i].map((value, k) => Math.round(value + (stops[i + 1][k] - value) * (at - i)));
  const light = (0.2126 * mix[0] + 0.7152 * mix[1] + 0.0722 * mix[2]) / 255;
  return { background: `rgb(${mix.join(" ")})`, color: light > 0.42 ? "#10131a" : "#ffffff" };
}
