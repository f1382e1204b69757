// The lesson's text: glossary, analogies, reading mode, recall cards, and the points of a good explanation.

import { h, whole } from "./dom.js";

export const LESSON_PROMPT = "Once upon a time, there was a little";

const TERMS = [
  ["Argmax", "The token with the highest score. Among equals, the one with the lowest id."],
  ["Attention", "How a token gathers from the tokens before it. Each head of each layer spreads a weight of 1 over the slots it may see."],
  ["Context", "One sequence: its tokens, and the pages in which their keys and values are kept."],
  ["Decoding", "Choosing one token from the distribution: greedily, or by drawing."],
  ["Distribution", "A probability for every token of the vocabulary. They add up to 1."],
  ["Entropy", "The uncertainty of the choice, in nats: 0 when one token is certain, more when many are possible."],
  ["Forward pass", "One run of the tokens through all layers. It outputs one score for every possible next token."],
  ["Greedy", "Decoding by argmax at every step. The same prompt gives the same text each time, and often repeats itself."],
  ["Logit", "A raw score, before softmax. Only differences between logits matter."],
  ["Logit lens", "Reading a middle layer as if the model ended there: which token would it predict?"],
  ["Mask", "Which slots a token may attend to. Causal lets it see itself and everything before."],
  ["Min-p", "Keeps the tokens that are at least p times as likely as the likeliest one."],
  ["Page", "Sixteen slots of keys and values. Full pages never change, so continuations of one text can share them."],
  ["Penalty", "Lowers the scores of tokens that already occurred: repetition, presence, frequency."],
  ["Seed", "The number that fixes a draw. With a seed and a position the same token is drawn again."],
  ["Softmax", "Turns scores into probabilities: the exponential of each, divided by their sum."],
  ["Temperature", "What logits are divided by before softmax. Below 1 sharpens, above 1 flattens, 0 is greedy."],
  ["Token", "A piece of text with a number. Words are one token or several; a space usually belongs to the token after it."],
  ["Top-k", "Keeps the k likeliest tokens."],
  ["Top-p", "Keeps the fewest likeliest tokens that together reach the probability p. Also called nucleus sampling."],
  ["Typical", "Keeps the tokens whose surprisal is nearest to the entropy, as few as reach p."],
  ["Vocabulary", "All tokens a model knows. The width of its logits."],
];

export function glossary() {
  return h("div", { class: "prose" }, h("h1", {}, "Glossary"),
    h("p", { class: "lead" }, "The words of this lesson, each in a sentence or two."),
    h("dl", { class: "terms" }, TERMS.map(([term, meaning]) => h("div", {}, h("dt", {}, term), h("dd", {}, meaning)))));
}

const KITCHEN = [
  ["The menu, with a score beside every dish", "logits: one score per token of the vocabulary"],
  ["Scores turned into fractions of all orders", "softmax: probabilities that add up to 1"],
  ["Always cook the favorite", "greedy decoding, argmax"],
  ["Roll dice loaded by these fractions", "sampling"],
  ["How heavily the dice are loaded", "temperature"],
  ["Only ever offer the k best dishes", "top-k"],
  ["Offer the fewest dishes that cover 90% of orders", "top-p = 0.9"],
  ["Not the same dish three nights in a row", "repetition, presence and frequency penalties"],
  ["Noting which dice were rolled, to cook the same evening again", "seed"],
];

export function analogies() {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "In the kitchen and in the engine" },
    h("table", { class: "analogy" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "In the kitchen"), h("th", { scope: "col" }, "In the engine"))),
      h("tbody", {}, KITCHEN.map(([kitchen, engine]) => h("tr", {}, h("td", {}, kitchen), h("td", {}, engine))))));
}

export const RECALL = {
  pass: ["From forward pass to token, in one line", "The layers give a score to every token of the vocabulary; softmax turns the scores into probabilities; a decoder takes one token: the best one, or one that is drawn."],
  params: ["Three sampling parameters, and what each does", "Temperature reshapes the distribution: low is sharp, high is flat, 0 is greedy. Top-k keeps the k likeliest tokens. Top-p keeps the fewest that reach p. The last two cut the tail, so that sampling cannot derail the text."],
};

