"""Where top-k and top-p cut rows of logits: found by a few passes over all rows at once, never by sorting.

    aim       16 levels of a row; the second time between two of the first
    narrow    how much of the row is above each, in pieces
    collect   the few scores between the two levels that the cut is between
    settle    the edge among them: the smallest score above which there is less than is wanted
    weigh     how much of each piece stays, where settle has not said so

"How much" is the number of scores for top-k, and their weight for top-p, which comes after it. Weights are relative to
the row's largest. A row with too many scores near the edge (ties), or with an infinite one, is searched by one program.
No result depends on other rows.
"""

# ruff: noqa: PLR0917, SIM102
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass

PIECE = 4096  # logits per program
BLOCK = 2048  # logits per vector where one program reads a whole row, four vectors at a time
FIRST_LEVELS, LEVELS = 8, 16
NEAR = 256  # scores of a piece near the edge, at most
LOW, HIGH, ABOVE, GOAL, PEAK, SEARCHED, MARKS = 0, 1, 2, 3, 4, 5, 6
LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest number


class Kinds(NamedTuple):
    """What samplers of a step ask for, so that nothing is launched for what none does."""

    top_k: bool = True
    top_p: bool = True
    filters: bool = True  # those, or min-p


@dataclass(frozen=True, eq=False)
class CutWorkspace:
    """Room for A rows. `edges` and `ties`: scores above the edge stay, and the first ties at it."""

    levels: Tensor  # [A, LEVELS] float32
    amounts: Tensor  # [A, pieces, LEVELS] float32: what is above them
    near: Tensor  # [A, pieces, NEAR] float32
    counts: Tensor  # [A, pieces] int32: how many of them
    marks: Tensor  # [A, MARKS] float64: the levels that the edge is between, what is above, what is wanted, the peak
    edges: Tensor  # [A] float32
    ties: Tensor  # [A] int32
    kept: Tensor  # [A, pieces] float32: the weight that stays, without ties
    equal: Tensor  # [A, pieces] int32: how many scores are at the edge
    decided: Tensor  # [A] int32: whether these two are known


def make_cut_workspace(count: int, vocab: int, device: torch.device) -> CutWorkspace:
    """A workspace for `count` rows."""
    pieces = triton.cdiv(vocab, PIECE)

    def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    return CutWorkspace(
        levels=room(count, LEVELS),
        amounts=room(count, pieces, LEVELS),
        near=room(count, pieces, NEAR),
        counts=room(count, pieces, dtype=torch.int32),
        marks=room(count, MARKS, dtype=torch.float64),
        edges=room(count),
        ties=room(count, dtype=torch.int32),
        kept=room(count, pieces),
        equal=room(count, pieces, dtype=torch.int32),
        decided=room(count, dtype=torch.int32),
    )


def find_cuts(
    logits: Tensor,
    row_ints: Tensor,
    row_floats: Tensor,
    masks: Tensor,
    floats: Tensor,
    ints: Tensor,
    cuts: CutWorkspace,
    kinds: Kinds,
) -> None:
    """The cuts of rows that have been scanned (sampling.py), and what stays of their pieces."""
    count, vocab, words = row_ints.shape[0], logits.shape[1], masks.shape[1]
    pieces = triton.cdiv(vocab, PIECE)
    row, sizes = (logits, row_ints, row_floats, masks), (logits.stride(0), vocab, words)
    search = cuts.levels, cuts.amounts, cuts.marks
    result = cuts.edges, cuts.ties, cuts.kept, cuts.equal, cuts.decided
    shape = {"PIECES": pieces, "WIDE": triton.next_power_of_2(pieces)}
    for mass in [mass for mass, asked in enumerate((kinds.top_k, kinds.top_p)) if asked]:
        before = 0
        for levels in (FIRST_LEVELS, LEVELS, 0):
            _aim[(count,)](
                row_ints, row_floats, floats, ints, *search, cuts.edges, cuts.ties, cuts.decided,
                FIRST=not (mass and kinds.top_k), BEFORE=before, LEVELS=levels or LEVELS, ROOM=LEVELS, MASS=mass == 1,
                **shape, num_warps=1,
            )  # fmt: skip
            if levels:
                _narrow[(count, pieces)](
                    *row, *search, *sizes,
                    MASS=mass == 1, PIECES=pieces, PIECE=PIECE, LEVELS=levels, ROOM=LEVELS, num_warps=4,
                )  # fmt: skip
            before = levels
        _collect[(count, pieces)](
            *row, cuts.marks, cuts.near, cuts.counts, cuts.kept, *sizes,
            NEAR=NEAR, PIECES=pieces, PIECE=PIECE, num_warps=8,
        )  # fmt: skip
        _settle[(count,)](
            *row, floats, ints, cuts.near, cuts.counts, cuts.marks, *result, *sizes,
            NEAR=NEAR, BLOCK=BLOCK, MASS=mass == 1, **shape, num_warps=16,
        )  # fmt: skip
    if kinds.filters:
        _weigh[(count, pieces)](
            *row, floats, ints, *result, *sizes, CUT=kinds.top_k or kinds.top_p, PIECE=PIECE, **shape, num_warps=4
        )  # fmt: skip


