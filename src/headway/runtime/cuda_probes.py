"""Probes on the device: what a step asks about its rows is put into one round, launched together, copied back once.

A probe becomes questions (kernels/triton/probing): measure a row, look up single scores, count what is above them; or
a row's best, which torch finds. Its value is made of what comes back. Where that does not decide (two scores meet at
the edge of the best, a NaN, a temperature that float32 has no room for) the torch reader decides, over the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.probes import Distribution, Entropy, Logits, Logprob, Logprobs, Rank, Ranked, Ranking
from headway.kernels.triton import probing
from headway.kernels.triton.probing import FOUND, JOB_INTS, NUMBERS, PAIR_INTS, Findings, Measured, Questions
from headway.runtime.cuda_arrays import Upload
from headway.runtime.cuda_graphs import Graphs
from headway.runtime.cuda_step import CudaModel
from headway.runtime.readout import Ask, not_a_number

JOBS = 512  # rows measured in one round
PAIRS = 4096  # scores looked up in one round
SLAB = 64  # rows of logits that are ranked or sorted at once
COLDEST, HOTTEST = 1e-30, 1e30  # temperatures that float32 divides by safely

Key = tuple[int, int]  # a segment and the index of one of its readouts
Asked = tuple[int, Ask]  # a row of logits and what is asked of it
NO_MASK = -1


class Drawn(NamedTuple):
    """A token drawn beside a probe: -1 - i when it is at place i of the device's tokens, else the token.

    `row` has the logits it is drawn from, bias and penalties included, and `temperature` and `allowed` what they go
    through; they are None where more happens to them than that.
    """

    token: int
    row: int
    temperature: float | None
    allowed: np.ndarray | None


class _Way(NamedTuple):
    """How scores become probabilities: at a temperature, and as a sampler does or as the model does."""

    temperature: float
    processed: bool


class _Edge(Exception):
    """What came back does not decide a value."""


@dataclass(frozen=True, eq=False)
class _Answers:
    """What came back of a round."""

    measured: list[Measured]
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


_Make = Callable[[_Answers], object]


@dataclass(eq=False)
class _Round:
    """Questions that are asked together, and how each value is made of the answers. Equal questions are asked once."""

    jobs: dict[tuple[int, int, float], int] = field(default_factory=dict)
    pairs: list[tuple[int, int, int, int]] = field(default_factory=list)
    best: dict[tuple[int, int], int] = field(default_factory=dict)
    most: int = 0  # how many of the best
    sorted: dict[tuple[int, int], int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    masks: list[np.ndarray] = field(default_factory=list)
    bound: dict[int, int] = field(default_factory=dict)  # masks by their identity
    makes: list[tuple[Asked, _Make]] = field(default_factory=list)

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


class CudaProbes:
    """Answers probes over rows of logits. Owns what is uploaded, found and copied back for them."""

    def __init__(self, model: CudaModel, graphs: Graphs) -> None:
        self.model, self._graphs = model, graphs
        self._vocab, self._device = model.config.vocab_size, model.device
        self._words, self._pieces = -(-self._vocab // 32), probing.pieces(self._vocab)
        self._asked = Upload(JOBS * JOB_INTS + PAIRS * PAIR_INTS, torch.int32, self._device)
        self._masks = Upload(self._words, torch.int32, self._device)
        room = JOBS * self._pieces * NUMBERS + PAIRS * (FOUND + self._pieces)
        self._found = torch.empty(room, dtype=torch.int32, device=self._device)
        self._back = torch.empty(room, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def begin(
        self,
        asked: Sequence[Asked],
        logits: Tensor,
        tokens: Tensor,
        drawn: Mapping[Key, Sequence[Drawn | None]],
        *,
        lasting: bool,
    ) -> Callable[[dict[Key, object]], list[Asked]]:
        """Set the device to work on these probes of logits [R, V], which are where they always are if `lasting`.

        `tokens` [A] int32 are those that the device draws in front of it, `drawn` has for every ranking those of its
        own row (None for one that is drawn later). What comes back waits, adds values, and gives the probes that are
        left undecided.
        """
        rounds, early, left = self._rounds(asked, drawn)
        first = self._launch(rounds[0], logits, tokens, lasting) if rounds else None

        def finish(values: dict[Key, object]) -> list[Asked]:
            values.update(early)
            undecided = list(left)
            for i, part in enumerate(rounds):
                wait = first if i == 0 and first is not None else self._launch(part, logits, tokens, lasting)
                undecided += _tell(part, wait(), values)
            return undecided

        return finish

    def _rounds(
        self, asked: Sequence[Asked], drawn: Mapping[Key, Sequence[Drawn | None]]
    ) -> tuple[list[_Round], dict[Key, object], list[Asked]]:
        """The questions of these probes, values that are known (errors), and probes without questions."""
        rounds, early, left = [_Round()], {}, []
        for row, ask in asked:
            part, key = rounds[-1], (ask.segment, ask.index)
            if len(part.jobs) == JOBS or len(part.pairs) + _pairs(ask) + len(drawn.get(key, ())) > PAIRS:
                rounds.append(part := _Round())
            try:
                make = self._ask(part, row, ask, drawn.get(key, ()))
            except _Edge:
                left.append((row, ask))
            except HeadwayError as error:  # the mask that was to come later did not
                early[key] = error
            else:
                part.makes.append(((row, ask), make))
        return [part for part in rounds if part.makes], early, left

    # -- from probes to questions ----------------------------------------------------------------------------------

    def _ask(self, part: _Round, row: int, ask: Ask, drawn: Sequence[Drawn | None]) -> _Make:
        """Put a probe's questions into the round; what comes back makes its value of the answers."""
        what = ask.what.what
        if _pairs(ask) + len(drawn) > PAIRS:
            raise _Edge
        if isinstance(what, Ranking):
            return self._ask_ranking(part, row, what, drawn)
        allowed = ask.what.permitted() if getattr(what, "masked", False) else None
        match what:
            case Logits():
                at = part.rows.setdefault(row, len(part.rows))
                return lambda found: _filled(found.rows[at], allowed)
            case Entropy():
                job = part.measure(row, part.bind(allowed))
                return lambda found: float(np.float32(_sound(found.measured[job]).entropy))
            case Logprob() | Logprobs():
                ids = (what.id,) if isinstance(what, Logprob) else what.ids
                assert isinstance(ids, tuple)
                job, pairs = part.measure(row, mask := part.bind(allowed)), part.place(row, ids, mask)
                return lambda found: _sound(found.measured[job]).logs(found.scores[pairs]).astype(np.float32)
            case Distribution(temperature, k):
                return self._ask_distribution(part, row, part.bind(allowed), temperature, k)
        raise AssertionError(what)

    def _ask_distribution(self, part: _Round, row: int, mask: int, temperature: float, k: int) -> _Make:
        job = part.measure(row, mask, temperature)
        whole = k == 0 or k >= self._vocab
        if whole:
            at = part.sorted.setdefault((row, mask), len(part.sorted))
        else:
            at = part.rank(row, mask, k)

        def make(found: _Answers) -> object:
            measured = _sound(found.measured[job])
            scores, ids = found.sorted[at] if whole else found.ranking(at, k)
            return ids, np.exp(measured.logs(scores, temperature)).astype(np.float32)

        return make

    def _ask_ranking(self, part: _Round, row: int, what: Ranking, drawn: Sequence[Drawn | None]) -> _Make:
        tokens = [d.token for d in drawn if d is not None]
        if len(tokens) < len(drawn):
            raise _Edge
        way, allowed = _Way(1.0, False), None
        if what.processed and drawn and (first := drawn[0]) is not None:
            if first.temperature is None:
                raise _Edge
            row, way, allowed = first.row, _Way(first.temperature or 1.0, True), first.allowed
        assert isinstance(what.ids, tuple)
        mask = part.bind(allowed)
        job = part.measure(row, mask, way.temperature)
        k = min(what.k, self._vocab)
        at = part.rank(row, mask, k) if k else None
        pairs = part.place(row, [*tokens, *what.ids], mask, ranked=True)
        names = (*what.ids,)

        def make(found: _Answers) -> object:
            measured = found.measured[job]
            if measured.bad:
                return not_a_number()
            ids = found.tokens[pairs].tolist()
            if any(token < 0 for token in ids):
                raise _Edge
            scores = found.scores[pairs]
            logs = _as_drawn(measured, scores, way)
            if (np.isneginf(logs) & (scores > -np.inf)).any():  # its rank is that of all that never come
                raise _Edge
            ranks = [Rank(*r) for r in zip(ids, logs.tolist(), found.ranks[pairs].tolist(), strict=True)]
            best = () if at is None else _best(measured, found, at, k, way)
            return Ranked(tuple(ranks[: len(ids) - len(names)]), tuple(ranks[len(ids) - len(names) :]), best)

        return make

    # -- on the device ---------------------------------------------------------------------------------------------

    def _launch(self, part: _Round, logits: Tensor, tokens: Tensor, lasting: bool) -> Callable[[], _Answers]:
        jobs, pairs = self._send(part)
        measured = jobs * self._pieces * NUMBERS
        back = measured + pairs * (FOUND + self._pieces)
        behind = jobs * JOB_INTS
        asked = Questions(
            self._asked.device[:behind].view(jobs, JOB_INTS),
            self._asked.device[behind : behind + pairs * PAIR_INTS].view(pairs, PAIR_INTS),
            self._masks.device.view(-1, self._words),
            tokens,
        )
        found = Findings(
            self._found[:measured].view(torch.float32).view(jobs, self._pieces, NUMBERS),
            self._found[measured:back].view(pairs, FOUND + self._pieces),
        )

        def work() -> None:
            probing.look(logits, asked, found)
            self._back[:back].copy_(self._found[:back], non_blocking=True)

        if back:
            key = ("probe", jobs, pairs, logits.data_ptr(), self._masks.device.data_ptr())
            self._graphs.run(key if lasting else None, work)
        best = self._ordered(list(part.best), part.masks, logits, part.most + 1)
        whole = self._ordered(list(part.sorted), part.masks, logits, self._vocab)
        rows = [_host(_taken(logits, list(part.rows)))] if part.rows else []

        def wait() -> _Answers:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            numbers = self._back[:back].numpy()
            return _Answers(
                *_read(part, numbers[:measured].view(np.float32), numbers[measured:], self._pieces),
                best=_pairs_of(best),
                sorted=_pairs_of(whole),
                rows=[row for block in rows for row in block.numpy()],
            )

        return wait

    def _send(self, part: _Round) -> tuple[int, int]:
        """Upload a round's questions; how many there are, with padding."""
        jobs, pairs = _room(len(part.jobs)), _room(len(part.pairs))
        self._asked.wait()
        host, behind = self._asked.host, jobs * JOB_INTS
        asked = host[:behind].reshape(jobs, JOB_INTS)
        asked[len(part.jobs) :, 0] = -1
        if part.jobs:
            rows, masks, rates = zip(*part.jobs, strict=True)
            asked[: len(rows), 0], asked[: len(rows), 1] = rows, masks
            asked[: len(rows), 2] = np.array(rates, np.float32).view(np.int32)
        named = host[behind : behind + pairs * PAIR_INTS].reshape(pairs, PAIR_INTS)
        named[len(part.pairs) :, 0] = -1
        if part.pairs:
            named[: len(part.pairs)] = part.pairs
        self._asked.send(behind + pairs * PAIR_INTS)
        self._send_masks(part.masks)
        return jobs, pairs

    def _send_masks(self, masks: Sequence[np.ndarray]) -> None:
        if not masks:
            return
        if len(masks) * self._words > len(self._masks):
            self._masks.grow(2 * len(masks) * self._words)
        self._masks.wait()
        bits = self._masks.host[: len(masks) * self._words].view(np.uint8).reshape(len(masks), -1)
        for line, allowed in zip(bits, masks, strict=True):
            packed = np.packbits(allowed, bitorder="little")
            line[: len(packed)], line[len(packed) :] = packed, 0
        self._masks.send(len(masks) * self._words)

    def _ordered(
        self, asked: list[tuple[int, int]], masks: Sequence[np.ndarray], logits: Tensor, count: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The `count` best scores of these rows, each behind its mask, and their ids, on their way to the host."""
        found = []
        for start in range(0, len(asked), SLAB):
            slab = asked[start : start + SLAB]
            lines = _taken(logits, [row for row, _ in slab])
            bound = [(i, mask) for i, (_, mask) in enumerate(slab) if mask != NO_MASK]
            if bound:
                allowed = torch.ones(lines.shape, dtype=torch.bool)
                for i, mask in bound:
                    allowed[i] = torch.from_numpy(masks[mask])
                lines = lines.masked_fill(~allowed.to(self._device), float("-inf"))
            if count >= self._vocab:
                scores, ids = lines.sort(dim=1, descending=True, stable=True)
            else:
                scores, ids = lines.topk(count, dim=1)
            found.append((_host(scores), _host(ids)))
        return found


def _read(
    part: _Round, measured: np.ndarray, placed: np.ndarray, pieces: int
) -> tuple[list[Measured], np.ndarray, np.ndarray, np.ndarray]:
    """Rows that were measured, and the scores, ranks and tokens of pairs."""
    jobs, pairs = len(part.jobs), len(part.pairs)
    rates = np.array([rate for _, _, rate in part.jobs])
    rows = probing.combined(measured.reshape(-1, pieces, NUMBERS)[:jobs], rates)
    lines = placed.reshape(-1, FOUND + pieces)[:pairs]
    scores = np.ascontiguousarray(lines[:, 0]).view(np.float32)
    return rows, scores, 1 + lines[:, FOUND:].sum(1), lines[:, 1].copy()


def _tell(part: _Round, found: _Answers, values: dict[Key, object]) -> list[Asked]:
    """Make the values of a round; the probes that are left undecided."""
    left = []
    for asked, make in part.makes:
        try:
            values[asked[1].segment, asked[1].index] = make(found)
        except _Edge:
            left.append(asked)
    return left


def _sound(measured: Measured) -> Measured:
    if measured.bad:
        raise _Edge
    return measured


def _filled(row: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    row = row.copy()
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def _as_drawn(measured: Measured, scores: np.ndarray, way: _Way) -> np.ndarray:
    """Log-probabilities of these scores; where a token's weight is nothing in float64, a draw never comes to it."""
    logs = measured.logs(scores, way.temperature)
    if way.processed:
        logs[np.exp(logs + np.log(measured.mass)) == 0] = -np.inf
    return logs


def _best(measured: Measured, found: _Answers, at: int, k: int, way: _Way) -> tuple[Rank, ...]:
    """The k best that can come."""
    kept = int((found.best[at][0][:k] > -np.inf).sum())
    if kept == 0:
        return ()
    scores, ids = found.ranking(at, kept)
    logs = _as_drawn(measured, scores, way)
    firsts = np.searchsorted(-scores, -scores) + 1
    ranks = zip(ids.tolist(), logs.tolist(), firsts.tolist(), strict=True)
    return tuple(Rank(*found) for found in ranks if found[1] > -np.inf)


def _pairs(ask: Ask) -> int:
    """How many scores a probe looks up."""
    what = ask.what.what
    ids = what.ids if isinstance(what, Logprobs | Ranking) else ()
    assert isinstance(ids, tuple)
    return len(ids) or 1


def _room(count: int) -> int:
    """The next power of two, so that there are few graphs; 0 for none."""
    return 1 << (count - 1).bit_length() if count else 0


def _taken(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows of logits [R, V]: itself where it can be."""
    if rows == list(range(len(rows))):
        return logits[: len(rows)]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _host(x: Tensor) -> Tensor:
    """A copy on its way to the host; it is there when the stream is."""
    if x.device.type != "cuda":
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _pairs_of(blocks: list[tuple[Tensor, Tensor]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and ids of every row."""
    return [(s.copy(), i.copy()) for scores, ids in blocks for s, i in zip(scores.numpy(), ids.numpy(), strict=True)]
