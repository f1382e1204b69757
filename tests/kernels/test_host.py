"""Functions of arrays against those of tensors: numpy and torch compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.arrays import from_tensor, narrow, widen
from headway.base.specs.samplers import Sampling
from headway.kernels.host import sampling as host
from headway.kernels.host.ordered import rms_norm
from headway.kernels.host.rope import Rope, frequencies, rerotate
from headway.kernels.reference import ordered
from headway.kernels.reference import sampling as reference
from headway.kernels.reference.quantized import tensor
from headway.kernels.reference.rope import rerotate as reference_rerotate
from headway.models.files import blocks, dequant
from headway.models.files.gguf import KINDS
from support.arrays import to_arrays
from support.gguf_files import random_bytes
from support.properties import examples

seeds = st.integers(0, 1 << 30)
quick = settings(deadline=None, max_examples=examples(60))
ways = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 7, 5000]),
    top_p=st.sampled_from([1.0, 0.001, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    typical_p=st.sampled_from([1.0, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([None, {0: 2.0}, {0: -1.5}]),
    epsilon_cutoff=st.sampled_from([0.0, 0.02]),
    eta_cutoff=st.sampled_from([0.0, 0.02]),
)


def row_of(rng: np.random.Generator, vocab: int) -> torch.Tensor:
    row = rng.normal(size=vocab) * rng.choice([0.0, 0.1, 3.0, 30.0])
    row = np.round(row) if rng.random() < 0.3 else row  # ties
    row[rng.random(vocab) < 0.05] = -np.inf
    if rng.random() < 0.1:
        row[rng.integers(vocab)] = np.inf
    return torch.from_numpy(row.astype(np.float32))


@given(how=ways, vocab=st.sampled_from([1, 2, 17, 97, 1000]), seed=seeds)
@quick
def test_a_row_is_sampled_and_ranked_as_torch_does(how: Sampling, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = row_of(rng, vocab)
    allowed = torch.from_numpy(rng.random(vocab) < 0.7)
    allowed[rng.integers(vocab)] = True
    some_left = bool((row[allowed] > -np.inf).any())  # otherwise a bias is refused
    ids = torch.from_numpy(np.unique(rng.integers(0, vocab, 5)))
    draw = host.RowSampler(
        how,
        allowed=allowed if rng.random() < 0.5 else None,
        seen=ids,
        generated=(ids, torch.from_numpy(rng.integers(1, 9, len(ids)))),
        bias=torch.from_numpy(rng.normal(size=vocab)) if rng.random() < 0.3 and some_left else None,
    )
    own, theirs = host.processed_logprobs(row.numpy(), to_arrays(draw)), reference.processed_logprobs(row, draw)
    np.testing.assert_allclose(own, theirs.numpy(), rtol=1e-9, atol=1e-9)
    for one, other in zip(host.ranked(own, [0], 5), reference.ranked(theirs, [0], 5), strict=True):
        assert [(id, rank) for id, _, rank in one] == [(id, rank) for id, _, rank in other]
    ids_here, shares = host.distribution(row.numpy(), 0.8, 5)
    ids_there, expected = reference.distribution(row, 0.8, 5)
    assert ids_here.tolist() == ids_there.tolist()
    np.testing.assert_allclose(shares, expected.numpy(), rtol=1e-6)
    np.testing.assert_allclose(host.entropy(row.numpy()), float(reference.entropy(row)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
@settings(deadline=None, max_examples=10)
def test_every_kind_decodes_to_the_same_bits(kind: str, seed: int) -> None:
    width = KINDS[kind].block * (2 if KINDS[kind].block > 1 else 19)
    raw = random_bytes(kind, 5, width, seed).reshape(-1).view(np.uint8)
    own = blocks.dequantize(kind, raw, (5, width))
    theirs = dequant.dequantize(kind, torch.from_numpy(raw), (5, width), torch.float32).numpy()
    np.testing.assert_array_equal(own.view(np.uint32), theirs.view(np.uint32))


@given(seed=seeds, size=st.sampled_from([1e-40, 1e-3, 1.0, 1e30, 3.3e38]))
@quick
def test_bfloat16_is_rounded_as_torch_rounds(seed: int, size: float) -> None:
    values = (np.random.default_rng(seed).normal(size=64) * size).astype(np.float32)
    values[:3] = (np.nan, np.inf, -0.0)
    expected = torch.from_numpy(values).bfloat16()
    found = narrow(values, "bfloat16")
    np.testing.assert_array_equal(widen(found), expected.float().numpy())
    np.testing.assert_array_equal(widen(from_tensor(expected)), expected.float().numpy())
    assert torch.equal(tensor(found[1:]), expected[1:])


@given(rows=st.integers(1, 4), width=st.integers(1, 70), seed=seeds)
@quick
def test_the_norm_has_the_bits_of_the_reference(rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(rows, width)).astype(np.float32), rng.normal(size=width).astype(np.float32)
    expected = ordered.rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5)
    np.testing.assert_array_equal(rms_norm(x, weight, 1e-5), expected.numpy())


@given(shift=st.integers(-50, 50), seed=seeds)
@quick
def test_keys_turn_as_torch_turns_them(shift: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(2, 5, 3, 10)).astype(np.float32)
    angles, before = rng.random(4).astype(np.float32), rng.integers(50, 4000, 5)
    given_ = (keys, angles, before, before + shift)
    expected = reference_rerotate(*(torch.from_numpy(each) for each in given_))
    np.testing.assert_allclose(rerotate(*given_), expected.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_extreme_values_give_the_limit_and_no_warning() -> None:
    """A tiny temperature leaves the likeliest, a huge penalty takes a token out."""
    logits = np.array([3.0e38, 1.0, -3.0e38, 2.9e38], np.float32)
    for temperature in (5e-324, 1e-300, 1e-30):
        ids, probs = host.sampling_distribution(logits, Sampling(temperature=temperature))
        assert dict(zip(ids.tolist(), probs.tolist(), strict=True))[0] == 1.0
        assert np.array_equal(host.distribution(logits, temperature)[1], [1, 0, 0, 0])
    out = host.RowSampler(Sampling(repetition_penalty=1e308), seen=np.array([2]))
    assert host.processed_logprobs(logits, out)[2] == -np.inf
    both = host.RowSampler(Sampling(logit_bias={1: 1e308}), bias=np.array([0, 1e308, 0, 0]))
    assert host.sample(logits[None], [both]).tolist() == [1]
    assert frequencies(Rope(8, theta=1e300)).tolist() == [1.0, 0.0, 0.0, 0.0]
