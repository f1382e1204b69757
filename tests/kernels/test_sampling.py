"""Sampling against a plain reference: kept sets and probabilities, frequencies of draws, ties, infinities, batch mates.

The reference below is written from the definitions, in numpy and Python, and shares nothing with the kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from headway.base import rng
from headway.base.errors import InvalidInput, InvalidMask, InvalidToken
from headway.base.specs.samplers import Argmax, MinP, Multinomial, Sampling, TopK, TopKTopP, TopP, Typical, resolve
from headway.kernels.reference.sampling import (
    NO_TOKEN,
    RowSampler,
    distribution,
    entropy,
    logprobs,
    processed_logprobs,
    sample,
    sampling_distribution,
)
from support.properties import examples
from support.sweeps import swept

LEVEL = 1e-6  # of every chi-square test here; seeds are fixed, so a pass stays a pass
NEAR = 1e-10  # a filter whose threshold is nearer than this is not asked to agree


def named(sampler) -> str:
    """A test's name: the parameters that are set."""
    how, off = resolve(sampler), Sampling()
    turned = [f for f in dataclasses.fields(how) if getattr(how, f.name) != getattr(off, f.name)]
    return " ".join(f"{f.name}={getattr(how, f.name)}" for f in turned) or "plain"


class Close(Exception):
    """The reference cannot say: a threshold lies within rounding."""


def adjusted(logits, how: Sampling, allowed=None, seen=(), generated=None) -> np.ndarray:
    scores = np.asarray(logits, dtype=np.float64).copy()
    for token, bias in how.bias:
        scores[token] += bias
    for token in seen:
        scores[token] = (
            scores[token] / how.repetition_penalty if scores[token] > 0 else scores[token] * how.repetition_penalty
        )
    for token, count in (generated or {}).items():
        scores[token] -= how.presence_penalty
        scores[token] -= how.frequency_penalty * count
    return scores if allowed is None else np.where(allowed, scores, -np.inf)


def reference(logits, how: Sampling, allowed=None, seen=(), generated=None) -> dict[int, float]:
    """The exact distribution of a draw, as {id: probability}."""
    scores = adjusted(logits, how, allowed, seen, generated)
    if how.temperature == 0:
        return {min(i for i in range(len(scores)) if scores[i] == scores.max()): 1.0}
    live = [i for i in range(len(scores)) if scores[i] > -np.inf]
    logs = {i: (scores[i] - scores.max()) / how.temperature for i in live}
    probs = renormalized({i: math.exp(logs[i]) for i in live})
    if how.top_k:
        probs = renormalized({i: probs[i] for i in sorted(live, key=lambda i: (-scores[i], i))[: how.top_k]})
    if how.top_p < 1:
        probs = shortest(probs, sorted(probs, key=lambda i: (-scores[i], i)), how.top_p)
    if how.min_p > 0:
        edge = how.min_p * max(probs.values())
        if any(abs(p - edge) < NEAR and p != max(probs.values()) for p in probs.values()):
            raise Close
        probs = renormalized({i: p for i, p in probs.items() if p >= edge})
    if how.typical_p < 1:
        mean = math.fsum(-p * math.log(p) for p in probs.values() if p > 0)
        far = {i: abs(-math.log(p) - mean) if p > 0 else math.inf for i, p in probs.items()}
        order = sorted(probs, key=lambda i: (far[i], i))
        for a, b in itertools.pairwise(order):
            if far[b] - far[a] < NEAR and scores[a] != scores[b]:
                raise Close
        probs = shortest(probs, order, how.typical_p)
    return probs


