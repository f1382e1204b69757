"""Choosing tokens on the device: a row of logits and how to draw from it in, a token out; nothing else leaves.

The meaning is that of `headway.kernels.reference.sampling.choose`, in float32 with sums of tiles in float64: logit mask →
temperature → top-k → top-p → min-p, then a draw that goes through the kept tokens in id order. Bias and penalties are
applied to the row before (`adjust`). Thresholds are found by halving the span between two scores that occur in the
row, never by sorting. Nothing depends on other rows.
"""  # noqa: E501

# ruff: noqa: PLR0124, PLR0915, PLR0917
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_TOKEN = -1  # a row with NaN in it
UNDECIDED = -2  # a row in which every allowed token has no chance: the reference decides
PIECE = 4096  # logits that one program of the first pass looks at
BLOCK = 2048  # logits that one program of the second pass looks at side by side, four times that at once
ROW, TOP_K, MASK, ASK_INTS = 0, 1, 2, 3
TEMPERATURE, TOP_P, MIN_P, UNIFORM, ASK_FLOATS = 0, 1, 2, 3, 4


@dataclass(frozen=True, eq=False)
class Asks:
    """What is drawn: for each of A tokens a row of logits, ways and a uniform number, in device memory.

    `ints` [A, 3] has the row (-1 for none), top-k (0: off) and which mask binds it (-1: none); `floats` [A, 4] has
    temperature, top-p, min-p and the number; `masks` [M, V / 32] has a bit for each token that may be chosen.
    """

    ints: Tensor
    floats: Tensor
    masks: Tensor


@dataclass(frozen=True, eq=False)
class Found:
    """Room for what the first pass finds of A rows in pieces of PIECE logits, and for the tokens."""

    floats: Tensor  # [A, pieces, 3]: largest, sum of weights below it, smallest that has a chance
    ints: Tensor  # [A, pieces, 3]: where the largest is, whether there is a NaN, how many have a chance
    tokens: Tensor  # [A] int32


