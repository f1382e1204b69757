// A permanent link: prompt, sampling parameters, seed, mask and tree as text after the # of the URL. No server sees it.

import { OFF } from "./sampling.js";

export const VERSION = 1;
export const TABS = ["next", "tree", "lens", "attention", "engine", "call"];
const RANGES = {
  temperature: [0, 100], top_k: [0, 1e7, true], top_p: [1e-9, 1], min_p: [0, 1], typical_p: [1e-9, 1], epsilon_cutoff: [0, 0.999999999], eta_cutoff: [0, 0.999999999],
  repetition_penalty: [1e-3, 100], presence_penalty: [-100, 100], frequency_penalty: [-100, 100],
};
const MAX_NODES = 4096;

/** The state as text for a URL. */
export function encode(state) {
  const { prompt, chat, params, seed, bias, mask, tree, at, tab, model } = state;
  const text = JSON.stringify({ v: VERSION, model, prompt, chat, params, seed, bias: [...bias], mask, tree, at, tab });
  const octets = new TextEncoder().encode(text);
  let raw = "";
  for (const octet of octets) raw += String.fromCharCode(octet);
  return btoa(raw).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** The state in a link's text; throws an Error that says what is wrong with it. */
export function decode(text) {
  let result;
  try {
    const raw = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    result = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(raw, (c) => c.charCodeAt(0))));
  } catch {
    throw new Error("it is incomplete or was changed");
  }
  if (result === null || typeof result !== "object" || result.v !== VERSION) throw new Error(`it has version ${JSON.stringify(result?.v)?.slice(0, 20)}; this page reads version ${VERSION}`);
  must(typeof result.prompt === "string" || wholes(result.prompt), "it has no prompt");
  must(Number.isSafeInteger(result.seed) && result.seed >= 0, "its seed is not an integer");
  must(Array.isArray(result.tree) && result.tree.length <= MAX_NODES, "its tree is not a list, or too long");
  result.tree.forEach((node, i) => must(Array.isArray(node) && node.length === 2 && node.every(Number.isSafeInteger) && node[0] >= 0 && node[1] >= -1 && node[1] < i, `node ${i} of its tree has no parent`));
  must(Number.isSafeInteger(result.at) && result.at >= -1 && result.at < result.tree.length, "its current node does not exist");
  return {
    model: String(result.model ?? ""), prompt: result.prompt, chat: result.chat === true, params: readParams(result.params), seed: result.seed,
    bias: readBias(result.bias ?? []), mask: readMask(result.mask ?? null), tree: result.tree, at: result.at, tab: TABS.includes(result.tab) ? result.tab : "next",
  };
}

function must(holds, what) {
  if (!holds) throw new Error(what);
}

const wholes = (list) => Array.isArray(list) && list.every((n) => Number.isSafeInteger(n) && n >= 0);

export function readParams(given) {
  must(given && typeof given === "object", "it has no sampling parameters");
  const params = { ...OFF };
  for (const [name, [low, high, isWhole]] of Object.entries(RANGES)) {
    const value = given[name] ?? OFF[name];
    must(typeof value === "number" && value >= low && value <= high && (!isWhole || Number.isInteger(value)), `its ${name} is ${String(value).slice(0, 20)}`);
    params[name] = value;
  }
  return params;
}

function readBias(list) {
  must(Array.isArray(list) && list.length <= 256 && list.every((pair) => Array.isArray(pair) && pair.length === 2 && Number.isSafeInteger(pair[0]) && pair[0] >= 0 && Number.isFinite(pair[1])), "its bias is not a list of tokens and numbers");
  return new Map(list);
}

function readMask(mask) {
  if (mask === null) return null;
  must(typeof mask === "object" && ["window", "sink", "cells"].includes(mask.kind) && ["last", "all"].includes(mask.bind), "its mask has an unknown kind");
  const number = (n, low) => Number.isSafeInteger(n) && n >= low && n <= 1e6;
  if (mask.kind === "cells") {
    must(Array.isArray(mask.runs) && mask.runs.length > 0 && mask.runs.length <= 512 && mask.runs.every(wholes), "its mask has no runs");
    return { kind: "cells", bind: mask.bind, runs: mask.runs };
  }
  must(number(mask.window, 1), "its mask's window is not a number");
  if (mask.kind === "sink") must(number(mask.sink, 0), "its mask's sink is not a number");
  return { kind: mask.kind, bind: mask.bind, window: mask.window, ...(mask.kind === "sink" ? { sink: mask.sink } : {}) };
}
