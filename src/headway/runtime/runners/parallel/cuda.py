"""The CUDA runner on ranks: its graphs hold the sums over ranks, and every rank captures its own.

Nothing is known of tokens that the device has not given to the host: a step is applied before the next begins, so that
every rank is fed the same numbers. Rank 0 samples. Rows of the head are those of the last step, which every rank has;
a row that a context has kept is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.kernels.triton import deterministic as exact
from headway.kernels.triton import fused, layout
from headway.kv.allocator import Edit
from headway.kv.tensor_pool import TensorPool
from headway.models.adapters.bound import BoundAdapter
from headway.models.decoder import Decoder
from headway.models.hooks import Hooks
from headway.models.layers import Linear
from headway.models.shards import VocabularyShard, vocabulary_share
from headway.runtime.batch import Batch
from headway.runtime.profile import Profiler
from headway.runtime.runners.base import Deferred, SegmentResult
from headway.runtime.runners.cuda.adapters import CudaAdapter
from headway.runtime.runners.cuda.model import CudaModel
from headway.runtime.runners.cuda.runner import CudaRunner
from headway.runtime.runners.cuda.steps import DeviceStep
from headway.runtime.runners.parallel.channel import RankMessage
from headway.runtime.runners.parallel.collectives import Collectives
from headway.runtime.runners.parallel.launch import Ranks
from headway.runtime.runners.parallel.messages import RankStep
from headway.runtime.runners.parallel.runner import (
    RankPool,
    edit_own,
    gather_scores,
    load_everywhere,
    send_edits,
    send_step,
)

TellHead = Callable[[Sequence[int] | None], None]


class SplitCudaModel(CudaModel):
    """A rank's share of a model. `tell_head` has the other ranks compute the head of rows that all of them have."""

    is_split = True

    def __init__(
        self,
        decoder: Decoder,
        pool: TensorPool,
        *,
        deterministic: bool,
        link: Collectives,
        tell_head: TellHead = lambda rows: None,
    ) -> None:
        whole: Any = decoder.output
        assert isinstance(whole, VocabularyShard)
        self._link, self._tell_head = link, tell_head
        self._output = _as_wide(whole.weight, vocabulary_share(whole.vocab, link.size))
        super().__init__(_biased_once(decoder, link.rank), pool, deterministic=deterministic)

    def embed(self, step: DeviceStep, x: Tensor) -> None:
        first = layout.TOKEN * step.rows
        tokens = step.ints[first : first + step.count].long()
        x.copy_(self.decoder.embedding[tokens.clamp(min=0)])  # padding has tokens too

    def sum_up(self, y: Tensor) -> None:
        self._link.sum_into(y)

    def before_head(self, rows: Sequence[int] | None) -> None:
        self._tell_head(rows)

    def products_of(self, x: Tensor, tile: int | None) -> Tensor:
        self._link.begin_head(x)
        return super().products_of(x, tile)

    def products(self, x: Tensor, rows: Tensor | None, h: Tensor, logits: Tensor) -> None:
        """Of the whole vocabulary, on rank 0; every rank gives those of its own rows."""
        part = torch.empty(len(h), len(self._output), dtype=torch.float32, device=self.device)
        which = self._first(len(h)) if rows is None else rows
        fused.norm(x, self.decoder.final_norm, self.config.norm_eps, h, rows=which)
        if self.deterministic:
            exact.matmul(h, self._output, part, tile=self.matmuls.exact_tile(len(h)), ahead=self.ahead)
        elif self.dtype == torch.float32:
            torch.mm(h, self._output.t(), out=part)
        else:
            torch.mm(h, self._output.t(), out_dtype=torch.float32, out=part)
        parts = self._link.gather(part)
        if parts is not None:
            logits.copy_(torch.cat(parts, dim=1)[:, : self.config.vocab_size])


def _as_wide(weight: Tensor, rows: int) -> Tensor:
    """A share of the vocabulary with as many rows as the others: the last one's may be padded."""
    if len(weight) == rows:
        return weight
    whole = weight.new_zeros(rows, weight.shape[1])
    whole[: len(weight)] = weight
    return whole


