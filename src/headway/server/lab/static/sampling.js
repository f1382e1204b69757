// From logits to a token, in float64, by the engine's rules:
//
//   logits → bias → penalties → temperature → top-k → top-p → min-p → typical → draw
//
// Each filter works on the rest of the one before it. Tokens rank by score, then by lower id; top-p and typical keep
// the shortest prefix that reaches their share; at least one token stays. Temperature 0 takes the first largest score.

export const OFF = Object.freeze({
  temperature: 1, top_k: 0, top_p: 1, min_p: 0, typical_p: 1,
  repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0,
});

/** Which tokens penalties count: all of them for repetition, those behind the prompt for presence and frequency. */
export function history(prompt, taken) {
  const counts = new Map();
  for (const id of taken) counts.set(id, (counts.get(id) ?? 0) + 1);
  return { seen: new Set([...prompt, ...taken]), counts };
}

/** Float64 scores after bias and penalties, and which ids they changed. */
export function penalised(logits, knobs, past, bias = new Map()) {
  const scores = Float64Array.from(logits);
  const changed = new Set();
  for (const [id, amount] of bias) {
    scores[id] += amount;
    changed.add(id);
  }
  if (knobs.repetition_penalty !== 1) {
    for (const id of past.seen) {
      scores[id] = scores[id] > 0 ? scores[id] / knobs.repetition_penalty : scores[id] * knobs.repetition_penalty;
      changed.add(id);
    }
  }
  if (knobs.presence_penalty !== 0 || knobs.frequency_penalty !== 0) {
    for (const [id, count] of past.counts) {
      scores[id] -= knobs.presence_penalty + knobs.frequency_penalty * count;
      changed.add(id);
    }
  }
  return { scores, changed };
}

/** The indices of `values`, best first: by value, then by lower index. */
export function ranking(values) {
  const order = new Int32Array(values.length);
  for (let i = 0; i < order.length; i++) order[i] = i;
  return order.sort((a, b) => values[b] - values[a] || a - b);
}

export function peakOf(values) {
  let peak = -Infinity;
  for (const value of values) if (value > peak) peak = value;
  return peak;
}

/** Probabilities of all tokens at a temperature above 0. */
export function softmax(scores, temperature = 1) {
  const peak = peakOf(scores);
  const probs = new Float64Array(scores.length);
  let sum = 0;
  for (let i = 0; i < probs.length; i++) {
    const below = scores[i] === peak ? 0 : scores[i] - peak;
    sum += probs[i] = Math.exp(below / temperature);
  }
  for (let i = 0; i < probs.length; i++) probs[i] /= sum;
  return probs;
}

export function entropyOf(probs) {
  let sum = 0;
  for (const p of probs) if (p > 0) sum -= p * Math.log(p);
  return sum;
}

/** A row of logits on which sliders can be moved: what does not depend on a slider is worked out once. */
export class Row {
  constructor(logits) {
    this.logits = logits;
    this.size = logits.length;
    this.order = ranking(logits);
    this.probs = softmax(logits);
    this.entropy = entropyOf(this.probs);
    this._key = null;
    this._scored = null;
  }

  /** Scores after bias and penalties with their ranking; kept until one of these changes. */
  scored(knobs, past, bias) {
    const key = JSON.stringify([knobs.repetition_penalty, knobs.presence_penalty, knobs.frequency_penalty,
      [...bias], [...past.seen], [...past.counts]]);
    if (key !== this._key) {
      const { scores, changed } = penalised(this.logits, knobs, past, bias);
      this._scored = { scores, changed, order: changed.size ? ranking(scores) : this.order };
      this._key = key;
    }
    return this._scored;
  }
}

/**
 * Every stage of one choice: [{name, ids, weights, sum, kept}], ids rising, weights relative to the best token, `kept`
 * the share of the stage before. The last stage's weights are what is drawn from.
 */
export function stages(row, knobs, past = history([], []), bias = new Map()) {
  const { scores, changed, order } = row.scored(knobs, past, bias);
  const all = alive(scores);
  const found = [stage("penalties", all, weigh(all, scores, 1), null)];
  found[0].changed = changed;
  if (knobs.temperature === 0) {
    const best = order[0];
    found.push(stage("temperature", Int32Array.of(best), Float64Array.of(1), found[0]));
    for (const name of ["top_k", "top_p", "min_p", "typical_p"]) found.push({ ...found[1], name, kept: 1 });
    return found;
  }
  const hot = weigh(all, scores, knobs.temperature);
  found.push(stage("temperature", all, hot, null));
  let ids = all;
  if (knobs.top_k > 0 && knobs.top_k < ids.length) ids = rising(firstAlive(order, scores, knobs.top_k));
  found.push(stage("top_k", ids, weigh(ids, scores, knobs.temperature), found.at(-1)));
  if (knobs.top_p < 1) ids = prefix(ids, found.at(-1), knobs.top_p, order);
  found.push(stage("top_p", ids, weigh(ids, scores, knobs.temperature), found.at(-1)));
  if (knobs.min_p > 0) {
    const { weights } = found.at(-1);
    ids = ids.filter((_, i) => weights[i] >= knobs.min_p);
  }
  found.push(stage("min_p", ids, weigh(ids, scores, knobs.temperature), found.at(-1)));
  if (knobs.typical_p < 1) ids = typical(ids, scores, found.at(-1), knobs);
  found.push(stage("typical_p", ids, weigh(ids, scores, knobs.temperature), found.at(-1)));
  return found;
}

