"""The layers of a decoder in fp8: rows are quantized in front of every matmul, whatever their number.

Up to ALONE rows, and in other dtypes than bfloat16, the matmuls are Triton kernels that apply the scales, the gate and
the residual. Those of more rows are cuBLAS's, whose sums go without their scales to the small kernel behind each; gate
× up takes one kernel of ours for up to TILES rows, and cuBLAS with scales for more. What adapters add comes from rows
that are not quantized. In deterministic mode every row goes through one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.fp8 import scaled_matmul, scaled_rows
from headway.kernels.triton.fp8.scaled_matmul import INNER, ScaledMatrix
from headway.kernels.triton.fp8.scaled_rows import ScaledRows, Unscaled
from headway.kernels.triton.launch import shared_memory
from headway.models.decoder import Decoder
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.buffers import Buffers
from headway.runtime.runners.cuda.matmuls import Matmuls

Mark = Callable[[str], None]
ALONE = 8  # rows up to which cuBLAS is slower
TILES = 64  # rows up to which gate × up in one kernel is faster
Attend = Callable[[int, Unscaled | None], Tensor]  # a layer's attention [R, H, D], from queries, keys and values


def is_scaled(decoder: Decoder) -> bool:
    """Whether a decoder's matrices are in fp8."""
    return isinstance(decoder.layers[0].qkv, ScaledMatrix)


@dataclass(frozen=True, eq=False)
class ScaledStep:
    """One forward: its residual rows x [R, E] and what computes their attention. The last layer finishes the `needed`
    rows [r], or all."""

    x: Tensor
    buffers: Buffers
    adapters: StepTiles | None
    needed: Tensor | None
    attend: Attend
    mark: Mark


