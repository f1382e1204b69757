"""What a beam search chooses: from the running beams' logits, those that go on and those that have ended.

Worked out as `transformers` does it, in float32 and operation by operation, so that both choose the same tokens. That
includes exact ties, which fall as `torch.topk` on the CPU lets them fall. Knows nothing of contexts and passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput, PassFailed
from headway.base.rng import uniform
from headway.program.generation.ngrams import banned_by_ngrams

NEVER = -1.0e9  # the score of what must not be chosen; transformers' number, which its ties depend on


@dataclass(frozen=True)
class Continuation:
    """One finished sequence: its tokens without the end token, its text, and why it ended.

    `score` is a beam's log-probability over length ** length_penalty, nan where no beams ran; `seed` is that of its
    draws, None where nothing was drawn; `probes` are a probe's values, one a step. A model without a tokenizer has no
    text: it is "" then.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    score: float = math.nan
    seed: int | None = None
    probes: tuple[Any, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Draws:
    """How the candidates of a sampled search are drawn."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True)
class Rules:
    """What a search goes by, checked."""

    beams: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    returned: int
    min_tokens: int
    repetition_penalty: float
    ngram: int
    eos: tuple[int, ...]  # every token that ends a beam
    stops: frozenset[int]  # those of them that the caller named
    draws: Draws | None

    @property
    def candidates(self) -> int:
        """K: so many that beams to go on with are left when every end token is among the best."""
        return max(2, 1 + len(self.eos)) * self.beams


@dataclass(frozen=True)
class _End:
    """A sequence that has ended; without probability it takes a place and is no result."""

    tokens: tuple[int, ...]
    finish: str
    possible: bool


class Search:
    """What is known of the running beams and of the best that ended. B beams, V tokens, K candidates."""

    def __init__(self, rules: Rules, prompt: tuple[int, ...], position: int) -> None:
        self.rules, self.prompt, self.position = rules, prompt, position
        self.made = 0
        self.paths: list[tuple[int, ...]] = [()] * rules.beams
        self.scores = torch.full((rules.beams,), NEVER)  # [B]
        self.scores[0] = 0.0  # the beams are all the same one at first
        self.ends: list[_End | None] = [None] * rules.beams
        self.end_scores = torch.full((rules.beams,), NEVER)  # [B]

    def step(self, logits: np.ndarray) -> list[tuple[int, int]] | None:
        """Choose by the beams' logits: (parent, token) of each beam that goes on, or None when the search is over."""
        if np.isnan(logits).any():
            raise PassFailed("the model's logits are not a number at the end of a beam; no token can be chosen")
        scores, chosen = self._candidates(torch.from_numpy(logits))
        self.made += 1
        moves = [divmod(flat, logits.shape[1]) for flat in chosen.tolist()]
        paths = [(*self.paths[parent], token) for parent, token in moves]
        last = self.made == self.rules.max_tokens
        ended = torch.tensor([last or token in self.rules.eos for _, token in moves])  # [K]
        running = scores + ended.float() * NEVER
        heirs = torch.topk(running, self.rules.beams).indices
        self._collect(paths, scores, ended)
        self.paths, self.scores = [paths[i] for i in heirs.tolist()], running[heirs]
        return None if bool(ended.all()) or self._settled() else [moves[i] for i in heirs.tolist()]

    def results(self) -> list[Continuation]:
        """The best sequences, best first, without their texts."""
        seed = None if self.rules.draws is None else self.rules.draws.seed
        pairs = zip(self.ends, self.end_scores.tolist(), strict=True)
        found = [Continuation(end.tokens, "", end.finish, score, seed) for end, score in pairs if end and end.possible]
        if not found:
            raise InvalidInput(
                f"no sequence is possible: after {self.made} tokens every one that may follow has no probability; "
                "relax no_repeat_ngram_size or min_tokens, or a penalty that makes scores too large to compare"
            )
        return found[: self.rules.returned]

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and flat (beam, token) indices of the K continuations that come into question."""
        rows = torch.log_softmax(logits, dim=-1)  # [1, V] at first, then [B, V]
        for row, path in zip(rows, self.paths):
            self._adjust(row, (*self.prompt, *path))
        draws, keep = self.rules.draws, 1 + (len(self.rules.eos) or 1)
        if draws is not None:
            rows = _filtered(rows / draws.temperature, draws, keep)
        sums = (rows + self.scores[:, None]).flatten()  # [B * V]
        if draws is None:
            best = torch.topk(sums, self.rules.candidates)
            return best.values, best.indices
        chosen = drawn(sums, self.rules.candidates, draws.seed, self.position + self.made)
        return sums[chosen], chosen

    def _adjust(self, row: Tensor, tokens: tuple[int, ...]) -> None:
        """Penalise and forbid tokens of one beam's row [V], in place."""
        rules = self.rules
        if rules.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(tokens)))
            old = row[seen]
            row[seen] = torch.where(old < 0, old * rules.repetition_penalty, old / rules.repetition_penalty)
        banned = banned_by_ngrams(tokens, rules.ngram)
        if self.made < rules.min_tokens:
            banned.update(rules.eos)
        if banned:
            row[torch.tensor(sorted(banned))] = -torch.inf

    def _collect(self, paths: list[tuple[int, ...]], scores: Tensor, ended: Tensor) -> None:
        """Keep the best B of those that ended before and those that end now among the first B candidates."""
        first = ended & (torch.arange(len(ended)) < self.rules.beams)
        level = scores / self.made**self.rules.length_penalty + (~first).float() * NEVER
        possible = (scores > NEVER / 2).tolist()
        new = [self._end(paths[i], possible[i]) if ends else None for i, ends in enumerate(first.tolist())]
        every = [*self.ends, *new]
        merged = torch.cat((self.end_scores, level))
        kept = torch.topk(merged, self.rules.beams).indices
        self.ends, self.end_scores = [every[i] for i in kept.tolist()], merged[kept]

    def _end(self, path: tuple[int, ...], possible: bool) -> _End:
        if path[-1] not in self.rules.eos:
            return _End(path, "length", possible)
        return _End(path[:-1], "stop" if path[-1] in self.rules.stops else "eos", possible)

    def _settled(self) -> bool:
        """Whether the beams that run cannot, or need not, beat those that ended."""
        full = None not in self.ends
        rules = self.rules
        hopeful = rules.early_stopping == "never" and rules.length_penalty > 0
        length = rules.max_tokens if hopeful else self.made
        best = float(self.scores[0] / length**rules.length_penalty)
        worst = float(self.end_scores.min()) if full else NEVER
        return best <= worst or (full and rules.early_stopping is True)


