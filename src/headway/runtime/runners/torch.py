"""The torch runner: the reference, on any device torch has. It computes a step when its result is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.base.specs.adapters import Mixes
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampling
from headway.kernels.reference.lora import Reduce
from headway.kv.allocator import Edit
from headway.kv.tensor_pool import TensorPool
from headway.models.adapters.bound import BoundAdapter
from headway.models.decoder import Decoder, DecoderInput, group_on, states_on
from headway.models.hooks import Hooks
from headway.runtime.batch import Batch, reads_final_state
from headway.runtime.profile import Profiler, step_bytes
from headway.runtime.readout import Reader, make_hooks, segment_results
from headway.runtime.runners.attention_groups import plan
from headway.runtime.runners.base import DECODE_LIMIT, Deferred, SegmentResult
from headway.runtime.runners.row_adapters import TorchAdapter, TorchRowAdapters, add_heads
from headway.runtime.runners.state_groups import plan_states

TILE = 16  # rows of every matmul in deterministic mode


class TorchRunner:
    """The reference: the decoder and torch kernels, on any device torch has."""

    def __init__(
        self, decoder: Decoder, pool: TensorPool, page_size: int, *, deterministic: bool, profiler: Profiler
    ) -> None:
        self.decoder, self.pool, self.page_size, self.profiler = decoder, pool, page_size, profiler
        self.tile = TILE if deterministic and not decoder.ordered else None
        if self.tile is not None and not self.rows_are_alike():
            self.tile = 1  # this machine's matmuls treat the rows of a tile differently: take them one by one
        self.reader = Reader(decoder, self.tile, add_heads)
        self.windows = set(decoder.config.windows)

    overlaps = False

    def rows_are_alike(self) -> bool:
        """Whether matmuls treat the rows of a tile alike."""
        return rows_are_alike(self.decoder, TILE)

    @property
    def decode_limit(self) -> int:
        return 0 if self.profiler.enabled else DECODE_LIMIT

    def reads(self, what: Probe, how: Sampling) -> bool:
        return reads_final_state(what)

    def samples(self, how: Sampling) -> bool:
        return True

    def load_adapter(self, adapter: BoundAdapter) -> TorchAdapter:
        decoder = self.decoder
        return TorchAdapter.of(adapter, decoder.config, decoder.device, half=decoder.ordered)

    @torch.inference_mode()
    def edit(self, edits: Sequence[Edit]) -> None:
        self.pool.apply(edits)

    def begin(self, batch: Batch) -> Deferred:
        return Deferred(batch, self.page_size, self.execute)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SegmentResult]:
        """Run the model over the rows and read what was asked."""
        hooks = make_hooks(batch, self.decoder, self.page_size)
        step = self.step(batch) if len(batch.tokens) else None
        self.profiler.begin(len(batch.write_rows))
        x = None if step is None else self.forward(step, hooks)
        values = self.reader.read(batch, x, hooks, self.profiler.mark)
        self.profiler.end(step_bytes(self.decoder, batch, self.page_size, self.pool.width))
        return segment_results(batch, x, values)

    def forward(self, step: DecoderInput, hooks: Hooks) -> torch.Tensor:
        """Residual rows [T, E] of a step; keys and values are in their pages."""
        return self.decoder.forward(step, (self.pool.keys, self.pool.values), hooks, self.profiler.mark, self.tile)

    def step(self, batch: Batch) -> DecoderInput:
        """The batch's arrays on the device."""
        device = self.decoder.device
        whole = len(batch.write_rows) == len(batch.tokens)
        mixes = batch.adapters
        return DecoderInput(
            tokens=torch.from_numpy(batch.tokens).to(device),
            positions=torch.from_numpy(batch.positions).to(device),
            write_rows=None if whole else torch.from_numpy(batch.write_rows).to(device),
            write_slots=torch.from_numpy(batch.write_slots).to(device),
            groups={
                window: [group_on(device, group) for group in groups]
                for window, groups in plan(batch, self.windows, self.page_size).items()
            },
            adapters=None if mixes is None else self.row_adapters(mixes),
            states=() if self.pool.states is None else [states_on(device, group) for group in plan_states(batch)],
            state_pool=self.pool.states,
        )

    def row_adapters(self, mixes: Mixes, reduce: Reduce | None = None) -> TorchRowAdapters:
        """The adapters of a step's rows; `reduce` as `TorchRowAdapters` has it."""
        decoder, ordered = self.decoder, self.decoder.ordered
        by_row = self.tile is not None or ordered
        return TorchRowAdapters(mixes, decoder.device, by_row=by_row, ordered=ordered, reduce=reduce)


@torch.inference_mode()
def rows_are_alike(decoder: Decoder, tile: int) -> bool:
    """Whether a row's bits are the same at every place of a tile, whatever its neighbors: tried on real weights."""
    generator = torch.Generator().manual_seed(0)
    e = decoder.config.hidden_size
    x = torch.randn(tile, e, generator=generator).to(decoder.device, decoder.dtype)
    order = torch.randperm(tile, generator=generator).to(decoder.device)

    through = decoder.rows_of_each_kind
    straight, shuffled = through(x), through(x[order].contiguous())
    mixed = torch.randn(tile, e, generator=generator).to(decoder.device, decoder.dtype)
    mixed[order[0]] = x[0]
    among = through(mixed)
    return all(
        torch.equal(a[order], b) and torch.equal(a[0], c[order[0]])
        for a, b, c in zip(straight, shuffled, among, strict=True)
    )
