"""The size of a new engine's page pool: as given, by a share of the memory or, on a CUDA device, by a trial step.

The trial runs the largest possible step on a small engine with the same weights, to measure its buffers, library
workspaces and compiled kernels. The pool gets the memory that they leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.base.arrays import STORED
from headway.base.dataclass import dataclass
from headway.base.errors import PassFailed
from headway.base.specs.samplers import Sampling
from headway.base.system.device import AnyDevice
from headway.kv.states import STATE_WIDTH, pages_between
from headway.models.config import ModelConfig
from headway.models.quantized.cpu import QuantizedDecoder
from headway.runtime import memory
from headway.runtime.memory import Memory, MemoryBudget, Wish
from headway.runtime.readout import NO_NUMBER

if TYPE_CHECKING:
    from headway.models.decoder import Decoder
    from headway.program.engine import Engine

READ, CAPTURED = 512, 1024  # rows of logits that a CUDA runner holds at a time, rows of its largest graph
Small = Callable[[int], "Engine"]  # creates an engine of n pages with the same weights


@dataclass(frozen=True)
class PoolSize:
    """The requested size of the pool, and the memory before the model was loaded."""

    pages: int | None
    fraction: float | None
    page_size: int
    rows: int  # of one step at most
    before: Memory

    @classmethod
    def begin(
        cls, device: AnyDevice, *, pages: int | None, fraction: float | None, page_size: int, rows: int
    ) -> PoolSize:
        """Read the memory, before the engine takes any of it."""
        if pages is None or fraction is not None:
            memory.tidy(device)
        return cls(pages, fraction, page_size, rows, memory.read_memory(device))

    def pick(
        self,
        decoder: Decoder | QuantizedDecoder,
        *,
        kv_dtype: str,
        in_memory: bool,
        small: Small | None,
        more: int = 0,
        config: ModelConfig | None = None,
    ) -> tuple[int, str]:
        """The number of pages, and why. `small` creates the engine of the trial; None for no trial. `config` is that of
        all heads whose pages are in this memory, if the decoder does not have them all.

        A decoder that was `in_memory` before counts as memory of this engine too, and so do `more` bytes of weights.
        """
        device, work, graphs = decoder.device, 0, 0
        if self.pages is None and small is not None and device.type == "cuda":
            work = trial(small, self.rows, self.page_size, device)
            graphs = memory.GRAPHS + decoder.config.layers * memory.GRAPHS_OF_LAYER
        if self.pages is None or self.fraction is not None:
            memory.tidy(device)
        now = memory.read_memory(device)
        weights = taken = weight_bytes(decoder) + more
        if device.type == "cuda":
            grown = max(0, self.before.free - now.free)
            taken = grown + weights if in_memory else max(grown, weights)  # others may have freed some in the meantime
        fraction = self.fraction
        if fraction is None and self.pages is None and device.type == "cuda":
            fraction = memory.FRACTION
        budget = MemoryBudget(str(device), now.total, now.free, fraction, taken, work, graphs)
        wish = self.wish(config or decoder.config, kv_dtype)
        pages = memory.pick_pages(self.pages, wish, budget)
        return pages, memory.reason(pages, self.pages, wish, budget)

    def wish(self, config: ModelConfig, dtype: str) -> Wish:
        """The pool that a model can use; it holds one step at least."""
        most = -(-config.max_positions // self.page_size) * memory.SEQUENCES
        page = config.kv_values_per_token * self.page_size * STORED[dtype].itemsize
        if state := config.state_values * STATE_WIDTH:
            page += -(-state // pages_between(state, page))  # its share of the recurrent state
        return Wish(page, most, min(most, -(-self.rows // self.page_size)), one=most // memory.SEQUENCES)


def trial(small: Small, rows: int, page_size: int, device: AnyDevice) -> int:
    """Bytes that a step of `rows` rows needs on a CUDA device, besides weights and pages."""
    import torch

    memory.tidy(device)
    torch.cuda.reset_peak_memory_stats(str(device))
    before = torch.cuda.memory_reserved(str(device))
    pages = _try_out(small, rows, page_size)
    torch.cuda.synchronize(str(device))
    peak = torch.cuda.max_memory_reserved(str(device))
    return max(0, peak - before - pages)


def _try_out(small: Small, rows: int, page_size: int) -> int:
    """Run the largest steps, of prompts and of many sequences; returns the bytes of the pages used."""
    with small(-(-rows // page_size) + 1) as engine:
        rows = min(rows, engine.config.max_positions) if engine.config.recurrent_layers else rows
        for count in dict.fromkeys((rows, min(rows, CAPTURED), min(rows, READ))):
            try:
                engine.run(largest_step, count)
            except PassFailed as error:
                if NO_NUMBER not in str(error):  # broken weights raise where they are used
                    raise
        assert engine._pool is not None
        return engine._pool.nbytes


async def largest_step(engine: Engine, rows: int) -> list[int]:
    """One step of `rows` rows that draws a token at each."""
    positions = [i % engine.config.max_positions for i in range(rows)]
    async with engine.context() as ctx:
        forward = ctx.forward().input_at([0] * rows, positions)
        drawn = forward.sample(range(rows), Sampling(temperature=1.0, top_p=0.9, seed=0))
        return (await forward.execute()).tokens(drawn)


def weight_bytes(decoder: Decoder | QuantizedDecoder) -> int:
    """Bytes of all weights."""
    tied = decoder.config.tied
    return sum(decoder.nbytes().values()) + (0 if tied else decoder.embedding.nbytes)
