"""Paged attention in Triton: rows of any sequences, each with its mask as runs, never as a dense mask.

Two kernels that compute the same as `headway.kernels.reference.attention.attend`:

    decode   one row per program, its keys split among programs (split-KV); the program that finishes last combines
             the parts in order. For a given `Splits` and `AttentionTile` a row's bits depend on its query and its
             runs; with `Splits.fixed`, only on its query and the slots it attends to.
    chunk    many rows of one sequence per program, on tensor cores: prefill

Query heads that share a key head are rows of one matmul. A tile of slots that no row attends to is never read, and a
missing page (0 in the page table) is never attended to.
"""

# ruff: noqa: PLR0915, PLR0917
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.layout import PAGE_AT, WHOLE

FAR = tl.constexpr(1 << 30)  # past every slot
LOG2E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class PagedKV:
    """A layer's KV cache, keys and values [P, page, Hkv, D], and the step's numbers (see `layout`).

    `run_at` is the first column of the layer's mask set in `ints`, whose columns have `rows` numbers.
    """

    keys: Tensor
    values: Tensor
    ints: Tensor
    rows: int
    run_at: int
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None  # [H] scores that only enter the softmax sum


@dataclass(frozen=True)
class Splits:
    """How a decode row's keys are divided: into `most` parts, none shorter than `least` slots.

    `fixed` parts begin at multiples of their length, counted from slot 0. The length is `least`, doubled until `most`
    parts cover the row's last slot. A row's bits are then the same whether a slot is left out by a missing page or by
    its runs.
    """

    most: int
    least: int
    fixed: bool = False


@dataclass(frozen=True)
class AttentionTile:
    """Slots per step of a decode program, and its launch parameters."""

    slots: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, eq=False)
class Scratch:
    """Workspace for the parts of `rows` decode rows. `arrived` is zero between calls."""

    sums: Tensor  # [rows, H, parts, D] float32
    peaks: Tensor  # [rows, H, parts, 2] float32
    arrived: Tensor  # [rows, Hkv] int32


@dataclass(frozen=True, eq=False)
class SharedKeys:
    """What single rows attend to before their runs, as `most` parts at most, computed for many rows at once.

    `counts` [n] int32 says how many parts a row of the step has; those from n on have none.
    """

    sums: Tensor  # [R, H, most, D] float32, for at least n rows
    peaks: Tensor  # [R, H, most, 2] float32
    counts: Tensor
    most: int


def make_scratch(rows: int, heads: int, kv_heads: int, dim: int, splits: Splits, device: torch.device) -> Scratch:
    """Workspace for `rows` decode rows."""
    return Scratch(
        torch.empty(rows, heads, splits.most, dim, dtype=torch.float32, device=device),
        torch.empty(rows, heads, splits.most, 2, dtype=torch.float32, device=device),
        torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
    )


def attend_rows(
    q: Tensor,
    out: Tensor,
    paged: PagedKV,
    splits: Splits,
    scratch: Scratch,
    *,
    which: Tensor | None = None,
    tile: AttentionTile = AttentionTile(32),
    shared: SharedKeys | None = None,
    ahead: bool = False,
) -> None:
    """q [T, H, D] → out [T, H, D], each row by itself. `which` [n] int32 selects rows (-1: none), else all.

    With `shared` the first of a row's programs begins with what others have computed for it.
    """
    assert shared is None or not splits.fixed
    before = shared or SharedKeys(scratch.sums, scratch.peaks, scratch.arrived, 0)
    rows = q.shape[0] if which is None else which.shape[0]
    heads, kv_heads, dim = q.shape[1], paged.keys.shape[2], q.shape[2]
    group = heads // kv_heads
    if rows:
        _decode[(rows, kv_heads, splits.most)](
            q, out, paged.keys, paged.values, paged.ints, paged.ints if which is None else which,
            scratch.sums, scratch.peaks, scratch.arrived, q if paged.sinks is None else paged.sinks,
            before.sums, before.peaks, before.counts, len(before.counts),
            q.stride(0), out.stride(0), paged.keys.stride(0), paged.keys.stride(1), paged.keys.stride(2),
            paged.rows, paged.scale * LOG2E,
            CHOSEN=which is not None, SOFTCAP=paged.softcap, SINKS=paged.sinks is not None,
            RUN_AT=paged.run_at, PAGE_FIELD=PAGE_AT, HEADS=heads, GROUP=group, DIM=dim, WIDE=_width(dim),
            PAGE=paged.keys.shape[1], BM=max(16, triton.next_power_of_2(group)), BN=tile.slots,
            GP=triton.next_power_of_2(group), SPLITS=splits.most, SB=min(_joined(group, dim), splits.most),
            LEAST=splits.least, FIXED=splits.fixed, SHARED=before.most, AT_ONCE=tile.warps,
            PRECISION=_precision(q), AHEAD=ahead, num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
        )  # fmt: skip


