"""Drawing tokens on the device: how samplers draw, which masks bind them, and the tokens, one small copy back.

Owned by the reader, used by the worker thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.rng import uniforms
from headway.base.specs.samplers import Sampling
from headway.kernels.triton import sampling
from headway.kernels.triton.cuts import CutWorkspace, Kinds, make_cut_workspace
from headway.kernels.triton.sampling import SAMPLER_FLOATS, SAMPLER_INTS, AdjustmentArrays, SamplerArrays
from headway.runtime.adjustments import Adjustments
from headway.runtime.passes import Readout
from headway.runtime.readout import Ask
from headway.runtime.runners.cuda.arrays import StreamPoint, Upload, even
from headway.runtime.runners.cuda.graphs import Graphs, padded
from headway.runtime.runners.cuda.model import CudaModel
from headway.runtime.runners.cuda.probe_rounds import COLDEST, HOTTEST

MOST = 512  # tokens drawn at once

Key = tuple[int, int]  # a segment and the index of one of its readouts


class Way(NamedTuple):
    """How a sampler draws, in the numbers that the device takes."""

    numbers: tuple[float, float, float]  # temperature, top-p, min-p
    top_k: int
    quick: bool  # whether the device can
    adjusts: bool  # whether it has bias or penalties

    @property
    def plain(self) -> bool:
        return self.quick and not self.adjusts


class CudaDraws:
    """Draws tokens from rows of logits."""

    def __init__(self, model: CudaModel, graphs: Graphs, name: str) -> None:
        self.model, self._graphs, self._name = model, graphs, name
        vocab, device = model.config.vocab_size, model.device
        self._words = -(-vocab // 32)
        self._ints = Upload(MOST * SAMPLER_INTS, torch.int32, device)
        self._floats = Upload(MOST * SAMPLER_FLOATS, torch.float64, device)
        self._masks = Upload(self._words, torch.int32, device)
        self._entries = Upload(1 << 10, torch.int32, device)  # of bias and penalties
        self._found = sampling.make_workspace(MOST, vocab, device)
        self._kinds = Kinds()  # of what was filled in last
        self._tokens = torch.empty(MOST, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = StreamPoint(device)
        self.ways: dict[int, tuple[Sampling, Way]] = {}  # by identity

    @property
    def tokens(self) -> Tensor:
        """What was drawn last [MOST] int32, on the device. It is always the same memory."""
        return self._found.tokens

    def launch(self, logits: Tensor, size: int, *, lasting: bool) -> None:
        """Draw what `fill` has said, from logits [R, V], which are where they always are if `lasting`."""
        asks = SamplerArrays(
            self._ints.device[: size * SAMPLER_INTS].view(size, SAMPLER_INTS),
            self._floats.device[: size * SAMPLER_FLOATS].view(size, SAMPLER_FLOATS),
            self._masks.device.view(-1, self._words),
        )
        kinds, cuts = self._kinds, self._cuts()
        key = ("draw", size, *kinds, self._masks.device.data_ptr(), logits.data_ptr(), self._name)
        self._graphs.run(key if lasting else None, lambda: self._choose(logits, asks, size, cuts, kinds))
        self._done.record()

    def _cuts(self) -> CutWorkspace | None:
        """What filters need, once any are on. Readers share it: what they launch comes one after the other."""
        if self._kinds.filters and self.model.cuts is None:
            self.model.cuts = make_cut_workspace(MOST, self.model.config.vocab_size, self.model.device)
        return self.model.cuts

    def wait(self, count: int) -> list[int]:
        """The tokens, once they are there."""
        self._done.wait()
        return self._tokens[:count].tolist()

    def _choose(self, logits: Tensor, asks: SamplerArrays, size: int, cuts: CutWorkspace | None, kinds: Kinds) -> None:
        sampling.sample(logits, asks, self._found, cuts, kinds)
        self._tokens[:size].copy_(self._found.tokens[:size], non_blocking=True)

    def fill(
        self, rows: Sequence[int], readouts: Sequence[Readout], positions: np.ndarray, masks: Sequence[int]
    ) -> int:
        """Tell the device how to draw at these rows of logits, and how many numbers that are with padding."""
        count, ways = len(rows), [self.way(r.what) for r in readouts]
        size = padded(count)
        assert size is not None
        ints, floats = np.zeros((size, SAMPLER_INTS), np.int32), np.zeros((size, SAMPLER_FLOATS))
        ints[count:, 0] = -1
        ints[:count, 0] = rows
        ints[:count, 1] = [way.top_k for way in ways]
        ints[:count, 2] = masks if len(masks) else -1
        floats[:count, :3] = [way.numbers for way in ways]
        self._kinds = _kinds(ints[:count, 1], floats[:count], self.model.config.vocab_size)
        if any(way.numbers[0] > 0 for way in ways):
            seeds, ordinals = (
                np.array(n, np.uint64) for n in zip(*((r.seed, r.ordinal) for r in readouts), strict=True)
            )
            floats[:count, 3] = uniforms(seeds, positions.astype(np.uint64), ordinals)
        self._ints.put(ints)
        self._floats.put(floats)
        return size

    def way(self, what: object) -> Way:
        """How it draws; a generation's sampler is one object from its first step to its last."""
        found = self.ways.get(id(what))
        if found is not None and found[0] is what:
            return found[1]
        assert isinstance(what, Sampling)
        if len(self.ways) > 4 * MOST:
            self.ways.clear()
        common = not what.filters_rarely and what.dense_bias is None
        way = Way(
            numbers=(what.temperature, what.top_p, what.min_p),
            top_k=min(what.top_k, self.model.config.vocab_size),
            quick=common and (what.temperature == 0 or COLDEST <= what.temperature <= HOTTEST),
            adjusts=bool(what.penalizes or what.logit_bias),
        )
        self.ways[id(what)] = what, way
        return way

    def bind(self, asked: list[tuple[int, Ask]], values: dict[Key, object]) -> dict[Key, int]:
        """Logit masks as bits on the device, and which ask each binds. An error is its ask's value."""
        found: list[tuple[Key, np.ndarray]] = []
        for _, ask in asked:
            if ask.readout.allowed is None and ask.readout.async_mask is None:
                continue
            try:
                allowed = ask.readout.permitted()
            except HeadwayError as error:  # there is no mask for this row; the others go on
                values[ask.segment, ask.index] = error
                continue
            assert allowed is not None
            found.append(((ask.segment, ask.index), allowed))
        if not found:
            return {}
        self.upload([np.packbits(allowed, bitorder="little") for _, allowed in found])
        return {key: i for i, (key, _) in enumerate(found)}

    def upload(self, masks: list[np.ndarray]) -> None:
        """Send masks to the device, in order, as bits."""
        if len(masks) * self._words > len(self._masks):
            self._masks.grow((len(masks) if len(masks) < 64 else MOST) * self._words)
        self._masks.wait()
        # Not by numpy, which would let the interpreter's lock go for each row.
        buffer, size = self._masks.host.data.cast("B"), self._words * 4
        for at, mask in zip(range(0, len(masks) * size, size), masks, strict=True):
            end = at + mask.nbytes
            buffer[at:end] = mask.data.cast("B")
            if end < at + size:
                buffer[end : at + size] = bytes(at + size - end)
        self._masks.send(len(masks) * self._words)

    def adjust(self, asked: list[tuple[int, Ask]], logits: Tensor) -> None:
        """Bias and penalties onto the logits of rows that nobody else reads."""
        self.adjust_rows([(at, Adjustments(ask.readout)) for at, ask in asked], logits)

    def adjust_rows(self, asked: Sequence[tuple[int, Adjustments]], logits: Tensor) -> None:
        """Bias and penalties onto these rows of logits."""
        asked = [(at, what) for at, what in asked if len(what)]
        if not asked:
            return
        rows, found = zip(*asked, strict=True)
        ends = np.cumsum([0, *map(len, found)])
        ways = [(w.how.repetition_penalty, w.how.presence_penalty, w.how.frequency_penalty) for w in found]
        biased = any(what.biases is not None for what in found)
        biases = [np.zeros(len(w)) if w.biases is None else w.biases for w in found] if biased else []
        parts = [
            np.array(rows),
            ends,
            np.concatenate([w.ids for w in found]),
            np.concatenate([w.counts for w in found]),
            np.array(ways, np.float64).ravel().view(np.int32),
            *([np.concatenate(biases).view(np.int32)] if biased else []),
        ]
        starts = np.cumsum([0, *(even(len(part)) for part in parts)]).tolist()
        if starts[-1] > len(self._entries):
            self._entries.grow(2 * starts[-1])
        self._entries.wait()
        for start, part in zip(starts, parts, strict=False):
            self._entries.host[start : start + len(part)] = part
        self._entries.send(starts[-1])
        sent = [self._entries.device[s : s + len(part)] for s, part in zip(starts, parts, strict=False)]
        lines, at, ids, counts, *exact = sent
        numbers = [part.view(torch.float64) for part in exact]
        what = AdjustmentArrays(lines, at, ids, counts, numbers[0], numbers[1] if biased else None)
        sampling.adjust(logits, what)


def _kinds(top_k: np.ndarray, numbers: np.ndarray, vocab: int) -> Kinds:
    """What samplers with these top-k [A] and numbers (temperature, top-p, min-p) [A, …] ask for."""
    drawn = numbers[:, 0] > 0
    ranks, nucleus = (top_k > 0) & (top_k < vocab) & drawn, (numbers[:, 1] < 1) & drawn
    filters = (top_k > 0) | (numbers[:, 1] < 1) | (numbers[:, 2] > 0)
    return Kinds(bool(ranks.any()), bool(nucleus.any()), bool((filters & drawn).any()))
