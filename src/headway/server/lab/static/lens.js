// The logit lens: which token would the model predict if it ended at each layer?

import { bars } from "./charts.js";
import { chip, fill, h, percent, table } from "./dom.js";

const DEPTH = 64; // likeliest tokens of each layer in which to look for the final token
const COLUMNS = 5;

export function lensPanel(lab, body) {
  const now = lab.now;
  fill(body, h("p", { class: "soft", role: "status" }, "Reading every layer …"));
  load(lab, now).then((layers) => {
    if (now === lab.now && lab.main && lab.state.tab === "lens") fill(body, view(lab, layers));
  }).catch((error) => {
    if (now === lab.now && lab.main) fill(body, h("div", { class: "note" }, h("p", {}, error.message)));
  });
  return {};
}

async function load(lab, now) {
  if (!now.extra.lens) {
    const { tokens, prompt_tokens: count, lens } = now.trace;
    now.extra.lens = lens ?? (await lab.source.trace({ prompt: tokens.slice(0, count), take: tokens.slice(count), logits: false, lens: { k: Math.min(DEPTH, now.row.size) } })).lens;
  }
  return now.extra.lens;
}

function view(lab, layers) {
  const answer = layers.at(-1).ids[0];
  const rank = (layer) => layer.ids.indexOf(answer) + 1;
  let wins = layers.length - 1;
  while (wins > 0 && layers[wins - 1].ids[0] === answer) wins--;
  const first = layers.findIndex((layer) => layer.ids[0] === answer);
  const name = (i) => (layers[i].layer === 0 ? "the embedding" : `layer ${layers[i].layer}`);
  return h("div", {}, h("div", { class: "panel" }, h("h2", {}, "At which layer does the final token take the lead?"),
    h("p", {}, chip(lab.text(answer)), ` is the model's final best token. It leads from `, h("strong", {}, name(wins)), ` on`, first < wins ? `; it led before at ${name(first)}.` : "."),
    bars(layers.map((layer, i) => {
      const place = rank(layer);
      return { text: layer.layer === 0 ? "emb" : `L${layer.layer}`, value: place ? layer.probs[place - 1] : 0, second: i >= wins, label: place ? `${percent(layer.probs[place - 1])} · #${place}` : `> #${layer.ids.length}` };
    }), { dense: true }),
    h("p", { class: "soft small" }, "Each bar: the probability of that token if the model ended at this layer, and its rank there. Orange from the layer where it leads.")),
  h("details", { class: "panel", open: true }, h("summary", {}, h("h2", {}, "Layer by layer")),
    table("The likeliest tokens of each layer", ["Layer", ...Array.from({ length: COLUMNS }, (_, i) => `#${i + 1}`)], [...layers].reverse().map((layer) => [
      layer.layer === 0 ? "embedding" : layer.layer,
      ...layer.ids.slice(0, COLUMNS).map((id, i) => h("span", { class: id === answer ? "answer-cell" : "" }, chip(lab.text(id)), " ", h("span", { class: "num soft small" }, percent(layer.probs[i]))))]), { class: "lens" })));
}
