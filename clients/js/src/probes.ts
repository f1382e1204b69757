// Probes: what is read at a row without choosing a token. Their type says what comes back.

import { Matrix, numberOf } from "./codec.js";

/** Ids and their probabilities, the likeliest first. */
export interface Ranked {
  ids: number[];
  probs: Float32Array;
}

/** A token's place among all. */
export interface Rank {
  id: number;
  logprob: number;
  rank: number;
}

export interface Ranking {
  drawn: Rank[];
  ids: Rank[];
  best: Rank[];
}

/** Something to read at a row; `T` is what it reads. */
export interface Probe<T = unknown> {
  readonly kind: string;
  readonly spec: Readonly<Record<string, unknown>>;
  /** What it has read, from the server's reply. */
  readonly read: (value: any) => T;
}

const probe = <T>(kind: string, fields: object, read: (value: any) => T): Probe<T> =>
  Object.freeze({ kind, spec: Object.freeze({ kind, ...fields }), read });

const ids = (values: ArrayLike<number | bigint>): number[] => Array.from(values as ArrayLike<number>, Number);
const ranked = ([listed, probs]: [ArrayLike<number>, Float32Array]): Ranked => ({ ids: ids(listed), probs });
const rank = ([id, logprob, place]: [number, number | string, number]): Rank => ({ id, logprob: numberOf(logprob), rank: place });

export interface ProbeOptions {
  /** Whether it sees logits after the pass's logit masks. */
  masked?: boolean;
}

/** The logits, as they are. */
export const Logits = ({ masked = false }: ProbeOptions = {}): Probe<Float32Array> => probe("Logits", { masked }, (value) => value);
/** The k likeliest tokens and their probabilities; k = 0: all of them. */
export const Distribution = ({ temperature = 1, k = 0, masked = false }: { temperature?: number; k?: number } & ProbeOptions = {}): Probe<Ranked> =>
  probe("Distribution", { temperature, k, masked }, ranked);
/** The log-probability of one token. */
export const Logprob = (id: number, { masked = false }: ProbeOptions = {}): Probe<Float32Array> => probe("Logprob", { id, masked }, (value) => value);
/** The log-probabilities of tokens. */
export const Logprobs = (listed: Iterable<number>, { masked = false }: ProbeOptions = {}): Probe<Float32Array> =>
  probe("Logprobs", { ids: [...listed], masked }, (value) => value);
/** The entropy of the distribution, in nats. */
export const Entropy = ({ masked = false }: ProbeOptions = {}): Probe<number> => probe("Entropy", { masked }, numberOf);
/** The k likeliest tokens, and where these and the drawn one stand; `processed`: after all that the sampler does. */
export const Ranking = ({ k = 0, ids: listed = [], processed = false }: { k?: number; ids?: Iterable<number>; processed?: boolean } = {}): Probe<Ranking> =>
  probe("Ranking", { k, ids: [...listed], processed }, ([drawn, asked, best]) => ({ drawn: drawn.map(rank), ids: asked.map(rank), best: best.map(rank) }));
/** A hidden state: 0 are the embeddings, the last is after the final norm. */
export const Hidden = (layer: number): Probe<Float32Array> => probe("Hidden", { layer }, (value) => value);
/** Attention weights of a layer: heads × slots, or one row of them where they are reduced. */
export function AttentionScores(layer: number): Probe<Matrix>;
export function AttentionScores(layer: number, options: { reduce: "mean" | "max" }): Probe<Float32Array>;
export function AttentionScores(layer: number, { reduce = null }: { reduce?: "mean" | "max" | null } = {}): Probe<any> {
  return probe("AttentionScores", { layer, reduce }, (value) => value);
}
/** The likeliest tokens at each of these layers, after the final norm and the head. */
export const LogitLens = (layers: Iterable<number>, k: number): Probe<Ranked[]> =>
  probe("LogitLens", { layers: [...layers], k }, (value: [ArrayLike<number>, Float32Array][]) => value.map(ranked));