def attend_chunks(q: Tensor, out: Tensor, paged: PagedKV, items: Tensor, tokens: int) -> None:
    """q [T, H, D] → out [T, H, D] for the rows of `items` [n, 2] int32: first row and count, each of one sequence.

    Items of no rows are skipped. `tokens` is the most rows an item has, at most `chunk_tokens` of this shape.
    """
    heads, kv_heads, dim = q.shape[1], paged.keys.shape[2], q.shape[2]
    group = heads // kv_heads
    bm, bn, warps, stages = chunk_shape(group, dim, q.dtype)
    assert tokens <= bm // group
    if len(items):
        _chunk[(len(items), kv_heads)](
            q, out, paged.keys, paged.values, paged.ints, items, q if paged.sinks is None else paged.sinks,
            q.stride(0), out.stride(0), paged.keys.stride(0), paged.keys.stride(1), paged.keys.stride(2),
            paged.rows, paged.scale * LOG2E,
            SOFTCAP=paged.softcap, SINKS=paged.sinks is not None, RUN_AT=paged.run_at,
            PAGE_FIELD=PAGE_AT, WHOLE_FIELD=WHOLE, GROUP=group, DIM=dim, WIDE=_width(dim), PAGE=paged.keys.shape[1],
            BM=bm, BN=bn, PRECISION=_precision(q), num_warps=warps, num_stages=stages,
        )  # fmt: skip


