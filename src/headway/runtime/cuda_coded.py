"""A decoder whose matrices are kept in codes on the device: 4 bits, int8 or float8.

The output, which every token passes through, is in int8 whatever the layers are in; the embedding stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from headway.base.errors import Unsupported
from headway.kernels.triton.coded import Kind, quantise
from headway.models.decoder import Decoder
from headway.models.layers import Layer

MATRICES = ("qkv", "out", "gate_up", "down")
LEAST = {"int4": (8, 0), "int8": (8, 0), "fp8": (8, 9)}  # compute capability: matrix units, and numbers of 8 bits


def in_codes(decoder: Decoder, kind: Kind) -> Decoder:
    """The decoder with its layers' matrices in codes of this kind, one layer after the other."""
    _check(decoder.device, kind)
    layers = tuple(_layer(layer, kind) for layer in decoder.layers)
    output: Any = quantise(decoder.output, kind="int8")
    return replace(decoder, layers=layers, output=output)


def _layer(layer: Layer, kind: Kind) -> Layer:
    matrices: dict[str, Any] = {}
    for name in MATRICES:
        linear = getattr(layer, name)
        matrices[name] = quantise(linear.weight, linear.bias, kind=kind, gated=name == "gate_up")
    return replace(layer, **matrices)


def _check(device: torch.device, kind: Kind) -> None:
    if device.type != "cuda":
        return
    has = cast("tuple[int, int]", torch.cuda.get_device_capability(device))
    if has < LEAST[kind]:
        name = torch.cuda.get_device_name(device)
        raise Unsupported(
            f"{kind} needs a device of compute capability {'.'.join(map(str, LEAST[kind]))} and {name} has "
            f"{'.'.join(map(str, has))}; leave quantize out"
        )
