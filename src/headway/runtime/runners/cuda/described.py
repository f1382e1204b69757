"""The layers of a model that is not Llama's on a CUDA device, as its description has them.

The same kernels as Llama's layers, with other constants: norms of any kind before and after attention and feed-forward,
side by side or one after the other, biases, activations. What each layer needs is made of the decoder once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton import fused
from headway.kernels.triton.fused import HeadConfig, RowNorm
from headway.kernels.triton.matvec import RmsNorm
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.variants.per_layer import PerLayerLayer
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.buffers import Buffers, fit
from headway.runtime.runners.cuda.experts import CudaExperts
from headway.runtime.runners.cuda.matmuls import Matmuls
from headway.runtime.runners.cuda.steps import DeviceStep, Mark
from headway.runtime.runners.cuda.variants.latent import LatentRows
from headway.runtime.runners.cuda.variants.per_layer import BesideRows, TokenInputs

Attend = Callable[[int, DeviceStep, Buffers, Mark], None]


@dataclass(frozen=True, eq=False)
class LayerNorms:
    """The norms of a layer, None where it has none. `input` and `mlp` are of what attention and feed-forward read."""

    input: RowNorm | None
    mlp: RowNorm | None
    after_attention: RowNorm | None
    after_mlp: RowNorm | None
    after_token: RowNorm | None  # of what the layer takes of tokens

    @classmethod
    def of(cls, layer: DescribedLayer) -> LayerNorms:
        what = layer.description

        def norm(weight: Tensor | None, bias: Tensor | None) -> RowNorm | None:
            return None if weight is None else RowNorm(weight, layer.eps, what.norm, bias)

        before = what.norm_place != "after"
        return cls(
            norm(layer.input_norm, layer.input_norm_bias) if before else None,
            norm(layer.mlp_norm, layer.mlp_norm_bias) if before and not what.one_norm else None,
            norm(layer.post_attention_norm, layer.post_attention_norm_bias),
            norm(layer.post_mlp_norm, layer.post_mlp_norm_bias),
            norm(layer.post_input_norm if isinstance(layer, PerLayerLayer) else None, None),
        )


def head_config(layer: DescribedLayer, *, rotated: bool) -> HeadConfig:
    """How a layer's queries and keys are normed."""
    what, grown = layer.description, layer.description.temperature
    return HeadConfig(
        layer.heads,
        layer.kv_heads,
        layer.head_dim,
        layer.q_norm,
        layer.k_norm,
        layer.eps,
        kind=what.norm,
        each=what.qk_norm == "each",
        by_row=what.qk_norm == "row",
        clip=what.qkv_clip or 0.0,
        temperature=None if rotated or grown is None else (grown.floor, grown.scale),
    )


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The rows that the second half of a layer computes: their residual, what its norm gave and gives, what a matmul
    adds, attention, and what layers may take of tokens. Matmuls may take more rows than are the step's, for nothing."""

    count: int
    x: Tensor  # [R, E]
    h: Tensor  # [R, E]
    delta: Tensor  # [R, E]
    mixed: Tensor  # [R, H, D], or as many numbers in other widths
    inputs: Tensor | None  # [L, T, P]


