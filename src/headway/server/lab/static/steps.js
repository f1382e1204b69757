// The five steps: the question, the form for the guess, the answer, and the points.
//
//   {id, title, question(facts), form(facts, mine, changed), ready(guess), guessText(facts, guess), truth(facts),
//    points(facts, guess), answer(facts, guess)}
//
// `facts` has the trace of the lesson's prompt, its row of logits, and the source for more passes.

import { bars, cumulative, dots, histogram } from "./charts.js";
import { brief, chip, fill, fixed, freshId, h, percent, whole } from "./dom.js";
import { draw, OFF, probAt, softmax, stages } from "./sampling.js";

const TOP = 8;
const DRAWN = 3; // bars that are guessed for each temperature
const HEATS = [0.1, 1, 2];
const SHARE = 0.9;
const DRAWS = 200;
const SEED = 7;

// -- guesses ----------------------------------------------------------------------------------------------------------

function choices(name, options, right) {
  return (facts, mine, changed) => h("fieldset", { disabled: mine.committed }, h("legend", {}, "Your guess"),
    h("div", { class: "choices" }, options.map((text, i) => {
      const verdict = !mine.revealed ? null : i === right ? "✓ it is" : mine.guess.choice === i ? "✗ you said" : null;
      return h("label", { class: mine.revealed && i === right ? "right" : "" },
        h("input", { type: "radio", name, value: i, id: `${name}-${i}`, checked: mine.guess.choice === i, onchange: () => { mine.guess.choice = i; changed(); } }),
        h("span", {}, text), verdict && h("span", { class: "verdict" }, verdict));
    })));
}

/** A logarithmic slider over integers from 1 to `most`. */
function count(name, label, most) {
  return (facts, mine, changed) => {
    const high = most(facts);
    const number = (value) => Math.round(10 ** ((value / 200) * Math.log10(high)));
    const id = freshId(name);
    const shown = h("output", { for: id }, mine.guess.count === undefined ? "?" : whole(mine.guess.count));
    const slider = h("input", { type: "range", id, min: 0, max: 200, step: 1, value: mine.guess.at ?? 100, disabled: mine.committed, "aria-valuetext": mine.guess.count === undefined ? "not chosen yet" : whole(mine.guess.count) });
    slider.addEventListener("input", () => {
      mine.guess.at = Number(slider.value);
      mine.guess.count = number(mine.guess.at);
      shown.textContent = whole(mine.guess.count);
      slider.setAttribute("aria-valuetext", whole(mine.guess.count));
      changed();
    });
    return h("div", {}, h("label", { for: id }, label), h("div", { class: "guess-slider" }, slider, shown));
  };
}

/** Full points for the number itself, none when it is a hundred times off. */
const nearness = (guess, truth) => Math.max(0, 100 - 50 * Math.abs(Math.log10(guess / truth)));

const together = (...forms) => (facts, mine, changed) => h("div", {}, forms.map((form) => form(facts, mine, changed)));

// -- step 1 -----------------------------------------------------------------------------------------------------------

const OUTPUTS = ["The next word, as text", "One score for every token of the vocabulary", "One probability for every word of the prompt", "A few candidates with their probabilities"];

