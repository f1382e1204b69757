"""Probes of rows of logits, on the device: one pass over a row, and only a few numbers of it are copied back.

    measure   for each piece of a row the largest score, the sum of weights relative to it, and the sum of
              weights × scores (for the entropy), without a softmax in memory
    place     single scores, and how many scores in each piece are above them

The host combines the pieces in float64 (`combine`). `headway.kernels.reference.sampling` is the reference. No result
depends on other rows.
"""

# ruff: noqa: PLR0124, PLR0917
from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass

PIECE = 4096  # logits per program
ROW, MASK, RATE, JOB_INTS = 0, 1, 2, 3
TOKEN, RANKED, PAIR_INTS = 1, 3, 4  # fields of a pair; its row and mask are at 0 and 2
PEAK, MASS, MOMENT, BAD, NUMBERS = 0, 1, 2, 3, 4  # fields of a piece
PAIR_HEADER = 2  # a pair's score and token, before its counts


@dataclass(frozen=True, eq=False)
class ProbeQueries:
    """The probes of a step, in device memory.

    A row of `jobs` [J, 3] int32 has a row of logits (-1 for none), the index of its mask (-1 for none) and the bits of
    a float32, 1 / temperature. A row of `pairs` [P, 4] has a row of logits (-1 for none), a token, the index of its
    mask, and whether its rank is wanted; token -1 - i stands for `tokens`[i], of the sampled tokens [A] int32. `masks`
    [M, V / 32] has a bit for each allowed token.
    """

    jobs: Tensor
    pairs: Tensor
    masks: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class ProbeResults:
    """The results of a `ProbeQueries`: `measured` [J, pieces, 4] float32 and `placed` [P, 2 + pieces] int32.

    A row of `placed` has the bits of a score, the token, and counts.
    """

    measured: Tensor
    placed: Tensor


def pieces(vocab: int) -> int:
    """The number of pieces of a row."""
    return triton.cdiv(vocab, PIECE)


def run_probes(logits: Tensor, queries: ProbeQueries, results: ProbeResults) -> None:
    """Compute the probes of logits [R, V] float32 into the results."""
    vocab, words, count = logits.shape[1], queries.masks.shape[1], pieces(logits.shape[1])
    piece = min(PIECE, triton.next_power_of_2(vocab))
    if len(queries.jobs):
        _measure[(len(queries.jobs), count)](
            logits, queries.jobs, queries.masks, results.measured, logits.stride(0), vocab, words,
            PIECES=count, PIECE=piece, num_warps=4,
        )  # fmt: skip
    if len(queries.pairs):
        _place[(len(queries.pairs), count)](
            logits, queries.pairs, queries.masks, queries.tokens, results.placed, logits.stride(0), vocab, words,
            PIECES=count, PIECE=piece, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True)
class RowStats:
    """Statistics of a row, masked or not, at a temperature: weights are exp((score - peak) / temperature)."""

    peak: float
    mass: float  # the sum of weights
    moment: float  # the sum of weights × (score - peak)
    bad: bool  # whether a logit is NaN

    def logs(self, scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probabilities (nats, float64) of these scores."""
        below = np.where(scores == self.peak, 0.0, np.subtract(scores, self.peak, dtype=np.float64))
        return below / temperature - np.log(self.mass)

    @property
    def entropy(self) -> float:
        """In nats; at temperature 1."""
        return float(np.log(self.mass) - self.moment / self.mass)


def combine(measured: np.ndarray, rates: np.ndarray) -> list[RowStats]:
    """The statistics of J rows from their pieces [J, pieces, 4] and 1 / temperature [J]."""
    numbers = measured.astype(np.float64)
    tops, masses = numbers[..., PEAK], numbers[..., MASS]
    peaks = tops.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        below = np.where(tops == peaks, 0.0, tops - peaks)
        weight = np.exp(below * rates[:, None])
        moment = np.where(weight > 0, weight * (numbers[..., MOMENT] + below * masses), 0.0).sum(1)
    mass, bad = np.where(weight > 0, weight * masses, 0.0).sum(1), numbers[..., BAD].max(1) > 0
    lines = zip(peaks[:, 0].tolist(), mass.tolist(), moment.tolist(), [bool(b) for b in bad], strict=True)
    return [RowStats(*line) for line in lines]


@triton.jit
def _masked(line, masks, mask, words, i, vocab):
    """The scores of tokens i; -inf for those masked or outside the vocabulary."""
    s = tl.load(line + i, mask=i < vocab, other=float("-inf"))
    if mask >= 0:
        bits = tl.load(masks + mask.to(tl.int64) * words + i // 32, mask=i < vocab, other=0)
        s = tl.where(((bits >> (i % 32)) & 1) == 1, s, float("-inf"))
    return s


@triton.jit
def _measure(logits, jobs, masks, measured, stride, vocab, words, PIECES: tl.constexpr, PIECE: tl.constexpr):
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
