// Your Lab: any prompt, every sampling parameter, the tree of branches, and the inside of the pass. This file holds
// the state and the frame; each tab has its own file.

import { unpack } from "./api.js";
import { attentionPanel } from "./attention.js";
import { callPanel } from "./call.js";
import { announce, chip, copyButton, fill, h, many, perFrame, settled, whole } from "./dom.js";
import { enginePanel } from "./engine.js";
import { exportJson, exportPng } from "./export.js";
import { lensPanel } from "./lens.js";
import { decode, encode } from "./link.js";
import { nextPanel } from "./next.js";
import { history, OFF, Row, stages } from "./sampling.js";
import { teacher } from "./teacher.js";
import { treePanel } from "./tree.js";
import { LESSON_PROMPT } from "./words.js";

const PANELS = [
  ["next", "Next token", nextPanel], ["tree", "Tree", treePanel], ["lens", "Logit lens", lensPanel],
  ["attention", "Attention & mask", attentionPanel], ["engine", "Pages & time", enginePanel], ["call", "The same call", callPanel],
];
const EXAMPLES = [
  LESSON_PROMPT, "Kubernetes pods are scheduled by the", "The capital of France is", "In the morning she likes to drink a cup of",
  "def fibonacci(n):\n    ", "Q: What is 2 + 3?\nA:",
];
const MAX_TRACES = 48; // traces to keep

export class LabView {
  constructor(app) {
    this.app = app;
    this.source = null;
    this.state = fresh();
    this.cache = new Map();
    this.now = null; // {trace, row} of the current node
    this.main = null;
    this.problem = null;
    this.loading = null;
    this.renumber = perFrame(() => this.panel?.numbers?.());
    this.remember = settled(250, () => this.writeLink());
  }

  // -- entering and leaving ---------------------------------------------------------------------------------------------

  enter(main, query) {
    this.main = main;
    const given = query.get("s");
    if (given && given !== this.written) this.openLink(given);
    if (this.source !== this.app.source) this.changeSource();
    this.frame();
    this.say(this.problem);
    if (this.now) this.problem = null;
    if (this.now) this.drawPanel();
    else this.load();
  }

  leave() {
    this.panel?.leave?.();
    this.panel = null;
    this.main = null;
  }

  changeSource() {
    const old = this.source?.model;
    this.source = this.app.source;
    this.cache.clear();
    this.now = null;
    if (old && old.vocab_size !== this.source.model.vocab_size) {
      Object.assign(this.state, { tree: [], at: -1, bias: new Map(), mask: null });
    }
    if (!this.source.isLive && this.state.prompt !== this.source.data.prompt) Object.assign(this.state, { prompt: this.source.data.prompt, chat: false, tree: [], at: -1 });
    if (!this.source.model.has_tokenizer && typeof this.state.prompt === "string") this.state.prompt = [1, 2, 3, 4, 5];
  }

  openLink(text) {
    try {
      const result = decode(text);
      const model = this.app.source.model.name;
      this.state = result;
      this.now = null;
      this.problem = result.model && result.model !== model ? `This link was made with ${result.model}; this server has ${model}. Its tokens may differ.` : null;
    } catch (error) {
      this.problem = `This link cannot be read: ${error.message}. The Lab starts with default values instead.`;
      history_(location.pathname + location.search + "#lab");
    }
  }

