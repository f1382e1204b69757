"""`generate(probe=...)`: one probe or several, of any kind, read at every step as a pass by hand reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.testing import random_model
from support.checks import random_tokens

V = 97
PROMPT = random_tokens(V, 21, 5)
READERS: list[tuple[hw.Probe, Callable[[hw.Output, Any], Any]]] = [
    (hw.Logits(), hw.Output.logits),
    (hw.Distribution(temperature=0.7, k=5), hw.Output.distribution),
    (hw.Logprob(11), hw.Output.logprobs),
    (hw.Logprobs([3, 90]), hw.Output.logprobs),
    (hw.Entropy(), hw.Output.entropy),
    (hw.Ranking(3, ids=[7]), hw.Output.ranking),
    (hw.Hidden(1), hw.Output.hidden),
    (hw.AttentionScores(1, reduce="max"), hw.Output.attention),
    (hw.LogitLens([0, 2], k=4), hw.Output.lens),
]
PROBES = [probe for probe, _ in READERS]


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=128, threads=1) as made:
        yield made


def flat(value: Any) -> list[float]:
    """Every number in a probe's value."""
    if isinstance(value, hw.Ranked):
        return [number for rank in (*value.drawn, *value.ids, *value.best) for number in (rank.id, rank.logprob)]
    if isinstance(value, list | tuple):
        return [number for one in value for number in flat(one)]
    return np.ravel(value).tolist()


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-4, atol=1e-5)


async def by_hand(engine: hw.Engine, tokens: list[int]) -> tuple[Any, ...]:
    """What each probe reads after these tokens, by a pass of its own."""
    async with engine.context() as context:
        forward = context.fill(tokens).forward()
        forward.sample([-1], hw.Argmax())
        handles = [(forward.probe(-1, probe), reader) for probe, reader in READERS]
        out = await forward.execute()
        return tuple(reader(out, handle) for handle, reader in handles)


def test_several_probes_are_read_at_every_step(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            tokens = list(PROMPT)
            async for step in context.fill(PROMPT).generate(hw.Argmax(), max_tokens=5, probe=PROBES):
                (values,) = step.probes
                for ours, theirs in zip(values, await by_hand(engine, tokens), strict=True):
                    assert_equal(ours, theirs)
                tokens += step.tokens
            assert len(tokens) == len(PROMPT) + 5

    engine.run(program)


@pytest.mark.parametrize("number", range(len(PROBES)), ids=[type(probe).__name__ for probe in PROBES])
def test_one_probe_is_read_alone_and_a_list_of_one_in_a_tuple(engine: hw.Engine, number: int) -> None:
    async def program(engine: hw.Engine) -> None:
        expected = (await by_hand(engine, PROMPT))[number]
        for probe in (PROBES[number], [PROBES[number]], iter((PROBES[number],))):
            async with engine.context() as context:
                (step,) = [step async for step in context.fill(PROMPT).generate(max_tokens=1, probe=probe)]
                (value,) = step.probes
                assert_equal(value, expected if probe is PROBES[number] else (expected,))

    engine.run(program)


def test_a_step_by_hand_has_them_too_and_an_empty_list_reads_nothing(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            generation = context.fill(PROMPT).generate(max_tokens=3, probe=(hw.Entropy(), hw.Logits()))
            ((entropy, logits),) = (await (await generation.prepare()).take()).probes
            probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            assert entropy == pytest.approx(-(probs * np.log(probs)).sum(), rel=1e-4)
            assert generation.accept([3]).probes == ()
            nothing = context.generate(max_tokens=2, probe=[])
            assert [step.probes async for step in nothing] == [((),), ((),)]

    engine.run(program)


@pytest.mark.parametrize(
    ("probe", "error", "words"),
    [
        (3, hw.WrongType, "probe is 3 of type int; it must be a probe"),
        ("Entropy", hw.WrongType, "probe is 'Entropy' of type str; it must be a probe"),
        (hw.Argmax(), hw.WrongType, r"probe is Argmax.*; it must be a probe"),
        (hw.Entropy, hw.WrongType, r"probe is <class .*Entropy'> of type type; it must be a probe"),
        ([hw.Entropy(), 3], hw.WrongType, r"probe\[1\]: 3 is not a probe"),
        ([hw.Entropy(), [hw.Entropy()]], hw.WrongType, r"probe\[1\]: \[Entropy.*\] is not a probe"),
        ([hw.Entropy(), hw.Hidden(9)], hw.OutOfRange, "this model has hidden states 0 to 2"),
        (hw.Logprob(V), hw.InvalidToken, "97"),
    ],
)
@pytest.mark.parametrize("several", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_what_cannot_be_read_is_refused_at_once(
    engine: hw.Engine, several: dict[str, Any], probe: Any, error: type[Exception], words: str
) -> None:
    with engine.context() as context:
        context.fill(PROMPT)
        with pytest.raises(error, match=words):
            context.generate(max_tokens=2, probe=probe, **several)
        assert list(context.tokens) == PROMPT
