"""Products of several rows in tiles, against torch. Without a GPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.kernels.reference.mlp import gated_silu  # noqa: E402
from headway.kernels.triton import matmul as tiled  # noqa: E402
from headway.kernels.triton.launch import shared_memory  # noqa: E402
from headway.kernels.triton.matmul import MatmulTile  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
AHEAD = [False, True] if DEVICE == "cuda" else [False]
ROOM = shared_memory(torch.device(DEVICE))


def draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    bits = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
    assert float((found.double() - expected.double()).norm()) <= bits * float(expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 16), (2, 5, 16), (7, 33, 84), (40, 70, 128), (70, 48, 200)])
def test_matmul_is_that_of_torch(rows: int, n: int, k: int, ahead: bool, dtype: torch.dtype) -> None:
    x, w, bias = (draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(rows, k), (2 * n, k), (2 * n,)]))
    tile = MatmulTile(32, 16, 32, stages=2)
    plain, gated = (torch.full((rows, n), float("nan"), device=DEVICE, dtype=dtype) for _ in range(2))
    tiled.matmul(x, w[:n], plain, tile, ahead=ahead)
    near(plain, F.linear(x.double(), w[:n].double()))
    tiled.matmul(x, w[:n], plain, tile, bias=bias[:n], ahead=ahead)
    near(plain, F.linear(x.double(), w[:n].double(), bias[:n].double()))
    for some in (None, bias):
        tiled.matmul(x, w, gated, tile, bias=some, gated=True, ahead=ahead)
        both = F.linear(x.double(), w.double(), None if some is None else some.double())
        near(gated, gated_silu(both, exact=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="tiles are picked for 16 bits and a device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("room", [48 << 10, 99 << 10, ROOM])
@pytest.mark.parametrize(
    ("rows", "n", "gated"),
    [(50, 4096, False), (50, 6144, False), (50, 33000, False), (50, 14336, True), (9, 14336, True)],
)
def test_tiles_that_are_picked_fit_and_are_right(rows: int, n: int, gated: bool, room: int, dtype: torch.dtype) -> None:
    x, w = draw(rows, 1024, seed=0, dtype=dtype), draw(2 * n if gated else n, 1024, seed=1, dtype=dtype) / 32
    y = torch.empty(rows, n, device=DEVICE, dtype=dtype)
    tiled.matmul(x, w, y, tiled.pick_tile(rows, n, gated, room), gated=gated, ahead=True)
    expected = F.linear(x.float(), w.float())
    near(y, gated_silu(expected, exact=True) if gated else expected)