class DescribedLayers:
    """The layers of one decoder. `attend` takes qkv to what attention makes of it, in the step's buffers."""

    def __init__(
        self,
        decoder: DescribedDecoder,
        matmuls: Matmuls,
        heads: list[HeadConfig],
        attend: Attend,
        latent: LatentRows | None,
    ) -> None:
        self._layers, self._what = decoder.layers, decoder.config.description
        self._matmuls, self._heads, self._attend, self._latent = matmuls, heads, attend, latent
        self._out = [how.dim if latent is None else latent.size for how in heads]  # numbers a head gets of attention
        self._norms = [LayerNorms.of(layer) for layer in decoder.layers]
        self._ahead = matmuls.ahead
        self._experts = self._what.experts and CudaExperts(self._what.experts, self._what.activation, matmuls)
        self._takes_one_row = self._is_plain() and all(map(self._routes_one_row, decoder.layers))
        own, experts = self._what.per_layer, self._what.experts
        self._tokens = TokenInputs(decoder, matmuls) if own is not None and own.inputs is not None else None
        self._beside = None
        if experts is not None and experts.beside_dense:
            assert self._experts is not None
            self._beside = BesideRows(decoder, self._experts)

    def forward(self, step: DeviceStep, buffers: Buffers, mark: Mark, sampled: Tensor) -> None:
        """Take the step's residual rows through all layers. `sampled` are the tokens that decode rows refer to."""
        if step.count == 1 and self._takes_one_row and step.adapters is None and step.needed is None:
            self._one_row(step, buffers, mark)
            return
        n, last = step.count, len(self._layers) - 1
        many = self._matmuls.padded_rows(n, buffers)
        inputs = None if self._tokens is None else self._tokens.begin(step, buffers, sampled)
        rows = LayerRows(n, buffers.x[:many], buffers.h[:many], buffers.delta[:many], buffers.mixed[:many], inputs)
        if (first := self._norms[0].input) is not None:
            fused.add_and_norm(rows.x[:n], rows.h[:n], first, ahead=self._ahead)
        mark("norm")
        for l, layer in enumerate(self._layers):
            source = rows.x if self._norms[l].input is None else rows.h
            if self._latent is not None:
                self._latent.project(l, source, buffers, step.adapters)
            else:
                qkv = fit(buffers.qkv, many, len(layer.qkv.weight))
                self._matmuls.project((l, "qkv"), source, layer.qkv, qkv, step.adapters)
                if self._heads[l].by_row and self._heads[l].q_norm is not None:
                    fused.norm_projections(qkv[:n], self._heads[l], ahead=self._ahead)
            mark("qkv")
            if step.needed is not None and l == last:
                self._finish_needed(step.needed, step, rows, buffers, mark)
                return
            self._attend(l, step, buffers, mark)
            self._finish_layer(l, rows, buffers, step.adapters, mark)

    def _is_plain(self) -> bool:
        """Whether a layer adds what its attention and its feed-forward make of the row's norm."""
        what = self._what
        if self._latent is not None or what.per_layer is not None or what.parallel or what.one_norm:
            return False
        return what.norm_place == "before" and what.norm == "rms" and what.residual_scale == 1.0

    def _routes_one_row(self, layer: DescribedLayer) -> bool:
        return self._experts is not None and self._experts.takes_one_row(layer)

    def _one_row(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        """Take one row through all layers, whose norms are in the kernels of the matmuls after them."""
        x, h, mixed = buffers.x[:1], buffers.h[:1], buffers.mixed[0].flatten()
        assert self._experts is not None
        assert buffers.experts is not None
        for l, layer in enumerate(self._layers):
            self._matmuls.matvec(x[0], layer.qkv, buffers.qkv[0], norm=RmsNorm(layer.input_norm, layer.eps))
            if self._heads[l].by_row and self._heads[l].q_norm is not None:
                fused.norm_projections(buffers.qkv[:1], self._heads[l], ahead=self._ahead)
            mark("qkv")
            self._attend(l, step, buffers, mark)
            self._matmuls.matvec(mixed, layer.out, x[0], add=True)
            mark("output projection")
            self._experts.one_row(layer, x, RmsNorm(layer.mlp_norm, layer.eps), h, buffers.experts)
            mark("feed-forward")

    def _finish_layer(self, l: int, rows: LayerRows, buffers: Buffers, adapters: StepTiles | None, mark: Mark) -> None:
        """A layer after its attention, and the norm that the next one begins with."""
        n, layer, norms, what = rows.count, self._layers[l], self._norms[l], self._what
        x, h, delta = rows.x[:n], rows.h[:n], rows.delta[:n]
        mixed = fit(rows.mixed, len(rows.x), self._heads[l].heads * self._out[l])
        if self._latent is not None:
            mixed = self._latent.from_latent(l, mixed, buffers, adapters)
        self._matmuls.project((l, "out"), mixed, layer.out, rows.delta, adapters)
        mark("output projection")
        fused.add_and_norm(
            x, h, norms.mlp,
            add=delta, after=norms.after_attention, scale=what.residual_scale, old=what.parallel, ahead=self._ahead,
        )  # fmt: skip
        mark("norm")
        reads_x = norms.mlp is None and not what.one_norm
        self._feed_forward(l, rows.x if reads_x else rows.h, rows.delta, buffers, adapters)
        if self._beside is not None:
            delta = self._beside.add(l, x, delta, buffers, adapters=adapters)
        mark("feed-forward")
        following = self._norms[l + 1].input if l + 1 < len(self._layers) else None
        after, scale = norms.after_mlp, what.residual_scale
        factor = layer.layer_scale if isinstance(layer, PerLayerLayer) else None
        if self._tokens is not None:
            assert rows.inputs is not None
            fused.add_and_norm(x, None, None, add=delta, after=after, scale=scale, ahead=self._ahead)
            delta, after = rows.delta[:n], norms.after_token
            self._tokens.take(l, rows.x, rows.inputs[l], rows.delta, buffers, adapters=adapters)
            scale = 1.0
        fused.add_and_norm(x, h, following, add=delta, after=after, scale=scale, factor=factor, ahead=self._ahead)
        mark("norm")

    def _finish_needed(self, needed: Tensor, step: DeviceStep, rows: LayerRows, buffers: Buffers, mark: Mark) -> None:
        """The last layer after its queries, keys and values, for the rows that somebody reads."""
        l, n, r = len(self._layers) - 1, step.count, len(needed)
        assert step.adapters is None, "their tiles stand for all rows"
        self._attend(l, replace(step, singles=needed, items=None, prompts=()), buffers, mark)
        whole = fit(buffers.mixed, n, self._heads[l].heads * self._out[l])
        x, h, mixed = (t[:n].index_select(0, needed) for t in (buffers.x, buffers.h, whole))
        inputs = None if rows.inputs is None else rows.inputs.index_select(1, needed)
        self._finish_layer(l, LayerRows(r, x, h, buffers.delta[:r], mixed, inputs), buffers, None, mark)
        buffers.x.index_copy_(0, needed.long(), x)

    def _feed_forward(self, l: int, h: Tensor, out: Tensor, buffers: Buffers, adapters: StepTiles | None) -> None:
        """What a layer's feed-forward makes of rows h, into `out`."""
        layer, what = self._layers[l], self._what
        if layer.experts is not None:
            assert self._experts is not None
            assert buffers.experts is not None
            self._experts.feed_forward(l, layer, h, out, buffers.experts, adapters=adapters)
            return
        width = layer.down.weight.shape[1]
        inner = fit(buffers.inner, len(h), width)
        if not what.gated:
            self._matmuls.project((l, "gate_up"), h, layer.gate_up, inner, adapters)
            fused.gated(inner, inner, kind=what.activation, alone=True, ahead=self._ahead)
        else:
            gate_up = fit(buffers.gate_up, len(h), 2 * width)
            self._matmuls.project((l, "gate_up"), h, layer.gate_up, gate_up, adapters)
            self._activate(l, gate_up, inner)
        self._matmuls.project((l, "down"), inner, layer.down, out, adapters)

    def _activate(self, l: int, gate_up: Tensor, inner: Tensor) -> None:
        """The activation of a layer's gate, times up."""
        fused.gated(gate_up, inner, kind=self._what.activation, ahead=self._ahead)
