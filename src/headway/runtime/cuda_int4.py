"""A decoder whose matrices are kept in 4 bits on the device; embedding and output stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.kernels.triton.int4 import quantise
from headway.models.decoder import Decoder
from headway.models.layers import Layer

MATRICES = ("qkv", "out", "gate_up", "down")


def quantised(decoder: Decoder) -> Decoder:
    """The decoder with the matrices of its layers in 4 bits, one layer after the other."""
    return replace(decoder, layers=tuple(_layer(layer) for layer in decoder.layers))


def _layer(layer: Layer) -> Layer:
    matrices: dict[str, Any] = {}
    for name in MATRICES:
        linear = getattr(layer, name)
        matrices[name] = quantise(linear.weight, linear.bias)
    return replace(layer, **matrices)
