"""DRY, XTC and mirostat do what was published, by plain references; in generations they keep seeds and grammars."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headway as hw
from headway.base.rng import uniform
from headway.base.specs.logits_rules import SWITCHES, LogitsRuleValues
from headway.program.generation.logits_rules import XTC_ORDINAL, Mirostat, dry, xtc
from support.small import small_engine

V = 12


# -- the algorithms as they were published ---------------------------------------------------------------------------


def plain_dry(row: np.ndarray, tokens: list[int], allowed: int, breakers: set[int]) -> Any:
    """p-e-w's own description: the longest suffix that occurred before, for every token that came after it."""
    row, longest = row.copy(), {}
    for i in range(1, len(tokens)):
        length = 0
        while i - 1 - length >= 0 and tokens[i - 1 - length] == tokens[-1 - length]:
            if tokens[-1 - length] in breakers:
                break
            length += 1
        longest[tokens[i]] = max(longest.get(tokens[i], 0), length)
    for token, length in longest.items():
        if length >= allowed:
            row[token] -= 0.8 * 1.5 ** (length - allowed)
    return row


def plain_xtc(row: np.ndarray, threshold: float) -> np.ndarray:
    probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    ranked = sorted(range(len(row)), key=lambda i: (-probs[i], -i))
    top = [i for i in ranked if probs[i] >= threshold]
    row = row.copy()
    row[top[:-1]] = -np.inf
    return row


def plain_mirostat(row: np.ndarray, mu: float, version: int) -> list[int]:
    """The tokens that stay, by Basu et al.: version 1 over Zipf's law, version 2 by the surprise itself."""
    probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    ranked = sorted(range(len(row)), key=lambda i: -probs[i])
    if version == 2:
        return [i for n, i in enumerate(ranked) if n == 0 or -math.log2(probs[i]) <= mu]
    top = probs[ranked][:100]
    t = [math.log((i + 2) / (i + 1)) for i in range(len(top) - 1)]
    b = [math.log(top[i] / top[i + 1]) for i in range(len(top) - 1)]
    s = sum(x * y for x, y in zip(t, b)) / sum(x * x for x in t)
    k = ((s - 1) * 2**mu / (1 - len(row) ** (1 - s))) ** (1 / s)
    return ranked[: max(1, int(min(k, len(row))))]


logits = st.lists(st.floats(-8, 8), min_size=V, max_size=V, unique=True).map(np.array)


@settings(deadline=None)
@given(logits, st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.sets(st.integers(0, 3), max_size=2))
def test_dry_is_as_published(row: np.ndarray, tokens: list[int], allowed: int, breakers: set[int]) -> None:
    values = LogitsRuleValues(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=allowed)
    found = row.copy()
    dry(found, tokens, values, breakers.__contains__)
    np.testing.assert_allclose(found, plain_dry(row, tokens, allowed, breakers) if tokens else row)


def test_dry_looks_at_the_last_tokens_only_where_it_is_told() -> None:
    row, tokens = np.zeros(V), [1, 2, 3, 4, 5, 1, 2]
    for last, loses in ((-1, True), (7, True), (6, False), (0, False)):
        found = row.copy()
        dry(found, tokens, LogitsRuleValues(dry_multiplier=1.0, dry_penalty_last_n=last), lambda token: False)
        assert (found[3] < 0) == loses, last


@settings(deadline=None)
@given(logits, st.floats(0.01, 0.6))
def test_xtc_is_as_published(row: np.ndarray, threshold: float) -> None:
    found = row.copy()
    xtc(found, 0.5, threshold, 0.4)
    np.testing.assert_array_equal(found, plain_xtc(row, threshold))
    xtc(same := row.copy(), 0.5, threshold, 0.5)
    np.testing.assert_array_equal(same, row)


@settings(deadline=None)
@given(logits, st.floats(0.1, 8), st.sampled_from([1, 2]), st.floats(0.5, 2))
def test_mirostat_is_as_published(row: np.ndarray, tau: float, version: int, temperature: float) -> None:
    values = LogitsRuleValues(mirostat=version, mirostat_tau=tau, mirostat_eta=0.3)
    state, mu, generated = Mirostat(values, temperature), 2 * tau, []
    for step in range(4):
        state.follow(generated)
        assert state.mu == pytest.approx(mu)
        found = row.copy()
        state.truncate(found)
        kept = plain_mirostat(row / temperature, mu, version)
        assert sorted(kept) == np.flatnonzero(found > -np.inf).tolist()
        token = kept[step % len(kept)]
        weights = np.exp(row[kept] / temperature - (row / temperature).max())
        surprise = -math.log2(weights[kept.index(token)] / weights.sum())
        mu -= 0.3 * (surprise - tau)
        generated = [*generated, token]


# -- in generations --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hw.Engine]:
    with small_engine(tmp_path_factory.mktemp("small") / "model") as engine:
        yield engine


def written(engine: hw.Engine, *args: Any, **options: Any) -> list[int]:
    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            return (
                await context.fill([5, 6, 7, 5, 6, 7, 5, 6])
                .generate(*args, max_tokens=16, stop_only=True, **options)
                .tokens()
            )

    return engine.run(program)


RULES: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 5.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 1e-4},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 1.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 1.0},
}


