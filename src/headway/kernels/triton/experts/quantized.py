"""Matmul of each expert's rows by its quantized matrix, on tensor cores (`models.quantized.fp4` and `int_experts` have
the layouts).

As in `quantized_kernels`: tensors of a program are [fours of blocks of inputs, groups of strips, strips of a group,
eights of rows, words of 32 lanes], and its warps divide the first or the second dimension. Floats of 4 bits times their
power of two are exact in bfloat16, so sums are those of the same floats. Integers are exact too; the sum of each group
is multiplied by its scale in float32, and minima by the sum of the group's inputs. Rows of another type take
`experts.expert_matmul`.
"""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0917
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.expert_form import ExpertForm
from headway.kernels.triton.experts.matmul import (
    ExpertBlocks,
    ExpertGate,
    ExpertOperand,
    Routes,
    form_options,
    gated_pair,
)
from headway.kernels.triton.launch import launch_next, options, prefetch, wait
from headway.kernels.triton.mma import (
    begun,
    fp4_sums,
    fp4_unpacked,
    group_sums,
    input_sums,
    int_scales,
    int_unpacked,
)


@dataclass(frozen=True)
class StripTile:
    """Strips per program (or with `wide` per warp) and fours of blocks of inputs per step, and its warps, which divide
    the inputs, or with `wide` the strips. `columns` is the number of eights of rows at a time."""

    strips: int
    inputs: int
    columns: int
    warps: int = 4
    wide: bool = False

    @property
    def rows(self) -> int:
        return 8 * self.columns


def takes(form: ExpertForm, dtype: torch.dtype) -> bool:
    """Whether rows of this type are multiplied on tensor cores; float16 cannot hold every power of two."""
    return dtype == torch.bfloat16 or (dtype == torch.float16 and form.kind != "fp4")


def strip_matmul(
    x: Tensor,
    w: ExpertOperand,
    y: Tensor,
    routes: Routes,
    tile: StripTile,
    *,
    by: ExpertBlocks | None = None,
    gate: ExpertGate | None = None,
    ahead: bool = False,
) -> None:
    """`experts.expert_matmul` of rows in half precision. A pair's bits depend on the tile's inputs and warps alone."""
    pairs, k, strips = routes.chosen.numel(), x.shape[1], w.weight.shape[1]
    n = y.shape[1] // 2 if w.gated and gate is None else y.shape[1]
    assert gate is None or w.gated
    how, groups = gate or ExpertGate(""), tile.warps if tile.wide else 1
    blocks = pairs if by is None else len(by.blocks)
    _strip_matmul[(blocks, triton.cdiv(strips, groups * tile.strips))](
        *_operands(x, w), y, w.bias, routes.chosen if by is None else by.order,
        None if by is None else by.blocks, n, strips, x.stride(0) // 2,
        PER=pairs // x.shape[0], K=k, FACTOR=2.0**w.exponent, PAIRED=w.gated, GATED=gate is not None,
        KIND=how.activation, CLAMP=how.clamp or 0.0, ALPHA=how.alpha, GROUPS=groups, PARTS=tile.strips,
        COLS=tile.columns, DEEP=tile.inputs, EVEN=k % (256 * tile.inputs) == 0, **form_options(w.form),
        HALF=x.dtype == torch.float16, AHEAD=ahead, num_warps=tile.warps, **options(ahead),
    )  # fmt: skip


def pick_strip_tile(rows: float, form: ExpertForm, *, deterministic: bool = False) -> StripTile:
    """The fastest tile on an H200 for experts of about so many rows each; the one of all in deterministic mode."""
    if deterministic:
        return StripTile(1, 1, 2, wide=True)
    if rows <= 2:
        return StripTile(1, 2, 1, warps=2)
    return StripTile(2 if form.kind == "fp4" else 1, 1, 2 if rows <= 16 else 8, wide=True)


