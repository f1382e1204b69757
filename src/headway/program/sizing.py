"""The page pool of a new engine: as asked, by a share of the memory, or, on a CUDA device, by what a trial leaves.

The trial is the largest step there can be, run by a small engine over the same weights: its buffers, its libraries'
workspaces and its compiled kernels are then known, and what they take is left to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headway.base.errors import PassFailed
from headway.base.samplers import Sampling
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.quantized.cpu import QuantizedDecoder
from headway.runtime import memory
from headway.runtime.memory import Memory, Room, Wish
from headway.runtime.readout import NO_NUMBER

if TYPE_CHECKING:
    from headway.program.engine import Engine

READ = 512  # rows whose logits a CUDA runner has at a time, and those of its largest graph
Small = Callable[[int], "Engine"]  # an engine of so many pages over the same weights


@dataclass(frozen=True)
class Sizing:
    """What was asked of the pool, and where the memory stood before the model was loaded."""

    pages: int | None
    fraction: float | None
    page_size: int
    rows: int  # of one step, at most
    before: Memory

    @classmethod
    def begin(
        cls, device: torch.device, *, pages: int | None, fraction: float | None, page_size: int, rows: int
    ) -> Sizing:
        """Look at the memory, ahead of everything that the engine takes of it."""
        if pages is None or fraction is not None:
            memory.tidy(device)
        return cls(pages, fraction, page_size, rows, memory.read_memory(device))

    def pick(self, decoder: Decoder | QuantizedDecoder, *, in_memory: bool, small: Small | None) -> int:
        """The number of pages. `small` makes the engine of a trial; without it there is none.

        A decoder that was `in_memory` before counts as taken by this engine all the same.
        """
        device, work, graphs = decoder.device, 0, 0
        if self.pages is None and small is not None and device.type == "cuda":
            work = trial(small, self.rows, self.page_size, device)
            graphs = memory.GRAPHS + decoder.config.layers * memory.GRAPHS_OF_LAYER
        if self.pages is None or self.fraction is not None:
            memory.tidy(device)
        now = memory.read_memory(device)
        weights = taken = weight_bytes(decoder)
        if device.type == "cuda":
            grown = max(0, self.before.free - now.free)
            taken = grown + weights if in_memory else max(grown, weights)  # others may have freed some meanwhile
        fraction = self.fraction
        if fraction is None and self.pages is None and device.type == "cuda":
            fraction = memory.FRACTION
        room = Room(str(device), now.total, now.free, fraction, taken, work, graphs)
        return memory.pick_pages(self.pages, self.wish(decoder.config, decoder.dtype), room)

    def wish(self, config: ModelConfig, dtype: torch.dtype) -> Wish:
        """The pool that makes sense for a model: room for a step at least."""
        most = -(-config.max_positions // self.page_size) * memory.SEQUENCES
        page = config.kv_values_per_token * self.page_size * dtype.itemsize
        return Wish(page, most, min(most, -(-self.rows // self.page_size)))


def trial(small: Small, rows: int, page_size: int, device: torch.device) -> int:
    """Bytes that a step of so many rows needs on a CUDA device, beside weights and pages."""
    memory.tidy(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    pages = _try_out(small, rows, page_size)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    return max(0, peak - before - pages)


def _try_out(small: Small, rows: int, page_size: int) -> int:
    """Run the largest steps, of prompts and of many sequences; the bytes of the pages that took."""
    with small(-(-rows // page_size) + 1) as engine:
        for count in dict.fromkeys((rows, min(rows, READ))):
            try:
                engine.run(largest_step, count)
            except PassFailed as error:
                if NO_NUMBER not in str(error):  # such weights are for those who use them to find out
                    raise
        return engine.pool.raw.nbytes


async def largest_step(engine: Engine, rows: int) -> list[int]:
    """One step of so many rows with a token drawn at every one of them."""
    positions = [i % engine.config.max_positions for i in range(rows)]
    async with engine.context() as ctx:
        forward = ctx.forward().input_at([0] * rows, positions)
        drawn = forward.sample(range(rows), Sampling(temperature=1.0, top_p=0.9, seed=0))
        return (await forward.execute()).tokens(drawn)


def weight_bytes(decoder: Decoder | QuantizedDecoder) -> int:
    """Bytes of all weights."""
    tied = decoder.config.tied
    return sum(decoder.nbytes().values()) + (0 if tied else decoder.embedding.nbytes)