def renormalized(weights: dict[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def shortest(probs: dict[int, float], order: list[int], share: float) -> dict[int, float]:
    total, reached = sum(map(Fraction, probs.values())), Fraction(0)
    equal = len(set(probs.values())) == 1
    for size, i in enumerate(order, 1):
        reached += Fraction(probs[i])
        gap = reached - Fraction(share) * total
        if abs(gap) < NEAR and not equal:
            raise Close
        # Equal weights are whole numbers to the kernel, and then it must land on the threshold exactly.
        if (size >= share * len(order)) if equal else (gap >= 0):
            return renormalized({j: probs[j] for j in order[:size]})
    return renormalized(probs)


def history(seen, generated):
    """The reference's history as the kernel takes it."""
    counts = (
        torch.tensor(list(generated), dtype=torch.int64),
        torch.tensor(list(generated.values()), dtype=torch.int64),
    )
    return {"seen": torch.tensor(sorted(seen), dtype=torch.int64), "generated": counts}


def agree(logits, how, allowed=None, seen=(), generated=None) -> None:
    """Asserts that the kernel keeps what the reference keeps, with the same probabilities."""
    row = torch.tensor(np.asarray(logits), dtype=torch.float32)
    expected = reference(row.numpy(), how, allowed, seen, generated)
    mask = None if allowed is None else torch.tensor(np.asarray(allowed))
    ids, probs = sampling_distribution(row, how, allowed=mask, **history(seen, generated or {}))
    assert ids.tolist() == sorted(expected), (how, ids.tolist(), sorted(expected))
    assert probs.dtype == torch.float64
    assert probs.tolist() == pytest.approx([expected[i] for i in ids.tolist()], rel=1e-9, abs=1e-300)


def numbered(seed: int, size: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def few_levels(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, size).astype(np.float32)


def dominant(seed: int, size: int) -> np.ndarray:
    row = numbered(seed, size, 0.1)
    row[size // 3] = 900.0
    return row


ROWS = {
    "spread": numbered,
    "ties": few_levels,
    "dominant": dominant,
    "all equal": lambda seed, size: np.full(size, -3.25, dtype=np.float32),
    "two peaks": lambda seed, size: np.where(np.arange(size) % 7 == 3, 5.0, few_levels(seed, size)).astype(np.float32),
    "huge": lambda seed, size: numbered(seed, size, 1e30),
}
PARAMETERS = [
    Sampling(0.0),
    Sampling(),
    Sampling(0.3),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=10**9),
    Sampling(top_p=0.5),
    Sampling(top_p=0.999),
    Sampling(top_p=1e-9),
    Sampling(min_p=0.07),
    Sampling(min_p=1.0),
    Sampling(typical_p=0.4),
    Sampling(typical_p=0.95),
    Sampling(0.7, top_k=6, top_p=0.8),
    Sampling(1.5, top_k=9, min_p=0.11),
    Sampling(0.9, top_k=11, top_p=0.9, min_p=0.03, typical_p=0.7),
]


@pytest.mark.parametrize("how", PARAMETERS, ids=named)
@pytest.mark.parametrize("kind", ROWS)
def test_kept_sets_equal_the_reference_on_hard_rows(kind, how):
    for size in (1, 7, 13, 64, 331):
        for masked in (False, True):
            allowed = np.random.default_rng(size).random(size) < 0.5 if masked else None
            if allowed is not None:
                allowed[size // 2] = True
            try:
                agree(ROWS[kind](size, size), how, allowed)
            except Close:
                continue


def test_the_reference_decides_almost_always():
    """The rows above are not excused too often."""
    undecided = total = 0
    for row in (ROWS[kind](size, size) for kind in ROWS for size in (1, 7, 13, 64, 331)):
        for how in PARAMETERS:
            total += 1
            try:
                reference(row, how)
            except Close:
                undecided += 1
    assert undecided < 0.12 * total, (undecided, total)


levels = st.sampled_from([-3.0, -1.0, 0.0, 0.0, 0.5, 2.0, 2.0]) | st.floats(-8, 8, width=32)


@st.composite
def samplings(draw, size):
    def some(strategy, off):
        return draw(st.just(off) | strategy)

    return Sampling(
        temperature=some(st.floats(0.1, 3), 1.0),
        top_k=some(st.integers(1, 12), 0),
        top_p=some(st.floats(0.05, 0.99), 1.0),
        min_p=some(st.floats(0.01, 0.9), 0.0),
        typical_p=some(st.floats(0.05, 0.99), 1.0),
        repetition_penalty=some(st.floats(0.5, 2), 1.0),
        presence_penalty=some(st.floats(-2, 2), 0.0),
        frequency_penalty=some(st.floats(-2, 2), 0.0),
        logit_bias=some(st.dictionaries(st.integers(0, size - 1), st.floats(-5, 5), max_size=3), None),
    )


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_mixture_of_knobs_masks_and_history_equals_the_reference(data):
    row = data.draw(st.lists(levels, min_size=1, max_size=30))
    size = len(row)
    how = data.draw(samplings(size))
    allowed = data.draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    token = st.integers(0, size - 1)
    generated = data.draw(st.dictionaries(token, st.integers(1, 4), max_size=4))
    seen = data.draw(st.sets(token, max_size=4)) | set(generated)
    try:
        agree(row, how, allowed, seen, generated)
    except Close:
        assume(False)


@pytest.mark.parametrize(("share", "count"), [(0.5, 4), (0.500001, 5), (0.125, 1), (0.875, 7), (1.0, 8), (0.8, 7)])
def test_top_p_and_typical_land_exactly_on_equal_shares(share, count):
    row = torch.zeros(8)
    for how in (Sampling(top_p=share), Sampling(typical_p=share)):
        assert sampling_distribution(row, how)[0].tolist() == list(range(count))


def test_ties_go_to_the_lower_id_and_top_k_keeps_exactly_k():
    row = torch.tensor([1.0, 5.0, 5.0, 0.0, 5.0, 5.0, 1.0])
    assert sampling_distribution(row, Sampling(top_k=3))[0].tolist() == [1, 2, 4]
    assert sampling_distribution(row, Sampling(top_k=5))[0].tolist() == [0, 1, 2, 4, 5]
    assert sampling_distribution(row, Sampling(top_p=0.4))[0].tolist() == [1, 2]
    allowed = torch.tensor([True, False, True, True, False, False, False])
    assert sampling_distribution(row, Sampling(top_k=5), allowed=allowed)[0].tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (5_000, Sampling(top_p=0.3)),
        (5_000, Sampling(top_p=0.97)),
        (5_000, Sampling(typical_p=0.6)),
        (5_000, Sampling(top_k=300, top_p=0.9)),
        (5_000, Sampling(min_p=0.2)),
        (50_257, Sampling(top_p=0.6)),
        pytest.param(50_257, Sampling(top_p=0.97), marks=pytest.mark.slow),
        pytest.param(50_257, Sampling(typical_p=0.6), marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else named(value),
)
def test_bounded_candidates_and_a_full_sort_keep_the_same(size, how):
    """Peaked, spread and tied rows: the shortcut, its second guess and the full ranking are all taken."""
    peaked = numbered(1, size, 1.0)
    peaked[100:130] += 14
    tied = np.round(numbered(2, size, 2.0) * 2) / 2
    decided = 0
    for row in (peaked, numbered(3, size, 0.05), tied):
        try:
            agree(row, how)
            decided += 1
        except Close:
            continue
    assert decided >= 2


# Zero temperature, infinities, NaN.
def test_temperature_zero_takes_the_lowest_id_of_the_largest():
    rows = torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 3.0], [-1.0, -5.0, -1.0]])
    assert sample(rows, [RowSampler(resolve(Argmax()))] * 3).tolist() == [1, 0, 0]
    filters = Sampling(0.0, top_k=2, top_p=0.1, min_p=0.5, typical_p=0.2)
    assert sample(rows, [RowSampler(filters, 0.99)] * 3).tolist() == [1, 0, 0]
    allowed = torch.tensor([False, False, True])
    assert sample(rows, [RowSampler(Sampling(0.0), allowed=allowed)] * 3).tolist() == [2, 2, 2]


def test_bias_and_penalties_bind_argmax_too():
    row = torch.tensor([[4.0, 3.0, -1.0]])
    assert sample(row, [RowSampler(Sampling(0.0, logit_bias={1: 1.5}))]).tolist() == [1]
    assert sample(row, [RowSampler(Sampling(0.0, repetition_penalty=2.0), seen=torch.tensor([0]))]).tolist() == [1]
    often = (torch.tensor([0, 1]), torch.tensor([1, 5]))
    assert sample(row, [RowSampler(Sampling(0.0, presence_penalty=1.5), generated=often)]).tolist() == [0]
    assert sample(row, [RowSampler(Sampling(0.0, frequency_penalty=2.0), generated=often)]).tolist() == [0]
    assert sample(row, [RowSampler(Sampling(0.0, frequency_penalty=-2.0), generated=often)]).tolist() == [1]


def test_a_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    row = torch.tensor([2.0, -2.0, 1.0])
    _, probs = sampling_distribution(row, Sampling(repetition_penalty=4.0), seen=torch.tensor([0, 1]))
    assert probs.tolist() == pytest.approx(torch.softmax(torch.tensor([0.5, -8.0, 1.0]).double(), 0).tolist())


def test_infinite_logits_are_certain_and_equal():
    inf = math.inf
    row = torch.tensor([0.0, inf, 5.0, inf, -inf])
    for how in (Sampling(), Sampling(top_p=0.9), Sampling(typical_p=0.9), Sampling(min_p=0.1), Sampling(5.0)):
        ids, probs = sampling_distribution(row, how)
        live = {i: p for i, p in zip(ids.tolist(), probs.tolist()) if p}
        assert live == {1: 0.5, 3: 0.5}
        drawn = sample(row.repeat(4, 1), [RowSampler(how, u) for u in (0.0, 0.49, 0.5, 0.99)])
        assert drawn.tolist() == [1, 1, 3, 3]
    assert sample(row[None], [RowSampler(Sampling(0.0))]).tolist() == [1]
    assert entropy(row).item() == pytest.approx(math.log(2))


def test_minus_infinity_is_never_sampled_unless_all_are():
    row = torch.tensor([-math.inf, 1.0, -math.inf, 1.0])
    assert sampling_distribution(row, Sampling(top_k=3))[0].tolist() == [1, 3]
    dead = torch.full((1, 4), -math.inf)
    allowed = torch.tensor([False, True, False, True])
    assert sample(dead, [RowSampler(Sampling(), 0.7, allowed)]).tolist() == [3]
    assert sample(dead, [RowSampler(Sampling(0.0), allowed=allowed)]).tolist() == [1]


def test_a_row_with_nan_gets_no_token_and_its_neighbors_theirs():
    rows = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [2.0, 1.0]])
    assert sample(rows, [RowSampler(Sampling(0.0))] * 3).tolist() == [1, NO_TOKEN, 0]
    mixed = [RowSampler(Sampling(0.0)), RowSampler(Sampling(), 0.3), RowSampler(Sampling(top_k=1), 0.3)]
    assert sample(rows, mixed).tolist() == [1, NO_TOKEN, 0]
    hidden = RowSampler(Sampling(), 0.3, torch.tensor([False, True]))
    assert sample(rows[1:2], [hidden]).tolist() == [NO_TOKEN]


