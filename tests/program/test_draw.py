"""`hw.draw` and biases: the token of a pass from its logits, on every runner; and cutoffs as transformers has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

import headway as hw
from headway.kernels.reference.sampling import sampling_distribution
from headway.testing import random_model

V = 97


@pytest.fixture(scope="module", params=["off", "auto"])
def engine(request: pytest.FixtureRequest) -> Iterator[hw.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", request.param)
        with hw.Engine(random_model(vocab_size=V), threads=1, pages=64) as made:
            yield made


def random_sampler(rng: np.random.Generator) -> hw.Sampling:
    """Any mix of filters, penalties and biases, each off in half of the cases."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    few = {int(t): float(b) for t, b in zip(rng.integers(0, V, 3), rng.normal(0, 3, 3), strict=True)}
    bias = [None, few, rng.normal(0, 2, V)][rng.integers(3)]
    return hw.Sampling(
        temperature=maybe(float(rng.uniform(0.3, 2)), float(rng.integers(2))),
        top_k=maybe(int(rng.integers(1, V)), 0),
        top_p=maybe(float(rng.uniform(0.1, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.2)), 0.0),
        typical_p=maybe(float(rng.uniform(0.3, 1)), 1.0),
        epsilon_cutoff=maybe(float(rng.uniform(0, 0.05)), 0.0),
        eta_cutoff=maybe(float(rng.uniform(0, 0.1)), 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        frequency_penalty=maybe(0.4, 0.0),
        logit_bias=bias,
        seed=int(rng.integers(1 << 40)),
    )


def test_a_draw_from_a_rows_logits_is_the_token_that_the_pass_draws(engine: hw.Engine) -> None:
    rng = np.random.default_rng(0)

    async def program(engine: hw.Engine) -> None:
        for _ in range(60):
            async with engine.context() as ctx:
                prompt = rng.integers(0, V, rng.integers(1, 20)).tolist()
                rows = rng.integers(0, V, rng.integers(1, 4)).tolist()
                ctx.fill(prompt)
                forward, how = ctx.forward().input(rows), random_sampler(rng)
                twice = forward.sample([-1, -1], how, history=prompt, generated=prompt[:5])
                logits = forward.probe(-1, hw.Logits())
                out = await forward.execute()
                drawn = [
                    hw.draw(
                        out.logits(logits),
                        how,
                        position=ctx.next_position - 1,
                        ordinal=i,
                        history=prompt,
                        generated=prompt[:5],
                    )
                    for i in range(2)
                ]
                assert drawn == out.tokens(twice), how

    engine.run(program)


def test_a_generation_can_be_drawn_again_from_its_logits(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        how = hw.Sampling(temperature=1.1, top_p=0.9, repetition_penalty=1.2)
        async with engine.context() as ctx, engine.context() as twin:
            tokens = await ctx.fill([1, 2, 3]).generate(how, max_tokens=12, stop_only=True).tokens()
            gen = twin.fill([1, 2, 3]).generate(how, max_tokens=12, stop_only=True, probe=hw.Logits()).reseed(11)
            again = []
            async for step in gen:
                at = twin.next_position - 2  # of the row that was read, before the token that it gave
                again.append(
                    hw.draw(step.probes[0], how, seed=11, position=at, history=[1, 2, 3, *again], generated=again)
                )
            assert again == list(gen.generated)
            assert again != tokens

    engine.run(program)


@pytest.mark.parametrize("array", [np.float16, np.float32, np.float64, torch.float32, torch.bfloat16, list])
def test_logits_come_in_any_array(array: Any) -> None:
    row = np.linspace(-2, 2, 20).round(1)
    if array is list:
        given: Any = row.tolist()
    elif isinstance(array, torch.dtype):
        given = torch.tensor(row, dtype=array)
    else:
        given = row.astype(array)
    assert hw.draw(given, hw.Argmax()) == 19
    assert hw.draw(given, hw.TopK(1), seed=3) == 19


def test_what_cannot_be_drawn_from_is_refused() -> None:
    row = np.zeros(8)
    unusable: list[tuple[Any, str]] = [
        (np.zeros((2, 4)), "shape"),
        (np.zeros(0), "shape"),
        (np.array([0.0, np.nan]), "not a number at token 1"),
        (np.full(4, -np.inf), "-inf for every token"),
        (np.array(["a"]), "numbers"),
        (np.ones(3, bool), "numbers"),
        ([[1], [1, 2]], "numpy array"),
    ]
    for bad, says in unusable:
        with pytest.raises(hw.HeadwayError, match=says):
            hw.draw(bad, hw.Argmax())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"position": -1}, "position"),
        ({"ordinal": "x"}, "ordinal"),
        ({"history": [8]}, "history"),
        ({"generated": [-1]}, "generated"),
    ]
    for options, says in wrong:
        with pytest.raises(hw.HeadwayError, match=says):
            hw.draw(row, hw.TopP(0.9), **options)
    with pytest.raises(hw.WrongType, match="sampler"):
        hw.draw(row, "greedy")  # type: ignore[arg-type]
    with pytest.raises(hw.InvalidToken, match="logit_bias"):
        hw.draw(row, hw.Sampling(logit_bias={8: 1.0}))
    with pytest.raises(hw.InvalidInput, match=r"shape \(9,\)"):
        hw.draw(row, hw.Sampling(logit_bias=np.zeros(9)))


# -- biases --------------------------------------------------------------------------------------------------------