@pytest.mark.parametrize("name", RULES)
def test_a_generation_is_its_rule_step_by_step(engine: hw.Engine, name: str) -> None:
    """What a program gets that applies the rule itself, as a hook, from the same logits."""
    rule, sampler = RULES[name], hw.Multinomial(0.9, seed=7)
    values = LogitsRuleValues.of(rule)
    state = Mirostat(values, 0.9)

    def hook(row: np.ndarray, generation: Any) -> np.ndarray:
        wide = row.astype(np.float64)
        if values.dry_multiplier:
            dry(wide, generation.context.tokens, values, lambda token: False)
        if values.xtc_probability:
            xtc(wide, 1.0, 1e-4, uniform(7, generation.context.next_position - 1, XTC_ORDINAL))
        if values.mirostat:
            state.follow(generation.generated)
            state.truncate(wide)
        return wide.astype(np.float32)

    found = written(engine, sampler, **rule)
    assert found == written(engine, sampler, logits=hook)
    assert found == written(engine, sampler, **rule)
    assert found != written(engine, sampler)


@pytest.mark.parametrize("name", RULES)
def test_a_sampler_has_the_rules_too(engine: hw.Engine, name: str) -> None:
    rule = RULES[name]
    found = written(engine, hw.Multinomial(0.9, seed=7), **rule)
    assert found == written(engine, hw.Sampling(0.9, seed=7, **rule))
    sampler, off = hw.Sampling(0.9, seed=7, **rule), dict.fromkeys(SWITCHES.values(), 0)
    assert written(engine, sampler, **off) == written(engine, hw.Multinomial(0.9, seed=7))


@pytest.mark.parametrize("name", RULES)
def test_a_pipeline_has_the_rules_too(engine: hw.Engine, name: str) -> None:
    rule = RULES[name]
    pipe = hw.pipeline("text-generation", model=engine)
    how = {"max_new_tokens": 24, **({"seed": 7, "top_k": 0} if "mirostat" in name else {"do_sample": False})}
    texts = [pipe("abcabc", **how, **more)[0]["generated_text"] for more in ({}, rule)]
    assert texts[0] != texts[1]


def test_rules_need_a_sequence_to_follow(engine: hw.Engine) -> None:
    with pytest.raises(hw.Unsupported, match=r"xtc_probability is 0.5.*ctx.generate"):
        engine.context().fill([1]).forward().sample([-1], hw.Sampling(xtc_probability=0.5))
    with pytest.raises(hw.Unsupported, match="mirostat is 2"):
        hw.draw([0.0, 1.0], hw.Sampling(mirostat=2))
    with pytest.raises(hw.InvalidInput, match="1 to 40 characters"):
        hw.Sampling(dry_sequence_breakers=[""])


def test_a_grammar_is_followed_whatever_the_rules_leave(engine: hw.Engine) -> None:
    for rule in RULES.values():
        tokens = written(engine, hw.Multinomial(1.0, seed=3), constrain=hw.Grammar.regex("[ab]{6}"), **rule)
        assert set(engine.tokenizer.decode(tokens)) <= set("ab")


def test_xtc_keeps_a_token_that_may_come_at_any_threshold(engine: hw.Engine) -> None:
    rule = {"xtc_probability": 1.0, "xtc_threshold": 0.0}
    for more in ({}, RULES["mirostat 1"], RULES["mirostat 2"]):
        with np.errstate(all="raise", under="ignore"):
            tokens = written(engine, hw.Multinomial(1.0, seed=3), constrain=hw.Grammar.regex("[ab]{6}"), **rule, **more)
        assert len(tokens) > 5
        assert set(engine.tokenizer.decode(tokens)) <= set("ab")


@pytest.mark.parametrize("more", [{}, RULES["xtc"], RULES["mirostat 1"], RULES["mirostat 2"]])
@pytest.mark.parametrize("temperature", [1.0, 1e-9])
def test_a_loss_of_any_size_rules_no_token_out(engine: hw.Engine, temperature: float, more: dict[str, Any]) -> None:
    """Where everything that may come would go on with a repetition, one of it comes."""
    rule = {"dry_multiplier": 1e308, "dry_base": 100.0, "dry_allowed_length": 1, "dry_sequence_breakers": [], **more}

    async def program(engine: hw.Engine) -> str:
        async with engine.context() as context:
            generation = context.fill("aabaab" * 20 + "a").generate(
                hw.Multinomial(temperature, seed=1), max_tokens=4, constrain=hw.Grammar.regex("[ab]{4}"), **rule
            )
            return await generation.text()

    with np.errstate(all="raise", under="ignore"):
        found = engine.run(program)
    assert len(found) == 4
    assert set(found) <= set("ab")


def test_several_draws_have_a_state_each(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[str]:
        async with engine.context() as context:
            several = context.fill([5, 6]).generate(
                hw.Multinomial(seed=1),
                max_tokens=8,
                num_return_sequences=3,
                stop_only=True,
                mirostat=2,
                mirostat_tau=6.0,
            )
            return await several.texts()

    first = engine.run(program)
    assert first == engine.run(program)
    assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dry_base": 2.0}, "without dry_multiplier"),
        ({"xtc_threshold": 0.2}, "without xtc_probability"),
        ({"mirostat": 3}, r"in \[0, 2\]"),
        ({"mirostat": 2, "temperature": 0.0}, "above 0"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": [""]}, "1 to 40 characters"),
        ({"xtc_probability": 0.5, "num_beams": 2}, "num_beams cannot be given"),
        ({"xtc_probability": 0.5, "speculate": hw.PromptLookup()}, "speculate cannot be given"),
    ],
)
def test_what_cannot_be_is_refused(engine: hw.Engine, options: dict[str, Any], message: str) -> None:
    with engine.context().fill([1]) as context, pytest.raises(hw.HeadwayError, match=message):
        context.generate(**{"do_sample": True, **options} if options.get("temperature") != 0 else options)


def test_a_switch_that_is_off_takes_the_rest_with_it(engine: hw.Engine) -> None:
    plain = written(engine, hw.Multinomial(seed=2))
    assert (
        written(engine, hw.Multinomial(seed=2), dry_multiplier=0.0, dry_base=2.0, mirostat=0, mirostat_tau=3.0) == plain
    )
