"""Experts in MXFP4 on tensor cores against their floats: every tile, pair by pair and in blocks, and for one row.

Without a GPU the kernels run in Triton's interpreter, which has no such instructions: numpy takes their place, so that
the layout, the rows and what is stored are those of the kernels.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import TensorHandle  # noqa: E402

from headway.kernels.triton import experts, fp4_experts  # noqa: E402
from headway.kernels.triton.experts import ExpertBlocks, ExpertGate, ExpertOperand, Routes  # noqa: E402
from headway.kernels.triton.fp4_experts import Fp4Tile, fp4_add_down, fp4_matmul, pick_fp4_tile  # noqa: E402
from headway.models.quantized.fp4 import EXPONENTS, MANTISSAS, SIGNS, Fp4Experts  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
GATE = ExpertGate("silu", 7.0, 1.702)
COUNT = 5


def unpacked(w: Any, s: Any, block: Any) -> list[np.ndarray]:
    """What `fp4_unpacked` makes of words and exponents, as floats [.., lane, t, i] of each register."""
    words, bytes_ = (x.handle.data.reshape(*x.shape[:-1], 32, 4).astype(np.int64) for x in (w, s))
    found = []
    for place in range(4):
        pairs = []
        for half in (0, 16):
            sign, high, low = (
                words >> at[place] + half & mask for at, mask in ((SIGNS, 1), (EXPONENTS, 3), (MANTISSAS, 1))
            )
            value = np.where(high > 0, (1 + low / 2) * 2.0 ** (high - 1), low / 2) * (1 - 2 * sign)
            exponents = [bytes_[..., int(block)] >> 8 * (2 * (t // 2) + place % 2) & 255 for t in range(4)]
            pairs.append(value * 2.0 ** (np.stack(exponents, -1) - 253))
        found.append(np.stack(pairs, -1))
    return found


def sums(total: Any, *registers: Any) -> Any:
    """What `fp4_sums` adds: outputs r + 8h of all lanes by the rows of all lanes."""
    *a, xa, xb = registers
    a = np.stack([np.stack([a[0], a[2]], -2), np.stack([a[1], a[3]], -2)])  # h, .., lane, t, p, i
    a = a.reshape(*a.shape[:-4], 8, 4, *a.shape[-3:])
    words = np.stack([x.handle.data.reshape(*x.shape[:-1], 8, 4, 2, 2) for x in (xa, xb)], -3)  # .., r, q, g, t, p
    halves = np.stack([words.astype(np.uint32) << np.uint32(16), words & -65536], -1).astype(np.uint32)
    x = halves.view(np.float32).reshape(*words.shape[:-3], 4, 2, 2)
    products = np.einsum("h...rqtsi,...kqtsi->...rkh", a, x)
    each = products.reshape(*products.shape[:-2], 4, 2, 2).swapaxes(-1, -2)  # r, q, h, i
    data = total.handle.data + each.reshape(total.handle.data.shape).astype(np.float32)
    return tl.tensor(TensorHandle(data, tl.float32), total.type)


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(fp4_experts, "fp4_unpacked", unpacked)
        monkeypatch.setattr(fp4_experts, "fp4_sums", sums)
        monkeypatch.setattr(fp4_experts, "begun", lambda: None)
        monkeypatch.setattr(fp4_experts, "_loaded_in_place", lambda at: tl.load(at))  # noqa: PLW0108


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def matrices(n: int, k: int, *, gated: bool) -> tuple[ExpertOperand, torch.Tensor]:
    """Experts, and their floats."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (COUNT, n, k // 2), generator=generator).to(DEVICE, torch.uint8)
    scales = torch.randint(118, 130, (COUNT, n, k // 32), generator=generator).to(DEVICE, torch.uint8)
    kept = Fp4Experts.of(codes, scales, draw(COUNT, n, seed=1), torch.bfloat16, gated=gated)
    return ExpertOperand(kept.words, kept.bias, kept.scales, kept.exponent, gated), kept.weight.float()


def routes_of(rows: int, chosen: int) -> Routes:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(COUNT, generator=generator)[:chosen] for _ in range(rows)])
    return Routes(ids.int().to(DEVICE), torch.rand(rows, chosen, generator=generator).to(DEVICE))


def in_order(routes: Routes, rows: int) -> ExpertBlocks:
    pairs = routes.chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=DEVICE)
    blocks = torch.empty(experts.most_blocks(pairs, COUNT, rows), 3, dtype=torch.int32, device=DEVICE)
    experts.sort_by_expert(routes.chosen, COUNT, into := ExpertBlocks(order, blocks), rows)
    return into


def expected(x: torch.Tensor, w: ExpertOperand, floats: torch.Tensor, routes: Routes) -> torch.Tensor:
    """What each pair's expert makes of its row, before any gate."""
    ids = routes.chosen.flatten().long()
    rows = x.float().repeat_interleave(len(ids) // len(x), 0)
    assert w.bias is not None
    return torch.einsum("pnk,pk->pn", floats[ids], rows) + w.bias[ids].float()


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, 1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize("k", [96, 576])
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, None),
        (3, Fp4Tile(1, 2, 1, warps=2)),
        (9, Fp4Tile(1, 1, 1, wide=True)),
        (17, Fp4Tile(2, 1, 2, warps=2, wide=True)),
    ],
)
def test_every_pair_is_multiplied_by_its_expert(rows: int, tile: Fp4Tile | None, k: int) -> None:
    routes, x = routes_of(rows, 2), draw(rows, k, seed=2)
    by, tile = None if tile is None else in_order(routes, tile.rows), tile or pick_fp4_tile(0.0)
    for n, paired, gate in ((40, True, GATE), (40, True, None), (56, False, None)):
        w, floats = matrices(n, k, gated=paired)
        want = expected(x, w, floats, routes)
        want = want if gate is None else gated(want)
        found = torch.full(want.shape, float("nan"), device=DEVICE)
        fp4_matmul(x, w, found, routes, tile, by=by, gate=gate)
        torch.testing.assert_close(found, want, atol=2e-3 * want.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize(("n", "k", "chosen"), [(40, 96, 3), (72, 576, 2), (64, 1088, 4)])
def test_the_experts_of_a_row_are_summed_where_they_are_computed(n: int, k: int, chosen: int) -> None:
    (w, floats), routes, x = matrices(n, k, gated=False), routes_of(1, chosen), draw(chosen, k, seed=3)
    residual = draw(n, seed=4).float()
    want = residual + (expected(x, w, floats, routes) * routes.weights[0][:, None]).sum(0)
    found = residual.clone()
    fp4_add_down(x, w, found, routes)
    torch.testing.assert_close(found, want, atol=1e-3 * want.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize("paired", [True, False])
def test_codes_and_scales_come_back(paired: bool) -> None:
    """Scales beyond those whose floats a kernel could make are kept too."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 40, 48), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (2, 40, 3), generator=generator, dtype=torch.uint8)
    kept = Fp4Experts.of(codes, scales, None, torch.float32, gated=paired)
    assert kept.exponent == int(scales.max()) - 128
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))[torch.stack((codes & 15, codes >> 4), -1).flatten(2).int()]
    assert torch.equal(kept.weight, values * torch.exp2(scales.float() - 127).repeat_interleave(32, 2))
