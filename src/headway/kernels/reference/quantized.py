"""Quantized weights for the CPU, with 16 output rows interleaved, and what a format means for activations.

A format also fixes how activations are quantized and in which order products are summed, whatever computes:

    f32, f16, bf16  activations as they are; one multiply-add per input, first to last
    int8            each 32 inputs to int8 with their scale, largest magnitude / 127; group after group the exact
                    integer sum times that scale is added; the total is multiplied by the scale of the weights' row
    groups          each 32 inputs likewise; group after group, of 32 inputs or of 16, the exact integer sum times both
                    scales is added, and then the minimum times the sum of the inputs

An 8-bit value is x × (127 / largest), rounded half to even; inputs past the last are zeros; a group whose largest
magnitude is below SMALLEST is zero, and one with a value that is not finite is NaN. `ordered_matmul` computes the
product, to the bit as native code does; `dequantize` gives the weights back. native/api.h describes the memory layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.base.errors import Unsupported, WrongType
from headway.kernels.reference.ordered import LANES

GROUP = 32
SMALLEST = 1e-36  # a group whose largest value is smaller counts as zero
HALF_LIMIT = 65504.0  # the largest float16
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SCALES = {"f16": torch.float16, "f32": torch.float32, "k": torch.uint8}


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A weight matrix [n, k]. `kind` is f32, f16, bf16, int8 or groups; the fields after `quants` are for the last two.

    `quants` are the stored integers, or the floats of a float kind. A weight is scale × (quant - zero), or
    scale × quant + minimum. `scale_kind` is f16, f32 or k; for k, scale and minimum are bytes times the float16s in
    `super`, one pair for 256 inputs.
    """

    kind: str
    n: int
    k: int
    quants: Tensor
    scales: Tensor | None = None
    super: Tensor | None = None
    bits: int = 8
    group: int = 0
    zero: int = 0
    has_min: bool = False
    scale_kind: str = "f32"
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.quants, self.scales, self.super, self.bias) if t is not None)

    @property
    def padded_n(self) -> int:
        """The number of outputs, padded to whole blocks."""
        return -(-self.n // LANES) * LANES

    @property
    def row_quantization(self) -> str | None:
        """How activations are quantized before the matmul: by `groups`, or None."""
        return None if self.kind in FLOATS else "groups"

    def problem(self) -> str | None:
        """Why its tensors do not match its size and format, or None. Native code reads them as described."""
        if self.kind == "groups" and (problem := self._group_problem()):
            return problem
        for name, (shape, dtype) in self._needed().items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                if name != "bias":
                    return f"{name} are missing"
                continue
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return f"{name} are {list(tensor.shape)} of {tensor.dtype}; {list(shape)} of {dtype} are needed"
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                return f"{name} must be contiguous, on the CPU"
        return None

    def _group_problem(self) -> str | None:
        if self.bits not in (4, 8) or self.scale_kind not in SCALES:
            return f"{self.bits} bits with {self.scale_kind} scales are not supported"
        if self.group != LANES and (self.group < GROUP or self.group & (self.group - 1)):
            return f"its groups have {self.group} inputs; use 16, 32, 64, …"
        if self.scale_kind == "k" and (self.k % 256 or self.group != GROUP or not self.has_min):
            return f"k scales are for groups of 32 with a minimum, in rows of a multiple of 256 inputs, not {self.k}"
        return None

    def _needed(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of this format."""
        blocks, groups = -(-self.n // LANES), -(-self.k // GROUP)
        bias = (self.n,), torch.float32
        if self.kind in FLOATS:
            quants = (blocks, self.k, LANES), FLOATS[self.kind]
            return {"quants": quants, "bias": bias}
        quants = (blocks, groups, (8 if self.kind == "int8" else self.bits) * 64), torch.uint8
        if self.kind == "int8":
            return {"quants": quants, "scales": ((blocks * LANES,), torch.float32), "bias": bias}
        held = 2 * groups if self.group == LANES else -(-self.k // self.group)
        scales = (blocks, held, *((2, LANES) if self.has_min else (LANES,))), SCALES[self.scale_kind]
        above = {"super": ((blocks, groups // 8, 2, LANES), torch.float16)} if self.scale_kind == "k" else {}
        return {"quants": quants, "scales": scales, **above, "bias": bias}

    @property
    def label(self) -> str:
        """The format in a word."""
        return self.kind if self.kind != "groups" else f"int{self.bits} in groups of {self.group}"


# -- quantizing and interleaving -----------------------------------------------------------------------------------


def interleave_floats(weight: Tensor, bias: Tensor | None = None) -> QuantizedMatrix:
    """A float32, float16 or bfloat16 matrix [N, K] in the interleaved layout, its values unchanged."""
    n, k = weight.shape
    kind = next((name for name, dtype in FLOATS.items() if dtype == weight.dtype), None)
    if kind is None:
        raise WrongType(f"the matrix is {weight.dtype}; it must be float32, float16 or bfloat16")
    blocks = _pad(weight, 0, LANES).view(-1, LANES, k).transpose(1, 2).contiguous()  # [N / 16, K, 16]
    return QuantizedMatrix(kind, n, k, blocks, bias=_floats(bias))


def interleave_groups(
    quants: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    *,
    bits: int,
    group: int,
    zero: int = 0,
    bias: Tensor | None = None,
) -> QuantizedMatrix:
    """Quants [N, K] uint8, scale and minimum [N, K / group rounded up] in float16 or float32."""
    n, k = quants.shape
    pairs = scale if minimum is None else torch.stack([scale, minimum], dim=-1)  # [N, G] or [N, G, 2]
    pairs = _pad(pairs, 1, 2) if group == LANES else pairs  # quants are padded to 32 inputs, and so are their scales
    pairs = _pad(pairs, 0, LANES).unflatten(0, (-1, LANES)).movedim(1, -1).contiguous()  # [N / 16, G, (2,) 16]
    return QuantizedMatrix(
        "groups",
        n,
        k,
        _interleave(quants, bits, zero),
        pairs,
        bits=bits,
        group=group,
        zero=zero,
        has_min=minimum is not None,
        scale_kind="f16" if scale.dtype == torch.float16 else "f32",
        bias=_floats(bias),
    )


def interleave_int8(quants: Tensor, scale: Tensor, bias: Tensor | None = None) -> QuantizedMatrix:
    """Quants [N, K] int8 with one float32 scale per row."""
    n, k = quants.shape
    shifted = quants.view(torch.uint8) ^ 128
    return QuantizedMatrix(
        "int8", n, k, _interleave(shifted, 8, 128), _pad(scale, 0, LANES), zero=128, bias=_floats(bias)
    )


def quantize_int8(weight: Tensor, bias: Tensor | None = None) -> QuantizedMatrix:
    """Each weight rounded to int8, with one scale per row."""
    wide = weight.float()
    scale = wide.abs().amax(1) / 127
    quants = torch.round(wide / torch.where(scale > 0, scale, 1)[:, None]).clamp(-127, 127).to(torch.int8)
    return interleave_int8(quants, scale, bias)


def quantize_int4(weight: Tensor, bias: Tensor | None = None) -> QuantizedMatrix:
    """Each weight rounded to one of 16 steps from the smallest to the largest of its group of 32 (GGUF's Q4_1)."""
    grouped = _pad(weight.float(), 1, GROUP).unflatten(1, (-1, GROUP))  # [N, G, 32]
    largest = float(grouped.abs().amax())
    if HALF_LIMIT < largest < torch.inf:
        raise Unsupported(
            f"the weight {largest:g} does not fit the float16 bounds of int4 (largest {HALF_LIMIT:g}); use int8"
        )
    minimum = grouped.amin(2).half()
    scale = ((grouped.amax(2) - minimum.float()) / 15).half()
    step = torch.where(scale > 0, scale.float(), 1)[..., None]
    quants = torch.round((grouped - minimum.float()[..., None]) / step).clamp(0, 15).to(torch.uint8)
    return interleave_groups(quants.flatten(1)[:, : weight.shape[1]], scale, minimum, bits=4, group=GROUP, bias=bias)


def _interleave(quants: Tensor, bits: int, zero: int) -> Tensor:
    """Quants [N, K] → [N / 16, K / 32, bytes], in the order of api.h."""
    padded = _pad(_pad(quants, 0, LANES, zero), 1, GROUP, zero)
    if bits == 8:
        parts = padded.view(-1, LANES, padded.shape[1] // GROUP, 8, 4)  # block, row, group, j, i
        return parts.permute(0, 2, 3, 1, 4).flatten(2).contiguous()
    parts = padded.view(-1, LANES, padded.shape[1] // GROUP, 4, 2, 4)  # block, row, group, j, half, i
    low, high = parts.unbind(4)
    return (low | (high << 4)).permute(0, 2, 3, 1, 4).flatten(2).contiguous()


def _pad(x: Tensor, dim: int, unit: int, value: int = 0) -> Tensor:
    missing = -x.shape[dim] % unit
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, torch.full(shape, value, dtype=x.dtype)], dim)


def _floats(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


# -- reference -----------------------------------------------------------------------------------------------------


def dequantize(w: QuantizedMatrix) -> Tensor:
    """The weights [n, k] in float32."""
    if w.kind in FLOATS:
        return w.quants.transpose(1, 2).reshape(-1, w.k)[: w.n].float()
    quants = stored_quants(w).float()  # [n, k]
    if w.kind == "int8":
        assert w.scales is not None
        return w.scales[: w.n, None] * (quants - w.zero)
    scale, minimum = stored_scales(w)
    scale = scale.repeat_interleave(w.group, 1)[:, : w.k]
    if minimum is None:
        return scale * (quants - w.zero)
    return scale * quants + minimum.repeat_interleave(w.group, 1)[:, : w.k]


def dequantize_rows(w: QuantizedMatrix, rows: Tensor) -> Tensor:
    """These rows [T] of the weights → [T, k] in float32."""
    blocks = rows // LANES
    scales = w.scales
    if scales is not None:
        scales = scales.view(-1, LANES)[blocks].flatten() if w.kind == "int8" else scales[blocks]
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


def stored_quants(w: QuantizedMatrix) -> Tensor:
    """The stored integers [n, k]."""
    blocks, groups = w.quants.shape[0], w.quants.shape[1]
    if w.bits == 8:
        parts = w.quants.view(blocks, groups, 8, LANES, 4)
        return parts.permute(0, 3, 1, 2, 4).reshape(blocks * LANES, -1)[: w.n, : w.k]
    both = w.quants.view(blocks, groups, 4, LANES, 4)
    parts = torch.stack([both & 15, both >> 4], dim=4)  # block, group, j, row, half, i
    return parts.permute(0, 3, 1, 2, 4, 5).reshape(blocks * LANES, -1)[: w.n, : w.k]


def stored_scales(w: QuantizedMatrix) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum [n, scale groups] in float32."""
    assert w.scales is not None
    if w.scale_kind == "k":
        assert w.super is not None
        factors = w.scales.float()  # [B, G, 2, 16]
        both = factors * w.super.float().repeat_interleave(8, 1)
        scale, minimum = both[:, :, 0], -both[:, :, 1]
    elif w.has_min:
        scale, minimum = w.scales.float().unbind(2)
    else:
        scale, minimum = w.scales.float(), None

    def rows(t: Tensor) -> Tensor:  # [B, G, 16] → [n, G]
        return t.transpose(1, 2).reshape(-1, t.shape[1])[: w.n]

    return rows(scale), None if minimum is None else rows(minimum)
