"""Sampler and probe values: what they accept, keep and refuse; and the random numbers that draws use."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from headway.base import rng
from headway.base.errors import HeadwayError, InvalidInput, InvalidToken, WrongType
from headway.base.specs.logits_rules import LogitsRuleValues
from headway.base.specs.probes import (
    AttentionScores,
    Distribution,
    Entropy,
    Hidden,
    LogitLens,
    Logits,
    Logprob,
    Logprobs,
)
from headway.base.specs.samplers import (
    Argmax,
    MinP,
    Multinomial,
    Sampling,
    TopK,
    TopKTopP,
    TopP,
    Typical,
    resolve,
)

LEVEL = 1e-6  # of every statistical test here; seeds are fixed, so a pass stays a pass


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Argmax(), Sampling(temperature=0)),
        (Multinomial(0.7, seed=3), Sampling(0.7, seed=3)),
        (TopK(5, 0.7, 3), Sampling(0.7, top_k=5, seed=3)),
        (TopP(0.9, 0.7, 3), Sampling(0.7, top_p=0.9, seed=3)),
        (MinP(0.1, 0.7, 3), Sampling(0.7, min_p=0.1, seed=3)),
        (TopKTopP(5, 0.9, 0.7, 3), Sampling(0.7, top_k=5, top_p=0.9, seed=3)),
        (Typical(0.2, 0.7, 3), Sampling(0.7, typical_p=0.2, seed=3)),
        (Sampling(min_p=0.5), Sampling(min_p=0.5)),
    ],
)
def test_every_sampler_resolves_to_the_one_form(sampler, expected):
    assert resolve(sampler) == expected
    assert hash(resolve(sampler)) == hash(expected)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.seed = 1


def test_the_defaults_leave_everything_off():
    assert resolve(Multinomial()) == Sampling()
    assert Sampling().bias == ()
    assert not Sampling().penalizes
    assert Sampling(presence_penalty=-0.1).penalizes
    assert Sampling(repetition_penalty=1.1).penalizes


def test_numbers_of_every_kind_are_kept_as_pythons_own():
    how = Sampling(
        np.float32(0.5), np.int64(4), Fraction(1, 2), np.float16(0.25), 1, np.int8(2), seed=np.uint64(2**64 - 1)
    )
    assert (how.temperature, how.top_k, how.top_p, how.min_p) == (0.5, 4, 0.5, 0.25)
    assert how.seed == 2**64 - 1
    kinds = {field.name: type(getattr(how, field.name)) for field in dataclasses.fields(how)}
    integers = ("top_k", "seed", "dry_allowed_length", "dry_penalty_last_n", "mirostat")
    tuples = ("logit_bias", "dry_sequence_breakers")
    named = dict.fromkeys(integers, int) | dict.fromkeys(tuples, tuple)
    assert kinds == {name: named.get(name, float) for name in kinds}


def test_a_bias_is_kept_sorted_and_survives_replace():
    how = Sampling(logit_bias={9: 1, np.int64(2): np.float32(-0.5)})
    assert how.bias == ((2, -0.5), (9, 1.0))
    assert hash(how) == hash(Sampling(logit_bias=[(2, -0.5), (9, 1.0)]))
    assert dataclasses.replace(how, temperature=0.5).bias == how.bias


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        *(
            (lambda kind=kind: kind(temperature=-0.1), InvalidInput, ["temperature", "-0.1", "at least 0"])
            for kind in (Multinomial, Sampling)
        ),
        (lambda: Multinomial(NAN), InvalidInput, ["nan", "finite"]),
        (lambda: Multinomial(INF), InvalidInput, ["inf", "finite"]),
        (lambda: Multinomial(10**400), InvalidInput, ["finite"]),
        (lambda: Multinomial(True), WrongType, ["True", "number"]),
        (lambda: Multinomial(np.True_), WrongType, ["number"]),
        (lambda: Multinomial("1"), WrongType, ["'1'"]),
        (lambda: Multinomial(None), WrongType, ["None"]),
        (lambda: Multinomial(seed=-1), InvalidInput, ["seed", "-1"]),
        (lambda: Multinomial(seed=2**64), InvalidInput, ["seed", str(2**64)]),
        (lambda: Multinomial(seed=1.0), WrongType, ["1.0", "integer"]),
        (lambda: Multinomial(seed=True), WrongType, ["True"]),
        (lambda: TopK(0), InvalidInput, ["k is 0", "at least 1"]),
        (lambda: TopK(-(2**70)), InvalidInput, ["at least 1"]),
        (lambda: TopK(2.0), WrongType, ["2.0"]),
        (lambda: TopK(True), WrongType, ["True"]),
        (lambda: TopP(0), InvalidInput, ["p is 0", "above 0"]),
        (lambda: TopP(1.01), InvalidInput, ["1.01", "at most 1"]),
        (lambda: TopP(-0.5), InvalidInput, ["-0.5"]),
        (lambda: TopP(NAN), InvalidInput, ["nan"]),
        (lambda: MinP(-0.01), InvalidInput, ["-0.01", "[0, 1]"]),
        (lambda: MinP(1.5), InvalidInput, ["1.5"]),
        (lambda: TopKTopP(0, 0.5), InvalidInput, ["k is 0"]),
        (lambda: TopKTopP(3, 0), InvalidInput, ["p is 0"]),
        (lambda: Typical(0), InvalidInput, ["p is 0"]),
        (lambda: Sampling(top_k=-1), InvalidInput, ["top_k is -1", "0 turns it off"]),
        (lambda: Sampling(top_p=0), InvalidInput, ["top_p is 0"]),
        (lambda: Sampling(min_p=2), InvalidInput, ["min_p is 2"]),
        (lambda: Sampling(typical_p=0), InvalidInput, ["typical_p is 0"]),
        (lambda: Sampling(repetition_penalty=0), InvalidInput, ["repetition_penalty is 0", "above 0"]),
        (lambda: Sampling(repetition_penalty=-1), InvalidInput, ["-1"]),
        (lambda: Sampling(presence_penalty=NAN), InvalidInput, ["presence_penalty", "nan"]),
        (lambda: Sampling(frequency_penalty=INF), InvalidInput, ["frequency_penalty", "inf"]),
        (lambda: Sampling(logit_bias={-1: 1.0}), InvalidToken, ["-1"]),
        (lambda: Sampling(logit_bias={1.5: 1.0}), WrongType, ["1.5"]),
        (lambda: Sampling(logit_bias={"a": 1.0}), WrongType, ["'a'"]),
        (lambda: Sampling(logit_bias={3: NAN}), InvalidInput, ["token 3", "nan"]),
        (lambda: Sampling(logit_bias={3: "x"}), WrongType, ["token 3"]),
        (lambda: Sampling(logit_bias=[(3, 1.0), (3, 2.0)]), InvalidInput, ["3 twice"]),
        (lambda: Sampling(logit_bias=[3]), WrongType, ["3"]),
        (lambda: Sampling(logit_bias=7), WrongType, ["7"]),
        (lambda: resolve(Argmax), WrongType, ["Argmax(...)"]),
        (lambda: resolve("argmax"), WrongType, ["'argmax'", "not a sampler"]),
        (lambda: Distribution(temperature=0), InvalidInput, ["temperature is 0", "above 0"]),
        (lambda: Distribution(temperature=NAN), InvalidInput, ["nan"]),
        (lambda: Distribution(k=-1), InvalidInput, ["k is -1"]),
        (lambda: Distribution(k=1.0), WrongType, ["1.0"]),
        (lambda: Distribution(masked=1), WrongType, ["masked"]),
        (lambda: Logits(masked="yes"), WrongType, ["'yes'"]),
        (lambda: Entropy(masked=None), WrongType, ["None"]),
        (lambda: Logprob(-1), InvalidToken, ["-1"]),
        (lambda: Logprob(1.5), WrongType, ["1.5"]),
        (lambda: Logprob([3]), WrongType, ["[3]"]),
        (lambda: Logprobs([3, -1]), InvalidToken, ["ids[1]", "-1"]),
        (lambda: Logprobs(3), WrongType, ["3", "list"]),
        (lambda: Logprobs("ab"), WrongType, ["'ab'"]),
        (lambda: Hidden(-1), InvalidInput, ["layer", "-1"]),
        (lambda: AttentionScores(-1), InvalidInput, ["layer"]),
        (lambda: AttentionScores(0, "sum"), InvalidInput, ["'sum'", "'mean'"]),
        (lambda: AttentionScores(0, 1), WrongType, ["1"]),
        (lambda: LogitLens([-1], 3), InvalidInput, ["layers[0]", "-1"]),
        (lambda: LogitLens(2, 3), WrongType, ["2"]),
        (lambda: LogitLens([2], -3), InvalidInput, ["-3"]),
    ],
)
def test_a_value_out_of_range_is_refused_with_value_and_range(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, HeadwayError)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_probes_keep_plain_hashable_values():
    assert Logprobs(np.array([3, 1])).ids == (3, 1)
    assert Logprobs(i for i in (3, 1)) == Logprobs([3, 1])
    assert Logprobs([]).ids == ()
    assert LogitLens(range(2), np.int32(4)) == LogitLens((0, 1), 4)
    assert type(Logprob(np.int64(3)).id) is int
    assert Logits(masked=np.True_).masked is True
    assert {Distribution(k=3), Distribution(k=3), Hidden(0), AttentionScores(1, "mean"), Entropy()} == {
        Distribution(1.0, 3),
        Hidden(0),
        AttentionScores(1, "mean"),
        Entropy(),
    }


# Random numbers.
@pytest.mark.parametrize(
    ("counter", "key", "words"),  # the known answers published with the algorithm
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_known_answers(counter, key, words):
    assert rng.philox(counter, key) == words


whole64 = st.integers(0, 2**64 - 1)


@given(whole64, whole64, whole64)
def test_one_number_and_an_array_of_them_agree_bit_for_bit(seed, position, ordinal):
    one = rng.uniform(seed, position, ordinal)
    assert 0 <= one < 1
    assert (one * 2**53).is_integer()
    positions = np.array([position, position ^ 1], dtype=np.uint64)
    many = rng.uniforms(seed, positions, ordinal)
    assert many.tolist() == [one, rng.uniform(seed, position ^ 1, ordinal)]


def test_arrays_broadcast():
    grid = rng.uniforms(np.arange(3)[:, None], np.arange(4)[None, :], 7)
    assert grid.shape == (3, 4)
    assert grid[2, 1] == rng.uniform(2, 1, 7)


STREAMS = {
    "positions": lambda n: rng.uniforms(0, np.arange(n)),
    "ordinals": lambda n: rng.uniforms(0, 0, np.arange(n)),
    "seeds": lambda n: rng.uniforms(np.arange(n), 0),
    "high seeds": lambda n: rng.uniforms(np.arange(n, dtype=np.uint64) << np.uint64(32), 5, 1),
}


@pytest.mark.parametrize("name", STREAMS)
def test_numbers_are_uniform_and_free_of_their_neighbors(name):
    values = STREAMS[name](100_000)
    assert len(np.unique(values)) == len(values)
    assert stats.kstest(values, "uniform").pvalue > LEVEL
    cells = np.bincount((values * 256).astype(int), minlength=256)
    assert stats.chisquare(cells).pvalue > LEVEL
    low_bits = (values * 2**53).astype(np.int64) & 255  # the last bits are as random as the first
    assert stats.chisquare(np.bincount(low_bits, minlength=256)).pvalue > LEVEL
    for lag in (1, 2, 16):
        pairs = (values[:-lag] * 16).astype(int) * 16 + (values[lag:] * 16).astype(int)
        assert stats.chisquare(np.bincount(pairs[:: lag + 1], minlength=256)).pvalue > LEVEL


def test_streams_of_neighboring_seeds_positions_and_ordinals_are_independent():
    base = rng.uniforms(7, np.arange(50_000), 0)
    for other in (rng.uniforms(8, np.arange(50_000), 0), rng.uniforms(7, np.arange(50_000), 1)):
        pairs = (base * 16).astype(int) * 16 + (other * 16).astype(int)
        assert stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > LEVEL
    assert not np.isin(rng.uniforms(0, np.arange(50_000), 1), rng.uniforms(0, np.arange(50_000), 0)).any()


def test_what_is_not_a_counter_is_refused():
    for bad in (-1, 2**64):
        with pytest.raises(InvalidInput, match=str(bad)):
            rng.uniform(bad, 0, 0)
        with pytest.raises(InvalidInput, match=str(bad)):
            rng.uniform(0, bad, 0)
        with pytest.raises(InvalidInput, match=str(bad)):
            rng.uniforms(0, [bad], 0)
    with pytest.raises(WrongType):
        rng.uniform(0, 0.5, 0)  # type: ignore[arg-type]
    with pytest.raises(WrongType):
        rng.uniforms(0, np.array([0.5]))


def test_fresh_seeds_differ_and_are_seeds():
    seeds = {rng.fresh_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert all(Multinomial(seed=seed).seed == seed for seed in seeds)


def test_the_defaults_of_a_sampler_are_those_of_the_rules() -> None:
    assert Sampling().rules == LogitsRuleValues()
