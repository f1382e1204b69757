"""The device sampler against the reference: every filter, masks, ties, infinities, bias and penalties."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.base.specs.samplers import Sampling  # noqa: E402
from headway.kernels.reference import sampling as reference  # noqa: E402
from headway.kernels.triton import cuts, sampling  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def pack(allowed: np.ndarray) -> np.ndarray:
    bits = np.zeros(-(-len(allowed) // 32) * 4, np.uint8)
    packed = np.packbits(allowed, bitorder="little")
    bits[: len(packed)] = packed
    return bits.view(np.int32)


def sample(logits: torch.Tensor, draws: list[reference.RowSampler], rows: list[int] | None = None) -> list[int]:
    vocab = logits.shape[1]
    masks = [pack(d.allowed.cpu().numpy()) for d in draws if d.allowed is not None]
    which = np.cumsum([d.allowed is not None for d in draws]) - 1
    ints = [
        (i if rows is None else rows[i], d.sampling.top_k, int(which[i]) if d.allowed is not None else -1)
        for i, d in enumerate(draws)
    ]
    floats = [(d.sampling.temperature, d.sampling.top_p, d.sampling.min_p, d.uniform) for d in draws]
    table = np.stack(masks) if masks else np.zeros((1, 1), np.int32)
    asks = sampling.SamplerArrays(
        torch.tensor(ints, dtype=torch.int32, device=DEVICE),
        torch.tensor(floats, dtype=torch.float64, device=DEVICE),
        torch.from_numpy(table).to(DEVICE),
    )
    found = sampling.make_workspace(len(draws), vocab, torch.device(DEVICE))
    sampling.sample(logits, asks, found)
    return found.tokens.tolist()


def agree(logits: torch.Tensor, draws: list[reference.RowSampler]) -> None:
    """The same token, unless the uniform number lies within rounding of where two tokens meet."""
    found, expected = sample(logits, draws), reference.sample(logits, draws).tolist()
    for row, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a == b:
            continue
        draw = draws[row]
        ids, probs = reference.sampling_distribution(logits[row], draw.sampling, allowed=draw.allowed)
        kept = ids.tolist()
        assert a in kept, (a, b, draw)
        edges = probs.cumsum(0)
        near = abs(edges[min(kept.index(a), kept.index(b))].item() - draw.uniform)
        assert near < 1e-5, (a, b, near, draw)


WAYS = [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(top_k=1),
    Sampling(top_k=7),
    Sampling(top_k=5000),
    Sampling(top_p=0.5),
    Sampling(top_p=1e-9),
    Sampling(top_p=0.95, temperature=2.0),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(top_k=40, top_p=0.9, min_p=0.05, temperature=0.8),
    Sampling(top_k=3, top_p=0.999),
]


@pytest.mark.parametrize("vocab", [97, *(pytest.param(n, marks=pytest.mark.slow) for n in (5000, 9000))])
@pytest.mark.parametrize("near", [cuts.NEAR, pytest.param(2, id="room for few scores near the edge")])
def test_every_way_of_drawing_agrees_with_the_reference(vocab: int, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "NEAR", near)
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(len(WAYS), vocab)) * 3).float().to(DEVICE)
    for _ in range(3):
        agree(logits, [reference.RowSampler(way, float(rng.random()) if way.temperature else 0.0) for way in WAYS])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ties_masks_and_infinities_agree_with_the_reference(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    vocab, rows = data.draw(st.sampled_from([2, 33, 300, 4500])), 4
    values = rng.choice(
        [-np.inf, -2.0, -1.0, 0.0, 0.5, 1.0, np.inf], (rows, vocab), p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.09, 0.01]
    )
    values[:, rng.integers(vocab)] = 0.25
    logits = torch.from_numpy(values).float().to(DEVICE)
    draws = []
    for row in range(rows):
        allowed = None
        if data.draw(st.booleans()):
            allowed = torch.from_numpy((rng.random(vocab) < 0.4) | (values[row] == 0.25)).to(DEVICE)
        way = data.draw(st.sampled_from(WAYS))
        draws.append(reference.RowSampler(way, float(rng.random()) if way.temperature else 0.0, allowed))
    agree(logits, draws)


@pytest.mark.slow
def test_what_ties_for_the_last_place_of_top_k_binds_no_ties_above_it() -> None:
    logits = torch.tensor([[1.0] * 38 + [0.5] * 32 + [-1.0] * 9000], device=DEVICE)
    for way in (Sampling(top_k=40, top_p=0.9), Sampling(top_k=40, top_p=0.99), Sampling(top_p=0.9), Sampling(top_k=40)):
        agree(logits.expand(9, -1).contiguous(), [reference.RowSampler(way, (i + 0.5) / 9) for i in range(9)])


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's loads are counted")
def test_a_row_with_the_largest_numbers_is_cut_in_as_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinity, and what is as far away from others as numbers are."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, count = InterpreterBuilder.create_masked_load, 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return load(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    largest = float(np.finfo(np.float32).max)
    plain = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 600)) * 3).float().to(DEVICE)
    draws = [reference.RowSampler(way, 0.4) for way in (Sampling(top_k=50), Sampling(top_p=0.9))]
    loads = []
    for changed in ([], [np.inf], [largest, -largest], [-largest] * 100):
        logits = plain.repeat(len(draws), 1)
        logits[:, : len(changed)] = torch.tensor(changed)
        before = count
        agree(logits, draws)
        loads.append(count - before)
    assert 0 < max(loads[1:]) < 3 * loads[0], loads


def test_broken_rows_are_told_apart_and_disturb_no_other() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = int(logits[0].argmax())
    logits[1, 77] = float("nan")
    logits[2] = float("-inf")
    way = Sampling(temperature=0.0)
    found = sample(logits, [reference.RowSampler(way)] * 4, [0, 1, 2, -1])
    assert found == [expected, sampling.NO_TOKEN, sampling.UNDECIDED, sampling.UNDECIDED]


@pytest.mark.slow
def test_several_draws_of_one_row_follow_its_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]], device=DEVICE)
    way, count = Sampling(top_k=3), 200
    draws = [reference.RowSampler(way, (i + 0.5) / count) for i in range(count)]
    found = np.bincount(sample(logits, draws, [0] * count), minlength=5)
    ids, probs = reference.sampling_distribution(logits[0], way)
    assert np.abs(found[ids.cpu().numpy()] - probs.cpu().numpy() * count).max() <= 1
    assert found.sum() == found[ids.cpu().numpy()].sum()


def test_bias_and_penalties_change_a_row_as_the_reference_does() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(3, 700))).float().to(DEVICE)
    raw = logits.clone()
    how = Sampling(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={5: 3.0, 600: -2.5})
    seen, counted = [3, 5, 90, 400, 600], {3: 2, 90: 1, 400: 5}
    bias = dict(how.bias)
    entries = sorted({*seen, *counted, *bias})
    counts = [counted.get(t, 0 if t in seen else -1) for t in entries]
    lists = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([1], [0, len(entries)], entries, counts)]
    numbers = ([[1.7, 0.4, 0.2]], [bias.get(t, 0.0) for t in entries])
    exact = [torch.tensor(n, dtype=torch.float64, device=DEVICE) for n in numbers]
    sampling.adjust(logits, sampling.AdjustmentArrays(*lists, *exact))
    draw = reference.RowSampler(
        how,
        seen=torch.tensor(seen, device=DEVICE),
        generated=(torch.tensor(list(counted), device=DEVICE), torch.tensor(list(counted.values()), device=DEVICE)),
    )
    expected = reference._penalized(reference._biased(raw[1].double(), how), draw)
    assert torch.allclose(logits[1].double(), expected, atol=1e-6)
    assert torch.equal(logits[[0, 2]], raw[[0, 2]])
