"""Sampling on the device: a row of logits and its sampling parameters in, a token out.

The reference is `headway.kernels.reference.sampling.sample`; here float32 with sums of tiles in float64: logit mask →
temperature → top-k → top-p → min-p, then a walk through the kept tokens in id order. Bias and penalties are applied to
the row before (`adjust`).

    scan      a row's largest score, the weights relative to it, in pieces
    cuts.py   what top-k and top-p keep of it
    choose    the piece that the token is in, and the token

No token depends on other rows.
"""

# ruff: noqa: PLR0124, PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.cuts import (
    PIECE,
    CutWorkspace,
    Kinds,
    cut_of,
    find_cuts,
    is_filtered,
    line_of,
    make_cut_workspace,
    scanned,
    scores_of,
    weight_of,
)

NO_TOKEN = -1  # a row with a NaN
UNDECIDED = -2  # every allowed token of the row is at -inf: left to the reference
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


def sample(
    logits: Tensor,
    arrays: SamplerArrays,
    workspace: SamplingWorkspace,
    cuts: CutWorkspace | None = None,
    kinds: Kinds = Kinds(),
) -> None:
    """A token for each of `arrays` into workspace.tokens. logits is [R, V], of any float type; `kinds` has what any of
    them asks for. Calls that come one after the other may share `cuts`."""
    count, vocab = arrays.ints.shape[0], logits.shape[1]
    pieces, words = triton.cdiv(vocab, PIECE), arrays.masks.shape[1]
    if cuts is None:
        cuts = make_cut_workspace(count if kinds.filters else 1, vocab, logits.device)
    row = logits, arrays.ints, arrays.floats, arrays.masks, workspace.floats, workspace.ints
    _scan[(count, pieces)](
        *row, logits.stride(0), vocab, words, PIECES=pieces, PIECE=PIECE, num_warps=4
    )  # fmt: skip
    find_cuts(*row, cuts, kinds)
    _choose[(count,)](
        *row, cuts.edges, cuts.ties, cuts.kept, cuts.equal, workspace.tokens, logits.stride(0), vocab, words,
        PIECES=pieces, WIDE=triton.next_power_of_2(pieces), PIECE=PIECE, num_warps=8,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class AdjustmentArrays:
    """Bias and penalties of R rows of logits, in device memory.

    Row rows[i] has the entries at[i] … at[i + 1] - 1, in which no token occurs twice. `counts` has for each how often
    the token was generated, or -1 where it was not seen at all; `biases` what is added to its logit, if anything is
    anywhere; `ways` [R, 3] the repetition, presence and frequency penalties.
    """

    rows: Tensor  # int32, as what follows
    at: Tensor
    ids: Tensor
    counts: Tensor
    ways: Tensor  # float64
    biases: Tensor | None = None  # float64


def adjust(logits: Tensor, what: AdjustmentArrays) -> None:
    """Bias and penalties onto logits [R, V] float32, in place."""
    if len(what.rows):
        biases = what.ways if what.biases is None else what.biases
        _adjust[(len(what.rows), 8)](
            logits, what.rows, what.at, what.ids, what.counts, biases, what.ways, logits.stride(0),
            BIASED=what.biases is not None, BLOCK=256, num_warps=4,
        )  # fmt: skip


@triton.jit
def _adjust(logits, rows, at, ids, counts, biases, ways, stride, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = logits + tl.load(rows + i).to(tl.int64) * stride
    repetition, presence = tl.load(ways + 3 * i), tl.load(ways + 3 * i + 1)
    frequency = tl.load(ways + 3 * i + 2)
    end = tl.load(at + i + 1)
    for base in range(tl.load(at + i) + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        n = base + tl.arange(0, BLOCK)
        token = tl.load(ids + n, mask=n < end, other=0)
        s = tl.load(row + token, mask=n < end, other=0.0).to(tl.float64)
        if BIASED:
            s += tl.load(biases + n, mask=n < end, other=0.0)
        count = tl.load(counts + n, mask=n < end, other=-1)
        s = tl.where(count >= 0, tl.where(s > 0, s / repetition, s * repetition), s)
        s -= tl.where(count > 0, presence + frequency * count, 0.0)
        tl.store(row + token, s.to(tl.float32), mask=n < end)


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
        s = scores_of(line, masks + tl.maximum(mask, 0).to(tl.int64) * words, mask, i, vocab)
        s = tl.where(s != s, float("-inf"), s)
        peak = tl.max(s, 0)
        alive = s > float("-inf")
        temperature = tl.load(row_floats + index * 4).to(tl.float32)
        mass = 0.0
        if temperature > 0:
            mass = tl.sum(tl.where(alive, weight_of(s, peak, 1.0 / temperature), 0.0), 0)
        at = index * PIECES + piece
        tl.store(floats + at * 3, peak)
        tl.store(floats + at * 3 + 1, mass)
        tl.store(floats + at * 3 + 2, tl.min(tl.where(alive, s, float("inf")), 0))
        tl.store(ints + at * 3, tl.min(tl.where((s == peak) & alive, i, vocab), 0))
        tl.store(ints + at * 3 + 1, bad)
        tl.store(ints + at * 3 + 2, tl.sum(alive.to(tl.int32), 0))


@triton.jit
def _choose(
    logits, row_ints, row_floats, masks, floats, ints, edges, ties, kept, equal, tokens, stride, vocab, words,
    PIECES: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    token = -2
    if tl.load(row_ints + index * 3) >= 0:
        peak, low, alive, bad = scanned(floats, ints, index, PIECES, WIDE)
        temperature = tl.load(row_floats + index * 4).to(tl.float32)
        c = tl.arange(0, WIDE)
        at = (index * PIECES + c) * 3
        tops = tl.load(floats + at, mask=c < PIECES, other=float("-inf"))
        if bad > 0:
            token = -1
        elif peak == float("-inf"):
            token = -2
        elif temperature == 0:
            firsts = tl.load(ints + at, mask=c < PIECES, other=vocab)
            token = tl.min(tl.where(tops == peak, firsts, vocab), 0)
        else:
            rate = 1.0 / temperature
            min_p = tl.load(row_floats + index * 4 + 2).to(tl.float32)
            edge, stay = cut_of(row_ints, row_floats, edges, ties, index, low, alive)
            if is_filtered(row_ints, row_floats, index):
                weights = tl.load(kept + index * PIECES + c, mask=c < PIECES, other=0.0).to(tl.float64)
                same = tl.load(equal + index * PIECES + c, mask=c < PIECES, other=0)
                last = weight_of(edge, peak, rate)
                first = tl.maximum(0, tl.minimum(same, stay - (tl.cumsum(same, 0) - same)))
                weights += tl.where(last >= min_p, last * first, 0.0)
            else:
                parts = tl.load(floats + at + 1, mask=c < PIECES, other=0.0) * weight_of(tops, peak, rate)
                weights = tl.where(c < PIECES, parts, 0.0).to(tl.float64)
                same = c * 0
            along = tl.cumsum(weights, 0)
            goal = tl.load(row_floats + index * 4 + 3) * tl.max(along, 0)
            piece = tl.minimum(tl.sum((along <= goal).to(tl.int32), 0), tl.max(tl.where(weights > 0, c, 0), 0))
            passed = tl.max(tl.where(c < piece, along, 0.0), 0)
            past = tl.sum(tl.where(c < piece, same, 0), 0)
            line, mask, bits = line_of(logits, row_ints, masks, index, stride, words)
            i = piece * PIECE + tl.arange(0, PIECE)
            s = scores_of(line, bits, mask, i, vocab)
            w = tl.where(s > float("-inf"), weight_of(s, peak, rate), 0.0)
            if is_filtered(row_ints, row_floats, index):
                tied = (s == edge).to(tl.int32)
                stays = (s > edge) | ((tied == 1) & (past + tl.cumsum(tied, 0) <= stay))
                w = tl.where(stays & (w >= min_p), w, 0.0)
            reached = passed + tl.cumsum(w.to(tl.float64), 0)
            token = tl.min(tl.where((reached > goal) & (w > 0), i, vocab), 0)
            if token == vocab:  # the two sums differ in their last bits
                token = tl.max(tl.where(w > 0, i, 0), 0)
    tl.store(tokens + index, token)