function stage(name, ids, weights, before) {
  let sum = 0;
  for (const weight of weights) sum += weight;
  let kept = 1;
  if (before) {
    let rest = 0;
    for (const id of ids) rest += before.weights[find(before.ids, id)];
    kept = rest / before.sum;
  }
  return { name, ids, weights, sum, kept };
}

/** Ids of the tokens that have any chance. */
function alive(scores) {
  const ids = [];
  for (let i = 0; i < scores.length; i++) if (scores[i] > -Infinity) ids.push(i);
  return ids.length ? Int32Array.from(ids) : Int32Array.from(scores.keys());
}

function weigh(ids, scores, temperature) {
  let peak = -Infinity;
  for (const id of ids) if (scores[id] > peak) peak = scores[id];
  return Float64Array.from(ids, (id) => Math.exp((scores[id] === peak ? 0 : scores[id] - peak) / temperature));
}

function firstAlive(order, scores, k) {
  return order.slice(0, k).filter((id) => scores[id] > -Infinity);
}

const rising = (ids) => Int32Array.from(ids).sort();

/** The shortest ranking prefix of a stage's tokens whose weight reaches `share` of it. */
function prefix(ids, from, share, order) {
  const goal = share * from.sum;
  const inside = ids.length === order.length ? null : new Set(ids);
  const kept = [];
  let reached = 0;
  for (const id of order) {
    if (inside && !inside.has(id)) continue;
    kept.push(id);
    reached += from.weights[find(from.ids, id)];
    if (reached >= goal) break;
  }
  return rising(kept);
}

/** The fewest tokens whose surprise is nearest the entropy that reach the share. */
function typical(ids, scores, from, knobs) {
  let peak = -Infinity;
  for (const id of ids) if (scores[id] > peak) peak = scores[id];
  const logSum = Math.log(from.sum);
  const logs = Float64Array.from(ids, (id) => (scores[id] === peak ? 0 : scores[id] - peak) / knobs.temperature - logSum);
  let entropy = 0;
  for (let i = 0; i < ids.length; i++) {
    const p = from.weights[i] / from.sum;
    if (p > 0) entropy -= p * logs[i];
  }
  const near = logs.map((log) => -Math.abs(-log - entropy));
  const goal = knobs.typical_p * from.sum;
  const kept = [];
  let reached = 0;
  for (const i of ranking(near)) {
    kept.push(ids[i]);
    reached += from.weights[i];
    if (reached >= goal) break;
  }
  return rising(kept);
}

/** Where an id stands among rising ids, or -1. */
export function find(ids, id) {
  let low = 0;
  let high = ids.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (ids[middle] === id) return middle;
    if (ids[middle] < id) low = middle + 1;
    else high = middle - 1;
  }
  return -1;
}

/** A token's probability at a stage; 0 where it is cut. */
export function probAt(at, id) {
  const i = find(at.ids, id);
  return i < 0 ? 0 : at.weights[i] / at.sum;
}

/** The final distribution: rising ids and their probabilities. */
export function distribution(found) {
  const last = found.at(-1);
  return { ids: last.ids, probs: last.weights.map((weight) => weight / last.sum) };
}

/** The first token, in id order, whose running probability exceeds `uniform`. */
export function pick(ids, weights, uniform) {
  let sum = 0;
  for (const weight of weights) sum += weight;
  let reached = 0;
  let last = ids[0];
  for (let i = 0; i < ids.length; i++) {
    if (weights[i] === 0) continue;
    reached += weights[i];
    last = ids[i];
    if (reached > uniform * sum) return ids[i];
  }
  return last;
}

/** Tokens drawn from the last stage with (seed, position, ordinal 0, 1, …), as the engine draws them. */
export function draw(found, seed, position, count = 1) {
  const { ids, weights } = found.at(-1);
  const running = new Float64Array(ids.length);
  let sum = 0;
  for (let i = 0; i < ids.length; i++) running[i] = sum += weights[i];
  const tokens = [];
  for (let n = 0; n < count; n++) {
    const goal = uniform(seed, position, n) * sum;
    let low = 0;
    let high = ids.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (running[middle] > goal) high = middle;
      else low = middle + 1;
    }
    tokens.push(ids[low]);
  }
  return tokens;
}

// -- random numbers: Philox4x32-10 with the seed as key and (position, ordinal) as counter ----------------------------

const WORD = 0xffffffffn;
const MULTIPLIERS = [0xd2511f53n, 0xcd9e8d57n];
const WEYL = [0x9e3779b9n, 0xbb67ae85n];

/** A number in [0, 1) with 53 random bits, always the same for the same three integers. */
export function uniform(seed, position, ordinal) {
  const key = BigInt(seed);
  let [low, high] = [key & WORD, key >> 32n];
  let [a, b, c, d] = [BigInt(position) & WORD, BigInt(position) >> 32n, BigInt(ordinal) & WORD, BigInt(ordinal) >> 32n];
  for (let round = 0; round < 10; round++) {
    const first = a * MULTIPLIERS[0];
    const second = c * MULTIPLIERS[1];
    [a, b, c, d] = [(second >> 32n) ^ b ^ low, second & WORD, (first >> 32n) ^ d ^ high, first & WORD];
    low = (low + WEYL[0]) & WORD;
    high = (high + WEYL[1]) & WORD;
  }
  return (Number(a >> 5n) * 67108864 + Number(b >> 6n)) / 9007199254740992;
}
