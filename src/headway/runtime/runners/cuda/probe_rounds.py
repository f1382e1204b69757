"""What probes ask of the device, put together in rounds, and how their values are made of what comes back.

A probe becomes questions (kernels/triton/probes): measure a row, look up single scores, count what is above them; or
a row's best. All of this is the host's part, and pure. Where the answers do not decide a value (two scores meet at the
edge of the best, a NaN, a temperature that float32 cannot hold) it is the torch reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.specs.probes import Distribution, Entropy, Logits, Logprob, Logprobs, Rank, Ranked, Ranking
from headway.kernels.triton.probes import MOST_BEST, RowStats
from headway.runtime.readout import Ask, not_a_number

JOBS = 512  # rows measured in one round
PAIRS = 4096  # scores looked up in one round
COLDEST, HOTTEST = 1e-30, 1e30  # temperatures that float32 divides by safely
NO_MASK = -1

Key = tuple[int, int]  # a segment and the index of one of its readouts
Query = tuple[int, Ask]  # a row of logits and what is asked of it


class Drawn(NamedTuple):
    """A token sampled at a probe's row: -1 - i when it is at place i of the device's tokens, else the token.

    `row` has the logits it is drawn from, bias and penalties included, and `temperature` and `allowed` what they go
    through; they are None where more happens to them than that.
    """

    token: int
    row: int
    temperature: float | None
    allowed: np.ndarray | None


class _Edge(Exception):
    """No questions decide a value."""


UNDECIDED = object()  # in the place of a value: what came back does not decide it


@dataclass(frozen=True, eq=False)
class BestScores:
    """The best of B rows, in order, ties by lower id: scores and ids [B, K]. Unless they are `complete`, others may
    have the last of the scores."""

    scores: np.ndarray
    ids: np.ndarray
    complete: bool

    def first(self, rows: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores and ids [n, k] of the k best of these rows, and where they are not decided [n]."""
        scores, ids = self.scores[rows], self.ids[rows]
        tied = np.zeros(len(scores), bool) if self.complete else scores[:, k - 1] == scores[:, -1]
        return scores[:, :k], ids[:, :k], tied


@dataclass(frozen=True, eq=False)
class Answers:
    """What came back of a round."""

    measured: RowStats
    scores: np.ndarray  # [P] float32
    ranks: np.ndarray  # [P]
    tokens: np.ndarray  # [P]
    best: tuple[BestScores, BestScores]  # few (`is_few`), and more
    sorted: list[tuple[np.ndarray, np.ndarray]]  # scores and ids
    rows: list[np.ndarray]


_Place = tuple[Any, ...]  # where a probe's answers are
_Make = Callable[[Answers, Sequence[_Place]], Iterable[object]]


@dataclass(frozen=True, eq=False)
class _Alike:
    """Probes of one kind, whose values are made together."""

    make: _Make
    queries: list[Query] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)


