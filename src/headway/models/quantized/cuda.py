"""A decoder with quantized weights on a CUDA device: int4, int8 or fp8.

The output matrix, which every token passes through, is int8 whatever the layers are; the embedding stays as it is.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from headway.base.errors import Unsupported
from headway.kernels.triton.quantized import QuantKind, matmul, quantize
from headway.models.decoder import Decoder
from headway.models.layers import DecoderLayer
from headway.models.weights.load import LoadProgress
from headway.models.weights.load_tensors import load_model

MATRICES = ("qkv", "out", "gate_up", "down")
HEAD: QuantKind = "int8"
WIDTHS = (160, 512, 1536)  # inputs of the matrices that are tested
NEAR = 0.01  # the relative error allowed in a test matmul
LEAST = {"int4": (8, 0), "int8": (8, 0), "fp8": (8, 9)}  # compute capability: tensor cores, and fp8


def load_cuda_quantized_model(
    path: Path, kind: QuantKind, *, dtype: torch.dtype, device: torch.device, progress: LoadProgress | None = None
) -> Decoder:
    """The quantized decoder of a file. Only one layer at a time is held in `dtype`."""
    _check(device, kind)
    change = partial(_layer, kind=kind)
    return _with_head(load_model(path, dtype=dtype, device=device, progress=progress, change=change))


def quantize_decoder(decoder: Decoder, kind: QuantKind) -> Decoder:
    """The decoder with its layers' matrices quantized, one layer after the other."""
    _check(decoder.device, kind)
    return _with_head(replace(decoder, layers=tuple(_layer(layer, kind) for layer in decoder.layers)))


def _with_head(decoder: Decoder) -> Decoder:
    output: Any = quantize(decoder.output, kind=HEAD)
    return replace(decoder, output=output)


def _layer(layer: DecoderLayer, kind: QuantKind) -> DecoderLayer:
    matrices: dict[str, Any] = {}
    for name in MATRICES:
        linear = getattr(layer, name)
        matrices[name] = quantize(linear.weight, linear.bias, kind=kind, gated=name == "gate_up")
    return replace(layer, **matrices)


def _check(device: torch.device, kind: QuantKind) -> None:
    if device.type != "cuda":
        return
    has = cast("tuple[int, int]", torch.cuda.get_device_capability(device))
    if has < LEAST[kind]:
        name = torch.cuda.get_device_name(device)
        raise Unsupported(
            f"{kind} needs a device of compute capability {'.'.join(map(str, LEAST[kind]))} and {name} has "
            f"{'.'.join(map(str, has))}; leave out quantize="
        )
    with torch.cuda.device(device):  # Triton launches on the current device, not the tensors'
        for used in dict.fromkeys((kind, HEAD)):
            _try(device, used)


def _try(device: torch.device, kind: QuantKind) -> None:
    """Test the matmul of small matrices of every shape: the kernels rely on how Triton maps words to threads."""
    generator = torch.Generator().manual_seed(0)
    for width, gated in itertools.product(WIDTHS, (False, True)):
        weight, x = (torch.randn(n, width, generator=generator).to(device) for n in (64, 20))
        w = quantize(weight, kind=kind, gated=gated)
        exact = x.half().float() @ w.weight.float().t()
        if gated:
            gate, up = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(gate) * up
        for rows in (1, 3, 20):
            y = torch.empty(rows, exact.shape[1], device=device)
            matmul(x[:rows].half(), w, y, alone=True)
            if not float((y - exact[:rows]).norm()) <= NEAR * float(exact[:rows].norm()):
                raise Unsupported(
                    f"the matmul of {kind} weights is wrong with this version of Triton on {device}; "
                    "use another version, or leave out quantize="
                )
