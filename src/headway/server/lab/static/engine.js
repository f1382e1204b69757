// Inside the engine, live: the state of every page, where the time of a pass goes, and the latest steps.

import { ask } from "./api.js";
import { bars, withOthers } from "./charts.js";
import { bytes, fill, h, many, ratio, s, seconds, table, whole } from "./dom.js";

const POLL_INTERVAL = 700; // milliseconds
const STEPS = 60;
const CELL = 9;
const MEANING = { free: "not in use", cached: "kept in the prefix cache", working: "not full yet, one owner", committed: "full, will not change", shared: "held by several contexts" };

export function enginePanel(lab, body) {
  const map = h("div", { class: "panel" });
  const time = h("div", { class: "panel" });
  const line = h("div", { class: "panel" });
  if (!lab.source.isLive) {
    fill(body, h("div", { class: "panel" }, h("h2", {}, "Pages and time"), h("p", {}, "These are live views of an engine, and this page has none. Start `headway lab`.")));
    return {};
  }
  const steps = [];
  let timer = 0;
  let over = false;

  async function poll() {
    try {
      const [pages, recent] = await Promise.all([ask("api/pages"), ask(`api/steps?after=${steps.at(-1)?.step ?? -1}`)]);
      if (over) return;
      steps.push(...recent.steps);
      steps.splice(0, Math.max(0, steps.length - STEPS));
      drawMap(map, pages);
      drawSteps(line, steps, () => run(lab));
    } catch (error) {
      if (!over) lab.app.trouble(error);
    }
    if (!over) timer = setTimeout(poll, document.hidden ? 5 * POLL_INTERVAL : POLL_INTERVAL);
  }

  fill(body, map, line, time);
  fill(time, h("h2", {}, "Time of one pass"), h("button", { type: "button", id: "measure", class: "main", onclick: () => measure(lab, time) }, "Measure a pass"),
    h("p", { class: "soft" }, "Runs the prompt again and measures every phase. The first time, the memory bandwidth is measured too, which takes a moment."));
  poll();
  return { leave: () => { over = true; clearTimeout(timer); } };
}

function drawMap(place, pages) {
  const cells = [];
  for (const [state, length] of pages.runs) for (let i = 0; i < length; i++) cells.push(state);
  let used = cells.length;
  while (used > 0 && cells[used - 1] === 0) used--;
  const shown = Math.min(cells.length, Math.max(96, Math.ceil((used + 32) / 48) * 48), 4800);
  const across = 48;
  const rows = Math.ceil(shown / across);
  const width = across * (CELL + 2);
  const label = pages.states.map((state) => `${pages.counts[state]} ${state}`).join(", ");
  fill(place, h("div", { class: "spread" }, h("h2", {}, "Pages, now"), h("span", { class: "soft small" }, `${whole(pages.total)} pages of ${pages.page_size} slots · ${many(pages.contexts, "context")} · ${many(pages.queued, "pass", "passes")} waiting`)),
    s("svg", { class: "map", viewBox: `0 0 ${width} ${rows * (CELL + 2)}`, role: "img", "aria-label": `Page map: ${label}` },
      cells.slice(0, shown).map((state, i) => s("rect", { class: `p-${pages.states[state]}`, x: (i % across) * (CELL + 2), y: Math.floor(i / across) * (CELL + 2), width: CELL, height: CELL, rx: state === 4 ? CELL / 2 : 2 }))),
    shown < cells.length && h("p", { class: "soft small" }, `… and ${whole(cells.length - shown)} more, ${used <= shown ? "all free" : "not drawn"}.`),
    h("ul", { class: "legend-list" }, pages.states.map((state) => h("li", {}, s("svg", { viewBox: "0 0 10 10", class: "key", "aria-hidden": "true" }, s("rect", { class: `p-${state}`, width: 10, height: 10, rx: state === "shared" ? 5 : 2 })),
      h("strong", { class: "num" }, whole(pages.counts[state])), ` ${state} `, h("span", { class: "soft small" }, MEANING[state])))));
}

