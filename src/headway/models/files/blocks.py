"""Dequantizing GGUF blocks to floats, in numpy, a chunk at a time; and stored floats as arrays.

Owns the block layouts. Every kind decodes to exactly the float32 values of the format's reference, multiplying and
adding in the same order. `dequant` does the same for tensors, which may be on another device. It never reads files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from headway.base.arrays import STORED, empty, widen
from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.kernels.host.quantized import FP4
from headway.models.files.codebooks import CODEBOOK_KINDS, integers_and_scales
from headway.models.files.gguf import KINDS

# What the 4 bits of IQ4_NL and IQ4_XS stand for.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
CHUNK_VALUES = 1 << 18  # values decoded at once: the temporaries of a chunk stay within a few MiB
FLOATS: Mapping[str, str] = MappingProxyType({"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"})


@dataclass(frozen=True, eq=False)
class QuantizedParts:
    """The parts of a quantized matrix: quants [N, K], scale and minimum [N, K / group]."""

    quants: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None
    bits: int
    group: int
    zero: int = 0


def stored_floats(kind: str, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Stored floats as they are, from their bytes, copied only if they are not aligned; bfloat16 as uint16."""
    dtype = STORED[FLOATS[kind]]
    return (raw if raw.ctypes.data % dtype.itemsize == 0 else raw.copy()).view(dtype).reshape(shape)