@triton.jit
def scores_of(logits, masks, mask, i, vocab):
    """The scores of tokens i; -inf for those masked or outside the vocabulary."""
    s = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    if mask >= 0:
        bits = tl.load(masks + i // 32, mask=i < vocab, other=0)
        s = tl.where(((bits >> (i % 32)) & 1) == 1, s, float("-inf"))
    return s


@triton.jit
def weight_of(s, peak, rate):
    """Weights relative to the largest, which is 1; rate is 1 / temperature."""
    return tl.where(s == peak, 1.0, tl.exp((s - peak) * rate))


@triton.jit
def line_of(logits, row_ints, masks, index, stride, words):
    """Where a row's logits are, its mask's index and where its bits are."""
    mask = tl.load(row_ints + index * 3 + 2)
    line = logits + tl.load(row_ints + index * 3).to(tl.int64) * stride
    return line, mask, masks + tl.maximum(mask, 0).to(tl.int64) * words


@triton.jit
def scanned(floats, ints, index, PIECES: tl.constexpr, WIDE: tl.constexpr):
    """A row's largest and smallest finite score, how many are finite, and whether there is a NaN."""
    c = tl.arange(0, WIDE)
    at = (index * PIECES + c) * 3
    peak = tl.max(tl.load(floats + at, mask=c < PIECES, other=float("-inf")), 0)
    low = tl.min(tl.load(floats + at + 2, mask=c < PIECES, other=float("inf")), 0)
    bad = tl.max(tl.load(ints + at + 1, mask=c < PIECES, other=0), 0)
    alive = tl.sum(tl.load(ints + at + 2, mask=c < PIECES, other=0), 0)
    return peak, low, alive, bad


@triton.jit
def _is_asked(row_ints, row_floats, index, peak, alive, bad, MASS: tl.constexpr):
    """Whether a row is cut: by top-p, or by top-k."""
    drawn = (tl.load(row_ints + index * 3) >= 0) & (tl.load(row_floats + index * 4) > 0)
    drawn = drawn & (bad == 0) & (peak > float("-inf"))
    top_k = tl.load(row_ints + index * 3 + 1)
    if MASS:
        cut = tl.load(row_floats + index * 4 + 1) < 1.0
    else:
        cut = (top_k > 0) & (top_k < alive)
    return drawn & cut


@triton.jit
def _total(floats, index, peak, rate, PIECES: tl.constexpr, WIDE: tl.constexpr):
    """The weight of a whole row."""
    c = tl.arange(0, WIDE)
    at = (index * PIECES + c) * 3
    tops = tl.load(floats + at, mask=c < PIECES, other=float("-inf"))
    parts = tl.load(floats + at + 1, mask=c < PIECES, other=0.0) * weight_of(tops, peak, rate)
    return tl.sum(tl.where(c < PIECES, parts, 0.0).to(tl.float64), 0)


@triton.jit
def _above(amounts, index, PIECES: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr, ROOM: tl.constexpr):
    """What is above each level [LEVELS] float64."""
    c, j = tl.arange(0, WIDE)[:, None], tl.arange(0, LEVELS)[None, :]
    parts = tl.load(amounts + (index * PIECES + c) * ROOM + j, mask=c < PIECES, other=0.0)
    return tl.sum(parts.to(tl.float64), 0)


@triton.jit
def _between(levels, above, goal, low, high, over):
    """The levels that the edge is between, which is above the first, and what is above the second."""
    less = above < goal
    low = tl.maximum(low, tl.max(tl.where(less, low, levels), 0))
    high = tl.minimum(high, tl.min(tl.where(less, levels, high), 0))
    return low, high, tl.maximum(over, tl.max(tl.where(less, above, 0.0), 0))


@triton.jit
def _along(left, right, share):
    """Levels at shares of the way from one number to another, all of them finite."""
    left = tl.maximum(left, -LARGEST)
    return left + tl.minimum(right - left, LARGEST) * share


@triton.jit
def _aim(
    row_ints, row_floats, floats, ints, levels, amounts, marks, edges, ties, decided,
    FIRST: tl.constexpr, BEFORE: tl.constexpr, LEVELS: tl.constexpr, ROOM: tl.constexpr, MASS: tl.constexpr,
    PIECES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row's next levels, between two of those BEFORE, if there were any. Of top-p after top-k the last of the first
    ones is the edge of top-k."""
    index = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, LEVELS)
    peak, low, alive, bad = scanned(floats, ints, index, PIECES, WIDE)
    asked = _is_asked(row_ints, row_floats, index, peak, alive, bad, MASS) & (peak < float("inf"))
    mark = marks + index * 6
    if FIRST:
        tl.store(decided + index, 0)
    if BEFORE == 0:
        tl.store(mark + 5, asked.to(tl.float64))
    if asked:
        top_k = tl.load(row_ints + index * 3 + 1)
        after = top_k < 0
        if MASS:
            after = (top_k > 0) & (top_k < alive)
        rate = 1.0 / tl.load(row_floats + index * 4).to(tl.float32)
        n = (j + 1).to(tl.float32)
        if BEFORE > 0:
            left, right = tl.load(mark).to(tl.float32), tl.load(mark + 1).to(tl.float32)
            over, goal = tl.load(mark + 2), tl.load(mark + 3)
            i = tl.arange(0, BEFORE)
            above = _above(amounts, index, PIECES, WIDE, BEFORE, ROOM)
            if after & (goal < 0):  # what top-k keeps is known now
                edge = tl.load(edges + index)
                last = tl.sum(tl.where(i == BEFORE - 1, above, 0.0), 0)
                total = last + weight_of(edge, peak, rate).to(tl.float64) * tl.load(ties + index)
                goal = tl.load(row_floats + index * 4 + 1) * total
                if last < goal:  # all of it stays
                    left, right, over = edge, edge, last
            if left < right:
                left, right, over = _between(tl.load(levels + index * ROOM + i), above, goal, left, right, over)
            wanted = _along(left, right, n / (LEVELS + 1))
        else:
            left, right, over = low - tl.maximum(tl.abs(low), 1.0) * 1e-6, peak, (top_k * 0).to(tl.float64)
            step = (peak - low) / (LEVELS + 1)
            if MASS:
                goal = tl.load(row_floats + index * 4 + 1) * _total(floats, index, peak, rate, PIECES, WIDE)
                wanted = tl.maximum(peak - tl.minimum((n + n * n / 8) / rate, n * step), low)
                if after:
                    goal = over - 1.0
                    wanted = tl.where(j == LEVELS - 1, tl.load(edges + index), wanted)
            else:
                goal = top_k.to(tl.float64)
                wanted = tl.maximum(peak - tl.minimum(n * n / 2, n * step), low)
        tl.store(mark, left.to(tl.float64))
        tl.store(mark + 1, right.to(tl.float64))
        tl.store(mark + 2, over)
        tl.store(mark + 3, goal)
        tl.store(mark + 4, peak.to(tl.float64))
        tl.store(levels + index * ROOM + j, wanted)


@triton.jit
def _narrow(
    logits, row_ints, row_floats, masks, levels, amounts, marks, stride, vocab, words,
    MASS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, LEVELS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(marks + index * 6 + 5) > 0:
        line, mask, bits = line_of(logits, row_ints, masks, index, stride, words)
        s = scores_of(line, bits, mask, piece * PIECE + tl.arange(0, PIECE), vocab)
        j = tl.arange(0, LEVELS)
        found = tl.zeros((LEVELS,), tl.float32)
        if MASS:
            rate = 1.0 / tl.load(row_floats + index * 4).to(tl.float32)
            w = weight_of(s, tl.load(marks + index * 6 + 4).to(tl.float32), rate)
        else:
            w = tl.full((PIECE,), 1.0, tl.float32)
        for n in tl.static_range(LEVELS):
            level = tl.load(levels + index * ROOM + n)
            found = tl.where(j == n, tl.sum(tl.where(s > level, w, 0.0), 0), found)
        tl.store(amounts + (index * PIECES + piece) * ROOM + j, found)


@triton.jit
def _collect(
    logits, row_ints, row_floats, masks, marks, near, counts, kept, stride, vocab, words,
    NEAR: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(marks + index * 6 + 5) > 0:
        left, right = tl.load(marks + index * 6).to(tl.float32), tl.load(marks + index * 6 + 1).to(tl.float32)
        line, mask, bits = line_of(logits, row_ints, masks, index, stride, words)
        s = scores_of(line, bits, mask, piece * PIECE + tl.arange(0, PIECE), vocab)
        inside = (s > left) & (s <= right)
        place = tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(near + (index * PIECES + piece) * NEAR + place, s, mask=inside & (place < NEAR))
        tl.store(counts + index * PIECES + piece, tl.max(place, 0) + 1)
        rate = 1.0 / tl.load(row_floats + index * 4).to(tl.float32)
        min_p = tl.load(row_floats + index * 4 + 2).to(tl.float32)
        w = weight_of(s, tl.load(marks + index * 6 + 4).to(tl.float32), rate)
        tl.store(kept + index * PIECES + piece, tl.sum(tl.where((s > right) & (w >= min_p), w, 0.0), 0))


@triton.jit
def _settle(
    logits, row_ints, row_floats, masks, floats, ints, near, counts, marks, edges, ties, kept, equal, decided,
    stride, vocab, words,
    NEAR: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr, PIECES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    peak, low, alive, bad = scanned(floats, ints, index, PIECES, WIDE)
    if _is_asked(row_ints, row_floats, index, peak, alive, bad, MASS):
        rate = 1.0 / tl.load(row_floats + index * 4).to(tl.float32)
        top_k = tl.load(row_ints + index * 3 + 1)
        line, mask, bits = line_of(logits, row_ints, masks, index, stride, words)
        before, stay = low, alive
        if MASS:
            if (top_k > 0) & (top_k < alive):
                before, stay = tl.load(edges + index), tl.load(ties + index)
        c = tl.arange(0, WIDE)
        most = tl.max(tl.load(counts + index * PIECES + c, mask=c < PIECES, other=0), 0)
        if (peak < float("inf")) & (most <= NEAR):
            p, n = c[:, None], tl.arange(0, NEAR)[None, :]
            count = tl.load(counts + index * PIECES + p, mask=p < PIECES, other=0)
            s = tl.load(near + (index * PIECES + p) * NEAR + n, mask=n < count, other=float("-inf"))
            table = s
            s = tl.reshape(s, (WIDE * NEAR,))
            goal, base = tl.load(marks + index * 6 + 3), tl.load(marks + index * 6 + 2)
            edge = tl.where(most > 0, _edge_near(s, goal - base, peak, rate, MASS), before)
            over = base + tl.sum(_amount_above(s, edge, peak, rate, MASS).to(tl.float64), 0)
            min_p = tl.load(row_floats + index * 4 + 2).to(tl.float32)
            w = weight_of(table, peak, rate)
            more = tl.sum(tl.where((table > edge) & (w >= min_p), w, 0.0), 1)
            at = index * PIECES + c
            tl.store(kept + at, tl.load(kept + at, mask=c < PIECES, other=0.0) + more, mask=c < PIECES)
            if most > 0:
                tl.store(equal + at, tl.sum((table == edge).to(tl.int32), 1), mask=c < PIECES)
                tl.store(decided + index, 1)
        else:
            tl.store(decided + index, 0)
            goal = top_k.to(tl.float64)
            if MASS:
                total = _total(floats, index, peak, rate, PIECES, WIDE)
                if (top_k > 0) & (top_k < alive):
                    one = weight_of(before, peak, rate).to(tl.float64)
                    total = _beyond(line, bits, mask, before, peak, rate, vocab, True, BLOCK) + one * stay
                goal = tl.load(row_floats + index * 4 + 1) * total
            least = tl.where(peak < float("inf"), before, tl.maximum(before, LARGEST))  # beside inf none has a weight
            edge = _edge(line, bits, mask, least, peak, goal, peak, rate, vocab, MASS, BLOCK)
            over = _beyond(line, bits, mask, edge, peak, rate, vocab, MASS, BLOCK)
        if MASS:
            one = weight_of(edge, peak, rate).to(tl.float64)
            enough = tl.maximum(1.0, tl.minimum(tl.ceil((goal - over) / one), 2.0e9)).to(tl.int32)
            stay = tl.where(edge > before, enough, tl.minimum(stay, enough))
        else:
            stay = top_k - over.to(tl.int32)
        tl.store(edges + index, edge)
        tl.store(ties + index, stay)


@triton.jit
def cut_of(row_ints, row_floats, edges, ties, index, low, alive):
    """A row's edge, and how many ties at it stay."""
    top_k = tl.load(row_ints + index * 3 + 1)
    edge, stay = low, alive
    if ((top_k > 0) & (top_k < alive)) | (tl.load(row_floats + index * 4 + 1) < 1.0):
        edge, stay = tl.load(edges + index), tl.load(ties + index)
    return edge, stay


@triton.jit
def is_filtered(row_ints, row_floats, index):
    """Whether a row has top-k, top-p or min-p."""
    top_k, top_p = tl.load(row_ints + index * 3 + 1), tl.load(row_floats + index * 4 + 1)
    return (top_k > 0) | (top_p < 1.0) | (tl.load(row_floats + index * 4 + 2) > 0)


@triton.jit
def _weigh(
    logits, row_ints, row_floats, masks, floats, ints, edges, ties, kept, equal, decided, stride, vocab, words,
    CUT: tl.constexpr, PIECES: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    todo = tl.load(row_ints + index * 3) >= 0
    if CUT:
        todo = todo & (tl.load(decided + index) == 0)
    if todo & (tl.load(row_floats + index * 4) > 0) & is_filtered(row_ints, row_floats, index):
        peak, low, alive, bad = scanned(floats, ints, index, PIECES, WIDE)
        if (bad == 0) & (peak > float("-inf")):
            rate = 1.0 / tl.load(row_floats + index * 4).to(tl.float32)
            min_p = tl.load(row_floats + index * 4 + 2).to(tl.float32)
            edge, _ = cut_of(row_ints, row_floats, edges, ties, index, low, alive)
            line, mask, bits = line_of(logits, row_ints, masks, index, stride, words)
            s = scores_of(line, bits, mask, piece * PIECE + tl.arange(0, PIECE), vocab)
            w = weight_of(s, peak, rate)
            tl.store(kept + index * PIECES + piece, tl.sum(tl.where((s > edge) & (w >= min_p), w, 0.0), 0))
            tl.store(equal + index * PIECES + piece, tl.sum((s == edge).to(tl.int32), 0))


# -- the edge ----------------------------------------------------------------------------------------------------------


@triton.jit
def _amount_above(s, level, peak, rate, MASS: tl.constexpr):
    """1, or its weight, for every score above a level."""
    return tl.where(s > level, weight_of(s, peak, rate) if MASS else 1.0, 0.0)


@triton.jit
def _seen(s, level, peak, rate, amount, up, down, MASS: tl.constexpr):
    """Adds scores to the amount above a level, the smallest score above it, and the largest not above it."""
    over = s > level
    amount += _amount_above(s, level, peak, rate, MASS)
    up = tl.minimum(up, tl.where(over, s, float("inf")))
    return amount, up, tl.maximum(down, tl.where(over, float("-inf"), s))


@triton.jit
def _between_three(low, high):
    """Three levels between two scores."""
    half = low + (high * 0.5 - low * 0.5)
    half = tl.where(half < high, half, low)
    left = tl.where(half > low, low + (half - low) * 0.5, low)
    right = half + (high - half) * 0.5
    return left, half, tl.where(right < high, right, half)


@triton.jit
def _edge_near(s, goal, peak, rate, MASS: tl.constexpr):
    """The smallest of these scores above which there is less than `goal` of them; -inf are none of them."""
    low = tl.min(tl.where(s > float("-inf"), s, float("inf")), 0)
    high = tl.max(s, 0)
    while low < high:
        left, half, right = _between_three(low, high)
        zero, most = tl.zeros_like(s), tl.full(s.shape, float("inf"), tl.float32)
        n0, up0, down0 = _seen(s, left, peak, rate, zero, most, -most, MASS)
        n1, up1, down1 = _seen(s, half, peak, rate, zero, most, -most, MASS)
        n2, up2, down2 = _seen(s, right, peak, rate, zero, most, -most, MASS)
        if tl.sum(n2.to(tl.float64), 0) >= goal:
            low = tl.min(up2, 0)
        elif tl.sum(n1.to(tl.float64), 0) >= goal:
            low, high = tl.min(up1, 0), tl.max(down2, 0)
        elif tl.sum(n0.to(tl.float64), 0) >= goal:
            low, high = tl.min(up0, 0), tl.max(down1, 0)
        else:
            high = tl.max(down0, 0)
    return low


@triton.jit
def _four(logits, masks, mask, base, vocab, BLOCK: tl.constexpr):
    """The scores of four blocks from a token on: their loads overlap."""
    i = base + tl.arange(0, BLOCK)
    a, b = scores_of(logits, masks, mask, i, vocab), scores_of(logits, masks, mask, i + BLOCK, vocab)
    c = scores_of(logits, masks, mask, i + 2 * BLOCK, vocab)
    return a, b, c, scores_of(logits, masks, mask, i + 3 * BLOCK, vocab)


@triton.jit
def _beyond(line, masks, mask, level, peak, rate, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The number of scores above a level, or their total weight."""
    amount = tl.zeros((BLOCK,), tl.float32)
    for base in range(0, vocab, 4 * BLOCK):
        a, b, c, d = _four(line, masks, mask, base, vocab, BLOCK)
        amount += _amount_above(a, level, peak, rate, MASS) + _amount_above(b, level, peak, rate, MASS)
        amount += _amount_above(c, level, peak, rate, MASS) + _amount_above(d, level, peak, rate, MASS)
    return tl.sum(amount.to(tl.float64), 0)


@triton.jit
def _seen_of_four(a, b, c, d, level, peak, rate, amount, up, down, MASS: tl.constexpr):
    amount, up, down = _seen(a, level, peak, rate, amount, up, down, MASS)
    amount, up, down = _seen(b, level, peak, rate, amount, up, down, MASS)
    amount, up, down = _seen(c, level, peak, rate, amount, up, down, MASS)
    return _seen(d, level, peak, rate, amount, up, down, MASS)


@triton.jit
def _edge(line, masks, mask, low, high, goal, peak, rate, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest score of the row above which there is less than `goal`, between the scores `low` and `high`.

    Each pass over the row compares with three levels between them; the next interval again ends at scores of the row.
    Sums are kept per lane of a block until the end of a pass.
    """
    while low < high:
        left, half, right = _between_three(low, high)
        n0 = tl.zeros((BLOCK,), tl.float32)
        n1, n2 = n0, n0
        up0 = tl.full((BLOCK,), float("inf"), tl.float32)
        up1, up2 = up0, up0
        down0 = tl.full((BLOCK,), float("-inf"), tl.float32)
        down1, down2 = down0, down0
        for base in range(0, vocab, 4 * BLOCK):
            a, b, c, d = _four(line, masks, mask, base, vocab, BLOCK)
            n0, up0, down0 = _seen_of_four(a, b, c, d, left, peak, rate, n0, up0, down0, MASS)
            n1, up1, down1 = _seen_of_four(a, b, c, d, half, peak, rate, n1, up1, down1, MASS)
            n2, up2, down2 = _seen_of_four(a, b, c, d, right, peak, rate, n2, up2, down2, MASS)
        if tl.sum(n2.to(tl.float64), 0) >= goal:
            low = tl.min(up2, 0)
        elif tl.sum(n1.to(tl.float64), 0) >= goal:
            low, high = tl.min(up1, 0), tl.max(down2, 0)
        elif tl.sum(n0.to(tl.float64), 0) >= goal:
            low, high = tl.min(up0, 0), tl.max(down1, 0)
        else:
            high = tl.max(down0, 0)
    return low
