"""The matmuls of a forward on a CUDA device: which kernel computes one, by its weights, its rows and the mode.

One row of floats goes through a Triton matvec, several through cuBLAS, or about 64 through our own tiles; quantized
weights have kernels of their own. What adapters add is added here too. In deterministic mode nothing is chosen by how
many rows there are.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from headway.kernels.triton import deterministic as exact
from headway.kernels.triton import fused, quantized
from headway.kernels.triton import matmul as tiled
from headway.kernels.triton import quantized_tiles as byte_tiles
from headway.kernels.triton.adapters import lora
from headway.kernels.triton.adapters.expert_lora import ExpertTerm
from headway.kernels.triton.adapters.lora import LowRankTerm
from headway.kernels.triton.launch import can_go_ahead, shared_memory
from headway.kernels.triton.matvec import RmsNorm, matvec
from headway.kernels.triton.quantized import CudaQuantizedMatrix
from headway.kernels.triton.quantized_tiles import SplitSums
from headway.models.decoder import Decoder
from headway.models.layers import DecoderLayer, Linear
from headway.runtime.runners.cuda.adapters import EACH, CudaAdapters, StepTiles
from headway.runtime.runners.cuda.buffers import Buffers
from headway.runtime.runners.row_adapters import EXPERT_STACKS

# A matmul: its layer or `OUTSIDE`, its name there, and which piece of it if not all.
Place = tuple[int, str] | tuple[int, str, int]


class Matmuls:
    """The matmuls of one decoder. `adapters` are those that its steps may name."""

    def __init__(self, decoder: Decoder, adapters: CudaAdapters, *, deterministic: bool) -> None:
        self.decoder, self.adapters, self.deterministic = decoder, adapters, deterministic
        self.device, self.dtype = decoder.device, decoder.dtype
        self.ahead = can_go_ahead(self.device)
        self.is_quantized = isinstance(decoder.output, CudaQuantizedMatrix)
        self._shared = shared_memory(self.device)
        self._wide: bool | None = None  # whether many rows take wider tiles in deterministic mode
        self._written: Tensor | None = None
        self._split_sums: SplitSums | None = None  # of matmuls that are chosen by the number of rows
        if self.is_quantized and not deterministic:
            self._split_sums = SplitSums.of(byte_tiles.SPLIT_OUTPUTS, quantized.FEW, self.device)

    def matvec(
        self,
        x: Tensor,
        w: Linear,
        y: Tensor,
        *,
        norm: RmsNorm | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        """One row x [K], normed or not, times a matrix of floats into y [N]."""
        matvec(x, w.weight, y, bias=w.bias, norm=norm, gated=gated, add=add, ahead=self.ahead)

    def quantized(
        self, x: Tensor, w: object, y: Tensor, *, factor: float = 1.0, add: bool = False, bias: Tensor | None = None
    ) -> None:
        """Rows x [R, K] float16 times a quantized matrix into y; `bias` [R, N] float32 is each row's own."""
        assert isinstance(w, CudaQuantizedMatrix)
        alone, tile = not self.deterministic, None
        if self._split_sums is not None and w.kind != "int4" and len(x) >= byte_tiles.LEAST:
            tile = byte_tiles.pick_byte_tile(len(x), w.shape[0], x.shape[1], self._shared)
        how: dict[str, Any] = {"ahead": self.ahead, "alone": alone, "tile": tile, "sums": self._split_sums}
        quantized.matmul(x, w, y, factor=factor, add=add, row_bias=bias, **how)

    def low_rank(self, at: Place, x: Tensor, y: Tensor, tiles: StepTiles | None, *, factor: float = 1.0) -> None:
        """Add to a matmul's outputs y what the adapters of its rows x make of them."""
        for one in self._low_ranks(at, tiles):
            lora.shrink(x, one, ahead=self.ahead)
            lora.expand(y, one, lora.splits(x.shape[1]), factor=factor, ahead=self.ahead)

    def project(self, at: Place, x: Tensor, w: Linear, y: Tensor, tiles: StepTiles | None) -> None:
        """As `adapted`; of one row alone our own matmul is faster than cuBLAS."""
        if len(x) == 1 and tiles is None and not self.deterministic:
            self.matvec(x[0], w, y[0])
        else:
            self.adapted(at, x, w, y, tiles)

    def adapted(self, at: Place, x: Tensor, w: Linear, y: Tensor, tiles: StepTiles | None) -> None:
        """A matmul with what the adapters of its rows add; where ours computes it, that takes one more kernel."""
        added = self._low_ranks(at, tiles)
        if len(added) == 1 and self.in_tiles(len(x)):
            self._shrinking(x, w, y, added[0])
            lora.expand(y, added[0], 1, ahead=self.ahead)
            return
        self.linear(x, w, y)
        self.low_rank(at, x, y, tiles)

    def _shrinking(self, x: Tensor, w: Linear, y: Tensor, term: LowRankTerm) -> None:
        tiled.matmul(x, w.weight, y, self.tile(y), bias=w.bias, shrinks=term, ahead=self.ahead)

    def _low_ranks(self, at: Place, tiles: StepTiles | None) -> list[LowRankTerm]:
        """What adapters add to a matmul, round by round."""
        l, stack, *piece = at
        if tiles is None or stack not in tiles.shape.stacks:
            return []
        first, outputs = self.adapters.pieces(l, stack)
        if piece:
            first, outputs = first + piece[0], outputs[piece[0] :][:1]
        row = self.adapters.row(l)
        return [LowRankTerm(self.adapters.table, row, first, outputs, some, tiles.sums) for some in tiles.rounds]

    def expert_terms(self, l: int, stack: str, tiles: StepTiles | None) -> list[ExpertTerm]:
        """What adapters add to a matmul of experts or of heads, round by round."""
        if tiles is None or stack not in tiles.shape.stacks:
            return []
        roles, ranks = EXPERT_STACKS[stack], tiles.shape.expert_blocks * lora.RANKS
        first = EACH.index(roles[0])
        return [ExpertTerm(self.adapters.table, l, first, len(roles), some, ranks) for some in tiles.rounds]

    def gate_up_delta(self, l: int, h: Tensor, tiles: StepTiles | None) -> Tensor | None:
        """What adapters add to gate and up, with their bias: a gated matmul multiplies them by itself."""
        if tiles is None or "gate_up" not in tiles.shape.stacks:
            return None
        bias = self.decoder.layers[l].gate_up.bias
        delta = torch.zeros(len(h), 2 * self.decoder.config.intermediate_size, dtype=torch.float32, device=self.device)
        if bias is not None:
            delta += bias
        self.low_rank((l, "gate_up"), h, delta, tiles)
        return delta

    def _dense(self, w: Linear | CudaQuantizedMatrix) -> Tensor:
        """The matrix [N, K] as floats. A quantized one is valid until the next: all are dequantized into one buffer."""
        if not isinstance(w, CudaQuantizedMatrix):
            return w.weight
        if self._written is None:
            size = max(prod(m.shape) for layer in self.decoder.layers for m in _matrices(layer))
            self._written = torch.empty(size, dtype=self.dtype, device=self.device)
        n, k = w.shape
        weights = self._written[: n * k].view(n, k)
        quantized.dequantize_into(w, weights)
        return weights

    def padded_rows(self, rows: int, buffers: Buffers) -> int:
        """How many rows matmuls take: a whole tile where that is faster, the last rows for nothing."""
        if tiled.LEAST <= rows <= tiled.MOST <= buffers.rows and self.in_tiles(tiled.MOST):
            return tiled.MOST
        return rows

    def gate_times_up(self, l: int, h: Tensor, buffers: Buffers, tiles: StepTiles | None) -> None:
        """silu(gate) × up of rows h into buffers.inner."""
        w, gate_up, inner = self.decoder.layers[l].gate_up, buffers.gate_up[: len(h)], buffers.inner[: len(h)]
        added = self._low_ranks((l, "gate_up"), tiles)
        if 1 < len(h) <= tiled.FEW <= buffers.rows and not added and self.in_tiles(tiled.MOST):
            h, inner = buffers.h[: tiled.FEW], buffers.inner[: tiled.FEW]  # the last rows for nothing
            tile = self.tile(inner, gated=True)
            tiled.matmul(h, w.weight, inner, tile, bias=w.bias, gated=True, ahead=self.ahead)
            return
        if self.in_tiles(len(h)) and len(added) == 1:
            self._shrinking(h, w, gate_up, added[0])
            lora.expand_gated(gate_up, inner, added[0], 1, ahead=self.ahead)
            return
        if self.in_tiles(len(h)) and not added:
            tiled.matmul(h, w.weight, inner, self.tile(inner, gated=True), bias=w.bias, gated=True, ahead=self.ahead)
            return
        self.linear(h, w, gate_up)
        self.low_rank((l, "gate_up"), h, gate_up, tiles)
        fused.gated(gate_up, inner, ahead=self.ahead)

    def in_tiles(self, rows: int) -> bool:
        """Whether matmuls of this many rows use our kernel; cuBLAS is faster with others, and in float32."""
        own_ways = self.is_quantized or self.deterministic
        return rows == tiled.MOST and not own_ways and self.dtype != torch.float32

    def tile(self, y: Tensor, *, gated: bool = False) -> tiled.MatmulTile:
        """The tile of our kernel for results y."""
        return tiled.pick_tile(len(y), y.shape[1], gated, self._shared)

    def linear(self, x: Tensor, w: Linear, y: Tensor) -> None:
        """Rows x [R, K] times a matrix, with its bias, into y [R, N]."""
        if self.is_quantized and self.dtype == torch.float32:
            x = x.half().float()  # as the kernels for few rows take them
        if self.deterministic:
            exact.matmul(x, w.weight, y, bias=w.bias, tile=self.exact_tile(len(x)), ahead=self.ahead)
        elif self.in_tiles(len(x)):
            tiled.matmul(x, w.weight, y, self.tile(y), bias=w.bias, ahead=self.ahead)
        elif w.bias is None:
            torch.mm(x, self._dense(w).t(), out=y)
        else:
            torch.addmm(w.bias, x, self._dense(w).t(), out=y)

    def multiply(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """Rows x [R, K] times a matrix of floats that adapters do not change, into y [R, N]."""
        self.project((0, ""), x, Linear(weight), y, None)

    def widened(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """Rows x [R, K] times a matrix of floats, in y [R, N] float32 without rounding."""
        if self.deterministic:
            exact.matmul(x, weight, y, tile=self.exact_tile(len(x)), ahead=self.ahead)
        elif len(x) == 1:
            matvec(x[0], weight, y[0], ahead=self.ahead)
        elif self.in_tiles(len(x)):
            tiled.matmul(x, weight, y, self.tile(y), ahead=self.ahead)
        elif self.dtype == torch.float32:
            torch.mm(x, weight.t(), out=y)
        else:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=y)

    def exact_tile(self, rows: int) -> tiled.MatmulTile | None:
        """The tile of matmuls in deterministic mode; None for the one that fits any number of rows."""
        if rows <= exact.MANY:
            return None
        if self._wide is None:  # the first step of a size is never captured
            self._wide = exact.wide_tile_is_exact(self.decoder.layers[0].qkv.weight)
        return exact.WIDE if self._wide else None


def _matrices(layer: DecoderLayer) -> list[CudaQuantizedMatrix]:
    return [m for m in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(m, CudaQuantizedMatrix)]
