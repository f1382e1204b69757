"""Several sequences of one context: beams and draws through ctx.generate, their pages, seeds, contexts and endings."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.base.errors import TokenBudgetExceeded
from headway.program.generation.sequences.beams import beam_search
from headway.program.generation.sequences.sequences import derived_seed
from headway.testing import random_model
from support.checks import random_tokens

V = 97
PROMPT = random_tokens(V, 35, 3)


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=128, threads=1) as made:
        yield made


async def tokens_of(engine: hw.Engine, prompt: list[int], sampler: hw.Sampler, count: int) -> list[int]:
    async with engine.context() as context:
        return await context.fill(prompt).generate(sampler, max_tokens=count).tokens()


def assert_alike(found: list[hw.Continuation], expected: list[hw.Continuation]) -> None:
    """The same but for the rounding of scores: pages that were cached are not computed in the same batches."""
    assert [replace(one, score=0.0) for one in found] == [replace(one, score=0.0) for one in expected]
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], rel=1e-4)


# -- beams ---------------------------------------------------------------------------------------------------------


def test_generate_with_beams_is_a_beam_search_and_the_best_continues(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            context.fill(PROMPT)
            options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.4}
            expected = await beam_search(context, max_tokens=12, stop_ids=[3, 4, 5], **options)
            found = context.generate(max_tokens=12, stop=[3, 4, 5], **options)
            assert isinstance(found, hw.Generations)
            assert list(context.tokens) == PROMPT
            assert_alike(await found.sequences(), expected)
            assert context.tokens == (*PROMPT, *expected[0].tokens)
            assert (await found.tokens(), found.finish) == (list(expected[0].tokens), expected[0].finish)
            assert found.generated == expected[0].tokens
            (step,) = [step async for step in found]
            assert (step.tokens, step.finish) == (expected[0].tokens, expected[0].finish)
            assert [one.text for one in await found.sequences()] == [""] * 3  # the model has no tokenizer

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_one_beam_is_the_plain_way(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            found = context.fill(PROMPT).generate(num_beams=1, length_penalty=2.0, max_tokens=9)
            (only,) = await found.sequences()
            assert math.isnan(only.score)
            assert (only.seed, only.finish) == (None, "length")
            assert context.tokens == (*PROMPT, *only.tokens)
            return list(only.tokens)

    assert engine.run(program) == engine.run(tokens_of, PROMPT, hw.Argmax(), 9)


@pytest.mark.parametrize("sampler", [hw.TopKTopP(9, 0.9, temperature=1.5, seed=5), hw.Sampling(seed=5, top_k=9)])
def test_a_sampler_makes_it_a_sampled_search(engine: hw.Engine, sampler: hw.TopKTopP | hw.Sampling) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            context.fill(PROMPT)
            p = sampler.p if isinstance(sampler, hw.TopKTopP) else sampler.top_p
            parameters: dict[str, Any] = {"temperature": sampler.temperature, "top_k": 9, "top_p": p, "seed": 5}
            expected = await beam_search(context, num_beams=3, max_tokens=8, do_sample=True, **parameters)
            found = context.generate(sampler, num_beams=3, max_tokens=8)
            assert_alike(await found.sequences(), expected)
            assert expected[0].seed == found.seed == 5

    engine.run(program)


def test_beams_hold_the_prompt_once(engine: hw.Engine) -> None:
    prompt = random_tokens(V, 160, 1)  # 10 pages

    async def program(engine: hw.Engine) -> int:
        async with engine.context() as context:
            await context.fill(prompt).generate(num_beams=8, max_tokens=20).sequences()
            return engine.stats().pages_held

    with engine.events() as stream:
        assert engine.run(program) == 12  # the best one's
        assert max(step.pages_held for step in iter(stream.poll, None)) <= 10 + 8 * 2


def test_the_real_model_searches_after_a_chat(smollm2: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as plain, engine.context() as cued:
            found = plain.user("Name a colour.").generate(num_beams=3, num_return_sequences=2, max_tokens=6)
            await cued.user("Name a colour.").cue().flush()
            other = await beam_search(cued, num_beams=3, num_return_sequences=2, max_tokens=6)
            assert_alike(await found.sequences(), other)
            first, second = await found.texts()
            assert first == engine.tokenizer.decode(other[0].tokens)
            assert first != second
            plain.seal()
            assert plain.messages[-1] == {"role": "assistant", "content": first}

    smollm2.run(program)


# -- draws ---------------------------------------------------------------------------------------------------------


def test_draws_are_those_of_their_seeds(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[hw.Continuation]:
        async with engine.context() as context:
            found = context.fill(PROMPT).generate(hw.Multinomial(2.0, seed=7), num_return_sequences=4, max_tokens=9)
            sequences = await found.sequences()
            assert context.tokens == (*PROMPT, *sequences[0].tokens)
            return sequences

    found = engine.run(program)
    assert [one.seed for one in found] == [derived_seed(7, i) for i in range(4)]
    assert found[0].seed == 7
    assert len({one.tokens for one in found}) == 4
    for one in found:
        assert list(one.tokens) == engine.run(tokens_of, PROMPT, hw.Multinomial(2.0, seed=one.seed), 9)
        assert math.isnan(one.score)
    assert engine.stats().pages_held == 0


def test_derived_seeds_differ_and_are_seeds() -> None:
    seeds = {derived_seed(seed, i) for seed in (0, 1, 7, 2**64 - 1) for i in range(500)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_unseeded_draws_differ_from_call_to_call(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> set[tuple[int, ...]]:
        async with engine.context() as context:
            found = context.fill(PROMPT).generate(do_sample=True, num_return_sequences=3, max_tokens=9)
            return {one.tokens for one in await found.sequences()}

    assert len(engine.run(program) | engine.run(program)) == 6


def test_draws_compute_the_prompt_once_and_share_its_pages(engine: hw.Engine) -> None:
    prompt = random_tokens(V, 160, 9)  # 10 pages

    async def program(engine: hw.Engine) -> tuple[int, int]:
        async with engine.context(salt="alone") as context:
            before = engine.stats().tokens
            found = context.fill(prompt).generate(hw.Multinomial(seed=1), num_return_sequences=6, max_tokens=5)
            await found.sequences()
            return engine.stats().tokens - before, engine.stats().pages_held

    with engine.events() as stream:
        computed, held = engine.run(program)
        assert computed <= 160 + 6 * 5
        assert held == 11
        assert max(step.pages_held for step in iter(stream.poll, None)) <= 10 + 6


def test_probes_stops_and_constraints_go_with_draws(engine: hw.Engine) -> None:
    class Even:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def mask(self) -> np.ndarray:
            return np.array([0x55555555] * 3 + [0x1], np.uint32)

        def accept(self, token: int) -> None:
            self.seen.append(token)

        def rollback(self, n: int) -> None:
            del self.seen[len(self.seen) - n :]

        def copy(self) -> Even:
            return Even()

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            rule: Any = Even()
            found = context.fill(PROMPT).generate(
                hw.Multinomial(2.0, seed=3),
                num_return_sequences=3,
                max_tokens=40,
                stop=[2, 4, 6, 8],
                constrain=rule,
                probe=hw.Entropy(),
                no_repeat_ngram_size=1,
            )
            for one in await found.sequences():
                assert all(token % 2 == 0 for token in one.tokens)
                assert len({*one.tokens}) == len(one.tokens)
                assert not {*one.tokens} & {*PROMPT, 2, 4, 6, 8}
                assert len(one.tokens) <= len(one.probes) <= len(one.tokens) + 1
            assert tuple(rule.seen) == found.generated

    engine.run(program)


def test_a_constraint_that_cannot_be_copied_is_refused(engine: hw.Engine) -> None:
    class Anything:
        def mask(self) -> None:
            return None

        def accept(self, token: int) -> None:
            pass

        def rollback(self, n: int) -> None:
            pass

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            rule: Any = Anything()
            found = context.fill(PROMPT).generate(hw.Multinomial(), num_return_sequences=2, constrain=rule)
            with pytest.raises(hw.Unsupported, match=r"Anything has no copy\(\), so two texts cannot follow it"):
                await found.sequences()
            assert list(context.tokens) == PROMPT

    engine.run(program)


@pytest.mark.slow
def test_json_of_draws_follows_a_schema(smollm2: hw.Engine) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    schema |= {"additionalProperties": False}

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            found = context.fill("A number:").generate(hw.Multinomial(seed=2), num_return_sequences=2, max_tokens=300)
            first = await found.json(schema)
            assert set(first) == {"n"}
            assert [set(json.loads(text)) for text in await found.texts()] == [{"n"}] * 2
            with pytest.raises(hw.InvalidInput, match="before the first step"):
                await found.json(schema)
            beams = context.fill("\nAnother number:").generate(num_beams=2, max_tokens=24)
            assert set(await beams.json(schema)) == {"n"}
            assert beams.finish == "constraint"

    smollm2.run(program)


# -- contexts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}])
def test_every_sequence_can_go_on(engine: hw.Engine, options: dict[str, Any]) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context(seed=4) as context:
            found = context.fill(PROMPT).generate(max_tokens=20, num_return_sequences=3, **options)
            contexts = await found.contexts()
            assert contexts[0] is context
            for one, each in zip(await found.sequences(), contexts, strict=True):
                assert each.tokens == (*PROMPT, *one.tokens)
                follow = await each.generate(hw.Argmax(), max_tokens=4).tokens()
                assert follow == await tokens_of(engine, [*PROMPT, *one.tokens], hw.Argmax(), 4)
            with pytest.raises(hw.InvalidInput, match="the context has changed"):
                await found.contexts()
            for each in contexts[1:]:
                each.release()

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_contexts_of_masked_sequences_are_refused(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            found = context.fill(PROMPT).generate(
                num_beams=2, num_return_sequences=2, max_tokens=4, attention_mask=hw.Mask.window(8)
            )
            with pytest.raises(hw.Unsupported, match="under an attention_mask"):
                await found.contexts()

    engine.run(program)


def test_a_mask_binds_draws_as_it_binds_one(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        mask = hw.Mask.window(6)
        async with engine.context() as context, engine.context() as alone:
            sampler = hw.Multinomial(seed=8)
            found = context.fill(PROMPT).generate(sampler, max_tokens=9, num_return_sequences=2, attention_mask=mask)
            first, second = await found.sequences()
            one = await alone.fill(PROMPT).generate(sampler, max_tokens=9, attention_mask=mask).tokens()
            assert list(first.tokens) == one
            assert second.tokens != first.tokens

    engine.run(program)


# -- by hand, and what is left behind ------------------------------------------------------------------------------


def test_a_search_is_not_steered_by_hand_and_can_be_forked_and_reseeded(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            found = context.fill(PROMPT).generate(hw.Multinomial(), num_return_sequences=2, max_tokens=5)
            for verb in (lambda: found.accept([1]), found.forced, found.resume):
                with pytest.raises(hw.Unsupported, match="steers one sequence"):
                    verb()
            with pytest.raises(hw.Unsupported, match=r"prepare\(\) steers one sequence"):
                await found.prepare()
            twin = found.fork(seed=5)
            async with twin.context:
                assert isinstance(twin, hw.Generations)
                seeded = await twin.sequences()
                assert [one.seed for one in seeded] == [5, derived_seed(5, 1)]
            assert await found.reseed(5).sequences() == seeded

    engine.run(program)
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}])
@pytest.mark.parametrize("moment", [0, 1, 2, 5])
def test_cancelling_leaves_the_prompt_and_no_pages(engine: hw.Engine, options: dict[str, Any], moment: int) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            await context.fill(PROMPT).flush()
            held, start = engine.stats().pages_held, engine.stats().steps
            found: Any = context.generate(max_tokens=900, **options)
            task = asyncio.create_task(found.sequences())
            while engine.stats().steps < start + moment:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await context.forward().input([1]).execute()  # it is not busy
            assert list(context.tokens) == [*PROMPT, 1]
            assert (engine.stats().pages_held, engine.stats().queued) == (held, 0)

    engine.run(program)
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}])
def test_an_error_leaves_the_prompt_and_no_pages(engine: hw.Engine, options: dict[str, Any]) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context(token_budget=60) as context:
            found: Any = context.fill(PROMPT).generate(max_tokens=200, **options)
            with pytest.raises(TokenBudgetExceeded):
                await found.sequences()
            assert list(context.tokens) == PROMPT

    engine.run(program)
    assert (engine.stats().pages_held, engine.stats().queued) == (0, 0)
