"""Sampling on the device: a row of logits and its sampling parameters in, a token out.

The reference is `headway.kernels.reference.sampling.sample`; here float32 with sums of tiles in float64: logit mask →
temperature → top-k → top-p → min-p, then a walk through the kept tokens in id order. Bias and penalties are applied to
the row before (`adjust`). Thresholds are found by bisection between two scores of the row, never by sorting. No token
depends on other rows.
"""

# ruff: noqa: PLR0124, PLR0915, PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass

NO_TOKEN = -1  # a row with a NaN
UNDECIDED = -2  # every allowed token of the row is at -inf: left to the reference
PIECE = 4096  # logits per program of the first pass
BLOCK = 2048  # logits per vector of the second pass, which loads four vectors at a time
ROW, TOP_K, MASK, SAMPLER_INTS = 0, 1, 2, 3
TEMPERATURE, TOP_P, MIN_P, UNIFORM, SAMPLER_FLOATS = 0, 1, 2, 3, 4


@dataclass(frozen=True, eq=False)
class SamplerArrays:
    """How A tokens are sampled, in device memory.

    `ints` [A, 3] has the row of logits (-1 for none), top-k (0: off) and the index of the mask (-1: none); `floats`
    [A, 4] has temperature, top-p, min-p and a uniform number; `masks` [M, V / 32] has a bit for each allowed token.
    """

    ints: Tensor
    floats: Tensor
    masks: Tensor


@dataclass(frozen=True, eq=False)
class SamplingWorkspace:
    """The results of the first pass over A rows in pieces of PIECE logits, and the tokens."""

    floats: Tensor  # [A, pieces, 3]: largest score, sum of weights relative to it, smallest finite score
    ints: Tensor  # [A, pieces, 3]: index of the largest, whether there is a NaN, number of finite scores
    tokens: Tensor  # [A] int32