def test_a_tiny_temperature_is_argmax_and_a_huge_one_is_flat():
    row = torch.tensor([1.0, 3.0, 2.0])
    ids, probs = sampling_distribution(row, Sampling(5e-324))
    assert dict(zip(ids.tolist(), probs.tolist()))[1] == 1.0
    assert sampling_distribution(row, Sampling(1e300))[1].tolist() == pytest.approx([1 / 3] * 3)
    assert sampling_distribution(row, Sampling(1e300, top_k=2))[0].tolist() == [1, 2]


# The draw.
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(levels, min_size=1, max_size=20), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_first_token_in_id_order_past_its_uniform_number(row, number):
    logits = torch.tensor([row])
    ids, probs = sampling_distribution(logits[0], Sampling())
    reached = np.cumsum(probs.numpy())
    assume(np.abs(reached - number).min() > 1e-9)
    expected = next(i for i, at in zip(ids.tolist(), reached) if at > number)
    assert sample(logits, [RowSampler(Sampling(), number)]).tolist() == [expected]


@pytest.mark.parametrize("number", [0.0, 5e-324, 0.5, 1 - 2**-53])
def test_the_ends_of_the_range_never_draw_a_token_without_probability(number):
    row = torch.full((9,), -1e4)
    row[[2, 5]] = 3.0
    token = sample(row[None], [RowSampler(Sampling(), number)]).item()
    assert token == (2 if number < 0.5 else 5)
    third = torch.zeros(1, 3)
    assert sample(third, [RowSampler(Sampling(), 1 - 2**-53)]).item() == 2


