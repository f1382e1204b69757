"""Quantized weights (`kernels.host.quantized`) as torch reads them, and activations as the matmul sees them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.host.quantized import FLOATS, FP4, GROUP, LANES, SMALLEST, QuantizedMatrix

SMALLEST_ROW = 1e-30  # a row in fp8 whose largest value is smaller counts as zero


def tensor(array: np.ndarray) -> Tensor:
    """An array as a tensor that shares its memory; uint16 is bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dequantize(w: QuantizedMatrix) -> Tensor:
    """The weights [n, k] in float32."""
    if w.kind in FLOATS:
        return tensor(w.quants).transpose(1, 2).reshape(-1, w.k)[: w.n].float()
    quants = stored_quants(w).float()  # [n, k]
    if w.kind == "int8":
        assert w.scales is not None
        return tensor(w.scales)[: w.n, None] * (quants - w.zero)
    scale, minimum = stored_scales(w)
    scale = scale.repeat_interleave(w.group, 1)[:, : w.k]
    if minimum is None:
        return scale * (quants - w.zero)
    return scale * quants + minimum.repeat_interleave(w.group, 1)[:, : w.k]


def dequantize_rows(w: QuantizedMatrix, rows: Tensor) -> Tensor:
    """These rows [T] of the weights → [T, k] in float32."""
    blocks = (rows // LANES).numpy()
    scales = w.scales
    if scales is not None:
        scales = scales.reshape(-1, LANES)[blocks].ravel() if w.kind == "int8" else scales[blocks]
    above = None if w.super is None else w.super[blocks]
    few = replace(w, n=LANES * len(rows), quants=w.quants[blocks], scales=scales, super=above, bias=None)
    return dequantize(few).view(len(rows), LANES, w.k)[torch.arange(len(rows)), rows % LANES]


def quantize_rows(x: Tensor, how: str | None) -> Tensor:
    """Rows as the matmul sees them: rounded to 8 bits by groups of 32 inputs, or unchanged."""
    if how is None:
        return x
    quants, scales = quantized(x)
    return (quants * scales).flatten(-2)[..., : x.shape[-1]]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit integers of x [R, K], as floats [R, G, 32], and their scales [R, G, 1]; K is padded to whole groups."""
    padded = x if x.shape[-1] % GROUP == 0 else F.pad(x, (0, -x.shape[-1] % GROUP))
    parts = padded.unflatten(-1, (-1, GROUP))
    most = parts.abs().amax(-1, keepdim=True)
    small, top = most < SMALLEST, torch.full_like(most, 127)  # number / tensor would compute number × reciprocal
    quants = torch.round(parts * torch.where(small, 0, top / torch.where(small, 1, most)))
    finite = most.isfinite()  # no 8-bit integer can represent an infinity: such a group is NaN
    return torch.where(finite, quants, 0), torch.where(finite, torch.where(small, 0, most / top), torch.nan)


def e4m3_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [R, K] in fp8: e4m3 numbers [R, K] and a scale for each row, [R, 1] float32; the largest number is 448.

    A row with a number that is not finite has the scale NaN.
    """
    most, top = x.float().abs().amax(-1, keepdim=True), torch.full_like(x[..., :1], 448, dtype=torch.float32)
    small = most < SMALLEST_ROW
    factors = torch.where(small, 0, top / torch.where(small, 1, most))
    scales = torch.where(most.isfinite(), torch.where(small, 0, most / top), torch.nan)
    return (x.float() * factors).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def stored_quants(w: QuantizedMatrix) -> Tensor:
    """The stored integers [n, k]."""
    blocks, groups = w.quants.shape[0], w.quants.shape[1]
    if w.bits == 8:
        parts = tensor(w.quants).view(blocks, groups, 8, LANES, 4)
        return parts.permute(0, 3, 1, 2, 4).reshape(blocks * LANES, -1)[: w.n, : w.k]
    both = tensor(w.quants).view(blocks, groups, 4, LANES, 4)
    parts = torch.stack([both & 15, both >> 4], dim=4)  # block, group, j, row, half, i
    parts = torch.tensor(FP4, dtype=torch.uint8)[parts.int()] if w.scale_kind == "e8" else parts
    return parts.permute(0, 3, 1, 2, 4, 5).reshape(blocks * LANES, -1)[: w.n, : w.k]


def stored_scales(w: QuantizedMatrix) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum [n, scale groups] in float32."""
    assert w.scales is not None
    if w.scale_kind == "k":
        assert w.super is not None
        factors = tensor(w.scales).float()  # [B, G, 2, 16]
        both = factors * tensor(w.super).float().repeat_interleave(8, 1)
        scale, minimum = both[:, :, 0], -both[:, :, 1]
    elif w.scale_kind == "e8":
        scale, minimum = torch.exp2(tensor(w.scales).double() - 128).float(), None
    elif w.has_min:
        scale, minimum = tensor(w.scales).float().unbind(2)
    else:
        scale, minimum = tensor(w.scales).float(), None

    def rows(t: Tensor) -> Tensor:  # [B, G, 16] → [n, G]
        return t.transpose(1, 2).reshape(-1, t.shape[1])[: w.n]

    return rows(scale), None if minimum is None else rows(minimum)
