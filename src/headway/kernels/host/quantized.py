"""Quantized weights for the CPU, with 16 output rows interleaved, and what a format means for activations.

A format also fixes how activations are quantized and in which order products are summed, whatever computes:

    f32, f16, bf16  activations as they are; one multiply-add per input, first to last
    int8            each 32 inputs to int8 with their scale, largest magnitude / 127; group after group the exact
                    integer sum times that scale is added; the total is multiplied by the scale of the weights' row
    groups          each 32 inputs likewise; group after group, of 32 inputs or of 16, the exact integer sum times both
                    scales is added, and then the minimum times the sum of the inputs

An 8-bit value is x × (127 / largest), rounded half to even; inputs past the last are zeros; a group whose largest
magnitude is below SMALLEST is zero, and one with a value that is not finite is NaN. `reference/ordered_matmul` computes
the product, to the bit as native code does; `reference/quantized` gives the weights back. native/api.h describes the
memory layout.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.base.arrays import aligned, float_name, widen
from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported, WrongType

LANES = 16
GROUP = 32
SMALLEST = 1e-36  # a group whose largest value is smaller counts as zero
HALF_LIMIT = 65504.0  # the largest float16
FLOATS = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}
KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SCALES = {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "k": np.dtype(np.uint8), "e8": np.dtype(np.uint8)}
FP4 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # of 4-bit floats (E2M1): twice the value, plus 12


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A weight matrix [n, k]. `kind` is f32, f16, bf16, int8 or groups; the fields after `quants` are for the last two.

    `quants` are the stored integers, or the floats of a float kind (bfloat16 as uint16). A weight is
    scale × (quant - zero), or scale × quant + minimum. `scale_kind` is f16, f32, k or e8; for k, scale and minimum are
    bytes times the float16s in `super`, one pair for 256 inputs. For e8 a scale is 2^(byte - 128), and quants are
    floats of 4 bits (MXFP4): numbers of the table `FP4`.
    """

    kind: str
    n: int
    k: int
    quants: np.ndarray
    scales: np.ndarray | None = None
    super: np.ndarray | None = None
    bits: int = 8
    group: int = 0
    zero: int = 0
    has_min: bool = False
    scale_kind: str = "f32"
    bias: np.ndarray | None = None

    def arrays(self) -> list[np.ndarray]:
        """What it holds, in a fixed order."""
        return [t for t in (self.quants, self.scales, self.super, self.bias) if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.arrays())

    def expert(self, i: int, n: int) -> QuantizedMatrix:
        """The matrix [n, k] of one expert, of those that this one has one after the other."""
        blocks = -(-n // LANES)
        own = slice(i * blocks, (i + 1) * blocks)
        scales, bias = self.scales, self.bias
        if scales is not None:
            scales = scales.reshape(-1, LANES)[own].ravel() if self.kind == "int8" else scales[own]
        above = None if self.super is None else self.super[own]
        if bias is not None:
            bias = bias[i * blocks * LANES :][:n]
        return replace(self, n=n, quants=self.quants[own], scales=scales, super=above, bias=bias)

    @property
    def padded_n(self) -> int:
        """The number of outputs, padded to whole blocks."""
        return -(-self.n // LANES) * LANES

    @property
    def row_quantization(self) -> str | None:
        """How activations are quantized before the matmul: by `groups`, or None."""
        return None if self.kind in FLOATS else "groups"

    def problem(self) -> str | None:
        """Why its arrays do not match its size and format, or None. Native code reads them as described."""
        if self.kind == "groups" and (problem := self._group_problem()):
            return problem
        for name, (shape, dtype) in self._needed().items():
            array: np.ndarray | None = getattr(self, name)
            if array is None:
                if name != "bias":
                    return f"{name} are missing"
                continue
            if not isinstance(array, np.ndarray):
                return f"{name} are {type(array).__name__}; an array of numpy is needed"
            if array.shape != shape or array.dtype != dtype:
                return f"{name} are {list(array.shape)} of {array.dtype}; {list(shape)} of {dtype} are needed"
            if not array.flags.c_contiguous:
                return f"{name} must be contiguous"
        return None

    def _group_problem(self) -> str | None:
        if self.bits not in (4, 8) or self.scale_kind not in SCALES:
            return f"{self.bits} bits with {self.scale_kind} scales are not supported"
        if self.group != LANES and (self.group < GROUP or self.group & (self.group - 1)):
            return f"its groups have {self.group} inputs; use 16, 32, 64, …"
        if self.scale_kind == "k" and (self.k % 256 or self.group != GROUP or not self.has_min):
            return f"k scales are for groups of 32 with a minimum, in rows of a multiple of 256 inputs, not {self.k}"
        if self.scale_kind == "e8" and (self.bits, self.group, self.zero, self.has_min) != (4, GROUP, FP4[0], False):
            return f"e8 scales are for floats of 4 bits in groups of 32 with zero at {FP4[0]}"
        return None

    def _needed(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each array of this format."""
        blocks, groups = -(-self.n // LANES), -(-self.k // GROUP)
        bias = (self.n,), np.dtype(np.float32)
        if self.kind in FLOATS:
            quants = (blocks, self.k, LANES), FLOATS[self.kind]
            return {"quants": quants, "bias": bias}
        quants = (blocks, groups, (8 if self.kind == "int8" else self.bits) * 64), np.dtype(np.uint8)
        if self.kind == "int8":
            return {"quants": quants, "scales": ((blocks * LANES,), np.dtype(np.float32)), "bias": bias}
        held = 2 * groups if self.group == LANES else -(-self.k // self.group)
        scales = (blocks, held, *((2, LANES) if self.has_min else (LANES,))), SCALES[self.scale_kind]
        halves = (blocks, groups // 8, 2, LANES), np.dtype(np.float16)
        above = {"super": halves} if self.scale_kind == "k" else {}
        return {"quants": quants, "scales": scales, **above, "bias": bias}

    @property
    def label(self) -> str:
        """The format in a word."""
        if self.kind != "groups":
            return self.kind
        return f"{'fp' if self.scale_kind == 'e8' else 'int'}{self.bits} in groups of {self.group}"


# -- quantizing and interleaving -----------------------------------------------------------------------------------


def interleave_floats(weight: np.ndarray, bias: np.ndarray | None = None) -> QuantizedMatrix:
    """A matrix [N, K] of float32, float16 or bfloat16 (as uint16) in the interleaved layout, its values unchanged."""
    n, k = weight.shape
    kind = KINDS.get(float_name(weight) or "")
    if kind is None:
        raise WrongType(f"the matrix is {weight.dtype}; it must be float32, float16 or bfloat16")
    blocks = _pad(weight, 0, LANES).reshape(-1, LANES, k).swapaxes(1, 2)  # [N / 16, K, 16]
    return QuantizedMatrix(kind, n, k, aligned(blocks), bias=_floats(bias))


def padded_experts(array: np.ndarray) -> np.ndarray:
    """Rows of experts [X, N, …] one after the other, each expert's N padded with zeros to whole blocks of 16."""
    missing = -array.shape[1] % LANES
    filler = np.zeros((len(array), missing, *array.shape[2:]), array.dtype)
    return np.concatenate([array, filler], 1).reshape(-1, *array.shape[2:])


def interleave_groups(
    quants: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray | None,
    *,
    bits: int,
    group: int,
    zero: int = 0,
    bias: np.ndarray | None = None,
) -> QuantizedMatrix:
    """Quants [N, K] uint8, scale and minimum [N, K / group rounded up] in float16 or float32, or a scale's e8 bytes."""
    n, k = quants.shape
    pairs = scale if minimum is None else np.stack([scale, minimum], -1)  # [N, G] or [N, G, 2]
    pairs = _pad(pairs, 1, 2) if group == LANES else pairs  # quants are padded to 32 inputs, and so are their scales
    pairs = _pad(pairs, 0, LANES)
    pairs = np.moveaxis(pairs.reshape(-1, LANES, *pairs.shape[1:]), 1, -1)  # [N / 16, G, (2,) 16]
    return QuantizedMatrix(
        "groups",
        n,
        k,
        _interleave(quants, bits, 0 if scale.dtype == np.uint8 else zero),
        aligned(pairs),
        bits=bits,
        group=group,
        zero=zero,
        has_min=minimum is not None,
        scale_kind={np.dtype(np.float16): "f16", np.dtype(np.uint8): "e8"}.get(scale.dtype, "f32"),
        bias=_floats(bias),
    )


def interleave_int8(quants: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> QuantizedMatrix:
    """Quants [N, K] int8 with one float32 scale per row."""
    n, k = quants.shape
    shifted = np.ascontiguousarray(quants).view(np.uint8) ^ 128
    return QuantizedMatrix(
        "int8", n, k, _interleave(shifted, 8, 128), aligned(_pad(scale, 0, LANES)), zero=128, bias=_floats(bias)
    )


def quantize_int8(weight: np.ndarray, bias: np.ndarray | None = None) -> QuantizedMatrix:
    """Each weight rounded to int8, with one scale per row."""
    wide = widen(weight)
    scale = np.abs(wide).max(1) / np.float32(127)
    with np.errstate(invalid="ignore"):  # what is not a number stays so in its row's scale
        quants = np.rint(wide / np.where(scale > 0, scale, np.float32(1))[:, None]).clip(-127, 127).astype(np.int8)
    return interleave_int8(quants, scale, bias)


def quantize_int4(weight: np.ndarray, bias: np.ndarray | None = None) -> QuantizedMatrix:
    """Each weight rounded to one of 16 steps from the smallest to the largest of its group of 32 (GGUF's Q4_1)."""
    n, k = weight.shape
    grouped = _pad(widen(weight), 1, GROUP).reshape(n, -1, GROUP)  # [N, G, 32]
    largest = float(np.abs(grouped).max())
    if HALF_LIMIT < largest < np.inf:
        raise Unsupported(
            f"the weight {largest:g} does not fit the float16 bounds of int4 (largest {HALF_LIMIT:g}); use int8"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        minimum = grouped.min(2).astype(np.float16)
        scale = ((grouped.max(2) - minimum.astype(np.float32)) / np.float32(15)).astype(np.float16)
        step = np.where(scale > 0, scale.astype(np.float32), np.float32(1))[..., None]
        quants = np.rint((grouped - minimum.astype(np.float32)[..., None]) / step).clip(0, 15).astype(np.uint8)
    return interleave_groups(quants.reshape(n, -1)[:, :k], scale, minimum, bits=4, group=GROUP, bias=bias)


def _interleave(quants: np.ndarray, bits: int, zero: int) -> np.ndarray:
    """Quants [N, K] → [N / 16, K / 32, bytes], in the order of api.h."""
    padded = _pad(_pad(quants, 0, LANES, zero), 1, GROUP, zero)
    blocks, groups = len(padded) // LANES, padded.shape[1] // GROUP
    if bits == 8:
        parts = padded.reshape(blocks, LANES, groups, 8, 4)  # block, row, group, j, i
        return aligned(parts.transpose(0, 2, 3, 1, 4)).reshape(blocks, groups, 512)
    parts = padded.reshape(blocks, LANES, groups, 4, 2, 4)  # block, row, group, j, half, i
    both = parts[:, :, :, :, 0] | (parts[:, :, :, :, 1] << 4)
    return aligned(both.transpose(0, 2, 3, 1, 4)).reshape(blocks, groups, 256)


def _pad(x: np.ndarray, dim: int, unit: int, value: int = 0) -> np.ndarray:
    missing = -x.shape[dim] % unit
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return np.concatenate([x, np.full(shape, value, x.dtype)], dim)


def _floats(bias: np.ndarray | None) -> np.ndarray | None:
    return None if bias is None else aligned(widen(bias))
