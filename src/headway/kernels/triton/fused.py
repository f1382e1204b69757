"""Fused row-wise kernels between matmuls: embedding, residual + norm, q/k norm + rope + KV-cache write, gate × up.

All compute in float32 and round once, to the output dtype; the functions in `headway.kernels.reference` round after
every operation.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.layout import POSITION, TOKEN, WRITE
from headway.kernels.triton.scaled_rows import Unscaled


def angles(ints: Tensor, rows: int, out: Tensor, inv_freq: Tensor, scale: float) -> None:
    """cos and sin of each row's angles into out [T, 2, rope dim / 2] float32."""
    half = inv_freq.shape[0]
    _angles[(out.shape[0],)](ints, out, inv_freq, rows, scale, FIELD=POSITION, HALF=half, WIDE=_wide(half), num_warps=1)


def embed(ints: Tensor, rows: int, table: Tensor, x: Tensor, sampled: Tensor) -> None:
    """The embedding of each row's token from table [V, E] into x [T, E]. Token -1 - i stands for `sampled`[i]."""
    e = table.shape[1]
    block = min(1024, _wide(e))
    _embed[(x.shape[0], triton.cdiv(e, block))](
        ints, table, x, sampled, rows, FIELD=TOKEN, E=e, BLOCK=block, num_warps=4
    )


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
        x, x if add is None else add, weight, out, x if rows is None else rows, eps,
        ADD=add is not None, CHOSEN=rows is not None, E=e, BLOCK=block, AHEAD=ahead,
        num_warps=_warps(block), **options(ahead),
    )  # fmt: skip


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
    """A layer's head counts and sizes, and the norms of its queries and keys, if any."""

    heads: int
    kv_heads: int
    dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def rotate_and_write(
    qkv: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ints: Tensor,
    rows: int,
    cs: Tensor,
    how: HeadConfig,
    ahead: bool = False,
    unscaled: Unscaled | None = None,
) -> None:
    """From qkv [T, (H + 2 Hkv) D]: normed and rotated queries into q [T, H, D], keys and values into the KV cache.

    keys and values are [P, page, Hkv, D], cs is the output of `angles`. Rows whose WRITE is -1 are not cached.
    `unscaled` has the scales of qkv, if they are not applied yet.
    """
    total = how.heads + 2 * how.kv_heads
    more = Unscaled(qkv, cs, cs) if unscaled is None else unscaled
    some = how.q_norm if how.q_norm is not None else qkv
    group = min(16, triton.next_power_of_2(total))
    _rotate[(q.shape[0], triton.cdiv(total, group))](
        qkv, more.rows, more.outputs, cs if more.bias is None else more.bias,
        q, keys, values, ints, cs, some, how.k_norm if how.k_norm is not None else qkv, rows, how.eps,
        keys.stride(0), keys.stride(1), keys.stride(2),
        FIELD=WRITE, SCALED=unscaled is not None, BIAS=more.bias is not None,
        NORMED=how.q_norm is not None, H=how.heads, KV=how.kv_heads, DIM=how.dim, WIDE=_wide(how.dim),
        HALF=cs.shape[2], PAGE=keys.shape[1], GROUP=group, AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip


def gated(gate_up: Tensor, out: Tensor, *, ahead: bool = False) -> None:
    """silu(gate) × up of gate_up [T, 2F] into out [T, F]."""
    t, f = out.shape
    block = 1024
    _gated[(t, triton.cdiv(f, block))](gate_up, out, F=f, BLOCK=block, AHEAD=ahead, num_warps=4, **options(ahead))


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
def _embed(ints, table, x, sampled, rows, FIELD: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ints + FIELD * rows + row).to(tl.int64)
    if token < 0:
        token = tl.maximum(tl.load(sampled - 1 - token).to(tl.int64), 0)  # a row without a token: its result is unused
    tl.store(x + row.to(tl.int64) * E + i, tl.load(table + token * E + i, mask=i < E, other=0.0), mask=i < E)


@triton.jit
def _norm(
    x, delta, weight, out, rows, eps,
    ADD: tl.constexpr, CHOSEN: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < E, other=0.0).to(tl.float32)
    wait(AHEAD)
    source = tl.load(rows + row).to(tl.int64) if CHOSEN else row
    v = tl.load(x + source * E + i, mask=i < E, other=0.0)
    if ADD:
        v = (v.to(tl.float32) + tl.load(delta + source * E + i, mask=i < E, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(x + source * E + i, v, mask=i < E)
    wide = v.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / E + eps) * w
    tl.store(out + row * E + i, wide.to(out.dtype.element_ty), mask=i < E)


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
    FIELD: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr, H: tl.constexpr,
    KV: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, h, d = tl.program_id(0), tl.program_id(1) * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDE)
    # Dimension i < HALF is rotated with i + HALF; those from 2 HALF on stay unchanged.
    turned = d < 2 * HALF
    pair = tl.where(d < HALF, d + HALF, d - HALF)
    base = qkv + row.to(tl.int64) * ((H + 2 * KV) * DIM) + h[:, None] * DIM
    live = (h < H + 2 * KV)[:, None] & (d < DIM)[None, :]
    a = tl.load(base + d[None, :], mask=live, other=0.0).to(tl.float32)
    b = tl.load(base + pair[None, :], mask=live & turned[None, :], other=0.0).to(tl.float32)
    if SCALED:
        own, scale = h[:, None] * DIM, tl.load(row_scales + row)
        a = a * scale * tl.load(output_scales + own + d[None, :], mask=live, other=0.0)
        b = b * scale * tl.load(output_scales + own + pair[None, :], mask=live & turned[None, :], other=0.0)
        if BIAS:
            a += tl.load(bias + own + d[None, :], mask=live, other=0.0).to(tl.float32)
            b += tl.load(bias + own + pair[None, :], mask=live & turned[None, :], other=0.0).to(tl.float32)
    if NORMED:
        wq = tl.load(q_norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        wk = tl.load(k_norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        pq = tl.load(q_norm + pair, mask=turned, other=0.0).to(tl.float32)[None, :]
        pk = tl.load(k_norm + pair, mask=turned, other=0.0).to(tl.float32)[None, :]
        size = tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
        queries, moved = (h < H)[:, None], (h < H + KV)[:, None]
        a = tl.where(moved, a * size * tl.where(queries, wq, wk), a)
        b = tl.where(moved, b * size * tl.where(queries, pq, pk), b)
    i = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cs + row * 2 * HALF + i, mask=turned, other=1.0)
    sin = tl.load(cs + row * 2 * HALF + HALF + i, mask=turned, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    r = tl.where((h < H + KV)[:, None], a * cos[None, :] + b * sin[None, :], a).to(q.dtype.element_ty)
    tl.store(q + row.to(tl.int64) * (H * DIM) + h[:, None] * DIM + d[None, :], r, mask=live & (h < H)[:, None])
    slot = tl.load(ints + FIELD * rows + row)
    if slot >= 0:
        place = (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
        k = h - H
        tl.store(keys + place + k[:, None] * head_stride + d[None, :], r, mask=live & ((k >= 0) & (k < KV))[:, None])
        v = h - H - KV
        tl.store(values + place + v[:, None] * head_stride + d[None, :], r, mask=live & ((v >= 0) & (v < KV))[:, None])


@triton.jit
def _gated(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * F + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=i < F, other=0.0).to(tl.float32)
    tl.store(out + row * F + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=i < F)
