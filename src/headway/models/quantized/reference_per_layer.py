"""The torch reference of layers that differ from each other: Gemma 3n's and Gemma 4's, with the order of every sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headway.kernels.host.quantized import QuantizedMatrix
from headway.kernels.reference import ordered
from headway.kernels.reference.ordered_matmul import OrderedMatrix
from headway.kernels.reference.quantized import dequantize, dequantize_rows, tensor
from headway.models.config import ModelConfig
from headway.models.quantized.cpu import INPUT_MATRICES, STREAM_MATRICES, QuantizedDecoder, QuantizedLayer
from headway.models.quantized.reference import OrderedDescribedDecoder, OrderedDescribedLayer, experts_of
from headway.models.variants.altup import LEAST, AltUpDecoder, AltUpLayer
from headway.models.variants.per_layer import ExpertsBeside, PerLayerDecoder, PerLayerLayer

LAYER_VECTORS = ("post_input_norm", "layer_scale", "laurel_norm", "altup_norm", "altup_scale")
BESIDE_NORMS = ("dense_norm", "expert_in_norm", "expert_out_norm")


class OrderedPerLayerLayer(PerLayerLayer, OrderedDescribedLayer):
    """A layer with normed values whose sums all have a fixed order."""

    def norm_value(self, v: Tensor) -> Tensor:
        return ordered.unit_norm(v, self.eps)


class OrderedAltUpLayer(AltUpLayer, OrderedPerLayerLayer):
    """A layer of one of several streams whose sums all have a fixed order."""

    def tanh(self, x: Tensor) -> Tensor:
        return ordered.capped(x, 1.0)

    def total(self, parts: Tensor) -> Tensor:
        return _in_order(parts.unbind(2))

    def cut_off(self, x: Tensor, deviations: float) -> Tensor:
        return ordered.cut_off(x, deviations)


class OrderedPerLayerDecoder(PerLayerDecoder, OrderedDescribedDecoder):
    """A decoder of layers that differ from each other whose sums all have a fixed order."""

    def project_embedded(self, embedded: Tensor, own: slice) -> Tensor:
        projection: Any = self.input_projection
        return projection.rows(own)(embedded)

    def token_rows(self, own: slice, tokens: Tensor) -> Tensor:
        table: Any = self.token_inputs
        return dequantize_rows(table, tokens)[:, own]


class OrderedAltUpDecoder(AltUpDecoder, OrderedPerLayerDecoder):
    """A decoder with residuals side by side whose sums all have a fixed order."""

    def product(self, x: Tensor, matrix: Any) -> Tensor:
        return matrix(x)

    def mean(self, parts: list[Tensor]) -> Tensor:
        return _in_order(parts) / len(parts)

    def as_large_as(self, x: Tensor, y: Tensor) -> Tensor:
        return ordered.as_large_as(x, y, LEAST)


def decoder_kind(config: ModelConfig, *, quantized: bool) -> Any:
    """The class of the reference."""
    if config.description.altup is not None:
        return OrderedAltUpDecoder if quantized else AltUpDecoder
    return OrderedPerLayerDecoder if quantized else PerLayerDecoder


def layer_parts(
    model: QuantizedDecoder, layer: QuantizedLayer, stack: Callable[[list[Any]], Any], *, quantized: bool
) -> tuple[dict[str, Any], Any]:
    """What a layer has besides a described layer's parts, and its class."""
    altup = model.config.description.altup
    parts: dict[str, Any] = {n: tensor(v) for n in LAYER_VECTORS if (v := getattr(layer, n)) is not None}
    matrices = {n: w for n in (*INPUT_MATRICES, *STREAM_MATRICES) if (w := getattr(layer, n)) is not None}
    parts |= {name: stack([matrix]) for name, matrix in matrices.items()}
    if layer.router is not None:
        norms: dict[str, Any] = {name: tensor(getattr(layer, name)) for name in BESIDE_NORMS}
        parts["beside"] = ExpertsBeside(**experts_of(model, layer, quantized=quantized), **norms)
    if altup is None:
        return parts, OrderedPerLayerLayer if quantized else PerLayerLayer
    parts["sparsity"] = altup.sparsity[model.layers.index(layer)]
    return parts, OrderedAltUpLayer if quantized else AltUpLayer


def outer_parts(model: QuantizedDecoder, *, quantized: bool) -> dict[str, Any]:
    """What such a decoder has outside of its layers; an ordered table of tokens is read by rows."""
    c, parts = model.config, dict[str, Any]()
    for name, matrix in model.outer_matrices().items():
        if name.startswith("altup"):
            assert c.description.altup is not None
            each = [matrix.expert(i, c.hidden_size) for i in range(c.description.altup.streams - 1)]
            parts[name] = _each(each, quantized=quantized)
        elif quantized:
            parts[name] = matrix if name == "token_inputs" else OrderedMatrix.of(matrix)
        else:
            parts[name] = dequantize(matrix)
    return parts


def _each(matrices: list[QuantizedMatrix], *, quantized: bool) -> Any:
    return tuple(map(OrderedMatrix.of if quantized else dequantize, matrices))


def _in_order(parts: Any) -> Tensor:
    """The sum, first to last."""
    first, *others = parts
    total = first
    for part in others:
        total = total + part
    return total
