"""The torch reference of models for the CPU's native step: a decoder with the same weights, formats and meaning.

Quantized matrices take activations as their format quantizes them, and then every sum has the order that the format
fixes (`kernels.reference.ordered`): the results are those of the native step, to the bit. A model of floats only is an
ordinary `Decoder` in float32, which differs by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.kernels.host.quantized import QuantizedMatrix
from headway.kernels.reference import ordered
from headway.kernels.reference.ordered_matmul import OrderedMatrix
from headway.kernels.reference.quantized import dequantize, dequantize_rows, tensor
from headway.models.decoder import Attention, Decoder
from headway.models.described import DescribedDecoder
from headway.models.layers import DecoderLayer, Linear, mapped
from headway.models.quantized.cpu import QuantizedDecoder, QuantizedLayer

NORMS, MATRICES = ("input_norm", "mlp_norm", "q_norm", "k_norm"), ("qkv", "out", "gate_up", "down")


def reference_decoder(model: QuantizedDecoder) -> Decoder:
    """The same model for the torch runner, on the CPU in float32. It takes four bytes for each weight."""
    model.check()
    quantized = model.is_quantized
    output: Any
    if quantized:
        embedding, output = model.embedding, OrderedMatrix.of(model.output)
    else:
        embedding = dequantize(model.embedding)
        output = embedding if model.output is model.embedding else dequantize(model.output)
    return (OrderedDecoder if quantized else Decoder)(
        config=model.config,
        embedding=embedding,  # type: ignore[arg-type]  # a quantized one is read by rows
        layers=tuple(_layer(model, layer, quantized) for layer in model.layers),
        final_norm=tensor(model.final_norm),
        output=output,
        inv_freq=tensor(model.inv_freq),
    )


def float_decoder(decoder: Decoder) -> Decoder:
    """A decoder of any device and dtype in float32 on the CPU.

    Matrices in a format of CUDA devices are dequantized, and take activations rounded to float16, as there.
    """

    def wide(x: Tensor) -> Tensor:
        return x.detach().float().cpu()

    def linear(x: Any) -> Linear:
        kept = isinstance(x, Linear)
        weight = wide(x.weight if kept else replace(x, dtype=torch.float32).weight)
        return (Linear if kept else HalfLinear)(weight, None if x.bias is None else wide(x.bias))

    def layer(x: DecoderLayer) -> DecoderLayer:
        parts: dict[str, Any] = {n: None if (w := getattr(x, n)) is None else wide(w) for n in NORMS}
        return replace(x, **parts, **{n: linear(getattr(x, n)) for n in MATRICES})

    if isinstance(decoder, DescribedDecoder):
        return mapped(decoder, wide)
    embedding, output = wide(decoder.embedding), decoder.output
    head: Any = wide(output) if isinstance(output, Tensor) else linear(output)
    return Decoder(
        config=decoder.config,
        embedding=embedding,
        layers=tuple(layer(x) for x in decoder.layers),
        final_norm=wide(decoder.final_norm),
        output=embedding if output is decoder.embedding else head,
        inv_freq=wide(decoder.inv_freq),
    )


class HalfLinear(Linear):
    """A matrix that takes activations rounded to float16."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.half().float())


def reference_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that `reference_decoder` made."""
    matrices = [decoder.output, *(m for l in decoder.layers for m in (l.qkv, l.out, l.gate_up, l.down))]
    parts: list[Any] = [part for m in matrices for part in getattr(m, "parts", (m,))]
    return sum(getattr(part, "weights", part).nbytes for part in parts)


class OrderedDecoder(Decoder):
    """A decoder whose sums all have a fixed order."""

    ordered: ClassVar[bool] = True

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        table: Any = self.embedding
        return dequantize_rows(table, tokens)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return ordered.rotation(self.inv_freq, positions, self.config.rope.scale)

    def attention(self, tile: int | None) -> Attention:
        return ordered.attend

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


class OrderedLayer(DecoderLayer):
    """A layer whose sums all have a fixed order."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ordered.rms_norm(x, weight, self.eps)

    def gated(self, gate_up: Tensor, *, exact: bool) -> Tensor:
        return ordered.gated_silu(gate_up)


@dataclass(frozen=True, eq=False)
class StackedMatrices:
    """Matrices of one width, multiplied by the same rows; their outputs side by side."""

    parts: tuple[OrderedMatrix, ...]

    @classmethod
    def of(cls, parts: list[QuantizedMatrix]) -> StackedMatrices:
        """Neighbors of one format become one matrix."""
        stacked: list[OrderedMatrix] = []
        for part in map(OrderedMatrix.of, parts):
            joined = stacked[-1].stacked_with(part) if stacked else None
            stacked[-1:] = [*stacked[-1:], part] if joined is None else [joined]
        return cls(tuple(stacked))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def _layer(model: QuantizedDecoder, layer: QuantizedLayer, quantized: bool) -> DecoderLayer:
    c, stack = model.config, StackedMatrices.of if quantized else _dense
    matrices: dict[str, Any] = {
        "qkv": stack([layer.q, layer.k, layer.v]),
        "out": stack([layer.o]),
        "gate_up": stack([layer.gate, layer.up]),
        "down": stack([layer.down]),
    }
    return (OrderedLayer if quantized else DecoderLayer)(
        input_norm=tensor(layer.input_norm),
        q_norm=None if layer.q_norm is None else tensor(layer.q_norm),
        k_norm=None if layer.k_norm is None else tensor(layer.k_norm),
        mlp_norm=tensor(layer.mlp_norm),
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        eps=c.norm_eps,
        **matrices,
    )


def _dense(parts: list[QuantizedMatrix]) -> Linear:
    weight = torch.cat([dequantize(part) for part in parts])
    if all(part.bias is None for part in parts):
        return Linear(weight)
    return Linear(
        weight, torch.cat([torch.zeros(part.n) if part.bias is None else tensor(part.bias) for part in parts])
    )
