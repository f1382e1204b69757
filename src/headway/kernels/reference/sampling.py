"""`host/sampling` for tensors, on any device: sampling a token from a row of logits, reading a row's distribution.

Each row is computed alone, in float64 from its float32 logits; the order of filters is described there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput, InvalidMask
from headway.base.specs.samplers import NO_TOKEN, Sampling
from headway.kernels.host.sampling import GUESSES, RowSampler, before_temperature, check_bias

# -- tensors where `host/sampling` has arrays ----------------------------------------------------------------------


def stack(rows: Sequence[Tensor]) -> Tensor:
    """Rows [E] as [R, E]."""
    return torch.stack(list(rows))


def vector(values: Any, dtype: str, like: Tensor) -> Tensor:
    """Numbers of the host, as what the functions take next to `like`."""
    return torch.tensor(values, dtype=getattr(torch, dtype), device=like.device)


def to_numpy(values: Tensor) -> np.ndarray:
    """A result on the host."""
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """The row [V] with -inf for tokens that are not allowed."""
    return logits.masked_fill(~allowed, -torch.inf)


# -- tokens ------------------------------------------------------------------------------------------------------------


def sample(logits: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """The token of each row: `logits` is [R, V], sampler i belongs to row i, the result is [R] int64.

    A row with a NaN in it gets `NO_TOKEN`, so that its pass can fail alone; a masked token is never chosen.
    """
    if logits.ndim != 2 or logits.shape[0] != len(samplers):
        raise InvalidInput(
            f"logits of shape {tuple(logits.shape)} for {len(samplers)} samplers; expected one row per sampler"
        )
    plain = [row for row, sampler in enumerate(samplers) if sampler.is_plain_argmax]
    if len(plain) == len(samplers):
        return _argmax(logits)
    tokens = torch.empty(len(samplers), dtype=torch.int64, device=logits.device)  # [R]
    if plain:
        index = torch.tensor(plain, device=logits.device)
        tokens[index] = _argmax(logits[index])
    for row, sampler in enumerate(samplers):
        if not sampler.is_plain_argmax:
            tokens[row] = _sample_one(logits[row], sampler)
    return tokens


def sampling_distribution(
    logits: Tensor,
    sampling: Sampling,
    *,
    allowed: Tensor | None = None,
    seen: Tensor | None = None,
    generated: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The exact distribution that the row `logits` [V] is sampled from: (ascending ids, float64 probabilities)."""
    ids, weights = _kept_weights(logits, RowSampler(sampling, allowed=allowed, seen=seen, generated=generated))
    return ids, weights / weights.sum()


def distribution(logits: Tensor, temperature: float = 1.0, k: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, float32 probabilities) of the `k` likeliest tokens of the row `logits` [V]; all tokens with `k=0`."""
    scores = logits.double()
    weights = torch.exp(_below_peak(scores) / temperature)
    ids = _best(scores, k or scores.numel())
    return ids, (weights[ids] / weights.sum()).float()


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities (nats, float32) of tokens `ids` in the row `logits` [V]."""
    return log_softmax(logits)[ids].float()


def processed_logprobs(logits: Tensor, sampler: RowSampler) -> Tensor:
    """Log-probabilities (nats, float64) of all tokens [V] of the row as sampled: -inf for those filtered out.

    At temperature 0 they are those before the temperature and the filters.
    """
    ids, kept, weights = _kept(logits, before_temperature(sampler))
    logs = torch.full((logits.numel(),), -torch.inf, dtype=torch.float64, device=logits.device)
    logs[ids] = kept - weights.sum().log()  # in the log domain: a weight may be too small for any float
    return logs


def ranked(logs: Tensor, tokens: Sequence[int], k: int) -> tuple[list[tuple[int, float, int]], ...]:
    """(id, score, rank) of `tokens` and of the `k` best of a row of scores [V], leaving out those at -inf."""
    named = [(token, score := float(logs[token]), 1 + int((logs > score).sum())) for token in tokens]
    if k == 0:
        return named, []
    best = _best(logs, min(k, logs.numel()))
    scores = logs[best].tolist()
    above = [next(i for i, other in enumerate(scores) if other == score) for score in scores]
    top = [(id, score, 1 + n) for id, score, n in zip(best.tolist(), scores, above) if score > -torch.inf]
    return named, top


