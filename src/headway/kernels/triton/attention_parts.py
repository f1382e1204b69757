"""Attention in parts: keys brought together from pages, and results over different keys merged into one.

Whoever attends to all slots up to its own can attend to some of them here and to others there: with each result comes
the logarithm of its softmax's sum (log-sum-exp), by which the results are weighted.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.triton.attention import PagedKV
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
