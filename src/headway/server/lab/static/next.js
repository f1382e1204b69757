// The next token: sampling parameters on one side, every stage from logits to the sampled token on the other. All
// numbers are computed here in float64 for the whole vocabulary, and compared with the engine's own `Sampling`.

import { unpack } from "./api.js";
import { bars, othersName, withOthers } from "./charts.js";
import { chip, fill, fixed, freshId, h, percent, settled, shares, table, whole } from "./dom.js";
import { distribution, draw, entropyOf, OFF, probAt, Row, stages } from "./sampling.js";

const PARAMS = [
  ["temperature", "Temperature", 0, 2, 0.01, "0 is greedy"], ["top_k", "Top-k", 0, 200, 1, "0 is off"], ["top_p", "Top-p", 0.01, 1, 0.01, "1 is off"],
  ["min_p", "Min-p", 0, 1, 0.01, "0 is off"], ["typical_p", "Typical", 0.01, 1, 0.01, "1 is off"],
  ["epsilon_cutoff", "Epsilon", 0, 0.1, 0.001, "0 is off"], ["eta_cutoff", "Eta", 0, 0.1, 0.001, "0 is off"],
  ["repetition_penalty", "Repetition", 0.5, 2, 0.01, "1 is off"], ["presence_penalty", "Presence", -2, 2, 0.05, "0 is off"], ["frequency_penalty", "Frequency", -2, 2, 0.05, "0 is off"],
];
const PRESETS = [
  ["All off", { ...OFF }], ["Evals: T 0", { ...OFF, temperature: 0 }], ["Chat: T 0.7, top-p 0.9", { ...OFF, temperature: 0.7, top_p: 0.9 }], ["Wild: T 1.5", { ...OFF, temperature: 1.5 }],
];
const STAGES = [["penalties", "Bias & penalties"], ["temperature", "Temperature"], ["top_k", "Top-k"], ["top_p", "Top-p"], ["min_p", "Min-p"], ["typical_p", "Typical"], ["epsilon_cutoff", "Epsilon"], ["eta_cutoff", "Eta"]];
// Tested against the table of parameters: what `Sampling` has and this page does not.
const ABSENT = "DRY, XTC and mirostat are not here: they are rules of a generation, which applies them before it draws. A draw at one row, which this page shows and compares with the engine, takes none of them. Requests and programs take dry_multiplier, xtc_probability and mirostat.";
const SHOWN = 12;
const PEEK = 4;
const DRAWS = 200;

export function nextPanel(lab, body) {
  const numbers = h("div", { class: "numbers" }); // the chart: beside the sliders, so that it is in view while one moves
  const below = h("div", { class: "below" });
  const peek = h("div", { class: "peek", "aria-hidden": "true" });
  const check = h("div", { class: "check", id: "engine-check", role: "status" });
  let more = false;
  let drawn = null;
  let open = false;
  const compare = settled(350, () => engineCheck(lab, check));

  function renumber() {
    const result = lab.stages;
    const last = result.at(-1);
    const { row, trace } = lab.now;
    const ranked = row.scored(lab.state.params, lab.past, lab.state.bias).order;
    const top = Array.from(ranked.slice(0, more ? 40 : SHOWN));
    const best = top.filter((id) => probAt(last, id) > 0).slice(0, PEEK);
    const lines = nextRows(lab, result, top);
    fill(peek, bars(withOthers(best.map((id) => ({ text: lab.text(id), value: probAt(last, id) })), last.ids.length - best.length), { dense: true }));
    fill(numbers, h("div", { class: "panel", id: "distribution" },
      h("div", { class: "spread" }, h("h2", {}, "Next token"), entropyText(lab, result)),
      h("p", { class: "soft small" }, "Press a token to add it. Bars show the final probability; striped ones were cut, and show what it was."),
      bars(lines, { cutAfter: lines.filter(({ cut }) => !cut).length, cutLabel: `cut: ${whole(last.ids.length)} stay` }),
      h("div", { class: "row" },
        h("button", { type: "button", id: "more", class: "quiet small", onclick: () => { more = !more; renumber(); } }, more ? "Fewer" : "More tokens"),
        h("button", { type: "button", id: "draw-take", class: "small", onclick: () => lab.take(draw(result, lab.state.seed, trace.position)[0]) }, "Sample one and add it"),
        h("button", { type: "button", id: "draw-many", class: "small", onclick: () => { drawn = DRAWS; renumber(); } }, `${DRAWS} draws`)),
      drawn && draws(lab, result, drawn)));
    fill(below, strip(lab, result), check, stageTable(lab, result, top.slice(0, SHOWN), open, (now) => { open = now; }));
    check.textContent = lab.source.isLive ? "Comparing with the engine …" : "Recorded: there is no engine to compare with.";
    if (lab.source.isLive) compare();
  }

  fill(body, h("div", { class: "next" }, h("div", { class: "sliders-and-chart" }, h("div", { class: "side" }, peek, params(lab, renumber)), numbers), below));
  renumber();
  return { numbers: renumber };
}

