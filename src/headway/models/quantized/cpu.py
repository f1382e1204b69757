"""The decoder with quantized weights for the CPU's native step: the same model as `Decoder`, matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headway.base.arrays import aligned, from_tensor, widen
from headway.base.device import CPU, Device
from headway.base.errors import InvalidInput
from headway.kernels.host.quantized import QuantizedMatrix, interleave_floats
from headway.models.any_decoder import AnyDecoder
from headway.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from headway.models.decoder import Decoder
    from headway.models.layers import DecoderLayer, Linear

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """The weights of one layer; norms in float32."""

    input_norm: np.ndarray
    mlp_norm: np.ndarray
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    q: QuantizedMatrix
    k: QuantizedMatrix
    v: QuantizedMatrix
    o: QuantizedMatrix
    gate: QuantizedMatrix
    up: QuantizedMatrix
    down: QuantizedMatrix

    def matrices(self) -> list[QuantizedMatrix]:
        return [getattr(self, name) for name in MATRICES]

    def check(self, at: str, c: ModelConfig) -> None:
        """Raise for a weight that does not fit the config; `at` goes before its name."""
        e, f, q, kv = c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
        shapes = ((q, e), (kv, e), (kv, e), (e, q), (f, e), (f, e), (e, f))
        for name, shape in zip(MATRICES, shapes, strict=True):
            _check_matrix(at + name, getattr(self, name), shape)
        _check_floats(f"{at}input_norm", self.input_norm, e)
        _check_floats(f"{at}mlp_norm", self.mlp_norm, e)
        if (self.q_norm is None) != (self.k_norm is None):
            raise InvalidInput(f"the layer {at[:-1]!r} has a norm for one of q and k; both or none are needed")
        if self.q_norm is not None and self.k_norm is not None:
            _check_floats(f"{at}q_norm", self.q_norm, c.head_dim)
            _check_floats(f"{at}k_norm", self.k_norm, c.head_dim)


@dataclass(frozen=True, eq=False)
class QuantizedDecoder(AnyDecoder):
    """Quantized or float weights; activations and the KV cache are float32, on the CPU."""

    config: ModelConfig
    embedding: QuantizedMatrix  # [V, E]
    layers: tuple[QuantizedLayer, ...]
    final_norm: np.ndarray
    output: QuantizedMatrix  # [V, E]; the embedding itself when tied
    inv_freq: np.ndarray

    @property
    def device(self) -> Device:
        return CPU

    @property
    def dtype(self) -> np.dtype:
        """Of activations, keys and values."""
        return np.dtype(np.float32)

    def nbytes(self) -> Mapping[str, int]:
        """Weight bytes that one forward reads, by phase."""
        size = {"norm": self.final_norm.nbytes, "qkv": 0, "output projection": 0, "feed-forward": 0}
        for layer in self.layers:
            size["norm"] += layer.input_norm.nbytes + layer.mlp_norm.nbytes
            size["qkv"] += layer.q.nbytes + layer.k.nbytes + layer.v.nbytes
            size["qkv"] += sum(n.nbytes for n in (layer.q_norm, layer.k_norm) if n is not None)
            size["output projection"] += layer.o.nbytes
            size["feed-forward"] += layer.gate.nbytes + layer.up.nbytes + layer.down.nbytes
        return {**size, "head": self.output.nbytes}

    def first_layers(self, count: int) -> QuantizedDecoder:
        """The first layers of the model, with its embedding and head."""
        return replace(self, config=self.config.first_layers(count), layers=self.layers[:count])

    @property
    def row_quantization(self) -> str | None:
        """How its layers quantize activations before a matmul, or None if all of them take floats."""
        kinds = {w.row_quantization for layer in self.layers for w in layer.matrices()} - {None}
        return " and ".join(sorted(map(str, kinds))) or None

    @property
    def is_quantized(self) -> bool:
        """Whether a matrix takes quantized activations: then every sum has the order that its format fixes."""
        return self.row_quantization is not None or self.output.row_quantization is not None

    def check(self) -> None:
        """Raise, naming the weight, unless each matches the config and is laid out as native code reads it."""
        c, e = self.config, self.config.hidden_size
        if len(self.layers) != c.layers or len(c.windows) != c.layers:
            raise InvalidInput(
                f"the decoder has {len(self.layers)} layers and {len(c.windows)} windows; its config says {c.layers}"
            )
        _check_matrix("embedding", self.embedding, (c.vocab_size, e))
        _check_matrix("output", self.output, (c.vocab_size, e))
        _check_floats("final_norm", self.final_norm, e)
        _check_floats("inv_freq", self.inv_freq, c.rope.dim // 2)
        for i, layer in enumerate(self.layers):
            layer.check(f"layers.{i}.", c)

    def formats(self) -> tuple[str, ...]:
        """The weight formats in use, most bytes first."""
        size: dict[str, int] = {}
        for w in (self.output, *(w for layer in self.layers for w in layer.matrices())):
            size[w.label] = size.get(w.label, 0) + w.nbytes
        return tuple(sorted(size, key=lambda label: -size[label]))

    def arrays(self) -> list[np.ndarray]:
        """Every array, in a fixed order."""
        arrays = [self.final_norm, self.inv_freq]
        for layer in self.layers:
            arrays += [t for t in (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if t is not None]
        for w in (self.embedding, self.output, *(w for layer in self.layers for w in layer.matrices())):
            arrays += w.arrays()
        return arrays


def interleave_decoder(decoder: Decoder) -> QuantizedDecoder:
    """A decoder's float weights in the interleaved layout, values unchanged."""
    embedding = interleave_floats(from_tensor(decoder.embedding))
    return QuantizedDecoder(
        config=decoder.config,
        embedding=embedding,
        layers=tuple(_layer(layer, f"layers.{i}.") for i, layer in enumerate(decoder.layers)),
        final_norm=_floats(decoder.final_norm),
        output=embedding if decoder.output is decoder.embedding else interleave_floats(from_tensor(decoder.output)),
        inv_freq=_floats(decoder.inv_freq),
    )


