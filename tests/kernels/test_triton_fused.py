"""The fused row-wise kernels and the matvec in Triton, against the torch functions they stand for."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.kernels.reference.attention import capped  # noqa: E402
from headway.kernels.reference.mlp import activate, gated_silu  # noqa: E402
from headway.kernels.reference.norm import layer_norm, rms_norm  # noqa: E402
from headway.kernels.reference.rope import rotate, rotation  # noqa: E402
from headway.kernels.triton import (  # noqa: E402
    fused,
    layout,
    matvec,
)

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
EPS = 1e-5


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def numbers(rows: int, **columns: list[int]) -> torch.Tensor:
    found = np.zeros((layout.FIELDS, rows), np.int32)
    for name, values in columns.items():
        found[getattr(layout, name), : len(values)] = values
    return torch.from_numpy(found.ravel()).to(DEVICE)


@pytest.mark.parametrize("n", [1, 5, 48])
@pytest.mark.parametrize("k", [16, 84, 1024, 1500])
@pytest.mark.parametrize("ahead", [False] if DEVICE == "cpu" else [False, True])
def test_matvec(n: int, k: int, ahead: bool) -> None:
    x, w, bias, weight = draw(k), draw(n, k, seed=1), draw(n, seed=2), draw(k, seed=3)
    y = torch.full((n,), float("nan"), device=DEVICE)
    matvec.matvec(x, w, y, ahead=ahead)
    torch.testing.assert_close(y, F.linear(x, w), atol=1e-3, rtol=1e-4)
    onto = draw(n, seed=4)
    before = onto.clone()
    matvec.matvec(x, w, onto, bias=bias, norm=matvec.RmsNorm(weight, EPS), add=True, ahead=ahead)
    torch.testing.assert_close(onto, before + F.linear(rms_norm(x, weight, EPS), w, bias), atol=1e-3, rtol=1e-4)
    pair, both = draw(2 * n, k, seed=5) / k**0.5, draw(2 * n, seed=6)
    matvec.matvec(x, pair, y, bias=both, norm=matvec.RmsNorm(weight, EPS), gated=True, ahead=ahead)
    expected = gated_silu(F.linear(rms_norm(x, weight, EPS), pair, both), exact=False)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("e", [16, 84, 576])
def test_residual_and_norm(e: int) -> None:
    x, delta, weight = draw(5, e), draw(5, e, seed=1), draw(e, seed=2)
    out = torch.full_like(x, float("nan"))
    fused.norm(x, weight, EPS, out)
    torch.testing.assert_close(out, rms_norm(x, weight, EPS))
    total = x + delta
    fused.norm(x, weight, EPS, out, add=delta)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, rms_norm(total, weight, EPS))
    few = torch.full((3, e), float("nan"), device=DEVICE)
    fused.norm(x, weight, EPS, few, rows=torch.tensor([4, 0, 0], dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(few, rms_norm(total[[4, 0, 0]], weight, EPS))
    fused.add(x, delta)
    assert torch.equal(x, total + delta)


def normed(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if kind == "layer":
        return layer_norm(x, weight, bias, EPS)
    return rms_norm(x, weight, EPS, offset=1.0 if kind == "rms+1" else 0.0)


@pytest.mark.parametrize("kind", ["rms", "rms+1", "layer"])
@pytest.mark.parametrize("old", [False, True])
def test_norms_of_every_kind_before_and_after_an_addition(kind: str, old: bool) -> None:
    e = 84
    x, delta, first, second = draw(5, e), draw(5, e, seed=1), draw(e, seed=2), draw(e, seed=3)
    biases = (draw(e, seed=4), draw(e, seed=5)) if kind == "layer" else (None, None)
    after, how = (fused.RowNorm(w, EPS, kind, b) for w, b in zip((first, second), biases, strict=True))
    before, out = x.clone(), torch.full_like(x, float("nan"))
    fused.add_and_norm(x, out, how, add=delta, after=after, scale=0.4, old=old)
    total = before + 0.4 * normed(kind, delta, first, biases[0])
    torch.testing.assert_close(x, total)
    torch.testing.assert_close(out, normed(kind, before if old else total, second, biases[1]))
    untouched = out.clone()
    fused.add_and_norm(x, out, None, add=delta, scale=2.0)
    torch.testing.assert_close(x, total + 2.0 * delta)
    assert torch.equal(out, untouched)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("weights", ["head", "each", "row"])
def test_norms_of_queries_and_keys(kind: str, weights: str) -> None:
    heads, kv_heads, dim, rows, clip = 6, 2, 24, 3, 1.2
    qkv, sizes = draw(rows, (heads + 2 * kv_heads) * dim), [n * dim for n in (heads, kv_heads, kv_heads)]
    shapes = {"head": ((dim,), (dim,)), "each": ((heads, dim), (kv_heads, dim)), "row": ((sizes[0],), (sizes[1],))}
    norms = [draw(*shape, seed=i) for i, shape in enumerate(shapes[weights])]
    expected = []
    for part, weight in zip(qkv.split(sizes, 1), [*norms, None], strict=True):
        part = part if weight is None or weights != "row" else normed(kind, part, weight, None)
        part = part.clamp(-clip, clip).unflatten(1, (-1, dim))
        expected.append(part if weight is None or weights == "row" else normed(kind, part, weight, None))
    how = fused.HeadConfig(
        heads, kv_heads, dim, *norms, EPS, kind=kind, each=weights == "each", by_row=weights == "row", clip=clip,
        temperature=(4.0, 0.3),
    )  # fmt: skip
    if how.by_row:
        fused.norm_projections(qkv, how)
    keys, values = (torch.zeros(2, 4, kv_heads, dim, device=DEVICE) for _ in range(2))
    out, positions = torch.full((rows, heads, dim), float("nan"), device=DEVICE), [2, 9, 30]
    ints = numbers(4, POSITION=positions, WRITE=[1, 4, 6])
    fused.rotate_and_write(qkv, out, keys, values, ints, 4, None, how)
    steps = torch.floor((torch.tensor(positions, device=DEVICE) + 1) / 4.0)
    grown = (1 + 0.3 * torch.log(1 + steps))[:, None, None]
    torch.testing.assert_close(out, expected[0] * grown, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(keys.flatten(0, 1)[[1, 4, 6]], expected[1], atol=1e-4, rtol=1e-4)
    assert torch.equal(values.flatten(0, 1)[[1, 4, 6]], expected[2])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_with_and_without_a_gate(kind: str) -> None:
    both, out = draw(3, 2 * 90), torch.full((3, 90), float("nan"), device=DEVICE)
    gate, up = both.chunk(2, 1)
    fused.gated(both, out, kind=kind)
    torch.testing.assert_close(out, activate(gate, kind, exact=True) * up, atol=1e-5, rtol=1e-4)
    alone = gate.contiguous()
    fused.gated(alone, alone, kind=kind, alone=True)
    torch.testing.assert_close(alone, activate(gate, kind, exact=True), atol=1e-5, rtol=1e-4)


def test_scaled_embeddings_with_positions_and_finished_logits() -> None:
    table, learned, x = draw(97, 84), draw(20, 84, seed=1), torch.full((2, 84), float("nan"), device=DEVICE)
    ints, drawn = numbers(6, TOKEN=[96, 5], POSITION=[19, 0]), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    fused.embed(ints, 6, table, x, drawn, scale=3.5, positions=learned)
    torch.testing.assert_close(x, table[[96, 5]] * 3.5 + learned[[19, 0]])
    logits, bias = draw(3, 1030), draw(1030, seed=2)
    expected = capped((logits + bias) * 0.7, 2.0)
    fused.finish_logits(logits, bias, 0.7, 2.0)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_embedding_and_gate() -> None:
    table, x = draw(97, 84), torch.full((4, 84), float("nan"), device=DEVICE)
    drawn = torch.tensor([7, 11], dtype=torch.int32, device=DEVICE)
    fused.embed(numbers(6, TOKEN=[96, 0, -1, -2]), 6, table, x, drawn)
    assert torch.equal(x, table[[96, 0, 7, 11]])
    both = draw(3, 2 * 1030)
    out = torch.full((3, 1030), float("nan"), device=DEVICE)
    fused.gated(both, out)
    torch.testing.assert_close(out, gated_silu(both, exact=False))


@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (9, 3, 64, 64), (6, 1, 80, 40)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
def test_rotation_and_page_write(shape: tuple[int, int, int, int], normed: bool, by_head: bool) -> None:
    heads, kv_heads, dim, turned = shape
    rows, page, scale = 5, 4, 1.2
    positions, slots = [0, 3, 70, 1000, 9], [7, -1, 4, 12, 5]
    inv_freq = 1 / 10_000 ** (torch.arange(0, turned, 2, device=DEVICE) / turned)
    qkv = draw(rows, (heads + 2 * kv_heads) * dim)
    pool = draw(2, 4, kv_heads, page, dim, seed=1) if by_head else draw(2, 4, page, kv_heads, dim, seed=1)
    keys, values = (p.transpose(1, 2) for p in pool) if by_head else pool
    q_norm, k_norm = (draw(dim, seed=2), draw(dim, seed=3)) if normed else (None, None)
    q, k, v = qkv.view(rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, EPS), rms_norm(k, k_norm, EPS)
    cos, sin = rotation(inv_freq, torch.tensor(positions, device=DEVICE), scale, torch.float32)
    expected_keys, expected_values = keys.clone(), values.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected_keys[slot // page, slot % page] = rotate(k, cos, sin)[row]
            expected_values[slot // page, slot % page] = v[row]
    ints, cs = numbers(8, POSITION=positions, WRITE=slots), torch.empty(rows, 2, turned // 2, device=DEVICE)
    fused.angles(ints, 8, cs, inv_freq, scale)
    out = torch.full((rows, heads, dim), float("nan"), device=DEVICE)
    how = fused.HeadConfig(heads, kv_heads, dim, q_norm, k_norm, EPS)
    fused.rotate_and_write(qkv, out, keys, values, ints, 8, cs, how)
    torch.testing.assert_close(out, rotate(q, cos, sin), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(keys, expected_keys, atol=1e-4, rtol=1e-4)
    assert torch.equal(values, expected_values)