/** The entropy of the bars: of the final distribution, and of the model's own where they differ. */
function entropyText(lab, result) {
  const shown = entropyOf(distribution(result).probs);
  const model = lab.now.row.entropy;
  return h("span", { class: "soft small", id: "entropy" }, `entropy ${shown.toFixed(3)} nats`, Math.abs(shown - model) > 5e-4 ? ` · the model's own ${model.toFixed(3)}` : "");
}

/** Bars of the final distribution: kept tokens and all other kept ones add up to 100%; cut tokens show what they had. */
function nextRows(lab, result, top) {
  const [last, hot] = [result.at(-1), result[1]];
  const inside = top.filter((id) => probAt(last, id) > 0);
  const others = last.ids.length - inside.length;
  const rest = Math.max(0, 1 - inside.reduce((sum, id) => sum + probAt(last, id), 0));
  const labels = shares([...inside.map((id) => probAt(last, id)), ...(others ? [rest] : [])], { rest: others > 0 });
  const taking = (id) => ({ text: lab.text(id), onclick: () => lab.take(id), title: `token ${id}` });
  const kept = inside.map((id, i) => ({ ...taking(id), value: probAt(last, id), label: labels[i] }));
  const cut = top.filter((id) => probAt(last, id) === 0).map((id) => ({ ...taking(id), value: probAt(hot, id), cut: true, label: `cut (${percent(probAt(hot, id))})` }));
  return [...kept, ...(others ? [{ name: othersName(others), value: rest, label: labels.at(-1) }] : []), ...cut];
}

function params(lab, redraw) {
  const fields = {};
  const show = () => {
    for (const [name] of PARAMS) {
      fields[name].slider.value = lab.state.params[name];
      fields[name].box.value = lab.state.params[name];
    }
  };
  const rows = PARAMS.map(([name, label, low, high, step, hint]) => {
    const id = `param-${name}`;
    const slider = h("input", { type: "range", id, min: low, max: high, step, value: lab.state.params[name] });
    const box = h("input", { type: "number", id: `${id}-n`, min: name.endsWith("penalty") ? undefined : low, step: "any", value: lab.state.params[name], "aria-label": `${label}, as a number` });
    fields[name] = { slider, box };
    const turn = (value) => {
      if (!valid(name, value)) return box.setAttribute("aria-invalid", "true");
      box.removeAttribute("aria-invalid");
      lab.setParams({ [name]: value });
    };
    slider.addEventListener("input", () => { box.value = slider.value; turn(Number(slider.value)); });
    box.addEventListener("input", () => { if (box.value !== "") { slider.value = box.value; turn(Number(box.value)); } });
    return h("div", { class: "param" }, h("label", { for: id }, label, " ", h("span", { class: "soft" }, hint)), box, slider);
  });
  const seedId = freshId("seed");
  const seed = h("input", { type: "number", id: seedId, min: 0, step: 1, value: lab.state.seed });
  seed.addEventListener("input", () => {
    const value = Number(seed.value);
    if (Number.isSafeInteger(value) && value >= 0) { lab.state.seed = value; lab.setParams({}); }
  });
  return h("form", { class: "panel params", onsubmit: (event) => event.preventDefault() }, h("h2", {}, "Sampling parameters"),
    h("div", { class: "row presets", role: "group", "aria-label": "Presets" }, PRESETS.map(([label, values]) => h("button", { type: "button", class: "quiet small", onclick: () => { lab.setParams(values); show(); } }, label))),
    rows.slice(0, 7), h("h3", {}, "Penalties"), rows.slice(7), h("div", { class: "param" }, h("label", { for: seedId }, "Seed"), seed), biasField(lab, redraw), h("p", { class: "soft small", id: "absent" }, ABSENT));
}