def _layer(layer: DecoderLayer, at: str) -> QuantizedLayer:
    heads = [n * layer.head_dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
    inner = layer.down.weight.shape[1]
    parts: dict[str, QuantizedMatrix] = {}
    for names, linear, rows in (
        (("q", "k", "v"), layer.qkv, heads),
        (("o",), layer.out, [len(layer.out.weight)]),
        (("gate", "up"), layer.gate_up, [inner, inner]),
        (("down",), layer.down, [len(layer.down.weight)]),
    ):
        _check_stack(at + "+".join(names), linear, sum(rows))
        biases = [None] * len(rows) if linear.bias is None else linear.bias.split(rows)
        for name, weight, bias in zip(names, linear.weight.split(rows), biases, strict=True):
            parts[name] = interleave_floats(from_tensor(weight), None if bias is None else from_tensor(bias))
    return QuantizedLayer(
        input_norm=_floats(layer.input_norm),
        mlp_norm=_floats(layer.mlp_norm),
        q_norm=None if layer.q_norm is None else _floats(layer.q_norm),
        k_norm=None if layer.k_norm is None else _floats(layer.k_norm),
        **parts,
    )


def _floats(norm: Tensor) -> np.ndarray:
    return aligned(widen(from_tensor(norm)))


# -- checks before native code reads the weights ---------------------------------------------------------------------


def _check_matrix(name: str, w: QuantizedMatrix, shape: tuple[int, int]) -> None:
    if (w.n, w.k) != shape:
        raise InvalidInput(f"the weight {name!r} has shape {[w.n, w.k]}; this config needs {list(shape)}")
    if problem := w.problem():
        raise InvalidInput(f"the weight {name!r} cannot be used: {problem}")


def _check_floats(name: str, norm: np.ndarray, size: int) -> None:
    if not isinstance(norm, np.ndarray) or norm.shape != (size,) or norm.dtype != np.float32:
        raise InvalidInput(
            f"the weight {name!r} has shape {list(norm.shape)} in {norm.dtype}; an array [{size}] in float32 is needed"
        )
    if not norm.flags.c_contiguous:
        raise InvalidInput(f"the weight {name!r} must be contiguous")


def _check_stack(name: str, linear: Linear, rows: int) -> None:
    """Raise unless a stacked matrix and its bias have as many rows as their parts."""
    sizes = [len(linear.weight)] + ([] if linear.bias is None else [len(linear.bias)])
    if linear.weight.ndim != 2 or any(size != rows for size in sizes):
        has = [list(t.shape) for t in (linear.weight, linear.bias) if t is not None]
        raise InvalidInput(
            f"the weight {name!r} has shape {' and a bias of '.join(map(str, has))}; {rows} rows are needed"
        )
