"""A file's matrices as `QuantizedMatrix`: GGUF blocks repacked, floats as they are or quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from headway.base.arrays import aligned, empty, widen
from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.kernels.host.quantized import (
    FP4,
    LANES,
    QuantizedMatrix,
    interleave_floats,
    interleave_groups,
    interleave_int8,
    quantize_int4,
    quantize_int8,
)
from headway.kernels.native.library import ThreadPool, check
from headway.models.files.blocks import (
    FLOATS,
    IQ4_VALUES,
    QuantizedParts,
    half,
    iq4_xs_scales,
    planes,
    scales_and_mins,
    ternary_digits,
)
from headway.models.files.codebooks import CODEBOOK_KINDS, integers_and_scales
from headway.models.files.gguf import KINDS
from headway.models.files.mxfp4_folder import Mxfp4Folder
from headway.models.files.quantized_folder import QuantizedFolder
from headway.models.files.weights import GgufWeights, Weights

QUANTIZE = ("int8", "int4", "fp8")  # fp8 on CUDA devices only
NATIVE = ("Q4_0", "Q4_1", "Q8_0", "Q4_K")  # kinds that the native library repacks, by its number


def check_quantize(quantize: str | None) -> str | None:
    """None, int8, int4 or fp8."""
    if quantize is not None and not (isinstance(quantize, str) and quantize in QUANTIZE):
        raise InvalidInput(
            f"quantize is {short_repr(quantize)}; it must be {', '.join(QUANTIZE[:-1])} or {QUANTIZE[-1]}, or left out"
        )
    return quantize


def load_matrix(
    weights: Weights,
    name: str,
    *,
    thread_pool: ThreadPool | None,
    keep: bool,
    quantize: str | None = None,
    rows: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> QuantizedMatrix:
    """A matrix of the file in the interleaved layout; experts are one matrix. `rows` maps outputs to the file's rows.

    `keep` leaves it in its stored type, else it becomes float32; `quantize` applies to float matrices. Without a thread
    pool numpy repacks, to the same values.
    """
    kind = weights.stored(name)
    if keep and kind not in FLOATS and isinstance(weights, GgufWeights):
        return _with_bias(_repack(weights, name, kind, thread_pool, rows), bias)
    if keep and isinstance(weights, QuantizedFolder) and (parts := weights.parts(name)) is not None:
        return parts_matrix([parts], rows, bias)
    dtype = FLOATS[kind] if keep and kind in ("F16", "BF16") and quantize is None else "float32"
    weight = weights.array(name, dtype)
    weight = weight.reshape(-1, weight.shape[-1])
    return float_matrix(weight if rows is None else weight[rows], quantize, bias)


def parts_matrix(
    parts: Sequence[QuantizedParts], rows: np.ndarray | None = None, bias: np.ndarray | None = None
) -> QuantizedMatrix:
    """Quantized matrices of one format, one after the other, in the interleaved layout; `rows` is their order."""
    order, first = slice(None) if rows is None else rows, parts[0]
    if first.group == 0:
        quants, scales = (np.concatenate(each)[order] for each in ([p.quants for p in parts], [p.scale for p in parts]))
        return interleave_int8((quants ^ 128).view(np.int8), scales[:, 0], bias)
    minima = [part.minimum for part in parts if part.minimum is not None]
    return interleave_groups(
        np.concatenate([part.quants for part in parts])[order],
        np.concatenate([part.scale for part in parts])[order],
        np.concatenate(minima)[order] if minima else None,
        bits=first.bits,
        group=first.group,
        zero=first.zero,
        bias=bias,
    )


def float_matrix(weight: np.ndarray, quantize: str | None, bias: np.ndarray | None = None) -> QuantizedMatrix:
    """Floats [N, K] in the interleaved layout, as they are or quantized."""
    if quantize is not None:
        return (quantize_int8 if quantize == "int8" else quantize_int4)(weight, bias)
    return interleave_floats(weight, bias)


# For each stored type: the format it is kept in, and the bytes of 32 inputs of one row.
_KEPT = {
    "Q4_0": ("int4 in groups of 32", 18.0),
    "Q4_1": ("int4 in groups of 32", 20.0),
    "Q8_0": ("int8 in groups of 32", 34.0),
    "Q4_K": ("int4 in groups of 32", 18.5),
    "Q5_0": ("int8 in groups of 32", 34.0),
    "Q5_1": ("int8 in groups of 32", 36.0),
    "Q2_K": ("int4 in groups of 16", 32.0),
    "Q3_K": ("int4 in groups of 16", 24.0),
    "Q5_K": ("int8 in groups of 32", 40.0),
    "Q6_K": ("int8 in groups of 16", 40.0),
    "MXFP4": ("fp4 in groups of 32", 17.0),
    "IQ4_NL": ("int8 in groups of 32", 34.0),
    "IQ4_XS": ("int8 in groups of 16", 40.0),
    "TQ1_0": ("int4 in groups of 256", 16.25),
    "TQ2_0": ("int4 in groups of 256", 16.25),
    **dict.fromkeys(CODEBOOK_KINDS, ("int8 in groups of 16", 40.0)),
}


def kept_size(kind: str, shape: Sequence[int]) -> tuple[str, int]:
    """The format and the bytes of a stored tensor as `load_matrix` with `keep` would hold it."""
    if len(shape) < 2:
        return "f32", 4 * prod(shape)
    *experts, n, k = shape
    if experts and n == 1:  # a convolution
        return "f32", 4 * prod(shape)
    n = prod(experts) * (-(-n // LANES) * LANES)
    if kind in _KEPT:
        label, size = _KEPT[kind]
        return label, int(n * (k // 32) * size)
    return ("f16" if kind == "F16" else "bf16", 2 * n * k) if kind in ("F16", "BF16") else ("f32", 4 * n * k)


def kept_weight(weights: Weights, name: str) -> tuple[str, int]:
    """The format and the bytes of a weight as `load_matrix` with `keep` would hold it."""
    shape = weights.shape(name)
    if isinstance(weights, Mxfp4Folder) and weights.is_quantized(name):
        count, k, n = shape
        return kept_size(weights.stored(name), (count, n, k))
    if not isinstance(weights, QuantizedFolder) or not weights.is_quantized(name):
        return kept_size(weights.stored(name), shape)
    if not weights.keeps(name):
        return kept_size("F32", shape)
    n, k = -(-shape[0] // LANES) * LANES, shape[1]
    bits, group, scale = weights.kept_format(name)
    if group == 0:
        return "int8", n * (k + scale)
    return f"int{bits} in groups of {group}", n * (k * bits // 8 + -(-k // group) * scale)


def _repack(
    weights: GgufWeights, name: str, kind: str, thread_pool: ThreadPool | None, rows: np.ndarray | None
) -> QuantizedMatrix:
    *outer, k = weights.shape(name)
    n, raw = prod(outer), weights.file.raw(name)
    if kind in NATIVE and thread_pool is not None:
        return _native(thread_pool, kind, raw, (n if rows is None else len(rows), k), rows)
    blocks = raw.reshape(-1, KINDS[kind].nbytes)
    parts = _from_codebook(kind, blocks) if kind in CODEBOOK_KINDS else _PARTS[kind](blocks)
    order = slice(None) if rows is None else rows
    return interleave_groups(
        parts.quants.reshape(n, k)[order],
        parts.scale.reshape(n, -1)[order],
        None if parts.minimum is None else parts.minimum.reshape(n, -1)[order],
        bits=parts.bits,
        group=parts.group,
        zero=parts.zero,
    )


def _native(
    thread_pool: ThreadPool, kind: str, raw: np.ndarray, shape: tuple[int, ...], rows: np.ndarray | None
) -> QuantizedMatrix:
    n, k = shape
    bits, blocks, groups = 8 if kind == "Q8_0" else 4, -(-n // LANES), k // 32
    quants = empty((blocks, groups, bits * 64), np.uint8)
    has_min, is_k = kind in ("Q4_1", "Q4_K"), kind == "Q4_K"
    shape = (blocks, groups, 2, LANES) if has_min else (blocks, groups, LANES)
    scales = empty(shape, np.uint8 if is_k else np.float16)
    above = empty((blocks, groups // 8, 2, LANES), np.float16) if is_k else None
    order = None if rows is None else np.ascontiguousarray(rows, np.int32)
    check(
        thread_pool.calls.hw_repack(
            thread_pool.handle,
            NATIVE.index(kind),
            raw.ctypes.data,
            n,
            k,
            None if order is None else order.ctypes.data,
            quants.ctypes.data,
            scales.ctypes.data,
            None if above is None else above.ctypes.data,
        )
    )
    zero = {"Q4_0": 8, "Q8_0": 128}.get(kind, 0)
    how = "k" if is_k else "f16"
    return QuantizedMatrix(
        "groups", n, k, quants, scales, above, bits=bits, group=32, zero=zero, has_min=has_min, scale_kind=how
    )


def _with_bias(w: QuantizedMatrix, bias: np.ndarray | None) -> QuantizedMatrix:
    return w if bias is None else replace(w, bias=aligned(widen(bias)))


# Each takes blocks, uint8 [B, nbytes], and returns their quants and scales, in file order.


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _q8_0(blocks: np.ndarray) -> QuantizedParts:
    return QuantizedParts(blocks[:, 2:] ^ 128, _half(blocks, 0), None, bits=8, group=32, zero=128)


def _q4_0(blocks: np.ndarray) -> QuantizedParts:
    quants = planes(blocks[:, 2:], group=16, bits=4)
    return QuantizedParts(quants, _half(blocks, 0), None, bits=4, group=32, zero=8)


def _q4_1(blocks: np.ndarray) -> QuantizedParts:
    quants = planes(blocks[:, 4:], group=16, bits=4)
    return QuantizedParts(quants, _half(blocks, 0), _half(blocks, 2), bits=4, group=32)


def _q4_k(blocks: np.ndarray) -> QuantizedParts:
    scale, minimum = scales_and_mins(blocks)
    return QuantizedParts(planes(blocks[:, 16:], group=32, bits=4), scale, -minimum, bits=4, group=32)


def _q5_0(blocks: np.ndarray) -> QuantizedParts:
    quants = planes(blocks[:, 6:], group=16, bits=4) | (planes(blocks[:, 2:6], group=1, bits=1) << 4)
    return QuantizedParts(quants, _half(blocks, 0), None, bits=8, group=32, zero=16)


def _q5_1(blocks: np.ndarray) -> QuantizedParts:
    quants = planes(blocks[:, 8:], group=16, bits=4) | (planes(blocks[:, 4:8], group=1, bits=1) << 4)
    return QuantizedParts(quants, _half(blocks, 0), _half(blocks, 2), bits=8, group=32)


def _q2_k(blocks: np.ndarray) -> QuantizedParts:
    scales = blocks[:, :16]
    scale = (scales & 15).astype(np.float32) * half(blocks, 80)
    minimum = (scales >> 4).astype(np.float32) * half(blocks, 82)
    return QuantizedParts(planes(blocks[:, 16:80], group=32, bits=2), scale, -minimum, bits=4, group=16)


def _q3_k(blocks: np.ndarray) -> QuantizedParts:
    low, high = planes(blocks[:, 32:96], group=32, bits=2), planes(blocks[:, :32], group=32, bits=1)
    nibbles, pairs = planes(blocks[:, 96:104], group=8, bits=4), planes(blocks[:, 104:108], group=4, bits=2)
    scale = ((nibbles | (pairs << 4)).astype(np.float32) - 32) * half(blocks, 108)
    return QuantizedParts(low | (high << 2), scale, None, bits=4, group=16, zero=4)


def _q5_k(blocks: np.ndarray) -> QuantizedParts:
    scale, minimum = scales_and_mins(blocks)
    quants = planes(blocks[:, 48:], group=32, bits=4) | (planes(blocks[:, 16:48], group=32, bits=1) << 4)
    return QuantizedParts(quants, scale, -minimum, bits=8, group=32)


def _q6_k(blocks: np.ndarray) -> QuantizedParts:
    quants = planes(blocks[:, :128], group=64, bits=4) | (planes(blocks[:, 128:192], group=32, bits=2) << 4)
    scale = blocks[:, 192:208].view(np.int8).astype(np.float32) * half(blocks, 208)
    return QuantizedParts(quants, scale, None, bits=8, group=16, zero=32)


def _mxfp4(blocks: np.ndarray) -> QuantizedParts:
    quants = planes(blocks[:, 1:], group=16, bits=4)
    return QuantizedParts(quants, blocks[:, :1], None, bits=4, group=32, zero=FP4[0])


def _iq4(quants: np.ndarray) -> np.ndarray:
    return IQ4_VALUES[quants].view(np.uint8) ^ 128


def _iq4_nl(blocks: np.ndarray) -> QuantizedParts:
    quants = _iq4(planes(blocks[:, 2:], group=16, bits=4))
    return QuantizedParts(quants, _half(blocks, 0), None, bits=8, group=32, zero=128)


def _iq4_xs(blocks: np.ndarray) -> QuantizedParts:
    quants = _iq4(planes(blocks[:, 8:], group=16, bits=4))
    return QuantizedParts(quants, np.repeat(iq4_xs_scales(blocks), 2, 1), None, bits=8, group=16, zero=128)


def _tq1_0(blocks: np.ndarray) -> QuantizedParts:
    return QuantizedParts(ternary_digits(blocks), _half(blocks, 52), None, bits=4, group=256, zero=1)


def _tq2_0(blocks: np.ndarray) -> QuantizedParts:
    quants = planes(blocks[:, :64], group=32, bits=2)
    return QuantizedParts(quants, _half(blocks, 64), None, bits=4, group=256, zero=1)


def _from_codebook(kind: str, blocks: np.ndarray) -> QuantizedParts:
    values, scale = integers_and_scales(kind, blocks)
    scale = np.repeat(scale, values.shape[1] // scale.shape[1] // LANES, 1)  # one for 16 values, where it holds for 32
    return QuantizedParts(values.view(np.uint8) ^ 128, scale, None, bits=8, group=LANES, zero=128)


_PARTS: dict[str, Callable[[np.ndarray], QuantizedParts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
