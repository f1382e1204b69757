"""Low-rank adapters in Triton against the reference. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.kernels.reference.lora import Piece, RowGroup, low_rank  # noqa: E402
from headway.kernels.triton.adapters.lora import (  # noqa: E402
    MATRICES,
    AdapterTable,
    AdapterTiles,
    LowRankTerm,
    expand,
    expand_gated,
    rank_blocks,
    shrink,
    splits,
)
from headway.kernels.triton.matmul import MatmulTile, matmul  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow
AHEAD = [False, True] if DEVICE == "cuda" else [False]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Adapters:
    """Some adapters of a layer: rank by slot and matrix, 0 for none."""

    def __init__(self, ranks: list[list[int]], outputs: list[int], k: int, dtype: torch.dtype, layer: int) -> None:
        self.table = AdapterTable.empty(len(ranks), layer + 1, dtype, torch.device(DEVICE))
        self.pieces: list[list[Piece]] = []
        self._kept = []
        for slot, row in enumerate(ranks):
            pieces, first = [], 0
            for piece, (rank, n) in enumerate(zip(row, outputs, strict=True)):
                if rank:
                    a = draw(rank, k, seed=slot + 7 * piece, dtype=dtype) / k**0.5
                    b = draw(n, rank, seed=slot + 9 * piece, dtype=dtype)
                    held = rank_blocks(a, b)
                    self._kept += held
                    for side, tensor in enumerate(held):
                        self.table.pointers[slot, layer, piece, side] = tensor.data_ptr()
                    self.table.ranks[slot, layer, piece] = rank
                    self.table.factors[slot, layer, piece] = 0.5
                    pieces.append(Piece(a.float(), b.float(), 0.5, first))
                first += n
            self.pieces.append(pieces)


def tiles_of(groups: list[tuple[int, list[int]]], empty: int = 1) -> tuple[list[int], list[int]]:
    """Tiles of at most 16 uses, with some empty ones, and the rows of all uses."""
    tiles, rows = [], []
    for slot, some in groups:
        for start in range(0, len(some), 16):
            tiles += [slot, len(rows), len(some[start : start + 16])]
            rows += some[start : start + 16]
    return tiles + [0, 0, 0] * empty, rows


def laid_out(groups: list[tuple[int, list[int]]], scales: torch.Tensor, rows: int, blocks: int) -> AdapterTiles:
    tiles, used = tiles_of(groups)
    places = torch.full((rows,), -1, dtype=torch.int32)
    places[used] = torch.arange(len(used), dtype=torch.int32)
    return AdapterTiles(ints(tiles).view(-1, 3), ints(used), scales, places.to(DEVICE), blocks)


def scales_of(groups: list[tuple[int, list[int]]]) -> torch.Tensor:
    return draw(sum(len(rows) for _, rows in groups), seed=52)


def expected_sum(
    made: Adapters, x: torch.Tensor, outputs: int, groups: list[tuple[int, list[int]]], scales: torch.Tensor
) -> torch.Tensor:
    at, pairs = 0, []
    for slot, some in groups:
        pairs.append((RowGroup(torch.tensor(some, device=DEVICE), scales[at : at + len(some)]), made.pieces[slot]))
        at += len(some)
    return low_rank(x, outputs, pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize(
    ("outputs", "k", "ranks"),
    [
        ([70, 33, 33], 84, [[4, 0, 1], [16, 16, 16], [0, 20, 0]]),
        pytest.param([64, 64], 300, [[8, 8], [1, 17], [16, 0]], marks=SLOWER),
        pytest.param([130], 1100, [[3], [30], [16]], marks=SLOWER),
    ],
)
def test_rows_get_what_their_adapters_add(
    outputs: list[int], k: int, ranks: list[list[int]], ahead: bool, dtype: torch.dtype
) -> None:
    made = Adapters(ranks, outputs, k, dtype, layer=1)
    rows = 27
    x, y = draw(rows, k, seed=50, dtype=dtype), draw(rows, sum(outputs), seed=51, dtype=dtype)
    groups = [(2, [26, 5]), (0, list(range(6, 24))), (1, [0, 25])]
    scales = scales_of(groups)
    how = laid_out(groups, scales, rows, blocks=2)
    sums = torch.full(how.sums(), float("nan"), device=DEVICE)
    expected = y.float() + expected_sum(made, x, sum(outputs), groups, scales) * 2.0
    added = LowRankTerm(made.table, 1, 0, tuple(outputs), how, sums)
    shrink(x, added, ahead=ahead)
    expand(y, added, splits(k), factor=2.0, ahead=ahead)
    limit = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert float((y.float() - expected).abs().max()) <= limit * float(expected.abs().max())
    assert made.table.ranks.shape[2] == MATRICES


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_tile(dtype: torch.dtype) -> None:
    made = Adapters([[20], [5]], [70], 300, dtype, layer=0)
    x = draw(20, 300, seed=1, dtype=dtype)

    def row(groups: list[tuple[int, list[int]]], blocks: int) -> torch.Tensor:
        how = laid_out(groups, torch.full((sum(len(rows) for _, rows in groups),), 0.3, device=DEVICE), 20, blocks)
        y = torch.zeros(20, 70, dtype=dtype, device=DEVICE)
        added = LowRankTerm(made.table, 0, 0, (70,), how, torch.zeros(how.sums(), device=DEVICE))
        shrink(x, added, ahead=False)
        expand(y, added, splits(300), ahead=False)
        return y[7]

    alone = row([(0, [7])], 2)
    assert torch.equal(row([(1, [3, 4]), (0, list(range(19)))], 4), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [96, pytest.param(84, marks=SLOWER)])
def test_a_matmul_sums_them_beside_its_own_outputs(k: int, gated: bool, ahead: bool, dtype: torch.dtype) -> None:
    outputs = (64, 64) if gated else (70, 33, 33)
    ranks = [[4, 0, 1], [16, 16, 16], [0, 20, 0], *([[3, 2, 1]] * 7)]
    n, rows, many = sum(outputs), 45, 64  # rows above are for nothing, as in a step that is padded to a tile
    made = Adapters([some[: len(outputs)] for some in ranks], list(outputs), k, dtype, layer=1)
    x, weight = draw(many, k, seed=50, dtype=dtype), draw(n, k, seed=51, dtype=dtype) / k**0.5
    bias = draw(n, seed=53, dtype=dtype)
    groups = [(2, [26, 5]), (0, list(range(6, 24))), (1, [0, 25]), *((3 + i, [30 + i, 37 + i]) for i in range(7))]
    scales = scales_of(groups)
    how = laid_out(groups, scales, rows, blocks=2)
    added = LowRankTerm(made.table, 1, 0, outputs, how, torch.full(how.sums(), float("nan"), device=DEVICE))
    y = torch.full((many, n), float("nan"), dtype=dtype, device=DEVICE)
    matmul(x, weight, y, MatmulTile(64, 32, 32), bias=bias, shrinks=added, ahead=ahead)
    expected = x.float() @ weight.float().T + bias.float() + expected_sum(made, x, n, groups, scales)
    if gated:
        gate_up, y = y, torch.full((many, n // 2), float("nan"), dtype=dtype, device=DEVICE)
        expand_gated(gate_up, y, added, 1, ahead=ahead)
        expected = torch.nn.functional.silu(expected[:, : n // 2]) * expected[:, n // 2 :]
    else:
        expand(y, added, 1, ahead=ahead)
    limit = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]
    assert float((y.float() - expected).abs().max()) <= limit * float(expected.abs().max())
