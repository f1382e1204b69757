// The lesson: one guess at a time. A step asks a question, and shows the answer only after a guess was committed.

import { announce, fill, h, table } from "./dom.js";
import { lessonFacts, lessonScreen } from "./facts.js";
import { STEPS } from "./steps.js";
import { teacher } from "./teacher.js";
import { analogies, COLLEAGUE, modes, RECALL } from "./words.js";

const STORE = "headway-lesson-1";
const RECALL_AFTER = { greedy: "pass", cut: "params" };

export class LessonView {
  constructor(app) {
    this.app = app;
    this.source = null;
    this.facts = null; // the data for the answers
    this.main = null; // where it is drawn, while it is
    this.state = load();
  }

  enter(main) {
    this.main = main;
    if (this.source !== this.app.source) {
      this.source = this.app.source;
      this.facts = null;
    }
    if (this.facts) this.draw();
    else this.fetch();
  }

  leave() {
    this.main = null;
  }

  async fetch() {
    const source = this.source;
    fill(this.main, this.head(), h("p", { class: "lesson soft", role: "status" }, "Running one forward pass …"));
    try {
      const facts = await lessonFacts(source);
      if (source !== this.source) return;
      this.facts = facts;
      if (this.main) this.draw();
    } catch (error) {
      this.app.trouble(error);
      if (this.main && source === this.source && !this.facts) {
        fill(this.main, this.head(), h("div", { class: "lesson" }, h("div", { class: "note", role: "alert" }, h("p", {}, error.message)),
          h("button", { type: "button", class: "main", onclick: () => this.fetch() }, "Try again")));
      }
    }
  }

  head() {
    return h("div", { class: "lesson" },
      h("h1", {}, "The forward pass and sampling"),
      h("p", { class: "lead" }, "From a prompt to one token, one guess at a time."),
      h("div", { class: "win" }, h("p", {}, h("strong", {}, "Today's win: "),
        "you will be able to say what a forward pass outputs, and how greedy decoding, temperature, top-k and top-p turn it into one token. These are the sampling parameters of every request.")),
      modes("home"),
      h("p", {}, "Each step asks a question first. Commit to a guess, then reveal the answer. A wrong guess teaches as much as a right one."));
  }

  draw() {
    const prompt = this.facts.trace.texts.join("");
    const intro = h("div", { class: "lesson" }, h("p", {}, "The prompt for all steps:"),
      h("div", { class: "run" }, prompt), this.source.isLive ? null : h("p", { class: "soft small" }, "Recorded from a real model; nothing is computed on a server."));
    this.steps = h("div", { class: "lesson" });
    fill(this.main, this.head(), intro, this.steps, this.tail());
    this.drawSteps();
  }

  drawSteps() {
    const parts = [];
    let open = true;
    STEPS.forEach((step, i) => {
      const mine = (this.state[step.id] ??= { guess: {}, committed: false, revealed: false });
      parts.push(open ? this.card(step, i, mine) : lockedCard(step, i));
      if (open && mine.revealed && step.id === "output") parts.push(h("section", { class: "step" }, h("h2", {}, "In the kitchen, in the engine"), analogies()));
      if (open && mine.revealed && RECALL_AFTER[step.id]) parts.push(recall(...RECALL[RECALL_AFTER[step.id]]));
      open = open && mine.revealed;
    });
    if (open) parts.push(this.score(), colleague(this.state));
    fill(this.steps, parts);
  }

  card(step, index, mine) {
    const commit = h("button", { type: "button", id: `commit-${step.id}`, class: mine.committed ? "" : "main", disabled: mine.committed || !step.ready(mine.guess) }, mine.committed ? "Guess committed" : "Commit my guess");
    const reveal = h("button", { type: "button", id: `reveal-${step.id}`, class: "main", disabled: !mine.committed || mine.revealed }, mine.revealed ? "Revealed" : "Reveal");
    const changed = () => {
      commit.disabled = mine.committed || !step.ready(mine.guess);
      save(this.state);
    };
    commit.addEventListener("click", () => {
      mine.committed = true;
      save(this.state);
      this.drawSteps();
      document.getElementById(`reveal-${step.id}`)?.focus();
      announce("Your guess is committed. You can reveal the answer now.");
    });
    reveal.addEventListener("click", () => {
      mine.revealed = true;
      save(this.state);
      this.drawSteps();
      document.getElementById(`answer-${step.id}`)?.focus();
    });
    return h("section", { class: `step panel ${mine.revealed ? "done" : ""}`, "aria-labelledby": `title-${step.id}` },
      h("div", { class: "step-head" }, h("span", { class: "badge", "aria-hidden": "true" }, index + 1), h("h2", { id: `title-${step.id}` }, `${step.title}`)),
      h("p", { class: "question" }, step.question(this.facts)),
      step.form(this.facts, mine, changed),
      mine.revealed ? null : h("div", { class: "row" }, commit, reveal,
        h("span", { class: "soft small" }, mine.committed ? "Your guess is committed." : "You can reveal the answer once your guess is committed.")),
      mine.revealed && h("div", { class: "answer", id: `answer-${step.id}`, tabindex: "-1", role: "group", "aria-label": `The answer to step ${index + 1}` },
        versus(step, this.facts, mine.guess), step.answer(this.facts, mine.guess)));
  }

