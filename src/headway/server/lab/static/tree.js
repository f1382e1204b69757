// The tree of branches of one prompt, each token colored by its probability or by the entropy at its position, and the
// pages that the branches share.

import { tint } from "./charts.js";
import { chip, fill, h, many, percent, settled, table } from "./dom.js";
import { draw } from "./sampling.js";

const GROW = 8;
const MOST = 64; // branches per request

export function treePanel(lab, body) {
  const cached = (lab.branchCache ??= { by: "probability", key: "", response: null });
  const picture = h("div", {});
  const shared = h("div", { class: "panel" });
  const refresh = settled(150, () => load());
  let growing = false;

  function redraw() {
    const scores = nodeScores(lab, cached.response);
    const by = cached.by;
    const radio = (value, label) => h("label", { class: "row inline" }, h("input", { type: "radio", name: "by", id: `by-${value}`, value, checked: by === value, onchange: () => { cached.by = value; redraw(); } }), label);
    fill(picture, h("div", { class: "panel" },
      h("div", { class: "spread" }, h("h2", {}, "Branches"), h("span", { class: "row", role: "radiogroup", "aria-label": "Color by" }, h("span", { class: "soft small" }, "color by"), radio("probability", "probability"), radio("entropy", "entropy"))),
      h("div", { class: "row" },
        h("button", { type: "button", id: "take-best", class: "small", onclick: () => lab.take(lab.now.row.order[0]) }, "Add the best"),
        h("button", { type: "button", id: "take-drawn", class: "small", onclick: () => lab.take(draw(lab.stages, lab.state.seed, lab.now.trace.position)[0]) }, "Sample one"),
        h("button", { type: "button", id: "grow", class: "small", onclick: grow, disabled: growing }, `Sample ${GROW}`),
        h("button", { type: "button", class: "small", onclick: () => lab.back(), disabled: lab.state.at < 0 }, "Back"),
        h("button", { type: "button", class: "quiet small", onclick: () => { lab.state.tree = []; lab.goTo(-1); }, disabled: !lab.state.tree.length }, "Clear the tree")),
      h("div", { class: "tree", role: "group", "aria-label": "The tree" },
        h("button", { type: "button", class: `chip root ${lab.state.at < 0 ? "here" : ""}`, onclick: () => lab.goTo(-1), "aria-current": lab.state.at < 0 ? "true" : null }, promptText(lab)),
        branch(lab, -1, scores, by)),
      h("p", { class: "soft small" }, lab.state.tree.length ? `${many(lab.state.tree.length, "token")} added. Press one to go there; add another one to branch.` : "Add a token, go back, add another one: the tree branches.", " Colors run from dark (0) to yellow (", by === "probability" ? "100%" : "6 nats and more", "); the number is in each token.")));
  }

  /** Sample some tokens one after the other, as a generation does. */
  async function grow() {
    growing = true;
    const source = lab.source;
    for (let i = 0; i < GROW && lab.main && lab.source === source; i++) {
      const before = lab.state.at;
      await lab.take(draw(lab.stages, lab.state.seed, lab.now.trace.position)[0]);
      if (lab.state.at === before || lab.state.tab !== "tree") break;
    }
    growing = false;
    if (lab.main && lab.state.tab === "tree") redraw();
  }

  async function load() {
    const leaves = leavesOf(lab.state.tree).slice(0, MOST);
    if (!leaves.length) return drawShared(shared, null, lab);
    const key = JSON.stringify([lab.state.prompt, lab.state.chat, lab.state.tree]);
    if (cached.key !== key) {
      try {
        cached.response = await lab.source.branches({ prompt: await lab.promptFor(), branches: leaves.map((leaf) => lab.path(leaf)) });
        cached.leaves = leaves;
        cached.key = key;
      } catch (error) {
        return fill(shared, h("h2", {}, "Pages"), h("p", { class: "soft" }, error.message));
      }
    }
    if (!lab.main || lab.state.tab !== "tree") return;
    redraw();
    drawShared(shared, cached.response, lab);
  }

  fill(body, picture, shared);
  redraw();
  drawShared(shared, null, lab);
  refresh();
  return { numbers: redraw };
}

