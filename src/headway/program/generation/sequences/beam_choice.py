"""What a beam search chooses: the candidates that go on and those that end, from the beams' logits. Knows no contexts.

It chooses as `transformers` does, in float32 and operation by operation, so that both choose the same tokens. That
includes exact ties, which fall as `torch.topk` on the CPU lets them fall. What may not follow a beam (by its
constraint, its n-grams, or because it is too short to end) has no probability; the rest keeps the model's own. A beam
ends with an end token, a stop string, `max_tokens`, or where its constraint allows only the end; the score of one that
a stop string ends counts the tokens of the stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, PassFailed
from headway.base.rng import uniform
from headway.base.specs.masks import logit_mask
from headway.program.generation.ngrams import banned_by_ngrams
from headway.program.generation.sequences.topk import topk
from headway.program.generation.transcript import Transcript
from headway.program.generation.word_bias import WordBias

NEVER = -1.0e9  # the score of what must not be chosen; transformers' value, which its ties depend on


@dataclass(frozen=True)
class BeamSampling:
    """How the candidates of a sampled search are drawn."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True)
class BeamRules:
    """The parameters of a search, checked."""

    vocab: int
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
    draws: BeamSampling | None
    words: WordBias | None = None

    @property
    def candidates(self) -> int:
        """K: enough that B of them go on even if every end token is among the best."""
        return max(2, 1 + len(self.eos)) * self.beams


@dataclass(frozen=True)
class Beam:
    """One sequence, with its end token if it has one, and what was probed where each token was chosen.

    Its transcript follows the constraint and the stop strings, if there are any. What has no probability has none.
    """

    tokens: tuple[int, ...] = ()
    probes: tuple[Any, ...] = ()
    transcript: Transcript | None = None

    def text(self) -> str:
        """The whole text of a beam that has a transcript, without any part of a stop string."""
        assert self.transcript is not None
        own = self.transcript.fork()
        own.close()
        return own.take_text()[0]


@dataclass(frozen=True)
class EndedBeam:
    """A sequence that has ended; one without probability takes a place and is not a result."""

    beam: Beam
    tokens: tuple[int, ...]  # without those of the end
    finish: str
    possible: bool


@dataclass(frozen=True)
class Candidates:
    """The K best continuations of the beams, before it is known which of them end."""

    beams: list[Beam]
    moves: list[tuple[int, int]]  # (parent, token)
    scores: np.ndarray  # [K]
    possible: list[bool]

    async def settle(self) -> None:
        """Have constraints that are slow, or elsewhere, say what they allow next before anybody looks."""
        transcripts = {id(beam.transcript): beam.transcript for beam in self.beams if beam.transcript is not None}
        slow = [one.rule for one in transcripts.values() if one.rule.is_slow and not one.stopped]
        await asyncio.gather(*(rule.settle() for rule in slow))


