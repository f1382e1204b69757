"""Experts: which of them a row goes to, the order of (row, expert) pairs by expert, a matmul of each expert's rows, and
the weighted sum of what they give.

A pair is one row at one of its experts: pair i × k + j is row i at its j-th. Few pairs are multiplied one by one, each
by the matrices of its expert. Many are first put in the order of their experts and cut in blocks of one expert's rows;
there are as many programs as there could be blocks, so that a captured graph serves any routing, and those without rows
end at once. The bits of a pair depend on its row and the tile, not on which pairs are beside it.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.expert_form import FP4, ExpertForm
from headway.kernels.triton.fused import activated
from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.matmul import MatmulTile


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of rows [T, k] int32 and their weights [T, k] float32."""

    chosen: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class ExpertBlocks:
    """Pairs in the order of their experts [T × k] int32, and blocks [B, 3] int32: an expert, its first pair in that
    order and how many, 0 for a block that is not used."""

    order: Tensor
    blocks: Tensor


@dataclass(frozen=True, eq=False)
class ExpertOperand:
    """A matrix [N, K] for each of X experts, and biases [X, N] or none.

    Without a form `weight` [X, N, K] are floats. With one they are words, as `models.quantized.fp4` or `int_experts`
    stores them; scales of MXFP4 below 2^-125 may be taken for 0.
    """

    weight: Tensor
    bias: Tensor | None = None
    form: ExpertForm | None = None
    scales: Tensor | None = None
    halves: Tensor | None = None
    exponent: int = 0
    gated: bool = False


@dataclass(frozen=True)
class ExpertGate:
    """What is made of gate and up: the activation of gate times up; with a `clamp` both are bounded, up counts from 1
    and the activation is gate × sigmoid(alpha × gate)."""

    activation: str
    clamp: float | None = None
    alpha: float = 1.0


def route(logits: Tensor, routes: Routes, *, normalize: bool, sigmoid: bool = False, ahead: bool = False) -> None:
    """The experts with the highest logits [T, X], ties to the lower, and their weights: probabilities over all experts,
    or with `normalize` over those that are chosen; with `sigmoid` that of each logit."""
    rows, experts = logits.shape
    _route[(rows,)](
        logits, routes.chosen, routes.weights, X=experts, WIDE=max(16, triton.next_power_of_2(experts)),
        K=routes.chosen.shape[1], SLOTS=max(2, triton.next_power_of_2(routes.chosen.shape[1])), NORMALIZE=normalize,
        SIGMOID=sigmoid, AHEAD=ahead, num_warps=1, **options(ahead),
    )  # fmt: skip


