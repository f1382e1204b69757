"""Choosing a token from a row of logits, and reading a row's distribution: the torch reference.

Each row is worked out alone, in float64 from its float32 logits, so a token depends on its own row and nothing else.
The order is fixed: logit mask → bias → penalties (repetition, then presence and frequency) → temperature → top-k →
top-p → min-p → typical, each filter on the renormalised rest. Tokens rank by probability, then by lower id.

The draw goes through the kept tokens in id order and takes the first whose running probability exceeds `uniform`. It
knows nothing of seeds: a `Draw` brings its uniform number.

A filter holds its candidates as ids in rising order, so that "the earlier index" and "the lower id" are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.base.errors import InvalidInput, InvalidMask, InvalidToken
from headway.base.samplers import Sampling

NO_TOKEN = -1  # what `choose` gives for a row with NaN in it
GUESSES = (256, 4096)  # how many of the best a filter ranks before it ranks all


@dataclass(frozen=True, eq=False)
class Draw:
    """One token to be drawn: how, with which uniform number of [0, 1), and what its history adds."""

    sampling: Sampling
    uniform: float = 0.0
    allowed: Tensor | None = None  # [V] bool
    seen: Tensor | None = None  # distinct ids of prompt and generated tokens, for repetition
    generated: tuple[Tensor, Tensor] | None = None  # distinct ids and their counts, for presence and frequency

    def __post_init__(self) -> None:
        if not 0.0 <= self.uniform < 1.0:
            raise InvalidInput(f"uniform is {self.uniform}; it must be at least 0 and below 1")

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the row's largest logit is the answer as it stands."""
        how = self.sampling
        return how.temperature == 0 and self.allowed is None and not how.bias and not how.penalizes


