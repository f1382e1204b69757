"""Reading a step on the device: the head on asked rows, samplers in one kernel, one small copy back.

Samplers with typical-p, probes, and penalties beside another readout of the same row go through the torch reader, over
the same logits. The logits of a step are overwritten by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.probes import Ranking
from headway.base.rng import uniforms
from headway.base.samplers import Sampling
from headway.kernels.triton import sampling
from headway.kernels.triton.sampling import ASK_FLOATS, ASK_INTS, NO_TOKEN, UNDECIDED, Asks
from headway.runtime.batch import Batch
from headway.runtime.cuda_arrays import Upload
from headway.runtime.cuda_graphs import Graphs, padded
from headway.runtime.cuda_step import CudaModel, Mark
from headway.runtime.passes import BEFORE, Readout
from headway.runtime.readout import Ask, Reader, not_a_number

MOST = 512  # rows of logits, and tokens drawn, at once
COLDEST = 1e-30  # the lowest temperature that float32 divides by safely

Key = tuple[int, int]  # a segment and the index of one of its readouts
Values = dict[Key, object]


class _Place(NamedTuple):
    """Where a readout's residual is: a batch row, or a segment's kept state."""

    row: int
    segment: int


class CudaReader:
    """Turns residual rows into values. Owns the logits and everything the sampler needs."""

    def __init__(self, model: CudaModel, graphs: Graphs) -> None:
        self.model, self._graphs, self._slow = model, graphs, Reader(model, None)
        vocab, device = model.config.vocab_size, model.device
        self._words = -(-vocab // 32)
        self._room = 0
        self._rows = Upload(MOST, torch.int32, device)
        self._ints = Upload(MOST * ASK_INTS, torch.int32, device)
        self._floats = Upload(MOST * ASK_FLOATS, torch.float64, device)
        self._masks = Upload(self._words, torch.int32, device)
        self._found = sampling.room(MOST, vocab, device)
        self._tokens = torch.empty(MOST, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._ways: dict[int, tuple[Sampling, tuple[int, float, float, float]]] = {}
        self._grow(1)

    def read(self, batch: Batch, x: Tensor | None, mark: Mark) -> Values:
        """Values by segment and readout. x [T, E] is the residual before the final norm; None when T is 0."""
        values: Values = {}
        by_place: dict[_Place, list[Ask]] = {}
        for s, segment in enumerate(batch.segments):
            for index, row, what in segment.readouts:
                place = _Place(row, s if row == BEFORE else 0)
                by_place.setdefault(place, []).append(Ask(s, index, row, what))
        places = list(by_place)
        for start in range(0, len(places), MOST):
            part = places[start : start + MOST]
            logits = self._logits(part, batch, x)
            mark("head")
            self._answer([(i, ask) for i, place in enumerate(part) for ask in by_place[place]], logits, batch, values)
            mark("sample")
        return values

    # -- logits ----------------------------------------------------------------------------------------------------

    def _grow(self, rows: int) -> None:
        """Have room for the logits of so many rows; graphs that write to the old room go."""
        if rows <= self._room:
            return
        self._room = rows if rows < 64 else MOST
        for key in [k for k in self._graphs.graphs if isinstance(k, tuple) and k[0] in ("head", "draw")]:
            del self._graphs.graphs[key]
        c, device = self.model.config, self.model.device
        self._out = torch.empty(self._room, c.vocab_size, dtype=torch.float32, device=device)
        self._h = torch.empty(self._room, c.hidden_size, dtype=self.model.dtype, device=device)

    def _logits(self, places: Sequence[_Place], batch: Batch, x: Tensor | None) -> Tensor:
        """Logits [R, V] of these places, in the reader's own room."""
        count = len(places)
        if any(place.row == BEFORE for place in places):
            rows = [self._residual(place, batch, x) for place in places]
            return self.model.logits(torch.stack(rows), None)
        assert x is not None
        size = padded(count)
        assert size is not None
        self._grow(size)
        logits, h = self._out[:size], self._h[:size]
        if len(x) == 1:
            self._graphs.run(("head", 1, x.data_ptr()), lambda: self.model.head(x, None, h, logits))
            return logits[:1]
        self._rows.wait()
        self._rows.host[:count] = [place.row for place in places]
        self._rows.host[count:size] = 0
        self._rows.send(size)
        chosen = self._rows.device[:size]
        self._graphs.run(("head", size, x.data_ptr()), lambda: self.model.head(x, chosen, h, logits))
        return logits[:count]

    @staticmethod
    def _residual(place: _Place, batch: Batch, x: Tensor | None) -> Tensor:
        kept = batch.segments[place.segment].kept if place.row == BEFORE else None
        if kept is not None:
            assert isinstance(kept, Tensor)
            return kept
        assert x is not None
        return x[place.row]

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _answer(self, asked: list[tuple[int, Ask]], logits: Tensor, batch: Batch, values: Values) -> None:
        """Values of asks, each with its row of logits."""
        shared = _shared(asked)
        ranked = {at for at, ask in asked if isinstance(ask.what.what, Ranking)}  # it looks at what is drawn beside it
        quick, slow = [], []
        for at, ask in asked:
            fast = at not in ranked and self._is_quick(ask.what, at in shared)
            (quick if fast else slow).append((at, ask))
        for start in range(0, len(quick), MOST):
            slow += self._draw(quick[start : start + MOST], logits, batch, values)
        if slow:
            values.update(self._slow.answers([a for _, a in slow], [at for at, _ in slow], logits, batch))

    @staticmethod
    def _is_quick(readout: Readout, shared: bool) -> bool:
        """Whether the device can draw it."""
        how = readout.what
        if not isinstance(how, Sampling) or how.typical_p < 1 or 0 < how.temperature < COLDEST:
            return False
        return not (shared and (how.penalises or how.bias))

    def _draw(
        self, asked: list[tuple[int, Ask]], logits: Tensor, batch: Batch, values: Values
    ) -> list[tuple[int, Ask]]:
        """Tokens of at most MOST asks; those that the device leaves undecided come back."""
        self._adjust(asked, logits)
        bound = self._bind(asked, values)
        drawn = [(at, ask) for at, ask in asked if (ask.segment, ask.index) not in values]
        if not drawn:
            return []
        size = padded(len(drawn))
        assert size is not None
        self._fill(drawn, bound, batch, size)
        asks = Asks(
            self._ints.device[: size * ASK_INTS].view(size, ASK_INTS),
            self._floats.device[: size * ASK_FLOATS].view(size, ASK_FLOATS),
            self._masks.device.view(-1, self._words),
        )
        key = ("draw", size, logits.data_ptr(), self._masks.device.data_ptr())
        self._graphs.run(key, lambda: self._choose(logits, asks, size))
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        undecided = []
        for (at, ask), token in zip(drawn, self._tokens[: len(drawn)].tolist(), strict=True):
            if token == UNDECIDED:
                undecided.append((at, ask))
            else:
                values[ask.segment, ask.index] = not_a_number() if token == NO_TOKEN else token
        return undecided

    def _choose(self, logits: Tensor, asks: Asks, size: int) -> None:
        sampling.choose(logits, asks, self._found)
        self._tokens[:size].copy_(self._found.tokens[:size], non_blocking=True)

    def _fill(self, asked: list[tuple[int, Ask]], bound: dict[Key, int], batch: Batch, size: int) -> None:
        """The asks' numbers, on the device."""
        count, ways = len(asked), [self._way(ask.what.what) for _, ask in asked]
        self._ints.wait()
        self._floats.wait()
        ints = self._ints.host[: size * ASK_INTS].reshape(size, ASK_INTS)
        floats = self._floats.host[: size * ASK_FLOATS].reshape(size, ASK_FLOATS)
        ints[count:, 0] = -1
        ints[:count, 0] = [at for at, _ in asked]
        ints[:count, 1] = [way[0] for way in ways]
        ints[:count, 2] = [bound.get((ask.segment, ask.index), -1) for _, ask in asked] if bound else -1
        floats[:count, :3] = [way[1:] for way in ways]
        if any(way[1] > 0 for way in ways):
            floats[:count, 3] = uniforms(
                np.array([ask.what.seed for _, ask in asked], np.uint64),
                np.array([_position(batch, ask) for _, ask in asked], np.uint64),
                np.array([ask.what.ordinal for _, ask in asked], np.uint64),
            )
        self._ints.send(size * ASK_INTS)
        self._floats.send(size * ASK_FLOATS)

    def _way(self, what: object) -> tuple[int, float, float, float]:
        """Top-k, temperature, top-p and min-p; a generation's sampler is one object from its first step to its last."""
        found = self._ways.get(id(what))
        if found is not None and found[0] is what:
            return found[1]
        assert isinstance(what, Sampling)
        if len(self._ways) > 4 * MOST:
            self._ways.clear()
        way = min(what.top_k, self.model.config.vocab_size), what.temperature, what.top_p, what.min_p
        self._ways[id(what)] = what, way
        return way

    def _bind(self, asked: list[tuple[int, Ask]], values: Values) -> dict[Key, int]:
        """Logit masks as bits on the device, and which ask each binds. An error is its ask's value."""
        found: list[tuple[Key, np.ndarray]] = []
        for _, ask in asked:
            if ask.what.allowed is None and ask.what.later is None:
                continue
            try:
                allowed = ask.what.permitted()
            except HeadwayError as error:  # there is no mask for this row; the others go on
                values[ask.segment, ask.index] = error
                continue
            assert allowed is not None
            found.append(((ask.segment, ask.index), allowed))
        if not found:
            return {}
        if len(found) * self._words > len(self._masks):
            self._masks.grow((len(found) if len(found) < 64 else MOST) * self._words)
        self._masks.wait()
        bits = self._masks.host.view(np.uint8).reshape(-1, self._words * 4)
        for i, (_, allowed) in enumerate(found):
            packed = np.packbits(allowed, bitorder="little")
            bits[i, : len(packed)] = packed
            bits[i, len(packed) :] = 0
        self._masks.send(len(found) * self._words)
        return {key: i for i, (key, _) in enumerate(found)}

    def _adjust(self, asked: list[tuple[int, Ask]], logits: Tensor) -> None:
        """Bias and penalties onto the logits of rows that nobody else reads."""
        rows, ends, ids, amounts, ways = [], [0], [], [], []
        for at, ask in asked:
            how = ask.what.what
            assert isinstance(how, Sampling)
            if not (how.bias or how.penalises):
                continue
            bias, seen, counts = dict(how.bias), set(ask.what.seen), ask.what.generated
            entries = sorted({*bias, *seen, *counts})
            rows.append(at)
            ids += entries
            amounts += [(bias.get(t, 0.0), float(t in seen), float(counts.get(t, 0))) for t in entries]
            ends.append(len(ids))
            ways.append((how.repetition_penalty, how.presence_penalty, how.frequency_penalty))
        if rows:
            device = logits.device
            whole = (torch.tensor(part, dtype=torch.int32, device=device) for part in (rows, ends, ids))
            exact = (torch.tensor(part, dtype=torch.float64, device=device) for part in (amounts, ways))
            sampling.adjust(logits, *whole, *exact)


def _shared(asked: list[tuple[int, Ask]]) -> set[int]:
    """Rows of logits that more than one readout looks at."""
    once: set[int] = set()
    twice: set[int] = set()
    for at, _ in asked:
        (twice if at in once else once).add(at)
    return twice


def _position(batch: Batch, ask: Ask) -> int:
    """The position id of the row that is read."""
    return int(batch.positions[ask.row]) if ask.row != BEFORE else batch.segments[ask.segment].before_position