def route_by_groups(
    logits: Tensor,
    routes: Routes,
    *,
    score: str,
    groups: int,
    kept: int,
    best: int,
    correction: Tensor | None,
    normalize: bool,
    scale: float,
    each: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """The experts of logits [T, X] and their weights, as the reference's function of this name has them; `each`
    [X] are factors of weights."""
    rows, experts = logits.shape
    _route_by_groups[(rows,)](
        logits, routes.chosen, routes.weights, correction, each, X=experts,
        WIDE=max(16, triton.next_power_of_2(experts)), K=routes.chosen.shape[1],
        SLOTS=max(2, triton.next_power_of_2(routes.chosen.shape[1])), GROUPS=groups,
        GROUPS_WIDE=max(2, triton.next_power_of_2(groups)), KEPT=kept, BEST=best, SIGMOID=score == "sigmoid",
        NORMALIZE=normalize, SCALE=scale, AHEAD=ahead, num_warps=1, **options(ahead),
    )  # fmt: skip


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """How many blocks of at most so many rows there can be."""
    return min(pairs, pairs // rows + min(experts, pairs))


def sort_by_expert(chosen: Tensor, experts: int, into: ExpertBlocks, rows: int, *, ahead: bool = False) -> None:
    """Put the pairs of chosen experts [T, k] in order, in blocks of at most so many rows."""
    pairs = chosen.numel()
    assert len(into.blocks) == most_blocks(pairs, experts, rows)
    _sort[(experts,)](
        chosen, into.order, into.blocks, pairs, len(into.blocks), X=experts, BINS=triton.next_power_of_2(experts + 1),
        BM=rows, CHUNK=max(16, min(1024, triton.next_power_of_2(pairs))), AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip


def expert_matmul(
    x: Tensor,
    w: ExpertOperand,
    y: Tensor,
    routes: Routes,
    tile: MatmulTile,
    *,
    by: ExpertBlocks | None = None,
    gate: ExpertGate | None = None,
    weighted: bool = False,
    ahead: bool = False,
) -> None:
    """Rows x by the matrices of their experts, with biases, into y [T × k, M], a row for each pair.

    x has a row for each of T rows, or for each pair. With a `gate` N is 2 M, gate above up. With `weighted` each row is
    first multiplied by its weight. Without blocks every pair is multiplied by itself.
    """
    pairs, n, k = routes.chosen.numel(), y.shape[1], x.shape[1]
    assert w.weight.is_contiguous() and x.stride(1) == 1  # noqa: PT018
    assert gate is None or w.form is None or w.gated
    blocks = pairs if by is None else len(by.blocks)
    how = gate or ExpertGate("")
    _expert_matmul[(blocks, triton.cdiv(n, tile.outputs))](
        x, w.weight, w.scales, w.halves, y, w.bias, routes.chosen if by is None else by.order,
        None if by is None else by.blocks, routes.weights if weighted else None, n, k, x.stride(0),
        PER=pairs // x.shape[0], GATED=gate is not None, PAIRED=w.gated, KIND=how.activation, CLAMP=how.clamp or 0.0,
        ALPHA=how.alpha, FACTOR=2.0**w.exponent, EVEN=k % tile.inputs == 0 and n % tile.outputs == 0,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs, **form_options(w.form),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", AHEAD=ahead,
        num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
    )  # fmt: skip


def form_options(form: ExpertForm | None) -> dict[str, Any]:
    """What kernels are made for."""
    how = form or FP4
    kind = "float" if form is None else how.kind
    return {"FORM": kind, "GROUP": how.group, "STEPS": how.steps, "MINIMUM": how.minimum}


def combine(
    parts: Tensor,
    routes: Routes,
    out: Tensor,
    *,
    weighted: bool,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """The sum over experts of parts [T × k, E], weighted or as they are, into out [T, E]; and of `shared` [T, E], times
    the sigmoid of its gate [T, 1]."""
    rows, e = out.shape
    block = min(1024, max(16, triton.next_power_of_2(e)))
    _combine[(rows, triton.cdiv(e, block))](
        parts, routes.weights, out, shared, shared_gate, E=e, K=routes.chosen.shape[1], WEIGHTED=weighted, BLOCK=block,
        AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip


def pick_expert_tile(rows: float, dtype: torch.dtype, shared_memory: int) -> MatmulTile:
    """The fastest tile on an H200 for experts of about so many rows each.

    `shared_memory` is what a program may use, in bytes; a smaller device gets fewer stages.
    """
    if dtype == torch.float32:
        return MatmulTile(16, 32, 32, stages=2)
    if rows <= 16:
        tile = MatmulTile(16, 32, 128, warps=2)
    elif rows <= 96:
        tile = MatmulTile(32, 64, 128, stages=3) if rows <= 48 else MatmulTile(64, 128, 64, stages=3)
    else:
        tile = MatmulTile(128, 128, 64, warps=8, stages=3)
    stage = 2 * tile.inputs * (tile.rows + 2 * tile.outputs)
    return replace(tile, stages=max(1, min(tile.stages, shared_memory // stage)))


@triton.jit
def _route(
    logits, chosen, weights,
    X: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, x, slot = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, SLOTS)
    given = tl.load(logits + row.to(tl.int64) * X + x, mask=x < X, other=float("-inf")).to(tl.float32)
    ids, weight = choose(given, X, K, SLOTS, NORMALIZE, SIGMOID)
    tl.store(chosen + row * K + slot, ids, mask=slot < K)
    tl.store(weights + row * K + slot, weight, mask=slot < K)


@triton.jit
def choose(
    given, X: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr
):
    """The K highest of a row's logits, -inf beyond X, and their weights; see `route`."""
    x, slot = tl.arange(0, given.shape[0]), tl.arange(0, SLOTS)
    ids, picked = tl.zeros((SLOTS,), tl.int32), tl.full((SLOTS,), float("-inf"), tl.float32)
    numbers = tl.where(given != given, float("-inf"), given) + 0.0  # noqa: PLR0124 - of a NaN, some expert; no -0
    keys = tl.where(x < X, (_flipped(numbers.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (X - 1 - x), -(1 << 63))
    for j in tl.static_range(K):  # the number above, the place below, which is the smaller the higher
        best = tl.max(keys, 0)
        place = X - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        keys = tl.where(x == place, -(1 << 63), keys)
        number = _flipped((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        ids, picked = tl.where(slot == j, place, ids), tl.where(slot == j, number, picked)
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-picked))
    else:
        highest = tl.max(given, 0)
        weight = tl.exp(picked - highest)
        weight = weight / (tl.sum(weight, 0) if NORMALIZE else tl.sum(tl.exp(given - highest), 0))
    return ids, weight


@triton.jit
def _flipped(bits):
    """The bits of a float32 as an integer of the same order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _route_by_groups(
    logits, chosen, weights, correction, each,
    X: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_WIDE: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, x, slot = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, SLOTS)
    given = tl.load(logits + row.to(tl.int64) * X + x, mask=x < X, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-given))
    else:
        raised = tl.exp(given - tl.max(given, 0))
        scores = raised / tl.sum(raised, 0)
    ranked = scores
    if correction is not None:
        ranked += tl.load(correction + x, mask=x < X, other=0.0).to(tl.float32)
    free = x < X
    if KEPT < GROUPS:
        g = tl.arange(0, GROUPS_WIDE)
        own = (x // (X // GROUPS))[None, :] == g[:, None]
        members = tl.where(own, ranked[None, :], float("-inf"))
        totals = tl.zeros((GROUPS_WIDE,), tl.float32)
        for _ in tl.static_range(BEST):
            highest = tl.max(members, 1)
            place = tl.min(tl.where(members == highest[:, None], x[None, :], WIDE), 1)
            members = tl.where(x[None, :] == place[:, None], float("-inf"), members)
            totals += highest
        left = g < GROUPS
        for _ in tl.static_range(KEPT):
            highest = tl.max(tl.where(left, totals, float("-inf")), 0)
            left = left & (g != tl.min(tl.where(left & (totals == highest), g, GROUPS - 1), 0))
        free = free & (tl.max((own & ((g < GROUPS) & (left == 0))[:, None]).to(tl.int32), 0) > 0)
    ids, picked = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    for j in tl.static_range(K):
        best = tl.max(tl.where(free, ranked, float("-inf")), 0)
        place = tl.min(tl.where(free & (ranked == best), x, X - 1), 0)  # of a NaN, some expert
        free = free & (x != place)
        ids = tl.where(slot == j, place, ids)
        picked = tl.where(slot == j, tl.sum(tl.where(x == place, scores, 0.0), 0), picked)
    if NORMALIZE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    picked = picked * SCALE
    if each is not None:
        picked = picked * tl.load(each + ids, mask=slot < K, other=0.0).to(tl.float32)
    tl.store(chosen + row * K + slot, ids, mask=slot < K)
    tl.store(weights + row * K + slot, picked, mask=slot < K)


@triton.jit
def _sort(
    chosen, order, blocks, pairs, most,
    X: tl.constexpr, BINS: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A program for each expert: it counts the pairs of all, and places its own after those of the experts before."""
    launch_next(AHEAD)
    wait(AHEAD)
    e, i, x = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for base in range(0, pairs, CHUNK):
        ids = tl.load(chosen + base + i, mask=base + i < pairs, other=X)
        counts += tl.histogram(ids, BINS)
    counts = tl.where(x < X, counts, 0)
    full = (counts + BM - 1) // BM
    first, own = tl.sum(tl.where(x < e, counts, 0), 0), tl.sum(tl.where(x == e, counts, 0), 0)
    block, end = tl.sum(tl.where(x < e, full, 0), 0), tl.sum(tl.where(x <= e, full, 0), 0)
    at = first
    for base in range(0, pairs, CHUNK):
        own_here = (tl.load(chosen + base + i, mask=base + i < pairs, other=X) == e).to(tl.int32)
        tl.store(order + at + tl.cumsum(own_here, 0) - 1, base + i, mask=own_here > 0)
        at += tl.sum(own_here, 0)
    for base in range(block, end, CHUNK):
        b = base + i
        done = (b - block) * BM
        tl.store(blocks + b * 3, e + 0 * b, mask=b < end)
        tl.store(blocks + b * 3 + 1, first + done, mask=b < end)
        tl.store(blocks + b * 3 + 2, tl.minimum(own - done, BM), mask=b < end)
    if e == X - 1:
        for base in range(end, most, CHUNK):
            tl.store(blocks + (base + i) * 3 + 2, 0 * i, mask=base + i < most)


@triton.jit
def _float_sums(
    xs, weight, first, n, o, there, given, total, up, c, K,
    WEIGHTED: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over inputs of rows times float matrices, of gate or outputs and of up."""
    ws = weight + first[:, None] * K + c[None, :]
    us = ws + n.to(tl.int64) * K
    for k in range(0, K, BK):
        if EVEN:
            a = tl.load(xs + k, mask=there[:, None], other=0.0)
            b = tl.load(ws + k)
        else:
            a = tl.load(xs + k, mask=there[:, None] & (k + c < K)[None, :], other=0.0)
            b = tl.load(ws + k, mask=(o < n)[:, None] & (k + c < K)[None, :], other=0.0)
        if WEIGHTED:
            a = (a.to(tl.float32) * given[:, None]).to(a.dtype)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if GATED:
            if EVEN:
                b = tl.load(us + k)
            else:
                b = tl.load(us + k, mask=(o < n)[:, None] & (k + c < K)[None, :], other=0.0)
            up = tl.dot(a, tl.trans(b), up, input_precision=PRECISION)
    return total, up


@triton.jit
def _fp4(words, scales, strip, r, h: tl.constexpr, k, mask, K):
    """The inputs k of outputs r + 8 h of strips in MXFP4, as floats."""
    at = strip * ((K + 63) // 64) + k // 64
    word = tl.load(words + at * 128 + _place(r, k, 32), mask=mask, other=0)
    own = strip * ((K + 255) // 256) + k // 256
    f = tl.load(scales + own * 128 + r * 16 + k // 32 % 8 * 2 + h, mask=mask, other=0).to(tl.int32)
    bits, second = word >> k % 2 * 16, k // 2 % 2 == 1
    if h == 0:
        bits = tl.where(second, bits << 6, bits)
        sign, exponent, mantissa = bits >> 15, bits >> 7, bits >> 6
    else:
        sign = tl.where(second, bits >> 14, bits >> 12)
        exponent = tl.where(second, bits >> 10, bits >> 4)
        mantissa = tl.where(second, bits >> 13, bits >> 3)
    exponent, mantissa = exponent & 3, mantissa & 1
    doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << (tl.maximum(exponent, 1) - 1))
    signed = tl.where((sign & 1) == 1, -doubled, doubled).to(tl.float32)
    return signed * (tl.maximum(f - 127, 0) << 23).to(tl.float32, bitcast=True)  # 2^(e - 128)


@triton.jit
def _place(r, k, GROUP: tl.constexpr):
    """The word, of 128, that has input k of outputs r and perhaps r + 8."""
    q, t = k // 8 % 4, k // 4 % 2
    if GROUP == 16:
        q, t = k // 4 % 4, k // 16 % 2
    return (r * 4 + q) * 4 + k // 32 % 2 * 2 + t


@triton.jit
def _group_numbers(
    scales, halves, own, r, h: tl.constexpr, k, mask,
    GROUP: tl.constexpr, STEPS: tl.constexpr, MINIMUM: tl.constexpr, OF_MINIMUM: tl.constexpr,
):  # fmt: skip
    """The scales of inputs k of outputs r + 8 h, or their minima, in float32."""
    EACH: tl.constexpr = 16 if STEPS else 8  # numbers of a line
    LINES: tl.constexpr = 512 // GROUP // EACH
    at = k % 256 // GROUP * 2 + h
    line = own * (LINES * 2 if MINIMUM else LINES) + at // EACH + (LINES if OF_MINIMUM else 0)
    if STEPS:
        word = tl.load(scales + line * 32 + r * 4 + at % EACH // 4, mask=mask, other=0)
        step = (word << (24 - at % 4 * 8)) >> 24
        half = tl.load(halves + own * 32 + r * 4 + h + (2 if OF_MINIMUM else 0), mask=mask, other=0.0)
        return step.to(tl.float32) * half.to(tl.float32)
    else:
        word = tl.load(scales + line * 32 + r * 4 + at % EACH // 2, mask=mask, other=0)
        return (word >> at % 2 * 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _ints(
    words, scales, halves, strip, r, h: tl.constexpr, k, mask, K,
    FORM: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """The inputs k of outputs r + 8 h of strips in integers, as floats."""
    at, place = strip * ((K + 63) // 64) + k // 64, _place(r, k, GROUP)
    if FORM == "int8":
        word = tl.load(words + at * 256 + h * 128 + place, mask=mask, other=0)
        units = (word >> k % 4 * 8 & 255) - 128
    else:
        word = tl.load(words + at * 128 + place, mask=mask, other=0)
        units = (word >> (k // 2 % 2 * 8 + k % 2 * 16 + 4 * h) & 15) - (0 if MINIMUM else 8)
    own = strip * ((K + 255) // 256) + k // 256
    scale = _group_numbers(scales, halves, own, r, h, k, mask, GROUP, STEPS, MINIMUM, False)
    values = units.to(tl.float32) * scale
    if MINIMUM:
        values += _group_numbers(scales, halves, own, r, h, k, mask, GROUP, STEPS, MINIMUM, True)
    return values


@triton.jit
def _quantized_sums(
    xs, weight, scales, halves, expert, n, o, there, given, total, up, K,
    WEIGHTED: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, FACTOR: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """The same of quantized matrices, of which a strip has 16 outputs or, PAIRED, eight and those as far above them."""
    c, size = tl.arange(0, BK)[None, :], 16
    own, count, is_above = o, n, o % 16 >= 8
    if PAIRED:
        size, count = 8, n if GATED else n // 2
        own, is_above = o % count, o >= count
    strip, r = (expert * ((count + size - 1) // size) + own // size)[:, None], (own % 8)[:, None]
    for k in range(0, K, BK):
        here = k + c < K
        a, mask = tl.load(xs + k + c, mask=there[:, None] & here, other=0.0), (o < n)[:, None] & here
        if WEIGHTED:
            a = (a.to(tl.float32) * given[:, None]).to(a.dtype)
        if FORM == "fp4":
            b = _fp4(weight, scales, strip, r, 0, k + c, mask, K).to(a.dtype)
            other = _fp4(weight, scales, strip, r, 1, k + c, mask, K).to(a.dtype)
        else:
            b = _ints(weight, scales, halves, strip, r, 0, k + c, mask, K, FORM, GROUP, STEPS, MINIMUM).to(a.dtype)
            other = _ints(weight, scales, halves, strip, r, 1, k + c, mask, K, FORM, GROUP, STEPS, MINIMUM).to(a.dtype)
        if GATED:
            up = tl.dot(a, tl.trans(other), up, input_precision=PRECISION)
        else:
            b = tl.where(is_above[:, None], other, b)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total * FACTOR, up * FACTOR


@triton.jit
def gated_pair(gate, up, KIND: tl.constexpr, CLAMP: tl.constexpr, ALPHA: tl.constexpr):
    """What an expert makes of gate and up."""
    if CLAMP > 0:
        gate = tl.minimum(gate, CLAMP)
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        return activated(gate, KIND) * up


@triton.jit
def _expert_matmul(
    x, weight, scales, halves, y, bias, order, blocks, weights, n, K, x_row,
    PER: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr,
    ALPHA: tl.constexpr, FACTOR: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, MINIMUM: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    m, o, c = tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    block = tl.program_id(0)
    if blocks is None:
        expert = tl.load(order + block).to(tl.int64)
        there, pair = m < 1, block + 0 * m
    else:
        count = tl.load(blocks + block * 3 + 2)
        if count == 0:
            return
        expert, there = tl.load(blocks + block * 3).to(tl.int64), m < count
        pair = tl.load(order + tl.load(blocks + block * 3 + 1) + m, mask=there, other=0)
    xs = x + (pair // PER).to(tl.int64)[:, None] * x_row
    outputs = 2 * n if GATED else n
    first = expert * outputs + o  # row of the matrices of all experts
    given = tl.zeros((BM,), tl.float32)
    if weights is not None:
        given += tl.load(weights + pair, mask=there, other=0.0).to(x.dtype.element_ty).to(tl.float32)
    total = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    if FORM != "float":
        total, up = _quantized_sums(
            xs, weight, scales, halves, expert, n, o, there, given, total, up, K, weights is not None, GATED, PAIRED,
            FACTOR, BK, PRECISION, FORM, GROUP, STEPS, MINIMUM,
        )  # fmt: skip
    else:
        total, up = _float_sums(
            xs + c[None, :], weight, first, n, o, there, given, total, up, c, K, weights is not None, GATED, EVEN, BK,
            PRECISION,
        )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + expert * outputs + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias is not None:
            up += tl.load(bias + expert * outputs + n + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
        total = gated_pair(total, up, KIND, CLAMP, ALPHA)
    place = y + pair.to(tl.int64)[:, None] * n + o[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=there[:, None] & (o < n)[None, :])


@triton.jit
def _combine(
    parts, weights, out, shared, shared_gate,
    E: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        part = tl.load(parts + (row * K + j) * E + i, mask=i < E, other=0.0).to(tl.float32)
        total += part * tl.load(weights + row * K + j) if WEIGHTED else part
    if shared is not None:
        more = tl.load(shared + row * E + i, mask=i < E, other=0.0).to(tl.float32)
        if shared_gate is not None:
            more = more / (1.0 + tl.exp(-tl.load(shared_gate + row).to(tl.float32)))
        total += more
    tl.store(out + row * E + i, total.to(out.dtype.element_ty), mask=i < E)
