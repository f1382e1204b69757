"""Latent attention in Triton: a slot has one rotated key and one latent vector, which is key and value of all heads.

    by_head              queries to the latent space, and what attention gives to the outputs of heads
    rotate_and_write     the rotated part of queries; slots [rotated key, normed latent vector] into the KV cache
    attend_rows, attend_chunks
                         as in `attention`: heads of a row, or of several rows of a sequence, are rows of one matmul;
                         a tile of latent vectors is read once, for scores and for what they weigh

In `attend_rows` a row's keys may be split among programs; the parts are combined in order by a kernel of its own. A
row's bits depend on its query and its runs, with `Splits.fixed` only on its query and the slots it attends to.
"""

# ruff: noqa: PLR0915, PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.attention import FAR, LOG2E, PagedKV, Scratch, Splits
from headway.kernels.triton.launch import launch_next, options, shared_memory, wait
from headway.kernels.triton.layout import PAGE_AT, WRITE
from headway.kernels.triton.matmul import MatmulTile

LARGE = 160 << 10  # bytes of shared memory that a tile of several rows takes, about


@dataclass(frozen=True)
class LatentTile:
    """Rows of a tile, each a head of a row, slots per step, and launch parameters."""

    rows: int
    slots: int
    warps: int
    stages: int


def row_tile(dtype: torch.dtype) -> LatentTile:
    """For the heads of one row: the same for any number of rows. A larger one has no room in registers."""
    return LatentTile(16, 16, 4, 1) if dtype == torch.float32 else LatentTile(16, 32, 8, 2)


def chunk_tile(dtype: torch.dtype, device: torch.device) -> LatentTile:
    """For several rows of a sequence."""
    if dtype == torch.float32 or shared_memory(device) < LARGE:
        return row_tile(dtype)
    return LatentTile(64, 32, 8, 2)


def row_programs(heads: int, dtype: torch.dtype) -> int:
    """How many programs take a row whose keys are not split."""
    return triton.cdiv(heads, row_tile(dtype).rows)