function promptText(lab) {
  const text = lab.now.trace.texts.slice(0, lab.now.trace.prompt_tokens).join("");
  return text.length > 48 ? `…${text.slice(-46)}` : text;
}

const childrenOf = (tree, node) => tree.flatMap(([, parent], i) => (parent === node ? [i] : []));
const leavesOf = (tree) => tree.map((_, i) => i).filter((i) => !tree.some(([, parent]) => parent === i));

/** Scores by node, from the computed branches. */
function nodeScores(lab, response) {
  const result = new Map();
  if (!response || lab.branchCache.key !== JSON.stringify([lab.state.prompt, lab.state.chat, lab.state.tree])) return result;
  lab.branchCache.leaves.forEach((leaf, i) => {
    const nodes = [];
    for (let at = leaf; at >= 0; at = lab.state.tree[at][1]) nodes.unshift(at);
    nodes.forEach((node, k) => result.set(node, response.branches[i].scores[k]));
  });
  return result;
}

/** A run of tokens without a fork on one line; after a fork, one line for each child. */
function branch(lab, node, scores, by) {
  const line = [];
  let at = node;
  for (;;) {
    const children = childrenOf(lab.state.tree, at);
    if (children.length !== 1 || (at === node && node === -1)) {
      if (at !== node || node !== -1) return children.length ? [line, forks(lab, children, scores, by)] : line;
      return children.length ? forks(lab, children, scores, by) : line;
    }
    [at] = children;
    line.push(nodeChip(lab, at, scores, by));
  }
}

function forks(lab, children, scores, by) {
  return h("ul", { class: "forks" }, children.map((child) => h("li", {}, h("div", { class: "chips" }, nodeChip(lab, child, scores, by), branch(lab, child, scores, by)))));
}

function nodeChip(lab, node, scores, by) {
  const [token] = lab.state.tree[node];
  const score = scores.get(node);
  const p = score ? Math.exp(score.logprob ?? -Infinity) : null;
  const value = !score ? null : by === "probability" ? p : Math.min(1, score.entropy / 6);
  const label = !score ? "…" : by === "probability" ? percent(p) : `${score.entropy.toFixed(2)}`;
  const here = lab.state.at === node;
  return chip(lab.text(token), {
    class: `node ${here ? "here" : ""}`, onclick: () => lab.goTo(node), "aria-current": here ? "true" : null,
  }, h("span", { class: "value num", style: value === null ? {} : tint(value) }, label));
}

/** Which pages the branches hold, and which they share. */
function drawShared(place, response, lab) {
  if (!response || !lab.state.tree.length) {
    return fill(place, h("h2", {}, "Pages the branches share"), h("p", { class: "soft" }, "Every branch is a fork of one context. Full pages are shared; only what differs is stored twice. Add a token to see it."));
  }
  const uses = new Map();
  for (const one of response.branches) for (const { page } of one.pages) uses.set(page, (uses.get(page) ?? 0) + 1);
  return fill(place, h("h2", {}, "Pages the branches share"),
    h("p", {}, h("strong", {}, many(response.pages, "page")), ` for ${many(response.branches.length, "branch", "branches")}; without sharing it would be `, h("strong", { class: "num" }, response.pages_alone), `. A page has ${response.page_size} slots, and is shared once it is full. ${response.batch_size > 1 ? `${response.batch_size} branches were computed in one step.` : ""}`),
    table("Pages of each branch", ["Branch", "Pages, first to last"], response.branches.map((one) => [
      h("span", { class: "mono clip" }, one.tokens.map((id) => lab.text(id)).join("")),
      h("span", { class: "chips" }, one.pages.map(({ page, state }) => h("span", { class: `page ${uses.get(page) > 1 ? "shared" : state}` }, h("span", { class: "num" }, `#${page ?? "–"}`), h("small", {}, uses.get(page) > 1 ? `shared by ${uses.get(page)}` : state))))]), { class: "pages" }));
}
