"""Native products over packed weights: the fast path of `kernels.packed`."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.base.errors import InvalidInput, OutOfRange, Unsupported, WrongType
from headway.kernels.native import library
from headway.kernels.native.library import Matrix, Team, check
from headway.kernels.reference.quantized import Packed

# What products.h builds: bits, kind of scale, whether there is a least, and whether a scale holds for 16 inputs only.
GROUPED = {
    (4, "f16", False, False),
    (4, "f16", True, False),
    (4, "k", True, False),
    (8, "f16", False, False),
    (8, "f16", True, False),
    (8, "f32", True, False),
    (4, "f32", True, False),
    (4, "f32", False, True),
    (4, "f32", True, True),
    (8, "f32", False, True),
}


def matrix(w: Packed) -> Matrix:
    """The struct that points at a packed matrix, which must outlive it; refuses one that is not what it says."""
    if flaw := w.flaw():
        raise InvalidInput(f"a packed matrix of {w.n} by {w.k} cannot be used: {flaw}")
    if w.kind == "groups" and (w.bits, w.scale_kind, w.least, w.group == 16) not in GROUPED:
        raise Unsupported(
            f"{w.label} with {w.scale_kind} scales and {'a least' if w.least else f'zero at {w.zero}'} "
            "has no native product; use linear_reference"
        )

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
    x = float_rows(x, w.k)
    y = torch.empty(len(x), w.wide)
    if len(x):
        check(team.calls.hw_linear(team.handle, matrix(w), x.data_ptr(), len(x), y.data_ptr(), w.wide))
    return y[:, : w.n]


def gather(team: Team, w: Packed, rows: Tensor) -> Tensor:
    """Rows [C] of the matrix in float32 → [C, k]."""
    if rows.dtype not in (torch.int32, torch.int64) or rows.ndim != 1:
        raise WrongType(f"rows are {list(rows.shape)} of {rows.dtype}; a list of whole numbers is needed")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < w.n:
        raise OutOfRange(f"rows go from {int(rows.min())} to {int(rows.max())}; the matrix has rows 0 to {w.n - 1}")
    rows = rows.to(torch.int32).contiguous()
    out = torch.empty(len(rows), w.k)
    check(team.calls.hw_gather(team.handle, matrix(w), rows.data_ptr(), len(rows), out.data_ptr()))
    return out


def float_rows(x: Tensor, width: int) -> Tensor:
    """Rows [R, width] in float32 and in order, as the library reads them; anything else is refused."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise WrongType(f"rows of {x.dtype} on {x.device} were given; float32 on the CPU is needed")
    if x.ndim != 2 or x.shape[1] != width:
        raise InvalidInput(f"rows of shape {list(x.shape)} were given; [rows, {width}] is needed")
    return x.contiguous()
