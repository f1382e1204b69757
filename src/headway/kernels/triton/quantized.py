"""Quantized weights on CUDA that take rows in float16: int4 with a scale for 32 inputs, int8 with a scale per output.

Activations are float16, and weights become float16 in registers just before the tensor cores use them. So quants are
stored as `mma` instructions need them: in blocks of 16 outputs by 64 inputs, with 16 or 32 bytes for each of 32 lanes.
Lane 4r + q has the inputs 16q … 16q + 15 of outputs r and r + 8.

    int4    a word for four inputs i = 4t … 4t + 3 of both outputs: input 2p + w of output r + 8h at bit 4h + 8p + 16w.
            Inputs 16q + 8g … 16q + 8g + 7 of all q are a group, with a float16 scale. A quant c means c - 8.
    int8    16 bytes of output r, the 16 of output r + 8 at the same offset of the block's other half. c means c - 128.

fp8, whose rows are quantized too, is in `scaled_matmul`.

A matmul of up to FEW rows reads the quants (`matmul`; from 17 rows on, int8 with `quantized_tiles`); for
more rows it pays to dequantize first (`dequantize_into`).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.kernels.triton import quantized_kernels as kernels
from headway.kernels.triton.launch import options
from headway.kernels.triton.quantized_tiles import ByteTile, SplitSums, byte_matmul

BlockKind = Literal["int4", "int8"]
QuantKind = Literal["int4", "int8", "fp8"]
BLOCK_KINDS: tuple[BlockKind, ...] = ("int4", "int8")
KINDS: tuple[QuantKind, ...] = (*BLOCK_KINDS, "fp8")
GROUP = 32
ROWS, INPUTS = 16, 64  # outputs and inputs of a block
FEW = 64  # the most rows for which `matmul` beats dequantizing first
SLICE = 1 << 26  # weights quantized at a time
INNER = 0.0625  # factor on gated float16 results, which leaves headroom for large values between gate and down
LABELS = {"int4": f"int4 in groups of {GROUP}", "int8": "int8"}


@dataclass(frozen=True, eq=False)
class CudaQuantizedMatrix:
    """A quantized matrix [N, K] on a CUDA device, with its bias [N] or none, in B blocks of outputs by C of inputs.

    quants are int32 [B, C, 128], or [B, C, 2, 128] for 8 bits; scales [B, C, 8, 2, 2] float16 (output, half, group), or
    [B, 16] float32. A `gated` matrix, gate above up, has eight gates and their eight ups in each block.
    """

    kind: BlockKind
    quants: Tensor
    scales: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, int]
    gated: bool = False

    @property
    def label(self) -> str:
        """The name of the format, as in `QuantizedMatrix.label`."""
        return LABELS[self.kind]

    @property
    def nbytes(self) -> int:
        return self.quants.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix."""
        return dequantize(self)

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, K] times the dequantized matrix → [R, N]."""
        return F.linear(x, self.weight, self.bias)


def as_kind(name: str) -> QuantKind:
    """The kind with this name, one of KINDS."""
    return next(kind for kind in KINDS if kind == name)


# -- quantizing ----------------------------------------------------------------------------------------------------


def quantize(
    weight: Tensor, bias: Tensor | None = None, *, kind: BlockKind, gated: bool = False
) -> CudaQuantizedMatrix:
    """The quantized matrix, each weight rounded to the nearest. int4 has 16 steps around 0, the first of which is the
    value of largest magnitude in the group; the largest magnitude of a row is 127 in int8."""
    n, k = weight.shape
    if k % GROUP:
        raise Unsupported(f"{kind} takes inputs in groups of {GROUP} and this matrix has {k}; leave out quantize=")
    quantize_blocks = _four_bits if kind == "int4" else _eight_bits
    parts = []
    halves = weight.view(2, n // 2, k).transpose(0, 1) if gated else weight.view(n, 1, k)
    for rows in halves.split(max(ROWS, SLICE // k // ROWS * ROWS)):
        fill = -len(rows) % (8 if gated else ROWS)
        wide = F.pad(rows.float(), (0, -k % INPUTS, 0, 0, 0, fill))
        blocks = wide.unflatten(2, (-1, 4, 16))  # of inputs: block, q, i
        blocks = blocks.unflatten(0, (-1, 8)).transpose(1, 2) if gated else blocks.squeeze(1).unflatten(0, (-1, 2, 8))
        parts.append(quantize_blocks(blocks))
    quants, scales = (torch.cat(list(some)) for some in zip(*parts, strict=True))
    return CudaQuantizedMatrix(kind, quants, scales, bias, weight.dtype, (n, k), gated)


def _four_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Words and scales of blocks [B, h, r, C, q, i]."""
    grouped = blocks.unflatten(5, (2, 8)).permute(0, 3, 2, 1, 5, 4, 6).flatten(5)  # [B, C, r, h, g, 32]
    far = grouped.gather(5, grouped.abs().argmax(5, keepdim=True))
    scales = (far / -8).half()
    step = torch.where(scales != 0, scales.float(), 1)
    quants = (torch.round(grouped / step) + 8).clamp(0, 15).to(torch.int32)
    quants = quants.unflatten(5, (4, 2, 2, 2))  # r, h, g, q, t % 2, p, w
    words = torch.zeros_like(quants[:, :, :, 0, :, :, :, 0, 0])  # [B, C, r, g, q, t % 2]
    for h, p, w in ((h, p, w) for h in range(2) for p in range(2) for w in range(2)):
        words |= quants[:, :, :, h, :, :, :, p, w] << (4 * h + 8 * p + 16 * w)
    words = words.permute(0, 1, 2, 4, 3, 5).flatten(2)
    return words.contiguous(), scales.squeeze(5).contiguous()


