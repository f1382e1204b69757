// Probes: what is read at a row without choosing a token. Their type says what comes back.
import { numberOf } from "./codec.js";
const probe = (kind, fields, read) => Object.freeze({ kind, spec: Object.freeze({ kind, ...fields }), read });
const ids = (values) => Array.from(values, Number);
const ranked = ([listed, probs]) => ({ ids: ids(listed), probs });
const rank = ([id, logprob, place]) => ({ id, logprob: numberOf(logprob), rank: place });
/** The logits, as they are. */
export const Logits = ({ masked = false } = {}) => probe("Logits", { masked }, (value) => value);
/** The k likeliest tokens and their probabilities; k = 0: all of them. */
export const Distribution = ({ temperature = 1, k = 0, masked = false } = {}) => probe("Distribution", { temperature, k, masked }, ranked);
/** The log-probability of one token. */
export const Logprob = (id, { masked = false } = {}) => probe("Logprob", { id, masked }, (value) => value);
/** The log-probabilities of tokens. */
export const Logprobs = (listed, { masked = false } = {}) => probe("Logprobs", { ids: [...listed], masked }, (value) => value);
/** The entropy of the distribution, in nats. */
export const Entropy = ({ masked = false } = {}) => probe("Entropy", { masked }, numberOf);
/** The k likeliest tokens, and where these and the drawn one stand; `processed`: after all that the sampler does. */
export const Ranking = ({ k = 0, ids: listed = [], processed = false } = {}) => probe("Ranking", { k, ids: [...listed], processed }, ([drawn, asked, best]) => ({ drawn: drawn.map(rank), ids: asked.map(rank), best: best.map(rank) }));
/** A hidden state: 0 are the embeddings, the last is after the final norm. */
export const Hidden = (layer) => probe("Hidden", { layer }, (value) => value);
export function AttentionScores(layer, { reduce = null } = {}) {
    return probe("AttentionScores", { layer, reduce }, (value) => value);
}
/** The likeliest tokens at each of these layers, after the final norm and the head. */
export const LogitLens = (layers, k) => probe("LogitLens", { layers: [...layers], k }, (value) => value.map(ranked));
