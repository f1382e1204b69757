"""What probes ask of the device, put together in rounds, and how their values are made of what comes back.

A probe becomes questions (kernels/triton/probes): measure a row, look up single scores, count what is above them; or
a row's best. All of this is the host's part, and pure. Where the answers do not decide a value (two scores meet at the
edge of the best, a NaN, a temperature that float32 cannot hold) it is the torch reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.specs.probes import Distribution, Entropy, Logits, Logprob, Logprobs, Rank, Ranked, Ranking
from headway.kernels.triton.probes import RowStats
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
    """What came back does not decide a value."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What came back of a round."""

    measured: list[RowStats]
    scores: np.ndarray  # [P] float32
    ranks: np.ndarray  # [P]
    tokens: np.ndarray  # [P]
    best: list[tuple[np.ndarray, np.ndarray]]  # scores and ids, of each row whose best were asked for
    sorted: list[tuple[np.ndarray, np.ndarray]]
    rows: list[np.ndarray]

    def ranking(self, at: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and ids of the k best, by score and then by lower id."""
        scores, ids = self.best[at]
        if k < len(scores) and scores[k - 1] == scores[k]:
            raise _Edge
        order = np.lexsort((ids[:k], -scores[:k]))
        return scores[order], ids[order]


_Make = Callable[[Answers], object]


@dataclass(eq=False)
class ProbeRound:
    """Questions that are asked together, and how each value is made of the answers. Equal questions are asked once."""

    vocab: int
    jobs: dict[tuple[int, int, float], int] = field(default_factory=dict)
    pairs: list[tuple[int, int, int, int]] = field(default_factory=list)
    best: dict[tuple[int, int], int] = field(default_factory=dict)
    most: int = 0  # how many of the best
    sorted: dict[tuple[int, int], int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    masks: list[np.ndarray] = field(default_factory=list)
    bound: dict[int, int] = field(default_factory=dict)  # masks by their identity
    makes: list[tuple[Query, _Make]] = field(default_factory=list)

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

    def place(self, row: int, tokens: Sequence[int], mask: int, *, ranked: bool = False) -> slice:
        start = len(self.pairs)
        self.pairs += [(row, token, mask, int(ranked)) for token in tokens]
        return slice(start, len(self.pairs))

    def rank(self, row: int, mask: int, k: int) -> int:
        self.most = max(self.most, k)
        return self.best.setdefault((row, mask), len(self.best))


class Plan(NamedTuple):
    """Rounds of questions, values that need none (errors), and probes that no questions decide."""

    rounds: list[ProbeRound]
    known: dict[Key, object]
    left: list[Query]


def plan(queries: Sequence[Query], drawn: Mapping[Key, Sequence[Drawn | None]], vocab: int) -> Plan:
    """The questions of these probes; `drawn` has for every ranking what is drawn at its row."""
    rounds, known, left = [ProbeRound(vocab)], {}, []
    for row, ask in queries:
        part, key = rounds[-1], (ask.segment, ask.index)
        mates = drawn.get(key, ())
        if len(part.jobs) == JOBS or len(part.pairs) + _pairs(ask) + len(mates) > PAIRS:
            rounds.append(part := ProbeRound(vocab))
        try:
            make = _add_query(part, row, ask, mates)
        except _Edge:
            left.append((row, ask))
        except HeadwayError as error:  # the mask that was to come later did not
            known[key] = error
        else:
            part.makes.append(((row, ask), make))
    return Plan([part for part in rounds if part.makes], known, left)


def is_one_round(queries: Sequence[Query], drawn: Mapping[Key, Sequence[Drawn | None]]) -> bool:
    """Whether the questions of these probes are asked together, however many of them are equal."""
    pairs = sum(_pairs(ask) + len(drawn.get((ask.segment, ask.index), ())) for _, ask in queries)
    return len(queries) <= JOBS and pairs <= PAIRS


def _add_query(part: ProbeRound, row: int, ask: Ask, drawn: Sequence[Drawn | None]) -> _Make:
    """Put a probe's questions into the round; what comes back makes its value of the answers."""
    what = ask.readout.what
    if _pairs(ask) + len(drawn) > PAIRS:
        raise _Edge
    if isinstance(what, Ranking):
        return _ask_ranking(part, row, what, drawn)
    allowed = ask.readout.permitted() if getattr(what, "masked", False) else None
    match what:
        case Logits():
            at = part.rows.setdefault(row, len(part.rows))
            return lambda answers: _filled(answers.rows[at], allowed)
        case Entropy():
            job = part.measure(row, part.bind(allowed))
            return lambda answers: float(np.float32(_sound(answers.measured[job]).entropy))
        case Logprob() | Logprobs():
            ids = (what.id,) if isinstance(what, Logprob) else what.ids
            assert isinstance(ids, tuple)
            job, pairs = part.measure(row, mask := part.bind(allowed)), part.place(row, ids, mask)
            return lambda answers: _sound(answers.measured[job]).logs(answers.scores[pairs]).astype(np.float32)
        case Distribution(temperature, k):
            return _ask_distribution(part, row, part.bind(allowed), temperature, k)
    raise AssertionError(what)


def _ask_distribution(part: ProbeRound, row: int, mask: int, temperature: float, k: int) -> _Make:
    job = part.measure(row, mask, temperature)
    whole = k == 0 or k >= part.vocab
    if whole:
        at = part.sorted.setdefault((row, mask), len(part.sorted))
    else:
        at = part.rank(row, mask, k)

    def make(answers: Answers) -> object:
        measured = _sound(answers.measured[job])
        scores, ids = answers.sorted[at] if whole else answers.ranking(at, k)
        return ids, np.exp(measured.logs(scores, temperature)).astype(np.float32)

    return make


def _ask_ranking(part: ProbeRound, row: int, what: Ranking, drawn: Sequence[Drawn | None]) -> _Make:
    tokens = [d.token for d in drawn if d is not None]
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
    at = part.rank(row, mask, k) if k else None
    pairs = part.place(row, [*tokens, *what.ids], mask, ranked=True)
    names = (*what.ids,)

    def make(answers: Answers) -> object:
        measured = answers.measured[job]
        if measured.bad:
            return not_a_number()
        ids = answers.tokens[pairs].tolist()
        if any(token < 0 for token in ids):
            raise _Edge
        scores = answers.scores[pairs]
        logs = measured.logs(scores, temperature)
        ranks = [Rank(*r) for r in zip(ids, logs.tolist(), answers.ranks[pairs].tolist(), strict=True)]
        best = () if at is None else _best(measured, answers, at, k, temperature)
        return Ranked(tuple(ranks[: len(ids) - len(names)]), tuple(ranks[len(ids) - len(names) :]), best)

    return make


def tell(part: ProbeRound, answers: Answers, values: dict[Key, object]) -> list[Query]:
    """Make the values of a round; the probes that are left undecided."""
    left = []
    for query, make in part.makes:
        try:
            values[query[1].segment, query[1].index] = make(answers)
        except _Edge:
            left.append(query)
    return left


def _sound(measured: RowStats) -> RowStats:
    if measured.bad:
        raise _Edge
    return measured


def _filled(row: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    row = row.copy()
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def _best(measured: RowStats, answers: Answers, at: int, k: int, temperature: float) -> tuple[Rank, ...]:
    """The k best that can come."""
    kept = int((answers.best[at][0][:k] > -np.inf).sum())
    if kept == 0:
        return ()
    scores, ids = answers.ranking(at, kept)
    logs = measured.logs(scores, temperature)
    firsts = np.searchsorted(-scores, -scores) + 1
    ranks = zip(ids.tolist(), logs.tolist(), firsts.tolist(), strict=True)
    return tuple(Rank(*each) for each in ranks if each[1] > -np.inf)


def _pairs(ask: Ask) -> int:
    """How many scores a probe looks up."""
    what = ask.readout.what
    ids = what.ids if isinstance(what, Logprobs | Ranking) else ()
    assert isinstance(ids, tuple)
    return len(ids) or 1