COMBINATIONS = [
    Multinomial(),
    Multinomial(0.6),
    Multinomial(1.8),
    TopK(4),
    TopP(0.7),
    MinP(0.2),
    TopKTopP(6, 0.8, 1.3),
    Typical(0.6),
    Sampling(logit_bias={1: 2.0, 4: -1.0}),
    Sampling(repetition_penalty=1.7),
    Sampling(presence_penalty=0.8, frequency_penalty=0.4),
    Sampling(0.8, top_k=8, top_p=0.9, min_p=0.05, typical_p=0.9),
    Sampling(1.2, 9, 0.95, 0.02, 0.97, 1.3, 0.2, 0.1, {2: 1.0}),
]


def check_frequencies(sampler, draws: int, masked: bool) -> None:
    row = numbered(11, 17, 1.2)
    allowed = np.arange(17) % 5 != 1 if masked else None
    generated, seen = {3: 1, 7: 3}, {0, 3, 7}
    how = resolve(sampler)
    expected = reference(row, how, allowed, seen, generated)
    mask = None if allowed is None else torch.tensor(allowed)
    made = [
        RowSampler(how, float(u), mask, **history(seen, generated))
        for u in rng.uniforms(2024, np.arange(draws), int(masked))
    ]
    found = Counter(sample(torch.tensor(row).repeat(draws, 1), made).tolist())
    assert set(found) <= set(expected)
    ids = sorted(expected, key=lambda i: expected[i])
    counts, means = np.array([found[i] for i in ids]), np.array([expected[i] * draws for i in ids])
    rare = max(1, int((np.cumsum(means) < 8).sum()) + 1)  # cells too small for the approximation are pooled
    counts, means = np.append(counts[rare:], counts[:rare].sum()), np.append(means[rare:], means[:rare].sum())
    if len(counts) > 1:
        assert stats.chisquare(counts, means).pvalue > LEVEL


