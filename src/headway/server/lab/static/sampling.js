// From logits to a token, in float64, by the engine's rules:
//
//   logits → bias → penalties → temperature → top-k → top-p → min-p → typical → epsilon → eta → draw
//
// Each filter works on what the previous one kept. Tokens rank by score, then by lower id; top-p and typical keep the
// shortest prefix that reaches their probability; at least one token is kept. Temperature 0 is greedy.

export const OFF = Object.freeze({
  temperature: 1, top_k: 0, top_p: 1, min_p: 0, typical_p: 1, epsilon_cutoff: 0, eta_cutoff: 0,
  repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0,
});

/** The tokens that penalties count: all of them for repetition, those after the prompt for presence and frequency. */
export function history(prompt, taken) {
  const counts = new Map();
  for (const id of taken) counts.set(id, (counts.get(id) ?? 0) + 1);
  return { seen: new Set([...prompt, ...taken]), counts };
}

/** Float64 scores after bias and penalties, and which ids they changed. */
export function penalized(logits, params, past, bias = new Map()) {
  const scores = Float64Array.from(logits);
  const changed = new Set();
  for (const [id, amount] of bias) {
    scores[id] += amount;
    changed.add(id);
  }
  if (params.repetition_penalty !== 1) {
    for (const id of past.seen) {
      scores[id] = scores[id] > 0 ? scores[id] / params.repetition_penalty : scores[id] * params.repetition_penalty;
      changed.add(id);
    }
  }
  if (params.presence_penalty !== 0 || params.frequency_penalty !== 0) {
    for (const [id, count] of past.counts) {
      scores[id] -= params.presence_penalty + params.frequency_penalty * count;
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

/** A row of logits; what does not depend on the parameters is computed once. */
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

  /** Scores after bias and penalties, their ranking and first stage; kept until one of these changes. */
  scored(params, past, bias) {
    const key = JSON.stringify([params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
      [...bias], [...past.seen], [...past.counts]]);
    if (key !== this._key) {
      const { scores, changed } = penalized(this.logits, params, past, bias);
      const first = stage("penalties", ...weighed(alive(scores), scores, 1), null);
      this._scored = { scores, changed, order: changed.size ? ranking(scores) : this.order, first: { ...first, changed } };
      this._key = key;
    }
    return this._scored;
  }
}

/**
 * Every stage from logits to the final distribution: [{name, ids, weights, sum, kept}] with ascending ids, weights
 * relative to the best token, and `kept` the fraction of the previous stage. Tokens are drawn from the last stage.
 */
export function stages(row, params, past = history([], []), bias = new Map()) {
  const { scores, order, first } = row.scored(params, past, bias);
  const result = [first];
  if (params.temperature === 0) {
    result.push(stage("temperature", Int32Array.of(order[0]), Float64Array.of(1), first));
    for (const name of ["top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"]) result.push({ ...result[1], name, kept: 1 });
    return result;
  }
  result.push(stage("temperature", ...weighed(first.ids, scores, params.temperature), null));
  const narrow = (name, on, filter) => {
    const before = result.at(-1);
    const ids = on ? filter(before) : before.ids;
    result.push(ids.length === before.ids.length ? { ...before, name, kept: 1 } : stage(name, ...weighed(ids, scores, params.temperature), before));
  };
  narrow("top_k", params.top_k > 0 && params.top_k < first.ids.length, () => order.slice(0, params.top_k).sort());
  narrow("top_p", params.top_p < 1, (from) => prefix(from, params.top_p, order));
  narrow("min_p", params.min_p > 0, ({ ids, weights }) => ids.filter((_, i) => weights[i] >= params.min_p));
  narrow("typical_p", params.typical_p < 1, (from) => typical(from, scores, params));
  narrow("epsilon_cutoff", params.epsilon_cutoff > 0, (from) => likely(from, params.epsilon_cutoff));
  narrow("eta_cutoff", params.eta_cutoff > 0, (from) => likely(from, leastOf(from, params.eta_cutoff)));
  return result;
}

/** A stage with ascending ids; `kept` is their fraction of the previous stage. */
function stage(name, ids, weights, before) {
  let sum = 0;
  for (let i = 0; i < weights.length; i++) sum += weights[i];
  let kept = 1;
  if (before) {
    kept = 0;
    for (let i = 0, at = 0; i < ids.length; i++) {
      while (before.ids[at] !== ids[i]) at++;
      kept += before.weights[at];
    }
    kept /= before.sum;
  }
  return { name, ids, weights, sum, kept };
}

/** The ids of tokens with a nonzero probability. */
function alive(scores) {
  const ids = new Int32Array(scores.length);
  let count = 0;
  for (let i = 0; i < scores.length; i++) if (scores[i] > -Infinity) ids[count++] = i;
  return count ? ids.subarray(0, count) : Int32Array.from(scores.keys());
}

/** [ids, their weights]: the largest is 1. */
function weighed(ids, scores, temperature) {
  let peak = -Infinity;
  for (let i = 0; i < ids.length; i++) if (scores[ids[i]] > peak) peak = scores[ids[i]];
  const weights = new Float64Array(ids.length);
  for (let i = 0; i < ids.length; i++) {
    const score = scores[ids[i]];
    weights[i] = score === peak ? 1 : Math.exp((score - peak) / temperature);
  }
  return [ids, weights];
}

/** The shortest ranking prefix of a stage whose weight reaches `share` of it. The stage itself is a ranking prefix. */
function prefix(from, share, order) {
  const goal = share * from.sum;
  let reached = 0;
  let count = 0;
  while (count < from.ids.length) {
    reached += from.weights[find(from.ids, order[count++])];
    if (reached >= goal) break;
  }
  return order.slice(0, count).sort();
}

/** The fewest tokens, nearest to the entropy in surprisal, that reach the probability. */
function typical(from, scores, params) {
  const { ids, weights, sum } = from;
  let peak = -Infinity;
  for (let i = 0; i < ids.length; i++) if (scores[ids[i]] > peak) peak = scores[ids[i]];
  const logSum = Math.log(sum);
  const near = new Float64Array(ids.length);
  let entropy = 0;
  for (let i = 0; i < ids.length; i++) {
    near[i] = (scores[ids[i]] === peak ? 0 : scores[ids[i]] - peak) / params.temperature - logSum;
    if (weights[i] > 0) entropy -= (weights[i] / sum) * near[i];
  }
  for (let i = 0; i < ids.length; i++) near[i] = -Math.abs(-near[i] - entropy);
  const goal = params.typical_p * sum;
  const kept = [];
  let reached = 0;
  for (const i of ranking(near)) {
    kept.push(ids[i]);
    reached += weights[i];
    if (reached >= goal) break;
  }
  return Int32Array.from(kept).sort();
}

/** The tokens at least this probable, and the likeliest. */
function likely({ ids, weights, sum }, least) {
  return ids.filter((_, i) => weights[i] / sum >= least || weights[i] === 1);
}

/** The least probability of eta sampling: epsilon, or less where the entropy is large. */
function leastOf({ weights, sum }, epsilon) {
  let entropy = 0;
  for (let i = 0; i < weights.length; i++) if (weights[i] > 0) entropy -= (weights[i] / sum) * Math.log(weights[i] / sum);
  return Math.min(epsilon, Math.sqrt(epsilon) * Math.exp(-entropy));
}

/** The index of an id in ascending ids, or -1. */
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

/** A token's probability at a stage; 0 if it was cut. */
export function probAt(at, id) {
  const i = find(at.ids, id);
  return i < 0 ? 0 : at.weights[i] / at.sum;
}

/** The final distribution: ascending ids and their probabilities. */
export function distribution(result) {
  const last = result.at(-1);
  return { ids: last.ids, probs: last.weights.map((weight) => weight / last.sum) };
}

/** Tokens drawn from the last stage with (seed, position, ordinal 0, 1, …), as the engine draws them. */
export function draw(result, seed, position, count = 1) {
  const { ids, weights } = result.at(-1);
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