function drawSteps(place, steps, start) {
  const most = Math.max(...steps.map((step) => step.seconds), 1e-6);
  const width = Math.max(280, Math.min(640, document.documentElement.clientWidth - 72));
  const height = 120;
  const wide = width / STEPS;
  const passes = Math.max(...steps.map((step) => step.passes), 1);
  fill(place, h("div", { class: "spread" }, h("h2", {}, "The latest steps"), h("button", { type: "button", id: "programs", class: "small", onclick: start }, "Run four programs")),
    steps.length ? s("svg", { class: "chart steps", viewBox: `0 0 ${width} ${height + 18}`, role: "img", "aria-label": `The last ${steps.length} steps, the longest took ${seconds(most)}` },
      steps.map((step, i) => {
        const tall = Math.max(2, (height * step.seconds) / most);
        return s("rect", { class: step.passes > 1 ? "batch" : "bin", x: i * wide + 1, y: height - tall, width: wide - 2, height: tall, opacity: 0.45 + (0.55 * step.passes) / passes }, s("title", {}, `step ${step.step}: ${seconds(step.seconds)}, ${step.passes} passes, ${step.rows} rows`));
      }), s("text", { x: 0, y: height + 14 }, `longest ${seconds(most)}`), s("text", { x: width, y: height + 14, "text-anchor": "end" }, "now →"))
      : h("p", { class: "soft" }, "No step since you opened this view."),
    steps.length > 0 && h("p", { class: "small" }, stepWords(steps.at(-1)), h("span", { class: "soft" }, " Orange: several passes shared the step.")));
}

const stepWords = (step) => `Step ${whole(step.step)}: ${seconds(step.seconds)} for ${step.passes} ${step.passes === 1 ? "pass" : "passes"} with ${step.rows} rows; ${whole(step.tokens)} tokens computed so far, ${whole(step.cache_hits)} pages taken from the prefix cache.`;

/** Four concurrent generations from the same prompt, so that there is something to see. */
function run(lab) {
  const { tokens } = lab.now.trace;
  ask("../v1/completions", { prompt: tokens, n: 4, max_tokens: 64, temperature: 1, seed: lab.state.seed, ignore_eos: true }).catch((error) => lab.say(error.message, true));
}

async function measure(lab, place) {
  const button = place.querySelector("#measure");
  button.disabled = true;
  const { tokens, prompt_tokens: count } = lab.now.trace;
  try {
    const response = await lab.source.trace({ prompt: tokens.slice(0, count), take: tokens.slice(count), logits: false, profile: true });
    if (!place.isConnected) return;
    const { phases, seconds: all, bandwidth_limit: limit } = response.time;
    const moved = phases.reduce((sum, phase) => sum + phase.bytes, 0);
    fill(place, h("h2", {}, "Time of one pass"),
      h("p", {}, `${seconds(all)} in phases for ${response.time.tokens} ${response.time.tokens === 1 ? "token" : "tokens"}; ${bytes(moved)} moved, ${bytes(moved / all)}/s, which is ${ratio(moved / all / limit)} of the ${bytes(limit)}/s memory bandwidth measured with a plain sum.`),
      bars(withOthers(phases.map((phase) => ({ name: phase.name, value: phase.seconds / all })), 0)),
      table("Phases of the pass", ["Phase", ...["Time", "Bytes", "Bandwidth", "Of the limit"].map((text) => [text, "num"])],
        phases.map((phase) => [phase.name, seconds(phase.seconds), bytes(phase.bytes), `${bytes(phase.bytes / phase.seconds)}/s`, ratio(phase.bytes / phase.seconds / limit)])),
      h("p", { class: "soft small" }, `Pages: ${response.stats.pages}, from the prefix cache: ${response.stats.cache_hits}; passes in the step: ${response.stats.batch_size}.`),
      h("button", { type: "button", id: "measure", onclick: () => measure(lab, place) }, "Measure again"));
  } catch (error) {
    button.disabled = false;
    lab.say(error.message, true);
  }
}
