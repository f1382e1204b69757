"""4-bit matrices for the device: what they mean, and their product with one row."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.base.errors import Unsupported  # noqa: E402
from headway.kernels import packed  # noqa: E402
from headway.kernels.mlp import gated_silu  # noqa: E402
from headway.kernels.triton import int4  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LIMIT = 4e-3  # sums of eight products, and what comes out in float16, have eleven bits


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_a_matrix_means_what_codes_and_scales_mean_on_a_cpu() -> None:
    weight = draw(24, 96)
    w = int4.quantise(weight)
    pairs = (w.codes.transpose(1, 2)[..., None] >> torch.arange(0, 16, 4, device=DEVICE, dtype=torch.int32)).flatten(2)
    codes = torch.stack([pairs & 15, (pairs >> 16) & 15], 3).to(torch.uint8)  # [N, G, 16, 2]
    same = packed.unpack(packed.pack_groups(codes.view(24, 96).cpu(), w.scales.cpu(), None, bits=4, group=32, zero=8))
    assert torch.equal(w.weight.cpu(), same.view(24, 3, 16, 2).permute(0, 2, 1, 3).reshape(24, 96))
    step = w.scales.float().abs().repeat_interleave(2, 1).repeat(1, 16)
    assert bool(((w.weight - weight).abs() <= 1.01 * step).all())
    assert float((w.weight - weight).norm() / weight.norm()) < 0.12


def test_inputs_that_fill_no_group_are_refused() -> None:
    with pytest.raises(Unsupported, match="33"):
        int4.quantise(draw(4, 33))


@pytest.mark.parametrize("n", [1, 5, 48])
@pytest.mark.parametrize("k", [32, 96, 1024, 1312])
@pytest.mark.parametrize("ahead", [False] if DEVICE == "cpu" else [False, True])
def test_products_of_one_row(n: int, k: int, ahead: bool) -> None:
    x, w = draw(k).half(), int4.quantise(draw(n, k, seed=1), draw(n, seed=2))
    y = torch.full((n,), float("nan"), device=DEVICE)
    int4.row_product(x, w, y, ahead=ahead)
    close(y, F.linear(x.float(), w.weight, w.bias))
    onto = draw(n, seed=4)
    before = onto.clone()
    int4.row_product(x, w, onto, factor=16.0, add=True, ahead=ahead)
    close(onto, before + F.linear(16 * x.float(), w.weight, w.bias))
    pair, half = int4.quantise(draw(2 * n, k, seed=5) / k**0.5), torch.empty(n, dtype=torch.float16, device=DEVICE)
    expected = gated_silu(F.linear(x.float(), pair.weight), exact=False)
    int4.row_product(x, pair, y, gated=True, ahead=ahead)
    close(y, expected)
    int4.row_product(x, pair, half, gated=True, ahead=ahead)
    close(half.float() * 16, expected)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm()) <= LIMIT * float(expected.norm())