  score() {
    const rows = STEPS.map((step) => ({ step, points: Math.round(step.points(this.facts, this.state[step.id].guess)) }));
    const total = rows.reduce((sum, row) => sum + row.points, 0);
    return h("section", { class: "panel step", "aria-labelledby": "score-title" },
      h("h2", { id: "score-title" }, "Your score"),
      h("div", { class: "score" }, h("p", {}, h("b", { id: "score" }, `${total}`), ` of ${STEPS.length * 100} points`),
        h("button", { type: "button", onclick: () => this.again() }, "Start over")),
      table("Points by step", ["Step", "You said", "It is", ["Points", "num"]],
        rows.map(({ step, points }, i) => [`${i + 1} · ${step.title}`, step.guessText(this.facts, this.state[step.id].guess), step.truth(this.facts), points])));
  }

  again() {
    this.state = {};
    save(this.state);
    this.drawSteps();
    document.getElementById("title-output")?.scrollIntoView();
    announce("The lesson starts over.");
  }

  tail() {
    return h("div", { class: "lesson" },
      h("section", { class: "step panel" }, h("h2", {}, "On your machine, live"),
        h("p", {}, "Temperature 0 for evaluations: the same prompt, the same answer. Around 0.7 with top-p 0.9 for conversation. Your Lab has every sampling parameter on any prompt, and a view inside the pass."),
        h("p", {}, h("a", { class: "button main", href: "#lab" }, "Open your Lab"))),
      teacher(this.app, () => this.facts && lessonScreen(this.facts)));
  }
}

function lockedCard(step, index) {
  return h("section", { class: "step panel locked", "aria-label": `Step ${index + 1}, locked` },
    h("div", { class: "step-head" }, h("span", { class: "badge", "aria-hidden": "true" }, index + 1),
      h("p", {}, h("strong", {}, step.title), " · opens after the previous step")));
}

function versus(step, facts, guess) {
  const points = Math.round(step.points(facts, guess));
  return h("dl", { class: "versus" },
    h("div", {}, h("dt", {}, "You said"), h("dd", {}, step.guessText(facts, guess))),
    h("div", {}, h("dt", {}, "It is"), h("dd", {}, step.truth(facts))),
    h("div", {}, h("dt", {}, "Points"), h("dd", {}, `${points} of 100`)));
}

/** A card whose text is hidden until it is requested or hovered. */
function recall(title, text) {
  const words = h("p", { class: "hidden-text cover", "aria-hidden": "true" }, text);
  const button = h("button", { type: "button", class: "small", "aria-expanded": "false" }, "Check");
  const show = (open) => {
    words.classList.toggle("cover", !open);
    words.setAttribute("aria-hidden", String(!open));
    button.setAttribute("aria-expanded", String(open));
    button.textContent = open ? "Hide" : "Check";
  };
  button.addEventListener("click", () => show(button.getAttribute("aria-expanded") !== "true"));
  return h("section", { class: "recall" }, h("h3", {}, `Recall: ${title}`), h("p", { class: "soft small" }, "Say it aloud first, then check."), button, words);
}

function colleague(state) {
  const mine = (state.colleague ??= { text: "" });
  const result = h("div", { "aria-live": "polite" });
  const box = h("textarea", { id: "colleague", rows: 4, value: mine.text, placeholder: COLLEAGUE.opening });
  const compare = h("button", { type: "button", class: "main", id: "compare", disabled: mine.text.trim().length < 20 }, "Compare");
  box.addEventListener("input", () => {
    mine.text = box.value;
    compare.disabled = mine.text.trim().length < 20;
    save(state);
  });
  compare.addEventListener("click", () => fill(result,
    h("h3", {}, "One way to say it"), h("p", { class: "lead" }, COLLEAGUE.model), h("h3", {}, "Does yours have …"),
    h("ul", { class: "checklist" }, COLLEAGUE.points.map(([label, pattern]) => h("li", {}, h("label", {}, h("input", { type: "checkbox", checked: pattern.test(box.value) }), label)))),
    h("p", { class: "soft small" }, "Ticked by the words in your text. Correct the ticks if they do not match what you meant.")));
  return h("section", { class: "step panel" }, h("h2", {}, "Explain it to a colleague"),
    h("label", { for: "colleague" }, `Finish the sentence: “${COLLEAGUE.opening}”`), box,
    h("div", { class: "row" }, compare, h("span", { class: "soft small" }, "Write a sentence of your own first.")), result);
}

function load() {
  try {
    const result = JSON.parse(sessionStorage.getItem(STORE));
    return result && typeof result === "object" ? result : {};
  } catch {
    return {};
  }
}

function save(state) {
  sessionStorage.setItem(STORE, JSON.stringify(state));
}