@pytest.mark.parametrize("masked", swept([True, False]))
@pytest.mark.parametrize("sampler", COMBINATIONS, ids=named)
def test_frequencies_fit_the_exact_distribution(sampler, masked):
    check_frequencies(sampler, 1500, masked)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sampler", COMBINATIONS, ids=named)
def test_frequencies_fit_the_exact_distribution_over_many_draws(sampler, masked):
    check_frequencies(sampler, 20_000, masked)


@pytest.mark.slow
def test_kept_sets_equal_the_reference_in_a_long_sweep():
    generator = np.random.default_rng(5)
    decided = 0
    for trial in range(4000):
        size = int(generator.integers(1, 200))
        row = ROWS[str(generator.choice(["spread", "ties", "two peaks"]))](trial, size)
        how = PARAMETERS[trial % len(PARAMETERS)]
        allowed = generator.random(size) < 0.7
        allowed[0] = True
        try:
            agree(row, how, allowed)
            decided += 1
        except Close:
            continue
    assert decided > 3500


# Batch mates.
def mixed_draws(count: int, size: int) -> list[RowSampler]:
    generator = np.random.default_rng(9)
    draws = []
    for row in range(count):
        allowed = torch.tensor(generator.random(size) < 0.8) if row % 3 == 0 else None
        how = [Sampling(0.0), *map(resolve, COMBINATIONS)][row % (len(COMBINATIONS) + 1)]
        draws.append(RowSampler(how, float(generator.random()), allowed, **history({1, 2}, {2: 2})))
    return draws


@pytest.mark.parametrize("size", [19, 1000, 40_001])
def test_a_row_gives_the_same_token_alone_and_among_others(size):
    count = 30
    logits = torch.tensor(np.stack([numbered(i, size) for i in range(count)]))
    draws = mixed_draws(count, size)
    together = sample(logits, draws)
    assert together.dtype == torch.int64
    for row in range(count):
        assert sample(logits[row : row + 1].clone(), draws[row : row + 1]).item() == together[row]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits[order], [draws[i] for i in order.tolist()]), together[order])


def test_the_probabilities_of_a_row_do_not_depend_on_its_place_in_memory():
    logits = torch.tensor(np.stack([numbered(i, 1001) for i in range(7)]))
    for how in PARAMETERS:
        for row in range(7):
            inside, alone = sampling_distribution(logits[row], how), sampling_distribution(logits[row].clone(), how)
            assert torch.equal(inside[0], alone[0])
            assert torch.equal(inside[1], alone[1])


def test_inputs_are_not_changed():
    logits = torch.tensor(numbered(0, 50)[None])
    before = logits.clone()
    for draw in mixed_draws(28, 50):
        sample(logits, [draw])
    assert torch.equal(logits, before)


