"""Fused row-wise kernels between matmuls: embedding, residual + norm, q/k norm + rope + KV-cache write, gate × up.

What a layer has that Llama's has not is a constant of the compiled kernel, or a tensor in place of None: for Llama's
layers the kernels are as if it were not there.

All compute in float32 and round once, to the output dtype; the functions in `headway.kernels.reference` round after
every operation.
"""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0915, PLR0917
from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.fp8.scaled_rows import Unscaled
from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.layout import POSITION, TOKEN, WRITE


def angles(ints: Tensor, rows: int, out: Tensor, inv_freq: Tensor, scale: float) -> None:
    """cos and sin of each row's angles into out [T, 2, rope dim / 2] float32."""
    half = inv_freq.shape[0]
    _angles[(out.shape[0],)](ints, out, inv_freq, rows, scale, FIELD=POSITION, HALF=half, WIDE=_wide(half), num_warps=1)


def embed(
    ints: Tensor,
    rows: int,
    table: Tensor,
    x: Tensor,
    sampled: Tensor,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
) -> None:
    """The embedding of each row's token from table [V, E] into x [T, E]. Token -1 - i stands for `sampled`[i].

    It is multiplied by `scale`; the row of `positions` [P, E] for the row's position is added.
    """
    e = table.shape[1]
    block = min(1024, _wide(e))
    _embed[(x.shape[0], triton.cdiv(e, block))](
        ints, table, x, sampled, positions, rows, FIELD=TOKEN, AT=POSITION, E=e, SCALE=scale, BLOCK=block, num_warps=4
    )


@dataclass(frozen=True, eq=False)
class RowNorm:
    """A norm of rows: its weights and bias [E], and its kind: rms, rms+1 (weights count from 1) or layer."""

    weight: Tensor
    eps: float
    kind: str = "rms"
    bias: Tensor | None = None


def norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    add: Tensor | None = None,
    rows: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """The root-mean-square norm of x [T, E] times weight into out [T, E].

    `add` [T, E] is first added to x in place. With `rows` [T] int32, row i of out is computed from x[rows[i]].
    """
    e, block = x.shape[1], _wide(x.shape[1])
    _norm[(out.shape[0],)](
        x, x if add is None else add, weight, None, out, x if rows is None else rows, None, None, None, eps,
        ADD=add is not None, CHOSEN=rows is not None, KIND="rms", NORMED=True, SCALE=1.0, OLD=False, E=e, BLOCK=block,
        AHEAD=ahead, num_warps=_warps(block), **options(ahead),
    )  # fmt: skip


