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
from headway.kernels.norm import rms_norm  # noqa: E402
from headway.kernels.triton import int4  # noqa: E402
from headway.kernels.triton.products import Norm  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LIMIT = 1e-5 if DEVICE == "cpu" else 1e-3  # on the device rows pass through float16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_a_matrix_means_what_the_same_format_means_on_a_cpu() -> None:
    weight = draw(24, 96)
    assert torch.equal(int4.quantise(weight).weight.cpu(), packed.unpack(packed.quantise_int4(weight.cpu())))


def test_inputs_that_fill_no_group_are_refused() -> None:
    with pytest.raises(Unsupported, match="33"):
        int4.quantise(draw(4, 33))


@pytest.mark.parametrize("n", [1, 5, 48])
@pytest.mark.parametrize("k", [32, 96, 1024, 1312])
@pytest.mark.parametrize("size", [1.0, 3e4])
def test_products_of_one_row(n: int, k: int, size: float) -> None:
    x, w, weight = draw(k) * size, int4.quantise(draw(n, k, seed=1), draw(n, seed=2)), draw(k, seed=3)
    y = torch.full((n,), float("nan"), device=DEVICE)
    int4.row_product(x, w, y)
    close(y, F.linear(x, w.weight, w.bias))
    onto = draw(n, seed=4)
    before = onto.clone()
    int4.row_product(x, w, onto, norm=Norm(weight, 1e-5), add=True)
    close(onto, before + F.linear(rms_norm(x, weight, 1e-5), w.weight, w.bias))
    pair = int4.quantise(draw(2 * n, k, seed=5) / k**0.5)
    int4.row_product(x, pair, y, norm=Norm(weight, 1e-5), gated=True)
    close(y, gated_silu(F.linear(rms_norm(x, weight, 1e-5), pair.weight), exact=False))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm()) <= LIMIT * float(expected.norm())