def _biased_once(decoder: Decoder, rank: int) -> Decoder:
    """The decoder with plain matmuls, whose outputs are summed: biases are rank 0's."""

    def plain(linear: Linear) -> Linear:
        return Linear(linear.weight, linear.bias if rank == 0 else None)

    return replace(decoder, layers=tuple([replace(l, out=plain(l.out), down=plain(l.down)) for l in decoder.layers]))


class RankCudaRunner(CudaRunner):
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

    overlaps = False

    def new_model(self, decoder: Decoder, pool: TensorPool, *, deterministic: bool) -> CudaModel:
        return SplitCudaModel(decoder, pool, deterministic=deterministic, link=self._link)

    def load_own_adapter(self, adapter: BoundAdapter) -> CudaAdapter:
        """A rank's share of an adapter, as it computes with it."""
        return CudaRunner.load_adapter(self, adapter)

    def forward(self, batch: Batch, hooks: Hooks | None) -> Tensor:
        x = super().forward(batch, hooks)
        if hooks is not None:
            gather_scores(self._link, hooks)
        return x

    def edit(self, edits: Sequence[Edit]) -> None:
        with torch.inference_mode(), self._where():
            edit_own(self._link, self.pool, edits)

    # What a rank other than the first is told.

    def follow(self, step: RankStep) -> None:
        """Compute a step, and keep its rows for the head."""
        hooks = step.hooks(self.decoder.config.windows, self.page_size) if step.scores else None
        with self._where():
            self._x = self.forward(step.batch, hooks)

    def follow_graph_head(self, rows: Sequence[int] | None) -> None:
        """Compute this rank's logits of rows of the last step."""
        with self._where():
            self._readers[0].head(rows, self._x)

    def follow_head(self, rows: int) -> None:
        """Compute this rank's logits of rows that rank 0 sends."""
        with self._where():
            d = self.decoder
            x = torch.empty(rows, d.config.hidden_size, dtype=d.dtype, device=d.device)
            CudaModel.products_of(self.model, self._link.share(x), None)


class ParallelCudaRunner(RankCudaRunner):
    """Rank 0, in the controlling process: it tells the others what to compute, and reads the results."""

    def __init__(
        self, decoder: Decoder, pool: RankPool, page_size: int, *, deterministic: bool, profiler: Profiler, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        ranks.send(RankMessage("runner", {"page_size": page_size, "deterministic": deterministic}, ()))
        how: dict[str, Any] = {"deterministic": deterministic, "profiler": profiler, "link": ranks.link}
        with ranks.together():
            super().__init__(decoder, pool.own, page_size, **how)

    def new_model(self, decoder: Decoder, pool: TensorPool, *, deterministic: bool) -> CudaModel:
        def tell_head(rows: Sequence[int] | None) -> None:
            values = {"rows": None if rows is None else list(rows)}
            self._ranks.send(RankMessage("graph head", values, ()))

        how: dict[str, Any] = {"deterministic": deterministic, "link": self._link, "tell_head": tell_head}
        return SplitCudaModel(decoder, pool, **how)

    def load_adapter(self, adapter: BoundAdapter) -> CudaAdapter:
        return load_everywhere(self._ranks, adapter, None, self.load_own_adapter)

    def edit(self, edits: Sequence[Edit]) -> None:
        own = send_edits(self._ranks, edits)
        with self._ranks.together():
            super().edit(own)

    def begin(self, batch: Batch) -> Any:
        return Deferred(batch, self.page_size, self.execute)

    def execute(self, batch: Batch) -> Sequence[SegmentResult]:
        """Run the model over the rows and read what was asked."""
        send_step(self._ranks, batch)
        step = super().begin(batch)
        results = step.result().segments
        return [each for each in results if isinstance(each, SegmentResult)]

    def forward(self, batch: Batch, hooks: Hooks | None) -> Tensor:
        with self._ranks.together():
            return super().forward(batch, hooks)
