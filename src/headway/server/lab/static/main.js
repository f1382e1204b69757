// The page: its data source, its routing, and its error messages.

import { connect, Failure, recording, setKey, ask } from "./api.js";
import { announce, fill, h } from "./dom.js";
import { LabView } from "./lab.js";
import { LessonView } from "./lesson.js";
import { reading } from "./reading.js";
import { ProgramView } from "./program.js";
import { glossary } from "./words.js";

const POLL_INTERVAL = 5000; // milliseconds between checks of the server
const RETRY_INTERVAL = 1500;

/** What all views share: the source of distributions, and what to do when it changes. */
const app = {
  source: null,
  problem: null,
  changed() {
    show();
  },
  trouble(failure) {
    if (failure instanceof Failure && (failure.kind === "key" || failure.status === 503 || failure.kind === "gone")) watch.failed(failure);
  },
};

const views = { lesson: new LessonView(app), lab: new LabView(app), program: new ProgramView(app) };

// -- the source -------------------------------------------------------------------------------------------------------

const watch = {
  timer: 0,
  busy: false,

  again(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), wait);
  },

  async poll() {
    if (this.busy) return;
    if (document.hidden && app.source) return this.again(POLL_INTERVAL);
    this.busy = true;
    try {
      if (app.source?.isLive && !app.problem) await this.check();
      else await this.start();
    } catch (error) {
      this.failed(error);
    } finally {
      this.busy = false;
    }
  },

  /** Check that the server is reachable and serves the same model. */
  async check() {
    const model = await ask("api/model");
    if (model.loaded_at === app.source.model.loaded_at && model.name === app.source.model.name) return this.again(POLL_INTERVAL);
    await this.start();
  },

  async start() {
    const result = await connect();
    if (typeof result === "string") return this.waiting(result);
    const another = app.source && (app.source.model.name !== result.model.name || app.source.model.vocab_size !== result.model.vocab_size);
    app.source = result;
    app.problem = null;
    banner(null);
    pill("live", `${result.model.name} · live`);
    if (another) announce(`The model is now ${result.model.name}`);
    app.changed();
    this.again(POLL_INTERVAL);
  },

  waiting(state) {
    const words = { loading: "The model is still loading. The page continues when it is ready.", draining: "The server is shutting down." };
    const text = words[state] ?? "The model could not be loaded, or has stopped. See the server's log.";
    pill("none", state);
    banner(text);
    app.problem = state;
    if (!app.source && state === "loading") fill(document.getElementById("main"), h("div", { class: "prose" }, h("h1", {}, "Headway Lab"), h("p", { class: "lead" }, text)));
    this.again(RETRY_INTERVAL);
  },

  async failed(error) {
    if (!(error instanceof Failure)) throw error;
    if (error.kind === "key") return this.locked(error);
    app.problem = error.kind;
    if (app.source?.isLive) {
      pill("none", `${app.source.model.name} · gone`);
      banner(`${error.message} The page keeps its state and continues when the server is back.`, ["Try again", () => this.poll()]);
      return this.again(RETRY_INTERVAL);
    }
    if (!app.source) await this.offline();
  },

  /** No server: one recorded distribution. */
  async offline() {
    app.source = await recording();
    app.problem = null;
    pill("recorded", `${app.source.model.name} · recorded`);
    banner("This page has no server, so it shows one recorded, real distribution. Start `headway lab` for a live one.", ["Try again", () => this.start().catch(() => announce("Still no server"))]);
    app.changed();
  },

  locked(error) {
    app.problem = "key";
    pill("none", "needs a key");
    const field = h("input", { type: "password", id: "key", autocomplete: "off" });
    const use = (event) => {
      event.preventDefault();
      setKey(field.value);
      this.poll();
    };
    fill(document.getElementById("main"), h("form", { class: "prose", onsubmit: use },
      h("h1", {}, "This server needs a key"), h("p", { class: "lead" }, error.message),
      h("label", { for: "key" }, "API key"), h("div", { class: "row" }, field, h("button", { class: "main", type: "submit" }, "Open the Lab")),
      h("p", { class: "soft small" }, "It is kept for this tab only, and sent only to this server.")));
    shown = null;
  },
};

function pill(kind, text) {
  const place = document.getElementById("source");
  place.dataset.kind = kind;
  place.textContent = text;
}

function banner(text, action = null) {
  const place = document.getElementById("banner");
  place.hidden = !text;
  fill(place, text && h("div", { role: "status" }, h("p", {}, text), action && h("button", { type: "button", class: "small", onclick: action[1] }, action[0])));
}

// -- routing ----------------------------------------------------------------------------------------------------------

let shown = null;

function show() {
  if (!app.source) return;
  const [name, query = ""] = location.hash.slice(1).split("?");
  const page = ["home", "read", "glossary", "lab", "program"].includes(name) ? name : name === "main" ? shown ?? "home" : "home";
  const main = document.getElementById("main");
  const moved = shown !== null && shown !== page;
  shown = page;
  for (const view of Object.values(views)) view.leave();
  if (page === "lab") views.lab.enter(main, new URLSearchParams(query));
  else if (page === "program") views.program.enter(main);
  else if (page === "glossary") fill(main, glossary());
  else if (page === "read") fill(main, reading(app));
  else views.lesson.enter(main);
  for (const link of document.querySelectorAll(".top nav a")) {
    const to = link.getAttribute("href").slice(1);
    if (to === page || (to === "home" && page === "read")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = { lab: "Your Lab", program: "A program", glossary: "Glossary", read: "Reading", home: "The forward pass and sampling" }[page] + " · Headway Lab";
  if (moved) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return document.getElementById("main").focus();
  show();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && app.source?.isLive) watch.again(100); });

// -- theme ------------------------------------------------------------------------------------------------------------

const THEMES = [["", "Auto", "system colors"], ["light", "Light", "colors"], ["dark", "Dark", "colors"]];
function paint(name) {
  const [value, label, spoken] = THEMES.find(([one]) => one === name) ?? THEMES[0];
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
  const button = document.getElementById("theme");
  button.textContent = label;
  button.setAttribute("aria-label", `${label}: ${spoken}`);
}
let theme = localStorage.getItem("headway-theme") ?? "";
paint(theme);
document.getElementById("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.findIndex(([one]) => one === theme) + 1) % THEMES.length][0];
  localStorage.setItem("headway-theme", theme);
  paint(theme);
});

watch.poll();
