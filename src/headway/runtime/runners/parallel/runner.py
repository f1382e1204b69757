"""The torch runner on ranks: every rank runs the same forward on its share of weights and pages.

controller (rank 0)                          ranks 1 …
send the batch ─────────────────────────────▶ read it
forward: sums over ranks after out and down ◀▶ the same forward
attention that probes read: gathered ◀──────── their heads
head: send the rows, logits gathered ◀───────▶ their part of the vocabulary
samplers and probes
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from headway.base.arrays import from_tensor
from headway.base.specs.adapters import Mixes
from headway.base.specs.probes import AttentionScores
from headway.kernels.reference.lora import Reduce
from headway.kv.allocator import Edit, Export, Import
from headway.kv.tensor_pool import TensorPool
from headway.models.adapters.bound import BoundAdapter
from headway.models.decoder import Decoder, DecoderInput
from headway.models.description import Experts
from headway.models.hooks import Hooks
from headway.runtime.batch import Batch
from headway.runtime.profile import Profiler
from headway.runtime.readout import asks
from headway.runtime.runners.base import SegmentResult
from headway.runtime.runners.parallel.channel import RankMessage
from headway.runtime.runners.parallel.collectives import Collectives
from headway.runtime.runners.parallel.launch import Ranks
from headway.runtime.runners.parallel.messages import (
    HEADS,
    RankStep,
    adapter_message,
    edit_message,
    own_adapter,
    own_heads,
    step_message,
)
from headway.runtime.runners.row_adapters import TorchAdapter, TorchRowAdapters
from headway.runtime.runners.torch import TorchRunner

Weights = TypeVar("Weights")


class RankRunner(TorchRunner):
    """One rank's share of every step."""

    def __init__(
        self,
        decoder: Decoder,
        pool: TensorPool,
        page_size: int,
        *,
        deterministic: bool,
        profiler: Profiler,
        link: Collectives,
    ) -> None:
        self._link = link
        link.ordered = deterministic
        super().__init__(decoder, pool, page_size, deterministic=deterministic, profiler=profiler)

    def rows_are_alike(self) -> bool:
        """Whether every rank's matmuls treat the rows of a tile alike: all must take the same tiles."""
        with self._link.alone():
            own = super().rows_are_alike()
        return self._link.agreed(own)

    def row_adapters(self, mixes: Mixes, reduce: Reduce | None = None) -> TorchRowAdapters:
        return super().row_adapters(mixes, self._link.sum)

    def load_own_adapter(self, adapter: BoundAdapter) -> TorchAdapter:
        """A rank's share of an adapter, as it computes with it."""
        return TorchRunner.load_adapter(self, adapter)

    def forward(self, step: DecoderInput, hooks: Hooks) -> torch.Tensor:
        """Residual rows, the same on every rank; rank 0 has the attention of all heads."""
        x = super().forward(step, hooks)
        gather_scores(self._link, hooks)
        return x

    @torch.inference_mode()
    def edit(self, edits: Sequence[Edit]) -> None:
        edit_own(self._link, self.pool, edits)

    # What a rank other than the first is told.

    def follow(self, step: RankStep) -> None:
        """Compute a step."""
        self.forward(self.step(step.batch), step.hooks(self.decoder.config.windows, self.page_size))

    def follow_head(self, rows: int) -> None:
        """Compute this rank's logits of rows that rank 0 sends."""
        d: Any = self.decoder
        d.output(self._link.share(torch.empty(rows, d.config.hidden_size, dtype=d.dtype, device=d.device)))


