// Samplers: how a token is chosen. Plain values, made by functions of the names that they have in Python.
const draw = (kind, fields, { temperature = 1, seed = null } = {}) => Object.freeze({ kind, ...fields, temperature, seed });
/** The likeliest token. */
export const Argmax = () => Object.freeze({ kind: "Argmax" });
/** Any token, by its probability. */
export const Multinomial = (options) => draw("Multinomial", {}, options);
/** One of the k likeliest tokens. */
export const TopK = (k, options) => draw("TopK", { k }, options);
/** One of the likeliest tokens that together reach p. */
export const TopP = (p, options) => draw("TopP", { p }, options);
/** One of the tokens with at least p times the probability of the likeliest. */
export const MinP = (p, options) => draw("MinP", { p }, options);
/** Top-k, then top-p. */
export const TopKTopP = (k, p, options) => draw("TopKTopP", { k, p }, options);
/** One of the tokens whose information is nearest to the entropy, that together reach p. */
export const Typical = (p, options) => draw("Typical", { p }, options);
/** Every parameter at once. */
export function Sampling(options = {}) {
    const { logitBias, ...rest } = options;
    const fields = Object.fromEntries(Object.entries(rest).map(([name, value]) => [name.replace(/[A-Z]/g, (l) => `_${l.toLowerCase()}`), value]));
    const bias = logitBias instanceof Float64Array ? logitBias : Object.entries(logitBias ?? {}).map(([id, b]) => [Number(id), b]);
    return Object.freeze({ kind: "Sampling", ...fields, logit_bias: bias });
}
