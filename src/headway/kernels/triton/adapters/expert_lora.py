"""LoRA of experts, added to their matmuls: y[pair] += scale × B_e (A_e x[pair]) for pairs of rows and experts.

A pair is under the adapter of its row, and its matrices are those of its expert. Which these are only the device knows,
so every pair is computed by itself, by two launches that fit any routing: `_shrink` puts A x of every pair into sums,
`_expand` adds B times these to y. Bits of a pair depend on its row, its adapter and its expert alone. Gate and up are
then multiplied by `gated`: a gated matmul would need what adapters add before it ends.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.adapters.lora import DTYPES, EXPERT_MATRICES, RANKS, TILE, AdapterTable, AdapterTiles
from headway.kernels.triton.experts.matmul import ExpertGate, Routes
from headway.kernels.triton.fused import activated
from headway.kernels.triton.launch import launch_next, options, wait

PIECES = 2  # gate and up
BLOCK_INPUTS, BLOCK_OUTPUTS = 256, 128


@dataclass(frozen=True, eq=False)
class ExpertTerm:
    """What adapters add to one matmul of a layer's experts: that of gate and up, or of down.

    `ranks` is the largest rank of an expert's matrices, in whole blocks of RANKS.
    """

    table: AdapterTable
    layer: int
    first: int  # of EXPERT_MATRICES
    pieces: int
    tiles: AdapterTiles
    ranks: int

    def sums(self, each: int) -> Tensor:
        """Room for A x of every pair, with so many experts of a row."""
        shape = len(self.tiles.rows) * each, PIECES, self.ranks
        return torch.empty(shape, dtype=torch.float32, device=self.tiles.rows.device)


def add_low_rank(
    x: Tensor, y: Tensor, routes: Routes, term: ExpertTerm, *, weighted: bool = False, ahead: bool = False
) -> None:
    """Add to y [T × k, N], a row for each pair, what adapters make of x: a row for each of T rows, or for each pair.

    With `weighted` each row of x is first multiplied by its weight.
    """
    table, how, each, (_, n) = term.table, term.tiles, routes.chosen.shape[1], y.shape
    outputs, k, sums = n // term.pieces, x.shape[1], term.sums(each)
    per = each if len(x) * each == len(y) else 1
    pairs = len(how.tiles) * TILE * each
    weights = routes.weights if weighted else None
    shared = (table.experts, how.tiles, how.rows, routes.chosen, sums)
    _shrink[(pairs, term.pieces)](
        x, *shared, weights, x.stride(0), term.layer, table.experts.shape[1], k, PER=per, EACH=each, FIRST=term.first,
        WIDE=term.ranks, KIND=DTYPES[table.dtype], TILE=TILE, RANKS=RANKS, PIECES=PIECES, MATRICES=EXPERT_MATRICES,
        BK=min(BLOCK_INPUTS, triton.next_power_of_2(k)), AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip
    _expand[(pairs, triton.cdiv(outputs, BLOCK_OUTPUTS), term.pieces)](
        y, *shared, how.scales, y.stride(0), term.layer, table.experts.shape[1], outputs, EACH=each, FIRST=term.first,
        WIDE=term.ranks, KIND=DTYPES[table.dtype], TILE=TILE, RANKS=RANKS, PIECES=PIECES, MATRICES=EXPERT_MATRICES,
        BN=BLOCK_OUTPUTS, AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip


def gated(gate_up: Tensor, out: Tensor, gate: ExpertGate, *, ahead: bool = False) -> None:
    """What is made of gate and up of gate_up [N, 2F] float32, into out [N, F]."""
    rows, f = out.shape
    block = min(1024, max(16, triton.next_power_of_2(f)))
    _gated[(rows, triton.cdiv(f, block))](
        gate_up, out, F=f, KIND=gate.activation, CLAMP=gate.clamp or 0.0, ALPHA=gate.alpha, BLOCK=block, AHEAD=ahead,
        num_warps=4, **options(ahead),
    )  # fmt: skip


@triton.jit
def _pair_of(
    experts, tiles, use_rows, chosen, layer, layers, piece,
    EACH: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """The use and the pair of a program, and where the numbers of its expert's matrices are; 0 for nothing."""
    program = tl.program_id(0)
    tile, m, j = program // (TILE * EACH), program // EACH % TILE, program % EACH
    slot, start, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    use, matrix = start + m, (slot.to(tl.int64) * layers + layer) * MATRICES + FIRST + piece
    found = tl.load(experts + matrix, mask=m < count, other=0)
    row = tl.load(use_rows + use, mask=m < count, other=0)
    pair = row * EACH + j
    expert = tl.load(chosen + pair, mask=m < count, other=0).to(tl.int64)
    return use, use.to(tl.int64) * EACH + j, pair.to(tl.int64), tl.where(found == 0, 0, found + expert * 32)