class BeamSearch:
    """Chooses the beams that go on and those that end. B beams, V tokens, K candidates.

    A beam's transcript is never changed: its candidates have forks of it. `first` is the one before any token, None
    where nothing but end tokens and lengths ends a beam.
    """

    def __init__(self, rules: BeamRules, prompt: tuple[int, ...], position: int, first: Transcript | None) -> None:
        self.rules, self.prompt, self.position = rules, prompt, position
        self.length = 0  # of every running beam
        self.beams = [Beam(transcript=first)] * rules.beams
        self.scores = np.full(rules.beams, NEVER, np.float32)  # [B]
        self.scores[0] = 0.0  # the beams are all the same one at first
        self.ends: list[EndedBeam | None] = [None] * rules.beams
        self.end_scores = np.full(rules.beams, NEVER, np.float32)  # [B]
        self._follows = first is not None

    def allowed(self) -> list[np.ndarray | None]:
        """Which tokens may follow each beam, arrays of V booleans; None for all. Of the first beam only, at first."""
        running = self.beams if self.length else self.beams[:1]
        return [self._allowed(beam) for beam in running]

    def grow(
        self, rows: np.ndarray, allowed: Sequence[np.ndarray | None], probes: Sequence[tuple[Any, ...]]
    ) -> Candidates:
        """The K best continuations of the beams.

        The rows [B, V] are the log-probabilities after each beam, one row at first, `allowed` what may follow, `probes`
        what was read there.
        """
        scores, chosen = self._candidates(rows, allowed)
        self.length += 1
        moves = [divmod(flat, rows.shape[1]) for flat in chosen.tolist()]
        possible = (scores > NEVER / 2).tolist()
        beams = [
            self._grown(parent, token, probes[parent if len(probes) > 1 else 0], may)
            for (parent, token), may in zip(moves, possible, strict=True)
        ]
        return Candidates(beams, moves, scores, possible)

    def choose(self, grown: Candidates) -> list[tuple[int, int]] | None:
        """(parent, token) of each beam that goes on; None when the search is over."""
        beams, scores = grown.beams, grown.scores
        finishes = [self._finish(beam) for beam in beams]
        ended = np.array([finish is not None for finish in finishes])  # [K]
        running = scores + ended.astype(np.float32) * np.float32(NEVER)
        heirs = topk(running, self.rules.beams)
        self._collect(beams, finishes, scores, grown.possible)
        self.beams, self.scores = [beams[i] for i in heirs.tolist()], running[heirs]
        return None if bool(ended.all()) or self._settled() else [grown.moves[i] for i in heirs.tolist()]

    def results(self) -> list[tuple[EndedBeam, float]]:
        """The best sequences and their scores, best first."""
        pairs = zip(self.ends, self.end_scores.tolist(), strict=True)
        finished = [(end, score) for end, score in pairs if end and end.possible]
        if not finished:
            raise InvalidInput(
                f"no sequence is possible: after {self.length} tokens every one that may follow has no probability; "
                "relax no_repeat_ngram_size, bad_words_ids, min_tokens or the constraint, or a penalty that makes "
                "scores too large to compare"
            )
        return finished[: self.rules.returned]

    def _candidates(self, rows: np.ndarray, allowed: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
        """Scores and flat (beam, token) indices of the K best continuations."""
        for row, beam, mask in zip(rows, self.beams, allowed):
            if self.rules.words is not None:
                for token, bias in self.rules.words.after((*self.prompt, *beam.tokens)).items():
                    row[token] += bias
            self._penalize(row, (*self.prompt, *beam.tokens))
            if mask is not None:
                row[~mask] = -np.inf
        draws, keep = self.rules.draws, 1 + (len(self.rules.eos) or 1)
        if draws is not None:
            rows = _filtered(rows / np.float32(draws.temperature), draws, keep)
        sums = (rows + self.scores[:, None]).ravel()  # [B * V]
        if draws is None:
            best = topk(sums, self.rules.candidates)
            return sums[best], best
        chosen = drawn(sums, self.rules.candidates, draws.seed, self.position + self.length)
        return sums[chosen], chosen

    def _penalize(self, row: np.ndarray, tokens: tuple[int, ...]) -> None:
        """Apply the repetition penalty to one beam's row [V], in place."""
        penalty = self.rules.repetition_penalty
        if penalty != 1.0:
            seen = np.array(sorted(set(tokens)), np.int64)
            old = row[seen]
            row[seen] = np.where(old < 0, old * np.float32(penalty), old / np.float32(penalty))

    def _allowed(self, beam: Beam) -> np.ndarray | None:
        rules, vocab = self.rules, self.rules.vocab
        if self._follows and beam.transcript is None:
            return np.zeros(vocab, np.bool_)
        banned = banned_by_ngrams((*self.prompt, *beam.tokens), rules.ngram)
        if self.length < rules.min_tokens:
            banned.update(rules.eos)
        constraint = None if beam.transcript is None else beam.transcript.constraint
        bits = None if constraint is None else constraint.mask()
        if bits is None and not banned:
            return None
        mask = np.ones(vocab, np.bool_) if bits is None else _booleans(bits, vocab)
        mask[sorted(banned)] = False
        return mask

    def _grown(self, parent: int, token: int, probes: tuple[Any, ...], possible: bool) -> Beam:
        """A beam with one more token."""
        beam = self.beams[parent]
        transcript = beam.transcript if possible else None
        if transcript is not None and token not in self.rules.eos:
            transcript = transcript.fork()
            transcript.add(token)
        return Beam((*beam.tokens, token), (*beam.probes, *probes), transcript)

    def _finish(self, beam: Beam) -> str | None:
        """Why a candidate ends here, if it does."""
        rules, transcript, last = self.rules, beam.transcript, self.length == self.rules.max_tokens
        if beam.tokens[-1] in rules.eos:
            return "stop" if beam.tokens[-1] in rules.stops else "eos"
        if transcript is not None and transcript.stopped:
            return "stop"
        if transcript is not None and transcript.rule.is_over(last=True):
            return "constraint"
        return "length" if last else None

    def _collect(self, beams: list[Beam], finishes: list[str | None], scores: np.ndarray, possible: list[bool]) -> None:
        """Keep the best B of those that ended before and those of the first B candidates that end now."""
        first = np.array([f is not None and i < self.rules.beams for i, f in enumerate(finishes)])
        level = scores / np.float32(self.length**self.rules.length_penalty)
        level = level + (~first).astype(np.float32) * np.float32(NEVER)
        new = [
            self._end(beam, finish, may) if finish is not None and ends else None
            for beam, finish, may, ends in zip(beams, finishes, possible, first.tolist(), strict=True)
        ]
        every = [*self.ends, *new]
        merged = np.concatenate((self.end_scores, level))
        kept = topk(merged, self.rules.beams)
        self.ends, self.end_scores = [every[i] for i in kept.tolist()], merged[kept]

    def _end(self, beam: Beam, finish: str, possible: bool) -> EndedBeam:
        surplus = int(beam.tokens[-1] in self.rules.eos)
        if not surplus and beam.transcript is not None and beam.transcript.stopped:
            surplus = beam.transcript.surplus
        return EndedBeam(beam, beam.tokens[: len(beam.tokens) - surplus], finish, possible)

    def _settled(self) -> bool:
        """Whether the beams that run cannot, or need not, beat those that ended."""
        full = None not in self.ends
        rules = self.rules
        hopeful = rules.early_stopping == "never" and rules.length_penalty > 0
        length = rules.max_tokens if hopeful else self.length
        best = float(self.scores[0] / length**rules.length_penalty)
        worst = float(self.end_scores.min()) if full else NEVER
        return best <= worst or (full and rules.early_stopping is True)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Those of rows [B, V], in float32."""
    if np.isnan(logits).any():
        raise PassFailed("the model's logits are NaN at the end of a beam; no token can be chosen")
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)


def _booleans(bits: Any, vocab: int) -> np.ndarray:
    """A constraint's mask as V booleans; one that allows nothing makes its beam impossible."""
    if isinstance(bits, np.ndarray) and not bits.any():
        return np.zeros(vocab, np.bool_)
    return np.array(logit_mask(vocab, bits))


def _filtered(rows: np.ndarray, draws: BeamSampling, keep: int) -> np.ndarray:
    """Rows [R, V] with everything outside top-k and top-p at -inf; `keep` tokens stay at least."""
    if 0 < draws.top_k < rows.shape[1]:
        count = min(max(draws.top_k, keep), rows.shape[1])
        edge = np.partition(rows, rows.shape[1] - count)[:, -count, None]
        rows = np.where(rows < edge, np.float32(-np.inf), rows)
    if draws.top_p < 1.0:
        ranked = np.argsort(-rows, axis=-1, kind="stable")
        weights = np.take_along_axis(rows, ranked, -1).astype(np.float64)
        weights = np.exp(weights - weights[:, :1])
        probs = weights / weights.sum(-1, keepdims=True)
        outside = probs.cumsum(-1) - probs >= draws.top_p  # those before it reach the share already
        outside[:, :keep] = False
        rows = rows.copy()
        np.put_along_axis(rows, ranked, np.where(outside, -np.inf, np.take_along_axis(rows, ranked, -1)), -1)
    return rows


def drawn(scores: np.ndarray, count: int, seed: int, position: int) -> np.ndarray:
    """Indices of `count` draws without replacement, with probabilities softmax(scores) [N], in the order drawn.

    What has no probability comes last, by index, when nothing else is left.
    """
    peak = scores.max()
    with np.errstate(invalid="ignore"):
        weights = np.where(scores == -np.inf, 0.0, np.exp((scores - peak).astype(np.float64)))
    drawn: list[int] = []
    for ordinal in range(count):
        live = np.flatnonzero(weights)
        if live.size == 0:
            break
        reached = np.cumsum(weights[live])
        at = np.searchsorted(reached, uniform(seed, position, ordinal) * reached[-1], side="right")
        drawn.append(int(live[min(int(at), live.size - 1)]))
        weights[drawn[-1]] = 0.0
    if len(drawn) < count:
        rest = np.setdiff1d(np.arange(scores.size), drawn)
        drawn += rest[: count - len(drawn)].tolist()
    return np.array(drawn, np.int64)