def chunk_tokens(heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """The most rows of one sequence that an item of `attend_chunks` holds."""
    return max(1, chunk_tile(dtype, device).rows // triton.next_power_of_2(heads))


def attend_rows(
    q: Tensor,
    out: Tensor,
    paged: PagedKV,
    splits: Splits,
    scratch: Scratch,
    *,
    which: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """q [T, H, R + L] → out [T, H, L], each row by itself. `which` [n] int32 selects rows (-1: none), else all."""
    rows = q.shape[0] if which is None else which.shape[0]
    heads, size = out.shape[1:]
    if not rows:
        return
    _launch(q, out, paged, which, row_tile(q.dtype), splits=splits, scratch=scratch, ahead=ahead)
    if splits.most > 1:
        _join[(rows, heads)](
            out, scratch.sums, scratch.peaks, which, out.stride(0), HEADS=heads, SIZE=size, WIDE=_wide(size),
            SPLITS=splits.most, AHEAD=ahead, num_warps=4, **options(ahead),
        )  # fmt: skip


def attend_chunks(q: Tensor, out: Tensor, paged: PagedKV, items: Tensor, tokens: int) -> None:
    """q [T, H, R + L] → out [T, H, L] for the rows of `items` [n, 2] int32: first row and count, each of one sequence.

    Items of no rows are skipped. `tokens` is the most rows an item has: `chunk_tokens` of this shape.
    """
    assert tokens == chunk_tokens(q.shape[1], q.dtype, q.device)
    if len(items):
        _launch(q, out, paged, items, chunk_tile(q.dtype, q.device), tokens=tokens)


def _launch(
    q: Tensor,
    out: Tensor,
    paged: PagedKV,
    items: Tensor | None,
    tile: LatentTile,
    *,
    tokens: int = 0,
    splits: Splits = Splits(1, 1),
    scratch: Scratch | None = None,
    ahead: bool = False,
) -> None:
    heads, size = out.shape[1:]
    width = q.shape[2]
    assert paged.keys.shape[2] == 1
    assert not paged.softcap
    assert paged.sinks is None
    together = min(triton.next_power_of_2(heads), tile.rows)  # heads of a tile
    count = q.shape[0] if items is None else len(items)
    _attend[(count, triton.cdiv(heads, together), splits.most)](
        q, out, paged.keys, paged.ints, items, None if scratch is None else scratch.sums,
        None if scratch is None else scratch.peaks, q.stride(0), out.stride(0),
        paged.keys.stride(0), paged.keys.stride(1), paged.rows, paged.scale * LOG2E,
        TOKENS=tokens, RUN_AT=paged.run_at, PAGE_FIELD=PAGE_AT, HEADS=heads, TOGETHER=together,
        TURNED=width - size, TURNED_WIDE=_wide(width - size), SIZE=size, WIDE=_wide(size), PAGE=paged.keys.shape[1],
        BM=tile.rows, BN=tile.slots, SPLITS=splits.most, LEAST=splits.least, FIXED=splits.fixed,
        PRECISION=_precision(q), AHEAD=ahead, num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
    )  # fmt: skip


def by_head(x: Tensor, matrices: Tensor, out: Tensor, *, exact: bool = False, ahead: bool = False) -> None:
    """Rows x [T, H, K] of every head times its own matrix [H, N, K] into out [T, H, N].

    With `exact` a row's bits do not depend on how many there are.
    """
    (rows, heads, k), n = x.shape, matrices.shape[1]
    assert x.stride(2) == out.stride(2) == 1
    assert matrices.is_contiguous()
    tile = _head_tile(1 if exact else rows, x.dtype)
    _by_head[(triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.outputs), heads)](
        x, matrices, out, rows, x.stride(0), x.stride(1), out.stride(0), out.stride(1), N=n, K=k,
        EVEN=n % tile.outputs == 0 and k % tile.inputs == 0, BM=tile.rows, BN=tile.outputs, BK=tile.inputs,
        PRECISION=_precision(x), AHEAD=ahead, num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
    )  # fmt: skip


def _head_tile(rows: int, dtype: torch.dtype) -> MatmulTile:
    if dtype == torch.float32:
        return MatmulTile(16, 32, 32, stages=2)
    return MatmulTile(16, 64, 128, stages=3) if rows <= 16 else MatmulTile(64, 128, 64, stages=3)


def rotate_and_write(
    queries: Tensor,
    down: Tensor,
    q: Tensor,
    slots: Tensor,
    ints: Tensor,
    rows: int,
    cs: Tensor,
    norm: Tensor,
    eps: float,
    *,
    paired: bool,
    ahead: bool = False,
) -> None:
    """The last part of each head's query [T, H, K + R], rotated, into the first of q [T, H, R + L]; of rows down
    [T, L + R] the rotated key and the normed latent vector into the KV cache `slots` [P, page, 1, R + L].

    cs is the output of `angles`. With `paired` neighboring dimensions are rotated, and lie as halves do from then on.
    Rows whose WRITE is -1 are not cached.
    """
    count, heads, width = q.shape
    size, turned = norm.shape[0], width - norm.shape[0]
    group = min(16, triton.next_power_of_2(heads))
    _rotate[(count, 1 + triton.cdiv(heads, group))](
        queries, down, q, slots, ints, cs, norm, rows, eps, queries.stride(0), down.stride(0),
        slots.stride(0), slots.stride(1), FIELD=WRITE, PAIRED=paired, HEADS=heads, KEY=queries.shape[2] - turned,
        HALF=turned // 2, HALF_WIDE=triton.next_power_of_2(turned // 2), SIZE=size, WIDE=_wide(size),
        PAGE=slots.shape[1], GROUP=group, AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip


def _wide(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _add_tile(
    turned, latent, slots, where, there, seen, peak, total, mixed, scale,
    TURNED: tl.constexpr, TURNED_WIDE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the slots at `where` to the running softmax; seen [BM, BN] marks those that a row attends to."""
    r, d = tl.arange(0, TURNED_WIDE), tl.arange(0, WIDE)
    keys = tl.load(slots + where[:, None] + r[None, :], mask=there[:, None] & (r < TURNED)[None, :], other=0.0)
    c = tl.load(slots + where[:, None] + TURNED + d[None, :], mask=there[:, None] & (d < SIZE)[None, :], other=0.0)
    s = tl.dot(latent, tl.trans(c), input_precision=PRECISION)
    s = tl.dot(turned, tl.trans(keys), s, input_precision=PRECISION) * scale
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(peak, tl.max(s, 1))
    level = tl.where(new == float("-inf"), 0.0, new)
    p, fade = tl.exp2(s - level[:, None]), tl.exp2(peak - level)
    total = total * fade + tl.sum(p, 1)
    mixed = mixed * fade[:, None] + tl.dot(p.to(c.dtype), c, input_precision=PRECISION)
    return new, total, mixed


@triton.jit
def _attend(
    q, out, slots, ints, items, sums, peaks, q_row, out_row, page_stride, slot_stride, rows, scale,
    TOKENS: tl.constexpr, RUN_AT: tl.constexpr, PAGE_FIELD: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr,
    TURNED: tl.constexpr, TURNED_WIDE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, FIXED: tl.constexpr,
    PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    item, split = tl.program_id(0), tl.program_id(2)
    row0, tokens = item, 1
    if TOKENS > 0:
        row0, tokens = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    elif items is not None:
        row0 = tl.load(items + item)
    if (row0 < 0) | (tokens == 0):  # a captured step has room for more than it may need
        return
    m, n, r, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, TURNED_WIDE), tl.arange(0, WIDE)
    head, token = tl.program_id(1) * TOGETHER + m % TOGETHER, m // TOGETHER
    mine = token < tokens
    real, row = mine & (head < HEADS), row0 + token
    run = tl.load(ints + RUN_AT * rows + row, mask=mine, other=0)
    count = tl.load(ints + (RUN_AT + 1) * rows + row, mask=mine, other=0)
    table = ints + tl.load(ints + PAGE_FIELD * rows + row0)
    last = run + 2 * count
    start = tl.load(ints + run, mask=count > 0, other=FAR)
    end = tl.max(tl.load(ints + last - 1, mask=count > 0, other=0), 0)
    first = tl.minimum(tl.min(start, 0), end) // BN * BN
    if SPLITS > 1:
        # Where a row is split depends only on what it attends to, and so do its bits.
        if FIXED:
            part = tl.maximum(end * 0, LEAST)  # of the row's integer type, which the loop needs
            while part * SPLITS < end:
                part *= 2
            first = end * 0
        else:
            part = tl.maximum(LEAST, tl.cdiv(tl.cdiv(end - first, SPLITS), BN) * BN)
        first += split * part
        end = tl.minimum(end, first + part)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, WIDE), tl.float32)
    if first < end:
        at = row.to(tl.int64)[:, None] * q_row + (head * (TURNED + SIZE))[:, None]
        turned = tl.load(q + at + r[None, :], mask=real[:, None] & (r < TURNED)[None, :], other=0.0)
        latent = tl.load(q + at + TURNED + d[None, :], mask=real[:, None] & (d < SIZE)[None, :], other=0.0)
        if tl.max(count, 0) <= 1:
            stop = tl.load(ints + run + 1, mask=count > 0, other=0)
            for base in range(tl.maximum(first, tl.min(start, 0) // BN * BN), end, BN):
                slot = base + n
                page = tl.load(table + slot // PAGE, mask=slot < end, other=0)
                where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
                seen = (slot[None, :] >= start[:, None]) & (slot[None, :] < stop[:, None]) & (page > 0)[None, :]
                peak, total, mixed = _add_tile(
                    turned, latent, slots, where, page > 0, seen, peak, total, mixed, scale,
                    TURNED, TURNED_WIDE, SIZE, WIDE, PRECISION,
                )  # fmt: skip
        else:
            past = (start < FAR) & (tl.load(ints + run + 1, mask=run < last, other=FAR) <= first)
            while tl.max(past.to(tl.int32), 0) > 0:
                run = tl.where(past, run + 2, run)
                past = past & (tl.load(ints + run + 1, mask=run < last, other=FAR) <= first)
            start = tl.load(ints + run, mask=run < last, other=FAR)
            base = tl.maximum(first, tl.min(start, 0) // BN * BN)
            while base < end:
                slot = base + n
                edge = base + BN
                inside = (m < 0)[:, None] & (n < 0)[None, :]
                go = start < edge
                while tl.max(go.to(tl.int32), 0) > 0:
                    stop = tl.load(ints + run + 1, mask=go, other=0)
                    inside = inside | (
                        go[:, None] & (slot[None, :] >= start[:, None]) & (slot[None, :] < stop[:, None])
                    )
                    done = go & (stop <= edge)
                    run = tl.where(done, run + 2, run)
                    start = tl.where(done, tl.load(ints + run, mask=done & (run < last), other=FAR), start)
                    go = done & (start < edge)
                page = tl.load(table + slot // PAGE, mask=slot < end, other=0)
                where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
                peak, total, mixed = _add_tile(
                    turned, latent, slots, where, page > 0, inside & (page > 0)[None, :], peak, total, mixed, scale,
                    TURNED, TURNED_WIDE, SIZE, WIDE, PRECISION,
                )  # fmt: skip
                base = tl.maximum(edge, tl.min(start, 0) // BN * BN)
    live = real[:, None] & (d < SIZE)[None, :]
    if SPLITS > 1:
        cell = (item * HEADS + head) * SPLITS + split
        tl.store(peaks + cell * 2, peak, mask=real)
        tl.store(peaks + cell * 2 + 1, total, mask=real)
        if first < end:
            tl.store(sums + cell.to(tl.int64)[:, None] * SIZE + d[None, :], mixed, mask=live)
    else:
        result = mixed / tl.where(total == 0, 1.0, total)[:, None]
        place = out + row.to(tl.int64)[:, None] * out_row + (head * SIZE)[:, None] + d[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _join(
    out, sums, peaks, which, out_row,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Combines the parts of a head of a row; those without slots have no sums."""
    launch_next(AHEAD)
    wait(AHEAD)
    item, head = tl.program_id(0), tl.program_id(1)
    row = item if which is None else tl.load(which + item)
    if row < 0:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    cell = (item * HEADS + head) * SPLITS + s
    tops, totals = tl.load(peaks + cell * 2), tl.load(peaks + cell * 2 + 1)
    peak = tl.max(tops, 0)
    weight = tl.exp2(tops - tl.where(peak == float("-inf"), 0.0, peak))
    some = (tops > float("-inf"))[:, None] & (d < SIZE)[None, :]
    mixed = tl.load(sums + cell.to(tl.int64)[:, None] * SIZE + d[None, :], mask=some, other=0.0)
    total = tl.sum(totals * weight, 0)
    result = tl.sum(mixed * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    place = out + tl.cast(row, tl.int64) * out_row + head * SIZE + d
    tl.store(place, result.to(out.dtype.element_ty), mask=d < SIZE)


@triton.jit
def _by_head(
    x, matrices, out, rows, x_row, x_head, out_row, out_head,
    N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    m, o, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    head = tl.program_id(2)
    xs = x + m.to(tl.int64)[:, None] * x_row + head * x_head + c[None, :]
    ws = matrices + (head * N + o).to(tl.int64)[:, None] * K + c[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if EVEN:
            a, b = tl.load(xs + k, mask=(m < rows)[:, None], other=0.0), tl.load(ws + k)
        else:
            a = tl.load(xs + k, mask=(m < rows)[:, None] & (k + c < K)[None, :], other=0.0)
            b = tl.load(ws + k, mask=(o < N)[:, None] & (k + c < K)[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    place = out + m.to(tl.int64)[:, None] * out_row + head * out_head + o[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (o < N)[None, :])


@triton.jit
def _rotate(
    queries, down, q, slots, ints, cs, norm, rows, eps, queries_row, down_row, page_stride, slot_stride,
    FIELD: tl.constexpr, PAIRED: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, HALF: tl.constexpr,
    HALF_WIDE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i, d = tl.program_id(0), tl.arange(0, HALF_WIDE), tl.arange(0, WIDE)
    one, other = (2 * i, 2 * i + 1) if PAIRED else (i, i + HALF)
    cos = tl.load(cs + row * 2 * HALF + i, mask=i < HALF, other=1.0)
    sin = tl.load(cs + row * 2 * HALF + HALF + i, mask=i < HALF, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(ints + FIELD * rows + row)
        if slot >= 0:
            place = slots + (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
            at = down + row.to(tl.int64) * down_row
            a = tl.load(at + SIZE + one, mask=i < HALF, other=0.0).to(tl.float32)
            b = tl.load(at + SIZE + other, mask=i < HALF, other=0.0).to(tl.float32)
            tl.store(place + i, (a * cos - b * sin).to(slots.dtype.element_ty), mask=i < HALF)
            tl.store(place + HALF + i, (b * cos + a * sin).to(slots.dtype.element_ty), mask=i < HALF)
            c = tl.load(at + d, mask=d < SIZE, other=0.0).to(tl.float32)
            c = c * tl.rsqrt(tl.sum(c * c, 0) / SIZE + eps) * tl.load(norm + d, mask=d < SIZE, other=0.0).to(tl.float32)
            tl.store(place + 2 * HALF + d, c.to(slots.dtype.element_ty), mask=d < SIZE)
    else:
        h = (tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP)
        live = (h < HEADS)[:, None] & (i < HALF)[None, :]
        at = queries + row.to(tl.int64) * queries_row + (h * (KEY + 2 * HALF) + KEY)[:, None]
        a = tl.load(at + one[None, :], mask=live, other=0.0).to(tl.float32)
        b = tl.load(at + other[None, :], mask=live, other=0.0).to(tl.float32)
        place = q + row.to(tl.int64) * (HEADS * (2 * HALF + SIZE)) + (h * (2 * HALF + SIZE))[:, None] + i[None, :]
        tl.store(place, (a * cos[None, :] - b * sin[None, :]).to(q.dtype.element_ty), mask=live)
        tl.store(place + HALF, (b * cos[None, :] + a * sin[None, :]).to(q.dtype.element_ty), mask=live)
