"""Sampling a token from a row of logits, and reading a row's distribution, in numpy.

Each row is computed alone, in float64 from its float32 logits, so a token depends on its own row and nothing else.
The order is fixed: logit mask → bias → penalties (repetition, then presence and frequency) → temperature → top-k →
top-p → min-p → typical → epsilon → eta, each filter on the renormalized rest. Tokens rank by probability, then by lower
id.

Sampling walks the kept tokens in id order and takes the first whose cumulative probability exceeds `uniform`. Seeds
are not handled here: a `RowSampler` brings its uniform number.

Candidates are ids in ascending order, so that the lower index is also the lower id. `reference/sampling` has the same
functions for tensors, which may be on another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, InvalidMask, InvalidToken
from headway.base.specs.samplers import NO_TOKEN, Sampling

GUESSES = (256, 4096)  # how many of the best a filter ranks before it ranks all tokens


@dataclass(frozen=True, eq=False)
class RowSampler:
    """How one row is sampled: parameters, a uniform number in [0, 1), the logit mask, the token history.

    Arrays for the functions here, tensors for those of `reference/sampling`.
    """

    sampling: Sampling
    uniform: float = 0.0
    allowed: Any = None  # [V] bool
    seen: Any = None  # distinct ids of prompt and generated tokens, for repetition
    generated: tuple[Any, Any] | None = None  # distinct ids and their counts, for presence and frequency
    bias: Any = None  # [V] float64, added to the logits besides the sampler's own pairs

    def __post_init__(self) -> None:
        if not 0.0 <= self.uniform < 1.0:
            raise InvalidInput(f"uniform is {self.uniform}; it must be in [0, 1)")

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the token is simply the row's largest logit."""
        how = self.sampling
        changed = self.allowed is not None or self.bias is not None or how.bias or how.penalizes
        return how.temperature == 0 and not changed


# -- arrays where `reference/sampling` has tensors -----------------------------------------------------------------


def stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows [E] as [R, E]."""
    return np.stack(rows)


def vector(values: Any, dtype: str, like: Any) -> np.ndarray:
    """Numbers of the host, as what the functions take next to `like`."""
    return np.array(values, dtype)


def to_numpy(values: Any) -> np.ndarray:
    """A result on the host."""
    return np.asarray(values)


def masked(logits: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """The row [V] with -inf for tokens that are not allowed."""
    return np.where(allowed, logits, np.float32(-np.inf))


# -- tokens --------------------------------------------------------------------------------------------------------


def sample(logits: np.ndarray, samplers: Sequence[RowSampler]) -> np.ndarray:
    """The token of each row: `logits` is [R, V], sampler i belongs to row i, the result is [R] int64.

    A row with a NaN in it gets `NO_TOKEN`, so that its pass can fail alone; a masked token is never chosen.
    """
    if logits.ndim != 2 or logits.shape[0] != len(samplers):
        raise InvalidInput(f"logits of shape {logits.shape} for {len(samplers)} samplers; expected one row per sampler")
    tokens = [_sample_one(row, sampler) for row, sampler in zip(logits, samplers, strict=True)]
    return np.array(tokens, np.int64)


def sampling_distribution(
    logits: np.ndarray,
    sampling: Sampling,
    *,
    allowed: np.ndarray | None = None,
    seen: np.ndarray | None = None,
    generated: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact distribution that the row `logits` [V] is sampled from: (ascending ids, float64 probabilities)."""
    ids, _, weights = _kept(logits, RowSampler(sampling, allowed=allowed, seen=seen, generated=generated))
    return ids, weights / weights.sum()


