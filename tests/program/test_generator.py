"""The generator: stops, limits, constraints, and a context that can be looked at and changed between two steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import numpy as np
import pytest

import headway as hw
from headway.testing import scripted_engine, scripted_result

V = 97


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with scripted_engine(pages=200) as made:
        yield made


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        n = len(tokens)
        tokens.append(scripted_result(tokens, range(n), np.tril(np.ones((n, n), bool)), n - 1) % V)
    return tokens[len(prompt) :]


class OnlyEven:
    """A constraint of a user's own: even ids, and it can end after four of them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def mask(self) -> np.ndarray:
        bits = np.zeros((V + 31) // 32 * 32, np.uint8)
        bits[0:V:2] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token % 2 == 0
        self.tokens.append(token)

    def rollback(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]

    @property
    def finished(self) -> bool:
        return len(self.tokens) == 4


async def collect(context: hw.Context, **options: object) -> tuple[list[int], str | None]:
    generation = context.generate(hw.Argmax(), **options)  # type: ignore[arg-type]
    return await generation.tokens(), generation.finish


def test_tokens_are_those_of_single_passes_and_stay_in_the_context(engine: hw.Engine) -> None:
    context = engine.context().fill([1, 2, 3])
    assert engine.run(lambda _: collect(context, max_tokens=20)) == (continued([1, 2, 3], 20), "length")
    assert list(context.tokens) == [1, 2, 3, *continued([1, 2, 3], 20)]
    assert len(context.pending) == 1
    context.release()


def test_a_stop_id_ends_it_and_leaves_the_context(engine: hw.Engine) -> None:
    expected = continued([5], 12)
    stop = expected[7]
    first = expected.index(stop)
    context = engine.context().fill([5])
    assert engine.run(lambda _: collect(context, max_tokens=12, stop=[stop])) == (expected[:first], "stop")
    assert list(context.tokens) == [5, *expected[:first]]
    context.release()


def test_min_tokens_keeps_stops_away(engine: hw.Engine) -> None:
    stop = continued([5], 1)[0]
    context = engine.context().fill([5])
    tokens, _ = engine.run(lambda _: collect(context, max_tokens=9, stop=[stop], min_tokens=6))
    assert len(tokens) >= 6
    assert stop not in tokens
    context.release()


def test_a_context_can_be_looked_at_forked_and_cut_between_steps(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill([9]) as context:
            generation = context.generate(hw.Argmax(), max_tokens=10)
            seen: list[int] = []
            async for step in generation:
                seen += step.tokens
                assert list(context.tokens) == [9, *seen]
                if len(seen) == 4:
                    async with context.fork() as fork:
                        assert await fork.generate(hw.Argmax(), max_tokens=3).tokens() == continued([9, *seen], 3)
                if len(seen) == 6:
                    break
            context.truncate(2)
            context.fill([50])
            assert await context.generate(hw.Argmax(), max_tokens=5).tokens() == continued([9, *seen[:4], 50], 5)

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_a_constraint_of_ones_own_masks_and_ends(engine: hw.Engine) -> None:
    context = engine.context().fill([4])
    rule = OnlyEven()
    tokens, why = engine.run(lambda _: collect(context, max_tokens=30, constrain=rule))
    assert tokens == rule.tokens
    assert len(tokens) == 4
    assert why == "constraint"
    context.release()


def test_cancelling_a_generation_leaves_the_context_between_two_tokens(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        context, taken = engine.context().fill([3]), []

        async def take() -> None:
            async for step in context.generate(hw.Argmax(), max_tokens=10_000):
                taken.append(step)
                await asyncio.sleep(0)

        task = asyncio.create_task(take())
        while len(taken) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        count = len(context.tokens) - 1
        assert 0 < count < 10_000
        assert list(context.tokens) == [3, *continued([3], count)]
        context.release()

    engine.run(program)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4"),
        ({"stop": [""]}, "empty"),
        ({"stop": ["x"] * 2000}, "2000 stops"),
        ({"stop": [V]}, "token ids are 0 to 96"),
    ],
)
def test_bad_options_are_refused(engine: hw.Engine, options: dict[str, object], words: str) -> None:
    with engine.context().fill([1]) as context, pytest.raises(hw.HeadwayError, match=words):
        context.generate(hw.Argmax(), **options)  # type: ignore[arg-type]


def test_real_text_stops_inside_tokens_and_follows_grammars(smollm2: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            context.fill("The capital of France is")
            whole = await context.fork().generate(hw.Argmax(), max_tokens=12).text()
            stop = whole[3:6]
            generation = context.generate(hw.Argmax(), max_tokens=12, stop=stop)
            assert await generation.text() == whole[: whole.index(stop)]
            assert generation.finish == "stop"
            assert stop not in engine.tokenizer.decode(context.tokens)
        async with engine.context() as context:
            context.fill("The capital of France is")
            choice = context.generate(hw.Argmax(), constrain=hw.Grammar.choices([" London", " Paris"]))
            assert await choice.text() == " Paris"
            assert choice.finish == "constraint"
        async with engine.context() as context:
            context.user("Describe Ann, 33 years old.")
            schema = {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
                "required": ["name", "age"],
                "additionalProperties": False,
            }
            found = await context.generate(hw.Multinomial(seed=3), max_tokens=80).json(schema)
            assert set(found) == {"name", "age"}
            assert json.loads(json.dumps(found)) == found

    smollm2.run(program)


def test_what_was_cut_is_not_generated_though_the_program_writes_it_again(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill([1, 2, 3]) as context:
            generation = context.generate(hw.Argmax(), max_tokens=6, stop_only=True)
            async for _ in generation:
                if len(generation.generated) == 4:
                    break
            first = generation.generated
            context.truncate(1).fill([first[-1]])
            assert generation.generated == first[:-1]
            assert len(await generation.tokens()) == 6
            tokens = await generation.tokens()
            context.truncate(2)
            assert await generation.tokens() == tokens[:-2]  # after its end, too

    engine.run(program)
