"""Generations under a grammar: a pass ahead, cuts, forks, cancellation, ends; and bad ones that disturb nobody."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest

import headway as hw
from headway.program.constraints.constraint import COMPILERS, GrammarMatcher, _compilers
from headway.testing import ScriptedRunner, stepping
from support.schemas import array, obj

LONG = hw.Grammar.regex("(?s).{1,3000}")
LETTER = hw.Grammar.json_schema(
    obj({"to": {"enum": ["Ann", "Bob"]}, "body": {"type": "string", "minLength": 200}, "urgent": {"type": "boolean"}})
)
NUMBERS = hw.Grammar.json_schema(array({"type": "integer", "minimum": 0, "maximum": 999}, 3, 40))


@pytest.fixture(scope="module")
def words(smollm2_path: Path) -> Iterator[hw.Engine]:
    """A scripted model with SmolLM2's vocabulary: it draws evenly from what a mask allows, at no cost."""
    with hw.Engine(smollm2_path, runner=ScriptedRunner(49152, 16), pages=400, threads=1) as made:
        yield made


def started(engine: hw.Engine, grammar: hw.Grammar, seed: int = 1, **options: Any) -> hw.Generation:
    context = engine.context().fill(f"A text {seed}:")
    return context.generate(hw.Multinomial(seed=seed), max_tokens=80, constrain=grammar, **options)


async def by_hand(generation: hw.Generation) -> tuple[list[int], str | None]:
    """The whole generation in steps that are never a pass ahead."""
    while generation.finish is None:
        try:
            prepared = await generation.prepare()
        except hw.Closed:
            break
        if forced := generation.forced():
            generation.accept(forced)
        else:
            await prepared.take()
    return await generation.tokens(), generation.finish


GRAMMARS = pytest.mark.parametrize("grammar", [LONG, LETTER, NUMBERS], ids=["text", "letter", "numbers"])


@GRAMMARS
@pytest.mark.parametrize("stop", [(), ("e",)], ids=["no stop", "stop"])
def test_a_pass_ahead_changes_no_token(words: hw.Engine, grammar: hw.Grammar, stop: tuple[str, ...]) -> None:
    async def program(engine: hw.Engine) -> None:
        for seed in range(4):
            expected = await by_hand(started(engine, grammar, seed, stop=stop))
            generation = started(engine, grammar, seed, stop=stop)
            assert (await generation.tokens(), generation.finish) == expected

    words.run(program)
    assert words.stats().pages_held == 0


def test_a_grammar_that_leaves_much_open_is_followed_a_pass_ahead(words: hw.Engine) -> None:
    async def ahead(grammar: hw.Grammar) -> list[bool]:
        generation = started(words, grammar)
        return [generation.context._retract is not None async for _ in generation]

    text, numbers = (words.run(lambda _, g=g: ahead(g)) for g in (LONG, NUMBERS))
    assert text[20:60] == [True] * 40
    assert True not in numbers


