"""Quantizing floats to GGUF blocks, in numpy: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, the float types, and K kinds by `encode_k`.

The former round as the format's reference does. `blocks` is the way back. It never writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from headway.base.errors import Unsupported
from headway.models.files.encode_k import K_KINDS, encode_k
from headway.models.files.gguf import KINDS

HALF_LIMIT = 65504.0  # the largest float16


def encode(kind: str, values: np.ndarray) -> bytes:
    """Float32 numbers [.., K] stored as `kind`; K must be a multiple of its block."""
    if kind == "F32":
        return np.ascontiguousarray(values, np.float32).tobytes()
    if kind == "BF16":
        return _bfloat16(values).tobytes()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if kind == "F16":
            halves = values.astype(np.float16)
            _check_halves(kind, halves, values)
            return halves.tobytes()
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, KINDS[kind].block)
        if kind in K_KINDS:
            _check_halves(kind, np.abs(blocks).max(1).astype(np.float16), values)
            return encode_k(kind, blocks).tobytes()
        return _ENCODERS[kind](blocks).tobytes()


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, ties to even; a NaN stays one."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), (words >> np.uint32(16)) | np.uint32(64), rounded).astype(np.uint16)


def _check_halves(kind: str, halves: np.ndarray, values: np.ndarray) -> None:
    if not np.isfinite(halves).all():
        largest = float(np.abs(values).max())
        raise Unsupported(
            f"the largest weight is {largest:g}, which {kind} cannot hold (float16, at most {HALF_LIMIT:g}); use BF16"
        )


def _scale_bytes(kind: str, scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Scales [B, 1] as the bytes of float16 [B, 2]."""
    halves = scale.astype(np.float16)
    _check_halves(kind, halves, values)
    return halves.view(np.uint8)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _extreme(values: np.ndarray) -> np.ndarray:
    """The number of largest magnitude of each block, with its sign, [B, 1]."""
    return np.take_along_axis(values, np.abs(values).argmax(1, keepdims=True), 1)


def _q8_0(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scale)
    whole = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))  # halves go away from zero
    return np.concatenate([_scale_bytes("Q8_0", scale, values), whole.astype(np.int8).view(np.uint8)], 1)


def _symmetric(kind: str, values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    middle = 1 << (bits - 1)
    scale = _extreme(values) / np.float32(-middle)
    quants = (values.astype(np.float64) * _inverse(scale) + (middle + 0.5)).astype(np.float32)
    return _scale_bytes(kind, scale, values), np.trunc(quants).clip(0, 2 * middle - 1).astype(np.uint8)


def _from_least(kind: str, values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    top, least = (1 << bits) - 1, values.min(1, keepdims=True)
    scale = (values.max(1, keepdims=True) - least) / np.float32(top)
    quants = np.trunc((values - least) * _inverse(scale) + np.float32(0.5)).clip(0, top).astype(np.uint8)
    return np.concatenate([_scale_bytes(kind, scale, values), _scale_bytes(kind, least, values)], 1), quants


def _nibbles(quants: np.ndarray) -> np.ndarray:
    """The low 4 bits of 32 numbers in 16 bytes: number i with number i + 16."""
    return (quants[:, :16] & 15) | ((quants[:, 16:] & 15) << 4)


def _fifth_bits(quants: np.ndarray) -> np.ndarray:
    """The fifth bit of 32 numbers, in 4 bytes."""
    return np.packbits(quants >> 4, axis=1, bitorder="little")


def _q4_0(values: np.ndarray) -> np.ndarray:
    scale, quants = _symmetric("Q4_0", values, 4)
    return np.concatenate([scale, _nibbles(quants)], 1)


def _q4_1(values: np.ndarray) -> np.ndarray:
    scale, quants = _from_least("Q4_1", values, 4)
    return np.concatenate([scale, _nibbles(quants)], 1)


def _q5_0(values: np.ndarray) -> np.ndarray:
    scale, quants = _symmetric("Q5_0", values, 5)
    return np.concatenate([scale, _fifth_bits(quants), _nibbles(quants)], 1)


def _q5_1(values: np.ndarray) -> np.ndarray:
    scale, quants = _from_least("Q5_1", values, 5)
    return np.concatenate([scale, _fifth_bits(quants), _nibbles(quants)], 1)


_ENCODERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1}
)
ENCODABLE = ("F32", "F16", "BF16", *_ENCODERS)
