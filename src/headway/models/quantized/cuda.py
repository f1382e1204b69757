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
from headway.kernels.reference.quantized import e4m3_rows
from headway.kernels.triton import quantized
from headway.kernels.triton.fp8 import scaled_matmul, scaled_rows
from headway.kernels.triton.fp8.scaled_rows import ScaledRows
from headway.kernels.triton.launch import shared_memory
from headway.kernels.triton.quantized import BlockKind, QuantKind
from headway.models.decoder import Decoder
from headway.models.layers import DecoderLayer
from headway.models.weights.load import LoadProgress
from headway.models.weights.load_tensors import load_model

MATRICES = ("qkv", "out", "gate_up", "down")
HEAD: BlockKind = "int8"
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
    output: Any = quantized.quantize(decoder.output, kind=HEAD)
    return replace(decoder, output=output)


def quantize(weight: torch.Tensor, bias: torch.Tensor | None, *, kind: QuantKind, gated: bool = False) -> Any:
    """A matrix of a layer in this format."""
    if kind == "fp8":
        return scaled_matmul.quantize(weight, bias, gated=gated)
    return quantized.quantize(weight, bias, kind=kind, gated=gated)


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
        w = quantize(weight, None, kind=kind, gated=gated)
        rows = e4m3_rows(x) if kind == "fp8" else (x.half(), 1)
        exact = (rows[0].float() * rows[1]) @ w.weight.float().t()
        if gated:
            gate, up = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(gate) * up
        for count in (1, 3, 20):
            y = torch.empty(count, exact.shape[1], device=device)
            _multiply(x[:count], w, y)
            if not float((y - exact[:count]).norm()) <= NEAR * float(exact[:count].norm()):
                raise Unsupported(
                    f"the matmul of {kind} weights is wrong with this version of Triton on {device}; "
                    "use another version, or leave out quantize="
                )


def _multiply(x: torch.Tensor, w: Any, y: torch.Tensor) -> None:
    if w.kind != "fp8":
        quantized.matmul(x.half(), w, y, alone=True)
        return
    rows = ScaledRows.empty(len(x), x.shape[1], x.device)
    scaled_rows.quantize(x, rows)
    if len(x) == 1:
        scaled_matmul.matvec(rows, w, y)
    else:
        tile = scaled_matmul.pick_tile(len(x), w, shared_memory(x.device))
        scaled_matmul.matmul(rows, w, y, tile, sums=scaled_matmul.split_sums(x.device))
