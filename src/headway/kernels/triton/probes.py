"""Probes of rows of logits, on the device: one pass over a row, and only a few numbers of it are copied back.

    measure   for each piece of a row the largest score, the sum of weights relative to it, and the sum of
              weights × scores (for the entropy), without a softmax in memory; where its best are wanted, the largest
              score of each short block too
    place     single scores, and how many scores in each piece are above them
    best      a row's best scores, in order, ties by lower id: they are in as many of its best blocks

The host combines the pieces in float64 (`combine`). `headway.kernels.reference.sampling` is the reference. No result
depends on other rows.
"""

# ruff: noqa: PLR0124, PLR0917
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass

PIECE = 4096  # logits per program
BLOCK = 64  # logits of which the largest is noted, where a row's best are wanted
LEAST_BEST, MOST_BEST = 16, 128  # how many best are found of a row: a power of two
ROW, MASK, RATE, JOB_INTS = 0, 1, 2, 3
BEST_INTS = 3  # a job, its row (-1 for none) and its mask
TOKEN, RANKED, PAIR_INTS = 1, 3, 4  # fields of a pair; its row and mask are at 0 and 2
PEAK, MASS, MOMENT, BAD, NUMBERS = 0, 1, 2, 3, 4  # fields of a piece
PAIR_HEADER = 2  # a pair's score and token, before its counts


@dataclass(frozen=True, eq=False)
class ProbeQueries:
    """The probes of a step, in device memory.

    A row of `jobs` [J, 3] int32 has a row of logits (-1 for none), the index of its mask (-1 for none) and the bits of
    a float32, 1 / temperature. A row of `pairs` [P, 4] has a row of logits (-1 for none), a token, the index of its
    mask, and whether its rank is wanted; token -1 - i stands for `tokens`[i], of the sampled tokens [A] int32. `masks`
    [M, V / 32] has a bit for each allowed token. A row of `best` [B, 3] has a job whose best scores are wanted, its row
    of logits (-1 for none) and its mask.
    """

    jobs: Tensor
    pairs: Tensor
    masks: Tensor
    tokens: Tensor
    best: Tensor


@dataclass(frozen=True, eq=False)
class ProbeResults:
    """The results of a `ProbeQueries`: `measured` [J, pieces, 4] float32 and `placed` [P, 2 + pieces] int32.

    A row of `placed` has the bits of a score, the token, and counts. `best` [B, 2, K] int32 has the K best: the bits of
    their scores, and their ids. `blocks` [J, pieces × PIECE / BLOCK] float32 is what they are found by.
    """

    measured: Tensor
    placed: Tensor
    best: Tensor
    blocks: Tensor


def pieces(vocab: int) -> int:
    """The number of pieces of a row."""
    return triton.cdiv(vocab, PIECE)


def block_count(vocab: int) -> int:
    """The number of blocks of a row, at most."""
    return pieces(vocab) * PIECE // BLOCK