def entropy(logits: Tensor) -> Tensor:
    """The entropy (nats, float32, no dimensions) of the row `logits` [V]."""
    logs = log_softmax(logits)
    return _entropy(logs, logs.exp()).float()


def _argmax(logits: Tensor) -> Tensor:
    """The first largest logit of each row. A NaN counts as the largest, which reveals its row."""
    top = logits.max(dim=-1)
    return torch.where(top.values.isnan(), NO_TOKEN, top.indices)


def _sample_one(logits: Tensor, sampler: RowSampler) -> Tensor | int:
    if bool(logits.isnan().any()):
        return NO_TOKEN
    ids, weights = _kept_weights(logits, sampler)
    live = weights.nonzero().squeeze(1)
    reached = _running(weights[live])
    at = torch.searchsorted(reached, sampler.uniform * reached[-1], right=True)
    return ids[live[at.clamp(max=live.numel() - 1)]]


def _kept_weights(logits: Tensor, sampler: RowSampler) -> tuple[Tensor, Tensor]:
    """(ascending ids, float64 weights, the largest being 1) after every filter."""
    ids, _, weights = _kept(logits, sampler)
    return ids, weights


def _kept(logits: Tensor, sampler: RowSampler) -> tuple[Tensor, Tensor, Tensor]:
    """(ascending ids, float64 logarithms of their weights, weights) after every filter."""
    how = sampler.sampling
    ids, scores = _candidates(logits, sampler)
    if how.temperature == 0:
        best = scores.argmax().unsqueeze(0)
        return ids[best], torch.zeros_like(scores[best]), torch.ones_like(scores[best])
    if 0 < how.top_k < ids.numel():
        ids, scores = _take(_best(scores, how.top_k), ids, scores)
    logs = _below_peak(scores) / how.temperature
    weights = logs.exp()
    if how.top_p < 1:
        ids, logs, weights = _take(_prefix(scores, weights, how.top_p), ids, logs, weights)
    if how.min_p > 0:
        ids, logs, weights = _take((weights >= how.min_p).nonzero().squeeze(1), ids, logs, weights)
    if how.typical_p < 1:
        near = _nearness(logs, weights)
        ids, logs, weights = _take(_prefix(near, weights, how.typical_p), ids, logs, weights)
    if how.epsilon_cutoff > 0:
        ids, logs, weights = _take(_likely(weights, how.epsilon_cutoff), ids, logs, weights)
    if how.eta_cutoff > 0:
        ids, logs, weights = _take(_likely(weights, _eta(logs, weights, how.eta_cutoff)), ids, logs, weights)
    return ids, logs, weights


def _candidates(logits: Tensor, sampler: RowSampler) -> tuple[Tensor, Tensor]:
    """(ids, float64 scores) of the tokens with a nonzero chance, after mask, bias and penalties."""
    scores = _penalized(_biased(_raised(logits.double(), sampler.bias), sampler.sampling), sampler)
    if sampler.allowed is None:
        ids = torch.arange(scores.numel(), device=scores.device)
    else:
        ids = sampler.allowed.nonzero().squeeze(1)
        scores = scores[ids]
        if ids.numel() == 0:
            raise InvalidMask(f"the logit mask allows none of {logits.numel()} tokens; allow at least one")
    alive = scores > -torch.inf
    if bool(alive.all()) or not bool(alive.any()):
        if sampler.bias is not None and not bool(alive.any()):
            raise InvalidMask("the bias is -inf for every token that the logit mask allows; leave at least one")
        return ids, scores
    return ids[alive], scores[alive]