const output = {
  id: "output",
  title: "What comes out of a forward pass?",
  question: () => "The tokens have run through every layer. What comes out at the end, before a token is chosen? And how many numbers is it?",
  form: together(choices("output", OUTPUTS, 1), count("output-count", "How many numbers come out? Move the slider.", () => 1_000_000)),
  ready: (guess) => guess.choice !== undefined && guess.count !== undefined,
  guessText: (facts, guess) => `${OUTPUTS[guess.choice]}; ${whole(guess.count)} numbers`,
  truth: (facts) => `One score for each of ${whole(facts.row.size)} tokens`,
  points: (facts, guess) => (guess.choice === 1 ? 50 : 0) + nearness(guess.count, facts.row.size) / 2,
  answer: (facts) => {
    const { row } = facts;
    const top = Array.from(row.order.slice(0, TOP));
    let sum = 0;
    for (const p of row.probs) sum += p;
    return [
      h("p", {}, `This model has ${whole(row.size)} tokens, so every pass outputs ${whole(row.size)} raw scores, called logits. Here they all are:`),
      histogram(row.logits, { marks: [{ value: row.logits[top[0]], label: `best: ${fixed(row.logits[top[0]], 1)}` }] }),
      h("p", {}, `Softmax turns them into probabilities. They add up to ${sum.toFixed(12)}; these eight hold ${percent(top.reduce((all, id) => all + row.probs[id], 0))} of it.`),
      bars(top.map((id) => ({ text: facts.text(id), value: row.probs[id], label: `${fixed(row.logits[id], 2)} → ${percent(row.probs[id])}` }))),
      h("p", { class: "soft small" }, "Beside each bar: the logit, and the probability it becomes."),
    ];
  },
};

// -- step 2 -----------------------------------------------------------------------------------------------------------

const RUNS = ["Two different texts", "Nearly the same, with small differences", "Exactly the same text twice"];

const greedy = {
  id: "greedy",
  title: "The simplest decoder",
  question: () => "Take the token with the highest score, append it to the prompt, and repeat. Do that for the whole text, twice. What do the two runs look like?",
  form: choices("greedy", RUNS, 2),
  ready: (guess) => guess.choice !== undefined,
  guessText: (facts, guess) => RUNS[guess.choice],
  truth: () => RUNS[2],
  points: (facts, guess) => (guess.choice === 2 ? 100 : 0),
  answer: (facts) => {
    const place = h("div", { "aria-live": "polite" }, h("p", { class: "soft" }, "Running two greedy generations …"));
    showRuns(facts, place);
    return [h("p", {}, `At the first step argmax takes `, chip(facts.text(facts.row.order[0])), `, whose probability is ${percent(facts.row.probs[facts.row.order[0]])}. Nothing about it is random.`), place];
  },
};

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

// -- step 3 -----------------------------------------------------------------------------------------------------------

/** Probabilities of the top tokens at a temperature: of these alone, and of the whole vocabulary. */
function heated(row, temperature) {
  const all = softmax(row.logits, temperature);
  const top = Array.from(row.order.slice(0, TOP));
  const mass = top.reduce((sum, id) => sum + all[id], 0);
  return { top, mass, ofAll: top.map((id) => all[id]), ofTop: top.map((id) => all[id] / mass) };
}

