// The five steps: the question, the form for the guess, the answer, and the points.
//
//   {id, title, question(facts), form(facts, mine, changed), ready(guess), guessText(facts, guess), truth(facts),
//    points(facts, guess), answer(facts, guess)}
//
// `facts` has the trace of the lesson's prompt, its row of logits, and the source for more passes.

import { dots } from "./charts.js";
import { chip, fixed, freshId, h, percent, table, tenths, whole } from "./dom.js";
import { heated } from "./facts.js";
import { cutFigure, greedyFigure, headOf, HEATS, logitsFigure, temperatureFigure, zeroRows } from "./figures.js";
import { draw, OFF, stages } from "./sampling.js";

const DRAWN = 3; // bars that are guessed for each temperature
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
  answer: logitsFigure,
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
  answer: (facts) => [
    h("p", {}, `At the first step argmax takes `, chip(facts.text(facts.row.order[0])), `, whose probability is ${percent(facts.row.probs[facts.row.order[0]])}. Nothing about it is random.`),
    greedyFigure(facts),
  ],
};

// -- step 3 -----------------------------------------------------------------------------------------------------------

const firstOnes = Array.from({ length: DRAWN }, (_, i) => i);
const barKey = (heat, i) => `${heat}:${i}`;
const leftOver = (bars, heat) => 100 - firstOnes.reduce((sum, i) => sum + (bars[barKey(heat, i)] ?? 0), 0);

/** The sliders of one temperature. Together they are at most 100: what is left belongs to the other tokens. */
function drawnBars(facts, heat, drawn, changed) {
  const left = h("p", { class: "small soft", "aria-live": "polite" });
  const tell = () => { left.textContent = `${leftOver(drawn, heat)}% left for the other five`; };
  tell();
  return h("div", { class: "sub" }, h("h3", {}, `T = ${heat}`),
    Array.from(facts.row.order.slice(0, DRAWN)).map((id, i) => {
      const key = barKey(heat, i);
      const field = `bar-${String(heat).replace(".", "-")}-${i}`;
      const shown = h("output", { for: field }, drawn[key] === undefined ? "?" : `${drawn[key]}%`);
      const slider = h("input", { type: "range", id: field, min: 0, max: 100, step: 1, value: drawn[key] ?? 0, "aria-label": `T = ${heat}, token ${facts.text(id).trim() || id}, percent` });
      slider.addEventListener("input", () => {
        drawn[key] = Math.min(Number(slider.value), leftOver(drawn, heat) + (drawn[key] ?? 0));
        slider.value = drawn[key];
        shown.textContent = `${drawn[key]}%`;
        tell();
        changed();
      });
      return h("div", { class: "draw-bar" }, h("span", {}, chip(facts.text(id))), shown, slider);
    }), left);
}

/** "50 / 31 / 4%, others 15%": shares that add up to 100. */
const barText = (values) => `${values.slice(0, -1).join(" / ")}%, others ${values.at(-1)}%`;

function trueBars(facts, heat) {
  const { ofTop } = heated(facts.row, heat);
  const units = tenths(ofTop);
  const others = units.slice(DRAWN).reduce((sum, unit) => sum + unit, 0);
  return barText([...units.slice(0, DRAWN), others].map((unit) => (unit / 10).toFixed(1)));
}

const temperature = {
  id: "temperature",
  title: "Temperature, with real numbers",
  question: () => `Logits are divided by the temperature before softmax. Draw the bars of the best three tokens for T = 0.1, 1 and 2: how much of the top eight does each get?`,
  form: (facts, mine, changed) => {
    const drawn = (mine.guess.bars ??= {});
    return h("fieldset", { disabled: mine.committed }, h("legend", {}, "Your bars, in percent of the top eight"),
      h("div", { class: "trio" }, HEATS.map((heat) => drawnBars(facts, heat, drawn, changed))));
  },
  ready: (guess) => HEATS.every((heat) => firstOnes.some((i) => guess.bars?.[barKey(heat, i)] !== undefined)),
  guessText: (facts, guess) => HEATS.map((heat) => `T ${heat}: ${barText([...firstOnes.map((i) => guess.bars[barKey(heat, i)] ?? 0), leftOver(guess.bars, heat)])}`).join("\n"),
  truth: (facts) => HEATS.map((heat) => `T ${heat}: ${trueBars(facts, heat)}`).join("\n"),
  points: (facts, guess) => {
    let off = 0;
    for (const heat of HEATS) heated(facts.row, heat).ofTop.slice(0, DRAWN).forEach((p, i) => { off += Math.abs(100 * p - (guess.bars[barKey(heat, i)] ?? 0)); });
    return Math.max(0, 100 - (2 * off) / (HEATS.length * DRAWN));
  },
  answer: (facts, guess) => temperatureFigure(facts, (heat, i) => (i < DRAWN ? (guess.bars[barKey(heat, i)] ?? 0) / 100 : undefined)),
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
    return [
      h("p", {}, "As the temperature approaches 0, the best token gets all the probability. At 0 itself the formula is undefined:"),
      table("The best token at low temperatures", ["Temperature", ["Probability of the best", "num"]],
        [...zeroRows(facts), ["T = 0, by the formula: (z − z) ÷ 0", fixed(naive)], ["T = 0, in the engine: argmax", percent(1)]]),
      h("p", {}, "So the engine has a branch: at temperature 0 it does not divide but takes ", chip(facts.text(best)), ". The same prompt gives the same answer, which is why evaluations run at 0."),
    ];
  },
};

// -- step 5 -----------------------------------------------------------------------------------------------------------

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
  answer: (facts, guess) => [
    cutFigure(facts, guess.count),
    h("h3", {}, `${DRAWS} draws, with and without the cut`),
    h("p", {}, `The same ${DRAWS} random numbers (seed ${SEED}) each time. A draw from the tail, ●, is a token that top-p would have cut: that is where a text derails.`),
    [1, 1.5].map((heat) => drawsAt(facts, heat)),
  ],
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