class ScaledLayers:
    """The layers of one decoder in fp8."""

    def __init__(self, matmuls: Matmuls) -> None:
        self.matmuls, self.decoder, self.ahead = matmuls, matmuls.decoder, matmuls.ahead
        self.deterministic, self._shared = matmuls.deterministic, shared_memory(matmuls.device)
        self._split_sums = None if self.deterministic else scaled_matmul.split_sums(matmuls.device)

    def rows(self, step: ScaledStep) -> None:
        """All layers, in place."""
        layers, x, before = self.decoder.layers, step.x, None
        for l, layer in enumerate(layers):
            y = step.buffers.qkv[: len(x)]
            h, floats = self._normed(step, x, layer.input_norm, layer.eps, before)
            step.mark("norm")
            qkv = self._sums(h, layer.qkv, y, adapted=step.adapters is not None)
            self.matmuls.low_rank((l, "qkv"), floats, y, step.adapters)
            step.mark("qkv")
            if step.needed is not None and l + 1 == len(layers):
                mixed, some = (t.index_select(0, step.needed) for t in (step.attend(l, qkv), x))
                self._add(self._after_attention(step, l, some, mixed), some)
                x.index_copy_(0, step.needed.long(), some)
                return
            before = self._after_attention(step, l, x, step.attend(l, qkv))
        self._add(before, x)

    def _after_attention(self, step: ScaledStep, l: int, x: Tensor, mixed: Tensor) -> Unscaled | None:
        """The rest of a layer of rows x; what it has still to add to them, if it did not."""
        layer, n, buffers, tiles = self.decoder.layers[l], len(x), step.buffers, step.adapters
        rows, delta = buffers.scaled["out"].first(n), buffers.delta[:n]
        scaled_rows.quantize(mixed.flatten(1), rows, ahead=self.ahead)
        added = self._into(rows, layer.out, x, delta, adapted=tiles is not None)
        self.matmuls.low_rank((l, "out"), mixed.flatten(1), x, tiles)
        step.mark("output projection")
        h, floats = self._normed(step, x, layer.mlp_norm, layer.eps, added)
        step.mark("norm")
        inner, factor = self._gated(step, l, h, floats)
        added = self._into(inner, layer.down, x, delta, adapted=tiles is not None, factor=factor)
        self.matmuls.low_rank((l, "down"), buffers.inner[:n], x, tiles, factor=factor)
        step.mark("feed-forward")
        return added

    def _normed(
        self, step: ScaledStep, x: Tensor, weight: Tensor, eps: float, add: Unscaled | None
    ) -> tuple[ScaledRows, Tensor]:
        """The normed rows, quantized, and in floats where adapters read them."""
        rows, floats = step.buffers.scaled["h"].first(len(x)), step.buffers.h[: len(x)]
        read = None if step.adapters is None else floats
        scaled_rows.norm(x, weight, eps, rows, add=add, floats=read, ahead=self.ahead)
        return rows, floats

    def _gated(self, step: ScaledStep, l: int, h: ScaledRows, floats: Tensor) -> tuple[ScaledRows, float]:
        """silu(gate) × up, quantized, and the factor that it lacks; as floats in buffers.inner where adapters read."""
        w, n, buffers = _scaled(self.decoder.layers[l].gate_up), len(h), step.buffers
        bias, inner = self.matmuls.gate_up_delta(l, floats, step.adapters), buffers.inner[:n]
        rows, size = buffers.scaled["inner"].first(n), self.decoder.config.intermediate_size
        if n > TILES and self._by_cublas(n, w):
            gate_up, read = buffers.gate_up[:n], None if step.adapters is None else inner
            scaled_matmul.scaled(h, w, gate_up)
            added = w.bias if bias is None else bias
            scaled_rows.gated(gate_up, rows, size=size, bias=added, floats=read, ahead=self.ahead)
            return rows, 1.0
        self._tiled(h, w, inner, row_bias=bias)
        scaled_rows.quantize(inner, rows, ahead=self.ahead)
        return rows, 1 / INNER if inner.dtype == torch.float16 else 1.0

    # -- matmuls ---------------------------------------------------------------------------------------------------

    def _sums(self, x: ScaledRows, w: Any, y: Tensor, *, adapted: bool) -> Unscaled | None:
        """Rows x times a matrix into y, or their sums without scales there."""
        matrix = _scaled(w)
        if not self._by_cublas(len(x), matrix):
            self._tiled(x, matrix, y)
            return None
        sums = scaled_matmul.sums(x, matrix, y)
        if adapted:
            scaled_rows.apply_scales(sums, y, ahead=self.ahead)
            return None
        return sums

    def _into(
        self, x: ScaledRows, w: Any, y: Tensor, delta: Tensor, *, adapted: bool, factor: float = 1.0
    ) -> Unscaled | None:
        """Rows x times a matrix, added to y, or in delta to be added later."""
        matrix = _scaled(w)
        if not self._by_cublas(len(x), matrix):
            self._tiled(x, matrix, y, add=True, factor=factor)
            return None
        sums = scaled_matmul.sums(x, matrix, delta)
        if adapted:
            self._add(sums, y)
            return None
        return sums

    def _add(self, sums: Unscaled | None, y: Tensor) -> None:
        if sums is not None:
            scaled_rows.apply_scales(sums, y, add=True, ahead=self.ahead)

    def _by_cublas(self, rows: int, w: ScaledMatrix) -> bool:
        return rows > ALONE and not self.deterministic and scaled_matmul.cublas_takes(w, self.decoder.dtype)

    def _tiled(self, x: ScaledRows, w: ScaledMatrix, y: Tensor, *, row_bias: Tensor | None = None, **how: Any) -> None:
        if len(x) == 1 and y.is_cuda and row_bias is None and not self.deterministic:
            scaled_matmul.matvec(x, w, y, ahead=self.ahead, **how)
            return
        tile = scaled_matmul.FIXED
        if not self.deterministic:
            tile = scaled_matmul.pick_tile(len(x), w, self._shared)
        scaled_matmul.matmul(x, w, y, tile, row_bias=row_bias, sums=self._split_sums, ahead=self.ahead, **how)


def _scaled(w: Any) -> ScaledMatrix:
    assert isinstance(w, ScaledMatrix)
    return w