@dataclass(eq=False)
class ProbeRound:
    """Questions that are asked together, and how values are made of the answers. Equal questions are asked once."""

    vocab: int
    jobs: dict[tuple[int, int, float], int] = field(default_factory=dict)
    pairs: list[tuple[int, int, int, int]] = field(default_factory=list)
    best: tuple[dict[tuple[int, int], int], ...] = field(default_factory=lambda: ({}, {}))  # rows and masks: few, more
    best_jobs: list[int] = field(default_factory=list)  # where rows whose few best are wanted are measured
    most: list[int] = field(default_factory=lambda: [0, 0])  # how many of the best
    sorted: dict[tuple[int, int], int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    masks: list[np.ndarray] = field(default_factory=list)
    bound: dict[int, int] = field(default_factory=dict)  # masks by their identity
    probes: dict[object, _Alike] = field(default_factory=dict)

    def bind(self, allowed: np.ndarray | None) -> int:
        if allowed is None:
            return NO_MASK
        if id(allowed) not in self.bound:
            self.bound[id(allowed)] = len(self.masks)
            self.masks.append(allowed)
        return self.bound[id(allowed)]

    def measure(self, row: int, mask: int, temperature: float = 1.0) -> int:
        if not COLDEST <= temperature <= HOTTEST:
            raise _Edge
        return self.jobs.setdefault((row, mask, 1.0 / temperature), len(self.jobs))

    def place(self, row: int, tokens: Sequence[int], mask: int, *, ranked: bool = False) -> int:
        """Look these up; where the first of them is."""
        start = len(self.pairs)
        self.pairs += [(row, token, mask, int(ranked)) for token in tokens]
        return start

    def rank(self, job: int, row: int, mask: int, k: int) -> int:
        """Find the k best of a row that is measured."""
        more = not is_few(k)
        self.most[more] = max(self.most[more], k)
        found = self.best[more]
        if not more and (row, mask) not in found:
            self.best_jobs.append(job)
        return found.setdefault((row, mask), len(found))

    def add(self, query: Query, kind: object, make: _Make, *place: Any) -> None:
        """Make a probe's value, with all others of its kind, of the answers at a place."""
        alike = self.probes.setdefault(kind, _Alike(make))
        alike.queries.append(query)
        alike.places.append(place)


def is_few(k: int) -> bool:
    """Whether the device finds the k best; more are found by torch."""
    return k <= MOST_BEST


class Plan(NamedTuple):
    """Rounds of questions, values that need none (errors), and probes that no questions decide."""

    rounds: list[ProbeRound]
    known: dict[Key, object]
    left: list[Query]


def plan(queries: Sequence[Query], drawn: Mapping[Key, Sequence[Drawn | None]], vocab: int) -> Plan:
    """The questions of these probes; `drawn` has for every ranking what is drawn at its row."""
    rounds, known, left = [ProbeRound(vocab)], {}, []
    for query in queries:
        part, ask = rounds[-1], query[1]
        key = ask.segment, ask.index
        mates = drawn.get(key, ())
        if len(part.jobs) == JOBS or len(part.pairs) + _pairs(ask) + len(mates) > PAIRS:
            rounds.append(part := ProbeRound(vocab))
        try:
            _add_query(part, query, mates)
        except _Edge:
            left.append(query)
        except HeadwayError as error:  # the mask that was to come later did not
            known[key] = error
    return Plan([part for part in rounds if part.probes], known, left)


def _add_query(part: ProbeRound, query: Query, drawn: Sequence[Drawn | None]) -> None:
    """Put a probe's questions into the round."""
    row, ask = query
    what = ask.readout.what
    if _pairs(ask) + len(drawn) > PAIRS:
        raise _Edge
    if isinstance(what, Ranking):
        _add_ranking(part, query, what, drawn)
        return
    allowed = ask.readout.permitted() if getattr(what, "masked", False) else None
    match what:
        case Logits():
            part.add(query, "logits", _logits, part.rows.setdefault(row, len(part.rows)), allowed)
        case Entropy():
            part.add(query, "entropy", _entropies, part.measure(row, part.bind(allowed)))
        case Logprob() | Logprobs():
            ids = (what.id,) if isinstance(what, Logprob) else what.ids
            assert isinstance(ids, tuple)
            job = part.measure(row, mask := part.bind(allowed))
            start = part.place(row, ids, mask)
            part.add(query, ("logprobs", len(ids)), partial(_logprobs, len(ids)), job, start)
        case Distribution(temperature, k):
            job = part.measure(row, mask := part.bind(allowed), temperature)
            if k == 0 or k >= part.vocab:
                at = part.sorted.setdefault((row, mask), len(part.sorted))
                part.add(query, "whole", _whole_distributions, job, at, temperature)
            else:
                at = part.rank(job, row, mask, k)
                part.add(query, ("distribution", k), partial(_distributions, k), job, at, temperature)
        case _:
            raise AssertionError(what)


def _add_ranking(part: ProbeRound, query: Query, what: Ranking, drawn: Sequence[Drawn | None]) -> None:
    row, tokens = query[0], [d.token for d in drawn if d is not None]
    if len(tokens) < len(drawn):
        raise _Edge
    temperature, allowed = 1.0, None
    if what.processed and drawn and (first := drawn[0]) is not None:
        if first.temperature is None:
            raise _Edge
        row, temperature, allowed = first.row, first.temperature or 1.0, first.allowed
    assert isinstance(what.ids, tuple)
    mask = part.bind(allowed)
    job = part.measure(row, mask, temperature)
    k = min(what.k, part.vocab)
    at = part.rank(job, row, mask, k) if k else 0
    start = part.place(row, [*tokens, *what.ids], mask, ranked=True)
    shape = k, len(tokens), len(what.ids)
    part.add(query, ("ranking", *shape), partial(_rankings, *shape), job, at, start, temperature)


def tell(part: ProbeRound, answers: Answers, values: dict[Key, object]) -> list[Query]:
    """Make the values of a round; the probes that are left undecided."""
    left = []
    for alike in part.probes.values():
        for query, value in zip(alike.queries, alike.make(answers, alike.places), strict=True):
            if value is UNDECIDED:
                left.append(query)
            else:
                values[query[1].segment, query[1].index] = value
    return left


def _logits(answers: Answers, places: Sequence[_Place]) -> Iterable[object]:
    return [_filled(answers.rows[at], allowed) for at, allowed in places]


def _entropies(answers: Answers, places: Sequence[_Place]) -> Iterable[object]:
    jobs = [job for (job,) in places]
    found = answers.measured.entropies()[jobs].astype(np.float32)
    return _decided(found.tolist(), answers.measured.bad[jobs])


def _logprobs(count: int, answers: Answers, places: Sequence[_Place]) -> Iterable[object]:
    jobs, starts = zip(*places, strict=True)
    scores = answers.scores[np.array(starts)[:, None] + np.arange(count)]
    logs = answers.measured.logs(jobs, scores).astype(np.float32)
    return _decided(map(np.copy, logs), answers.measured.bad[list(jobs)])


def _whole_distributions(answers: Answers, places: Sequence[_Place]) -> Iterable[object]:
    measured = answers.measured
    for job, at, temperature in places:
        scores, ids = answers.sorted[at]
        if measured.bad[job]:
            yield UNDECIDED
        else:
            yield ids, np.exp(measured.logs([job], scores[None], temperature)[0]).astype(np.float32)


def _distributions(k: int, answers: Answers, places: Sequence[_Place]) -> Iterable[object]:
    jobs, at, temperatures = (list(n) for n in zip(*places, strict=True))
    scores, ids, tied = answers.best[not is_few(k)].first(at, k)
    probs = np.exp(answers.measured.logs(jobs, scores, temperatures)).astype(np.float32)
    pairs = [(i.copy(), p.copy()) for i, p in zip(ids, probs, strict=True)]
    return _decided(pairs, answers.measured.bad[jobs] | tied)


def _rankings(k: int, drawn: int, named: int, answers: Answers, places: Sequence[_Place]) -> Iterable[object]:
    """`Ranked` values, of `drawn` and `named` tokens and the k best that can come."""
    jobs, at, starts, temperatures = (list(n) for n in zip(*places, strict=True))
    measured, pairs = answers.measured, np.array(starts)[:, None] + np.arange(drawn + named)
    tokens = answers.tokens[pairs]
    logs = measured.logs(jobs, answers.scores[pairs], temperatures)
    ranks = list(map(_as_ranks, tokens.tolist(), logs.tolist(), answers.ranks[pairs].tolist()))
    undecided = np.asarray((tokens < 0).any(1))
    best: list[tuple[Rank, ...]] = [()] * len(jobs)
    if k:
        scores, ids, tied = answers.best[not is_few(k)].first(at, k)
        undecided |= tied & (scores[:, -1] > -np.inf)
        logs = measured.logs(jobs, scores, temperatures)
        steps = np.arange(1, k + 1) * np.insert(scores[:, 1:] < scores[:, :-1], 0, True, axis=1)
        lists = ids.tolist(), logs.tolist(), np.maximum.accumulate(steps, axis=1).tolist()
        best = list(map(_as_ranks, *lists))
        for i in np.flatnonzero((logs == -np.inf).any(1)).tolist():
            best[i] = tuple([rank for rank in best[i] if rank.logprob > -np.inf])
    marks = measured.bad[jobs].tolist(), undecided.tolist()
    for bad, is_open, row, top in zip(*marks, ranks, best, strict=True):
        if bad:
            yield not_a_number()
        else:
            yield UNDECIDED if is_open else Ranked(row[:drawn], row[drawn:], top)


_new_rank = partial(tuple.__new__, Rank)


def _as_ranks(ids: list[int], logs: list[float], ranks: list[int]) -> tuple[Rank, ...]:
    return tuple(map(_new_rank, zip(ids, logs, ranks, strict=True)))


def _decided(values: Iterable[object], undecided: np.ndarray) -> Iterable[object]:
    return [UNDECIDED if bad else value for value, bad in zip(values, undecided.tolist(), strict=True)]


def _filled(row: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    row = row.copy()
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def _pairs(ask: Ask) -> int:
    """How many scores a probe looks up."""
    what = ask.readout.what
    ids = what.ids if isinstance(what, Logprobs | Ranking) else ()
    assert isinstance(ids, tuple)
    return len(ids) or 1