const temperature = {
  id: "temperature",
  title: "Temperature, with real numbers",
  question: () => `Logits are divided by the temperature before softmax. Draw the bars of the best three tokens for T = 0.1, 1 and 2: how much of the top eight does each get?`,
  form: (facts, mine, changed) => {
    const drawn = (mine.guess.bars ??= {});
    return h("fieldset", { disabled: mine.committed }, h("legend", {}, "Your bars, in percent of the top eight"),
      h("div", { class: "trio" }, HEATS.map((heat) => h("div", { class: "sub" }, h("h3", {}, `T = ${heat}`),
        Array.from(facts.row.order.slice(0, DRAWN)).map((id, i) => {
          const key = `${heat}:${i}`;
          const field = `bar-${String(heat).replace(".", "-")}-${i}`;
          const shown = h("output", { for: field }, drawn[key] === undefined ? "?" : `${drawn[key]}%`);
          const slider = h("input", { type: "range", id: field, min: 0, max: 100, step: 1, value: drawn[key] ?? 0, "aria-label": `T = ${heat}, token ${facts.text(id).trim() || id}, percent` });
          slider.addEventListener("input", () => {
            drawn[key] = Number(slider.value);
            shown.textContent = `${drawn[key]}%`;
            changed();
          });
          return h("div", { class: "draw-bar" }, h("span", {}, chip(facts.text(id))), shown, slider);
        })))));
  },
  ready: (guess) => HEATS.every((heat) => Array.from({ length: DRAWN }, (_, i) => i).some((i) => guess.bars?.[`${heat}:${i}`] !== undefined)),
  guessText: (facts, guess) => HEATS.map((heat) => `T ${heat}: ${Array.from({ length: DRAWN }, (_, i) => guess.bars[`${heat}:${i}`] ?? 0).join(" / ")}%`).join("\n"),
  truth: (facts) => HEATS.map((heat) => `T ${heat}: ${heated(facts.row, heat).ofTop.slice(0, DRAWN).map((p) => Math.round(100 * p)).join(" / ")}%`).join("\n"),
  points: (facts, guess) => {
    let off = 0;
    for (const heat of HEATS) heated(facts.row, heat).ofTop.slice(0, DRAWN).forEach((p, i) => { off += Math.abs(100 * p - (guess.bars[`${heat}:${i}`] ?? 0)); });
    return Math.max(0, 100 - (2 * off) / (HEATS.length * DRAWN));
  },
  answer: (facts, guess) => [
    h("h3", {}, "Of the top eight"),
    h("p", { class: "soft small" }, "◆ is your bar."),
    h("div", { class: "trio" }, HEATS.map((heat) => {
      const { top, ofTop } = heated(facts.row, heat);
      return h("div", { class: "sub" }, h("h3", {}, `T = ${heat}`), bars(top.map((id, i) => ({ text: facts.text(id), value: ofTop[i], label: brief(ofTop[i]), guess: i < DRAWN ? (guess.bars[`${heat}:${i}`] ?? 0) / 100 : undefined })), { max: 1 }));
    })),
    h("h3", {}, "Of the whole vocabulary"),
    h("div", { class: "trio" }, HEATS.map((heat) => {
      const { top, ofAll, mass } = heated(facts.row, heat);
      return h("div", { class: "sub" }, h("h3", {}, `T = ${heat}`), bars(top.map((id, i) => ({ text: facts.text(id), value: ofAll[i], label: brief(ofAll[i]), second: true })), { max: 1 }), h("p", { class: "small" }, `Together ${percent(mass)}.`));
    })),
    h("p", {}, `Why the two differ: the other ${whole(facts.row.size - TOP)} tokens. Each has next to nothing, but a high temperature raises all of them. At T = 2 the best eight keep only ${percent(heated(facts.row, 2).mass)} of the whole; at T = 0.1 they have ${percent(heated(facts.row, 0.1).mass)}. A chart of the top eight alone hides that.`),
  ],
};

// -- step 4 -----------------------------------------------------------------------------------------------------------

const ZEROS = ["Every token becomes equally likely", "An error: division by zero", "It is greedy: the best token, every time"];

const zero = {
  id: "zero",
  title: "A special case: T = 0",
  question: () => "The formula divides by the temperature. What does an engine do at T = 0?",
  form: choices("zero", ZEROS, 2),
  ready: (guess) => guess.choice !== undefined,
  guessText: (facts, guess) => ZEROS[guess.choice],
  truth: () => ZEROS[2],
  points: (facts, guess) => (guess.choice === 2 ? 100 : 0),
  answer: (facts) => {
    const { row } = facts;
    const best = row.order[0];
    const peak = row.logits[best];
    const naive = (peak - peak) / 0;
    const rows = [1, 0.5, 0.1, 0.02].map((heat) => [heat, softmax(row.logits, heat)[best]]);
    return [
      h("p", {}, "As the temperature approaches 0, the best token gets all the probability. At 0 itself the formula is undefined:"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The best token at low temperatures" }, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Temperature"), h("th", { scope: "col", class: "num" }, "Probability of the best"))),
        h("tbody", {}, rows.map(([heat, p]) => h("tr", {}, h("td", {}, `T = ${heat}`), h("td", { class: "num" }, percent(p)))),
          h("tr", {}, h("td", {}, "T = 0, by the formula: (z − z) ÷ 0"), h("td", { class: "num" }, fixed(naive))),
          h("tr", {}, h("td", {}, "T = 0, in the engine: argmax"), h("td", { class: "num" }, percent(1)))))),
      h("p", {}, "So the engine has a branch: at temperature 0 it does not divide but takes ", chip(facts.text(best)), ". The same prompt gives the same answer, which is why evaluations run at 0."),
    ];
  },
};