def dequantize(kind: str, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The float32 numbers of a tensor of any kind, from its bytes. One too large for float32 raises `Unsupported`."""
    if kind in FLOATS:
        return _to_float32(stored_floats(kind, raw, shape))
    block_format, out = KINDS[kind], empty(shape)
    step, flat = CHUNK_VALUES // block_format.block, out.reshape(-1, block_format.block)
    blocks = raw.reshape(-1, block_format.nbytes)
    for start in range(0, len(blocks), step):
        flat[start : start + step] = decode_blocks(kind, blocks[start : start + step])
    return out


def decode_blocks(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The float32 numbers of whole blocks: uint8 `[B, nbytes]` as `[B, block]`."""
    if kind in CODEBOOK_KINDS:
        values, scale = integers_and_scales(kind, blocks)
        return _by_group(_floats(values), scale)
    return _DECODERS[kind](blocks)


def _to_float32(values: np.ndarray) -> np.ndarray:
    if values.dtype != np.float64:
        return widen(values)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    lost = np.isinf(narrow) & np.isfinite(values)
    if lost.any():
        largest = np.finfo(np.float32).max
        raise Unsupported(f"the value {values[lost][0]:g} does not fit float32 (largest {largest:g})")
    return narrow


# Each decoder takes blocks, uint8 [B, nbytes], and returns float32 [B, block].


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return (_floats(planes(blocks[:, 2:], group=16, bits=4)) - 8) * half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _floats(planes(blocks[:, 4:], group=16, bits=4)) * half(blocks, 0) + half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    low, high = planes(blocks[:, 6:], group=16, bits=4), planes(blocks[:, 2:6], group=1, bits=1)
    return (_floats(low | (high << 4)) - 16) * half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    low, high = planes(blocks[:, 8:], group=16, bits=4), planes(blocks[:, 4:8], group=1, bits=1)
    return _floats(low | (high << 4)) * half(blocks, 0) + half(blocks, 2)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    doubled = np.array(FP4, np.float32) - FP4[0]  # floats of 4 bits, of which the scale takes half
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return doubled[planes(blocks[:, 1:], group=16, bits=4)] * scale


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales = blocks[:, :16]
    scale = _floats(scales & 15) * half(blocks, 80)  # [B, 16]
    least = _floats(scales >> 4) * half(blocks, 82)
    return _by_group(_floats(planes(blocks[:, 16:80], group=32, bits=2)), scale, least)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low, high = planes(blocks[:, 32:96], group=32, bits=2), planes(blocks[:, :32], group=32, bits=1)
    # Scales have 6 bits: 16 low nibbles in 8 bytes, then 16 high pairs in 4.
    nibbles, pairs = planes(blocks[:, 96:104], group=8, bits=4), planes(blocks[:, 104:108], group=4, bits=2)
    scale = (_floats(nibbles | (pairs << 4)) - 32) * half(blocks, 108)  # [B, 16]
    # A set high bit means "subtract nothing", so the value is low + 4·high − 4.
    return _by_group(_floats(low | (high << 2)) - 4, scale)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scale, least = scales_and_mins(blocks)
    return _by_group(_floats(planes(blocks[:, 16:], group=32, bits=4)), scale, least)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scale, least = scales_and_mins(blocks)
    low, high = planes(blocks[:, 48:], group=32, bits=4), planes(blocks[:, 16:48], group=32, bits=1)
    return _by_group(_floats(low | (high << 4)), scale, least)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low, high = planes(blocks[:, :128], group=64, bits=4), planes(blocks[:, 128:192], group=32, bits=2)
    scale = blocks[:, 192:208].view(np.int8).astype(np.float32) * half(blocks, 208)  # [B, 16]
    return _by_group(_floats(low | (high << 4)) - 32, scale)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _floats(IQ4_VALUES[planes(blocks[:, 2:], group=16, bits=4)]) * half(blocks, 0)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    return _by_group(_floats(IQ4_VALUES[planes(blocks[:, 8:], group=16, bits=4)]), iq4_xs_scales(blocks))


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    return (_floats(ternary_digits(blocks)) - 1) * half(blocks, 52)


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    return (_floats(planes(blocks[:, :64], group=32, bits=2)) - 1) * half(blocks, 64)


_DECODERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {
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
)


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, as float32 `[B, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def planes(raw: np.ndarray, *, group: int, bits: int) -> np.ndarray:
    """Unpack `[B, N]` bytes to `[B, N·8/bits]` numbers: of every `group` bytes the lowest bits first, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    spread = raw.reshape(len(raw), -1, 1, group) >> shifts
    return (spread & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)


def iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    """The 8 scales of IQ4_XS, float32 `[B, 8]`: 6 bits each, the upper two in bytes 2 and 3, the lower in 4 to 7."""
    low, high = planes(blocks[:, 4:8], group=1, bits=4), planes(blocks[:, 2:4], group=1, bits=2)
    return (_floats(low | (high << 4)) - 32) * half(blocks, 0)


def ternary_digits(blocks: np.ndarray) -> np.ndarray:
    """The numbers 0, 1 and 2 of TQ1_0, `[B, 256]`: a byte is a fraction of 5 digits to the base 3, the last 4 of 4."""
    digits = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = 3 ** np.arange(count, dtype=np.uint8)
        shifted = blocks[:, None, start:stop] * powers[:, None]  # modulo 256: what is before the digit goes
        digits.append(((shifted.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(digits, 1)


def _floats(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _by_group(values: np.ndarray, scale: np.ndarray, least: np.ndarray | None = None) -> np.ndarray:
    """`values·scale − least`, float32 `[B, 256]`, where each of the G scales of a block holds for 256/G values."""
    grouped = values.reshape(*scale.shape, -1) * scale[..., None]  # [B, G, 256/G]
    if least is not None:
        grouped = grouped - least[..., None]
    return grouped.reshape(values.shape)


def scales_and_mins(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima of Q4_K and Q5_K, float32 `[B, 8]` each.

    Their 6 bits are in bytes 4 to 15: numbers 0–3 in the low 6 bits of the first eight bytes, numbers 4–7 as a nibble
    in the last four, with their two top bits on top of numbers 0–3.
    """
    scale, least, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([scale & 63, (rest & 15) | ((scale >> 2) & 48)], 1)
    mins = np.concatenate([least & 63, (rest >> 4) | ((least >> 2) & 48)], 1)
    return _floats(scales) * half(blocks, 0), _floats(mins) * half(blocks, 2)