function valid(name, value) {
  if (!Number.isFinite(value)) return false;
  if (name === "top_k") return Number.isInteger(value) && value >= 0;
  if (name === "temperature") return value >= 0;
  if (name === "min_p") return value >= 0 && value <= 1;
  if (name === "epsilon_cutoff" || name === "eta_cutoff") return value >= 0 && value < 1;
  if (name === "top_p" || name === "typical_p") return value > 0 && value <= 1;
  return name !== "repetition_penalty" || value > 0;
}

/** A bias for one token. */
function biasField(lab, redraw) {
  const token = h("select", { id: "bias-token" }, Array.from(lab.now.row.order.slice(0, 24), (id) => h("option", { value: id }, `${JSON.stringify(lab.text(id))}`)));
  const amount = h("input", { type: "number", id: "bias-amount", step: 0.5, value: -2 });
  const list = h("ul", { class: "chips" });
  const show = () => fill(list, [...lab.state.bias].map(([id, value]) => h("li", {}, chip(lab.text(id), { onclick: () => { lab.state.bias.delete(id); show(); lab.setParams({}); }, title: "press to remove" }, h("span", { class: "num" }, `${value > 0 ? "+" : ""}${value} ×`)))));
  const set = () => {
    if (!Number.isFinite(amount.valueAsNumber)) return;
    lab.state.bias.set(Number(token.value), amount.valueAsNumber);
    show();
    redraw();
    lab.remember();
  };
  show();
  return h("fieldset", { class: "bias" }, h("legend", {}, "Bias"), h("div", { class: "bias-row" }, h("label", { for: "bias-token", class: "unseen" }, "Token"), token,
    h("label", { for: "bias-amount", class: "unseen" }, "Amount"), amount, h("button", { type: "button", class: "small", onclick: set }, "Set")), list);
}

/** The filters in order, with the tokens that each keeps. */
function strip(lab, result) {
  const { params: k } = lab.state;
  const settings = { temperature: `T = ${k.temperature}`, top_k: k.top_k || "off", top_p: k.top_p < 1 ? k.top_p : "off", min_p: k.min_p || "off", typical_p: k.typical_p < 1 ? k.typical_p : "off", epsilon_cutoff: k.epsilon_cutoff || "off", eta_cutoff: k.eta_cutoff || "off" };
  const item = (label, value, under, on = true) => h("li", { class: on ? "on" : "" }, h("span", { class: "stage" }, label), h("strong", { class: "num" }, value), h("span", { class: "soft" }, under));
  const size = lab.now.row.size;
  return h("ol", { class: "strip", "aria-label": "From logits to a token" },
    item("Logits", whole(size), "scores"),
    item("Bias & penalties", result[0].changed.size ? `${whole(result[0].changed.size)} changed` : "off", "scores", result[0].changed.size > 0),
    STAGES.slice(1).map(([name, label], i) => {
      const at = result[i + 1];
      const on = settings[name] !== "off" && !(name === "temperature" && k.temperature === 1);
      return item(label, settings[name], name === "temperature" && k.temperature !== 0 ? "reshapes" : `${whole(at.ids.length)} stay · ${percent(at.kept)}`, on);
    }),
    item("Draw", `seed ${lab.state.seed}`, `position ${lab.now.trace.position}`));
}