def strip_add_down(x: Tensor, w: ExpertOperand, y: Tensor, routes: Routes, *, ahead: bool = False) -> None:
    """Add to y [E] the weighted sum of what the experts of a row make of x [k, F] in half precision."""
    (pairs, k), n, strips = x.shape, len(y), w.weight.shape[1]
    assert not w.gated
    slots, deep = triton.next_power_of_2(pairs), 2 if k > 256 else 1
    _strip_add_down[(strips,)](
        *_operands(x, w), y, w.bias, routes.chosen, routes.weights, n, strips, x.stride(0) // 2, K=k,
        FACTOR=2.0**w.exponent, PAIRS=pairs, SLOTS=slots, DEEP=deep, EVEN=k % (256 * deep) == 0,
        **form_options(w.form), HALF=x.dtype == torch.float16, AHEAD=ahead, num_warps=min(16, slots * deep),
        **options(ahead),
    )  # fmt: skip


def _operands(x: Tensor, w: ExpertOperand) -> tuple[Any, ...]:
    """Rows by pairs, words, lines of scales, and halves."""
    assert w.form is not None
    assert w.scales is not None
    assert takes(w.form, x.dtype)
    assert w.weight.is_contiguous()
    assert x.stride(1) == 1
    return x.view(torch.int32), w.weight, w.scales.view(torch.int32), w.halves


# Two words beside each other, of which the first one's address is read; zeros where the second operand is 0.
_PAIR = tl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")
_PAIR_IF = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }"
)


@triton.jit
def _loaded_in_place(at):
    """Numbers in memory, int32, in the layout of what reads them: a load would bring one of its own."""
    return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], tl.int32, True, 1)


