"""Weights in fp8 (e4m3) with a scale for each output, and their matmul with rows in fp8 with a scale for each row.

Both go to the tensor cores as they are stored; scales are applied to the sums. A matrix [N, K] is stored by rows, K
padded to whole blocks of inputs and N to whole ones of OUTPUTS, with zeros. Of a `gated` one, gate above up, eight
gates and their eight ups alternate.

One row has a kernel of its own (`quantized_kernels.matvec`), which reads the same bytes; of many, cuBLAS multiplies
bfloat16 models' (`sums`). They differ in the order of sums and in their rounding: Hopper's tensor cores keep about 14
bits of a sum of 32 products of fp8, and cuBLAS of 128, which are then added in float32.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.kernels.reference.quantized import e4m3_rows
from headway.kernels.triton import quantized_kernels as kernels
from headway.kernels.triton.fp8.scaled_rows import INPUTS, ScaledRows, Unscaled, padded_inputs
from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.quantized_tiles import SplitSums

OUTPUTS = 16  # outputs come in blocks of so many
GROUP = 32  # inputs must be a multiple of it, as in other formats
SLICE = 1 << 26  # weights quantized at a time
INNER = 0.0625  # factor on gated float16 results, which leaves headroom for large values between gate and down


@dataclass(frozen=True, eq=False)
class ScaledMatrix:
    """A matrix [N, K] in fp8 on a CUDA device, stored as above, with its bias [N] or none."""

    quants: Tensor  # [N', K'] float8_e4m3fn
    scales: Tensor  # [N'] float32
    bias: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, int]
    gated: bool = False
    kind = "fp8"
    label = "fp8"

    @property
    def nbytes(self) -> int:
        return self.quants.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix."""
        n, k = self.shape
        values = self.quants.float() * self.scales[:, None]
        if self.gated:
            halves = values.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(1, 2)
            values = halves[:, : n // 2].flatten(0, 1)
        return values[:n, :k].to(self.dtype).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Rows x [R, K], quantized, times the dequantized matrix → [R, N]."""
        quants, scales = e4m3_rows(x)
        return F.linear((quants.float() * scales).to(x.dtype), self.weight, self.bias)


def quantize(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> ScaledMatrix:
    """The matrix in fp8, each weight rounded to the nearest; the largest magnitude of an output is 448."""
    n, k = weight.shape
    if k % GROUP:
        raise Unsupported(f"fp8 takes inputs in groups of {GROUP} and this matrix has {k}; leave out quantize=")
    halves = weight.view(2, n // 2, k).transpose(0, 1) if gated else weight.view(n, 1, k)
    block = OUTPUTS // halves.shape[1]
    quants, scales = [], []
    for rows in halves.split(max(block, SLICE // k // block * block)):
        wide = F.pad(rows, (0, padded_inputs(k) - k, 0, 0, 0, -len(rows) % block))
        some, own = e4m3_rows(wide.unflatten(0, (-1, block)).transpose(1, 2).flatten(0, 2))
        quants.append(some)
        scales.append(own.squeeze(1))
    return ScaledMatrix(torch.cat(quants), torch.cat(scales), bias, weight.dtype, (n, k), gated)


# -- matmul --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledTile:
    """Rows, outputs and inputs per step of a program, and its launch parameters.

    With `splits` the inputs are divided among programs, for matrices of few outputs.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 4
    splits: int = 1


FIXED = ScaledTile(64, 128, 128)  # of every row in deterministic mode
WIDE_OUTPUTS, MOST_SPLITS, SPLIT_ROWS = 8192, 4, 64  # up to so many outputs and rows programs divide the inputs


def pick_tile(rows: int, w: ScaledMatrix, shared_memory: int) -> ScaledTile:
    """The fastest tile on an H200 for this many rows, and a matrix of this size.

    `shared_memory` is what a program may use, in bytes; a smaller device gets fewer stages.
    """
    outputs, inputs = w.quants.shape
    few = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if rows > SPLIT_ROWS:
        tile = ScaledTile(128, 128, 128, warps=8)
    elif few < 64:
        tile = ScaledTile(few, 64, 256, splits=1 if outputs > WIDE_OUTPUTS else MOST_SPLITS)
    elif outputs > WIDE_OUTPUTS:
        tile = ScaledTile(64, 128, 128)
    else:
        tile = ScaledTile(64, 64, 128, stages=8, splits=2)
    if inputs % tile.inputs:
        tile = replace(tile, inputs=INPUTS, stages=8)
    stage = tile.inputs * (tile.rows + tile.outputs)
    return replace(tile, stages=max(1, min(tile.stages, shared_memory // stage)))


def split_sums(device: torch.device) -> SplitSums:
    """Room for a matmul of `pick_tile`'s tiles."""
    return SplitSums.of(WIDE_OUTPUTS, SPLIT_ROWS, device, MOST_SPLITS)


def matmul(
    x: ScaledRows,
    w: ScaledMatrix,
    y: Tensor,
    tile: ScaledTile,
    *,
    add: bool = False,
    factor: float = 1.0,
    row_bias: Tensor | None = None,
    sums: SplitSums | None = None,
    ahead: bool = False,
) -> None:
    """factor × rows x times the matrix into y [R, N], or added to it; silu(gate) × up for a gated matrix.

    A gated float16 result is scaled by INNER. A row of y depends on its row of x and on the tile alone. `row_bias`
    [R, 2N] float32 takes the place of a gated matrix's bias. A tile that splits the inputs needs `sums`.
    """
    rows, n, (outputs, k) = len(x), y.shape[1], w.quants.shape
    assert x.quants.shape[1] == k
    assert y.is_contiguous()
    assert k % tile.inputs == 0
    assert row_bias is None or (w.gated and row_bias.is_contiguous() and row_bias.shape == (rows, 2 * n))
    added = w.bias if row_bias is None else row_bias
    cells = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), tile.splits
    if tile.splits > 1:
        assert sums is not None
        assert sums.parts.numel() >= cells[0] * cells[1] * tile.splits * tile.rows * tile.outputs
        assert sums.arrived.numel() >= cells[0] * cells[1]
    parts = (w.scales, w.scales) if sums is None else (sums.parts, sums.arrived)
    _matmul[cells](
        x.quants, x.scales, w.quants, w.scales, y, x.scales if added is None else added, *parts, rows, n, outputs,
        K=k, GATED=w.gated, ADD=add, BIAS=added is not None, BY_ROW=row_bias is not None, FACTOR=factor,
        SCALE=INNER if w.gated and y.dtype == torch.float16 else 1.0,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs, SPLITS=tile.splits, AHEAD=ahead,
        num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
    )  # fmt: skip


def matvec(
    x: ScaledRows,
    w: ScaledMatrix,
    y: Tensor,
    *,
    add: bool = False,
    factor: float = 1.0,
    tile: RowTile | None = None,
    ahead: bool = False,
) -> None:
    """The same of a single row, on a device; sums have another order."""
    (outputs, k), n = w.quants.shape, y.shape[1]
    assert len(x) == 1
    assert y.is_contiguous()
    t = tile or pick_row_tile(outputs, k)
    step = 256 * t.blocks
    kernels.matvec[(outputs // OUTPUTS,)](
        x.quants.view(torch.int16), x.scales, w.quants.view(torch.int32), w.scales, y,
        x.scales if w.bias is None else w.bias, n,
        K=k, KIND="fp8", DEEP=t.blocks, GATED=w.gated, ADD=add, BIAS=w.bias is not None, FACTOR=factor,
        SCALE=INNER if w.gated and y.dtype == torch.float16 else 1.0, EVEN=k == step or k % (2 * step) == 0,
        AHEAD=ahead, num_warps=t.warps, **options(ahead),
    )  # fmt: skip


@dataclass(frozen=True)
class RowTile:
    """How many times four blocks of 64 inputs a step of `matvec` has, and its warps."""

    blocks: int
    warps: int


def pick_row_tile(outputs: int, inputs: int) -> RowTile:
    """The fastest tile of a single row on an H200."""
    if inputs < 4096:
        blocks = max(1, min(4, triton.next_power_of_2(inputs // 64) // 8))
        return RowTile(blocks, blocks)
    if inputs > 8192:
        return RowTile(4, 4)
    return RowTile(2, 2) if outputs > 16384 else RowTile(8, 4) if outputs > 4096 else RowTile(16, 4)


def sums(x: ScaledRows, w: ScaledMatrix, y: Tensor) -> Unscaled:
    """The sums of rows x times the matrix into y [R, N] bfloat16, by cuBLAS. It needs what `cublas_takes` says."""
    one = _one(x.scales.device)
    _by_cublas(x, w, one, one, y)
    return Unscaled(y, x.scales, w.scales, w.bias)


def scaled(x: ScaledRows, w: ScaledMatrix, y: Tensor) -> None:
    """Rows x times the matrix, with scales and without bias, by cuBLAS: what reads many outputs reads no scales."""
    _by_cublas(x, w, x.scales[:, None], w.scales[None], y)


def _by_cublas(x: ScaledRows, w: ScaledMatrix, rows: Tensor, outputs: Tensor, y: Tensor) -> None:
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    multiply(x.quants, w.quants.t(), rows, outputs, out_dtype=y.dtype, use_fast_accum=False, out=y)


def cublas_takes(w: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Whether `sums` computes this matrix: sums without scales fit in bfloat16 alone, and outputs must fill blocks."""
    return w.quants.is_cuda and dtype == torch.bfloat16 and w.shape[0] == len(w.quants)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x, x_scales, weights, scales, y, bias, parts, arrived, rows, n, outputs,
    K: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A tile of sums [BN, BM]: weights are the first operand, of which tensor cores take at least 64 rows.

    With SPLITS the inputs are divided among programs. The one that comes last adds the parts, in their order.
    """
    launch_next(AHEAD)
    PART: tl.constexpr = (K // BK + SPLITS - 1) // SPLITS * BK
    c, split = tl.arange(0, BK), tl.program_id(2)
    # Missing outputs and rows repeat the last one; their results are not stored.
    o = tl.minimum(tl.program_id(1) * BN + tl.arange(0, BN), outputs - 1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    ws = weights + o.to(tl.int64)[:, None] * K + c[None, :]
    xs = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K + c[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    wait(AHEAD)
    for k in range(split * PART, tl.minimum(split * PART + PART, K), BK):
        w = tl.load(ws + k)
        v = tl.load(xs + k)
        total = tl.dot(w, tl.trans(v), total, max_num_imprecise_acc=32)
    if SPLITS > 1:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        own = parts + tile * (BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(own + split * tiles * (BN * BM), total)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.atomic_xchg(arrived + tile, 0)
            total = tl.load(own)
            for i in tl.static_range(1, SPLITS):
                total += tl.load(own + i * tiles * (BN * BM))
            _store(total, x_scales, scales, y, bias, o, row, rows, n, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)
    else:
        _store(total, x_scales, scales, y, bias, o, row, rows, n, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)


@triton.jit
def _store(
    total, x_scales, scales, y, bias, o, row, rows, n,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr, FACTOR: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Scales a program's sums [BN, BM], applies bias and gate, and stores them."""
    BN: tl.constexpr = total.shape[0]
    BM: tl.constexpr = total.shape[1]
    total = total * tl.load(scales + o)[:, None] * tl.load(x_scales + tl.minimum(row, rows - 1))[None, :] * FACTOR
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (BN // 16, 2, 8, BM)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (BN // 2, BM)), tl.reshape(up, (BN // 2, BM))
        where = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        if BY_ROW:
            own = bias + row.to(tl.int64)[None, :] * 2 * n + where[:, None]
            there = (where < n)[:, None] & (row < rows)[None, :]
            gate += tl.load(own, mask=there, other=0.0)
            up += tl.load(own + n, mask=there, other=0.0)
        elif BIAS:
            gate += tl.load(bias + where, mask=where < n, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + n + where, mask=where < n, other=0.0).to(tl.float32)[:, None]
        total = gate / (1.0 + tl.exp(-gate)) * up
    else:
        where = tl.program_id(1) * BN + tl.arange(0, BN)
        if BIAS:
            total += tl.load(bias + where, mask=where < n, other=0.0).to(tl.float32)[:, None]
    inside = (where < n)[:, None] & (row < rows)[None, :]
    place = y + row.to(tl.int64)[None, :] * n + where[:, None]
    if ADD:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (total * SCALE).to(y.dtype.element_ty), mask=inside)