def distribution(logits: np.ndarray, temperature: float = 1.0, k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(ids, float32 probabilities) of the `k` likeliest tokens of the row `logits` [V]; all tokens with `k=0`."""
    scores = logits.astype(np.float64)
    weights = np.exp(_cooled(scores, temperature))
    ids = _best(scores, k or scores.size)
    return ids, (weights[ids] / weights.sum()).astype(np.float32)


def logprobs(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities (nats, float32) of tokens `ids` in the row `logits` [V]."""
    return log_softmax(logits)[ids].astype(np.float32)


def processed_logprobs(logits: np.ndarray, sampler: RowSampler) -> np.ndarray:
    """Log-probabilities (nats, float64) of all tokens [V] of the row as sampled: -inf for those filtered out.

    At temperature 0 they are those before the temperature and the filters.
    """
    ids, kept, weights = _kept(logits, before_temperature(sampler))
    logs = np.full(logits.size, -np.inf)
    logs[ids] = kept - np.log(weights.sum())  # in the log domain: a weight may be too small for any float
    return logs


def before_temperature(sampler: RowSampler) -> RowSampler:
    """The sampler, or for a greedy one that which draws from what it chooses from."""
    how = sampler.sampling
    if how.temperature != 0:
        return sampler
    penalties = (how.repetition_penalty, how.presence_penalty, how.frequency_penalty)
    return replace(sampler, sampling=Sampling(1.0, 0, 1.0, 0.0, 1.0, *penalties, how.logit_bias, how.seed))


def ranked(logs: np.ndarray, tokens: Sequence[int], k: int) -> tuple[list[tuple[int, float, int]], ...]:
    """(id, score, rank) of `tokens` and of the `k` best of a row of scores [V], leaving out those at -inf."""
    named = [(token, score := float(logs[token]), 1 + int((logs > score).sum())) for token in tokens]
    if k == 0:
        return named, []
    best = _best(logs, min(k, logs.size))
    scores = logs[best].tolist()
    above = [next(i for i, other in enumerate(scores) if other == score) for score in scores]
    top = [(id, score, 1 + n) for id, score, n in zip(best.tolist(), scores, above) if score > -np.inf]
    return named, top


def entropy(logits: np.ndarray) -> np.float32:
    """The entropy (nats, float32) of the row `logits` [V]."""
    logs = log_softmax(logits)
    return np.float32(_entropy(logs, np.exp(logs)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities (nats, float64) of all tokens of the row [V]."""
    logs = _below_peak(logits.astype(np.float64))
    return logs - np.log(np.exp(logs).sum())


def check_bias(how: Sampling, vocab: int) -> None:
    """Raise for a bias on an id outside the vocabulary."""
    if how.bias and (largest := how.bias[-1][0]) >= vocab:
        raise InvalidToken(f"token id {largest} in logit_bias is outside the vocabulary; ids are 0 … {vocab - 1}")


def changed_scores(logits: np.ndarray, sampler: RowSampler) -> tuple[np.ndarray, np.ndarray]:
    """The ids whose scores bias and penalties change, ascending, and their new scores in float64."""
    how, parts = sampler.sampling, []
    check_bias(how, logits.size)
    if how.bias:
        parts.append(np.array([id for id, _ in how.bias]))
    if how.repetition_penalty != 1 and sampler.seen is not None:
        parts.append(sampler.seen)
    if (how.presence_penalty or how.frequency_penalty) and sampler.generated is not None:
        parts.append(sampler.generated[0])
    ids = np.unique(np.concatenate(parts)).astype(np.int64) if parts else np.empty(0, np.int64)
    # Treat these few as a vocabulary of their own, with ids replaced by their index.
    few = replace(
        sampler,
        sampling=replace(how, logit_bias={int(np.searchsorted(ids, id)): amount for id, amount in how.bias}),
        seen=None if sampler.seen is None else np.searchsorted(ids, sampler.seen),
        generated=None
        if sampler.generated is None
        else (np.searchsorted(ids, sampler.generated[0]), sampler.generated[1]),
    )
    return ids, _penalized(_biased(logits[ids].astype(np.float64), few.sampling), few)


def _sample_one(logits: np.ndarray, sampler: RowSampler) -> int:
    if np.isnan(logits).any():
        return NO_TOKEN
    if sampler.is_plain_argmax:
        return int(logits.argmax())
    ids, _, weights = _kept(logits, sampler)
    live = np.flatnonzero(weights)
    reached = np.cumsum(weights[live])
    at = np.searchsorted(reached, sampler.uniform * reached[-1], side="right")
    return int(ids[live[min(int(at), live.size - 1)]])


def _kept(logits: np.ndarray, sampler: RowSampler) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ascending ids, float64 logarithms of their weights, weights, the largest being 1) after every filter."""
    how = sampler.sampling
    ids, scores = _candidates(logits, sampler)
    if how.temperature == 0:
        best = scores.argmax()
        return ids[best : best + 1], np.zeros(1), np.ones(1)
    if 0 < how.top_k < ids.size:
        ids, scores = _take(_best(scores, how.top_k), ids, scores)
    logs = _cooled(scores, how.temperature)
    weights = np.exp(logs)
    if how.top_p < 1:
        ids, logs, weights = _take(_prefix(scores, weights, how.top_p), ids, logs, weights)
    if how.min_p > 0:
        ids, logs, weights = _take(np.flatnonzero(weights >= how.min_p), ids, logs, weights)
    if how.typical_p < 1:
        near = _nearness(logs, weights)
        ids, logs, weights = _take(_prefix(near, weights, how.typical_p), ids, logs, weights)
    if how.epsilon_cutoff > 0:
        ids, logs, weights = _take(_likely(weights, how.epsilon_cutoff), ids, logs, weights)
    if how.eta_cutoff > 0:
        ids, logs, weights = _take(_likely(weights, _eta(logs, weights, how.eta_cutoff)), ids, logs, weights)
    return ids, logs, weights


def _candidates(logits: np.ndarray, sampler: RowSampler) -> tuple[np.ndarray, np.ndarray]:
    """(ids, float64 scores) of the tokens with a nonzero chance, after mask, bias and penalties."""
    scores = _penalized(_biased(_raised(logits.astype(np.float64), sampler.bias), sampler.sampling), sampler)
    if sampler.allowed is None:
        ids = np.arange(scores.size)
    else:
        ids = np.flatnonzero(sampler.allowed)
        scores = scores[ids]
        if ids.size == 0:
            raise InvalidMask(f"the logit mask allows none of {logits.size} tokens; allow at least one")
    alive = scores > -np.inf
    if alive.all() or not alive.any():
        if sampler.bias is not None and not alive.any():
            raise InvalidMask("the bias is -inf for every token that the logit mask allows; leave at least one")
        return ids, scores
    return ids[alive], scores[alive]


def _raised(scores: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Scores with a bias for each token; -inf is out, whatever its score."""
    if bias is None:
        return scores
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(bias == -np.inf, -np.inf, scores + bias)


def _biased(scores: np.ndarray, how: Sampling) -> np.ndarray:
    if not how.bias:
        return scores
    check_bias(how, scores.size)
    ids, amounts = zip(*how.bias)
    scores = scores.copy()
    with np.errstate(over="ignore"):
        np.add.at(scores, np.array(ids), np.array(amounts, np.float64))
    return scores


def _penalized(scores: np.ndarray, sampler: RowSampler) -> np.ndarray:
    how = sampler.sampling
    if how.repetition_penalty != 1 and sampler.seen is not None:
        old, scores = scores[sampler.seen], scores.copy()
        with np.errstate(over="ignore"):  # to an infinity, which is certain or out
            scores[sampler.seen] = np.where(old > 0, old / how.repetition_penalty, old * how.repetition_penalty)
    if (how.presence_penalty or how.frequency_penalty) and sampler.generated is not None:
        ids, counts = sampler.generated
        scores = scores.copy()
        np.add.at(scores, ids, -(how.presence_penalty + how.frequency_penalty * counts.astype(np.float64)))
    return scores


def _below_peak(scores: np.ndarray) -> np.ndarray:
    """Scores relative to the largest: +inf is certain, equal infinities are equal."""
    peak = scores.max()
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(scores == peak, 0.0, scores - peak)


def _cooled(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Scores relative to the largest, over the temperature. With a tiny one all others are at -inf, as they should."""
    with np.errstate(over="ignore"):
        return _below_peak(scores) / temperature


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """The indices of exactly the `k` best, by score and then by lower index, in that order; NaN is the largest."""
    if k >= scores.size:
        return _descending(scores)
    edge = np.partition(scores, scores.size - k)[scores.size - k]
    if np.isnan(edge):
        return _descending(scores)[:k]
    above = np.flatnonzero((scores > edge) | np.isnan(scores))
    tied = np.flatnonzero(scores == edge)[: k - above.size]
    chosen = np.sort(np.concatenate((above, tied)))
    return chosen[_descending(scores[chosen])]


def _descending(scores: np.ndarray) -> np.ndarray:
    """Indices from the largest to the smallest, the lower first among equals, NaN before all."""
    return scores.size - 1 - np.argsort(scores[::-1], kind="stable")[::-1]


def _prefix(scores: np.ndarray, weights: np.ndarray, share: float) -> np.ndarray:
    """The indices of the shortest ranking prefix whose weight reaches `share` of the total."""
    goal = share * weights.sum()
    for size in (*GUESSES, scores.size):
        ranking = _best(scores, size)
        short = int((np.cumsum(weights[ranking]) < goal).sum())
        if short < ranking.size or size >= scores.size:
            return ranking[: short + 1]
    raise AssertionError("the last size ranks all")


def _take(index: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """The columns at these indices, back in id order."""
    index = np.sort(index)
    return tuple(column[index] for column in columns)


def _nearness(logs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """How near each token's surprise is to the entropy: 0 is nearest, the rest are negative."""
    whole = weights.sum()
    logs = logs - np.log(whole)
    return -np.abs(-logs - _entropy(logs, weights / whole))


def _likely(weights: np.ndarray, least: float) -> np.ndarray:
    """The indices of the tokens at least this probable, and of the likeliest."""
    return np.flatnonzero((weights / weights.sum() >= least) | (weights == weights.max()))


def _eta(logs: np.ndarray, weights: np.ndarray, epsilon: float) -> float:
    """The least probability of eta sampling: epsilon, or less where the entropy is large."""
    whole = weights.sum()
    spread = _entropy(logs - np.log(whole), weights / whole)
    return min(epsilon**0.5 * float(np.exp(-spread)), epsilon)


def _entropy(logs: np.ndarray, probs: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(-np.where(probs > 0, probs * logs, 0.0).sum())
