"""LoRA adapters, added to a matmul: y[row] += scale × B (A x[row]) for rows that are grouped by adapter.

    tiles     [n, 3] int32: an adapter's slot, its first use and how many uses; at most TILE, 0 for an empty tile
    rows      [uses] int32, scales [uses] float32: the row of each use, and the adapter's scale there
    places    [rows] int32: the use of each row, -1 for a row without an adapter
    pointers  [slots, layers, MATRICES, 2] int64: where A [r, K] and B [N, r] of each matrix lie, r padded with zeros to
              whole blocks of RANKS; ranks and factors [slots, layers, MATRICES]: their ranks, 0 for nothing, and what
              to multiply their product with

Two kernels, both for all pieces of a stacked matrix: `shrink` sums A x over parts of the inputs, `expand` adds B times
these sums to y. In one call a row has at most one use, so that nothing is added concurrently. A row's bits depend on
the row and its adapter alone: tiles and parts have fixed sizes, and sums one order. Of about 64 rows matmul.py sums A x
by itself, in one part; `expand_gated` adds to gate and up and multiplies them, at rows without an adapter too.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.launch import launch_next, options, wait

TILE = 16  # uses of a tile
RANKS = 16  # ranks of a block
SPLITS = 16  # parts of the inputs, at most
PIECES = 3  # of a stacked matrix, at most
MATRICES = 16  # of a layer, at most
EXPERT_MATRICES = 5  # of each of its experts, and of its heads
BLOCK_INPUTS, BLOCK_OUTPUTS = 128, 128
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def splits(k: int) -> int:
    """In how many parts `k` inputs are summed: enough programs for a device, each with a few blocks to read."""
    return min(SPLITS, max(1, triton.next_power_of_2(triton.cdiv(k, 2 * BLOCK_INPUTS))))


def rank_blocks(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A [r, K] and B [N, r] with zeros up to whole blocks of RANKS, as the kernels read them."""
    return padded_ranks(a, 0), padded_ranks(b, 1)


def padded_ranks(matrix: Tensor, side: int) -> Tensor:
    """One of them, whose ranks are on this side."""
    more = -matrix.shape[side] % RANKS
    return F.pad(matrix, (0, more) if side else (0, 0, 0, more)).contiguous()


@dataclass(frozen=True, eq=False)
class AdapterTable:
    """The adapters of an engine: where their matrices lie, by slot."""

    pointers: Tensor  # [slots, L, MATRICES, 2] int64
    ranks: Tensor  # [slots, L, MATRICES] int32
    factors: Tensor  # [slots, L, MATRICES] float32
    experts: Tensor  # [slots, L, EXPERT_MATRICES] int64: where [X, 4] int64 lie (A, B, rank, bits of factor), or 0
    dtype: torch.dtype  # of the matrices

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.pointers, self.ranks, self.factors, self.experts

    @staticmethod
    def empty(slots: int, layers: int, dtype: torch.dtype, device: torch.device) -> AdapterTable:
        return AdapterTable(
            torch.zeros(slots, layers, MATRICES, 2, dtype=torch.int64, device=device),
            torch.zeros(slots, layers, MATRICES, dtype=torch.int32, device=device),
            torch.ones(slots, layers, MATRICES, dtype=torch.float32, device=device),
            torch.zeros(slots, layers, EXPERT_MATRICES, dtype=torch.int64, device=device),
            dtype,
        )


@dataclass(frozen=True, eq=False)
class AdapterTiles:
    """The uses of one call. `blocks` is how many blocks of RANKS the largest rank has."""

    tiles: Tensor  # [n, 3] int32
    rows: Tensor  # [uses] int32
    scales: Tensor  # [uses] float32
    places: Tensor  # [rows] int32
    blocks: int

    def sums(self) -> tuple[int, ...]:
        """The shape of the sums between `shrink` and `expand`."""
        return len(self.rows), PIECES, SPLITS, self.blocks * RANKS


@dataclass(frozen=True, eq=False)
class LowRankTerm:
    """What adapters add to one matmul of a layer: the pieces of its matrix, from matrix `first` on, have these numbers
    of outputs, side by side."""

    table: AdapterTable
    layer: int
    first: int
    outputs: tuple[int, ...]
    tiles: AdapterTiles
    sums: Tensor  # see `AdapterTiles.sums`

    @property
    def sizes(self) -> list[int]:
        return [*self.outputs, 0, 0][:PIECES]


def shrink(x: Tensor, low_rank: LowRankTerm, *, ahead: bool) -> None:
    """A x of every use, part by part, into the sums."""
    table, how, k = low_rank.table, low_rank.tiles, x.shape[1]
    part = triton.cdiv(triton.cdiv(k, splits(k)), BLOCK_INPUTS) * BLOCK_INPUTS
    _shrink[(len(how.tiles), how.blocks, len(low_rank.outputs) * splits(k))](
        x, table.pointers, table.ranks, how.tiles, how.rows, low_rank.sums, x.stride(0), low_rank.layer,
        table.ranks.shape[1], k,
        FIRST=low_rank.first, PART=part, WIDE=how.blocks * RANKS, KIND=DTYPES[table.dtype],
        PRECISION=_precision(x.dtype), TILE=TILE, RANKS=RANKS, SPLITS=splits(k), PIECES=PIECES, MATRICES=MATRICES,
        BK=BLOCK_INPUTS, AHEAD=ahead, num_warps=4, num_stages=3, **options(ahead),
    )  # fmt: skip