# Probes.
@given(st.lists(levels, min_size=1, max_size=30), st.floats(0.1, 4), st.integers(0, 40))
def test_distribution_ranks_by_probability_then_lower_id(row, temperature, k):
    ids, probs = distribution(torch.tensor(row), temperature, k)
    exact = np.array(row, dtype=np.float32).astype(np.float64) / temperature
    exact = np.exp(exact - exact.max())
    exact /= exact.sum()
    values = np.array(row, dtype=np.float32)
    order = sorted(range(len(row)), key=lambda i: (-values[i], i))[: k or len(row)]
    assert ids.tolist() == order
    assert probs.dtype == torch.float32
    assert probs.tolist() == pytest.approx(exact[order].tolist(), rel=1e-6)


@given(st.lists(levels, min_size=1, max_size=30))
def test_logprobs_and_entropy_equal_numpys(row):
    values = np.array(row, dtype=np.float32).astype(np.float64)
    logs = values - values.max() - math.log(np.exp(values - values.max()).sum())
    got = logprobs(torch.tensor(row), torch.arange(len(row)))
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(logs.tolist(), rel=1e-6, abs=1e-6)
    assert entropy(torch.tensor(row)).item() == pytest.approx(-(np.exp(logs) * logs).sum(), rel=1e-6, abs=1e-6)


def test_probes_of_masked_and_certain_rows():
    row = torch.tensor([-math.inf, 0.0, 0.0])
    assert entropy(row).item() == pytest.approx(math.log(2))
    assert logprobs(row, torch.tensor([0, 2])).tolist() == [-math.inf, pytest.approx(-math.log(2))]
    assert distribution(row)[1].tolist() == [0.5, 0.5, 0.0]
    assert entropy(torch.tensor([500.0, 0.0])).item() == pytest.approx(0, abs=1e-30)
    assert logprobs(row, torch.tensor([], dtype=torch.int64)).tolist() == []


# Refusals.
def test_what_does_not_fit_is_refused():
    row = torch.zeros(1, 4)
    with pytest.raises(InvalidInput, match=r"\(1, 4\) for 2 samplers"):
        sample(row, [RowSampler(Sampling())] * 2)
    with pytest.raises(InvalidInput, match=r"\(4,\)"):
        sample(row[0], [RowSampler(Sampling())])
    with pytest.raises(InvalidMask, match="none of 4"):
        sample(row, [RowSampler(Sampling(), allowed=torch.zeros(4, dtype=torch.bool))])
    with pytest.raises(InvalidToken, match=r"4 in logit_bias.*0 … 3"):
        sample(row, [RowSampler(Sampling(logit_bias={4: 1.0}))])
    for bad in (-0.1, 1.0, math.nan):
        with pytest.raises(InvalidInput, match="uniform"):
            RowSampler(Sampling(), bad)


def test_no_rows_give_no_tokens():
    assert sample(torch.zeros(0, 5), []).tolist() == []


@pytest.mark.gpu
def test_a_cuda_device_keeps_and_draws_the_same():
    for size in (19, 1000, 40_001):
        logits = torch.tensor(np.stack([numbered(i, size) for i in range(28)]))
        draws = mixed_draws(28, size)
        there = [
            RowSampler(
                d.sampling,
                d.uniform,
                None if d.allowed is None else d.allowed.cuda(),
                d.seen.cuda(),
                tuple(t.cuda() for t in d.generated),
            )
            for d in draws
        ]
        again = [sample(logits.cuda(), there).cpu() for _ in range(5)]
        assert all(torch.equal(tokens, again[0]) for tokens in again)
        assert torch.equal(again[0], sample(logits, draws))
        for row, (here, far) in enumerate(zip(draws, there)):
            extra = {"allowed": here.allowed, "seen": here.seen, "generated": here.generated}
            moved = {"allowed": far.allowed, "seen": far.seen, "generated": far.generated}
            ids, probs = sampling_distribution(logits[row], here.sampling, **extra)
            far_ids, far_probs = sampling_distribution(logits[row].cuda(), far.sampling, **moved)
            assert torch.equal(far_ids.cpu(), ids)
            assert torch.allclose(far_probs.cpu(), probs, rtol=1e-12, atol=0)


def test_processed_log_probabilities_do_not_underflow() -> None:
    logits = torch.tensor([0.0, -50.0, 10.0, 9.9])
    logs = processed_logprobs(logits, RowSampler(Sampling(temperature=0.02)))
    torch.testing.assert_close(logs, torch.log_softmax(logits.double() / 0.02, 0))
    kept = processed_logprobs(logits, RowSampler(Sampling(temperature=0.02, top_k=3)))
    assert kept.isinf().tolist() == [False, True, False, False]