  writeLink() {
    if (!this.main || !/^#(lab|main)\b/.test(location.hash)) return; // the visitor is leaving: the address is already another page's
    this.written = encode({ ...this.state, model: this.source.model.name });
    history_(`#lab?s=${this.written}`);
  }

  get address() {
    return location.href.split("#")[0] + `#lab?s=${encode({ ...this.state, model: this.source.model.name })}`;
  }

  // -- the pass ---------------------------------------------------------------------------------------------------------

  /** The tokens from the prompt to a node. */
  path(node = this.state.at) {
    const tokens = [];
    for (let at = node; at >= 0; at = this.state.tree[at][1]) tokens.unshift(this.state.tree[at][0]);
    return tokens;
  }

  /** The API's prompt: text, or the token ids of a chat. */
  async promptFor() {
    const { prompt, chat } = this.state;
    if (!chat || typeof prompt !== "string") return prompt;
    if (this.chatFor !== prompt) [this.chatFor, this.chatIds] = [prompt, await this.source.chatIds(prompt)];
    return this.chatIds;
  }

  async load() {
    this.loading?.abort();
    const mine = (this.loading = new AbortController());
    const take = this.path();
    const key = JSON.stringify([this.state.prompt, this.state.chat, take]);
    this.busy(true);
    try {
      let result = this.cache.get(key);
      if (!result) {
        const trace = await this.source.trace({ prompt: await this.promptFor(), take }, mine.signal);
        result = { trace, row: new Row(unpack(trace.logits)), extra: {} };
        this.cache.set(key, result);
        if (this.cache.size > MAX_TRACES) this.cache.delete(this.cache.keys().next().value);
      }
      if (mine !== this.loading) return;
      this.now = result;
      this.say(this.problem);
      this.problem = null;
      if (this.main) this.drawPanel();
      this.remember();
    } catch (error) {
      if (mine.signal.aborted || mine !== this.loading) return;
      this.app.trouble(error);
      this.say(error.message, true);
      if (this.main && !this.now) this.drawPanel();
    } finally {
      if (mine === this.loading) this.busy(false);
    }
  }

  /** The tokens that penalties count at the current node. */
  get past() {
    const { tokens, prompt_tokens: count } = this.now.trace;
    return history(tokens.slice(0, count), tokens.slice(count));
  }

  get stages() {
    return stages(this.now.row, this.state.params, this.past, this.state.bias);
  }

  text(id) { return this.source.text(id); }

  /** What the teacher sees: the distribution, and what the sampling parameters make of it. */
  get screen() {
    if (!this.now) return null;
    const { params, bias, seed } = this.state;
    return { ...this.now, source: this.source, past: this.past, params, bias, seed, result: this.stages, text: (id) => this.text(id) };
  }

  // -- changing ---------------------------------------------------------------------------------------------------------

  /** Add a token: go to its node, which is created if it does not exist. */
  async take(token) {
    const { tree, at } = this.state;
    let node = tree.findIndex(([id, parent]) => id === token && parent === at);
    if (node < 0) node = tree.push([token, at]) - 1;
    this.state.at = node;
    announce(`Took ${this.text(token)}`);
    await this.load();
  }

  async goTo(node) {
    this.state.at = node;
    await this.load();
  }

  back() {
    if (this.state.at >= 0) this.goTo(this.state.tree[this.state.at][1]);
  }

  setParams(params) {
    Object.assign(this.state.params, params);
    this.renumber();
    this.remember();
  }

  // -- the frame --------------------------------------------------------------------------------------------------------

  frame() {
    const isText = this.source.model.has_tokenizer;
    const shown = typeof this.state.prompt === "string" ? this.state.prompt : this.state.prompt.join(" ");
    this.box = h("textarea", { id: "prompt", rows: 2, spellcheck: "false", value: shown });
    this.box.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run(event); });
    const chat = h("input", { type: "checkbox", id: "as-chat", checked: this.state.chat, disabled: !this.source.isLive || !this.source.model.has_chat });
    this.chatBox = chat;
    const examples = h("select", { id: "examples", "aria-label": "Example prompts", onchange: () => { if (examples.value) { this.box.value = examples.value; this.run(new Event("x")); } } },
      h("option", { value: "" }, "Examples …"), EXAMPLES.map((text) => h("option", { value: text }, text.replaceAll("\n", " ↵ "))));
    this.message = h("div", { id: "lab-message", role: "alert" });
    this.spinner = h("span", { class: "soft small", role: "status" });
    this.crumbs = h("div", { class: "crumbs" });
    this.body = h("div", { id: "panel", role: "tabpanel", tabindex: "-1", "aria-labelledby": `tab-${this.state.tab}` });
    fill(this.main, h("div", { class: "lab" },
      h("div", { class: "lab-head" }, h("h1", {}, "Your Lab"), h("p", { class: "soft" }, facts(this.source))),
      h("form", { class: "panel prompt", onsubmit: (event) => this.run(event) },
        h("label", { for: "prompt" }, isText ? "Prompt" : "Prompt, as token ids (this model has no tokenizer)"), this.box,
        h("div", { class: "row" }, h("button", { type: "submit", class: "main", id: "run" }, "Run the pass"),
          isText && h("div", { class: "narrow" }, examples),
          this.source.model.has_chat && h("label", { class: "row inline" }, chat, "as a chat message"), this.spinner,
          h("span", { class: "row push" },
            copyButton(() => this.address, "Copy link"),
            h("button", { type: "button", class: "quiet small", onclick: () => this.now && exportJson(this) }, "JSON"),
            h("button", { type: "button", class: "quiet small", onclick: () => this.now && exportPng(this) }, "PNG"))),
        this.message, this.crumbs),
      this.tabs(), this.body,
      teacher(this.app, () => this.screen)));
  }

  run(event) {
    event.preventDefault?.();
    let prompt = this.box.value;
    if (!this.source.model.has_tokenizer) {
      prompt = prompt.trim() === "" ? [] : prompt.trim().split(/[\s,]+/).map(Number);
      if (!prompt.every((id) => Number.isInteger(id) && id >= 0)) return this.say("Token ids must be integers, separated by spaces.", true);
    }
    Object.assign(this.state, { prompt, chat: this.chatBox.checked, tree: [], at: -1 });
    if (this.state.mask?.kind === "cells") this.state.mask = null;
    this.load();
  }

  tabs() {
    const buttons = PANELS.map(([id, label]) => h("button", {
      type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "panel", "aria-selected": String(id === this.state.tab), tabindex: id === this.state.tab ? "0" : "-1",
      onclick: () => this.openTab(id),
    }, label));
    return h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the pass", onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const ends = { Home: 0, End: PANELS.length - 1 }[event.key];
      if (step === undefined && ends === undefined) return;
      event.preventDefault();
      const at = PANELS.findIndex(([id]) => id === this.state.tab);
      const to = ends ?? (at + step + PANELS.length) % PANELS.length;
      this.openTab(PANELS[to][0]);
      buttons[to].focus();
    } }, buttons);
  }

  openTab(id) {
    this.state.tab = id;
    for (const button of this.main.querySelectorAll("[role=tab]")) {
      const mine = button.id === `tab-${id}`;
      button.setAttribute("aria-selected", String(mine));
      button.tabIndex = mine ? 0 : -1;
    }
    this.body.setAttribute("aria-labelledby", `tab-${id}`);
    this.drawPanel();
    this.remember();
  }

  drawPanel() {
    this.panel?.leave?.();
    this.panel = null;
    this.drawCrumbs();
    if (!this.now) return fill(this.body, h("p", { class: "soft" }, "There is no distribution yet. Run a prompt."));
    this.panel = PANELS.find(([id]) => id === this.state.tab)[2](this, this.body);
  }

  /** The tokens of the pass; those that were added link to their nodes. */
  drawCrumbs() {
    if (!this.now) return fill(this.crumbs);
    const { texts, prompt_tokens: count } = this.now.trace;
    const nodes = [];
    for (let at = this.state.at; at >= 0; at = this.state.tree[at][1]) nodes.unshift(at);
    const far = Math.max(0, count - 24);
    fill(this.crumbs, h("span", { class: "soft small" }, many(texts.length, "token")),
      far > 0 && h("span", { class: "soft small" }, `… ${whole(far)} before`),
      texts.slice(far, count).map((text) => chip(text)),
      nodes.map((node, i) => chip(texts[count + i], { class: "taken", onclick: () => this.goTo(node), title: "press to go there" })),
      this.state.at >= 0 && h("button", { type: "button", class: "quiet small", id: "back", onclick: () => this.back() }, "← Back"));
  }

  say(text, bad = false) {
    if (this.main) fill(this.message, text && h("div", { class: "note", "data-bad": bad }, h("p", {}, text)));
  }

  busy(on) {
    if (this.main) this.spinner.textContent = on ? "computing …" : "";
  }
}

function history_(address) {
  window.history.replaceState(null, "", address);
}

function fresh() {
  return { prompt: LESSON_PROMPT, chat: false, params: { ...OFF }, seed: 7, bias: new Map(), mask: null, tree: [], at: -1, tab: "next" };
}

function facts(source) {
  const { model } = source;
  const parts = [model.name, `${whole(model.vocab_size)} tokens`, `${model.layers} layers`, `${model.heads} heads`, `${(model.parameters / 1e6).toFixed(0)} M parameters`];
  parts.push(`weights ${model.format}`, source.isLive ? `computed in ${model.dtype} on ${model.device}` : "recorded");
  return parts.join(" · ");
}
