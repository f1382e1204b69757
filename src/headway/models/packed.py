"""The decoder with packed weights, for the native step: the same model as `Decoder`, matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.packed import Packed, pack_floats
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.layers import Layer

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """The weights of one layer; norms in float32."""

    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    q: Packed
    k: Packed
    v: Packed
    o: Packed
    gate: Packed
    up: Packed
    down: Packed

    def matrices(self) -> list[Packed]:
        return [getattr(self, name) for name in MATRICES]


@dataclass(frozen=True, eq=False)
class PackedDecoder:
    """Weights alone: activations, keys and values are float32, on the CPU."""

    config: ModelConfig
    embedding: Packed  # [V, E]
    layers: tuple[PackedLayer, ...]
    final_norm: Tensor
    output: Packed  # [V, E]; the embedding itself when tied
    inv_freq: Tensor

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values."""
        return torch.float32

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

    def formats(self) -> tuple[str, ...]:
        """The weight formats that occur, most bytes first."""
        size: dict[str, int] = {}
        for w in (self.output, *(w for layer in self.layers for w in layer.matrices())):
            size[w.label] = size.get(w.label, 0) + w.nbytes
        return tuple(sorted(size, key=lambda label: -size[label]))

    def tensors(self) -> list[Tensor]:
        """Every tensor, in a fixed order."""
        found = [self.final_norm, self.inv_freq]
        for layer in self.layers:
            found += [t for t in (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if t is not None]
        for w in (self.embedding, self.output, *(w for layer in self.layers for w in layer.matrices())):
            found += [t for t in (w.codes, w.scales, w.super, w.bias) if t is not None]
        return found


def pack_decoder(decoder: Decoder) -> PackedDecoder:
    """A decoder's float weights, packed as they are."""
    embedding = pack_floats(decoder.embedding)
    return PackedDecoder(
        config=decoder.config,
        embedding=embedding,
        layers=tuple(_layer(layer) for layer in decoder.layers),
        final_norm=decoder.final_norm.float(),
        output=embedding if decoder.output is decoder.embedding else pack_floats(decoder.output),
        inv_freq=decoder.inv_freq.float(),
    )


def _layer(layer: Layer) -> PackedLayer:
    heads = [n * layer.head_dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
    inner = layer.down.weight.shape[1]
    parts: dict[str, Packed] = {}
    for names, linear, rows in (
        (("q", "k", "v"), layer.qkv, heads),
        (("o",), layer.out, [len(layer.out.weight)]),
        (("gate", "up"), layer.gate_up, [inner, inner]),
        (("down",), layer.down, [len(layer.down.weight)]),
    ):
        biases = [None] * len(rows) if linear.bias is None else linear.bias.split(rows)
        for name, weight, bias in zip(names, linear.weight.split(rows), biases, strict=True):
            parts[name] = pack_floats(weight, bias)
    return PackedLayer(
        input_norm=layer.input_norm.float(),
        mlp_norm=layer.mlp_norm.float(),
        q_norm=None if layer.q_norm is None else layer.q_norm.float(),
        k_norm=None if layer.k_norm is None else layer.k_norm.float(),
        **parts,
    )