def add_and_norm(
    x: Tensor,
    out: Tensor | None,
    how: RowNorm | None,
    *,
    add: Tensor | None = None,
    after: RowNorm | None = None,
    scale: float = 1.0,
    old: bool = False,
    rows: Tensor | None = None,
    factor: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """`add` [T, E], itself normed by `after` and times `scale`, is added to x [T, E] in place; then x is normed into
    out, or with `old` what x was before. Without `how` nothing is normed. `rows` is as in `norm`. The sum is multiplied
    by a `factor` [1]."""
    e, block, some = x.shape[1], _wide(x.shape[1]), how or after
    eps = 0.0 if some is None else some.eps
    assert how is None or after is None or (how.eps, how.kind) == (after.eps, after.kind)
    target = x if out is None else out
    _norm[(target.shape[0],)](
        x, x if add is None else add, None if how is None else how.weight, None if how is None else how.bias, target,
        x if rows is None else rows, None if after is None else after.weight, None if after is None else after.bias,
        factor, eps, ADD=add is not None, CHOSEN=rows is not None, KIND="rms" if some is None else some.kind,
        NORMED=how is not None, SCALE=scale, OLD=old, E=e, BLOCK=block, AHEAD=ahead, num_warps=_warps(block),
        **options(ahead),
    )  # fmt: skip


def norm_projections(qkv: Tensor, heads: HeadConfig, *, ahead: bool = False) -> None:
    """Norm the queries of each row of qkv [T, (H + 2 Hkv) D] in place, all heads together, and the keys likewise."""
    assert heads.q_norm is not None
    assert heads.k_norm is not None
    queries, keys = heads.heads * heads.dim, heads.kv_heads * heads.dim
    block = _wide(queries)
    _norm_projections[(qkv.shape[0], 2)](
        qkv, heads.q_norm, heads.k_norm, heads.eps, QUERIES=queries, KEYS=keys, WIDTH=qkv.shape[1],
        KIND=heads.kind, BLOCK=block, AHEAD=ahead, num_warps=_warps(block), **options(ahead),
    )  # fmt: skip


def finish_logits(logits: Tensor, bias: Tensor | None, scale: float, cap: float | None) -> None:
    """Add a bias [V] to logits [R, V] float32, scale them, and bound them softly by a cap, in place."""
    block = 1024
    _finish_logits[(logits.shape[0], triton.cdiv(logits.shape[1], block))](
        logits, bias, logits.shape[1], SCALE=scale, CAP=cap or 0.0, BLOCK=block, num_warps=4
    )


def clear(pool: Tensor, pages: Tensor) -> None:
    """Zero whole pages of pool [L, 2, P, numbers of a page], in one launch however large the pool is."""
    layers, two, total, size = pool.shape
    block = min(4096, _wide(size))
    _clear[(len(pages), layers * two, triton.cdiv(size, block))](
        pool, pages, total, SIZE=size, BLOCK=block, num_warps=4
    )


def add(x: Tensor, delta: Tensor) -> None:
    """x [T, E] += delta."""
    block = 1024
    _add[(triton.cdiv(x.numel(), block),)](x, delta, x.numel(), BLOCK=block, num_warps=4)


@dataclass(frozen=True, eq=False)
class HeadConfig:
    """A layer's head counts and sizes, and the norms of its queries and keys, if any.

    The weights of a norm are [D], or [H, D] with `each`; with `by_row` it is over all heads and `norm_projections`
    computes it. Before a norm by head and after one by row, numbers are clipped. Queries of a layer with a
    `temperature` (floor and scale) grow with their position. `values` are as they are, or normed without weights, or
    keys before their norm, normed so. Without `kv_heads` there are queries alone.
    """

    heads: int
    kv_heads: int
    dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    kind: str = "rms"
    each: bool = False
    by_row: bool = False
    clip: float = 0.0
    temperature: tuple[float, float] | None = None
    values: Literal["plain", "normed", "keys"] = "plain"


def rotate_and_write(
    qkv: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ints: Tensor,
    rows: int,
    cs: Tensor | None,
    how: HeadConfig,
    ahead: bool = False,
    unscaled: Unscaled | None = None,
) -> None:
    """From qkv [T, (H + 2 Hkv) D]: normed and rotated queries into q [T, H, D], keys and values into the KV cache.
    Where values are keys, it is [T, (H + Hkv) D].

    keys and values are [P, page, Hkv, D], cs is the output of `angles`, None without a rotation. Rows whose WRITE is
    -1 are not cached. `unscaled` has the scales of qkv, if they are not applied yet.
    """
    total = how.heads + 2 * how.kv_heads
    more = Unscaled(qkv, qkv, qkv) if unscaled is None else unscaled
    some = how.q_norm if how.q_norm is not None else qkv
    floor, growth = how.temperature or (0.0, 0.0)
    group = min(16, triton.next_power_of_2(total))
    _rotate[(q.shape[0], triton.cdiv(total, group))](
        qkv, more.rows, more.outputs, qkv if more.bias is None else more.bias,
        q, keys, values, ints, cs, some, how.k_norm if how.k_norm is not None else qkv, rows, how.eps,
        keys.stride(0), keys.stride(1), keys.stride(2),
        FIELD=WRITE, SCALED=unscaled is not None, BIAS=more.bias is not None,
        NORMED=how.q_norm is not None and not how.by_row, KIND=how.kind, EACH=how.each, CLIP=how.clip,
        VALUES=how.values, FLOOR=floor, GROWTH=growth, AT=POSITION, H=how.heads, KV=how.kv_heads, DIM=how.dim,
        WIDE=_wide(how.dim), HALF=0 if cs is None else cs.shape[2], PAGE=keys.shape[1], GROUP=group, AHEAD=ahead,
        num_warps=4, **options(ahead),
    )  # fmt: skip


def gated(gate_up: Tensor, out: Tensor, *, kind: str = "silu", alone: bool = False, ahead: bool = False) -> None:
    """The activation of gate, times up, of gate_up [T, 2F] into out [T, F]; `alone` is that of [T, F], without up."""
    t, f = out.shape
    block = 1024
    _gated[(t, triton.cdiv(f, block))](
        gate_up, out, KIND=kind, ALONE=alone, F=f, BLOCK=block, AHEAD=ahead, num_warps=4, **options(ahead)
    )


def _wide(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _angles(ints, out, inv_freq, rows, scale, FIELD: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, WIDE)
    at = tl.load(ints + FIELD * rows + row).to(tl.float32)
    angle = at * tl.load(inv_freq + i, mask=i < HALF, other=0.0)
    tl.store(out + row * 2 * HALF + i, tl.cos(angle) * scale, mask=i < HALF)
    tl.store(out + row * 2 * HALF + HALF + i, tl.sin(angle) * scale, mask=i < HALF)


@triton.jit
def _embed(
    ints, table, x, sampled, positions, rows,
    FIELD: tl.constexpr, AT: tl.constexpr, E: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ints + FIELD * rows + row).to(tl.int64)
    if token < 0:
        token = tl.maximum(tl.load(sampled - 1 - token).to(tl.int64), 0)  # a row without a token: its result is unused
    place = x + row.to(tl.int64) * E + i
    v = tl.load(table + token * E + i, mask=i < E, other=0.0)
    if SCALE != 1.0:
        v = (v.to(tl.float32) * SCALE).to(v.dtype)
    if positions is not None:
        at = tl.load(ints + AT * rows + row).to(tl.int64)
        v = (v.to(tl.float32) + tl.load(positions + at * E + i, mask=i < E, other=0.0).to(tl.float32)).to(v.dtype)
    tl.store(place, v, mask=i < E)


@triton.jit
def unit(wide, there, eps, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Numbers of unit mean square, or of mean 0 and variance 1; those that are not there are 0."""
    if KIND == "layer":
        wide = tl.where(there, wide - tl.sum(wide, 0) / SIZE, 0.0)
    return wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)


@triton.jit
def loaded(weight, i, there, KIND: tl.constexpr):
    """The weights of a norm, which some count from 1."""
    w = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    return w + 1.0 if KIND == "rms+1" else w


@triton.jit
def _norm(
    x, delta, weight, bias, out, rows, after, after_bias, factor, eps,
    ADD: tl.constexpr, CHOSEN: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr, SCALE: tl.constexpr,
    OLD: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if NORMED:
        w = loaded(weight, i, i < E, KIND)
    wait(AHEAD)
    source = tl.load(rows + row).to(tl.int64) if CHOSEN else row
    v = tl.load(x + source * E + i, mask=i < E, other=0.0)
    if ADD:
        d = tl.load(delta + source * E + i, mask=i < E, other=0.0).to(tl.float32)
        if after is not None:
            d = unit(d, i < E, eps, E, KIND) * loaded(after, i, i < E, KIND)
            if after_bias is not None:
                d += tl.load(after_bias + i, mask=i < E, other=0.0).to(tl.float32)
        if SCALE != 1.0:
            d = d * SCALE
        total = (v.to(tl.float32) + d).to(v.dtype)
        if factor is not None:
            total = (total.to(tl.float32) * tl.load(factor).to(tl.float32)).to(v.dtype)
        tl.store(x + source * E + i, total, mask=i < E)
        if not OLD:
            v = total
    if NORMED:
        wide = unit(v.to(tl.float32), i < E, eps, E, KIND) * w
        if bias is not None:
            wide += tl.load(bias + i, mask=i < E, other=0.0).to(tl.float32)
        tl.store(out + row * E + i, wide.to(out.dtype.element_ty), mask=i < E)


@triton.jit
def _norm_projections(
    qkv, q_norm, k_norm, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    i, at = tl.arange(0, BLOCK), qkv + tl.program_id(0).to(tl.int64) * WIDTH
    if tl.program_id(1) == 0:
        there = i < QUERIES
        wide = tl.load(at + i, mask=there, other=0.0).to(tl.float32)
        wide = unit(wide, there, eps, QUERIES, KIND) * loaded(q_norm, i, there, KIND)
        tl.store(at + i, wide.to(qkv.dtype.element_ty), mask=there)
    else:
        there = i < KEYS
        wide = tl.load(at + QUERIES + i, mask=there, other=0.0).to(tl.float32)
        wide = unit(wide, there, eps, KEYS, KIND) * loaded(k_norm, i, there, KIND)
        tl.store(at + QUERIES + i, wide.to(qkv.dtype.element_ty), mask=there)


@triton.jit
def _finish_logits(logits, bias, v, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + tl.program_id(0).to(tl.int64) * v + i
    y = tl.load(at, mask=i < v, other=0.0)
    if bias is not None:
        y += tl.load(bias + i, mask=i < v, other=0.0).to(tl.float32)
    y = y * SCALE
    if CAP > 0:  # tanh(y) = 1 - 2 / (exp(2y) + 1)
        y = CAP * (1.0 - 2.0 / (tl.exp(y * (2.0 / CAP)) + 1.0))
    tl.store(at, y, mask=i < v)


@triton.jit
def _clear(pool, pages, total, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    page, part = tl.load(pages + tl.program_id(0)), tl.program_id(1).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), pool.dtype.element_ty)
    tl.store(pool + (part * total + page) * SIZE + i, zeros, mask=i < SIZE)


@triton.jit
def _add(x, delta, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < count, other=0.0)
    v = v.to(tl.float32) + tl.load(delta + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(x + i, v.to(x.dtype.element_ty), mask=i < count)


@triton.jit
def _rotate(
    qkv, row_scales, output_scales, bias, q, keys, values, ints, cs, q_norm, k_norm, rows, eps,
    page_stride, slot_stride, head_stride,
    FIELD: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    NORMED: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr, CLIP: tl.constexpr, VALUES: tl.constexpr,
    FLOOR: tl.constexpr, GROWTH: tl.constexpr, AT: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, h, d = tl.program_id(0), tl.program_id(1) * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDE)
    # Dimension i < HALF is rotated with i + HALF; those from 2 HALF on stay unchanged.
    turned = d < 2 * HALF
    pair = tl.where(d < HALF, d + HALF, d - HALF)
    if VALUES == "keys":
        base = qkv + row.to(tl.int64) * ((H + KV) * DIM) + tl.where(h < H + KV, h, h - KV)[:, None] * DIM
    else:
        base = qkv + row.to(tl.int64) * ((H + 2 * KV) * DIM) + h[:, None] * DIM
    live = (h < H + 2 * KV)[:, None] & (d < DIM)[None, :]
    a = tl.load(base + d[None, :], mask=live, other=0.0).to(tl.float32)
    b = tl.load(base + pair[None, :], mask=live & turned[None, :], other=0.0).to(tl.float32)
    if SCALED:
        output, scale = h[:, None] * DIM, tl.load(row_scales + row)
        a = a * scale * tl.load(output_scales + output + d[None, :], mask=live, other=0.0)
        b = b * scale * tl.load(output_scales + output + pair[None, :], mask=live & turned[None, :], other=0.0)
        if BIAS:
            a += tl.load(bias + output + d[None, :], mask=live, other=0.0).to(tl.float32)
            b += tl.load(bias + output + pair[None, :], mask=live & turned[None, :], other=0.0).to(tl.float32)
    if CLIP > 0:
        a, b = tl.minimum(tl.maximum(a, -CLIP), CLIP), tl.minimum(tl.maximum(b, -CLIP), CLIP)
    if NORMED:
        queries, moved = (h < H)[:, None], (h < H + KV)[:, None]
        if EACH:
            own = (h - H)[:, None]
            wq = tl.load(q_norm + h[:, None] * DIM + d[None, :], mask=queries & live, other=0.0).to(tl.float32)
            wk = tl.load(k_norm + own * DIM + d[None, :], mask=(own >= 0) & moved & live, other=0.0).to(tl.float32)
            pq = tl.load(q_norm + h[:, None] * DIM + pair[None, :], mask=queries & turned[None, :], other=0.0)
            pk = tl.load(k_norm + own * DIM + pair[None, :], mask=(own >= 0) & moved & turned[None, :], other=0.0)
            pq, pk = pq.to(tl.float32), pk.to(tl.float32)
        else:
            wq = loaded(q_norm, d, d < DIM, KIND)[None, :]
            wk = loaded(k_norm, d, d < DIM, KIND)[None, :]
            pq = loaded(q_norm, pair, turned, KIND)[None, :]
            pk = loaded(k_norm, pair, turned, KIND)[None, :]
        if KIND == "layer":
            mean = (tl.sum(a, 1) / DIM)[:, None]
            lined = tl.where(moved, mean, 0.0)
            a, b = tl.where(live, a - lined, 0.0), tl.where(live & turned[None, :], b - lined, 0.0)
        size = tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
        if VALUES == "plain":
            a = tl.where(moved, a * size * tl.where(queries, wq, wk), a)
        else:
            a = a * size * tl.where(queries, wq, tl.where(moved, wk, 1.0))
        b = tl.where(moved, b * size * tl.where(queries, pq, pk), b)
    if HALF > 0:
        i = tl.where(d < HALF, d, d - HALF)
        cos = tl.load(cs + row * 2 * HALF + i, mask=turned, other=1.0)
        sin = tl.load(cs + row * 2 * HALF + HALF + i, mask=turned, other=0.0)
        sin = tl.where(d < HALF, -sin, sin)
        a = tl.where((h < H + KV)[:, None], a * cos[None, :] + b * sin[None, :], a)
    if FLOOR > 0:
        at = tl.load(ints + AT * rows + row).to(tl.float32)
        grown = 1.0 + GROWTH * tl.log(1.0 + tl.floor((at + 1.0) / FLOOR))
        a = tl.where((h < H)[:, None], a * grown, a)
    r = a.to(q.dtype.element_ty)
    tl.store(q + row.to(tl.int64) * (H * DIM) + h[:, None] * DIM + d[None, :], r, mask=live & (h < H)[:, None])
    slot = tl.load(ints + FIELD * rows + row)
    if slot >= 0:
        place = (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
        k = h - H
        tl.store(keys + place + k[:, None] * head_stride + d[None, :], r, mask=live & ((k >= 0) & (k < KV))[:, None])
        v = h - H - KV
        tl.store(values + place + v[:, None] * head_stride + d[None, :], r, mask=live & ((v >= 0) & (v < KV))[:, None])


@triton.jit
def activated(x, KIND: tl.constexpr):
    """silu, gelu or gelu_tanh of float32 numbers."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")  # 0.5 × (1 + tanh y) is the sigmoid of 2y
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _gated(
    gate_up, out, KIND: tl.constexpr, ALONE: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width: tl.constexpr = F if ALONE else 2 * F
    gate = tl.load(gate_up + row * width + i, mask=i < F, other=0.0).to(tl.float32)
    if ALONE:
        y = activated(gate, KIND)
    else:
        up = tl.load(gate_up + row * width + F + i, mask=i < F, other=0.0).to(tl.float32)
        y = activated(gate, KIND) * up
    tl.store(out + row * F + i, y.to(out.dtype.element_ty), mask=i < F)