def choose(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The token of each row: `logits` is [R, V], draw i belongs to row i, the result is [R] int64.

    A row with a NaN in it gets `NO_TOKEN`, so that its pass can fail alone; a masked token is never chosen.
    """
    if logits.ndim != 2 or logits.shape[0] != len(draws):
        raise InvalidInput(f"logits of shape {tuple(logits.shape)} for {len(draws)} draws; expected one row for each")
    plain = [row for row, draw in enumerate(draws) if draw.is_plain_argmax]
    if len(plain) == len(draws):
        return _argmax(logits)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)  # [R]
    if plain:
        index = torch.tensor(plain, device=logits.device)
        tokens[index] = _argmax(logits[index])
    for row, draw in enumerate(draws):
        if not draw.is_plain_argmax:
            tokens[row] = _choose_one(logits[row], draw)
    return tokens


def kept(
    logits: Tensor,
    sampling: Sampling,
    *,
    allowed: Tensor | None = None,
    seen: Tensor | None = None,
    generated: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The exact distribution of a draw from the row `logits` [V]: (ids in rising order, float64 probabilities)."""
    ids, weights = _kept(logits, Draw(sampling, allowed=allowed, seen=seen, generated=generated))
    return ids, weights / weights.sum()


def distribution(logits: Tensor, temperature: float = 1.0, k: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, float32 probabilities) of the `k` likeliest tokens of the row `logits` [V], all of them with `k=0`."""
    scores = logits.double()
    weights = torch.exp(_below_peak(scores) / temperature)
    ids = _best(scores, k or scores.numel())
    return ids, (weights[ids] / weights.sum()).float()


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities (nats, float32) of tokens `ids` in the row `logits` [V]."""
    return log_softmax(logits)[ids].float()


def processed(logits: Tensor, draw: Draw) -> Tensor:
    """Log-probabilities (nats, float64) of all tokens [V] of the row, as they are drawn: -inf for those left out.

    At temperature 0 they are those in front of the temperature and the filters.
    """
    if draw.sampling.temperature == 0:
        open_ = replace(draw.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
        draw = replace(draw, sampling=open_)
    ids, weights = _kept(logits, draw)
    logs = torch.full((logits.numel(),), -torch.inf, dtype=torch.float64, device=logits.device)
    logs[ids] = (weights / weights.sum()).log()
    return logs


def ranked(logs: Tensor, tokens: Sequence[int], k: int) -> tuple[list[tuple[int, float, int]], ...]:
    """(id, score, rank) of `tokens` and of the `k` best of a row of scores [V]; the best are without those at -inf."""
    named = [(token, score := float(logs[token]), 1 + int((logs > score).sum())) for token in tokens]
    if k == 0:
        return named, []
    best = _best(logs, min(k, logs.numel()))
    scores = logs[best].tolist()
    above = [next(i for i, other in enumerate(scores) if other == score) for score in scores]
    found = [(id, score, 1 + n) for id, score, n in zip(best.tolist(), scores, above) if score > -torch.inf]
    return named, found


def entropy(logits: Tensor) -> Tensor:
    """The entropy (nats, float32, no dimensions) of the row `logits` [V]."""
    logs = log_softmax(logits)
    return _entropy(logs, logs.exp()).float()


def check_finite(logits: Tensor) -> Tensor:
    """Which rows of [R, V] hold no NaN: [R] bool. Infinities have a meaning: +inf is certain, -inf never."""
    return ~logits.isnan().any(dim=-1)


def _argmax(logits: Tensor) -> Tensor:
    """The first largest logit of each row; a NaN counts as the largest, which is how its row is found."""
    top = logits.max(dim=-1)
    return torch.where(top.values.isnan(), NO_TOKEN, top.indices)


def _choose_one(logits: Tensor, draw: Draw) -> Tensor | int:
    if bool(logits.isnan().any()):
        return NO_TOKEN
    ids, weights = _kept(logits, draw)
    live = weights.nonzero().squeeze(1)
    reached = _running(weights[live])
    at = torch.searchsorted(reached, draw.uniform * reached[-1], right=True)
    return ids[live[at.clamp(max=live.numel() - 1)]]


def _kept(logits: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """(ids in rising order, float64 weights, the largest of which is 1) after every filter."""
    how = draw.sampling
    ids, scores = _candidates(logits, draw)
    if how.temperature == 0:
        best = scores.argmax().unsqueeze(0)
        return ids[best], torch.ones_like(scores[best])
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
        ids, weights = _take(_prefix(near, weights, how.typical_p), ids, weights)
    return ids, weights


def _candidates(logits: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """(ids, float64 scores) of the tokens that have any chance, after mask, bias and penalties."""
    scores = _penalised(_biased(logits.double(), draw.sampling), draw)
    if draw.allowed is None:
        ids = torch.arange(scores.numel(), device=scores.device)
    else:
        ids = draw.allowed.nonzero().squeeze(1)
        scores = scores[ids]
        if ids.numel() == 0:
            raise InvalidMask(f"the logit mask allows none of {logits.numel()} tokens; allow at least one")
    alive = scores > -torch.inf
    if bool(alive.all()) or not bool(alive.any()):
        return ids, scores
    return ids[alive], scores[alive]


def check_bias(how: Sampling, vocab: int) -> None:
    """Raise for a bias that no token of the vocabulary has."""
    if how.bias and (largest := how.bias[-1][0]) >= vocab:
        raise InvalidToken(f"token id {largest} in logit_bias is outside the vocabulary; ids are 0 … {vocab - 1}")


def _biased(scores: Tensor, how: Sampling) -> Tensor:
    if not how.bias:
        return scores
    check_bias(how, scores.numel())
    ids, amounts = zip(*how.bias)
    index = torch.tensor(ids, device=scores.device)
    return scores.index_add(0, index, torch.tensor(amounts, dtype=scores.dtype, device=scores.device))


def changed(logits: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """The ids whose scores bias and penalties change, rising, and those scores in float64."""
    how, parts = draw.sampling, []
    check_bias(how, logits.numel())
    if how.bias:
        parts.append(torch.tensor([id for id, _ in how.bias]))
    if how.repetition_penalty != 1 and draw.seen is not None:
        parts.append(draw.seen)
    if (how.presence_penalty or how.frequency_penalty) and draw.generated is not None:
        parts.append(draw.generated[0])
    ids = torch.cat(parts).unique() if parts else torch.empty(0, dtype=torch.int64)
    # The few as a vocabulary of their own, with every id's place among them.
    few = replace(
        draw,
        sampling=replace(how, logit_bias={int(torch.searchsorted(ids, id)): amount for id, amount in how.bias}),
        seen=None if draw.seen is None else torch.searchsorted(ids, draw.seen),
        generated=None if draw.generated is None else (torch.searchsorted(ids, draw.generated[0]), draw.generated[1]),
    )
    return ids, _penalised(_biased(logits[ids].double(), few.sampling), few)


def _penalised(scores: Tensor, draw: Draw) -> Tensor:
    how = draw.sampling
    if how.repetition_penalty != 1 and draw.seen is not None:
        old = scores[draw.seen]
        new = torch.where(old > 0, old / how.repetition_penalty, old * how.repetition_penalty)
        scores = scores.index_copy(0, draw.seen, new)
    if (how.presence_penalty or how.frequency_penalty) and draw.generated is not None:
        ids, counts = draw.generated
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
    """The indices of the shortest ranking prefix whose weight reaches `share` of the whole."""
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


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities (nats, float64) of all tokens of the row [V]."""
    logs = _below_peak(logits.double())
    return logs - logs.exp().sum().log()


def _entropy(logs: Tensor, probs: Tensor) -> Tensor:
    return -torch.where(probs > 0, probs * logs, 0.0).sum()


def _running(weights: Tensor) -> Tensor:
    """Running sums, always added up in the same order."""
    if weights.is_cuda:
        # A scan of a single row splits it among blocks that add up as they finish; two rows are scanned one per block.
        return torch.stack((weights, weights)).cumsum(dim=1)[0]
    return weights.cumsum(dim=0)