def _eight_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales = blocks.abs().amax((3, 4, 5)) / 127  # [B, h, r]
    units = blocks / torch.where(scales > 0, scales, 1)[..., None, None, None]
    quants = (torch.round(units) + 128).clamp(1, 255).to(torch.uint8)
    quants = quants.permute(0, 3, 1, 2, 4, 5).contiguous()  # [B, C, h, r, q, i]
    return quants.flatten(3).view(torch.int32), scales.flatten(1)


def dequantize(w: CudaQuantizedMatrix) -> Tensor:
    """The weights [N, K] in the dtype they had."""
    b, c = w.quants.shape[:2]
    if w.kind == "int4":
        places = torch.tensor([4 * h + 8 * p + 16 * i for h in range(2) for p in range(2) for i in range(2)])
        quants = (w.quants.view(b, c, 8, 4, 4)[..., None] >> places.to(w.quants)) & 15  # r, q, t, (h, p, w)
        units = (quants.view(b, c, 8, 4, 2, 2, 2, 2, 2) - 8).float()  # r, q, g, t % 2, h, p, w
        scales = w.scales.float().transpose(3, 4)[:, :, :, None, :, None, :, None, None]
        values = (units * scales).permute(0, 6, 2, 1, 3, 4, 5, 7, 8)
    else:
        stored = w.quants.view(torch.uint8).view(b, c, 2, 8, 4, 16)
        values = ((stored.float() - 128) * w.scales.view(b, 1, 2, 8, 1, 1)).permute(0, 2, 3, 1, 4, 5)
    n, k = w.shape
    values = values.reshape(b, 2, 8, c * INPUTS)
    if w.gated:
        return values.transpose(0, 1).reshape(2, b * 8, -1)[:, : n // 2, :k].reshape(n, k).to(w.dtype).contiguous()
    return values.reshape(b * ROWS, -1)[:n, :k].to(w.dtype).contiguous()


def dequantize_into(w: CudaQuantizedMatrix, out: Tensor) -> None:
    """The weights into out [N, K]."""
    (n, k), (b, c) = w.shape, w.quants.shape[:2]
    kernels.dequantize[(b, triton.cdiv(c, 4))](
        w.quants, w.scales, out, n // 2 if w.gated else n, K=k, KIND=w.kind, DEEP=4, GATED=w.gated, num_warps=4
    )


# -- matmul --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedTile:
    """Blocks of outputs per program and of inputs per step, and its warps, which divide the inputs among them.

    A `wide` tile has `outputs` blocks per warp, and all warps take the same inputs. `columns` is the number of eights
    of rows at a time; 0 picks it by the number of rows.
    """

    outputs: int
    inputs: int
    warps: int
    wide: bool = False
    columns: int = 0


def matmul(
    x: Tensor,
    w: CudaQuantizedMatrix,
    y: Tensor,
    *,
    add: bool = False,
    factor: float = 1.0,
    ahead: bool = False,
    alone: bool = False,
    tile: QuantizedTile | ByteTile | None = None,
    row_bias: Tensor | None = None,
    sums: SplitSums | None = None,
) -> None:
    """factor × x [R, K] float16 times the matrix into y [R, N], or added to it; silu(gate) × up for a gated matrix.

    A gated float16 result is scaled by INNER. A row of y depends on its row of x alone; to the bit unless `alone`,
    which lets a single row take a faster kernel that sums in another order. `row_bias` [R, 2N] float32 takes the place
    of a gated matrix's bias. A `ByteTile` is for matrices of 8 bits; where it splits the inputs, `sums` has the parts.
    """
    (rows, k), n = x.shape, y.shape[1]
    assert x.dtype == torch.float16
    assert x.is_contiguous()
    assert y.is_contiguous()
    blocks, deep = w.quants.shape[:2]
    assert row_bias is None or (w.gated and row_bias.is_contiguous() and row_bias.shape == (rows, 2 * n))
    added = w.bias if row_bias is None else row_bias
    given, bias = (x.view(torch.int32) if x.is_cuda else x), x if added is None else added
    scale = INNER if w.gated and y.dtype == torch.float16 else 1.0
    if alone and rows == 1 and x.is_cuda:
        t = tile if isinstance(tile, QuantizedTile) else pick_row_tile(w.kind, blocks, deep)
        step = 4 * INPUTS * t.inputs
        kernels.matvec[(blocks,)](
            given, w.scales, w.quants, w.scales, y, bias, n, K=k, KIND=w.kind, DEEP=t.inputs, GATED=w.gated, ADD=add,
            BIAS=added is not None, FACTOR=factor, SCALE=scale, EVEN=k == step or k % (2 * step) == 0,
            AHEAD=ahead, num_warps=t.warps, **options(ahead),
        )  # fmt: skip
        return
    if isinstance(tile, ByteTile):
        assert w.kind != "int4"
        cells = triton.cdiv(rows, tile.rows), triton.cdiv(blocks * ROWS, tile.outputs), tile.splits
        tensors = (x, w.quants.view(torch.uint8), w.scales, y, bias)
        if tile.splits > 1:
            assert sums is not None
            assert sums.parts.numel() >= cells[0] * cells[1] * tile.splits * tile.rows * tile.outputs
        sums_at = (w.scales, w.scales) if sums is None else (sums.parts, sums.arrived)
        byte_matmul[cells](
            *tensors, *sums_at, rows, n, blocks,
            K=k, GATED=w.gated, ADD=add, BIAS=added is not None, BY_ROW=row_bias is not None,
            FACTOR=factor, SCALE=scale, BM=tile.rows, BN=tile.outputs, DEEP=tile.deep, SPLITS=tile.splits,
            FIRST=tile.weights_first, PACKED=x.is_cuda, AHEAD=ahead,
            num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
        )  # fmt: skip
        return
    columns = columns_for(rows)
    t = tile or pick_tile(w.kind, blocks, deep, columns)
    groups, columns = t.warps if t.wide else 1, t.columns or columns
    kernels.matmul[(triton.cdiv(rows, 8 * columns), triton.cdiv(blocks, groups * t.outputs))](
        given, w.quants, w.scales, y, bias, rows, n, blocks,
        K=k, KIND=w.kind, GROUPS=groups, PARTS=t.outputs, COLS=columns, DEEP=t.inputs, GATED=w.gated, ADD=add,
        BIAS=added is not None, BY_ROW=row_bias is not None, FACTOR=factor, SCALE=scale,
        EVEN=k % (INPUTS * t.inputs * 2) == 0, PACKED=x.is_cuda, AHEAD=ahead,
        num_warps=t.warps, **options(ahead),
    )  # fmt: skip


def columns_for(rows: int) -> int:
    """How many eights of rows a program takes at a time."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def pick_tile(kind: BlockKind, blocks: int, deep: int, columns: int) -> QuantizedTile:
    """The fastest tile on an H200 for matrices of about this size. Sums have one order for any number of rows.

    Many rows are loaded once for two blocks of outputs.
    """
    return QuantizedTile(2 if columns == 4 and blocks % 2 == 0 else 1, 4, 4)


def pick_row_tile(kind: BlockKind, blocks: int, deep: int) -> QuantizedTile:
    """The same for a single row, whose steps are four blocks each."""
    if deep < 64:
        warps = max(1, min(4, triton.next_power_of_2(deep) // 8))
        return QuantizedTile(1, warps, warps)
    if deep > 128:
        return QuantizedTile(1, 8, 8)
    if blocks > 1024:
        return (
            QuantizedTile(1, 4, 2)
            if kind == "int4"
            else QuantizedTile(1, 4, 4)
            if blocks > 4096
            else QuantizedTile(1, 2, 2)
        )
    return QuantizedTile(1, 16, 4) if kind == "int4" or blocks <= 256 else QuantizedTile(1, 8, 4)
