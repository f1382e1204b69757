// The lesson's figures. The steps show them as answers, with the guess marked; the reading mode shows them as they are.

import { bars, compared, cumulative, histogram, othersName, withOthers } from "./charts.js";
import { chip, fill, fixed, freshId, h, percent, whole } from "./dom.js";
import { heated, TOP } from "./facts.js";
import { entropyOf, OFF, probAt, softmax, stages } from "./sampling.js";

export const HEATS = [0.1, 1, 2];
const SHARE = 0.9;

/** Every logit, and the probabilities of the best. */
export function logitsFigure({ row, text }) {
  const top = Array.from(row.order.slice(0, TOP));
  const best = row.logits[top[0]];
  let sum = 0;
  for (const p of row.probs) sum += p;
  return h("div", { class: "figure" },
    h("p", {}, `This model has ${whole(row.size)} tokens, so every pass outputs ${whole(row.size)} raw scores, called logits. Here they all are:`),
    histogram(row.logits, { marks: [{ value: best, label: `best: ${fixed(best, 1)}` }] }),
    h("p", {}, `Softmax turns them into probabilities. They add up to ${sum.toFixed(12)}; these ${top.length} hold ${percent(top.reduce((all, id) => all + row.probs[id], 0))} of it.`),
    bars(withOthers(top.map((id) => ({ text: text(id), value: row.probs[id] })), row.size - top.length)),
    h("p", { class: "soft small" }, `Their logits: ${top.map((id) => fixed(row.logits[id], 2)).join(", ")}. The entropy of this distribution is ${row.entropy.toFixed(3)} nats.`));
}

/** The same prompt decoded greedily, twice, and on until it repeats itself. */
export function greedyFigure(facts) {
  const place = h("div", { class: "figure", "aria-live": "polite" }, h("p", { class: "soft" }, "Running two greedy generations …"));
  showRuns(facts, place);
  return place;
}

async function showRuns(facts, place) {
  try {
    // The promise is kept, not its value: the steps are drawn again while it is pending.
    facts.runs ??= Promise.all([facts.source.greedy(facts.prompt, 24), facts.source.greedy(facts.prompt, 24), facts.source.greedy(facts.prompt, 96)]);
    const [one, two, long] = await facts.runs;
    const marks = repeats(long.tokens);
    fill(place,
      [one, two].map((run, i) => [h("p", { class: "soft small" }, `Run ${i + 1}`), h("div", { class: "run" }, run.text)]),
      h("p", {}, h("strong", {}, one.text === two.text ? "Identical, token for token." : "They differ, which greedy decoding should not do.")),
      h("p", {}, "Let it continue, and it starts to repeat itself. Repeated phrases are marked:"),
      h("div", { class: "run" }, long.tokens.map((text, i) => (marks[i] ? h("mark", {}, text) : text))),
      h("p", {}, `${marks.filter(Boolean).length} of ${long.tokens.length} tokens belong to a repeated phrase of four or more tokens.`));
  } catch (error) {
    facts.runs = undefined;
    fill(place, h("div", { class: "note" }, h("p", {}, error.message)));
  }
}

/** Which tokens belong to a repeated run of four or more. */
function repeats(tokens, length = 4) {
  const seen = new Set();
  const marks = new Array(tokens.length).fill(false);
  for (let i = 0; i + length <= tokens.length; i++) {
    const key = JSON.stringify(tokens.slice(i, i + length));
    if (seen.has(key)) marks.fill(true, i, i + length);
    seen.add(key);
  }
  return marks;
}

/**
 * One chart of the best tokens at the three temperatures: as shares of these tokens alone, or of the whole vocabulary
 * with all others in one row. `guess(heat, i)` gives a guessed share of the i-th token among the best.
 */
export function temperatureFigure({ row, text }, guess = null) {
  const hot = HEATS.map((heat) => heated(row, heat));
  const { top } = hot[0];
  const place = h("div", { class: "temperature-chart" });
  const name = freshId("of");
  const show = (whole_) => {
    const rows = top.map((id, i) => ({
      text: text(id), values: hot.map((one) => (whole_ ? one.ofAll : one.ofTop)[i]), guesses: whole_ || !guess ? undefined : HEATS.map((heat) => guess(heat, i)),
    }));
    if (whole_ && row.size > top.length) rows.push({ name: othersName(row.size - top.length), values: hot.map((one) => Math.max(0, 1 - one.mass)) });
    const entropies = hot.map((one) => entropyOf(whole_ ? one.all : one.ofTop));
    fill(place, compared(rows, HEATS.map((heat, k) => [`T ${heat}`, `T = ${heat} · entropy ${entropies[k].toFixed(2)} nats`])),
      h("p", { class: "soft small" }, whole_ ? `Shares of all ${whole(row.size)} tokens; each temperature adds up to 100%.` : `Shares of these ${top.length} tokens alone; each temperature adds up to 100%.`, !whole_ && guess ? " ◆ is your bar." : ""));
  };
  const radio = (value, label) => h("label", { class: "row inline" }, h("input", { type: "radio", name, id: `${name}-${value}`, value, checked: value === "top", onchange: () => show(value === "all") }), label);
  show(false);
  return h("div", { class: "figure" },
    h("div", { class: "row", role: "radiogroup", "aria-label": "Shares of what" }, radio("top", `Of the top ${top.length === 8 ? "eight" : top.length}`), radio("all", "Of the whole vocabulary")), place,
    h("p", {}, `Why the two differ: the other ${whole(row.size - top.length)} tokens. Each has next to nothing, but a high temperature raises all of them. At T = 2 the best ${top.length} keep only ${percent(hot[2].mass)} of the whole; at T = 0.1 they have ${percent(hot[0].mass)}.`));
}

/** The best token at temperatures toward 0. */
export function zeroRows({ row }) {
  const best = row.order[0];
  return [1, 0.5, 0.1, 0.02].map((heat) => [`T = ${heat}`, percent(softmax(row.logits, heat)[best])]);
}

export const headOf = (facts, heat) => stages(facts.row, { ...OFF, temperature: heat, top_p: SHARE }, facts.past);

/** What top-p keeps: cumulative probability by rank, and the best tokens after the cut. */
export function cutFigure(facts, guess = null) {
  const { row, text } = facts;
  const result = headOf(facts, 1);
  const last = result.at(-1);
  const sorted = Float64Array.from(row.order, (id) => row.probs[id]);
  const top = Array.from(row.order.slice(0, Math.min(TOP, last.ids.length)));
  return h("div", { class: "figure" },
    h("p", {}, `${whole(last.ids.length)} tokens hold ${percent(result.find(({ name }) => name === "top_p").kept)} of the probability. The other ${whole(row.size - last.ids.length)} share the rest.`),
    cumulative(sorted, last.ids.length, SHARE, guess),
    h("p", { class: "soft small" }, "Horizontal: rank of the token, logarithmic. Vertical: cumulative probability."),
    h("p", {}, "The kept probabilities are normalized to 100%. The best of them, after the cut:"),
    bars(withOthers(top.map((id) => ({ text: text(id), value: probAt(last, id) })), last.ids.length - top.length)),
    h("p", { class: "soft small" }, "Before the cut: ", top.map((id, i) => [i ? ", " : "", chip(text(id)), ` ${percent(row.probs[id])}`]), "."));
}
