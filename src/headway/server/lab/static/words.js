// The lesson's text: glossary, analogies, recall cards, and the points of a good explanation.

import { h, table } from "./dom.js";

export const LESSON_PROMPT = "Once upon a time, there was a little";

export const TERMS = [
  ["Argmax", "The token with the highest score. Among equals, the one with the lowest id."],
  ["Attention", "How a token gathers from the tokens before it. Each head of each layer spreads a weight of 1 over the slots it may see."],
  ["Context", "One sequence: its tokens, and the pages in which their keys and values are kept."],
  ["Decoding", "Choosing one token from the distribution: greedily, or by drawing."],
  ["Distribution", "A probability for every token of the vocabulary. They add up to 1."],
  ["Entropy", "The uncertainty of the choice, in nats: 0 when one token is certain, more when many are possible."],
  ["Epsilon", "Keeps the tokens that have at least this probability."],
  ["Eta", "Keeps the tokens that have at least this probability, or less where the entropy is large."],
  ["Forward pass", "One run of the tokens through all layers. It outputs one score for every possible next token."],
  ["Greedy", "Decoding by argmax at every step. The same prompt gives the same text each time, and often repeats itself."],
  ["Hidden state", "The vector that stands for a token after a layer: what the layers so far have made of it."],
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

export const analogies = () => table("In the kitchen and in the engine", ["In the kitchen", "In the engine"], KITCHEN, { class: "analogy" });

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

export function modes(current) {
  const link = (to, label) => h("a", { href: `#${to}`, ...(to === current ? { "aria-current": "page" } : {}) }, label);
  return h("p", { class: "modes", role: "group", "aria-label": "How to go through the lesson" }, link("home", "Guided"), link("read", "Reading"));
}
