"""Matvec (GEMV): one row times a matrix at memory bandwidth, with norm, bias, gate × up and residual in one kernel.

cuBLAS does better with many rows; for one it leaves a fifth of the bandwidth unused with large matrices, and half with
small ones.
"""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0917
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.launch import launch_next, options, wait


@dataclass(frozen=True)
class MatvecTile:
    """Outputs and inputs per step of a program, and its launch parameters."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 3


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """An RMS norm to apply to the input."""

    weight: Tensor
    eps: float


def matvec(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    norm: RmsNorm | None = None,
    gated: bool = False,
    add: bool = False,
    tile: MatvecTile | None = None,
    ahead: bool = False,
) -> None:
    """x [K] times weight [N, K] into y [N], or added to it with `add`.

    With `gated` the matrix is [2N, K], gate above up, and y is silu(gate) × up. With `ahead` the kernel may start, and
    load weights, before the previous one has ended; it still waits for its input.
    """
    n, k = y.shape[-1], weight.shape[1]
    assert x.is_contiguous() and weight.is_contiguous()  # noqa: PT018
    t = tile or pick_tile(n, k, gated)
    _matvec[(triton.cdiv(n, t.outputs),)](
        x, weight, y, x if bias is None else bias, x if norm is None else norm.weight,
        0.0 if norm is None else norm.eps, n, K=k, BIAS=bias is not None, NORM=norm is not None, GATED=gated,
        ADD=add, BN=t.outputs, BK=t.inputs, EVEN=n % t.outputs == 0 and k % t.inputs == 0, AHEAD=ahead,
        num_warps=t.warps, num_stages=t.stages, **options(ahead),
    )  # fmt: skip


def pick_tile(n: int, k: int, gated: bool) -> MatvecTile:
    """The fastest tile on an H200 for matrices of about this size."""
    wide = max(16, triton.next_power_of_2(k))
    if gated:
        return MatvecTile(2, min(4096, wide), 8)
    if k > 2 * n or k < 4096:
        return MatvecTile(4, min(512 if k > 8192 else 1024, wide), 4 if k > 8192 or k < 4096 else 8)
    return MatvecTile(4, min(2048, wide), 8)


@triton.jit
def _weights(at, r, c, n, K: tl.constexpr, EVEN: tl.constexpr):
    """Weights of rows r at inputs c; each is read once."""
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(r < n)[:, None] & (c < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _matvec(
    x, weight, y, bias, norm, eps, n,
    K: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    at = weight + r.to(tl.int64)[:, None] * K + c[None, :]
    above = weight + (r + n).to(tl.int64)[:, None] * K + c[None, :]
    total = tl.zeros((BN, BK), tl.float32)
    up = tl.zeros((BN, BK), tl.float32)
    square = tl.zeros((BK,), tl.float32)
    launch_next(AHEAD)
    # The first weights are loaded before the previous kernel has ended, and each further part before the one before it
    # is computed.
    w = _weights(at, r, c, n, K, EVEN)
    if GATED:
        u = _weights(above, r, c, n, K, EVEN)
    wait(AHEAD)
    for k in range(0, K, BK):
        if EVEN:
            v = tl.load(x + k + c).to(tl.float32)
        else:
            v = tl.load(x + k + c, mask=k + c < K, other=0.0).to(tl.float32)
        if NORM:
            square += v * v
            v = v * tl.load(norm + k + c, mask=k + c < K, other=0.0).to(tl.float32)
        now = w.to(tl.float32)
        if GATED:
            now_up = u.to(tl.float32)
        if k + BK < K:
            w = _weights(at + k + BK, r, k + BK + c, n, K, EVEN)
            if GATED:
                u = _weights(above + k + BK, r, k + BK + c, n, K, EVEN)
        total += now * v[None, :]
        if GATED:
            up += now_up * v[None, :]
    result = tl.sum(total, 1)
    size = 1.0
    if NORM:
        size = tl.rsqrt(tl.sum(square, 0) / K + eps)
        result = result * size
    if BIAS:
        result += tl.load(bias + r, mask=r < n, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(up, 1) * size
        if BIAS:
            other += tl.load(bias + n + r, mask=r < n, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * other
    if ADD:
        result += tl.load(y + r, mask=r < n, other=0.0).to(tl.float32)
    tl.store(y + r, result.to(y.dtype.element_ty), mask=r < n)