def room(count: int, vocab: int, device: torch.device) -> Found:
    """Room for this many tokens."""
    pieces = triton.cdiv(vocab, PIECE)
    return Found(
        torch.empty(count, pieces, 3, dtype=torch.float32, device=device),
        torch.empty(count, pieces, 3, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
    )


def choose(logits: Tensor, asks: Asks, found: Found) -> None:
    """A token for each ask into found.tokens. logits is [R, V], of any float type."""
    count, vocab = asks.ints.shape[0], logits.shape[1]
    pieces, words = triton.cdiv(vocab, PIECE), asks.masks.shape[1]
    _scan[(count, pieces)](
        logits, asks.ints, asks.floats, asks.masks, found.floats, found.ints, logits.stride(0), vocab, words,
        PIECES=pieces, PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    _draw[(count,)](
        logits, asks.ints, asks.floats, asks.masks, found.floats, found.ints, found.tokens,
        logits.stride(0), vocab, words, PIECES=pieces, WIDE=triton.next_power_of_2(pieces), PIECE=PIECE,
        BLOCK=BLOCK, SPANS=triton.next_power_of_2(triton.cdiv(vocab, 4 * BLOCK)), num_warps=16,
    )  # fmt: skip


def adjust(logits: Tensor, rows: Tensor, at: Tensor, ids: Tensor, amounts: Tensor, ways: Tensor) -> None:
    """Bias and penalties onto logits [R, V] float32, in place.

    Row rows[i] takes the entries at[i] … at[i + 1] - 1, in which no token occurs twice. Each has a bias, whether the
    token was seen, and how often it was generated in `amounts` [n, 3]; ways [i] has the repetition, presence and
    frequency penalties.
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
    """The scores of tokens i; -inf for those that are masked or not there."""
    s = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    if mask >= 0:
        bits = tl.load(masks + i // 32, mask=i < vocab, other=0)
        s = tl.where(((bits >> (i % 32)) & 1) == 1, s, float("-inf"))
    return s


@triton.jit
def _four(logits, masks, mask, base, vocab, BLOCK: tl.constexpr):
    """The scores of four blocks from a token on: what is asked for together comes together."""
    i = base + tl.arange(0, BLOCK)
    a, b = _scores(logits, masks, mask, i, vocab), _scores(logits, masks, mask, i + BLOCK, vocab)
    c, d = _scores(logits, masks, mask, i + 2 * BLOCK, vocab), _scores(logits, masks, mask, i + 3 * BLOCK, vocab)
    return a, b, c, d


@triton.jit
def _weight(s, peak, rate):
    """Weights beside the largest, which has 1; rate is 1 / temperature."""
    return tl.where(s == peak, 1.0, tl.exp((s - peak) * rate))


@triton.jit
def _scan(
    logits, ask_ints, ask_floats, masks, floats, ints, stride, vocab, words, PIECES: tl.constexpr, PIECE: tl.constexpr
):
    ask, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(ask_ints + ask * 3)
    if row >= 0:
        mask = tl.load(ask_ints + ask * 3 + 2)
        i = piece * PIECE + tl.arange(0, PIECE)
        line = logits + row.to(tl.int64) * stride
        raw = tl.load(line + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        bad = tl.max((raw != raw).to(tl.int32), 0)
        s = _scores(line, masks + tl.maximum(mask, 0).to(tl.int64) * words, mask, i, vocab)
        s = tl.where(s != s, float("-inf"), s)
        peak = tl.max(s, 0)
        alive = s > float("-inf")
        temperature = tl.load(ask_floats + ask * 4).to(tl.float32)
        mass = 0.0
        if temperature > 0:
            mass = tl.sum(tl.where(alive, _weight(s, peak, 1.0 / temperature), 0.0), 0)
        at = ask * PIECES + piece
        tl.store(floats + at * 3, peak)
        tl.store(floats + at * 3 + 1, mass)
        tl.store(floats + at * 3 + 2, tl.min(tl.where(alive, s, float("inf")), 0))
        tl.store(ints + at * 3, tl.min(tl.where((s == peak) & alive, i, vocab), 0))
        tl.store(ints + at * 3 + 1, bad)
        tl.store(ints + at * 3 + 2, tl.sum(alive.to(tl.int32), 0))


@triton.jit
def _beyond(line, masks, mask, level, peak, rate, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many scores there are above a level, or how much weight they have."""
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
    """What is above a level so far, its smallest score, and the largest that is not above; with these scores."""
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
    """The smallest score of the row above which there is less than `goal`: it lies between two scores of the row.

    Each pass over the row compares with three levels between them; the next span again ends at scores of the row. Sums
    stay apart, one for each place of a block, until the end of a pass.
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
    """The weights of scores above the edge that are not too small; 0 for others."""
    w = _weight(s, peak, rate)
    return tl.where((s > edge) & (w >= min_p), w, 0.0)


@triton.jit
def _draw(
    logits, ask_ints, ask_floats, masks, floats, ints, tokens, stride, vocab, words,
    PIECES: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    ask = tl.program_id(0).to(tl.int64)
    row = tl.load(ask_ints + ask * 3)
    token = -2
    if row >= 0:
        c = tl.arange(0, WIDE)
        at = (ask * PIECES + c) * 3
        tops = tl.load(floats + at, mask=c < PIECES, other=float("-inf"))
        firsts = tl.load(ints + at, mask=c < PIECES, other=vocab)
        bad = tl.max(tl.load(ints + at + 1, mask=c < PIECES, other=0), 0)
        peak = tl.max(tops, 0)
        temperature = tl.load(ask_floats + ask * 4).to(tl.float32)
        if bad > 0:
            token = -1
        elif peak == float("-inf"):
            token = -2
        elif temperature == 0:
            token = tl.min(tl.where(tops == peak, firsts, vocab), 0)
        else:
            rate = 1.0 / temperature
            line = logits + row.to(tl.int64) * stride
            mask = tl.load(ask_ints + ask * 3 + 2)
            bits = masks + tl.maximum(mask, 0).to(tl.int64) * words
            top_k = tl.load(ask_ints + ask * 3 + 1)
            top_p = tl.load(ask_floats + ask * 4 + 1)
            min_p = tl.load(ask_floats + ask * 4 + 2).to(tl.float32)
            uniform = tl.load(ask_floats + ask * 4 + 3)
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
                if token == vocab:  # the two ways of adding up differ in their last bits
                    token = tl.max(tl.where(w > 0, i, 0), 0)
            else:
                alive = tl.sum(tl.load(ints + at + 2, mask=c < PIECES, other=0), 0)
                low = tl.min(tl.load(floats + at + 2, mask=c < PIECES, other=float("inf")), 0)
                edge, ties = low, alive  # kept: what is above the edge, and the first `ties` at it
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
                # How much is kept in each span of tokens says in which of them the draw ends.
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
    tl.store(tokens + ask, token)