// -- step 5 -----------------------------------------------------------------------------------------------------------

const headOf = (facts, heat) => stages(facts.row, { ...OFF, temperature: heat, top_p: SHARE }, facts.past);
const plainOf = (facts, heat) => stages(facts.row, { ...OFF, temperature: heat }, facts.past);
const keptBy = (facts) => headOf(facts, 1).at(-1).ids.length;

const cut = {
  id: "cut",
  title: "Why top-k and top-p?",
  question: (facts) => `Top-p 0.9 keeps the fewest tokens that together reach 90%. Of ${whole(facts.row.size)} tokens, how many stay for this prompt at T = 1?`,
  form: count("cut-count", "How many tokens stay? Move the slider.", (facts) => facts.row.size),
  ready: (guess) => guess.count !== undefined,
  guessText: (facts, guess) => `${whole(guess.count)} tokens`,
  truth: (facts) => `${whole(keptBy(facts))} tokens`,
  points: (facts, guess) => nearness(guess.count, keptBy(facts)),
  answer: (facts, guess) => {
    const result = headOf(facts, 1);
    const last = result.at(-1);
    const sorted = Float64Array.from(facts.row.order, (id) => facts.row.probs[id]);
    const top = Array.from(facts.row.order.slice(0, TOP));
    return [
      h("p", {}, `${whole(last.ids.length)} tokens hold ${percent(result.find(({ name }) => name === "top_p").kept)} of the probability. The other ${whole(facts.row.size - last.ids.length)} share the rest.`),
      cumulative(sorted, last.ids.length, SHARE, guess.count),
      h("p", { class: "soft small" }, "Horizontal: rank of the token, logarithmic. Vertical: cumulative probability."),
      h("p", {}, "The kept probabilities are normalized to 1. The best eight, before → after the cut:"),
      bars(top.map((id) => ({ text: facts.text(id), value: probAt(last, id), label: `${percent(facts.row.probs[id])} → ${percent(probAt(last, id))}` }))),
      h("h3", {}, `${DRAWS} draws, with and without the cut`),
      h("p", {}, `The same ${DRAWS} random numbers (seed ${SEED}) each time. A draw from the tail, ●, is a token that top-p would have cut: that is where a text derails.`),
      [1, 1.5].map((heat) => drawsAt(facts, heat)),
    ];
  },
};

function drawsAt(facts, heat) {
  const head = new Set(headOf(facts, heat).at(-1).ids);
  const position = facts.trace.position;
  const free = draw(plainOf(facts, heat), SEED, position, DRAWS);
  const safe = draw(headOf(facts, heat), SEED, position, DRAWS);
  const derailed = free.filter((id) => !head.has(id));
  const row = (label, tokens) => {
    const tail = tokens.map((id) => !head.has(id));
    const off = tail.filter(Boolean).length;
    return h("div", { class: "sub" }, h("p", {}, h("strong", {}, label), ` · ${off} of ${DRAWS} from the tail`), dots(tail, `${off} of ${DRAWS} draws from the tail`));
  };
  return h("div", {}, h("h3", {}, `T = ${heat}: ${whole(head.size)} of ${whole(facts.row.size)} tokens stay`), h("div", { class: "trio" }, row("No cut", free), row("Top-p 0.9", safe)),
    derailed.length ? [h("p", { class: "small soft" }, "Drawn from the tail, for example:"), h("ul", { class: "chips" }, [...new Set(derailed)].slice(0, 10).map((id) => h("li", {}, chip(facts.text(id)))))] : null);
}

export const STEPS = [output, greedy, temperature, zero, cut];
