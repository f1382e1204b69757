"""A feed-forward of experts for one row, at memory bandwidth: norm and routing in one kernel, then matvecs.

Each program of a matvec reads a few outputs of the experts that were chosen, with more bytes in flight than the tiles
of `experts` have, and what the experts give is summed where it is computed. All compute in float32 and round once.
"""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0917
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.experts.matmul import ExpertGate, ExpertOperand, Routes, choose, gated_pair
from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.matvec import RmsNorm


@dataclass(frozen=True, eq=False)
class Router:
    """A router [X, E] with its bias [X] or none, room for the logits [X], and a counter [1] int32: 0 between calls."""

    weight: Tensor
    bias: Tensor | None
    logits: Tensor
    arrived: Tensor
    normalize: bool


def norm_and_route(x: Tensor, norm: RmsNorm, h: Tensor, router: Router, routes: Routes, *, ahead: bool = False) -> None:
    """The norm of a row x [E] into h [E], and the experts that the router gives it; see `experts.route`.

    Logits are rounded to their type before they are compared. The program that finishes last chooses.
    """
    (count, e), k = router.weight.shape, routes.chosen.shape[1]
    assert x.is_contiguous() and router.weight.is_contiguous()  # noqa: PT018
    block = triton.next_power_of_2(e)
    _norm_and_route[(count,)](
        x, norm.weight, h, router.weight, router.bias, router.logits, routes.chosen, routes.weights, router.arrived,
        norm.eps, X=count, WIDE=max(16, triton.next_power_of_2(count)), K=k, SLOTS=max(2, triton.next_power_of_2(k)),
        NORMALIZE=router.normalize, E=e, BLOCK=block, AHEAD=ahead, num_warps=min(8, max(1, block // 512)),
        **options(ahead),
    )  # fmt: skip


def gate_times_up(
    x: Tensor, w: ExpertOperand, y: Tensor, routes: Routes, gate: ExpertGate, *, ahead: bool = False
) -> None:
    """What the experts of a row x [1, E] make of gate and up, into y [k, F]; floats."""
    (pairs, n), k = y.shape, x.shape[1]
    block = min(2048, triton.next_power_of_2(k))
    _gate_times_up[(triton.cdiv(n, 2), pairs)](
        x, w.weight, w.bias, routes.chosen, y, n, K=k, KIND=gate.activation, CLAMP=gate.clamp or 0.0, ALPHA=gate.alpha,
        BN=2, BK=block, EVEN=n % 2 == 0 and k % block == 0, AHEAD=ahead, num_warps=min(8, max(1, block // 256)),
        **options(ahead),
    )  # fmt: skip


def add_down(x: Tensor, w: ExpertOperand, y: Tensor, routes: Routes, *, ahead: bool = False) -> None:
    """Add to y [E] the weighted sum of what the experts of a row make of x [k, F]; floats."""
    (pairs, k), n = x.shape, len(y)
    slots, block = triton.next_power_of_2(pairs), min(256, triton.next_power_of_2(k))
    _add_down[(triton.cdiv(n, 2),)](
        x, w.weight, w.bias, routes.chosen, routes.weights, y, n, K=k, PAIRS=pairs, SLOTS=slots, BN=2, BK=block,
        EVEN=n % 2 == 0 and k % block == 0 and slots == pairs, AHEAD=ahead, num_warps=min(8, max(1, slots)),
        **options(ahead),
    )  # fmt: skip


@triton.jit
def _norm_and_route(
    x, norm, h, router, bias, logits, chosen, weights, arrived, eps,
    X: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr,
    E: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A program for each expert; all compute the norm, and the first stores it."""
    launch_next(AHEAD)
    expert, i = tl.program_id(0), tl.arange(0, BLOCK)
    w = tl.load(router + expert * E + i, mask=i < E, other=0.0).to(tl.float32)
    scale = tl.load(norm + i, mask=i < E, other=0.0).to(tl.float32)
    wait(AHEAD)
    v = tl.load(x + i, mask=i < E, other=0.0).to(tl.float32)
    v = (v * tl.rsqrt(tl.sum(v * v, 0) / E + eps) * scale).to(h.dtype.element_ty)
    if expert == 0:
        tl.store(h + i, v, mask=i < E)
    logit = tl.sum(w * v.to(tl.float32), 0)
    if bias is not None:
        logit += tl.load(bias + expert).to(tl.float32)
    tl.store(logits + expert, logit.to(logits.dtype.element_ty))
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == X - 1:
        tl.atomic_xchg(arrived, 0)
        o, slot = tl.arange(0, WIDE), tl.arange(0, SLOTS)
        given = tl.load(logits + o, mask=o < X, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
        ids, weight = choose(given, X, K, SLOTS, NORMALIZE, False)
        tl.store(chosen + slot, ids, mask=slot < K)
        tl.store(weights + slot, weight, mask=slot < K)


@triton.jit
def _weights(at, there, EVEN: tl.constexpr):
    """Weights, each of which is read once."""
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gate_times_up(
    x, weight, bias, chosen, y, n,
    K: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr, ALPHA: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    pair, r, c = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    wait(AHEAD)
    expert = tl.load(chosen + pair).to(tl.int64)
    first = expert * 2 * n + r
    at = weight + first[:, None] * K + c[None, :]
    above = at + n.to(tl.int64) * K
    total, up = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BK), tl.float32)
    for k in range(0, K, BK):
        there = (r < n)[:, None] & (k + c < K)[None, :]
        w, u = _weights(at + k, there, EVEN).to(tl.float32), _weights(above + k, there, EVEN).to(tl.float32)
        v = tl.load(x + k + c, mask=k + c < K, other=0.0).to(tl.float32)
        total += w * v[None, :]
        up += u * v[None, :]
    gate, other = tl.sum(total, 1), tl.sum(up, 1)
    if bias is not None:
        gate += tl.load(bias + first, mask=r < n, other=0.0).to(tl.float32)
        other += tl.load(bias + first + n, mask=r < n, other=0.0).to(tl.float32)
    tl.store(y + pair * n + r, gated_pair(gate, other, KIND, CLAMP, ALPHA).to(y.dtype.element_ty), mask=r < n)


@triton.jit
def _add_down(
    x, weight, bias, chosen, weights, y, n,
    K: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    r, slot, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, SLOTS), tl.arange(0, BK)[None, None, :]
    wait(AHEAD)
    live = slot < PAIRS
    expert = tl.load(chosen + slot, mask=live, other=0).to(tl.int64)
    given = tl.load(weights + slot, mask=live, other=0.0)
    first = expert[None, :] * n + r[:, None]
    there = (r < n)[:, None] & live[None, :]
    at, xs = weight + first[:, :, None] * K + c, x + slot[None, :, None] * K + c
    total = tl.zeros((BN, SLOTS, BK), tl.float32)
    for k in range(0, K, BK):
        w = _weights(at + k, there[:, :, None] & (k + c < K), EVEN).to(tl.float32)
        v = tl.load(xs + k, mask=live[None, :, None] & (k + c < K), other=0.0).to(tl.float32)
        total += w * v
    sums = tl.sum(total, 2)
    if bias is not None:
        sums += tl.load(bias + first, mask=there, other=0.0).to(tl.float32)
    result = tl.sum(sums * given[None, :], 1) + tl.load(y + r, mask=r < n, other=0.0).to(tl.float32)
    tl.store(y + r, result.to(y.dtype.element_ty), mask=r < n)
