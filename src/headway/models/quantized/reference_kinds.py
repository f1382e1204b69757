"""The torch reference of layers that are neither Llama's nor described alone: latent attention, queries that grow with
their position, recurrences.

Latent attention keeps the order of every sum; in recurrent layers the matmuls do, and what is between them differs from
the native step by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference import ordered
from headway.kernels.reference.ordered_matmul import OrderedMatrix
from headway.kernels.reference.quantized import tensor
from headway.models.description import GatedDelta, Mamba2, Recurrence, ShortConv
from headway.models.quantized.cpu import QuantizedDecoder, QuantizedLayer
from headway.models.recurrent import GatedDeltaMixer, Mamba2Mixer, Mixer, ShortConvMixer
from headway.models.variants.latent import LatentLayer

Stack = Callable[[list[Any]], Any]  # matrices of one width, as one that is called


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """A matrix for each head, multiplied in the order that its format fixes."""

    each: tuple[OrderedMatrix, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.each)


class OrderedLatentLayer(LatentLayer):
    """A layer with latent attention whose sums all have a fixed order."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return ordered.rms_norm(x, weight, self.eps)

    def norm_latent(self, x: Tensor, weight: Tensor) -> Tensor:
        return ordered.rms_norm(x, weight, self.latent.eps)

    def by_head(self, x: Tensor, matrices: Any) -> Tensor:
        return torch.stack([matrix(x[:, i]) for i, matrix in enumerate(matrices.each)], 1)

    def activate(self, x: Tensor, kind: str, *, exact: bool) -> Tensor:
        return ordered.activate(x, kind)


def latent_parts(model: QuantizedDecoder, layer: QuantizedLayer, stack: Stack, *, quantized: bool) -> dict[str, Any]:
    """What a layer with latent attention has besides a described layer's parts."""
    what = model.config.description.latent
    assert what is not None
    parts: dict[str, Any] = {"qkv": stack([layer.q_down if what.query_size else layer.q])}
    parts["kv_down"] = stack([layer.kv_down])
    parts["q_up"] = None if layer.q_up is None else stack([layer.q_up])
    for name, n in (("key_up", what.size), ("value_up", what.value_dim)):
        each = [getattr(layer, name).expert(i, n) for i in range(model.config.heads)]
        if quantized:
            parts[name] = HeadMatrices(tuple(map(OrderedMatrix.of, each)))
        else:
            parts[name] = torch.stack([stack([part]).weight for part in each])
    return parts


def mixer_of(model: QuantizedDecoder, layer: QuantizedLayer, stack: Stack) -> Mixer:
    """The recurrence of a layer."""
    c = model.config
    what: Recurrence | None = c.description.recurrence

    def vector(array: np.ndarray | None) -> Any:
        return None if array is None else tensor(array)

    conv, bias, out = vector(layer.conv), vector(layer.conv_bias), stack([layer.mix_out])
    match what:
        case ShortConv():
            return ShortConvMixer(what, stack([layer.mix_in]), conv, bias, out)
        case GatedDelta():
            return GatedDeltaMixer(
                what=what,
                mix_in=stack([layer.mix_qkv, layer.mix_beta, layer.mix_step]),
                mix_gate=stack([layer.mix_gate]),
                conv=conv,
                step_bias=vector(layer.step_bias),
                rate=vector(layer.rate),
                mix_norm=vector(layer.mix_norm),
                mix_out=out,
                eps=c.norm_eps,
            )
        case Mamba2():
            return Mamba2Mixer(
                what=what,
                mix_in=stack([layer.mix_in]),
                conv=conv,
                conv_bias=bias,
                step_bias=vector(layer.step_bias),
                rate=vector(layer.rate),
                skip=vector(layer.skip),
                mix_norm=vector(layer.mix_norm),
                mix_out=out,
                eps=c.norm_eps,
                activation=c.description.activation,
            )
        case None:
            raise AssertionError("the layer has no recurrence")
