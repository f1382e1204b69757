"""Residuals side by side in Triton (Gemma 3n): what predicts and corrects streams [n, T, E], and what is around them.

A program has one row, of all streams. Numbers are float32 inside, rounded once where they are stored.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.fused import RowNorm, activated, loaded, unit
from headway.kernels.triton.launch import launch_next, options, wait

LEAST = tl.constexpr(1e-5)  # of a mean square that is divided by


@dataclass(frozen=True, eq=False)
class StreamShares:
    """What decides how much streams have of each other: the norm of the active one, its router [n, E], and a matrix
    [n n, n] or [n, n]."""

    active: int
    norm: RowNorm
    router: Tensor
    matrix: Tensor


@dataclass(frozen=True, eq=False)
class AddedShares:
    """What adapters add to what the router and the matrix make of rows, in float32."""

    kinds: Tensor  # [T, n]
    shares: Tensor  # [T, n n], or [T, n]


def find_kinds(x: Tensor, out: Tensor, how: StreamShares, added: Tensor, *, ahead: bool = False) -> None:
    """tanh of what the router makes of rows x [T, E] of the active stream, plus `added` [T, n], into out [T, n]."""
    (rows, n), e = out.shape, x.shape[1]
    _find_kinds[(rows,)](
        x, out, how.norm.weight, how.router, added, how.norm.eps, KIND=how.norm.kind, N=n, **_shape(n, e, ahead)
    )


def predict(
    streams: Tensor,
    out: Tensor,
    h: Tensor,
    how: StreamShares,
    norm: RowNorm,
    *,
    added: AddedShares | None = None,
    ahead: bool = False,
) -> None:
    """All streams [n, T, E] as a layer expects them to be, into out, and the active one, normed, into h [T, E]."""
    n, rows, e = streams.shape
    _predict[(rows,)](
        streams, out, h, how.norm.weight, how.router, how.matrix, norm.weight, *_added(added), rows, norm.eps,
        KIND=norm.kind, N=n, ACTIVE=how.active, **_shape(n, e, ahead),
    )  # fmt: skip


def correct(
    predicted: Tensor,
    x: Tensor,
    streams: Tensor,
    h: Tensor,
    how: StreamShares,
    *,
    scale: Tensor | None = None,
    added: AddedShares | None = None,
    ahead: bool = False,
) -> None:
    """All streams after the active one is computed to be x [T, E]; the active one of them, times `scale`, into h."""
    n, rows, e = streams.shape
    _correct[(rows,)](
        predicted, x, streams, h, how.norm.weight, how.router, how.matrix, scale, *_added(added), rows, how.norm.eps,
        KIND=how.norm.kind, N=n, ACTIVE=how.active, **_shape(n, e, ahead),
    )  # fmt: skip


def add_to_others(
    streams: Tensor, delta: Tensor, norm: RowNorm, x: Tensor, *, active: int, ahead: bool = False
) -> None:
    """Add `delta` [T, E], normed, to all streams but the first; the active one also goes into x [T, E]."""
    n, rows, e = streams.shape
    _add_to_others[(rows,)](
        streams, delta, norm.weight, x, rows, norm.eps, KIND=norm.kind, N=n, ACTIVE=active, **_rows(e, ahead)
    )


def join(
    predicted: Tensor,
    x: Tensor,
    h: Tensor,
    delta: Tensor,
    raised: Tensor,
    *,
    norms: tuple[RowNorm, RowNorm, RowNorm],
    ahead: bool = False,
) -> None:
    """(predicted [T, E] + delta, normed, + h + raised, normed) / √2 into x, and that normed into h. The norms are those
    of delta, of raised and of the result."""
    (rows, e), (after, low, out) = x.shape, norms
    _join[(rows,)](
        predicted, x, h, delta, raised, after.weight, low.weight, out.weight, out.eps, KIND=out.kind, **_rows(e, ahead)
    )


def spread(streams: Tensor, x: Tensor, *, ahead: bool = False) -> None:
    """Have x [T, E] be the first stream, and the others be as large as it."""
    n, rows, e = streams.shape
    _spread[(rows,)](streams, x, rows, N=n, **_rows(e, ahead))


def gather(streams: Tensor, others: Tensor, x: Tensor, *, ahead: bool = False) -> None:
    """The mean of the first stream and of `others` [n, T, E] but the first, as large as it, into x [T, E]."""
    n, rows, e = streams.shape
    _gather[(rows,)](streams, others, x, rows, N=n, **_rows(e, ahead))


def gated_above(gate_up: Tensor, out: Tensor, deviations: float, kind: str, *, ahead: bool = False) -> None:
    """The activation of what of gate is above its mean by so many standard deviations, and 0 for the rest, times up:
    gate_up [T, 2 F] into out [T, F]."""
    rows, f = out.shape
    block = max(16, triton.next_power_of_2(f))
    _gated_above[(rows,)](
        gate_up, out, deviations, KIND=kind, F=f, BLOCK=block, AHEAD=ahead, num_warps=min(16, max(1, block // 512)),
        **options(ahead),
    )  # fmt: skip


def _added(added: AddedShares | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if added is None else (added.kinds, added.shares)


def _rows(e: int, ahead: bool) -> dict[str, Any]:
    block = max(16, triton.next_power_of_2(e))
    return {"E": e, "BLOCK": block, "AHEAD": ahead, "num_warps": min(16, max(1, block // 512)), **options(ahead)}


def _shape(n: int, e: int, ahead: bool) -> dict[str, Any]:
    return {"WIDE": max(2, triton.next_power_of_2(n)), **_rows(e, ahead)}


@triton.jit
def _kinds(
    x, norm, router, added, row, i, there, eps,
    KIND: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """tanh of the router's numbers of a row, and what is added to them [WIDE]."""
    normed = unit(x, there, eps, E, KIND) * loaded(norm, i, there, KIND) * (1.0 / E)
    k, kinds = tl.arange(0, WIDE), tl.zeros((WIDE,), tl.float32)
    for j in tl.static_range(N):
        w = tl.load(router + j * E + i, mask=there, other=0.0).to(tl.float32)
        y = tl.sum(normed * w, 0)
        if added is not None:
            y += tl.load(added + row * N + j)
        kinds = tl.where(k == j, 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0), kinds)
    return kinds


