"""Layers that differ from each other on a CUDA device (Gemma 3n, Gemma 4): what they take of a row's token, and experts
beside the feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.specs.adapters import OUTSIDE
from headway.kernels.triton import fused
from headway.kernels.triton.fused import HeadConfig, RowNorm
from headway.kernels.triton.variants.token_inputs import gate_inputs, token_inputs
from headway.models.described import DescribedLayer
from headway.models.layers import Linear
from headway.models.variants.per_layer import ExpertsBeside
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.buffers import Buffers, fit
from headway.runtime.runners.cuda.experts import CudaExperts
from headway.runtime.runners.cuda.matmuls import Matmuls
from headway.runtime.runners.cuda.steps import DeviceStep


def own_heads(how: HeadConfig, layer: DescribedLayer, l: int) -> HeadConfig:
    """Whether a layer has keys of its own, and what values are, where layers differ from each other."""
    own = layer.description.per_layer
    if own is None:
        return how
    if own.kv_from[l] != l:
        return replace(how, kv_heads=0)
    return replace(how, values="keys" if l in own.keys_as_values else "normed")


class TokenInputs:
    """What the layers of one decoder take of tokens."""

    def __init__(self, decoder: Any, matmuls: Matmuls) -> None:
        self._decoder, self._matmuls, self._layers = decoder, matmuls, decoder.layers
        kind, eps = decoder.config.description.norm, decoder.config.norm_eps
        self._norm = RowNorm(decoder.input_projection_norm, eps, kind)
        self._activation = decoder.config.description.activation

    def begin(self, step: DeviceStep, buffers: Buffers, sampled: Tensor) -> Tensor:
        """What each layer may take of the tokens of embedded rows [L, T, P]."""
        d, n = self._decoder, step.count
        room = buffers.tokens
        assert room is not None
        made, inputs = room.made[:n], fit(room.inputs, len(self._layers), n, len(self._norm.weight))
        place, projection = (OUTSIDE, "input_projection"), Linear(d.input_projection)
        self._matmuls.project(place, buffers.x[:n], projection, made, step.adapters)
        scale, ahead = d.config.hidden_size**-0.5, self._matmuls.ahead
        token_inputs(step.ints, step.rows, sampled, made, d.token_inputs, self._norm, inputs, scale, ahead=ahead)
        return inputs

    def take(
        self, l: int, reads: Tensor, inputs: Tensor, out: Tensor, buffers: Buffers, *, adapters: StepTiles | None
    ) -> None:
        """What a layer takes of `inputs` [T, P], by rows [R, E] that may be more, before its norm."""
        layer, room = self._layers[l], buffers.tokens
        assert room is not None
        gate = room.gate[: len(reads)]
        self._matmuls.project((l, "input_gate"), reads, layer.input_gate, gate, adapters)
        gate_inputs(gate[: len(inputs)], inputs, self._activation, ahead=self._matmuls.ahead)
        self._matmuls.project((l, "input_out"), gate, layer.input_out, out, adapters)


@dataclass(frozen=True, eq=False)
class BesideNorms:
    """The norms around a layer's feed-forward and the experts beside it."""

    dense: RowNorm
    expert_in: RowNorm
    expert_out: RowNorm
    router: RowNorm

    @classmethod
    def of(cls, beside: ExpertsBeside, kind: str, eps: float) -> BesideNorms:
        weights: Any = beside.experts
        return cls(
            RowNorm(beside.dense_norm, eps, kind),
            RowNorm(beside.expert_in_norm, eps, kind),
            RowNorm(beside.expert_out_norm, eps, kind),
            RowNorm(weights.router_scale * len(weights.router_scale) ** -0.5, eps),
        )


class BesideRows:
    """The experts beside the feed-forwards of one decoder's layers."""

    def __init__(self, decoder: Any, experts: CudaExperts) -> None:
        self._experts, self._layers = experts, decoder.layers
        kind = decoder.config.description.norm
        self._norms = [BesideNorms.of(layer.beside, kind, layer.eps) for layer in decoder.layers]

    def add(self, l: int, x: Tensor, dense: Tensor, buffers: Buffers, *, adapters: StepTiles | None) -> Tensor:
        """What the feed-forward made of rows, normed, plus what experts make of the residual x [R, E], normed."""
        norms, room, n, ahead = self._norms[l], buffers.beside, len(x), self._experts.matmuls.ahead
        assert room is not None
        assert buffers.experts is not None
        rows, reads, out = room.rows[:n], room.reads[:n], room.out[:n]
        fused.add_and_norm(x, rows, norms.expert_in, ahead=ahead)
        fused.add_and_norm(x, reads, norms.router, ahead=ahead)
        beside = self._layers[l].beside
        self._experts.feed_forward(l, beside, rows, out, buffers.experts, adapters=adapters, reads=reads)
        fused.add_and_norm(dense[:n], rows, norms.dense, ahead=ahead)
        fused.add_and_norm(rows, None, None, add=out, after=norms.expert_out, ahead=ahead)
        return rows