def test_biases_add_up_before_everything_else(engine: hw.Engine) -> None:
    rng = np.random.default_rng(1)

    async def program(engine: hw.Engine) -> None:
        for _ in range(20):
            async with engine.context() as ctx:
                one, other, own = rng.normal(0, 2, (3, V))
                one[rng.integers(0, V, 30)] = -np.inf
                how = hw.Sampling(0.8, top_k=40, repetition_penalty=1.4, logit_bias=own, seed=int(rng.integers(99)))
                forward = ctx.forward().input([1, 2, 3]).bias(one).bias(other, rows=[-1, 0])
                drawn, greedy = forward.sample([0, 1, 2], how), forward.sample([0, 1, 2], hw.Argmax())
                forward.mask(forbid=[5])
                raw = [forward.probe(i, hw.Logits()) for i in range(3)]
                out = await forward.execute()
                for i, (token, best) in enumerate(zip(out.tokens(drawn), out.tokens(greedy), strict=True)):
                    logits = out.logits(raw[i]).astype(np.float64) + one + (other if i != 1 else 0)
                    logits[5] = -np.inf
                    assert best == np.argmax(logits)
                    assert token == hw.draw(logits, how, position=i, history=[1, 2, 3][: i + 1])

    engine.run(program)


def test_a_bias_of_minus_infinity_is_never_drawn_and_leaves_other_rows_alone(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx, engine.context() as mate:
            only = np.full(V, -np.inf)
            only[[7, 8]] = 0
            biased = ctx.fill([1]).generate(hw.Sampling(logit_bias=only, seed=1), max_tokens=20, stop_only=True)
            plain = mate.fill([1]).generate(hw.Sampling(seed=1), max_tokens=20, stop_only=True)
            assert {*await biased.tokens()} == {7, 8}
            among = await plain.tokens()
        async with engine.context() as ctx:
            assert await ctx.fill([1]).generate(hw.Sampling(seed=1), max_tokens=20, stop_only=True).tokens() == among

    engine.run(program)


def test_bad_biases_are_refused_and_change_nothing(engine: hw.Engine) -> None:
    with engine.context() as ctx:
        for bad, says in (
            (np.zeros(V - 1), rf"shape \({V - 1},\); expected \({V},\)"),
            (np.zeros((1, V)), "shape"),
            (np.full(V, np.nan), "nan at token 0"),
            (np.full(V, np.inf), "inf at token 0"),
            (np.zeros(V, bool), "numbers"),
            ({3: 1.0}, "numbers"),
            ("x", "numbers"),
        ):
            with pytest.raises(hw.HeadwayError, match=says):
                ctx.forward().bias(bad)  # type: ignore[arg-type]
        none = np.full(V, -np.inf)
        none[3] = 0.0
        forward = ctx.forward().input([1]).bias(none).mask(forbid=[3])
        forward.sample([0], hw.Argmax())
        with pytest.raises(hw.InvalidMask, match="-inf for every token"):
            forward.execute()
        forward = ctx.forward().input([1]).bias(np.zeros(V), rows=[1])
        forward.sample([0], hw.Argmax())
        with pytest.raises(hw.OutOfRange, match="row 1"):
            forward.execute()
        with pytest.raises(hw.InvalidInput, match="logit_bias has shape"):
            ctx.forward().input([1]).sample([0], hw.Sampling(logit_bias=np.zeros(3)))
        assert (ctx.seq_len, ctx.pending) == (0, ())


def test_samplers_with_arrays_are_values() -> None:
    one, other = (hw.Sampling(logit_bias=np.arange(4.0)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != hw.Sampling(logit_bias=np.arange(5.0))
    assert "4 tokens" in repr(one)


# -- cutoffs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epsilon_cutoff", "eta_cutoff"])
def test_cutoffs_keep_what_transformers_keeps(name: str) -> None:
    rng = np.random.default_rng(2)
    warper = {"epsilon_cutoff": theirs.EpsilonLogitsWarper, "eta_cutoff": theirs.EtaLogitsWarper}[name]
    for _ in range(200):
        row = torch.tensor(rng.normal(0, rng.uniform(0.1, 5), 50), dtype=torch.float32)
        cutoff = float(10 ** rng.uniform(-4, -0.01))
        scores = warper(cutoff)(torch.zeros(1, 1, dtype=torch.long), row[None].clone())[0]
        kept = (scores > -torch.inf).nonzero().squeeze(1).tolist()
        how = replace(hw.Sampling(), **{name: cutoff})  # type: ignore[arg-type]
        ids, probs = sampling_distribution(row, how)
        assert ids.tolist() == kept
        assert torch.allclose(probs.float(), scores.softmax(0)[kept], atol=1e-6)


def test_both_cutoffs_come_after_the_other_filters_as_in_transformers() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        row = torch.tensor(rng.normal(0, 2, 50), dtype=torch.float32)
        ids = torch.zeros(1, 1, dtype=torch.long)
        chain = theirs.LogitsProcessorList([
            theirs.TemperatureLogitsWarper(0.7), theirs.TopKLogitsWarper(30), theirs.TopPLogitsWarper(0.95),
            theirs.EpsilonLogitsWarper(0.01), theirs.EtaLogitsWarper(0.05),
        ])  # fmt: skip
        scores = chain(ids, row[None].clone())[0]  # type: ignore[arg-type]
        kept = (scores > -torch.inf).nonzero().squeeze(1).tolist()
        how = hw.Sampling(0.7, top_k=30, top_p=0.95, epsilon_cutoff=0.01, eta_cutoff=0.05)
        assert sampling_distribution(row, how)[0].tolist() == kept