def _filtered(rows: Tensor, draws: Draws, keep: int) -> Tensor:
    """Rows [R, V] with everything outside top-k and top-p at -inf; `keep` tokens stay at least."""
    if 0 < draws.top_k < rows.shape[1]:
        edge = torch.topk(rows, min(max(draws.top_k, keep), rows.shape[1])).values[:, -1:]
        rows = rows.masked_fill(rows < edge, -torch.inf)
    if draws.top_p < 1.0:
        ranked = rows.sort(dim=-1, descending=True, stable=True)
        probs = ranked.values.double().softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= draws.top_p  # those before it reach the share already
        outside[:, :keep] = False
        rows = rows.masked_fill(outside.scatter(1, ranked.indices, outside), -torch.inf)
    return rows


def drawn(scores: Tensor, count: int, seed: int, position: int) -> Tensor:
    """Indices of `count` draws without replacement, with probabilities softmax(scores) [N], in the order drawn.

    What has no probability comes last, by index, when there is too little else.
    """
    peak = scores.max()
    weights = torch.where(scores == -torch.inf, 0.0, (scores - peak).double().exp()).numpy()
    found: list[int] = []
    for ordinal in range(count):
        live = np.flatnonzero(weights)
        if live.size == 0:
            break
        reached = np.cumsum(weights[live])
        at = np.searchsorted(reached, uniform(seed, position, ordinal) * reached[-1], side="right")
        found.append(int(live[min(int(at), live.size - 1)]))
        weights[found[-1]] = 0.0
    if len(found) < count:
        rest = np.setdiff1d(np.arange(scores.numel()), found)
        found += rest[: count - len(found)].tolist()
    return torch.tensor(found)