@triton.jit
def _share(matrix, number, kinds, added, row, N: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """The product of one row of a small matrix [COUNT, n] with the kinds, and what is added to it."""
    m = tl.arange(0, WIDE)
    share = tl.sum(tl.load(matrix + number * N + m, mask=m < N, other=0.0).to(tl.float32) * kinds, 0)
    if added is not None:
        share += tl.load(added + row * COUNT + number)
    return share


@triton.jit
def _find_kinds(
    x, out, altup_norm, router, added, eps,
    KIND: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, WIDE)
    there = i < E
    active = tl.load(x + row * E + i, mask=there, other=0.0).to(tl.float32)
    kinds = _kinds(active, altup_norm, router, added, row, i, there, eps, KIND, N, WIDE, E)
    tl.store(out + row * N + k, kinds, mask=k < N)


@triton.jit
def _predict(
    streams, out, h, altup_norm, router, matrix, norm, kinds_added, shares_added, rows, eps,
    KIND: tl.constexpr, N: tl.constexpr, ACTIVE: tl.constexpr, WIDE: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, stride = i < E, tl.cast(rows, tl.int64) * E
    at = row * E + i
    active = tl.load(streams + ACTIVE * stride + at, mask=there, other=0.0).to(tl.float32)
    kinds = _kinds(active, altup_norm, router, kinds_added, row, i, there, eps, KIND, N, WIDE, E)
    for k in tl.static_range(N):
        total = tl.load(streams + k * stride + at, mask=there, other=0.0).to(tl.float32)
        for j in tl.static_range(N):
            other = tl.load(streams + j * stride + at, mask=there, other=0.0).to(tl.float32)
            total += _share(matrix, k * N + j, kinds, shares_added, row, N, N * N, WIDE) * other
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + k * stride + at, rounded, mask=there)
        if k == ACTIVE:
            y = unit(rounded.to(tl.float32), there, eps, E, KIND) * loaded(norm, i, there, KIND)
            tl.store(h + at, y.to(h.dtype.element_ty), mask=there)


@triton.jit
def _correct(
    predicted, x, streams, h, altup_norm, router, matrix, scale, kinds_added, shares_added, rows, eps,
    KIND: tl.constexpr, N: tl.constexpr, ACTIVE: tl.constexpr, WIDE: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, stride = i < E, tl.cast(rows, tl.int64) * E
    at = row * E + i
    active = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    kinds = _kinds(active, altup_norm, router, kinds_added, row, i, there, eps, KIND, N, WIDE, E)
    missed = active - tl.load(predicted + ACTIVE * stride + at, mask=there, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        expected = tl.load(predicted + k * stride + at, mask=there, other=0.0).to(tl.float32)
        share = _share(matrix, k, kinds, shares_added, row, N, N, WIDE) + 1.0
        y = (expected + share * missed).to(streams.dtype.element_ty)
        tl.store(streams + k * stride + at, y, mask=there)
        if k == ACTIVE:
            if scale is not None:
                y = (y.to(tl.float32) * tl.load(scale + i, mask=there, other=0.0).to(tl.float32)).to(y.dtype)
            tl.store(h + at, y, mask=there)


@triton.jit
def _add_to_others(
    streams, delta, norm, x, rows, eps,
    KIND: tl.constexpr, N: tl.constexpr, ACTIVE: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, stride = i < E, tl.cast(rows, tl.int64) * E
    at = row * E + i
    d = tl.load(delta + at, mask=there, other=0.0).to(tl.float32)
    d = unit(d, there, eps, E, KIND) * loaded(norm, i, there, KIND)
    for k in tl.static_range(N):
        y = tl.load(streams + k * stride + at, mask=there, other=0.0)
        if k > 0:
            y = (y.to(tl.float32) + d).to(y.dtype)
            tl.store(streams + k * stride + at, y, mask=there)
        if k == ACTIVE:
            tl.store(x + at, y, mask=there)


@triton.jit
def _join(
    predicted, x, h, delta, raised, after, low, norm, eps,
    KIND: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    i = tl.arange(0, BLOCK)
    there, at = i < E, tl.program_id(0).to(tl.int64) * E + i
    d = tl.load(delta + at, mask=there, other=0.0).to(tl.float32)
    r = tl.load(raised + at, mask=there, other=0.0).to(tl.float32)
    y = tl.load(predicted + at, mask=there, other=0.0).to(tl.float32)
    y += unit(d, there, eps, E, KIND) * loaded(after, i, there, KIND)
    y += tl.load(h + at, mask=there, other=0.0).to(tl.float32)
    y += unit(r, there, eps, E, KIND) * loaded(low, i, there, KIND)
    rounded = (y * 0.7071067811865476).to(x.dtype.element_ty)
    tl.store(x + at, rounded, mask=there)
    y = unit(rounded.to(tl.float32), there, eps, E, KIND) * loaded(norm, i, there, KIND)
    tl.store(h + at, y.to(h.dtype.element_ty), mask=there)


@triton.jit
def _as_large_as(x, y, E: tl.constexpr):
    """y with the mean square of x."""
    return y * tl.sqrt(tl.sum(x * x, 0) / E) / tl.sqrt(tl.maximum(tl.sum(y * y, 0) / E, LEAST))


@triton.jit
def _spread(streams, x, rows, N: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, stride = i < E, tl.cast(rows, tl.int64) * E
    at = row * E + i
    first = tl.load(x + at, mask=there, other=0.0)
    tl.store(streams + at, first, mask=there)
    for k in tl.static_range(1, N):
        y = tl.load(streams + k * stride + at, mask=there, other=0.0).to(tl.float32)
        y = _as_large_as(first.to(tl.float32), y, E)
        tl.store(streams + k * stride + at, y.to(streams.dtype.element_ty), mask=there)


@triton.jit
def _gather(streams, others, x, rows, N: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, stride = i < E, tl.cast(rows, tl.int64) * E
    at = row * E + i
    first = tl.load(streams + at, mask=there, other=0.0).to(tl.float32)
    total = first
    for k in tl.static_range(1, N):
        y = tl.load(others + k * stride + at, mask=there, other=0.0).to(tl.float32)
        total += _as_large_as(first, y, E)
    tl.store(x + at, (total / N).to(x.dtype.element_ty), mask=there)


@triton.jit
def _gated_above(
    gate_up, out, deviations, KIND: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = i < F
    gate = tl.load(gate_up + row * 2 * F + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(gate, 0) / F
    away = tl.where(there, gate - mean, 0.0)
    above = tl.maximum(gate - (mean + tl.sqrt(tl.sum(away * away, 0) / F) * deviations), 0.0)
    tl.store(out + row * F + i, (activated(above, KIND) * up).to(out.dtype.element_ty), mask=there)
