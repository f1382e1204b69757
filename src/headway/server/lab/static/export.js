// Exports what is on the page: everything as JSON, the distribution as an image.

import { fixed, percent, whole } from "./dom.js";
import { distribution, entropyOf, probAt } from "./sampling.js";

/** Everything, including the logits. */
export function exportJson(lab) {
  const result = lab.stages;
  const { trace, row } = lab.now;
  const { ids, probs } = distribution(result);
  const data = {
    made_by: "Headway Lab", link: lab.address, model: lab.source.model.name, recorded: !lab.source.isLive,
    prompt: lab.state.prompt, tokens: trace.tokens, texts: trace.texts, params: lab.state.params, seed: lab.state.seed,
    bias: Object.fromEntries(lab.state.bias), mask: lab.state.mask, tree: lab.state.tree, at: lab.state.at, entropy: { model: row.entropy, final: entropyOf(probs) },
    stages: result.map(({ name, ids: kept, kept: share }) => ({ name, tokens: kept.length, share })),
    top: Array.from(row.order.slice(0, 64), (id) => ({ id, text: lab.text(id), logit: row.logits[id], model: row.probs[id], final: probAt(result.at(-1), id) })),
    final: ids.length <= 4096 ? { ids: Array.from(ids), probs: Array.from(probs) } : null,
    logits: trace.logits,
  };
  save(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }), "headway-lab.json");
}

/** The distribution as an image, in the colors of the page. */
export function exportPng(lab) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const result = lab.stages;
  const last = result.at(-1);
  const { row, trace } = lab.now;
  const top = Array.from(row.scored(lab.state.params, lab.past, lab.state.bias).order.slice(0, 16));
  const [width, height, scale] = [1000, 190 + top.length * 34, 2];
  const canvas = Object.assign(document.createElement("canvas"), { width: width * scale, height: height * scale });
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = color("--bg");
  pen.fillRect(0, 0, width, height);
  const write = (text, x, y, { font = "16px sans-serif", ink = "--ink", align = "left", most = undefined } = {}) => {
    Object.assign(pen, { font, fillStyle: color(ink), textAlign: align });
    pen.fillText(text, x, y, most);
  };
  const prompt = trace.texts.join("");
  write(`${prompt.length > 90 ? "…" : ""}${prompt.slice(-90).replaceAll("\n", "↵")}`, 40, 56, { font: "600 24px Georgia, serif", most: width - 80 });
  const k = lab.state.params;
  write(`${lab.source.model.name} · T ${k.temperature} · top-k ${k.top_k || "off"} · top-p ${k.top_p < 1 ? k.top_p : "off"} · min-p ${k.min_p || "off"} · typical ${k.typical_p < 1 ? k.typical_p : "off"}${k.epsilon_cutoff ? ` · epsilon ${k.epsilon_cutoff}` : ""}${k.eta_cutoff ? ` · eta ${k.eta_cutoff}` : ""} · seed ${lab.state.seed}`, 40, 88, { ink: "--soft", most: width - 80 });
  write(`${whole(last.ids.length)} of ${whole(row.size)} tokens stay · entropy ${fixed(entropyOf(distribution(result).probs))} nats · bars from 0 to 100%`, 40, 114, { ink: "--soft", most: width - 80 });
  top.forEach((id, i) => {
    const y = 150 + i * 34;
    const p = probAt(last, id);
    write(JSON.stringify(lab.text(id)).slice(1, -1).replaceAll(" ", "·").slice(0, 18), 230, y + 16, { font: "16px monospace", align: "right", most: 185, ink: p > 0 ? "--ink" : "--soft" });
    pen.fillStyle = color("--bar");
    pen.fillRect(245, y, Math.max(1, 590 * p), 22);
    write(p > 0 ? percent(p) : "cut", width - 40, y + 16, { font: "16px monospace", align: "right" });
  });
  canvas.toBlob((blob) => save(blob, "headway-lab.png"));
}

function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}
