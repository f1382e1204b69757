// A page with programs that run in this browser: their passes are computed by the server's engine, over a WebSocket.
//
// The functions below are the programs themselves, shown as they are. They use the client in client/, which is the
// package for browsers and Node, compiled.

import { Argmax, connect, Distribution, Entropy } from "./client/index.js";
import { apiKey } from "./api.js";
import { announce, fill, h } from "./dom.js";

/** The three likeliest next tokens, and how the text would go on after each: forks share the prompt's pages. */
async function branches(engine, prompt, show) {
  const ctx = engine.context();
  await ctx.fill(prompt);
  const pass = ctx.forward();
  const best = pass.probe(-1, Distribution({ k: 3 }));
  const { ids, probs } = (await pass.execute()).read(best);
  await Promise.all(ids.map(async (id, i) => {
    const fork = await ctx.fork();
    await fork.fill([id]);
    const text = await fork.generate(Argmax(), { maxTokens: 12 }).tokens();
    show(await engine.decode([id, ...text]), `${(100 * probs[i]).toFixed(1)}%`);
    fork.release();
  }));
  ctx.release();
}

/** Greedy text until the model is unsure: this program reads the entropy before each token, and decides to stop. */
async function untilUnsure(engine, prompt, show) {
  const ctx = engine.context();
  await ctx.fill(prompt);
  const tokens = [];
  for await (const step of ctx.generate(Argmax(), { maxTokens: 48, probe: Entropy() })) {
    if (step.probes[0] > 3.5) break;
    tokens.push(...step.tokens);
    show(await engine.decode(tokens), `${step.probes[0].toFixed(2)} nats`);
  }
  ctx.release();
}

const PROGRAMS = [
  ["branches", "Three ways to go on", branches, false],
  ["unsure", "Until the model is unsure", untilUnsure, true],
];

/** The page. A program ends when the page is left. */
export class ProgramView {
  constructor(app) {
    this.app = app;
    this.engine = null;
  }

  enter(main) {
    const { source } = this.app;
    this.main = main;
    const words = source.model.has_tokenizer !== false;
    this.prompt = h("input", { id: "program-prompt", type: "text", value: words ? "The weather today is" : "1 2 3" });
    fill(main, h("article", { class: "prose" },
      h("h1", {}, "A program in this browser"),
      h("p", { class: "lead" }, "A program decides which tokens go in, what is read and when to stop. These two run in this page; the passes they build are computed by the engine behind it, in the same batches as everybody else's."),
      source.isLive ? this.form() : h("div", { class: "note" }, h("p", {}, "There is no server behind this page. Start ", h("code", {}, "headway lab"), " to run programs on a live engine."))));
  }

  form() {
    return [
      h("label", { for: "program-prompt" }, "The prompt"), this.prompt,
      PROGRAMS.map(([id, title, program, isStream]) => h("section", { class: "panel", "aria-labelledby": `title-${id}` },
        h("h2", { id: `title-${id}` }, title),
        h("pre", { tabindex: "0", "aria-label": `The source of ${title}` }, h("code", {}, program.toString())),
        h("p", {}, h("button", { id: `run-${id}`, type: "button", onclick: () => this.run(id, program, isStream) }, "Run")),
        h("ol", { id: `result-${id}`, class: "program-result" }))),
    ];
  }

  async run(id, program, isStream) {
    const [button, list] = [document.getElementById(`run-${id}`), document.getElementById(`result-${id}`)];
    button.disabled = true;
    fill(list);
    const show = (text, figure) => {
      const line = h("li", {}, h("span", {}, text), " ", h("span", { class: "num soft" }, figure));
      if (isStream) fill(list, line);
      else list.append(line);
    };
    try {
      this.engine ??= await reached();
      await program(this.engine, this.engine.encode(this.prompt.value), show);
      announce("The program has ended.");
    } catch (error) {
      list.append(h("li", { class: "note" }, error.message));
    } finally {
      button.disabled = false;
    }
  }

  leave() {
    this.engine?.close();
    this.engine = null;
  }
}

/** The engine of the server that this page is from; where it has no tokenizer, texts are token ids. */
async function reached() {
  const engine = await connect(new URL("..", location.href).href, { apiKey: apiKey() || undefined });
  const isText = engine.tokenizer !== null;
  engine.encode = (text) => (isText ? text : text.split(/\s+/).filter(Boolean).map(Number));
  engine.decode = async (ids) => (isText ? engine.tokenizer.decode(ids) : ids.join(" "));
  return engine;
}