class ParallelRunner(RankRunner):
    """Rank 0, in the controlling process: it tells the others what to compute, and reads the results."""

    def __init__(
        self, decoder: Decoder, pool: RankPool, page_size: int, *, deterministic: bool, profiler: Profiler, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        ranks.send(RankMessage("runner", {"page_size": page_size, "deterministic": deterministic}, ()))
        with ranks.together():
            how = {"deterministic": deterministic, "profiler": profiler, "link": ranks.link}
            super().__init__(decoder, pool.own, page_size, **how)

    def load_adapter(self, adapter: BoundAdapter) -> TorchAdapter:
        experts = self.decoder.config.description.experts
        return load_everywhere(self._ranks, adapter, experts, self.load_own_adapter)

    def edit(self, edits: Sequence[Edit]) -> None:
        own = send_edits(self._ranks, edits)
        with self._ranks.together():
            super().edit(own)

    def execute(self, batch: Batch) -> list[SegmentResult]:
        send_step(self._ranks, batch)
        return super().execute(batch)

    def step(self, batch: Batch) -> DecoderInput:
        with self._ranks.together():
            return super().step(batch)

    def forward(self, step: DecoderInput, hooks: Hooks) -> torch.Tensor:
        with self._ranks.together():
            return super().forward(step, hooks)


# -- what rank 0 tells the others, whatever computes ------------------------------------------------------------------


def send_step(ranks: Ranks, batch: Batch) -> None:
    """Have every rank compute a batch, if it has rows."""
    if len(batch.tokens):
        probes = [(ask, ask.readout.what) for ask in asks(batch)]
        scores = [(what.layer, ask.segment, ask.row) for ask, what in probes if isinstance(what, AttentionScores)]
        ranks.send(step_message(batch, scores, ranks.number_of))


def send_edits(ranks: Ranks, edits: Sequence[Edit]) -> list[Edit]:
    """Have every rank edit pages; what rank 0 does itself."""
    ranks.send(edit_message(edits))
    return [own_heads(edit, 0, ranks.size) if isinstance(edit, Import) else edit for edit in edits]


def load_everywhere(
    ranks: Ranks, adapter: BoundAdapter, experts: Experts | None, load: Callable[[BoundAdapter], Weights]
) -> Weights:
    """Have every rank load its share of an adapter, until rank 0's is garbage."""
    number = ranks.next_number(adapter.digest)
    ranks.send(adapter_message(adapter, number))
    own = load(own_adapter(adapter, 0, ranks.size, experts))
    weakref.finalize(own, ranks.dropped.append, number)
    return own


def gather_scores(link: Collectives, hooks: Hooks) -> None:
    """The attention of all heads in place of this rank's, on rank 0."""
    for scores in hooks.scores_out.values():
        for i, own in enumerate(scores):  # [H / N, S]
            parts = link.gather(own)
            scores[i] = own if parts is None else torch.cat(parts)


def edit_own(link: Collectives, pool: TensorPool, edits: Sequence[Edit]) -> None:
    """Clear, copy and move a rank's heads of pages; what is exported has all heads, on rank 0."""
    for is_export, run in itertools.groupby(edits, lambda edit: isinstance(edit, Export)):
        if not is_export:
            pool.apply(list(run))
            continue
        for edit in run:
            assert isinstance(edit, Export)
            parts = link.gather(pool.read(edit.pages))
            if parts is not None:
                edit.target.data = from_tensor(torch.cat(parts, dim=HEADS))


def new_own_pool(decoder: Decoder, *, pages: int, page_size: int, dtype: str, by_head: bool = False) -> TensorPool:
    """The pages of a rank's heads, all zeros."""
    c = decoder.config
    return TensorPool(
        layers=c.layers,
        pages=pages,
        page_size=page_size,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        dtype=getattr(torch, dtype),
        device=decoder.device,
        inv_freq=decoder.inv_freq,
        by_head=by_head,
    )


class RankPool:
    """The KV cache of all ranks, as the engine sees it: `own` has rank 0's heads of every page."""

    def __init__(
        self, decoder: Decoder, ranks: Ranks, *, pages: int, page_size: int, dtype: str, by_head: bool = False
    ) -> None:
        sizes: dict[str, Any] = {"pages": pages, "page_size": page_size, "dtype": dtype, "by_head": by_head}
        ranks.send(RankMessage("pool", sizes, ()))
        self._ranks, self.own = ranks, new_own_pool(decoder, **sizes)

    @property
    def nbytes(self) -> int:
        return self.own.nbytes * self._ranks.size

    @property
    def width(self) -> int:
        return self.own.width

    @property
    def page_shape(self) -> tuple[int, ...]:
        layers, two, slots, heads, dim = self.own.page_shape
        return (layers, two, slots, heads * self._ranks.size, dim)

    @property
    def page_bytes(self) -> int:
        return self.own.page_bytes * self._ranks.size

    def new_places(self, count: int) -> NoReturn:
        raise AssertionError("pages stay in their ranks")

    def apply(self, edits: Sequence[Edit]) -> None:
        raise AssertionError("edits go to every rank: through the runner")

    def give_back(self, pages: Sequence[int]) -> None:
        if pages:
            self._ranks.send(RankMessage("give_back", {"pages": list(pages)}, ()))
            self.own.give_back(pages)

    def from_bytes(self, data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return self.own.from_bytes(data, shape)

    def save_state(self, state: Any) -> np.ndarray:
        return self.own.save_state(state)

    def load_state(self, data: np.ndarray, dtype: str) -> torch.Tensor:
        return self.own.load_state(data, dtype)

    def save_recurrent(self, place: int) -> np.ndarray:
        raise AssertionError("models with recurrent layers are not split")

    def load_recurrent(self, place: int, data: np.ndarray) -> None:
        raise AssertionError("models with recurrent layers are not split")