def expand(y: Tensor, low_rank: LowRankTerm, parts: int, *, factor: float = 1.0, ahead: bool) -> None:
    """y [T, N] += factor × scale × B (A x) at the rows of the uses, from sums of so many `parts` of the inputs."""
    table, how = low_rank.table, low_rank.tiles
    blocks, n = [triton.cdiv(n, BLOCK_OUTPUTS) for n in low_rank.outputs], low_rank.sizes
    _expand[(len(how.tiles), sum(blocks))](
        y, table.pointers, table.ranks, table.factors, how.tiles, how.rows, how.scales, low_rank.sums, y.stride(0),
        low_rank.layer, table.ranks.shape[1], factor, N0=n[0], N1=n[1], N2=n[2], FIRST=low_rank.first,
        WIDE=how.blocks * RANKS, KIND=DTYPES[table.dtype], PRECISION=_precision(table.dtype), TILE=TILE, RANKS=RANKS,
        SPLITS=parts, PIECES=PIECES, MATRICES=MATRICES, BN=BLOCK_OUTPUTS, AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip


def expand_gated(gate_up: Tensor, out: Tensor, low_rank: LowRankTerm, parts: int, *, ahead: bool) -> None:
    """silu(gate) × up of gate_up [T, 2F] into out [T, F], after what adapters add to both at the rows of their uses."""
    table, how, (rows, f) = low_rank.table, low_rank.tiles, out.shape
    _expand_gated[(len(how.tiles) + triton.cdiv(rows, TILE), triton.cdiv(f, BLOCK_OUTPUTS))](
        gate_up, out, table.pointers, table.ranks, table.factors, how.tiles, how.rows, how.scales, how.places,
        low_rank.sums, low_rank.layer, table.ranks.shape[1], len(how.tiles), len(how.places), rows, F=f,
        FIRST=low_rank.first, WIDE=how.blocks * RANKS, KIND=DTYPES[table.dtype], PRECISION=_precision(table.dtype),
        TILE=TILE, RANKS=RANKS, SPLITS=parts, PIECES=PIECES, MATRICES=MATRICES, BN=BLOCK_OUTPUTS, AHEAD=ahead,
        num_warps=4, **options(ahead),
    )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["layer"])
