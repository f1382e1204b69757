"""Native matmul with quantized weights: the fast path of `kernels.reference.ordered_matmul`."""

from __future__ import annotations

import numpy as np

from headway.base.arrays import aligned, empty
from headway.base.errors import InvalidInput, OutOfRange, Unsupported, WrongType
from headway.kernels.host.quantized import QuantizedMatrix
from headway.kernels.native import library
from headway.kernels.native.library import MatrixStruct, ThreadPool, check

# The grouped formats that matmul.h compiles: bits, scale kind, whether it has a min, whether groups have 16 inputs.
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
    (4, "e8", False, False),
}


def matrix_struct(w: QuantizedMatrix) -> MatrixStruct:
    """A struct that points at the matrix, which must outlive it. Raises if its arrays do not match the format."""
    if problem := w.problem():
        raise InvalidInput(f"a matrix of {w.n} by {w.k} cannot be used: {problem}")
    if w.kind == "groups" and (w.bits, w.scale_kind, w.has_min, w.group == 16) not in GROUPED:
        raise Unsupported(
            f"{w.label} with {w.scale_kind} scales and {'a minimum' if w.has_min else f'zero at {w.zero}'} "
            "has no native matmul; use linear_reference"
        )

    def at(array: np.ndarray | None) -> int | None:
        return None if array is None else array.ctypes.data

    return MatrixStruct(
        kind=library.KINDS.index(w.kind),
        n=w.n,
        k=w.k,
        bits=w.bits,
        group=w.group,
        zero=w.zero,
        has_min=int(w.has_min),
        scale_kind=library.SCALES.index(w.scale_kind),
        quants=at(w.quants),
        scales=at(w.scales),
        super=at(w.super),
        bias=at(w.bias),
    )


def linear(thread_pool: ThreadPool, x: np.ndarray, w: QuantizedMatrix) -> np.ndarray:
    """x [R, k] float32 times the matrix → [R, n]."""
    x, y = float_rows(x, w.k), empty((len(x), w.padded_n))
    if len(x):
        call = thread_pool.calls.hw_matmul
        check(call(thread_pool.handle, matrix_struct(w), x.ctypes.data, len(x), y.ctypes.data, w.padded_n))
    return y[:, : w.n]


def dequantize_rows(thread_pool: ThreadPool, w: QuantizedMatrix, rows: np.ndarray) -> np.ndarray:
    """Rows [C] of the matrix in float32 → [C, k]."""
    if rows.dtype not in (np.int32, np.int64) or rows.ndim != 1:
        raise WrongType(f"rows are {list(rows.shape)} of {rows.dtype}; a list of integers is needed")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < w.n:
        raise OutOfRange(f"rows go from {int(rows.min())} to {int(rows.max())}; the matrix has rows 0 to {w.n - 1}")
    rows, out = np.ascontiguousarray(rows, np.int32), empty((len(rows), w.k))
    call = thread_pool.calls.hw_dequantize_rows
    check(call(thread_pool.handle, matrix_struct(w), rows.ctypes.data, len(rows), out.ctypes.data))
    return out


def float_rows(x: np.ndarray, width: int) -> np.ndarray:
    """Rows [R, width], contiguous, as the library reads them. Raises for anything but float32."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        raise WrongType(f"rows are {getattr(x, 'dtype', type(x).__name__)}; an array of float32 is needed")
    if x.ndim != 2 or x.shape[1] != width:
        raise InvalidInput(f"rows have shape {list(x.shape)}; [rows, {width}] is needed")
    return aligned(x)
