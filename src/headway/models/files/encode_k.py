"""Quantizing floats to the K kinds of GGUF files, in numpy: Q2_K to Q6_K.

A block has 256 numbers in groups of 16 or 32. The scale of a group (and its minimum, where the kind has one) is
searched: several step sizes are tried, each improved by least squares, and the one with the smallest weighted error is
kept. Scales are then rounded to what the block can hold, and the numbers are rounded anew. It never writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

STEPS = tuple(np.linspace(-1.2, 1.2, 9, dtype=np.float32))  # how much more or less than the whole range is tried
BLOCKS = 512  # blocks at a time, so that the temporaries of a search stay in the processor's cache


def encode_k(kind: str, values: np.ndarray) -> np.ndarray:
    """Blocks [B, 256] of float32, at most what float16 holds, as uint8 [B, bytes]."""
    parts = [_KINDS[kind](values[at : at + BLOCKS]) for at in range(0, len(values), BLOCKS)]
    return np.concatenate(parts)


def _q2_k(values: np.ndarray) -> np.ndarray:
    quants, scales, mins, halves = _with_minimum(values, groups=16, top=3, most=15)
    return np.concatenate([scales | (mins << 4), pack(quants, group=32, bits=2), halves.view(np.uint8)], 1)


def _q3_k(values: np.ndarray) -> np.ndarray:
    quants, scales, half = _symmetric(values, middle=4, most=32)
    unsigned = (scales + 32).astype(np.uint8)
    packed = [pack(unsigned & 15, group=8, bits=4), pack(unsigned >> 4, group=4, bits=2)]
    high, low = pack(quants >> 2, group=32, bits=1), pack(quants & 3, group=32, bits=2)
    return np.concatenate([high, low, *packed, half.view(np.uint8)], 1)


def _q4_k(values: np.ndarray) -> np.ndarray:
    quants, scales, mins, halves = _with_minimum(values, groups=8, top=15, most=63)
    return np.concatenate([halves.view(np.uint8), _six_bits(scales, mins), pack(quants, group=32, bits=4)], 1)


def _q5_k(values: np.ndarray) -> np.ndarray:
    quants, scales, mins, halves = _with_minimum(values, groups=8, top=31, most=63)
    high, low = pack(quants >> 4, group=32, bits=1), pack(quants & 15, group=32, bits=4)
    return np.concatenate([halves.view(np.uint8), _six_bits(scales, mins), high, low], 1)


def _q6_k(values: np.ndarray) -> np.ndarray:
    quants, scales, half = _symmetric(values, middle=32, most=128)
    high, low = pack(quants >> 4, group=32, bits=2), pack(quants & 15, group=64, bits=4)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), half.view(np.uint8)], 1)


_KINDS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
)
K_KINDS = tuple(_KINDS)


def pack(numbers: np.ndarray, *, group: int, bits: int) -> np.ndarray:
    """Numbers [B, N] of a few bits in bytes: of every `group` bytes the lowest bits first, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    spread = numbers.astype(np.uint8).reshape(len(numbers), -1, 8 // bits, group) << shifts
    return np.bitwise_or.reduce(spread, axis=2).reshape(len(numbers), -1)


def _six_bits(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """8 scales and 8 minima of 6 bits in 12 bytes, as Q4_K and Q5_K have them."""
    first = [x[:, :4] | ((x[:, 4:] >> 4) << 6) for x in (scales, mins)]
    return np.concatenate([*first, (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)], 1)


def _with_minimum(
    values: np.ndarray, *, groups: int, top: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quants from 0 to `top`, scales and minima from 0 to `most`, and the float16s that both are multiplied with."""
    x = values.reshape(len(values), groups, -1)
    scale, least = _search_minimum(x, top)
    whole, wholes = _rounded_scales(scale, most), _rounded_scales(least, most)
    halves = np.concatenate([whole[0], wholes[0]], 1)
    wide = halves.astype(np.float32)
    step, shift = wide[:, :1] * whole[1], wide[:, 1:] * wholes[1]  # [B, G]
    quants = np.rint((x + shift[..., None]) * _inverse(step)[..., None]).clip(0, top)
    return quants.astype(np.uint8).reshape(len(values), -1), whole[1], wholes[1], halves


def _search_minimum(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale and how far the minimum is below zero for each group, [B, G]."""
    weight = np.abs(x) + np.sqrt(np.square(x).mean(2, keepdims=True))
    low = np.minimum(x.min(2, keepdims=True), 0)
    span = x.max(2, keepdims=True) - low
    scales, least = (span / top)[..., 0], -low[..., 0]
    best = np.full(scales.shape, np.inf, np.float32)
    total, sum_x = weight.sum(2), (weight * x).sum(2)
    for more in STEPS:
        quants = np.rint((x - low) * ((top + more) * _inverse(span))).clip(0, top)
        weighted = weight * quants
        sum_q, sum_qq, sum_qx = weighted.sum(2), (weighted * quants).sum(2), (weighted * x).sum(2)
        determinant = total * sum_qq - sum_q * sum_q
        solvable = determinant > 0
        inverse = _inverse(np.where(solvable, determinant, 0))
        scale = (total * sum_qx - sum_x * sum_q) * inverse
        below = (sum_x * sum_qq - sum_q * sum_qx) * -inverse
        scale = np.where(below < 0, sum_qx * _inverse(sum_qq), scale)  # a minimum is never above zero
        below = np.maximum(below, 0)
        error = (weight * np.square(scale[..., None] * quants - below[..., None] - x)).sum(2)
        better = solvable & (error < best) & (scale > 0)
        best, scales, least = (np.where(better, a, b) for a, b in ((error, best), (scale, scales), (below, least)))
    return scales, least


def _rounded_scales(scale: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales [B, G] as integers of at most `most`, and the float16 for them."""
    half = (scale.max(1, keepdims=True) / most).astype(np.float16)
    whole = np.rint(scale * _inverse(half.astype(np.float32))).clip(0, most)
    return half, whole.astype(np.uint8)


def _symmetric(values: np.ndarray, *, middle: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quants from 0 to 2 `middle` − 1 about the middle, scales of 16 numbers from −`most`, and their float16."""
    x = values.reshape(len(values), 16, 16)
    scale = _search_scale(x, middle)
    extreme = np.take_along_axis(scale, np.abs(scale).argmax(1, keepdims=True), 1)  # it becomes −most
    half = (extreme / -most).astype(np.float16)
    whole = np.rint(scale * _inverse(half.astype(np.float32))).clip(-most, most - 1)
    step = half.astype(np.float32) * whole
    quants = np.rint(x * _inverse(step)[..., None]).clip(-middle, middle - 1) + middle
    return quants.astype(np.uint8).reshape(len(values), -1), whole, half


def _search_scale(x: np.ndarray, middle: int) -> np.ndarray:
    """The scale of each group, [B, G]: negative where its largest number is positive."""
    weight = np.square(x) + np.float32(1e-30)
    extreme = np.take_along_axis(x, np.abs(x).argmax(2, keepdims=True), 2)
    scales = extreme[..., 0] / -middle
    best = np.full(scales.shape, -np.inf, np.float32)
    for more in STEPS:
        quants = np.rint(x * (-(middle + more) * _inverse(extreme))).clip(-middle, middle - 1)
        weighted = weight * quants
        both, own = (weighted * x).sum(2), (weighted * quants).sum(2)
        gain = both * both * _inverse(own)  # what least squares takes off the error
        better = (own > 0) & (gain > best)
        best, scales = np.where(better, gain, best), np.where(better, both * _inverse(own), scales)
    return scales


def _inverse(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.where(values == 0, np.float32(0), np.float32(1) / values)
