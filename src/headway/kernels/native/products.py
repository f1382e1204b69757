"""Native products over packed weights: the fast path of `kernels.packed`."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.native import library
from headway.kernels.native.library import Matrix, Team, check
from headway.kernels.packed import LANES, Packed


def matrix(w: Packed) -> Matrix:
    """The struct that points at a packed matrix, which must outlive it."""

    def at(t: Tensor | None) -> int | None:
        return None if t is None else t.data_ptr()

    return Matrix(
        kind=library.KINDS.index(w.kind),
        n=w.n,
        k=w.k,
        bits=w.bits,
        group=w.group,
        zero=w.zero,
        has_least=int(w.least),
        scale_kind=library.SCALES.index(w.scale_kind),
        codes=at(w.codes),
        scales=at(w.scales),
        super=at(w.super),
        bias=at(w.bias),
    )


def linear(team: Team, x: Tensor, w: Packed) -> Tensor:
    """x [R, k] float32 times the matrix → [R, n]."""
    x = x.contiguous()
    wide = -(-w.n // LANES) * LANES
    y = torch.empty(len(x), wide)
    if len(x):
        check(team.calls.hw_linear(team.handle, matrix(w), x.data_ptr(), len(x), y.data_ptr(), wide))
    return y[:, : w.n]


def gather(team: Team, w: Packed, rows: Tensor) -> Tensor:
    """Rows [C] of the matrix in float32 → [C, k]."""
    rows = rows.to(torch.int32).contiguous()
    out = torch.empty(len(rows), w.k)
    check(team.calls.hw_gather(team.handle, matrix(w), rows.data_ptr(), len(rows), out.data_ptr()))
    return out