def chunk_tokens(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    """The most rows of one sequence that an item of `attend_chunks` holds."""
    return chunk_shape(heads // kv_heads, dim, dtype)[0] // (heads // kv_heads)


def chunk_items(segments: Sequence[tuple[int, int]], tokens: int) -> list[int]:
    """Items, flat, for segments of rows (first, count): the longest work first, which balances the programs."""
    items = [
        (at, min(tokens, first + count - at)) for first, count in segments for at in range(first, first + count, tokens)
    ]
    items.sort(key=lambda item: -item[0])
    return [number for item in items for number in item]


def chunk_shape(group: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows and slots per tile, warps, stages."""
    if dim > 256:
        return max(32, triton.next_power_of_2(group)), 32 if dtype != torch.float32 else 16, 8, 1
    if dtype == torch.float32:
        return max(32, triton.next_power_of_2(group)), 32, 4, 1
    if dim > 128:
        return max(64, triton.next_power_of_2(group)), 32, 8, 2
    return max(128, triton.next_power_of_2(group)), 64, 8, 3


def _joined(group: int, dim: int) -> int:
    """How many parts of a row's heads are combined at a time: as many as registers hold."""
    return max(2, min(16, 8192 // (triton.next_power_of_2(group) * _width(dim))))


def _width(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"


@triton.jit
def _score(q, k, scale, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores in units of log 2: q [BM, WIDE] with k [BN, WIDE] → [BM, BN]."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP > 0:
        x = s * (0.6931471805599453 / SOFTCAP)  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s = SOFTCAP * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
    return s


@triton.jit
def mix(q, k, v, seen, peak, total, mixed, scale, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one tile to the running softmax; seen [BM, BN] marks the slots a row attends to."""
    s = tl.where(seen, _score(q, k, scale, SOFTCAP, PRECISION), float("-inf"))
    new = tl.maximum(peak, tl.max(s, 1))
    level = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - level[:, None])
    fade = tl.exp2(peak - level)
    total = total * fade + tl.sum(p, 1)
    mixed = mixed * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return new, total, mixed


@triton.jit
def _decode(
    q, out, keys, values, ints, which, sums, peaks, arrived, sinks, shared_sums, shared_peaks, shared_counts,
    shared_rows,
    q_row, out_row, page_stride, slot_stride, head_stride, rows, scale,
    CHOSEN: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, RUN_AT: tl.constexpr, PAGE_FIELD: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr, SB: tl.constexpr, LEAST: tl.constexpr,
    FIXED: tl.constexpr, SHARED: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    at, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if CHOSEN:
        wait(AHEAD)
        row = tl.load(which + at)
        if row < 0:  # a captured step has room for more rows than it may need
            return
    else:
        row = at
    run = tl.load(ints + RUN_AT * rows + row)
    count = tl.load(ints + (RUN_AT + 1) * rows + row)
    start = tl.load(ints + (RUN_AT + 2) * rows + row)
    end_slot = tl.load(ints + (RUN_AT + 3) * rows + row)
    table = ints + tl.load(ints + PAGE_FIELD * rows + row)
    if not CHOSEN:
        wait(AHEAD)  # the host has written the step's numbers: no kernel computes them
    first = start // BN * BN
    g, d = tl.arange(0, BM), tl.arange(0, WIDE)
    live = (g < GROUP)[:, None] & (d < DIM)[None, :]
    # Where a row is split depends only on what it attends to, and so do its bits.
    if FIXED:
        part = tl.maximum(end_slot * 0, LEAST)  # of the row's integer type, which the loop needs
        while part * SPLITS < end_slot:
            part *= 2
        early, first = start // part, 0  # parts before the first slot that the row attends to are skipped
        parts = tl.maximum(early + 1, tl.cdiv(end_slot, part))
    else:
        part = tl.maximum(LEAST, tl.cdiv(tl.cdiv(end_slot - first, SPLITS), BN) * BN)
        early, parts = 0, tl.maximum(1, tl.cdiv(end_slot - first, part))
    if (split >= early) & (split < parts):
        qs = tl.load(q + row * q_row + (head * GROUP + g)[:, None] * DIM + d[None, :], mask=live, other=0.0)
        peak = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        mixed = tl.zeros((BM, WIDE), tl.float32)
        if SHARED > 0:  # noqa: SIM102 - known when it is compiled
            if split == early:
                cells = (row.to(tl.int64) * HEADS + head * GROUP + g) * SHARED
                known = tl.load(shared_counts + row, mask=row < shared_rows, other=0)
                for i in range(0, known, AT_ONCE):
                    for j in tl.static_range(AT_ONCE):  # their loads do not wait for each other
                        cell, is_one = cells + i + j, (g < GROUP) & (g * 0 + i + j < known)
                        tops = tl.load(shared_peaks + cell * 2, mask=is_one, other=float("-inf"))
                        totals = tl.load(shared_peaks + cell * 2 + 1, mask=is_one, other=0.0)
                        place = shared_sums + cell[:, None] * DIM + d[None, :]
                        some = tl.load(place, mask=live & is_one[:, None], other=0.0)
                        new = tl.maximum(peak, tops)
                        level = tl.where(new == float("-inf"), 0.0, new)
                        weight, fade = tl.exp2(tops - level), tl.exp2(peak - level)
                        total = total * fade + totals * weight
                        mixed = mixed * fade[:, None] + some * weight[:, None]
                        peak = new
        begin = first + split * part
        end = tl.minimum(end_slot, begin + part)
        n = tl.arange(0, BN)
        keys += head * head_stride
        values += head * head_stride
        if count == 1:
            for base in range(begin, end, BN):
                slot = base + n
                inside = (slot >= start) & (slot < end)
                page = tl.load(table + slot // PAGE, mask=inside, other=0)
                seen = page > 0
                where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
                there = seen[:, None] & (d < DIM)[None, :]
                k = tl.load(keys + where[:, None] + d[None, :], mask=there, other=0.0)
                v = tl.load(values + where[:, None] + d[None, :], mask=there, other=0.0)
                peak, total, mixed = mix(qs, k, v, seen[None, :], peak, total, mixed, scale, SOFTCAP, PRECISION)
        else:
            last = run + 2 * count
            while (run < last) & (tl.load(ints + run + 1, mask=run < last, other=FAR) <= begin):
                run += 2
            start = tl.load(ints + run, mask=run < last, other=FAR)
            base = tl.maximum(begin, start // BN * BN)
            while base < end:
                slot = base + n
                inside = slot < 0
                go = start < base + BN
                while go:
                    stop = tl.load(ints + run + 1)
                    inside = inside | ((slot >= start) & (slot < stop))
                    go = stop <= base + BN
                    if go:
                        run += 2
                        start = tl.load(ints + run, mask=run < last, other=FAR)
                        go = start < base + BN
                inside = inside & (slot < end)
                page = tl.load(table + slot // PAGE, mask=inside, other=0)
                seen = page > 0
                where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
                there = seen[:, None] & (d < DIM)[None, :]
                k = tl.load(keys + where[:, None] + d[None, :], mask=there, other=0.0)
                v = tl.load(values + where[:, None] + d[None, :], mask=there, other=0.0)
                peak, total, mixed = mix(qs, k, v, seen[None, :], peak, total, mixed, scale, SOFTCAP, PRECISION)
                base = tl.maximum(base + BN, start // BN * BN)
        place = out + row * out_row + (head * GROUP + g)[:, None] * DIM + d[None, :]
        if (parts - early == 1) & (not (FIXED and SINKS)):  # with sinks the two branches round differently
            if SINKS:
                sink = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=float("-inf")) * 1.4426950408889634
                new = tl.maximum(peak, sink)
                fade = tl.exp2(peak - new)
                total = total * fade + tl.exp2(sink - new)
                mixed = mixed * fade[:, None]
            result = mixed / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(place, result.to(out.dtype.element_ty), mask=live)
        else:
            cell = (at * HEADS + head * GROUP + g) * SPLITS + split
            tl.store(sums + cell[:, None] * DIM + d[None, :], mixed, mask=live)
            tl.store(peaks + cell * 2, peak, mask=g < GROUP)
            tl.store(peaks + cell * 2 + 1, total, mask=g < GROUP)
            tl.debug_barrier()
            counter = arrived + at * (HEADS // GROUP) + head
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if before == parts - early - 1:
                tl.atomic_xchg(counter, 0)
                _join(
                    out + row * out_row, sums, peaks, sinks, at, head, early, parts, SINKS, HEADS, GROUP, DIM, WIDE,
                    GP, SPLITS, SB,
                )  # fmt: skip


@triton.jit
def _join(
    out, sums, peaks, sinks, at, head, early, parts,
    SINKS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    GP: tl.constexpr, SPLITS: tl.constexpr, SB: tl.constexpr,
):  # fmt: skip
    """Combines the parts of a row's heads in order, SB at a time."""
    g, d = tl.arange(0, GP), tl.arange(0, WIDE)
    first = (at * HEADS + head * GROUP + g) * SPLITS
    peak = tl.full((GP,), float("-inf"), tl.float32)
    whole = tl.zeros((GP,), tl.float32)
    result = tl.zeros((GP, WIDE), tl.float32)
    if SINKS:
        peak = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=float("-inf")) * 1.4426950408889634
        whole += 1.0
    for base in range(early // SB * SB, parts, SB):
        s = base + tl.arange(0, SB)
        some = (g < GROUP)[:, None] & ((s >= early) & (s < parts))[None, :]
        cell = first[:, None] + s[None, :]
        mixed = tl.load(
            sums + cell[:, :, None] * DIM + d[None, None, :], mask=some[:, :, None] & (d < DIM)[None, None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        tops = tl.load(peaks + cell * 2, mask=some, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(peaks + cell * 2 + 1, mask=some, other=0.0, cache_modifier=".cg")
        new = tl.maximum(peak, tl.max(tops, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        weight, fade = tl.exp2(tops - level[:, None]), tl.exp2(peak - level)
        whole = whole * fade + tl.sum(totals * weight, 1)
        result = result * fade[:, None] + tl.sum(mixed * weight[:, :, None], 1)
        peak = new
    result = result / tl.where(whole == 0, 1.0, whole)[:, None]
    place = out + (head * GROUP + g)[:, None] * DIM + d[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < DIM)[None, :])


@triton.jit
def _chunk(
    q, out, keys, values, ints, items, sinks,
    q_row, out_row, page_stride, slot_stride, head_stride, rows, scale,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, RUN_AT: tl.constexpr,
    PAGE_FIELD: tl.constexpr, WHOLE_FIELD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    row0 = tl.load(items + 2 * item)
    tokens = tl.load(items + 2 * item + 1)
    m, d, n = tl.arange(0, BM), tl.arange(0, WIDE), tl.arange(0, BN)
    real = m < tokens * GROUP
    row = row0 + m // GROUP
    lane = (head * GROUP + m % GROUP)[:, None] * DIM + d[None, :]
    live = real[:, None] & (d < DIM)[None, :]
    qs = tl.load(q + row.to(tl.int64)[:, None] * q_row + lane, mask=live, other=0.0)
    run = tl.load(ints + RUN_AT * rows + row, mask=real, other=0)
    count = tl.load(ints + (RUN_AT + 1) * rows + row, mask=real, other=0)
    table = ints + tl.load(ints + PAGE_FIELD * rows + row0)
    whole = tl.load(ints + WHOLE_FIELD * rows + row0)
    last = run + 2 * count
    start = tl.load(ints + run, mask=count > 0, other=FAR)
    end = tl.max(tl.load(ints + last - 1, mask=count > 0, other=0), 0)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, WIDE), tl.float32)
    keys += head * head_stride
    values += head * head_stride
    low = tl.min(start, 0)
    fewest = tl.min(tl.where(real, count, 1), 0)
    if (tl.max(count, 0) == 1) & (fewest == 1) & (whole == 1):
        # One run per row, as with causal and windowed masks: in the middle every row attends to every slot.
        stop = tl.load(ints + run + 1, mask=count > 0, other=0)
        inner = tl.cdiv(tl.max(tl.where(count > 0, start, 0), 0), BN) * BN
        outer = tl.min(tl.where(count > 0, stop, FAR), 0) // BN * BN
        inner = tl.minimum(inner, end)
        for base in range(low // BN * BN, inner, BN):
            slot = base + n
            page = tl.load(table + slot // PAGE, mask=slot < end, other=0)
            where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
            k = tl.load(keys + where[:, None] + d[None, :], mask=(slot < end)[:, None] & (d < DIM)[None, :], other=0.0)
            v = tl.load(
                values + where[:, None] + d[None, :], mask=(slot < end)[:, None] & (d < DIM)[None, :], other=0.0
            )
            seen = (slot[None, :] >= start[:, None]) & (slot[None, :] < stop[:, None])
            peak, total, mixed = mix(qs, k, v, seen, peak, total, mixed, scale, SOFTCAP, PRECISION)
        for base in range(inner, outer, BN):
            slot = base + n
            page = tl.load(table + slot // PAGE)
            where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
            if DIM == WIDE:
                k = tl.load(keys + where[:, None] + d[None, :])
            else:
                k = tl.load(keys + where[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
            s = _score(qs, k, scale, SOFTCAP, PRECISION)
            new = tl.maximum(peak, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
            fade = tl.exp2(peak - new)
            total = total * fade + tl.sum(p, 1)
            if DIM == WIDE:
                v = tl.load(values + where[:, None] + d[None, :])
            else:
                v = tl.load(values + where[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            peak = new
        for base in range(tl.maximum(inner, outer), end, BN):
            slot = base + n
            page = tl.load(table + slot // PAGE, mask=slot < end, other=0)
            where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
            k = tl.load(keys + where[:, None] + d[None, :], mask=(slot < end)[:, None] & (d < DIM)[None, :], other=0.0)
            v = tl.load(
                values + where[:, None] + d[None, :], mask=(slot < end)[:, None] & (d < DIM)[None, :], other=0.0
            )
            seen = (slot[None, :] >= start[:, None]) & (slot[None, :] < stop[:, None])
            peak, total, mixed = mix(qs, k, v, seen, peak, total, mixed, scale, SOFTCAP, PRECISION)
    else:
        base = low // BN * BN
        while base < end:
            slot = base + n
            edge = base + BN
            inside = (m < 0)[:, None] & (n < 0)[None, :]
            go = start < edge
            while tl.max(go.to(tl.int32), 0) > 0:
                stop = tl.load(ints + run + 1, mask=go, other=0)
                inside = inside | (go[:, None] & (slot[None, :] >= start[:, None]) & (slot[None, :] < stop[:, None]))
                done = go & (stop <= edge)
                run = tl.where(done, run + 2, run)
                start = tl.where(done, tl.load(ints + run, mask=done & (run < last), other=FAR), start)
                go = done & (start < edge)
            page = tl.load(table + slot // PAGE, mask=slot < end, other=0)
            there = (page > 0)[:, None] & (d < DIM)[None, :]
            where = page.to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
            k = tl.load(keys + where[:, None] + d[None, :], mask=there, other=0.0)
            v = tl.load(values + where[:, None] + d[None, :], mask=there, other=0.0)
            seen = inside & (page > 0)[None, :]
            peak, total, mixed = mix(qs, k, v, seen, peak, total, mixed, scale, SOFTCAP, PRECISION)
            base = tl.maximum(edge, tl.min(start, 0) // BN * BN)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + m % GROUP) * 1.4426950408889634
        new = tl.maximum(peak, sink)
        fade = tl.exp2(peak - new)
        total = total * fade + tl.exp2(sink - new)
        mixed = mixed * fade[:, None]
    result = mixed / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * out_row + lane, result.to(out.dtype.element_ty), mask=live)
