"""Experts: which of them a row goes to, the order of (row, expert) pairs by expert, a matmul of each expert's rows, and
the weighted sum of what they give.

A pair is one row at one of its experts: pair i × k + j is row i at its j-th. Few pairs are multiplied one by one, each
by the matrices of its expert. Many are first put in the order of their experts and cut in blocks of one expert's rows;
there are as many programs as there could be blocks, so that a captured graph serves any routing, and those without rows
end at once. The bits of a pair depend on its row and the tile, not on which pairs are beside it.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
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
        K=routes.chosen.shape[1], NORMALIZE=normalize, SIGMOID=sigmoid, AHEAD=ahead, num_warps=1, **options(ahead),
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
    weight: Tensor,
    y: Tensor,
    routes: Routes,
    tile: MatmulTile,
    *,
    bias: Tensor | None = None,
    by: ExpertBlocks | None = None,
    gate: ExpertGate | None = None,
    weighted: bool = False,
    ahead: bool = False,
) -> None:
    """Rows x by the matrices [X, N, K] of their experts, with biases [X, N], into y [T × k, M], a row for each pair.

    x has a row for each of T rows, or for each pair. With a `gate` N is 2 M, gate above up. With `weighted` each row is
    first multiplied by its weight. Without blocks every pair is multiplied by itself.
    """
    pairs, n, k = routes.chosen.numel(), y.shape[1], x.shape[1]
    assert weight.is_contiguous() and x.stride(1) == 1  # noqa: PT018
    blocks = pairs if by is None else len(by.blocks)
    how = gate or ExpertGate("")
    _expert_matmul[(blocks, triton.cdiv(n, tile.outputs))](
        x, weight, y, bias, routes.chosen if by is None else by.order, None if by is None else by.blocks,
        routes.weights if weighted else None, n, k, x.stride(0),
        PER=pairs // x.shape[0], GATED=gate is not None, KIND=how.activation, CLAMP=how.clamp or 0.0, ALPHA=how.alpha,
        EVEN=k % tile.inputs == 0 and n % tile.outputs == 0, BM=tile.rows, BN=tile.outputs, BK=tile.inputs,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", AHEAD=ahead,
        num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
    )  # fmt: skip


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


def pick_expert_tile(rows: float, dtype: torch.dtype) -> MatmulTile:
    """A tile for experts of about so many rows each."""
    if dtype == torch.float32:
        return MatmulTile(16, 32, 32, stages=2)
    if rows <= 16:
        return MatmulTile(16, 64, 128, stages=4)
    if rows <= 48:
        return MatmulTile(32, 64, 128, stages=3)
    return MatmulTile(64, 64, 64) if rows <= 96 else MatmulTile(128, 64, 64, warps=8)


@triton.jit
def _route(
    logits, chosen, weights,
    X: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, x = tl.program_id(0), tl.arange(0, WIDE)
    given = tl.load(logits + row.to(tl.int64) * X + x, mask=x < X, other=float("-inf")).to(tl.float32)
    highest = tl.max(given, 0)
    whole = tl.sum(tl.exp(given - highest), 0)  # of all experts, or of those that are chosen
    free = x < X
    if NORMALIZE:
        whole = 0.0
        for _ in tl.static_range(K):
            best = tl.max(tl.where(free, given, float("-inf")), 0)
            place = tl.min(tl.where(free & (given == best), x, X - 1), 0)
            free = free & (x != place)
            whole += tl.exp(best - highest)
        free = x < X
    for j in tl.static_range(K):
        best = tl.max(tl.where(free, given, float("-inf")), 0)
        place = tl.min(tl.where(free & (given == best), x, X - 1), 0)  # of a NaN, some expert
        free = free & (x != place)
        weight = 1.0 / (1.0 + tl.exp(-best)) if SIGMOID else tl.exp(best - highest) / whole
        tl.store(chosen + row * K + j, place)
        tl.store(weights + row * K + j, weight)


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
def _expert_matmul(
    x, weight, y, bias, order, blocks, weights, n, K, x_row,
    PER: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr, ALPHA: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
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
    xs = x + (pair // PER).to(tl.int64)[:, None] * x_row + c[None, :]
    outputs = 2 * n if GATED else n
    ws = weight + (expert * outputs + o)[:, None] * K + c[None, :]
    us = ws + n.to(tl.int64) * K
    given = tl.zeros((BM,), tl.float32)
    if weights is not None:
        given += tl.load(weights + pair, mask=there, other=0.0).to(x.dtype.element_ty).to(tl.float32)
    total = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if EVEN:
            a = tl.load(xs + k, mask=there[:, None], other=0.0)
            b = tl.load(ws + k)
        else:
            a = tl.load(xs + k, mask=there[:, None] & (k + c < K)[None, :], other=0.0)
            b = tl.load(ws + k, mask=(o < n)[:, None] & (k + c < K)[None, :], other=0.0)
        if weights is not None:
            a = (a.to(tl.float32) * given[:, None]).to(a.dtype)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if GATED:
            if EVEN:
                b = tl.load(us + k)
            else:
                b = tl.load(us + k, mask=(o < n)[:, None] & (k + c < K)[None, :], other=0.0)
            up = tl.dot(a, tl.trans(b), up, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + expert * outputs + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias is not None:
            up += tl.load(bias + expert * outputs + n + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
        if CLAMP > 0:
            gate = tl.minimum(total, CLAMP)
            up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP)
            total = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
        else:
            total = activated(total, KIND) * up
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