@triton.jit(do_not_specialize=["layer"])
def _shrink(
    x, experts, tiles, use_rows, chosen, sums, weights, x_row, layer, layers, K,
    PER: tl.constexpr, EACH: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr,
    TILE: tl.constexpr, RANKS: tl.constexpr, PIECES: tl.constexpr, MATRICES: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    piece = tl.program_id(1)
    _, place, pair, at = _pair_of(
        experts, tiles, use_rows, chosen, layer, layers, piece, EACH, FIRST, TILE, MATRICES
    )  # fmt: skip
    if at != 0:
        own = at.to(tl.pointer_type(tl.int64))
        a, rank = tl.load(own).to(tl.pointer_type(KIND)), tl.load(own + 2).to(tl.int32)
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + pair).to(x.dtype.element_ty).to(tl.float32)
        r, c = tl.arange(0, RANKS), tl.arange(0, BK)
        for first in range(0, rank, RANKS):
            total = tl.zeros((RANKS,), tl.float32)
            for k in range(0, K, BK):
                inside = k + c < K
                v = tl.load(x + (pair // PER) * x_row + k + c, mask=inside, other=0.0).to(tl.float32)
                if weights is not None:
                    v = (v * weight).to(x.dtype.element_ty).to(tl.float32)
                rows = (first + r).to(tl.int64)[:, None] * K
                w = tl.load(a + rows + (k + c)[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                total += tl.sum(w * v[None, :], 1)
            tl.store(sums + (place * PIECES + piece) * WIDE + first + r, total)


@triton.jit(do_not_specialize=["layer"])
def _expand(
    y, experts, tiles, use_rows, chosen, sums, scales, y_row, layer, layers, outputs,
    EACH: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
    RANKS: tl.constexpr, PIECES: tl.constexpr, MATRICES: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    piece = tl.program_id(2)
    use, place, pair, at = _pair_of(
        experts, tiles, use_rows, chosen, layer, layers, piece, EACH, FIRST, TILE, MATRICES
    )  # fmt: skip
    if at != 0:
        own = at.to(tl.pointer_type(tl.int64))
        b, rank = tl.load(own + 1).to(tl.pointer_type(KIND)), tl.load(own + 2).to(tl.int32)
        factor = tl.load(own + 3).to(tl.int32).to(tl.float32, bitcast=True)
        r, o = tl.arange(0, RANKS), tl.program_id(1) * BN + tl.arange(0, BN)
        there, held = o < outputs, (rank + RANKS - 1) // RANKS * RANKS
        total = tl.zeros((BN,), tl.float32)
        for first in range(0, rank, RANKS):
            w = tl.load(b + o.to(tl.int64)[:, None] * held + (first + r)[None, :], mask=there[:, None], other=0.0)
            inner = tl.load(sums + (place * PIECES + piece) * WIDE + first + r)
            total += tl.sum(w.to(tl.float32) * inner[None, :], 1)
        to = y + pair * y_row + piece * outputs + o
        total = tl.load(to, mask=there, other=0.0).to(tl.float32) + total * (tl.load(scales + use) * factor)
        tl.store(to, total.to(y.dtype.element_ty), mask=there)


@triton.jit
def _gated(
    gate_up, out, F: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr, ALPHA: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * F + i, mask=i < F, other=0.0)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=i < F, other=0.0)
    if CLAMP > 0:
        gate, up = tl.minimum(gate, CLAMP), tl.minimum(tl.maximum(up, -CLAMP), CLAMP)
        result = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        result = activated(gate, KIND) * up
    tl.store(out + row * F + i, result.to(out.dtype.element_ty), mask=i < F)
