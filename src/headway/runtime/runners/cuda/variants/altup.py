"""The layers of a model with residuals side by side on a CUDA device (Gemma 3n).

Every layer predicts all streams [n, T, E] from what they were, computes the active one, and corrects the others; the
step's residual rows are the active stream between layers, and what all streams become after the last one.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.specs.adapters import OUTSIDE
from headway.kernels.triton import fused
from headway.kernels.triton.fused import HeadConfig, RowNorm
from headway.kernels.triton.variants import altup
from headway.kernels.triton.variants.altup import AddedShares, StreamShares
from headway.models.layers import Linear
from headway.models.variants.altup import AltUpLayer
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.buffers import Buffers, fit
from headway.runtime.runners.cuda.described import Attend, DescribedLayers
from headway.runtime.runners.cuda.matmuls import Matmuls
from headway.runtime.runners.cuda.steps import DeviceStep, Mark


@dataclass(frozen=True, eq=False)
class StreamRows:
    """All streams [n, T, E], as they are and as a layer predicts them, and what it may take of tokens [T, P]. Matmuls
    take so `many` rows."""

    many: int
    streams: Tensor
    predicted: Tensor
    inputs: Tensor


class AltUpLayers(DescribedLayers):
    """The layers of one decoder. Of most rows of a prefill nobody reads the last layer; it is computed all the same."""

    def __init__(self, decoder: Any, matmuls: Matmuls, heads: list[HeadConfig], attend: Attend) -> None:
        super().__init__(decoder, matmuls, heads, attend, None)
        self._decoder: Any = decoder
        self._streams: list[AltUpLayer] = list(decoder.layers)
        how, kind = decoder.config.description.altup, decoder.config.description.norm
        self._active, self._scaled = how.active, how.scaled
        self._deviations = [NormalDist().inv_cdf(share) if share > 0 else None for share in how.sparsity]
        self._low_norms = [RowNorm(layer.laurel_norm, layer.eps, kind) for layer in self._streams]
        self._predicts = [self._shares(layer, layer.altup_predict) for layer in self._streams]
        self._corrects = [self._shares(layer, layer.altup_correct) for layer in self._streams]

    def _shares(self, layer: AltUpLayer, matrix: Linear) -> StreamShares:
        norm = RowNorm(layer.altup_norm, layer.eps, self._what.norm)
        return StreamShares(self._active, norm, layer.altup_router.weight, matrix.weight)

    def forward(self, step: DeviceStep, buffers: Buffers, mark: Mark, sampled: Tensor) -> None:
        n, room, e = step.count, buffers.altup, buffers.x.shape[1]
        assert room is not None
        assert self._tokens is not None
        many, ahead = self._matmuls.padded_rows(n, buffers), self._ahead
        x, inputs = buffers.x[:n], self._tokens.begin(step, buffers, sampled)
        streams, predicted = (fit(t, len(self._decoder.altup_spread) + 1, n, e) for t in (room.streams, room.predicted))
        for k, (stream, matrix) in enumerate(zip(streams[1:], self._decoder.altup_spread, strict=True)):
            self._matmuls.project((OUTSIDE, "altup_spread", k), x, Linear(matrix), stream, step.adapters)
        altup.spread(streams, x, ahead=ahead)
        if self._active:
            x.copy_(streams[self._active])
        mark("embed")
        for l in range(len(self._layers)):
            first = self._norms[l].input
            assert first is not None
            how = self._predicts[l]
            added = self._added((l, "altup_predict"), streams[self._active], how, buffers, step.adapters)
            altup.predict(streams, predicted, buffers.h[:n], how, first, added=added, ahead=ahead)
            mark("norm")
            qkv = fit(buffers.qkv, many, len(self._layers[l].qkv.weight))
            self._matmuls.project((l, "qkv"), buffers.h[:many], self._layers[l].qkv, qkv, step.adapters)
            mark("qkv")
            self._attend(l, step, buffers, mark)
            self._finish_stream(l, StreamRows(many, streams, predicted, inputs[l]), step, buffers, mark)
        for k, matrix in enumerate(self._decoder.altup_gather):
            place, own = (OUTSIDE, "altup_gather", k), Linear(matrix)
            self._matmuls.project(place, streams[k + 1], own, predicted[k + 1], step.adapters)
        altup.gather(streams, predicted, x, ahead=ahead)
        mark("head")

    def _finish_stream(self, l: int, rows: StreamRows, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        """A layer after its attention, until all streams are corrected."""
        layer, norms, n, ahead, room = self._streams[l], self._norms[l], step.count, self._ahead, buffers.altup
        many, streams, predicted = rows.many, rows.streams, rows.predicted
        assert room is not None
        assert norms.after_attention is not None
        assert norms.mlp is not None
        assert norms.after_token is not None
        assert self._tokens is not None
        x, h, delta, raised = buffers.x[:n], buffers.h[:many], buffers.delta[:many], room.raised[:many]
        mixed = fit(buffers.mixed, many, self._heads[l].heads * self._out[l])
        self._matmuls.project((l, "out"), mixed, layer.out, delta, step.adapters)
        self._matmuls.project((l, "laurel_down"), h, layer.laurel_down, room.low[:many], step.adapters)
        self._matmuls.project((l, "laurel_up"), room.low[:many], layer.laurel_up, raised, step.adapters)
        mark("output projection")
        around = norms.after_attention, self._low_norms[l], norms.mlp
        altup.join(predicted[self._active], x, h[:n], delta[:n], raised[:n], norms=around, ahead=ahead)
        mark("norm")
        self._feed_forward(l, h, delta, buffers, step.adapters)
        fused.add_and_norm(x, None, None, add=delta[:n], after=norms.after_mlp, ahead=ahead)
        scale, how = layer.altup_scale if self._scaled else None, self._corrects[l]
        added = self._added((l, "altup_correct"), x, how, buffers, step.adapters)
        altup.correct(predicted, x, streams, h[:n], how, scale=scale, added=added, ahead=ahead)
        self._tokens.take(l, h, rows.inputs, delta, buffers, adapters=step.adapters)
        altup.add_to_others(streams, delta[:n], norms.after_token, x, active=self._active, ahead=ahead)
        mark("feed-forward")

    def _added(
        self, at: tuple[int, str], x: Tensor, how: StreamShares, buffers: Buffers, tiles: StepTiles | None
    ) -> AddedShares | None:
        """What adapters add to a router and to a matrix after it, for rows x [T, E] of the active stream."""
        if tiles is None or not {"altup_router", at[1]} & tiles.shape.stacks:
            return None
        room, n, e = buffers.altup, *x.shape
        assert room is not None
        normed, kinds, into = buffers.delta[:n], fit(room.kinds, n, len(how.router)), fit(room.into, n, len(how.router))
        shares = fit(room.shares, n, len(how.matrix))
        fused.add_and_norm(x, normed, how.norm, ahead=self._ahead)
        self._matmuls.low_rank((at[0], "altup_router"), normed, into.zero_(), tiles, factor=1 / e)
        altup.find_kinds(x, kinds, how, into, ahead=self._ahead)
        self._matmuls.low_rank(at, kinds, shares.zero_(), tiles)
        return AddedShares(into, shares)

    def _activate(self, l: int, gate_up: Tensor, inner: Tensor) -> None:
        if (deviations := self._deviations[l]) is None:
            super()._activate(l, gate_up, inner)
        else:
            altup.gated_above(gate_up, inner, deviations, self._what.activation, ahead=self._ahead)
