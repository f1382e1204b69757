// The data behind the lesson: one trace of its prompt, computed once for each source.

import { unpack } from "./api.js";
import { history, OFF, Row, softmax, stages } from "./sampling.js";
import { LESSON_PROMPT } from "./words.js";

export const TOP = 8;

const known = new WeakMap();

/** {source, trace, prompt, row, past, text, runs} of the lesson's prompt; `runs` holds greedy generations once made. */
export function lessonFacts(source) {
  if (!known.has(source)) {
    const result = load(source);
    known.set(source, result);
    result.catch(() => known.delete(source));
  }
  return known.get(source);
}

async function load(source) {
  const prompt = source.model.has_tokenizer ? LESSON_PROMPT : [1, 2, 3, 4, 5];
  const trace = await source.trace({ prompt });
  return { source, trace, prompt, row: new Row(unpack(trace.logits)), past: history(trace.tokens, []), text: (id) => source.text(id), runs: null };
}

/** What the teacher sees of the lesson: its distribution, without sampling parameters. */
export const lessonScreen = (facts) => ({ ...facts, params: { ...OFF }, bias: new Map(), seed: 7, result: stages(facts.row, OFF, facts.past) });

/** Probabilities of the top tokens at a temperature: of these alone, and of the whole vocabulary. */
export function heated(row, temperature) {
  const all = softmax(row.logits, temperature);
  const top = Array.from(row.order.slice(0, Math.min(TOP, row.size)));
  const mass = top.reduce((sum, id) => sum + all[id], 0);
  return { top, mass, all, ofAll: top.map((id) => all[id]), ofTop: top.map((id) => all[id] / mass) };
}