def _shrink(
    x, pointers, ranks, tiles, use_rows, sums, x_row, layer, layers, K,
    FIRST: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr, MATRICES: tl.constexpr,
    BK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    tile, block = tl.program_id(0), tl.program_id(1)
    piece, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    slot, start, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    matrix = (slot.to(tl.int64) * layers + layer) * MATRICES + FIRST + piece
    rank = tl.load(ranks + matrix)
    wait(AHEAD)  # every program: whatever runs after this kernel must find all before it done
    if (count > 0) & (block * RANKS < rank):
        a = tl.multiple_of(tl.load(pointers + matrix * 2).to(tl.pointer_type(KIND)), 16)
        m, j, c = tl.arange(0, TILE), block * RANKS + tl.arange(0, RANKS), tl.arange(0, BK)
        row = tl.load(use_rows + start + m, mask=m < count, other=0).to(tl.int64)
        total = tl.zeros((TILE, RANKS), tl.float32)
        for k in range(split * PART, tl.minimum(K, (split + 1) * PART), BK):
            inside = (k + c < K)[None, :]
            v = tl.load(x + row[:, None] * x_row + (k + c)[None, :], mask=(m < count)[:, None] & inside, other=0.0)
            w = tl.load(a + j.to(tl.int64)[:, None] * K + (k + c)[None, :], mask=inside, other=0.0)
            total = tl.dot(v, tl.trans(w.to(v.dtype)), total, input_precision=PRECISION)
        place = (((start + m).to(tl.int64) * PIECES + piece) * SPLITS + split)[:, None] * WIDE + j[None, :]
        tl.store(sums + place, total, mask=(m < count)[:, None])


@triton.jit
def _outputs_of(pointers, rank, matrix, o, outputs, first, KIND: tl.constexpr, RANKS: tl.constexpr):
    """A block of ranks of B at outputs o [BN, RANKS]."""
    b = tl.multiple_of(tl.load(pointers + matrix * 2 + 1).to(tl.pointer_type(KIND)), 16)
    padded, j = (rank + RANKS - 1) // RANKS * RANKS, first + tl.arange(0, RANKS)
    at = b + o.to(tl.int64)[:, None] * padded + j[None, :]
    return tl.load(at, mask=(o < outputs)[:, None] & (j < padded)[None, :], other=0.0)


@triton.jit
def _added(
    w, pointers, rank, scale, sums, matrix, piece, start, count, o, outputs,
    WIDE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr,
    SPLITS: tl.constexpr, PIECES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What the uses of a tile add to outputs o of a piece [TILE, BN]; w is the first block of their B."""
    m = tl.arange(0, TILE)
    use = (start + m).to(tl.int64)
    total = tl.zeros((TILE, BN), tl.float32)
    for first in range(0, rank, RANKS):
        j = first + tl.arange(0, RANKS)
        part = tl.zeros((TILE, RANKS), tl.float32)
        for split in range(SPLITS):
            at = ((use * PIECES + piece) * SPLITS + split)[:, None] * WIDE + j[None, :]
            part += tl.load(sums + at, mask=(m < count)[:, None], other=0.0)
        total = tl.dot(part, tl.trans(w.to(tl.float32)), total, input_precision=PRECISION)
        if WIDE > RANKS:
            w = _outputs_of(pointers, rank, matrix, o, outputs, first + RANKS, KIND, RANKS)
    return total * scale[:, None]


@triton.jit(do_not_specialize=["layer"])
def _expand(
    y, pointers, ranks, factors, tiles, use_rows, scales, sums, y_row, layer, layers, factor,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    FIRST: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr, MATRICES: tl.constexpr,
    BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    B0: tl.constexpr = (N0 + BN - 1) // BN
    B1: tl.constexpr = B0 + (N1 + BN - 1) // BN
    tile, block = tl.program_id(0), tl.program_id(1)
    piece = (block >= B0).to(tl.int32) + (block >= B1).to(tl.int32)
    inner = block - tl.where(piece == 0, 0, tl.where(piece == 1, B0, B1))  # the block within its piece
    outputs = tl.where(piece == 0, N0, tl.where(piece == 1, N1, N2))
    before = tl.where(piece == 0, 0, tl.where(piece == 1, N0, N0 + N1))
    slot, start, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    matrix = (slot.to(tl.int64) * layers + layer) * MATRICES + FIRST + piece
    rank = tl.load(ranks + matrix)
    m, o = tl.arange(0, TILE), inner * BN + tl.arange(0, BN)
    w = _outputs_of(pointers, rank, matrix, o, outputs, 0, KIND, RANKS)
    row = tl.load(use_rows + start + m, mask=m < count, other=0).to(tl.int64)
    scale = tl.load(scales + start + m, mask=m < count, other=0.0) * tl.load(factors + matrix) * factor
    wait(AHEAD)
    if (count > 0) & (rank > 0):
        total = _added(
            w, pointers, rank, scale, sums, matrix, piece, start, count, o, outputs,
            WIDE, KIND, PRECISION, TILE, RANKS, SPLITS, PIECES, BN,
        )  # fmt: skip
        place = y + row[:, None] * y_row + (before + o)[None, :]
        there = (m < count)[:, None] & (o < outputs)[None, :]
        total += tl.load(place, mask=there, other=0.0).to(tl.float32)
        tl.store(place, total.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["layer", "tile_count", "placed", "rows"])
def _expand_gated(
    gate_up, out, pointers, ranks, factors, tiles, use_rows, scales, places, sums, layer, layers, tile_count, placed,
    rows, F: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr, MATRICES: tl.constexpr,
    BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    tile, m, o = tl.program_id(0), tl.arange(0, TILE), tl.program_id(1) * BN + tl.arange(0, BN)
    gate = tl.zeros((TILE, BN), tl.float32)
    up = tl.zeros((TILE, BN), tl.float32)
    if tile < tile_count:
        slot, start, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        live = m < count
        row = tl.load(use_rows + start + m, mask=live, other=0)
        matrix = (slot.to(tl.int64) * layers + layer) * MATRICES + FIRST
        rank, other = tl.load(ranks + matrix), tl.load(ranks + matrix + 1)
        w = _outputs_of(pointers, rank, matrix, o, F, 0, KIND, RANKS)
        v = _outputs_of(pointers, other, matrix + 1, o, F, 0, KIND, RANKS)
        scale = tl.load(scales + start + m, mask=live, other=0.0)
        wait(AHEAD)
        gate = _added(
            w, pointers, rank, scale * tl.load(factors + matrix), sums, matrix, 0, start, count, o, F,
            WIDE, KIND, PRECISION, TILE, RANKS, SPLITS, PIECES, BN,
        )  # fmt: skip
        up = _added(
            v, pointers, other, scale * tl.load(factors + matrix + 1), sums, matrix + 1, 1, start, count, o, F,
            WIDE, KIND, PRECISION, TILE, RANKS, SPLITS, PIECES, BN,
        )  # fmt: skip
    else:  # rows without an adapter
        row = (tile - tile_count) * TILE + m
        live = (row < rows) & (tl.load(places + row, mask=row < placed, other=-1) < 0)
        wait(AHEAD)
    at = gate_up + row.to(tl.int64)[:, None] * (2 * F) + o[None, :]
    there = live[:, None] & (o < F)[None, :]
    gate += tl.load(at, mask=there, other=0.0).to(tl.float32)
    up += tl.load(at + F, mask=there, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row.to(tl.int64)[:, None] * F + o[None, :], result.to(out.dtype.element_ty), mask=there)
