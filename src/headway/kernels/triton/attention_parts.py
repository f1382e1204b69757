"""Attention in parts: keys brought together from pages, results over different keys merged, keys that rows share.

Whoever attends to all slots up to its own can attend to some of them here and to others there: with each result comes
the logarithm of its softmax's sum (log-sum-exp), or the sum and its peak, by which the results are weighted.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.triton.attention import LOG2E, PagedKV, SharedKeys, chunk_shape, mix
from headway.kernels.triton.layout import PAGE_AT

SLOTS = 64  # that a program copies


def gather(paged: PagedKV, row: int, begin: int, count: int, keys: Tensor, values: Tensor) -> None:
    """Keys and values of `count` slots from `begin` on, of the sequence of a row, into [N, Hkv, D] each; then zeros."""
    n, heads, dim = keys.shape
    _gather[(triton.cdiv(n, SLOTS), heads)](
        paged.keys, paged.values, paged.ints, keys, values, paged.rows, row, begin, count, n,
        paged.keys.stride(0), paged.keys.stride(1), paged.keys.stride(2),
        PAGE_FIELD=PAGE_AT, HEADS=heads, DIM=dim, WIDE=_wide(dim), PAGE=paged.keys.shape[1], SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip


def merge(a: Tensor, a_sums: Tensor, b: Tensor, b_sums: Tensor, out: Tensor, sums: Tensor) -> None:
    """Results a and b [T, H, D] over different keys, with log-sum-exps [H, T], into out and sums; out may be a."""
    rows, heads, dim = a.shape
    assert a.stride(1) == b.stride(1) == out.stride(1) == dim
    group = min(8, triton.next_power_of_2(heads))
    _merge[(rows, triton.cdiv(heads, group))](
        a, a_sums, b, b_sums, out, sums, a.stride(0), b.stride(0), out.stride(0),
        a_sums.stride(0), b_sums.stride(0), sums.stride(0),
        HEADS=heads, DIM=dim, WIDE=_wide(dim), GROUP=group, num_warps=4,
    )  # fmt: skip


ITEM = 5  # numbers of an item of shared keys


def attend_shared(q: Tensor, paged: PagedKV, shared: SharedKeys, members: Tensor, items: Tensor) -> None:
    """Slots that several rows attend to, read once for all of them, into the parts of these rows.

    An item of `items` [n, 5] int32 is a place in `members`, where the numbers of its rows begin, how many there are (at
    most `chunk_tokens`; none: nothing is done), the first slot and the end, and which part this is of every row. The
    slots are those of the first row's pages.
    """
    heads, kv_heads, dim = q.shape[1], paged.keys.shape[2], q.shape[2]
    group = heads // kv_heads
    bm, bn, warps, stages = chunk_shape(group, dim, q.dtype)
    _shared[(len(items), kv_heads)](
        q, paged.keys, paged.values, paged.ints, members, items, shared.sums, shared.peaks,
        q.stride(0), paged.keys.stride(0), paged.keys.stride(1), paged.keys.stride(2), paged.rows, paged.scale * LOG2E,
        SOFTCAP=paged.softcap, PAGE_FIELD=PAGE_AT, HEADS=heads, GROUP=group, DIM=dim, WIDE=_wide(dim),
        PAGE=paged.keys.shape[1], BM=bm, BN=bn, MOST=shared.most, ITEM=ITEM,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _wide(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@triton.jit(do_not_specialize=["row", "count"])
def _gather(
    keys, values, ints, k_out, v_out, rows, row, begin, count, most, page_stride, slot_stride, head_stride,
    PAGE_FIELD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    i, head, d = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.program_id(1), tl.arange(0, WIDE)
    table = ints + tl.load(ints + PAGE_FIELD * rows + row)
    slot = begin + i
    page = tl.load(table + slot // PAGE, mask=i < count, other=0)
    where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride + head * head_stride
    there = (page > 0)[:, None] & (d < DIM)[None, :]
    k = tl.load(keys + where[:, None] + d[None, :], mask=there, other=0.0)
    v = tl.load(values + where[:, None] + d[None, :], mask=there, other=0.0)
    place = (i.to(tl.int64)[:, None] * HEADS + head) * DIM + d[None, :]
    wanted = (i < most)[:, None] & (d < DIM)[None, :]
    tl.store(k_out + place, k, mask=wanted)
    tl.store(v_out + place, v, mask=wanted)


@triton.jit
def _merge(
    a, a_sums, b, b_sums, out, sums, a_row, b_row, out_row, a_head, b_head, sums_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, h, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDE)
    la = tl.load(a_sums + h * a_head + row, mask=h < HEADS, other=0.0)
    lb = tl.load(b_sums + h * b_head + row, mask=h < HEADS, other=0.0)
    top = tl.maximum(la, lb)
    wa, wb = tl.exp(la - top), tl.exp(lb - top)
    total = wa + wb
    lane = h[:, None] * DIM + d[None, :]
    live = (h < HEADS)[:, None] & (d < DIM)[None, :]
    x = tl.load(a + row * a_row + lane, mask=live, other=0.0).to(tl.float32) * (wa / total)[:, None]
    y = tl.load(b + row * b_row + lane, mask=live, other=0.0).to(tl.float32) * (wb / total)[:, None]
    tl.store(out + row * out_row + lane, (x + y).to(out.dtype.element_ty), mask=live)
    tl.store(sums + h * sums_head + row, top + tl.log(total), mask=h < HEADS)


@triton.jit
def _shared(
    q, keys, values, ints, members, items, sums, peaks,
    q_row, page_stride, slot_stride, head_stride, rows, scale,
    SOFTCAP: tl.constexpr, PAGE_FIELD: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MOST: tl.constexpr,
    ITEM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item, head = items + tl.program_id(0) * ITEM, tl.program_id(1)
    first, count = tl.load(item), tl.load(item + 1)
    if count == 0:
        return
    begin, end, part = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    m, d, n = tl.arange(0, BM), tl.arange(0, WIDE), tl.arange(0, BN)
    real = m < count * GROUP
    row = tl.load(members + first + m // GROUP, mask=real, other=0).to(tl.int64)
    h = head * GROUP + m % GROUP
    live = real[:, None] & (d < DIM)[None, :]
    qs = tl.load(q + row[:, None] * q_row + h[:, None] * DIM + d[None, :], mask=live, other=0.0)
    table = ints + tl.load(ints + PAGE_FIELD * rows + tl.load(members + first))
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, WIDE), tl.float32)
    keys += head * head_stride
    values += head * head_stride
    for base in range(begin, end, BN):
        slot = base + n
        page = tl.load(table + slot // PAGE, mask=slot < end, other=0)
        seen = page > 0
        where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
        there = seen[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + where[:, None] + d[None, :], mask=there, other=0.0)
        v = tl.load(values + where[:, None] + d[None, :], mask=there, other=0.0)
        peak, total, mixed = mix(qs, k, v, seen[None, :], peak, total, mixed, scale, SOFTCAP, PRECISION)
    cell = (row * HEADS + h) * MOST + part
    tl.store(sums + cell[:, None] * DIM + d[None, :], mixed, mask=live)
    tl.store(peaks + cell * 2, peak, mask=real)
    tl.store(peaks + cell * 2 + 1, total, mask=real)