def run_probes(logits: Tensor, queries: ProbeQueries, results: ProbeResults) -> None:
    """Compute the probes of logits [R, V] float32 into the results."""
    vocab, words, count = logits.shape[1], queries.masks.shape[1], pieces(logits.shape[1])
    piece = min(PIECE, max(BLOCK, triton.next_power_of_2(vocab)))
    ranks = len(queries.best) > 0
    if len(queries.jobs):
        _measure[(len(queries.jobs), count)](
            logits, queries.jobs, queries.masks, results.measured, results.blocks, logits.stride(0), vocab, words,
            PIECES=count, PIECE=piece, BLOCK=BLOCK, RANKS=ranks, num_warps=4,
        )  # fmt: skip
    if ranks:
        blocks, most = count * piece // BLOCK, results.best.shape[2]
        wide = max(2, triton.next_power_of_2(blocks))
        _best[(len(queries.best),)](
            logits, queries.best, queries.masks, results.blocks, results.best, logits.stride(0), vocab, words, blocks,
            BLOCK=BLOCK, WIDE=wide, CHOSEN=min(most, wide), K=most, num_warps=8,
        )  # fmt: skip
    if len(queries.pairs):
        _place[(len(queries.pairs), count)](
            logits, queries.pairs, queries.masks, queries.tokens, results.placed, logits.stride(0), vocab, words,
            PIECES=count, PIECE=piece, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RowStats:
    """Statistics of J rows, masked or not, at temperatures: weights are exp((score - peak) / temperature)."""

    peaks: np.ndarray  # [J] float64, as what follows
    masses: np.ndarray  # the sums of weights
    moments: np.ndarray  # the sums of weights × (score - peak)
    bad: np.ndarray  # [J] bool: whether a logit is NaN

    def logs(self, jobs: Sequence[int], scores: np.ndarray, temperatures: Sequence[float] | float = 1.0) -> np.ndarray:
        """Log-probabilities (nats, float64) of scores [n, m], of these n jobs at these temperatures."""
        at, heat = np.asarray(jobs), np.asarray(temperatures, np.float64)
        peaks = self.peaks[at, None]
        with np.errstate(invalid="ignore"):
            below = np.where(scores == peaks, 0.0, scores - peaks)
        return below / (heat[:, None] if heat.ndim else heat) - np.log(self.masses[at, None])

    def entropies(self) -> np.ndarray:
        """In nats; at temperature 1."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(self.masses) - self.moments / self.masses


def combine(measured: np.ndarray, rates: np.ndarray) -> RowStats:
    """The statistics of J rows from their pieces [J, pieces, 4] and 1 / temperature [J]."""
    numbers = measured.astype(np.float64)
    tops, masses = numbers[..., PEAK], numbers[..., MASS]
    peaks = tops.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        below = np.where(tops == peaks, 0.0, tops - peaks)
        weight = np.exp(below * rates[:, None])
        moment = np.where(weight > 0, weight * (numbers[..., MOMENT] + below * masses), 0.0).sum(1)
    mass = np.where(weight > 0, weight * masses, 0.0).sum(1)
    return RowStats(peaks[:, 0], mass, moment, numbers[..., BAD].max(1) > 0)


@triton.jit
def _masked(line, masks, mask, words, i, vocab):
    """The scores of tokens i; -inf for those masked or outside the vocabulary."""
    s = tl.load(line + i, mask=i < vocab, other=float("-inf"))
    if mask >= 0:
        bits = tl.load(masks + mask.to(tl.int64) * words + i // 32, mask=i < vocab, other=0)
        s = tl.where(((bits >> (i % 32)) & 1) == 1, s, float("-inf"))
    return s


@triton.jit
def _measure(
    logits, jobs, masks, measured, blocks, stride, vocab, words,
    PIECES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    job, piece = tl.program_id(0), tl.program_id(1)
    row = tl.load(jobs + job * 3)
    if row >= 0:
        mask = tl.load(jobs + job * 3 + 1)
        rate = tl.load(jobs + job * 3 + 2).to(tl.float32, bitcast=True)
        i = piece * PIECE + tl.arange(0, PIECE)
        line = logits + row.to(tl.int64) * stride
        raw = tl.load(line + i, mask=i < vocab, other=0.0)
        s = _masked(line, masks, mask, words, i, vocab)
        bad = tl.max((raw != raw).to(tl.int32), 0)
        s = tl.where(s != s, float("-inf"), s)
        if RANKS:
            n = (job.to(tl.int64) * PIECES + piece) * (PIECE // BLOCK) + tl.arange(0, PIECE // BLOCK)
            tl.store(blocks + n, tl.max(tl.reshape(s, (PIECE // BLOCK, BLOCK)), 1))
        peak = tl.max(s, 0)
        top = (s == peak) & (i < vocab)
        below = tl.where(top | (s == float("-inf")), 0.0, s - peak)
        weight = tl.where(top, 1.0, tl.where(s == float("-inf"), 0.0, tl.exp(below * rate)))
        out = measured + (job * PIECES + piece) * 4
        tl.store(out, peak)
        tl.store(out + 1, tl.sum(weight.to(tl.float64), 0).to(tl.float32))
        moment = tl.where(weight > 0, weight.to(tl.float64) * below.to(tl.float64), 0.0)
        tl.store(out + 2, tl.sum(moment, 0).to(tl.float32))
        tl.store(out + 3, bad.to(tl.float32))


@triton.jit
def _place(logits, pairs, masks, tokens, placed, stride, vocab, words, PIECES: tl.constexpr, PIECE: tl.constexpr):
    pair, piece = tl.program_id(0), tl.program_id(1)
    row = tl.load(pairs + pair * 4)
    ranked = tl.load(pairs + pair * 4 + 3)
    if (row >= 0) & ((ranked > 0) | (piece == 0)):
        token = tl.load(pairs + pair * 4 + 1)
        if token < 0:
            token = tl.load(tokens - 1 - token)
        mask = tl.load(pairs + pair * 4 + 2)
        line = logits + row.to(tl.int64) * stride
        score = _masked(line, masks, mask, words, tl.maximum(token, 0), vocab)
        out = placed + pair * (2 + PIECES)
        if piece == 0:
            tl.store(out, score.to(tl.int32, bitcast=True))
            tl.store(out + 1, token)
        if ranked > 0:
            i = piece * PIECE + tl.arange(0, PIECE)
            s = _masked(line, masks, mask, words, i, vocab)
            tl.store(out + 2 + piece, tl.sum((s > score).to(tl.int32), 0))


@triton.jit
def _keys(scores, numbers):
    """Numbers that are in order of scores, and of lower numbers where they are equal. NaN counts as -inf."""
    s = tl.where(scores != scores, float("-inf"), tl.where(scores == 0.0, 0.0, scores))
    bits = s.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)


@triton.jit
def _best(
    logits, asked, masks, blocks, found, stride, vocab, words, count,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, CHOSEN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    job, row = tl.load(asked + index * 3), tl.load(asked + index * 3 + 1)
    if row >= 0:
        mask = tl.load(asked + index * 3 + 2)
        n = tl.arange(0, WIDE)
        tops = tl.load(blocks + job.to(tl.int64) * count + n, mask=n < count, other=float("-inf"))
        chosen = 0x7FFFFFFF - (tl.topk(_keys(tops, n), CHOSEN) & 0x7FFFFFFF).to(tl.int32)
        i = tl.reshape(chosen[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], (CHOSEN * BLOCK,))
        s = _masked(logits + row.to(tl.int64) * stride, masks, mask, words, i, vocab)
        keys = tl.topk(_keys(s, i), K)
        order = (keys >> 32).to(tl.int32)
        out = found + index * 2 * K + tl.arange(0, K)
        tl.store(out, order ^ ((order >> 31) & 0x7FFFFFFF))
        tl.store(out + K, 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32))