def _raised(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Scores with a bias for each token; -inf is out, whatever its score."""
    return scores if bias is None else torch.where(bias == -torch.inf, -torch.inf, scores + bias)


def _biased(scores: Tensor, how: Sampling) -> Tensor:
    if not how.bias:
        return scores
    check_bias(how, scores.numel())
    ids, amounts = zip(*how.bias)
    index = torch.tensor(ids, device=scores.device)
    return scores.index_add(0, index, torch.tensor(amounts, dtype=scores.dtype, device=scores.device))


def changed_scores(logits: Tensor, sampler: RowSampler) -> tuple[Tensor, Tensor]:
    """The ids whose scores bias and penalties change, ascending, and their new scores in float64."""
    how, parts = sampler.sampling, []
    check_bias(how, logits.numel())
    if how.bias:
        parts.append(torch.tensor([id for id, _ in how.bias]))
    if how.repetition_penalty != 1 and sampler.seen is not None:
        parts.append(sampler.seen)
    if (how.presence_penalty or how.frequency_penalty) and sampler.generated is not None:
        parts.append(sampler.generated[0])
    ids = torch.cat(parts).unique() if parts else torch.empty(0, dtype=torch.int64)
    # Treat these few as a vocabulary of their own, with ids replaced by their index.
    few = replace(
        sampler,
        sampling=replace(how, logit_bias={int(torch.searchsorted(ids, id)): amount for id, amount in how.bias}),
        seen=None if sampler.seen is None else torch.searchsorted(ids, sampler.seen),
        generated=None
        if sampler.generated is None
        else (torch.searchsorted(ids, sampler.generated[0]), sampler.generated[1]),
    )
    return ids, _penalized(_biased(logits[ids].double(), few.sampling), few)


def _penalized(scores: Tensor, sampler: RowSampler) -> Tensor:
    how = sampler.sampling
    if how.repetition_penalty != 1 and sampler.seen is not None:
        old = scores[sampler.seen]
        new = torch.where(old > 0, old / how.repetition_penalty, old * how.repetition_penalty)
        scores = scores.index_copy(0, sampler.seen, new)
    if (how.presence_penalty or how.frequency_penalty) and sampler.generated is not None:
        ids, counts = sampler.generated
        scores = scores.index_add(0, ids, -(how.presence_penalty + how.frequency_penalty * counts.double()))
    return scores


def _below_peak(scores: Tensor) -> Tensor:
    """Scores relative to the largest: +inf is certain, equal infinities are equal."""
    peak = scores.max()
    return torch.where(scores == peak, 0.0, scores - peak)


def _best(scores: Tensor, k: int) -> Tensor:
    """The indices of exactly the `k` best, by score and then by lower index, in that order."""
    if k >= scores.numel():
        return scores.sort(descending=True, stable=True).indices
    edge = torch.topk(scores, k).values[-1]
    above = (scores > edge).nonzero().squeeze(1)
    tied = (scores == edge).nonzero().squeeze(1)[: k - above.numel()]
    chosen = torch.cat((above, tied)).sort().values
    return chosen[scores[chosen].sort(descending=True, stable=True).indices]


def _prefix(scores: Tensor, weights: Tensor, share: float) -> Tensor:
    """The indices of the shortest ranking prefix whose weight reaches `share` of the total."""
    goal = share * weights.sum()
    for size in (*GUESSES, scores.numel()):
        ranked = _best(scores, size)
        short = int((_running(weights[ranked]) < goal).sum())
        if short < ranked.numel() or size >= scores.numel():
            return ranked[: short + 1]
    raise AssertionError("the last size ranks all")


def _take(index: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """The columns at these indices, back in id order."""
    index = index.sort().values
    return tuple(column[index] for column in columns)


def _nearness(logs: Tensor, weights: Tensor) -> Tensor:
    """How near each token's surprise is to the entropy: 0 is nearest, the rest are negative."""
    whole = weights.sum()
    logs = logs - whole.log()
    return -(-logs - _entropy(logs, weights / whole)).abs()


def _likely(weights: Tensor, least: Tensor | float) -> Tensor:
    """The indices of the tokens at least this probable, and of the likeliest."""
    return ((weights / weights.sum() >= least) | (weights == weights.max())).nonzero().squeeze(1)


def _eta(logs: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """The least probability of eta sampling: epsilon, or less where the entropy is large."""
    whole = weights.sum()
    entropy = _entropy(logs - whole.log(), weights / whole)
    return torch.clamp(epsilon**0.5 * torch.exp(-entropy), max=epsilon)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities (nats, float64) of all tokens of the row [V]."""
    logs = _below_peak(logits.double())
    return logs - logs.exp().sum().log()


def _entropy(logs: Tensor, probs: Tensor) -> Tensor:
    return -torch.where(probs > 0, probs * logs, 0.0).sum()


def _running(weights: Tensor) -> Tensor:
    """Cumulative sums, always added in the same order."""
    if weights.is_cuda:
        # A scan of one row is split among blocks that add up as they finish; two rows are scanned one per block.
        return torch.stack((weights, weights)).cumsum(dim=1)[0]
    return weights.cumsum(dim=0)
