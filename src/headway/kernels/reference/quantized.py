"""Weights in Headway's packed form: 16 output rows side by side, codes with scales, and what they mean in torch.

A format fixes its activations too: groups of 32 inputs are coded in 8 bits with one scale each (`groups`), a whole row
with one (`int8`), or they stay floats. `linear_reference` says in torch what a native product computes; `unpack` gives
the weights back. The layout in memory is described in native/api.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.base.errors import Unsupported, WrongType

LANES = 16
GROUP = 32
SMALLEST = 1e-36  # the largest of a group below which it counts as zero
HALF_LIMIT = 65504.0  # the largest float16
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SCALES = {"f16": torch.float16, "f32": torch.float32, "k": torch.uint8}


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [n, k]. `kind` is f32, f16, bf16, int8 or groups; the rest is for the last two.

    A weight is scale × (code - zero), or scale × code + least. `scale_kind` is f16, f32 or k: there scale and least are
    bytes times the float16s in `super`, one pair for 256 inputs.
    """

    kind: str
    n: int
    k: int
    codes: Tensor
    scales: Tensor | None = None
    super: Tensor | None = None
    bits: int = 8
    group: int = 0
    zero: int = 0
    least: bool = False
    scale_kind: str = "f32"
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.super, self.bias) if t is not None)

    @property
    def wide(self) -> int:
        """Outputs, those that fill the last block among them."""
        return -(-self.n // LANES) * LANES

    @property
    def coding(self) -> str | None:
        """How rows are coded before the product: by groups, by row, or None for not at all."""
        return {"groups": "groups", "int8": "row"}.get(self.kind)

    def flaw(self) -> str | None:
        """What about its tensors does not fit its size and format, or None: native code reads them as described."""
        if self.kind == "groups" and (flaw := self._group_flaw()):
            return flaw
        for name, (shape, dtype) in self._needed().items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                if name != "bias":
                    return f"{name} are missing"
                continue
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return f"{name} are {list(tensor.shape)} of {tensor.dtype}; {list(shape)} of {dtype} are needed"
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                return f"{name} must lie in order, on the CPU"
        return None

    def _group_flaw(self) -> str | None:
        if self.bits not in (4, 8) or self.scale_kind not in SCALES:
            return f"{self.bits} bits with {self.scale_kind} scales are not known"
        if self.group != LANES and (self.group < GROUP or self.group & (self.group - 1)):
            return f"its groups have {self.group} inputs; 16, 32, 64, … are possible"
        if self.scale_kind == "k" and (self.k % 256 or self.group != GROUP or not self.least):
            return f"k scales are for groups of 32 with a least, in rows of a multiple of 256 inputs, not {self.k}"
        return None

    def _needed(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each tensor of this format."""
        blocks, groups = -(-self.n // LANES), -(-self.k // GROUP)
        bias = (self.n,), torch.float32
        if self.kind in FLOATS:
            codes = (blocks, self.k, LANES), FLOATS[self.kind]
            return {"codes": codes, "bias": bias}
        codes = (blocks, groups, (8 if self.kind == "int8" else self.bits) * 64), torch.uint8
        if self.kind == "int8":
            return {"codes": codes, "scales": ((blocks * LANES,), torch.float32), "bias": bias}
        held = 2 * groups if self.group == LANES else -(-self.k // self.group)
        scales = (blocks, held, *((2, LANES) if self.least else (LANES,))), SCALES[self.scale_kind]
        above = {"super": ((blocks, groups // 8, 2, LANES), torch.float16)} if self.scale_kind == "k" else {}
        return {"codes": codes, "scales": scales, **above, "bias": bias}

    @property
    def label(self) -> str:
        """The format in a word."""
        return self.kind if self.kind != "groups" else f"int{self.bits} in groups of {self.group}"


# -- packing -------------------------------------------------------------------------------------------------------


def pack_floats(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """A float32, float16 or bfloat16 matrix [N, K], its numbers as they are."""
    n, k = weight.shape
    kind = next((name for name, dtype in FLOATS.items() if dtype == weight.dtype), None)
    if kind is None:
        raise WrongType(f"a matrix of {weight.dtype} was given; float32, float16 and bfloat16 can be packed")
    blocks = _pad(weight, 0, LANES).view(-1, LANES, k).transpose(1, 2).contiguous()  # [N / 16, K, 16]
    return Packed(kind, n, k, blocks, bias=_floats(bias))


def pack_groups(
    codes: Tensor,
    scale: Tensor,
    least: Tensor | None,
    *,
    bits: int,
    group: int,
    zero: int = 0,
    bias: Tensor | None = None,
) -> Packed:
    """Codes [N, K] uint8, scale and least [N, K / group rounded up] in float16 or float32."""
    n, k = codes.shape
    pairs = scale if least is None else torch.stack([scale, least], dim=-1)  # [N, G] or [N, G, 2]
    pairs = _pad(pairs, 1, 2) if group == LANES else pairs  # codes are padded to 32 inputs, and their scales with them
    pairs = _pad(pairs, 0, LANES).unflatten(0, (-1, LANES)).movedim(1, -1).contiguous()  # [N / 16, G, (2,) 16]
    return Packed(
        "groups",
        n,
        k,
        _interleave(codes, bits, zero),
        pairs,
        bits=bits,
        group=group,
        zero=zero,
        least=least is not None,
        scale_kind="f16" if scale.dtype == torch.float16 else "f32",
        bias=_floats(bias),
    )


def pack_int8(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Packed:
    """Codes [N, K] int8 with one float32 scale a row."""
    n, k = codes.shape
    shifted = codes.view(torch.uint8) ^ 128
    return Packed("int8", n, k, _interleave(shifted, 8, 128), _pad(scale, 0, LANES), zero=128, bias=_floats(bias))


def quantise_int8(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """The nearest int8 for each weight, one scale a row."""
    wide = weight.float()
    scale = wide.abs().amax(1) / 127
    codes = torch.round(wide / torch.where(scale > 0, scale, 1)[:, None]).clamp(-127, 127).to(torch.int8)
    return pack_int8(codes, scale, bias)


def quantise_int4(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """The nearest of 16 steps between the least and the largest of each group of 32 weights (what GGUF calls Q4_1)."""
    grouped = _pad(weight.float(), 1, GROUP).unflatten(1, (-1, GROUP))  # [N, G, 32]
    largest = float(grouped.abs().amax())
    if HALF_LIMIT < largest < torch.inf:
        raise Unsupported(
            f"the weight {largest:g} does not fit the float16 ends of int4 (largest {HALF_LIMIT:g}); use int8"
        )
    least = grouped.amin(2).half()
    scale = ((grouped.amax(2) - least.float()) / 15).half()
    step = torch.where(scale > 0, scale.float(), 1)[..., None]
    codes = torch.round((grouped - least.float()[..., None]) / step).clamp(0, 15).to(torch.uint8)
    return pack_groups(codes.flatten(1)[:, : weight.shape[1]], scale, least, bits=4, group=GROUP, bias=bias)


def _interleave(codes: Tensor, bits: int, zero: int) -> Tensor:
    """Codes [N, K] → [N / 16, K / 32, bytes], in the order of api.h."""
    padded = _pad(_pad(codes, 0, LANES, zero), 1, GROUP, zero)
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


# -- meaning -------------------------------------------------------------------------------------------------------


def unpack(w: Packed) -> Tensor:
    """The weights [n, k] in float32."""
    if w.kind in FLOATS:
        return w.codes.transpose(1, 2).reshape(-1, w.k)[: w.n].float()
    codes = _codes(w).float()  # [n, k]
    if w.kind == "int8":
        assert w.scales is not None
        return w.scales[: w.n, None] * (codes - w.zero)
    scale, least = _scales(w)
    scale = scale.repeat_interleave(w.group, 1)[:, : w.k]
    if least is None:
        return scale * (codes - w.zero)
    return scale * codes + least.repeat_interleave(w.group, 1)[:, : w.k]


def linear_reference(x: Tensor, w: Packed) -> Tensor:
    """x [R, k] float32 times the matrix → [R, n]: what the native product computes, to float32 rounding."""
    return F.linear(coded(x, w.coding), unpack(w), w.bias)


def coded(x: Tensor, coding: str | None) -> Tensor:
    """Rows as a format sees them: rounded to 8 bits by groups of 32 inputs or by row, or as they are."""
    if coding is None:
        return x
    padded = x if x.shape[-1] % GROUP == 0 else F.pad(x, (0, -x.shape[-1] % GROUP))
    parts = padded.unflatten(-1, (-1, GROUP)) if coding == "groups" else padded.unsqueeze(-2)
    most = parts.abs().amax(-1, keepdim=True)
    small = most < SMALLEST
    top = torch.full_like(most, 127)  # a number divided by a tensor would be its reciprocal times the number
    codes = torch.round(parts * torch.where(small, 0, top / torch.where(small, 1, most)))
    values = codes * torch.where(small, 0, most / 127)
    # A group with an infinity or a NaN is NaN as a whole: no 8-bit code can stand for it.
    values = torch.where(most.isfinite(), values, torch.nan)
    return values.flatten(-2)[..., : x.shape[-1]]


def _codes(w: Packed) -> Tensor:
    blocks, groups = w.codes.shape[0], w.codes.shape[1]
    if w.bits == 8:
        parts = w.codes.view(blocks, groups, 8, LANES, 4)
        return parts.permute(0, 3, 1, 2, 4).reshape(blocks * LANES, -1)[: w.n, : w.k]
    both = w.codes.view(blocks, groups, 4, LANES, 4)
    parts = torch.stack([both & 15, both >> 4], dim=4)  # block, group, j, row, half, i
    return parts.permute(0, 3, 1, 2, 4, 5).reshape(blocks * LANES, -1)[: w.n, : w.k]


def _scales(w: Packed) -> tuple[Tensor, Tensor | None]:
    """Scale and least [n, scale groups] in float32."""
    assert w.scales is not None
    if w.scale_kind == "k":
        assert w.super is not None
        factors = w.scales.float()  # [B, G, 2, 16]
        both = factors * w.super.float().repeat_interleave(8, 1)
        scale, least = both[:, :, 0], -both[:, :, 1]
    elif w.least:
        scale, least = w.scales.float().unbind(2)
    else:
        scale, least = w.scales.float(), None

    def rows(t: Tensor) -> Tensor:  # [B, G, 16] → [n, G]
        return t.transpose(1, 2).reshape(-1, t.shape[1])[: w.n]

    return rows(scale), None if least is None else rows(least)