/** Every stage of the top tokens. */
function stageTable(lab, result, top, open, opened) {
  const { row } = lab.now;
  const { scores } = row.scored(lab.state.params, lab.past, lab.state.bias);
  const cell = (p) => (p > 0 ? percent(p) : h("span", { class: "soft" }, "cut"));
  const titles = ["Token", ...["Logit", "After bias & penalties", "Temperature", "Top-k", "Top-p", "Min-p", "Typical", "Epsilon", "Eta"].map((text) => [text, "num"])];
  return h("details", { class: "panel", open, ontoggle: (event) => opened(event.target.open) }, h("summary", { id: "stages-summary" }, h("h2", {}, "Every stage, token by token")),
    table("Every stage, token by token", titles, top.map((id) => [
      [chip(lab.text(id)), " ", h("span", { class: "soft small num" }, id)], fixed(row.logits[id], 3), fixed(scores[id], 3), ...result.slice(1).map((stage) => cell(probAt(stage, id)))]), { class: "stages" }));
}

function draws(lab, result, count) {
  const tokens = draw(result, lab.state.seed, lab.now.trace.position, count);
  const counts = new Map();
  for (const id of tokens) counts.set(id, (counts.get(id) ?? 0) + 1);
  const rows = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);
  const drawnRow = (row, n, p) => ({ ...row, value: n / count, second: true, label: `${n}× (${(count * p).toFixed(1)})` });
  return h("div", { id: "draws" }, h("h3", {}, `${count} draws: ${whole(counts.size)} different tokens`), h("p", { class: "soft small" }, "How often each was drawn, and in parentheses how often it is expected."),
    bars([...rows.slice(0, 12).map(([id, n]) => drawnRow({ text: lab.text(id) }, n, probAt(result.at(-1), id))),
      ...(rows.length > 12 ? [drawnRow({ name: othersName(rows.length - 12) }, sumOf(rows.slice(12).map(([, n]) => n)), sumOf(rows.slice(12).map(([id]) => probAt(result.at(-1), id))))] : [])]));
}

/** Compare the page's numbers with the engine's `Sampling` on the same row. */
async function engineCheck(lab, place) {
  const now = lab.now;
  const key = JSON.stringify([lab.state.params, lab.state.seed, [...lab.state.bias]]);
  try {
    const response = await lab.source.trace({
      prompt: now.trace.tokens.slice(0, now.trace.prompt_tokens), take: now.trace.tokens.slice(now.trace.prompt_tokens),
      sampling: { ...lab.state.params, seed: lab.state.seed, draws: 16, logit_bias: Object.fromEntries(lab.state.bias) },
    });
    if (now !== lab.now || key !== JSON.stringify([lab.state.params, lab.state.seed, [...lab.state.bias]])) return;
    // Two passes may round differently, so the logits of the same pass are compared with its result.
    const result = stages(new Row(unpack(response.logits)), lab.state.params, lab.past, lab.state.bias);
    const { most, missing } = difference(distribution(result), unpack(response.sampling.ids), unpack(response.sampling.probs));
    const ours = draw(result, lab.state.seed, now.trace.position, 16);
    const same = ours.filter((id, i) => id === response.sampling.tokens[i]).length;
    place.dataset.difference = most;
    place.dataset.draws = same;
    fill(place, h("p", {}, h("strong", {}, most < 1e-6 && !missing ? "Equal to the engine's Sampling. " : "Differs from the engine's Sampling. "),
      `Largest difference over all ${whole(now.row.size)} tokens: `, h("span", { class: "num" }, most === 0 ? "0" : most.toExponential(1)), `; ${same} of 16 seeded draws are the same.`));
  } catch (error) {
    fill(place, h("p", {}, `Not compared with the engine: ${error.message}`));
  }
}

/** The largest difference of two distributions, and the number of tokens that only one of them has. */
export function difference(ours, ids, probs) {
  let most = 0;
  let missing = 0;
  let i = 0;
  let j = 0;
  while (i < ours.ids.length || j < ids.length) {
    const a = ours.ids[i] ?? Infinity;
    const b = ids[j] ?? Infinity;
    if (a === b) most = Math.max(most, Math.abs(ours.probs[i++] - probs[j++]));
    else {
      missing++;
      most = Math.max(most, a < b ? ours.probs[i++] : probs[j++]);
    }
  }
  return { most, missing };
}
