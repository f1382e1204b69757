"""What layers may take of a row's token itself (Gemma 3n, Gemma 4), of all layers in one launch, and what one takes."""

# ruff: noqa: PLR0917
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.triton.fused import RowNorm, activated, loaded, unit
from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.layout import TOKEN


def token_inputs(
    ints: Tensor,
    rows: int,
    sampled: Tensor,
    made: Tensor,
    table: Tensor,
    how: RowNorm,
    out: Tensor,
    scale: float,
    *,
    ahead: bool = False,
) -> None:
    """(made × scale, normed, plus the row of a token in the table [V, ≥ L P] × √P) / √2 into out [L, T, P].

    `made` [T, L P] is what a matmul made of embeddings. A token without a row has that of 0; token -1 - i stands for
    `sampled`[i].
    """
    layers, count, size = out.shape
    _token_inputs[(count, layers)](
        ints, sampled, made, table, how.weight, out, rows, count, table.shape[0],
        table.stride(0), how.eps,
        FIELD=TOKEN, KIND=how.kind, LAYERS=layers, SIZE=size, WIDE=max(16, triton.next_power_of_2(size)), SCALE=scale,
        ROOT=size**0.5, AHEAD=ahead, num_warps=1, **options(ahead),
    )  # fmt: skip


def gate_inputs(gate: Tensor, inputs: Tensor, kind: str, *, ahead: bool = False) -> None:
    """The activation of gate [T, P], times inputs [T, P], in place of gate."""
    block = 1024
    _gate_inputs[(triton.cdiv(gate.numel(), block),)](
        gate, inputs, gate.numel(), KIND=kind, BLOCK=block, AHEAD=ahead, num_warps=4, **options(ahead)
    )


@triton.jit
def _token_inputs(
    ints, sampled, made, table, weight, out, rows, count, known, table_row, eps,
    FIELD: tl.constexpr, KIND: tl.constexpr, LAYERS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    SCALE: tl.constexpr, ROOT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, layer, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, WIDE)
    token = tl.load(ints + FIELD * rows + row).to(tl.int64)
    if token < 0:
        token = tl.maximum(tl.load(sampled - 1 - token).to(tl.int64), 0)
    token = tl.where(token < known, token, 0)
    there, at = i < SIZE, layer * SIZE + i
    x = tl.load(made + row * (LAYERS * SIZE) + at, mask=there, other=0.0).to(tl.float32) * SCALE
    x = unit(x, there, eps, SIZE, KIND) * loaded(weight, i, there, KIND)
    x += tl.load(table + token * table_row + at, mask=there, other=0.0).to(tl.float32) * ROOT
    y = (x * 0.7071067811865476).to(out.dtype.element_ty)
    tl.store(out + (layer * count + row) * SIZE + i, y, mask=there)


@triton.jit
def _gate_inputs(gate, inputs, count, KIND: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    launch_next(AHEAD)
    wait(AHEAD)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = activated(tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32), KIND)
    y = y * tl.load(inputs + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(gate + i, y.to(gate.dtype.element_ty), mask=i < count)
