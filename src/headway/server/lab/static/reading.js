// The lesson as text with its figures: four sections to read instead of guessing.

import { fill, h, whole } from "./dom.js";
import { lessonFacts } from "./facts.js";
import { cutFigure, greedyFigure, logitsFigure, temperatureFigure } from "./figures.js";
import { analogies, modes } from "./words.js";

/** The lesson as text. Its figures come when the pass behind them is done. */
export function reading(app) {
  const { source } = app;
  const count = whole(source.model.vocab_size);
  const name = source.model.name;
  const pass = lessonFacts(source);
  pass.catch((error) => app.trouble(error));
  const figure = (draw) => {
    const place = h("div", { class: "figure-place" }, h("p", { class: "soft", role: "status" }, "Running one forward pass …"));
    pass.then((facts) => fill(place, draw(facts)))
      .catch((error) => fill(place, h("div", { class: "note" }, h("p", {}, error.message))));
    return place;
  };
  return h("article", { class: "prose reading" },
    h("h1", {}, "The forward pass and sampling"), modes("read"),
    h("p", { class: "lead" }, "How a prompt becomes one token, in four short sections. The guided mode asks you questions first; this one just explains."),
    section(1, "A forward pass scores every token",
      ["Your text goes in as tokens. They run through all layers, each of which lets every token gather from those before it. At the end, one projection gives a logit for each token of the vocabulary.",
        `For ${name} these are ${count} numbers, every time, whatever the prompt. Softmax takes the exponential of each and divides by the sum: the results are probabilities and add up to 1. The whole model exists to compute this one list.`],
      "In the kitchen: the menu is always the whole menu. What changes with the guest is the score of each dish.", figure((facts) => [h("p", {}, "The prompt of all figures:"), h("div", { class: "run" }, facts.trace.texts.join("")), logitsFigure(facts)])),
    section(2, "Greedy: take the best one",
      ["The simplest decoder takes the token with the highest score and goes on from there. It is not random, so the text is the same each time. That is what you want when you compare two versions of a system.",
        "It is also how models get stuck. Once a phrase is the likeliest continuation of itself, greedy never leaves it."],
      "In the kitchen: the favorite, every night. Nobody complains, nobody is surprised.", figure(greedyFigure)),
    section(3, "Temperature: reshape, then draw",
      ["Instead of taking the best, draw one token with its probability. Temperature divides the logits first. Below 1 the differences grow, and the favorite takes nearly all; above 1 they shrink, and unlikely tokens get a chance.",
        "At 0 the formula would divide by zero, so 0 is a special case: it is greedy."],
      "In the kitchen: temperature is how heavily the dice are loaded.", figure((facts) => temperatureFigure(facts))),
    section(4, "Top-k and top-p: cut the tail",
      [`Of ${count} tokens most are nonsense at any given position. Each is very unlikely; together they are not. Draw often enough and one of them comes up, and the text has to continue from it.`,
        "Top-k keeps the k best and drops the rest. Top-p keeps as many of the best as it takes to reach p: few when the model is sure, many when it is not. The kept probabilities are normalized to 1, and then a token is sampled. Min-p, typical, epsilon and eta are other ways to cut."],
      "In the kitchen: remove the dishes that nobody has ordered in years from tonight's menu.", figure((facts) => cutFigure(facts))),
    h("section", {}, h("h2", {}, "In the kitchen, in the engine"), analogies()),
    h("p", {}, h("a", { class: "button main", href: "#lab" }, "Try it in your Lab"), " "));
}

function section(number, title, paragraphs, aside, figure) {
  return h("section", {}, h("h2", {}, `${number} · ${title}`), paragraphs.map((text) => h("p", {}, text)), h("p", { class: "aside" }, aside), figure);
}