@triton.jit
def _loaded(at, there, EVEN: tl.constexpr):
    """Weights, each of which is read once."""
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def _inputs(at, there, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """A lane's words of inputs. Of groups of 16 two lie beside each other: to load them would bring a layout with two
    words a lane, where what multiplies them takes a lane's four."""
    if GROUP == 32 and EVEN:
        return tl.load(at)
    elif GROUP == 32:
        return tl.load(at, mask=there, other=0)
    elif EVEN:
        return tl.inline_asm_elementwise(_PAIR, "=r,=r,l,l", [at.to(tl.int64)], tl.int32, True, 2)
    else:
        there = there.to(tl.int32)
        return tl.inline_asm_elementwise(_PAIR_IF, "=&r,=&r,l,l,r,r", [at.to(tl.int64), there], tl.int32, True, 2)


@triton.jit
def _four(
    at, line_at, halves_at, q, deep,
    INPUTS: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    MINIMUM: tl.constexpr,
):  # fmt: skip
    """A lane's words of four blocks of inputs, the q-th four, their lines of scales and of minima, and halves."""
    EIGHT: tl.constexpr = FORM == "int8"
    WORDS: tl.constexpr = 256 if EIGHT else 128
    WIDE: tl.constexpr = FORM != "fp4" and (GROUP == 16 or not STEPS)  # whether scales have two lines
    LINES: tl.constexpr = (2 if WIDE else 1) * (2 if MINIMUM else 1)
    at += q * (4 * WORDS)
    line_at += q * (32 * LINES)
    block = (q + deep) * 4
    a = _loaded(at, block < INPUTS, EVEN)
    b = _loaded(at + WORDS, block + 1 < INPUTS, EVEN)
    c = _loaded(at + 2 * WORDS, block + 2 < INPUTS, EVEN)
    d = _loaded(at + 3 * WORDS, block + 3 < INPUTS, EVEN)
    a1, b1, c1, d1 = a, b, c, d
    if EIGHT:
        a1 = _loaded(at + 128, block < INPUTS, EVEN)
        b1 = _loaded(at + WORDS + 128, block + 1 < INPUTS, EVEN)
        c1 = _loaded(at + 2 * WORDS + 128, block + 2 < INPUTS, EVEN)
        d1 = _loaded(at + 3 * WORDS + 128, block + 3 < INPUTS, EVEN)
    s = _loaded(line_at, block < INPUTS, EVEN)
    s1, m, f = s, s, s
    if WIDE:
        s1 = _loaded(line_at + 32, block < INPUTS, EVEN)
    m1 = s1
    if MINIMUM:
        m = _loaded(line_at + 16 * LINES, block < INPUTS, EVEN)
        m1 = m
        if WIDE:
            m1 = _loaded(line_at + 96, block < INPUTS, EVEN)
    if STEPS:
        f = _loaded(halves_at + q * 32, block < INPUTS, EVEN)
    return a, b, c, d, a1, b1, c1, d1, s, s1, m, m1, f


@triton.jit
def _one(
    total, w, w1, s, m, f, xs, q, deep,
    BLOCK: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, MINIMUM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The totals plus one block of a four, of which a lane has eight inputs of each half."""
    xs += q * 128 + BLOCK * 32
    block = (q + deep) * 4 + BLOCK
    xa = _inputs(xs, block < (K + 63) // 64, GROUP, EVEN)
    xb = _inputs(xs + 16, block < (K + 31) // 64, GROUP, EVEN)
    if FORM == "fp4":
        a0, a1, a2, a3 = fp4_unpacked(w, s, BLOCK)
        return fp4_sums(total, a0, a1, a2, a3, xa, xb)
    else:
        ZERO: tl.constexpr = 128 if FORM == "int8" else 0 if MINIMUM else 8
        a0, a1, a2, a3 = int_unpacked(w, w1, FORM == "int8", ZERO, HALF)
        s0, s1 = int_scales(s, f, BLOCK, GROUP, STEPS, False)
        m0, m1, n0, n1 = s0, s1, s0, s1
        if MINIMUM:
            m0, m1 = int_scales(m, f, BLOCK, GROUP, STEPS, True)
            n0, n1 = input_sums(xa, xb, GROUP, HALF)
        return group_sums(total, a0, a1, a2, a3, xa, xb, s0, s1, m0, m1, n0, n1, GROUP, MINIMUM, HALF)


@triton.jit
def _added(
    total, four, xs, q, deep,
    K: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    MINIMUM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The totals plus four blocks."""
    a, b, c, d, a1, b1, c1, d1, s, s1, m, m1, f = four
    total = _one(total, a, a1, s, m, f, xs, q, deep, 0, K, EVEN, FORM, GROUP, STEPS, MINIMUM, HALF)
    total = _one(total, b, b1, s, m, f, xs, q, deep, 1, K, EVEN, FORM, GROUP, STEPS, MINIMUM, HALF)
    if FORM != "fp4" and (GROUP == 16 or not STEPS):
        s, m = s1, m1
    total = _one(total, c, c1, s, m, f, xs, q, deep, 2, K, EVEN, FORM, GROUP, STEPS, MINIMUM, HALF)
    return _one(total, d, d1, s, m, f, xs, q, deep, 3, K, EVEN, FORM, GROUP, STEPS, MINIMUM, HALF)


@triton.jit
def _sums(
    xs, words, scales, halves, own, deep, e,
    K: tl.constexpr, SHAPE: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, MINIMUM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The sums over inputs of strips times rows at xs, divided in `deep` parts."""
    INPUTS: tl.constexpr = (K + 63) // 64
    FOURS: tl.constexpr = (K + 255) // 256
    WORDS: tl.constexpr = 256 if FORM == "int8" else 128
    WIDE: tl.constexpr = FORM != "fp4" and (GROUP == 16 or not STEPS)
    LINE: tl.constexpr = 32 * (2 if WIDE else 1) * (2 if MINIMUM else 1)
    DEEP: tl.constexpr = deep.shape[0]
    at = words + (own * INPUTS + deep * 4) * WORDS + e
    place = e // 16 * 4 + e % 4
    line_at = scales + (own * FOURS + deep) * LINE + place
    halves_at = line_at
    if STEPS:
        halves_at = halves + (own * FOURS + deep) * 32 + place
    total = tl.zeros(SHAPE, tl.float32)
    four = _four(at, line_at, halves_at, 0, deep, INPUTS, EVEN, FORM, GROUP, STEPS, MINIMUM)
    for q in range(0, FOURS, 2 * DEEP):  # two steps: one loads while the other computes
        other = _four(at, line_at, halves_at, q + DEEP, deep, INPUTS, False, FORM, GROUP, STEPS, MINIMUM)
        begun()
        total = _added(total, four, xs, q, deep, K, EVEN, FORM, GROUP, STEPS, MINIMUM, HALF)
        if q + DEEP < FOURS:
            four = _four(at, line_at, halves_at, q + 2 * DEEP, deep, INPUTS, False, FORM, GROUP, STEPS, MINIMUM)
            begun()
            total = _added(total, other, xs, q + DEEP, deep, K, EVEN, FORM, GROUP, STEPS, MINIMUM, HALF)
    return tl.sum(total, 0)


@triton.jit
def _first_words(e, GROUP: tl.constexpr):
    """Where a lane's words of inputs are: eight inputs beside each other, or four in each group of 16."""
    q = e // 4 % 4
    if GROUP == 32:
        return q * 4 + e % 4
    else:
        return e % 4 // 2 * 8 + q * 2 + e % 2


@triton.jit
def _strip_matmul(
    x, words, scales, halves, y, bias, order, blocks, n, strips, x_row,
    PER: tl.constexpr, K: tl.constexpr, FACTOR: tl.constexpr, PAIRED: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, CLAMP: tl.constexpr, ALPHA: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    COLS: tl.constexpr, DEEP: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, MINIMUM: tl.constexpr, HALF: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    STRIP: tl.constexpr = (K + 63) // 64 * (256 if FORM == "int8" else 128)  # words
    OWN: tl.constexpr = GROUPS * PARTS
    deep = tl.arange(0, DEEP)[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None, None]
    e = tl.arange(0, 128)[None, None, None, None, :]
    block = tl.program_id(0)
    wait(AHEAD)
    if blocks is None:
        expert, first, count = tl.load(order + block).to(tl.int64), block, 1
    else:
        count = tl.load(blocks + block * 3 + 2)
        if count == 0:
            return
        expert, first = tl.load(blocks + block * 3).to(tl.int64), tl.load(blocks + block * 3 + 1)
    if AHEAD and GROUPS == 1:
        begin = expert * strips + tl.program_id(1) * PARTS
        prefetch(words + begin * STRIP, tl.minimum(PARTS, strips - tl.program_id(1) * PARTS) * (4 * STRIP))
    # Missing strips and rows repeat the last one; their results are not stored.
    strip = tl.minimum(tl.program_id(1) * OWN + group * PARTS + part, strips - 1)
    row = tl.minimum(tl.arange(0, COLS)[None, None, None, :, None] * 8 + e // 16, count - 1)
    pair = first + row
    if blocks is not None:
        pair = _loaded_in_place(order + pair)
    begin = tl.multiple_of(tl.max_constancy((pair // PER) * x_row, [1, 1, 1, 1, 16]), [1, 1, 1, 1, 16])
    xs = begin + deep * 128 + _first_words(e, GROUP)
    xs = x + tl.broadcast_to(xs, (DEEP, GROUPS, 1, COLS, 128))  # every warp loads its own inputs
    values = _sums(
        xs, words, scales, halves, expert * strips + strip, deep, e, K, (DEEP, GROUPS, PARTS, COLS, 128), EVEN,
        FORM, GROUP, STEPS, MINIMUM, HALF,
    )  # fmt: skip
    values = tl.reshape(values, (OWN, COLS, 128)) * FACTOR
    _store(values, y, bias, order, expert, first, count, n, blocks is None, PAIRED, GATED, KIND, CLAMP, ALPHA)


@triton.jit
def _store(
    values, y, bias, order, expert, first, count, n,
    ALONE: tl.constexpr, PAIRED: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr,
    ALPHA: tl.constexpr,
):  # fmt: skip
    """Stores a program's sums [strips, COLS, 128] of pairs, that are alone or in order, with biases and gates."""
    OWN: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    strip = tl.program_id(1) * OWN + tl.arange(0, OWN)
    if PAIRED:
        lane, odd = tl.arange(0, 32)[None, None, :, None], tl.arange(0, 2)[None, None, None, :]
        values, up = tl.split(tl.permute(tl.reshape(values, (OWN, COLS, 32, 2, 2)), (0, 1, 2, 4, 3)))
        output = strip[:, None, None, None] * 8 + lane // 4
        row = tl.arange(0, COLS)[None, :, None, None] * 8 + lane % 4 * 2 + odd
    else:
        c = tl.arange(0, 128)[None, None, :]
        output = strip[:, None, None] * 16 + c // 16 + c % 4 // 2 * 8
        row = tl.arange(0, COLS)[None, :, None] * 8 + c // 4 % 4 * 2 + c % 2
    outputs = 2 * n if PAIRED else n
    pair = first + row if ALONE else tl.load(order + first + row, mask=row < count, other=0)
    if bias is not None:
        own = bias + expert * outputs + output
        values += tl.load(own, mask=output < n, other=0.0).to(tl.float32)
    there, place = (row < count) & (output < n), y + pair.to(tl.int64) * (n if GATED else outputs) + output
    if PAIRED:
        if bias is not None:
            up += tl.load(own + n, mask=output < n, other=0.0).to(tl.float32)
        if GATED:
            values = gated_pair(values, up, KIND, CLAMP, ALPHA)
        else:
            tl.store(place + n, up.to(y.dtype.element_ty), mask=there)
    tl.store(place, values.to(y.dtype.element_ty), mask=there)


@triton.jit
def _strip_add_down(
    x, words, scales, halves, y, bias, chosen, weights, n, strips, x_row,
    K: tl.constexpr, FACTOR: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr, DEEP: tl.constexpr,
    EVEN: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, MINIMUM: tl.constexpr,
    HALF: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A program for each strip, whose warps divide the experts and the inputs."""
    launch_next(AHEAD)
    STRIP: tl.constexpr = (K + 63) // 64 * (256 if FORM == "int8" else 128)  # words
    deep = tl.arange(0, DEEP)[:, None, None, None, None]
    slot = tl.arange(0, SLOTS)[None, :, None, None, None]
    e = tl.arange(0, 128)[None, None, None, None, :]
    strip = tl.program_id(0)
    wait(AHEAD)
    if AHEAD:
        for j in tl.static_range(PAIRS):
            prefetch(words + (tl.load(chosen + j).to(tl.int64) * strips + strip) * STRIP, 4 * STRIP)
    own = _loaded_in_place(chosen + tl.minimum(slot, PAIRS - 1)).to(tl.int64) * strips + strip
    xs = x + tl.minimum(slot, PAIRS - 1) * x_row + deep * 128 + _first_words(e, GROUP)
    values = _sums(
        xs, words, scales, halves, own, deep, e, K, (DEEP, SLOTS, 1, 1, 128), EVEN, FORM, GROUP, STEPS, MINIMUM, HALF
    )  # fmt: skip
    values = tl.reshape(values, (SLOTS, 8, 4, 2, 2)) * FACTOR  # experts, r, q, h, one of two rows
    values = tl.reshape(tl.sum(tl.sum(tl.where(_first_row(), values, 0.0), 4), 2), (SLOTS, 16))  # r, h
    j, o = tl.arange(0, SLOTS)[:, None], tl.arange(0, 16)
    output = strip * 16 + o // 2 + o % 2 * 8
    live = (j < PAIRS) & (output < n)[None, :]
    if bias is not None:
        expert = tl.load(chosen + j, mask=j < PAIRS, other=0).to(tl.int64)
        values += tl.load(bias + expert * n + output[None, :], mask=live, other=0.0).to(tl.float32)
    values = tl.where(live, values * tl.load(weights + j, mask=j < PAIRS, other=0.0), 0.0)
    result = tl.sum(values, 0) + tl.load(y + output, mask=output < n, other=0.0).to(tl.float32)
    tl.store(y + output, result.to(y.dtype.element_ty), mask=output < n)


@triton.jit
def _first_row():
    """Of sums [experts, r, q, h, i], whose row is 2q + i, those of row 0."""
    q, i = tl.arange(0, 4)[None, None, :, None, None], tl.arange(0, 2)[None, None, None, None, :]
    return (q == 0) & (i == 0)