def test_masks_are_not_kept_when_they_have_served(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[tuple[int, int]]:
        generation, found = started(engine, LONG), []
        async for _ in generation:
            if (cursor := generation._ahead._cursor) is not None:
                found.append((cursor.tokens, len(cursor._masks)))
        return found

    found = words.run(program)
    assert max(tokens for tokens, _ in found) > 50
    assert all(kept <= 3 for _, kept in found)


@GRAMMARS
def test_cuts_forks_and_pauses_change_no_token(words: hw.Engine, grammar: hw.Grammar) -> None:
    async def program(engine: hw.Engine) -> None:
        rng = np.random.default_rng(3)
        expected = await started(engine, grammar).tokens()
        generation = started(engine, grammar)
        left = 40
        while generation.finish is None and left:
            left -= 1
            for _ in range(int(rng.integers(1, 8))):
                async for _ in generation:
                    break
            if generation.finish is not None:
                break
            match int(rng.integers(3)):
                case 0:
                    generation.context.truncate(int(rng.integers(min(5, 1 + len(generation.generated)))))
                case 1:
                    generation = generation.fork()
                case 2:
                    await generation.context.flush()
            have = list(generation.generated)
            assert have == expected[: len(have)]
        assert await generation.tokens() == expected

    words.run(program)


def test_a_step_cancelled_when_its_token_was_drawn_is_taken_again(words: hw.Engine) -> None:
    exact = hw.Grammar.regex("(?s).{250,260}")  # where a token that was counted twice would show

    async def program(engine: hw.Engine) -> int:
        expected = await started(engine, exact).tokens()
        generation = started(engine, exact)
        generation.accept([])  # compiles the grammar
        ahead = turn = 0
        with stepping(engine) as step:
            while generation.finish is None:
                turn += 1
                task = asyncio.ensure_future(anext(generation))
                for _ in range(5):  # it has submitted its passes
                    await asyncio.sleep(0)
                ahead += any(job.decode is not None for job in engine._loop.jobs())
                step()  # the token is drawn, and the mask after it computed, before anybody has heard of it
                if turn % 3 == 0:
                    task.cancel()
                await asyncio.wait([task])
                assert task.cancelled() is (turn % 3 == 0)
                assert generation.generated == tuple(expected[: len(generation.generated)])
        assert await generation.tokens() == expected
        return ahead

    assert words.run(program) > 10
    assert words.stats().pages_held == 0


def test_text_follows_a_cut_and_the_grammar_takes_another_way(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        encode = engine.tokenizer.encode
        async with engine.context().fill("x") as context:
            generation = context.generate(hw.Argmax(), constrain=hw.Grammar.regex("(red|green) (apple|pear)s"))
            generation.accept(encode("red apple"))
            context.truncate(len(encode(" apple")))
            with pytest.raises(hw.InvalidInput, match="not allowed"):
                generation.accept(encode("green"))
            step = generation.accept(encode(" pear"))
            assert (step.text, step.retracted) == (" pear", len(" apple"))
            rest = [step async for step in generation]
            assert "".join(step.text for step in rest) == "s"
            assert generation.finish == "constraint"
            assert await generation.text() == "red pears"

    words.run(program)


def test_it_ends_without_a_pass_where_the_grammar_can_only_end(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill("x") as context:
            passes = engine.stats().passes
            for choices, text in ((["only this one"], "only this one"), ([""], "")):
                generation = context.generate(hw.Argmax(), constrain=hw.Grammar.choices(choices))
                assert await generation.text() == text
                assert generation.finish == "constraint"
            assert engine.stats().passes == passes

    words.run(program)


def test_a_schema_is_taken_as_long_as_nothing_was_generated(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill("x") as context:
            generation = context.generate(hw.Argmax(), max_tokens=40)
            assert generation.generated == ()
            generation.fork().context.release()
            assert await generation.json({"enum": [17]}) == 17
            with pytest.raises(hw.InvalidInput, match="before the first step"):
                await generation.json({"enum": [17]})

    words.run(program)


def test_a_grammar_that_ends_before_the_minimum_ends_a_pass_ahead_too(words: hw.Engine) -> None:
    grammar = hw.Grammar.regex("(?s).{60,100}")

    async def program(engine: hw.Engine) -> None:
        expected = await by_hand(started(engine, grammar, min_tokens=70))
        generation = started(engine, grammar, min_tokens=70)
        ahead = [generation.context._retract is not None async for _ in generation]
        assert any(ahead)
        assert generation.finish == "constraint"
        assert (await generation.tokens(), generation.finish) == expected

    words.run(program)
    assert words.stats().pages_held == 0


def test_what_waits_in_other_threads_holds_no_grammar_up(words: hw.Engine) -> None:
    held = threading.Event()

    async def program(engine: hw.Engine) -> None:
        loop, crowd = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        loop.set_default_executor(crowd)
        compiling = [crowd.submit(held.wait)]
        new = started(engine, hw.Grammar.regex("(?s).{3,40} new"))
        try:
            assert await asyncio.wait_for(
                new.tokens(), 60
            )  # it does not wait for what a program does in its own threads
            compiling += [_compilers().submit(held.wait) for _ in range(COMPILERS)]
            again = started(engine, hw.Grammar.regex("(?s).{3,40} new"))
            assert await asyncio.wait_for(again.tokens(), 60) == await new.tokens()  # nor for others' grammars
            later = asyncio.ensure_future(started(engine, hw.Grammar.regex("(?s).{3,40} newer")).tokens())
            await asyncio.sleep(0.01)
            assert not later.done()
        finally:
            held.set()
        assert await later

    words.run(program)
    assert words.stats().pages_held == 0


def test_forced_tokens_are_fed_in_one_pass(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill("x") as context:
            before = engine.stats()
            pattern = "(yes|no), and then a rather long sentence that nobody can change(!|[?])"
            generation = context.generate(hw.Argmax(), constrain=hw.Grammar.regex(pattern))
            assert re.fullmatch(pattern, await generation.text())
            drawn = engine.stats().passes - before.passes
            assert len(generation.generated) > 10
            assert drawn <= 5

    words.run(program)


# -- what cannot be used -----------------------------------------------------------------------------------------------

EXPLODING = hw.Grammar.lark("start: a{1,300}\na: b{1,300}\nb: c{1,300}\nc: /[xyz]/{1,300} | c c")
BAD = {
    "nothing": lambda: hw.Grammar.json_schema(False),
    "empty choices": lambda: hw.Grammar.choices([]),
    "no text": lambda: hw.Grammar.regex(r"[^\s\S]"),
    "too many states": lambda: hw.Grammar.regex("((a{1,100}){1,100}){1,100}"),
    "too deep": lambda: hw.Grammar.json_schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)),
    "exploding": lambda: EXPLODING,
    "no end": lambda: hw.Grammar.json_schema(obj({"a": {"$ref": "#"}})),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_a_bad_grammar_leaves_nothing_behind_and_disturbs_nobody(words: hw.Engine, make: Any) -> None:
    async def bad(engine: hw.Engine) -> None:
        async with engine.context().fill("A bad one:") as context:
            with pytest.raises(hw.InvalidInput):
                await context.generate(hw.Multinomial(seed=2), max_tokens=400, constrain=make()).tokens()
            forward = context.forward()  # the context is idle and usable
            handle = forward.sample([-1], hw.Argmax())
            assert (await forward.execute()).token(handle) >= 0

    async def program(engine: hw.Engine) -> None:
        alone = await started(engine, LETTER, 9).tokens()
        neighbor = asyncio.create_task(started(engine, LETTER, 9).tokens())
        await bad(engine)
        assert await neighbor == alone

    words.run(program)
    assert words.stats().pages_held == 0


def test_a_document_that_max_tokens_cut_goes_on_to_a_valid_end(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        schema = obj(
            {
                "kind": {"enum": ["circle", "square"]},
                "sizes": array({"type": "integer", "maximum": 9, "minimum": 0}, 2, 3),
            }
        )
        async with engine.context().fill("x") as context:
            generation = context.generate(
                hw.Multinomial(seed=3), max_tokens=4, constrain=hw.Grammar.json_schema(schema, compact=True)
            )
            first = await generation.text()
            assert generation.finish == "length"
            with pytest.raises(hw.InvalidInput, match=r"cut off by max_tokens: .*raise max_tokens$"):
                await generation.json()
            whole = json.loads(await generation.resume(max_tokens=100).text())
            assert json.dumps(whole, separators=(",", ":")).startswith(first)
            jsonschema.validate(whole, schema)

    words.run(program)


@pytest.mark.parametrize("more", [{}, {"probe": hw.Logits()}])
def test_a_dead_end_is_said_again_to_whoever_asks_again(smollm2: hw.Engine, more: dict[str, Any]) -> None:
    """Behind the letter t only a special token may come, which no text can write."""
    grammar = hw.Grammar.lark('start: /[^t]*/ "t" <|im_end|>')

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx:
            generation = ctx.fill("A:").generate(hw.Multinomial(seed=1), max_tokens=300, constrain=grammar, **more)
            with pytest.raises(hw.InvalidInput, match="allows nothing"):
                async for _ in generation:
                    pass
            with pytest.raises(hw.InvalidInput, match="allows nothing"):
                await anext(generation)
            assert ctx.tokens[-len(generation.generated) :] == generation.generated

    smollm2.run(program)


@pytest.mark.parametrize("grammar", [hw.Grammar.regex("(?s).{2000,3000}"), LETTER], ids=["text", "letter"])
@pytest.mark.parametrize("limit", [1, 2, 9, 30])
@pytest.mark.parametrize("probe", [None, hw.Logits()], ids=["followed", "step by step"])
def test_no_mask_is_computed_after_the_last_token_of_a_text_that_is_cut(
    words: hw.Engine, grammar: hw.Grammar, limit: int, probe: hw.Probe | None
) -> None:
    """The text is not complete, so it cannot have ended; and nothing is drawn any more."""

    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill("A text:") as context:
            generation = context.generate(hw.Multinomial(seed=1), max_tokens=limit, constrain=grammar, probe=probe)
            await generation.tokens()
            constraint = generation._transcript.constraint
            assert isinstance(constraint, GrammarMatcher)
            assert (generation.finish, constraint.may_end) == ("length", False)
            assert constraint._mask is None
            more = await generation.resume(3).tokens()
        async with engine.context().fill("A text:") as context:
            whole = context.generate(hw.Multinomial(seed=1), max_tokens=limit + 3, constrain=grammar, probe=probe)
            assert await whole.tokens() == more

    words.run(program)


class Engine(pydantic.BaseModel):
    maker: Literal["Rolls", "Saab"]
    power: Annotated[int, pydantic.Field(ge=0, le=9)]


class Car(pydantic.BaseModel):
    engine: Engine
    spare: Engine | None = None
    doors: list[Annotated[int, pydantic.Field(ge=0, le=5)]] = pydantic.Field(max_length=2)
    notes: dict[str, Literal["a", "b"]]


def test_a_pydantic_class_means_its_own_fields_only_nested_ones_too() -> None:
    schema = json.loads(hw.Grammar.json_schema(Car).text)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Engine"]["additionalProperties"] is False
    assert schema["properties"]["notes"]["additionalProperties"] != False  # noqa: E712 - a dict takes any name

    class Open(pydantic.BaseModel, extra="allow"):
        properties: int  # a name that is a keyword too

    assert json.loads(hw.Grammar.json_schema(Open).text)["additionalProperties"] is not False


def test_a_pydantic_class_gives_an_object_back(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        for seed in range(5):
            async with engine.context().fill("x") as context:
                generation = context.generate(hw.Multinomial(seed=seed), max_tokens=400)
                assert isinstance(await generation.json(Engine), Engine)
        for options in ({"no_repeat_ngram_size": 40}, {"num_return_sequences": 2}):
            async with engine.context().fill("x") as context:
                assert isinstance(
                    await context.generate(hw.Multinomial(seed=1), max_tokens=400, **options).json(Engine), Engine
                )

    words.run(program)


def test_a_class_without_a_schema_and_an_object_that_its_validator_refuses_are_our_errors(words: hw.Engine) -> None:
    class Odd(pydantic.BaseModel):
        call: Callable[[], int]

    class Never(pydantic.BaseModel):
        kind: Literal["a"]

        @pydantic.field_validator("kind")
        @classmethod
        def refuse(cls, kind: str) -> str:
            raise ValueError(f"not {kind}")

    with pytest.raises(hw.InvalidInput, match="Odd has no JSON schema"):
        hw.Grammar.json_schema(Odd)

    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill("x") as context:
            with pytest.raises(hw.InvalidInput, match=r"does not fit the schema.*not a") as refused:
                await context.generate(hw.Argmax(), max_tokens=400).json(Never)
            assert "constrain" not in str(refused.value)

    words.run(program)