def make_workspace(count: int, vocab: int, device: torch.device) -> SamplingWorkspace:
    """A workspace for `count` tokens."""
    pieces = triton.cdiv(vocab, PIECE)
    return SamplingWorkspace(
        torch.empty(count, pieces, 3, dtype=torch.float32, device=device),
        torch.empty(count, pieces, 3, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
    )


def sample(logits: Tensor, arrays: SamplerArrays, workspace: SamplingWorkspace) -> None:
    """A token for each of `arrays` into workspace.tokens. logits is [R, V], of any float type."""
    count, vocab = arrays.ints.shape[0], logits.shape[1]
    pieces, words = triton.cdiv(vocab, PIECE), arrays.masks.shape[1]
    _scan[(count, pieces)](
        logits, arrays.ints, arrays.floats, arrays.masks, workspace.floats, workspace.ints,
        logits.stride(0), vocab, words, PIECES=pieces, PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    _sample[(count,)](
        logits, arrays.ints, arrays.floats, arrays.masks, workspace.floats, workspace.ints, workspace.tokens,
        logits.stride(0), vocab, words, PIECES=pieces, WIDE=triton.next_power_of_2(pieces), PIECE=PIECE,
        BLOCK=BLOCK, SPANS=triton.next_power_of_2(triton.cdiv(vocab, 4 * BLOCK)), num_warps=16,
    )  # fmt: skip


def adjust(logits: Tensor, rows: Tensor, at: Tensor, ids: Tensor, amounts: Tensor, ways: Tensor) -> None:
    """Bias and penalties onto logits [R, V] float32, in place.

    Row rows[i] has the entries at[i] … at[i + 1] - 1, in which no token occurs twice. `amounts` [n, 3] has for each
    entry the bias, whether the token was seen, and how often it was generated; ways[i] has the repetition, presence
    and frequency penalties.
    """
    if len(rows):
        _adjust[(len(rows),)](logits, rows, at, ids, amounts, ways, logits.stride(0), BLOCK=1024, num_warps=4)


@triton.jit
def _adjust(logits, rows, at, ids, amounts, ways, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = logits + tl.load(rows + i).to(tl.int64) * stride
    repetition, presence = tl.load(ways + 3 * i), tl.load(ways + 3 * i + 1)
    frequency = tl.load(ways + 3 * i + 2)
    end = tl.load(at + i + 1)
    for base in range(tl.load(at + i), end, BLOCK):
        n = base + tl.arange(0, BLOCK)
        token = tl.load(ids + n, mask=n < end, other=0)
        s = tl.load(row + token, mask=n < end, other=0.0).to(tl.float64)
        s += tl.load(amounts + 3 * n, mask=n < end, other=0.0)
        seen = tl.load(amounts + 3 * n + 1, mask=n < end, other=0.0) > 0
        count = tl.load(amounts + 3 * n + 2, mask=n < end, other=0.0)
        s = tl.where(seen, tl.where(s > 0, s / repetition, s * repetition), s)
        s -= tl.where(count > 0, presence + frequency * count, 0.0)
        tl.store(row + token, s.to(tl.float32), mask=n < end)


@triton.jit
def _scores(logits, masks, mask, i, vocab):
    """The scores of tokens i; -inf for those masked or outside the vocabulary."""
    s = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    if mask >= 0:
        bits = tl.load(masks + i // 32, mask=i < vocab, other=0)
        s = tl.where(((bits >> (i % 32)) & 1) == 1, s, float("-inf"))
    return s


@triton.jit
def _four(logits, masks, mask, base, vocab, BLOCK: tl.constexpr):
    """The scores of four blocks from a token on: their loads overlap."""
    i = base + tl.arange(0, BLOCK)
    a, b = _scores(logits, masks, mask, i, vocab), _scores(logits, masks, mask, i + BLOCK, vocab)
    c, d = _scores(logits, masks, mask, i + 2 * BLOCK, vocab), _scores(logits, masks, mask, i + 3 * BLOCK, vocab)
    return a, b, c, d


@triton.jit
def _weight(s, peak, rate):
    """Weights relative to the largest, which is 1; rate is 1 / temperature."""
    return tl.where(s == peak, 1.0, tl.exp((s - peak) * rate))


@triton.jit
def _scan(
    logits, row_ints, row_floats, masks, floats, ints, stride, vocab, words, PIECES: tl.constexpr, PIECE: tl.constexpr
):
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(row_ints + index * 3)
    if row >= 0:
        mask = tl.load(row_ints + index * 3 + 2)
        i = piece * PIECE + tl.arange(0, PIECE)
        line = logits + row.to(tl.int64) * stride
        raw = tl.load(line + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        bad = tl.max((raw != raw).to(tl.int32), 0)
        s = _scores(line, masks + tl.maximum(mask, 0).to(tl.int64) * words, mask, i, vocab)
        s = tl.where(s != s, float("-inf"), s)
        peak = tl.max(s, 0)
        alive = s > float("-inf")
        temperature = tl.load(row_floats + index * 4).to(tl.float32)
        mass = 0.0
        if temperature > 0:
            mass = tl.sum(tl.where(alive, _weight(s, peak, 1.0 / temperature), 0.0), 0)
        at = index * PIECES + piece
        tl.store(floats + at * 3, peak)
        tl.store(floats + at * 3 + 1, mass)
        tl.store(floats + at * 3 + 2, tl.min(tl.where(alive, s, float("inf")), 0))
        tl.store(ints + at * 3, tl.min(tl.where((s == peak) & alive, i, vocab), 0))
        tl.store(ints + at * 3 + 1, bad)
        tl.store(ints + at * 3 + 2, tl.sum(alive.to(tl.int32), 0))


@triton.jit
def _beyond(line, masks, mask, level, peak, rate, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The number of scores above a level, or their total weight."""
    amount = tl.zeros((BLOCK,), tl.float32)
    for base in range(0, vocab, 4 * BLOCK):
        a, b, c, d = _four(line, masks, mask, base, vocab, BLOCK)
        amount += _above(a, level, peak, rate, MASS) + _above(b, level, peak, rate, MASS)
        amount += _above(c, level, peak, rate, MASS) + _above(d, level, peak, rate, MASS)
    return tl.sum(amount.to(tl.float64), 0)


@triton.jit
def _above(s, level, peak, rate, MASS: tl.constexpr):
    """1, or its weight, for every score above a level."""
    return tl.where(s > level, _weight(s, peak, rate) if MASS else 1.0, 0.0)


@triton.jit
def _seen(s, level, peak, rate, amount, up, down, MASS: tl.constexpr):
    """Adds scores to the amount above a level, the smallest score above it, and the largest not above it."""
    over = s > level
    amount += _above(s, level, peak, rate, MASS)
    up = tl.minimum(up, tl.where(over, s, float("inf")))
    return amount, up, tl.maximum(down, tl.where(over, float("-inf"), s))


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
        half = low + (high - low) * 0.5
        half = tl.where(half < high, half, low)
        left = tl.where(half > low, low + (half - low) * 0.5, low)
        right = half + (high - half) * 0.5
        right = tl.where(right < high, right, half)
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


@triton.jit
def _kept(s, edge, peak, rate, min_p):
    """The weights of scores above the edge that reach min_p; 0 for others."""
    w = _weight(s, peak, rate)
    return tl.where((s > edge) & (w >= min_p), w, 0.0)


@triton.jit
def _sample(
    logits, row_ints, row_floats, masks, floats, ints, tokens, stride, vocab, words,
    PIECES: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ints + index * 3)
    token = -2
    if row >= 0:
        c = tl.arange(0, WIDE)
        at = (index * PIECES + c) * 3
        tops = tl.load(floats + at, mask=c < PIECES, other=float("-inf"))
        firsts = tl.load(ints + at, mask=c < PIECES, other=vocab)
        bad = tl.max(tl.load(ints + at + 1, mask=c < PIECES, other=0), 0)
        peak = tl.max(tops, 0)
        temperature = tl.load(row_floats + index * 4).to(tl.float32)
        if bad > 0:
            token = -1
        elif peak == float("-inf"):
            token = -2
        elif temperature == 0:
            token = tl.min(tl.where(tops == peak, firsts, vocab), 0)
        else:
            rate = 1.0 / temperature
            line = logits + row.to(tl.int64) * stride
            mask = tl.load(row_ints + index * 3 + 2)
            bits = masks + tl.maximum(mask, 0).to(tl.int64) * words
            top_k = tl.load(row_ints + index * 3 + 1)
            top_p = tl.load(row_floats + index * 4 + 1)
            min_p = tl.load(row_floats + index * 4 + 2).to(tl.float32)
            uniform = tl.load(row_floats + index * 4 + 3)
            parts = tl.load(floats + at + 1, mask=c < PIECES, other=0.0) * _weight(tops, peak, rate)
            sums = tl.cumsum(tl.where(c < PIECES, parts, 0.0).to(tl.float64), 0)
            total = tl.max(sums, 0)
            if (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0):
                goal = uniform * total
                piece = tl.minimum(tl.sum((sums <= goal).to(tl.int32), 0), PIECES - 1)
                before = tl.max(tl.where(c < piece, sums, 0.0), 0)
                i = piece * PIECE + tl.arange(0, PIECE)
                s = _scores(line, bits, mask, i, vocab)
                w = tl.where(s > float("-inf"), _weight(s, peak, rate), 0.0)
                reached = before + tl.cumsum(w.to(tl.float64), 0)
                token = tl.min(tl.where((reached > goal) & (w > 0), i, vocab), 0)
                if token == vocab:  # the two sums differ in their last bits
                    token = tl.max(tl.where(w > 0, i, 0), 0)
            else:
                alive = tl.sum(tl.load(ints + at + 2, mask=c < PIECES, other=0), 0)
                low = tl.min(tl.load(floats + at + 2, mask=c < PIECES, other=float("inf")), 0)
                edge, ties = low, alive  # kept: scores above the edge, and the first `ties` at it
                if (top_k > 0) & (top_k < alive):
                    edge = _edge(line, bits, mask, low, peak, top_k.to(tl.float64), peak, rate, vocab, False, BLOCK)
                    over = _beyond(line, bits, mask, edge, peak, rate, vocab, False, BLOCK)
                    ties = top_k - over.to(tl.int32)
                if top_p < 1.0:
                    one = _weight(edge, peak, rate).to(tl.float64)
                    over = _beyond(line, bits, mask, edge, peak, rate, vocab, True, BLOCK)
                    if (top_k > 0) & (top_k < alive):
                        total = over + one * ties
                    goal = top_p * total
                    before = edge
                    edge = _edge(line, bits, mask, before, peak, goal, peak, rate, vocab, True, BLOCK)
                    over = _beyond(line, bits, mask, edge, peak, rate, vocab, True, BLOCK)
                    one = _weight(edge, peak, rate).to(tl.float64)
                    needed = tl.ceil((goal - over) / one)
                    enough = tl.maximum(1.0, tl.minimum(needed, 2.0e9)).to(tl.int32)
                    ties = tl.where(edge > before, enough, tl.minimum(ties, enough))
                # The weight kept in each span of tokens tells which span the sampled token is in.
                n = tl.arange(0, SPANS)
                kept = tl.zeros((SPANS,), tl.float64)
                equal = tl.zeros((SPANS,), tl.int32)
                for span in range(0, tl.cdiv(vocab, 4 * BLOCK)):
                    s0, s1, s2, s3 = _four(line, bits, mask, span * 4 * BLOCK, vocab, BLOCK)
                    w = _kept(s0, edge, peak, rate, min_p) + _kept(s1, edge, peak, rate, min_p)
                    w += _kept(s2, edge, peak, rate, min_p) + _kept(s3, edge, peak, rate, min_p)
                    at_edge = (s0 == edge).to(tl.int32) + (s1 == edge).to(tl.int32)
                    at_edge += (s2 == edge).to(tl.int32) + (s3 == edge).to(tl.int32)
                    kept = tl.where(n == span, tl.sum(w.to(tl.float64), 0), kept)
                    equal = tl.where(n == span, tl.sum(at_edge, 0), equal)
                last = _weight(edge, peak, rate)
                first = tl.maximum(0, tl.minimum(equal, ties - (tl.cumsum(equal, 0) - equal)))
                kept += tl.where(last >= min_p, last * first, 0.0)
                along = tl.cumsum(kept, 0)
                goal = uniform * tl.max(along, 0)
                span = tl.minimum(tl.sum((along <= goal).to(tl.int32), 0), tl.max(tl.where(kept > 0, n, 0), 0))
                passed = tl.max(tl.where(n < span, along, 0.0), 0)
                past = tl.sum(tl.where(n < span, equal, 0), 0)
                token = vocab
                final = 0
                base = span * 4 * BLOCK
                end = tl.minimum(vocab, base + 4 * BLOCK)
                while (base < end) & (token == vocab):
                    i = base + tl.arange(0, BLOCK)
                    s = _scores(line, bits, mask, i, vocab)
                    tied = (s == edge).to(tl.int32)
                    w = tl.where(s > float("-inf"), _weight(s, peak, rate), 0.0)
                    stays = (s > edge) | ((tied == 1) & (past + tl.cumsum(tied, 0) <= ties))
                    w = tl.where(stays & (w >= min_p), w, 0.0)
                    reached = passed + tl.cumsum(w.to(tl.float64), 0)
                    token = tl.min(tl.where((reached > goal) & (w > 0), i, vocab), 0)
                    final = tl.maximum(final, tl.max(tl.where(w > 0, i, 0), 0))
                    passed += tl.sum(w.to(tl.float64), 0)
                    past += tl.sum(tied, 0)
                    base += BLOCK
                if token == vocab:
                    token = final
    tl.store(tokens + index, token)
