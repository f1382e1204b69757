// Samplers: how a token is chosen. Plain values, made by functions of the names that they have in Python.

export type Seed = number | bigint;

/** How a token is chosen. */
export interface Sampler {
  readonly kind: string;
  readonly [field: string]: unknown;
}

export interface DrawOptions {
  temperature?: number;
  seed?: Seed | null;
}

/** What samplers and generations have alike. */
export interface FilterOptions {
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  typicalP?: number;
  repetitionPenalty?: number;
  epsilonCutoff?: number;
  etaCutoff?: number;
  /** A token that would continue a repeated sequence loses this much (DRY); 0 turns it off. */
  dryMultiplier?: number;
  dryBase?: number;
  dryAllowedLength?: number;
  dryPenaltyLastN?: number;
  drySequenceBreakers?: string[];
  /** How often all top choices but the last are excluded (XTC); 0 turns it off. */
  xtcProbability?: number;
  xtcThreshold?: number;
  /** Keep the surprise of the text near `mirostatTau`, by version 1 or 2; 0 turns it off. */
  mirostat?: number;
  mirostatTau?: number;
  mirostatEta?: number;
}

export interface SamplingOptions extends FilterOptions {
  seed?: Seed | null;
  presencePenalty?: number;
  frequencyPenalty?: number;
  /** Added to logits: by token id, or for every token. */
  logitBias?: Record<number, number> | Float64Array;
}

const draw = (kind: string, fields: object, { temperature = 1, seed = null }: DrawOptions = {}): Sampler =>
  Object.freeze({ kind, ...fields, temperature, seed });

/** The likeliest token. */
export const Argmax = (): Sampler => Object.freeze({ kind: "Argmax" });
/** Any token, by its probability. */
export const Multinomial = (options?: DrawOptions): Sampler => draw("Multinomial", {}, options);
/** One of the k likeliest tokens. */
export const TopK = (k: number, options?: DrawOptions): Sampler => draw("TopK", { k }, options);
/** One of the likeliest tokens that together reach p. */
export const TopP = (p: number, options?: DrawOptions): Sampler => draw("TopP", { p }, options);
/** One of the tokens with at least p times the probability of the likeliest. */
export const MinP = (p: number, options?: DrawOptions): Sampler => draw("MinP", { p }, options);
/** Top-k, then top-p. */
export const TopKTopP = (k: number, p: number, options?: DrawOptions): Sampler => draw("TopKTopP", { k, p }, options);
/** One of the tokens whose information is nearest to the entropy, that together reach p. */
export const Typical = (p: number, options?: DrawOptions): Sampler => draw("Typical", { p }, options);

/** Every parameter at once. */
export function Sampling(options: SamplingOptions = {}): Sampler {
  const { logitBias, ...rest } = options;
  const fields = Object.fromEntries(
    Object.entries(rest).map(([name, value]) => [name.replace(/[A-Z]/g, (l) => `_${l.toLowerCase()}`), value]),
  );
  const bias = logitBias instanceof Float64Array ? logitBias : Object.entries(logitBias ?? {}).map(([id, b]) => [Number(id), b]);
  return Object.freeze({ kind: "Sampling", ...fields, logit_bias: bias });
}
