"""A decoder whose matrices are kept in codes on the device: 4 bits, int8 or float8.

The output, which every token passes through, is in int8 whatever the layers are in; the embedding stays as it is.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from headway.base.errors import Unsupported
from headway.kernels.triton.quantized import Kind, product, quantise
from headway.models.decoder import Decoder
from headway.models.layers import Layer
from headway.models.load import Progress, load_model

MATRICES = ("qkv", "out", "gate_up", "down")
HEAD: Kind = "int8"
WIDTHS = (160, 512, 1536)  # inputs of the matrices that are tried
NEAR = 0.01  # of an exact product, that one from codes must be
LEAST = {"int4": (8, 0), "int8": (8, 0), "fp8": (8, 9)}  # compute capability: matrix units, and numbers of 8 bits


def load_in_codes(
    path: Path, kind: Kind, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> Decoder:
    """A file's decoder in codes of this kind. One layer at a time is there in the dtype."""
    _check(device, kind)
    change = partial(_layer, kind=kind)
    return _with_head(load_model(path, dtype=dtype, device=device, progress=progress, change=change))


def in_codes(decoder: Decoder, kind: Kind) -> Decoder:
    """The decoder with its layers' matrices in codes of this kind, one layer after the other."""
    _check(decoder.device, kind)
    return _with_head(replace(decoder, layers=tuple(_layer(layer, kind) for layer in decoder.layers)))


def _with_head(decoder: Decoder) -> Decoder:
    output: Any = quantise(decoder.output, kind=HEAD)
    return replace(decoder, output=output)


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
    with torch.cuda.device(device):  # Triton launches there, whatever device the tensors are on
        for used in dict.fromkeys((kind, HEAD)):
            _try(device, used)


def _try(device: torch.device, kind: Kind) -> None:
    """Multiply small matrices of every kind that models have: the kernels rely on how Triton gives words to threads."""
    draw = torch.Generator().manual_seed(0)
    for width, gated in itertools.product(WIDTHS, (False, True)):
        weight, x = (torch.randn(n, width, generator=draw).to(device) for n in (64, 20))
        w = quantise(weight, kind=kind, gated=gated)
        exact = x.half().float() @ w.weight.float().t()
        if gated:
            gate, up = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(gate) * up
        for rows in (1, 3, 20):
            y = torch.empty(rows, exact.shape[1], device=device)
            product(x[:rows].half(), w, y, alone=True)
            if not float((y - exact[:rows]).norm()) <= NEAR * float(exact[:rows].norm()):
                raise Unsupported(
                    f"products of {kind} weights come out wrong with this version of Triton, on {device}; "
                    "take another version, or leave quantize out"
                )
