"""Dequantizing GGUF blocks to floats, in torch, a chunk at a time.

Owns the block layouts. Every kind decodes to exactly the float32 values of the format's reference, multiplying and
adding in the same order; another dtype is that value rounded once. It never reads files and keeps no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.kernels.host.quantized import FP4
from headway.models.files.blocks import IQ4_VALUES, decode_blocks
from headway.models.files.codebooks import CODEBOOK_KINDS, EXPONENTS, integers_and_scales, steps_of_scales
from headway.models.files.gguf import KINDS

CHUNK_VALUES = 1 << 18  # values decoded at once: the temporaries of a chunk stay within a few MiB

FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


def dequantize(kind: str, raw: Tensor, shape: Sequence[int], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """A tensor of `shape` and `dtype` from its stored bytes, `raw` uint8 `[nbytes]`.

    `out`, when given, is contiguous, has that shape and dtype, and its device is where the decoding happens:
    only stored bytes are copied there. A value too large for `dtype` raises `Unsupported`.
    """
    if kind not in KINDS:
        raise Unsupported(f"tensors stored as {kind} cannot be decoded; Headway reads {', '.join(KINDS)}")
    _check_sizes(kind, raw, shape)
    if out is None:
        out = torch.empty(tuple(shape), dtype=dtype)
    _check_out(out, shape, dtype)
    if kind in FLOATS:
        convert_floats(raw, FLOATS[kind], out)
    else:
        _decode_blocks(kind, raw, out)
    return out


def as_floats(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes viewed as numbers, copied only if they are not aligned for the dtype."""
    aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)


def decode(kind: str, raw: Tensor) -> Tensor:
    """The numbers in whole blocks of stored bytes, flat: floats as they are stored, anything else in float32."""
    if kind in FLOATS:
        return as_floats(raw, FLOATS[kind])
    return _decoder(kind)(raw.view(-1, KINDS[kind].nbytes)).view(-1)


def convert_floats(raw: Tensor, stored: torch.dtype, out: Tensor) -> None:
    """Fill the contiguous `out` with the `stored` floats in `raw`. One too large for `out` raises `Unsupported`."""
    for part, target in zip(raw.split(CHUNK_VALUES * stored.itemsize), out.view(-1).split(CHUNK_VALUES)):
        store(target, as_floats(part, stored).to(out.device))


def _decode_blocks(kind: str, raw: Tensor, out: Tensor) -> None:
    block_format, decoder = KINDS[kind], _decoder(kind)
    step = CHUNK_VALUES // block_format.block
    for part, target in zip(
        raw.view(-1, block_format.nbytes).split(step), out.view(-1).split(step * block_format.block)
    ):
        store(target, decoder(part.to(out.device)).view(-1))


