"""The Runner: a frozen batch in, values out. The one seam between bookkeeping and the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.samplers import Sampling
from headway.kv.pool import Pool
from headway.models.decoder import Decoder, DecoderInput
from headway.models.quantized.cpu import QuantizedDecoder
from headway.runtime.batch import Batch, Rows
from headway.runtime.passes import Followed
from headway.runtime.profile import Profiler
from headway.runtime.readout import SLAB, Reader, make_hooks
from headway.runtime.runners.attention_groups import plan

TILE = 16  # rows of every product in deterministic mode
NO_TOKEN, UNDECIDED = -1, -2  # instead of a token


@dataclass(frozen=True, eq=False)
class SegmentResult:
    """The values of a segment's readouts by their index in the pass, and its last row's residual if that was wanted."""

    values: Mapping[int, object]
    state: object


class Runner(Protocol):
    """Computes batches, one at a time, in the order they come."""

    def execute(self, batch: Batch) -> list[SegmentResult]: ...


@runtime_checkable
class RowRunner(Protocol):
    """A runner that takes steps of streaks alone (fleet.py) with less of the host's time."""

    @property
    def measures(self) -> bool:
        """Whether steps are being measured, which ordinary turns are for."""
        ...

    @property
    def most_rows(self) -> int:
        """How many rows it takes at once."""
        ...

    def draws(self, how: Sampling) -> bool:
        """Whether rows can draw so."""
        ...

    def begin_rows(self, rows: Rows) -> RowStep:
        """Set going what can be before it is known which tokens are allowed."""
        ...


class RowStep(Protocol):
    """A step of rows that go on by themselves, on its way."""

    def draw(self, masks: Sequence[Followed | None]) -> None:
        """Have a token drawn at each row, among those that its mask allows. Waits for the masks, not for the tokens."""
        ...

    def tokens(self) -> list[int | HeadwayError]:
        """The tokens, once they are there, or why one has none.

        NO_TOKEN stands for one whose logits are not numbers, UNDECIDED for one that the quick draw cannot tell.
        """
        ...


class TorchRunner:
    """The reference: the decoder and torch kernels, on any device torch has."""

    def __init__(
        self, decoder: Decoder, pool: Pool, page_size: int, *, deterministic: bool, profiler: Profiler
    ) -> None:
        self.decoder, self.pool, self.page_size, self.profiler = decoder, pool, page_size, profiler
        self.tile = TILE if deterministic else None
        if deterministic and not rows_are_alike(decoder, TILE):
            self.tile = 1  # this machine's products treat rows of one tile differently: take them one by one
        self.reader = Reader(decoder, self.tile)
        self.windows = set(decoder.config.windows)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SegmentResult]:
        """Apply the edits, run the model over the rows, read what was asked."""
        self.pool.apply(batch.edits)
        hooks = make_hooks(batch, self.decoder, self.page_size)
        step = self._step(batch) if len(batch.tokens) else None
        self.profiler.begin(len(batch.write_rows))
        x = None
        if step is not None:
            x = self.decoder.forward(step, (self.pool.keys, self.pool.values), hooks, self.profiler.mark, self.tile)
        values = self.reader.read(batch, x, hooks, self.profiler.mark)
        self.profiler.end(step_bytes(self.decoder, batch, self.page_size))
        return segment_results(batch, x, values)

    def _step(self, batch: Batch) -> DecoderInput:
        """The batch's arrays on the device."""
        device = self.decoder.device
        whole = len(batch.write_rows) == len(batch.tokens)
        return DecoderInput(
            tokens=torch.from_numpy(batch.tokens).to(device),
            positions=torch.from_numpy(batch.positions).to(device),
            write_rows=None if whole else torch.from_numpy(batch.write_rows).to(device),
            write_slots=torch.from_numpy(batch.write_slots).to(device),
            groups=plan(batch, self.windows, self.page_size, device),
        )


def segment_results(batch: Batch, x: Tensor | None, values: Mapping[tuple[int, int], object]) -> list[SegmentResult]:
    """What each segment gets: its readouts' values and, if wanted, its last row of the residual x [T, E]."""
    few = x is not None and len(x) <= SLAB  # then a row may keep the others alive
    rows = x.unbind() if x is not None and few else ()
    results = []
    for i, segment in enumerate(batch.segments):
        state = None
        if x is not None and segment.keep_last:
            state = rows[segment.rows[-1]] if few else x[segment.rows[-1]].clone()
        results.append(SegmentResult({index: values[i, index] for index, _, _ in segment.readouts}, state))
    return results


def step_bytes(decoder: Decoder | QuantizedDecoder, batch: Batch, page_size: int) -> dict[str, int]:
    """Bytes each phase of this step had to move, by arithmetic."""
    config, width = decoder.config, decoder.dtype.itemsize
    slot = config.kv_values_per_token * width
    rows = len(batch.tokens)
    pages = sum(len(s.pages) for s in batch.segments if len(s.rows))
    asked = len({row for s in batch.segments for _, row, _ in s.readouts})
    sizes = dict(decoder.nbytes()) if rows else {"head": decoder.output.nbytes}
    return sizes | {
        "embed": rows * config.hidden_size * width,
        "kv write": len(batch.write_rows) * slot,
        "attention": pages * page_size * slot,
        "rope": rows * config.layers * (config.heads + config.kv_heads) * config.head_dim * width * 2,
        "sample": asked * config.vocab_size * 4,
    }


@torch.inference_mode()
def rows_are_alike(decoder: Decoder, tile: int) -> bool:
    """Whether a row's bits are the same at every place of a tile, whatever its neighbours: tried on real weights."""
    generator = torch.Generator().manual_seed(0)
    layer, e = decoder.layers[0], decoder.config.hidden_size
    x = torch.randn(tile, e, generator=generator).to(decoder.device, decoder.dtype)
    order = torch.randperm(tile, generator=generator).to(decoder.device)

    def through(rows: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = layer.project(rows)
        (mlp,) = layer.feed_forward(rows, rows, exact=True)
        return [*layer.norm_in(rows), q, k, v, *layer.project_out(rows, q), mlp, decoder.head(rows, None)]

    straight, shuffled = through(x), through(x[order].contiguous())
    mixed = torch.randn(tile, e, generator=generator).to(decoder.device, decoder.dtype)
    mixed[order[0]] = x[0]
    among = through(mixed)
    return all(
        torch.equal(a[order], b) and torch.equal(a[0], c[order[0]])
        for a, b, c in zip(straight, shuffled, among, strict=True)
    )