export const COLLEAGUE = {
  opening: "A forward pass gives us a distribution; we get one token by …",
  model: "… decoding it. Greedy takes the likeliest token, so the same prompt gives the same text. Or we draw: temperature first makes the distribution sharper or flatter, then top-k or top-p cut off the unlikely tail, and a seeded draw picks from what is left. Temperature 0 is greedy. You set these for each request: firm for evaluations, looser for conversation.",
  points: [
    ["a score for every token of the vocabulary", /score|logit|every token|each token|vocab/i],
    ["greedy takes the best, and always the same", /greedy|argmax|likeliest|highest|best/i],
    ["temperature reshapes before the draw", /temperature/i],
    ["top-k or top-p cut the tail", /top[- ]?[kp]|nucleus|tail/i],
    ["temperature 0 is greedy", /(temperature|t)\s*(=|of|is)?\s*(0|zero)|deterministic|reproducible/i],
  ],
};

/** The lesson as text: four sections to read instead of guessing. */
export function reading(source) {
  const count = whole(source.model.vocab_size);
  const name = source.model.name;
  return h("article", { class: "prose reading" },
    h("h1", {}, "The forward pass and sampling"), modes("read"),
    h("p", { class: "lead" }, "How a prompt becomes one token, in four short sections. The guided mode asks you questions first; this one just explains."),
    section(1, "A forward pass scores every token",
      ["Your text goes in as tokens. They run through all layers, each of which lets every token gather from those before it. At the end, one projection gives a logit for each token of the vocabulary.",
        `For ${name} these are ${count} numbers, every time, whatever the prompt. Softmax takes the exponential of each and divides by the sum: the results are probabilities and add up to 1. The whole model exists to compute this one list.`],
      "In the kitchen: the menu is always the whole menu. What changes with the guest is the score of each dish."),
    section(2, "Greedy: take the best one",
      ["The simplest decoder takes the token with the highest score and goes on from there. It is not random, so the text is the same each time. That is what you want when you compare two versions of a system.",
        "It is also how models get stuck. Once a phrase is the likeliest continuation of itself, greedy never leaves it."],
      "In the kitchen: the favorite, every night. Nobody complains, nobody is surprised."),
    section(3, "Temperature: reshape, then draw",
      ["Instead of taking the best, draw one token with its probability. Temperature divides the logits first. Below 1 the differences grow, and the favorite takes nearly all; above 1 they shrink, and unlikely tokens get a chance.",
        "At 0 the formula would divide by zero, so 0 is a special case: it is greedy."],
      "In the kitchen: temperature is how heavily the dice are loaded."),
    section(4, "Top-k and top-p: cut the tail",
      [`Of ${count} tokens most are nonsense at any given position. Each is very unlikely; together they are not. Draw often enough and one of them comes up, and the text has to continue from it.`,
        "Top-k keeps the k best and drops the rest. Top-p keeps as many of the best as it takes to reach p: few when the model is sure, many when it is not. The kept probabilities are normalized to 1, and then a token is sampled. Min-p and typical are two other ways to cut."],
      "In the kitchen: remove the dishes that nobody has ordered in years from tonight's menu."),
    h("section", {}, h("h2", {}, "In the kitchen, in the engine"), analogies()),
    h("p", {}, h("a", { class: "button main", href: "#lab" }, "Try it in your Lab"), " "));
}

function section(number, title, paragraphs, aside) {
  return h("section", {}, h("h2", {}, `${number} · ${title}`), paragraphs.map((text) => h("p", {}, text)), h("p", { class: "aside" }, aside));
}

export function modes(current) {
  const link = (to, label) => h("a", { href: `#${to}`, ...(to === current ? { "aria-current": "page" } : {}) }, label);
  return h("p", { class: "modes", role: "group", "aria-label": "How to go through the lesson" }, link("home", "Guided"), link("read", "Reading"));
}
