"""Native draws against the torch reference: the same token for the same uniform number, but where rounding decides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.base.errors import InvalidMask, InvalidToken
from headway.base.specs.samplers import Sampling
from headway.kernels.native.library import ISAS, ThreadPool, available_isas, open_library, use_isa
from headway.kernels.reference.sampling import NO_TOKEN, RowSampler, sample, sampling_distribution
from support.arrays import sample_native
from support.properties import examples
from support.sweeps import instruction_sets

pytestmark = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")
NEAR = 1e-9  # of a step of the running probability: there another order of sums may choose the neighbor


@pytest.fixture(params=instruction_sets())
def thread_pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    calls = open_library().calls
    assert calls is not None
    best = calls.hw_best_isa()
    if request.param not in available_isas():
        pytest.skip(f"this machine has no {request.param}")
    use_isa(request.param)
    try:
        yield ThreadPool(2)
    finally:
        use_isa(ISAS[best])


options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.0, 2.5, 100.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 40, 5000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.001, 0.3, 0.9, 0.999999]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-6, 0.05, 1.0]),
        "typical_p": st.sampled_from([1.0, 1.0, 1.0, 0.6]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.4]),
    }
)


def make_draw(rng: np.random.Generator, vocab: int, options: dict[str, float], uniform: float) -> RowSampler:
    bias = {int(i): float(b) for i, b in zip(rng.permutation(vocab)[:3], rng.normal(size=3) * 4)}
    seen = np.unique(rng.integers(0, vocab, 5))
    counted = np.unique(rng.integers(0, vocab, 4))
    allowed = rng.random(vocab) < rng.choice([0.02, 0.5, 0.99])
    allowed[rng.integers(vocab)] = True
    how = Sampling(**options, logit_bias=bias if rng.random() < 0.3 else None)  # type: ignore[arg-type]
    return RowSampler(
        how,
        uniform=uniform,
        allowed=torch.from_numpy(allowed) if rng.random() < 0.4 else None,
        seen=torch.from_numpy(seen),
        generated=(torch.from_numpy(counted), torch.from_numpy(rng.integers(1, 9, len(counted)))),
    )


def make_row(rng: np.random.Generator, vocab: int) -> np.ndarray:
    row = rng.normal(size=vocab) * rng.choice([0.0, 0.1, 3.0, 30.0])
    if rng.random() < 0.3:
        row = np.round(row)  # ties
    row[rng.random(vocab) < 0.05] = -np.inf
    if rng.random() < 0.1:
        row[rng.integers(vocab)] = np.inf
    if rng.random() < 0.05:
        row[:] = -np.inf
    return row.astype(np.float32)


def steps(row: torch.Tensor, draw: RowSampler) -> dict[int, tuple[float, float]]:
    """Where each token that may come begins and ends on [0, 1)."""
    ids, probs = sampling_distribution(
        row, draw.sampling, allowed=draw.allowed, seen=draw.seen, generated=draw.generated
    )
    ends = probs.cumsum(0).tolist()
    return {id: (begin, end) for id, begin, end in zip(ids.tolist(), [0.0, *ends], ends, strict=False)}


@given(data=st.data(), vocab=st.sampled_from([1, 2, 3, 17, 97, 1000]), seed=st.integers(0, 1 << 30))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_token_is_that_of_the_reference(thread_pool: ThreadPool, data: st.DataObject, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(np.stack([make_row(rng, vocab) for _ in range(3)]))
    draws = [make_draw(rng, vocab, data.draw(options), float(rng.random())) for _ in rows]
    found, expected = sample_native(thread_pool, rows, draws), sample(rows, draws).tolist()
    for row, draw, token, other in zip(rows, draws, found, expected, strict=True):
        if token != other:
            begin, end = steps(row, draw)[token]
            assert begin - NEAR < draw.uniform < end + NEAR


def test_frequencies_over_a_whole_vocabulary_are_its_probabilities(thread_pool: ThreadPool) -> None:
    """Uniform numbers spread evenly over [0, 1) draw every token as often as its share says, to one draw."""
    rng = np.random.default_rng(3)
    row = torch.from_numpy(rng.normal(size=300).astype(np.float32) * 2)
    count = 20_000
    how = Sampling(temperature=0.8, top_p=0.97, min_p=0.001)
    draws = [RowSampler(how, uniform=(i + 0.5) / count) for i in range(count)]
    tokens = np.bincount(sample_native(thread_pool, row.expand(count, -1), draws), minlength=300)
    ids, probs = sampling_distribution(row, how)
    assert np.abs(tokens[ids.numpy()] - count * probs.numpy()).max() <= 1.0
    assert tokens.sum() == tokens[ids.numpy()].sum()


def test_a_row_with_a_nan_has_no_token_and_its_neighbors_have_theirs(thread_pool: ThreadPool) -> None:
    rows = torch.zeros(3, 50)
    rows[1, 49] = float("nan")
    rows[2, 7] = 30.0
    assert sample_native(
        thread_pool, rows, [RowSampler(Sampling(), 0.99), RowSampler(Sampling()), RowSampler(Sampling(), 0.5)]
    ) == [
        49,
        NO_TOKEN,
        7,
    ]


def test_what_allows_nothing_or_names_no_token_is_refused(thread_pool: ThreadPool) -> None:
    with pytest.raises(InvalidMask, match="allows none of 9 tokens"):
        sample_native(
            thread_pool, torch.zeros(1, 9), [RowSampler(Sampling(), allowed=torch.zeros(9, dtype=torch.bool))]
        )
    with pytest.raises(InvalidToken, match="token id 9 in logit_bias is outside"):
        sample_native(thread_pool, torch.zeros(1, 9), [RowSampler(Sampling(logit_bias={9: 1.0}))])