def may_overflow(values: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` can hold some finite number of type `values` only as infinity."""
    return torch.finfo(target).max < torch.finfo(values).max


def store(target: Tensor, values: Tensor) -> None:
    """Copy values into `target`. A finite value that becomes infinity there raises `Unsupported`."""
    target.copy_(values)
    if not may_overflow(values.dtype, target.dtype):
        return
    infinite = torch.isinf(target)
    if not infinite.any():
        return
    lost = values[infinite]
    lost = lost[torch.isfinite(lost)]
    if lost.numel():
        name, limit = str(target.dtype).removeprefix("torch."), torch.finfo(target.dtype).max
        raise Unsupported(f"the value {lost[0].item():g} does not fit {name} (largest {limit:g}); load as float32")


def _check_sizes(kind: str, raw: Tensor, shape: Sequence[int]) -> None:
    block_format = KINDS[kind]
    if raw.dtype != torch.uint8 or raw.dim() != 1:
        raise InvalidInput(f"stored bytes must be a flat uint8 tensor, not {raw.dtype} with {raw.dim()} dimensions")
    if not shape or shape[-1] % block_format.block:
        raise InvalidInput(
            f"shape {tuple(shape)} does not split into {kind} blocks of {block_format.block} along its rows"
        )
    expected = prod(shape) // block_format.block * block_format.nbytes
    if raw.numel() != expected:
        raise InvalidInput(f"{raw.numel()} bytes for shape {tuple(shape)}; as {kind} it takes {expected}")


def _check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise InvalidInput(f"weights are decoded to a floating type, not {dtype}")
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or not out.is_contiguous():
        raise InvalidInput(
            f"out has shape {tuple(out.shape)} and {out.dtype}; it must be contiguous, {tuple(shape)}, {dtype}"
        )


@dataclass(frozen=True, eq=False)
class BlockParts:
    """What B blocks of V numbers hold: quants [B, V] uint8, of which `zero` stands for 0; a number is that times its
    scale, plus its minimum.

    Scales are float16 [B, 1], or these times steps int8 [B, G], one for V / G numbers; minima likewise. Every number is
    times 2^exponent.
    """

    quants: Tensor
    scale: Tensor
    zero: int = 0
    steps: Tensor | None = None
    minimum: Tensor | None = None
    minimum_steps: Tensor | None = None
    exponent: int = 0

    def values(self) -> Tensor:
        """The numbers, float32 [B, V]."""
        scale = _times(self.scale, self.steps)
        values = self.quants.float().sub_(self.zero).view(*scale.shape, -1).mul_(scale.unsqueeze(-1))  # [B, G, V / G]
        if self.minimum is not None:
            values.add_(_times(self.minimum, self.minimum_steps).unsqueeze(-1))
        return values.view(self.quants.shape).mul_(2.0**self.exponent)


def _times(numbers: Tensor, steps: Tensor | None) -> Tensor:
    return numbers.float() if steps is None else steps.float().mul_(numbers.float())


# Each takes blocks, uint8 [B, nbytes].


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:] ^ 128, _half(blocks, 0), 128)


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(planes(blocks[:, 2:], group=16, bits=4), _half(blocks, 0), 8)


def _q4_1(blocks: Tensor) -> BlockParts:
    return BlockParts(planes(blocks[:, 4:], group=16, bits=4), _half(blocks, 0), minimum=_half(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockParts:
    low, high = planes(blocks[:, 6:], group=16, bits=4), planes(blocks[:, 2:6], group=1, bits=1)
    return BlockParts(low | (high << 4), _half(blocks, 0), 16)


def _q5_1(blocks: Tensor) -> BlockParts:
    low, high = planes(blocks[:, 8:], group=16, bits=4), planes(blocks[:, 4:8], group=1, bits=1)
    return BlockParts(low | (high << 4), _half(blocks, 0), minimum=_half(blocks, 2))


def _q2_k(blocks: Tensor) -> BlockParts:
    scales, quants = blocks[:, :16], planes(blocks[:, 16:80], group=32, bits=2)
    least: dict[str, Any] = {"minimum": -_half(blocks, 82), "minimum_steps": (scales >> 4).view(torch.int8)}
    return BlockParts(quants, _half(blocks, 80), steps=(scales & 15).view(torch.int8), **least)


def _q3_k(blocks: Tensor) -> BlockParts:
    low, high = planes(blocks[:, 32:96], group=32, bits=2), planes(blocks[:, :32], group=32, bits=1)
    # Scales have 6 bits: 16 low nibbles in 8 bytes, then 16 high pairs in 4.
    nibbles, pairs = planes(blocks[:, 96:104], group=8, bits=4), planes(blocks[:, 104:108], group=4, bits=2)
    steps = (nibbles | (pairs << 4)).view(torch.int8) - 32  # [B, 16]
    # A set high bit means "subtract nothing", so the value is low + 4·high − 4.
    return BlockParts(low | (high << 2), _half(blocks, 108), 4, steps)


def _q4_k(blocks: Tensor) -> BlockParts:
    return BlockParts(planes(blocks[:, 16:], group=32, bits=4), **_scales_and_mins(blocks))


def _q5_k(blocks: Tensor) -> BlockParts:
    low, high = planes(blocks[:, 48:], group=32, bits=4), planes(blocks[:, 16:48], group=32, bits=1)
    return BlockParts(low | (high << 4), **_scales_and_mins(blocks))


def _q6_k(blocks: Tensor) -> BlockParts:
    low, high = planes(blocks[:, :128], group=64, bits=4), planes(blocks[:, 128:192], group=32, bits=2)
    return BlockParts(low | (high << 4), _half(blocks, 208), 32, blocks[:, 192:208].view(torch.int8))  # [B, 16]


def _iq4(quants: Tensor) -> Tensor:
    return torch.from_numpy(IQ4_VALUES.view(np.uint8) ^ 128).to(quants.device)[quants.int()]


def _iq4_nl(blocks: Tensor) -> BlockParts:
    return BlockParts(_iq4(planes(blocks[:, 2:], group=16, bits=4)), _half(blocks, 0), 128)


def _iq4_xs(blocks: Tensor) -> BlockParts:
    low, high = planes(blocks[:, 4:8], group=1, bits=4), planes(blocks[:, 2:4], group=1, bits=2)
    steps = (low | (high << 4)).view(torch.int8) - 32  # [B, 8]
    return BlockParts(_iq4(planes(blocks[:, 8:], group=16, bits=4)), _half(blocks, 0), 128, steps)


def _tq1_0(blocks: Tensor) -> BlockParts:
    digits = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = 3 ** torch.arange(count, device=blocks.device)
        shifted = (blocks[:, None, start:stop].int() * powers.int()[:, None]) & 255  # what is before the digit goes
        digits.append(((shifted * 3) >> 8).flatten(1))
    return BlockParts(torch.cat(digits, 1).to(torch.uint8), _half(blocks, 52), 1)


def _tq2_0(blocks: Tensor) -> BlockParts:
    return BlockParts(planes(blocks[:, :64], group=32, bits=2), _half(blocks, 64), 1)


_PARTS: Mapping[str, Callable[[Tensor], BlockParts]] = MappingProxyType(
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
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
        "TQ1_0": _tq1_0,
        "TQ2_0": _tq2_0,
    }
)


def block_parts(kind: str, raw: Tensor) -> BlockParts:
    """What whole blocks hold, of a kind that has integers with a scale; flat bytes, on any device."""
    blocks = raw.view(-1, KINDS[kind].nbytes)
    if kind in _PARTS:
        return _PARTS[kind](blocks)
    stored = blocks.cpu().numpy()
    values, scale = integers_and_scales(kind, stored)
    steps, half = steps_of_scales(kind, stored, scale)
    quants, steps, half = (torch.from_numpy(part).to(raw.device) for part in (values.view(np.uint8) ^ 128, steps, half))
    return BlockParts(quants, half, 128, steps, exponent=EXPONENTS[kind])


def _mxfp4(blocks: Tensor) -> Tensor:
    doubled = torch.tensor(FP4, dtype=torch.float32, device=blocks.device) - FP4[0]  # the scale takes half
    scale = torch.exp2(blocks[:, :1].double() - 128).float()
    return doubled[planes(blocks[:, 1:], group=16, bits=4).int()].mul_(scale)


def packed_fp4(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of stored MXFP4, apart: neighbors in one byte, the first in its low half, 16 bytes for each
    scale. Both are uint8, flat."""
    blocks = raw.view(-1, KINDS["MXFP4"].nbytes)
    codes = planes(blocks[:, 1:], group=16, bits=4)
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).flatten(), blocks[:, 0].contiguous()


def _decoder(kind: str) -> Callable[[Tensor], Tensor]:
    """What takes blocks, uint8 [B, nbytes], and returns float32 [B, block]."""
    if kind in _PARTS:
        return lambda blocks: _PARTS[kind](blocks).values()
    return _mxfp4 if kind == "MXFP4" else partial(_on_host, kind)


def _on_host(kind: str, blocks: Tensor) -> Tensor:
    """Blocks of a kind with a codebook, which numpy decodes."""
    assert kind in CODEBOOK_KINDS
    return torch.from_numpy(decode_blocks(kind, blocks.cpu().numpy())).to(blocks.device)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def planes(raw: Tensor, *, group: int, bits: int) -> Tensor:
    """Unpack `[B, N]` bytes to `[B, N·8/bits]` numbers: of every `group` bytes the lowest bits first, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device).view(-1, 1)
    spread = raw.reshape(len(raw), -1, 1, group) >> shifts
    return spread.bitwise_and_((1 << bits) - 1).view(len(raw), -1)


def _scales_and_mins(blocks: Tensor) -> dict[str, Any]:
    """The 8 scales and 8 minima of Q4_K and Q5_K.

    Their 6 bits are in bytes 4 to 15: numbers 0–3 in the low 6 bits of the first eight bytes, numbers 4–7 as a nibble
    in the last four, with their two top bits on top of numbers 0–3.
    """
    scale, least, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = torch.cat([scale & 63, (rest & 15) | ((scale >> 2) & 48)], dim=1).view(torch.int8)
    mins = torch.cat([least & 63, (rest >> 4) | ((least >> 2) & 48)], dim=1).view(torch.int8)
    return {"scale": _half(blocks, 0), "steps": steps, "minimum": -_half(blocks, 2), "minimum_steps": mins}
