"""Steering a generation: tokens put in by hand, cuts, writes, forks, steps taken by hand, pauses, masks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.testing import ScriptedRunner, random_model, scripted_engine, stepping
from support.scripted import V, continued, faulty_engine

Program = Callable[[hw.Engine], Awaitable[None]]


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with scripted_engine(pages=200) as made:
        yield made


@pytest.fixture(scope="module")
def words(smollm2_path: Path) -> Iterator[hw.Engine]:
    """A scripted model that writes with SmolLM2's vocabulary: any text, at no cost."""
    with hw.Engine(smollm2_path, runner=ScriptedRunner(49152, 16), pages=200, threads=1) as made:
        yield made


def program(body: Program) -> Callable[..., None]:
    """A test written as a program; it leaves no page behind."""

    @wraps(body)
    def test(engine: hw.Engine) -> None:
        engine.run(body)
        assert engine.stats().pages_held == 0

    return test


def alone(body: Program) -> Callable[[], None]:
    """The same, with an engine of its own, whose steps can be taken by hand: nothing is on its way in it."""

    @wraps(body)
    def test() -> None:
        with scripted_engine(pages=20) as engine:
            engine.run(body)
            assert engine.stats().pages_held == 0

    del test.__wrapped__  # as below
    return test


def told(body: Program) -> Callable[..., None]:
    """The same, with words."""

    @wraps(body)
    def test(words: hw.Engine) -> None:
        words.run(body)
        assert words.stats().pages_held == 0

    # pytest reads the signature of what it is given, not of what is wrapped
    del test.__wrapped__
    return test


class Counted:
    """A constraint that notes what it was told; ids divisible by `divisor`."""

    def __init__(self, divisor: int, tokens: tuple[int, ...] = ()) -> None:
        self.divisor, self.tokens = divisor, list(tokens)

    def mask(self) -> np.ndarray:
        bits = np.zeros((V + 31) // 32 * 32, np.uint8)
        bits[0 : V : self.divisor] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        if token % self.divisor:
            raise hw.InvalidInput(f"{token} is not divisible by {self.divisor}")
        self.tokens.append(token)

    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self.tokens)
        del self.tokens[len(self.tokens) - n :]


class Copied(Counted):
    def copy(self) -> Copied:
        return Copied(self.divisor, tuple(self.tokens))


async def some(generation: hw.Generation, count: int) -> list[int]:
    """The tokens of the next steps, until there are `count`; then the loop is left."""
    found: list[int] = []
    async for step in generation:
        found += step.tokens
        if len(found) >= count:
            break
    return found


# -- tokens put in by hand ---------------------------------------------------------------------------------------------


@program
async def test_accepted_tokens_count_as_drawn_and_what_follows_follows_them(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=8)
        first = await some(generation, 3)
        step = generation.accept([50, 51])
        assert (step.tokens, step.finish) == ((50, 51), None)
        rest = continued([7, *first, 50, 51], 3)
        assert await generation.tokens() == [*first, 50, 51, *rest]
        assert generation.finish == "length"
        assert list(context.tokens) == [7, *first, 50, 51, *rest]


@program
async def test_accept_before_the_first_step_and_up_to_the_last_token(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=3)
        generation.accept([1])
        assert generation.accept([2, 3]).finish == "length"
        assert await generation.tokens() == [1, 2, 3]
        with pytest.raises(hw.Closed, match="resume"):
            generation.accept([4])


@program
async def test_what_cannot_be_accepted_changes_nothing(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        rule = Counted(3)
        generation = context.generate(hw.Argmax(), max_tokens=4, min_tokens=2, stop=[90], constrain=rule)
        generation.accept([3])
        for tokens, says in (
            ([6, 9, 10], "not divisible"),
            ([6, 9, 12, 15], "leaves room for 3"),
            ([90, 3], "1 tokens follow"),
            ([90], "min_tokens"),
            ([V], "token ids are 0 to 96"),
        ):
            with pytest.raises(hw.HeadwayError, match=says):
                generation.accept(tokens)
            assert generation.generated == (3,)
            assert rule.tokens == [3]
            assert list(context.tokens) == [7, 3]
        assert generation.accept([6, 90]) == hw.Step((6,), "", (), "stop")
        assert list(context.tokens) == [7, 3, 6]


@told
async def test_accepted_text_is_shown_and_stops(engine: hw.Engine) -> None:
    encode = engine.tokenizer.encode
    async with engine.context().fill("Once") as context:
        generation = context.generate(hw.Argmax(), max_tokens=100, stop=["END", "again"])
        assert generation.accept(encode(" upon a time E")).text == " upon a time "
        assert generation.accept(encode("verywhere")).text == "Everywhere"
        before = len(context.tokens)
        with pytest.raises(hw.InvalidInput, match="follow it"):
            generation.accept(encode(" again and again"))
        assert len(context.tokens) == before
        step = generation.accept(encode(" never again"))
        assert (step.text, step.finish) == (" never ", "stop")
        assert engine.tokenizer.decode(context.tokens).endswith("Everywhere never")
        assert await generation.text() == " upon a time Everywhere never "


@told
async def test_half_a_character_accepted_waits_for_the_other_half(engine: hw.Engine) -> None:
    half, *rest = ids = engine.tokenizer.encode("🦉")
    assert len(ids) > 1
    async with engine.context().fill("x") as context:
        generation = context.generate(hw.Argmax(), max_tokens=100)
        assert generation.accept([half]).text == ""
        assert generation.accept(rest).text == "🦉"


@told
async def test_an_end_token_after_a_stop_string_is_refused(engine: hw.Engine) -> None:
    eos = min(engine.eos_ids)
    async with engine.context().fill("x") as context:
        generation = context.generate(hw.Argmax(), max_tokens=100, stop="END")
        with pytest.raises(hw.InvalidInput, match="end in a stop string and 1 follow it"):
            generation.accept([*engine.tokenizer.encode(" abc END"), eos])
        assert (generation.finish, generation.generated) == (None, ())
        assert generation.accept([*engine.tokenizer.encode(" abc"), eos]).finish == "eos"


@pytest.mark.parametrize("before", ["", "ab ", "é"])
def test_a_stop_takes_every_token_of_its_first_character_away(words: hw.Engine, before: str) -> None:
    owl = words.tokenizer.encode("🦉")
    assert len(owl) > 1
    ids = [*words.tokenizer.encode(before), *owl]

    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill("x") as context:
            prompt = context.tokens
            generation = context.generate(hw.Argmax(), max_tokens=100, stop="🦉")
            steps = [generation.accept([token]) for token in ids]
            assert (steps[-1].finish, steps[-1].tokens) == ("stop", ())
            assert await generation.text() == before
            assert context.tokens == (*prompt, *ids[: -len(owl)])
            assert generation.generated == tuple(ids[: -len(owl)])

    words.run(program)


# -- cuts and writes ---------------------------------------------------------------------------------------------------


@program
async def test_a_cut_is_followed_by_tokens_budget_and_constraint(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        rule = Counted(2)
        generation = context.generate(hw.Argmax(), max_tokens=6, constrain=rule)
        first = await some(generation, 4)
        assert list(context.tokens) == [7, *first]  # a look takes back what ran ahead, in the constraint too
        assert rule.tokens == first
        context.truncate(2)
        assert generation.generated == tuple(first[:2])
        assert rule.tokens == first[:2]
        assert await generation.tokens() == [*first, *rule.tokens[4:]]  # the same again: a greedy draw
        assert len(rule.tokens) == 6
        assert generation.finish == "length"
        assert list(context.tokens) == [7, *rule.tokens]


@program
async def test_a_seeded_draw_comes_again_after_a_cut_and_another_seed_draws_others(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Multinomial(seed=5), max_tokens=30)
        first = await some(generation, 12)
        context.truncate(10)
        assert await some(generation, 10) == first[2:]
        context.truncate(10)
        generation.reseed(6)
        assert await some(generation, 10) != first[2:]
        assert generation.seed == 6


@program
async def test_a_cut_into_the_prompt_starts_over(engine: hw.Engine) -> None:
    async with engine.context().fill([7, 8, 9]) as context:
        rule = Counted(2)
        generation = context.generate(hw.Argmax(), max_tokens=4, constrain=rule)
        await some(generation, 3)
        context.truncate(4).fill([11])
        assert await generation.tokens() == rule.tokens
        assert len(rule.tokens) == 4
        assert list(context.tokens) == [7, 8, 11, *rule.tokens]


@program
async def test_what_the_program_writes_belongs_to_the_prompt(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        rule = Counted(2)
        generation = context.generate(hw.Argmax(), max_tokens=6, stop=[91], constrain=rule)
        first = await some(generation, 2)
        context.fill([91, 13])
        assert generation.generated == tuple(first)
        second = await some(generation, 2)
        context.truncate(3)  # one generated token, and what was written
        assert context.tokens[3:] == (91,)
        assert generation.generated == tuple(first)
        assert rule.tokens == first
        last = await generation.tokens()
        assert last == rule.tokens
        assert len(last) == 6
        assert list(context.tokens) == [7, *first, 91, *last[2:]]
        assert second


@told
async def test_text_that_was_shown_is_taken_back_with_its_tokens(engine: hw.Engine) -> None:
    encode = engine.tokenizer.encode
    async with engine.context().fill("x") as context:
        generation = context.generate(hw.Argmax(), max_tokens=100, stop="END")
        shown = generation.accept(encode(" one two E")).text
        shown += generation.accept(encode("leven")).text
        assert shown == " one two Eleven"
        context.truncate(len(encode("leven")))
        step = generation.accept(encode("ight"))  # " E" may have begun a stop meanwhile
        assert step.retracted == len("Eleven")
        assert step.text == "Eight"
        shown = shown[: len(shown) - step.retracted] + step.text
        assert shown == " one two Eight"
        context.fill(" (a note)")
        step = generation.accept(encode(" nine"))
        assert (step.text, step.retracted) == (" nine", 0)
        context.truncate(1000 if len(context.tokens) > 1000 else len(context.tokens) - 1)
        step = generation.accept(encode(" ten"))
        assert (step.text, step.retracted) == (" ten", len(shown + " nine"))


@told
async def test_no_stop_and_no_character_reaches_across_what_the_program_wrote(engine: hw.Engine) -> None:
    encode = engine.tokenizer.encode
    half = encode("🦉")[0]
    async with engine.context().fill("x") as context:
        generation = context.generate(hw.Argmax(), max_tokens=100, stop="END")
        assert generation.accept(encode(" E")).text == " "
        context.fill("|")
        assert generation.accept(encode("ND")).text == "END"
        generation.accept([half])
        context.fill("|")
        assert generation.accept(encode("z")).text == "\N{REPLACEMENT CHARACTER}z"
        assert generation.finish is None


@told
async def test_a_generation_goes_on_after_its_end_when_it_is_told_to(engine: hw.Engine) -> None:
    encode = engine.tokenizer.encode
    async with engine.context().fill("x") as context:
        generation = context.generate(hw.Argmax(), max_tokens=30, stop="END")
        assert generation.accept(encode(" abc END")).finish == "stop"
        assert [step async for step in generation] == []
        context.fill(" and")
        assert [step async for step in generation] == []
        generation.resume()
        assert generation.accept(encode(" more")).text == " more"
        assert len(await generation.tokens()) == 30
        assert generation.finish == "length"
        assert len(await generation.resume(max_tokens=5).tokens()) == 35
        with pytest.raises(hw.InvalidInput, match="max_tokens is 0"):
            generation.resume(max_tokens=0)


# -- forks -------------------------------------------------------------------------------------------------------------


@program
async def test_a_fork_goes_its_own_way_with_its_own_constraint(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        rule = Copied(3)
        generation = context.generate(hw.Argmax(), max_tokens=8, constrain=rule)
        first = await some(generation, 3)
        twin = generation.fork()
        async with twin.context:
            twin.accept([9])
            assert generation.generated == tuple(first)
            other = await twin.tokens()
            assert other[:4] == [*first, 9]
            assert len(other) == 8
            mine = await generation.tokens()
            assert mine[:3] == first
            assert mine == rule.tokens
            assert list(context.tokens) == [7, *mine]
            assert list(twin.context.tokens) == [7, *other]


@program
async def test_a_constraint_without_copy_cannot_be_forked(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=8, constrain=Counted(3))
        await some(generation, 3)
        with pytest.raises(hw.Unsupported, match=r"Counted has no copy\(\)"):
            generation.fork()
        assert len(await generation.tokens()) == 8


@program
async def test_explicit_seeds_come_along_and_unseeded_forks_differ(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        for sampler, same in ((hw.Multinomial(seed=3), True), (hw.Multinomial(), False)):
            generation = context.fork().generate(sampler, max_tokens=24)
            await some(generation, 4)
            twins = [generation.fork(), generation.fork(), generation.fork(seed=11)]
            drawn = [tuple(await g.tokens()) for g in (generation, *twins)]
            assert len({d[:4] for d in drawn}) == 1
            assert (len(set(drawn[:3])) == 1) is same
            assert drawn[3] not in drawn[:3]
            assert (len({g.seed for g in (generation, *twins)}) == 2) is same


@told
async def test_a_fork_has_the_text_and_the_grammar_of_its_moment(engine: hw.Engine) -> None:
    encode = engine.tokenizer.encode
    async with engine.context().fill("x") as context:
        grammar = hw.Grammar.regex("(left|right) (turn|side)")
        generation = context.generate(hw.Argmax(), constrain=grammar, stop="side")
        generation.accept(encode("left"))
        twin = generation.fork()
        assert twin.accept(encode(" side")).finish == "stop"
        assert await twin.text() == "left "
        assert generation.accept(encode(" turn")).finish == "constraint"
        assert await generation.text() == "left turn"


# -- a step taken by hand ----------------------------------------------------------------------------------------------


@program
async def test_a_step_by_hand_is_the_step_the_loop_would_take(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        rule = Counted(2)
        generation = context.generate(hw.Multinomial(seed=4), max_tokens=6, constrain=rule)
        expected = await context.fork().generate(hw.Multinomial(seed=4), max_tokens=6, constrain=Counted(2)).tokens()
        prepared = await generation.prepare()
        logits = prepared.forward.probe(-1, hw.Logits())
        out = await prepared.forward.execute()
        assert out.token(prepared.token) == expected[0]
        assert out.logits(logits).shape == (V,)
        generation.accept([out.token(prepared.token)])
        step = await (await generation.prepare()).take()
        assert step.tokens == (expected[1],)
        assert await some(generation, 2) == expected[2:4]
        masked = await generation.prepare()
        masked.forward.mask(allow=[64])
        assert (await masked.take()).tokens == (64,)
        assert (await (await generation.prepare()).take()).finish == "length"
        assert rule.tokens == [*expected[:4], 64, rule.tokens[-1]]
        with pytest.raises(hw.Closed, match="ended"):
            await generation.prepare()


@program
async def test_a_prepared_step_is_not_taken_on_another_context(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=6, probe=hw.Logits())
        prepared = await generation.prepare()
        context.fill([8])
        with pytest.raises(hw.Closed, match="prepare another one"):
            await prepared.take()
        step = await (await generation.prepare()).take()
        assert list(step.tokens) == continued([7, 8], 1)
        assert step.probes[0].shape == (V,)


@told
async def test_forced_tokens_can_be_taken_by_hand(engine: hw.Engine) -> None:
    async with engine.context().fill("x") as context:
        generation = context.generate(
            hw.Argmax(), constrain=hw.Grammar.choices(["a long sentence that is the only one"])
        )
        passes = engine.stats().passes
        forced = generation.forced()
        assert len(forced) > 5
        assert generation.accept(forced).finish == "constraint"
        assert engine.stats().passes == passes


# -- pauses ------------------------------------------------------------------------------------------------------------


@program
async def test_a_loop_that_was_left_leaves_no_busy_context_and_goes_on_later(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=20)
        found = await some(generation, 3)
        await context.flush()
        assert context.pending == ()
        found += await some(generation, 3)
        assert context.seq_len + len(context.pending) == 7
        out = context.forward()
        handle = out.sample([-1], hw.Argmax())
        assert (await out.execute()).token(handle) == continued([7, *found], 1)[0]
        found += await some(generation, 3)
        assert [*found, *(await generation.tokens())[9:]] == continued([7], 20)


@program
async def test_a_context_can_be_read_while_a_step_is_on_its_way(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        task = asyncio.create_task(context.generate(hw.Argmax(), max_tokens=200).tokens())
        lengths = []
        while not task.done():
            lengths.append(len(context.tokens))
            await asyncio.sleep(0)
        assert await task == continued([7], 200)
        assert len(set(lengths)) > 1


@program
async def test_two_generations_take_turns_on_one_context(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        one, two = (context.generate(hw.Argmax(), max_tokens=6) for _ in range(2))
        order = [one, two, two, one, one, two]
        for generation in order:
            await some(generation, 1)
        assert list(context.tokens) == [7, *continued([7], 6)]
        assert [len(g.generated) for g in (one, two)] == [3, 3]


async def soon(work: Awaitable[Any]) -> asyncio.Future[Any]:
    """A task that has got as far as it can without a step of the engine."""
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


@alone
async def test_a_cancelled_step_leaves_the_token_of_the_step_before_it(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=8)
        with stepping(engine) as step:
            task = await soon(anext(generation))
            step()
            (first,) = (await task).tokens  # nobody looks at the context
            for _ in range(2):
                task = await soon(anext(generation))
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
        assert list(context.tokens) == [7, first]
        assert generation.generated == (first,)
        assert await generation.tokens() == continued([7], 8)
        assert list(context.tokens) == [7, *continued([7], 8)]


def test_a_failed_step_leaves_the_token_of_the_step_before_it() -> None:
    broken: list[bool] = []

    def before(_: object) -> None:
        if broken:
            raise RuntimeError("no device")

    async def program(engine: hw.Engine) -> None:
        context = engine.context().fill([7])
        generation = context.generate(hw.Argmax(), max_tokens=8)
        with stepping(engine) as step:
            task = await soon(anext(generation))
            step()
            (first,) = (await task).tokens
            broken.append(True)
            task = await soon(anext(generation))
            step()  # as a decode row
            step()  # and by itself, as a pass
            with pytest.raises(hw.PassFailed):
                await task
        broken.clear()
        assert list(context.tokens) == [7, first]
        assert await generation.tokens() == continued([7], 8)
        context.release()

    with faulty_engine(before, pages=20) as engine:
        engine.run(program)
        assert engine.stats().pages_held == 0


@alone
async def test_a_step_on_its_way_cannot_be_steered(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=8)
        with stepping(engine) as step:
            for begun in range(3):
                task = await soon(anext(generation))
                verbs: list[Callable[[], Any]] = [
                    generation.reseed,
                    generation.fork,
                    generation.forced,
                    lambda: generation.accept([1]),
                ]
                for verb in verbs:
                    with pytest.raises(hw.ContextBusy, match="await it"):
                        verb()
                for awaited in (generation.prepare, generation.__anext__):
                    with pytest.raises(hw.ContextBusy, match="step in flight"):
                        await awaited()
                assert len(generation.generated) == begun
                step()
                await task
        assert await generation.tokens() == continued([7], 8)
        assert list(context.tokens) == [7, *continued([7], 8)]


class Anything:
    """A constraint that allows every token, and is asked in its program; that takes longer than a pass."""

    in_program = True

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def mask(self) -> None:
        time.sleep(0.01)

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]


class NoIdea:
    """A drafter that takes its time and has no draft."""

    adaptive = False

    def draft(self, tokens: object, limit: int) -> list[int]:
        time.sleep(0.01)
        return []

    def accept(self, tokens: object) -> None:
        """It learns nothing."""


@pytest.mark.parametrize("options", [{"constrain": Anything}, {"speculate": NoIdea}], ids=["constraint", "drafter"])
def test_two_tasks_cannot_take_a_step_at_once(engine: hw.Engine, options: dict[str, type]) -> None:
    async def program(engine: hw.Engine) -> None:
        given: dict[str, Any] = {name: kind() for name, kind in options.items()}
        async with engine.context().fill([7]) as context:
            generation = context.generate(hw.Argmax(), max_tokens=12, **given)
            for _ in range(4):
                before = generation.generated
                found = await asyncio.gather(*(anext(generation) for _ in range(3)), return_exceptions=True)
                steps = [one for one in found if isinstance(one, hw.Step)]
                assert [type(one) for one in found if one not in steps] == [hw.ContextBusy] * 2
                assert generation.generated == (*before, *steps[0].tokens)
            assert await generation.tokens() == continued([7], 12)
            assert list(context.tokens) == [7, *continued([7], 12)]
            assert given.get("constrain") is None or given["constrain"].tokens == continued([7], 12)

    engine.run(program)


@program
async def test_a_refused_call_between_two_steps_takes_nothing_away(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        generation = context.generate(hw.Argmax(), max_tokens=8)
        first = await some(generation, 2)
        with pytest.raises(hw.InvalidInput, match="min_tokens is 5"):
            context.generate(hw.Argmax(), min_tokens=5, max_tokens=3)
        assert list(context.tokens) == [7, *first]
        assert await generation.tokens() == continued([7], 8)


@program
async def test_a_step_is_prepared_after_another_generation_s_finished_pass(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        one, two = (context.generate(hw.Argmax(), max_tokens=6) for _ in range(2))
        first = await some(one, 1)
        while engine._loop.waiting():  # its passes ahead
            await asyncio.sleep(0)
        step = await (await two.prepare()).take()
        assert [*first, *step.tokens] == continued([7], 2)


@program
async def test_the_room_between_two_steps_is_that_of_the_tokens_there(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        room = context._room()
        generation = context.generate(hw.Argmax(), max_tokens=30)
        for count in range(1, 10):
            await some(generation, 1)
            assert context._room() == room - count


@program
async def test_a_context_can_be_read_from_another_thread_while_it_grows(engine: hw.Engine) -> None:
    async with engine.context().fill([7]) as context:
        ended, seen = threading.Event(), set[tuple[int, ...]]()

        def read() -> None:
            while not ended.is_set():
                seen.add(context.tokens)

        reader = asyncio.create_task(asyncio.to_thread(read))
        try:
            tokens = await context.generate(hw.Argmax(), max_tokens=300).tokens()
        finally:
            ended.set()
            await reader
        assert tokens == continued([7], 300)
        assert list(context.tokens) == [7, *tokens]
        assert all(list(some) == [7, *tokens][: len(some)] for some in seen)


@program
async def test_fewer_tokens_than_the_minimum_are_run_ahead_of_too(engine: hw.Engine) -> None:
    stop = continued([5], 1)[0]

    def started() -> hw.Generation:
        return engine.context().fill([5]).generate(hw.Argmax(), max_tokens=12, min_tokens=9, stop=[stop])

    by_hand = started()
    while by_hand.finish is None:
        await (await by_hand.prepare()).take()
    generation = started()
    ahead = [generation.context._retract is not None async for _ in generation]
    assert all(ahead[:8])
    assert (await generation.tokens(), generation.finish) == (await by_hand.tokens(), by_hand.finish)
    assert stop not in generation.generated[:9]
    for used in (generation, by_hand):
        used.context.release()


# -- options -----------------------------------------------------------------------------------------------------------


def test_an_attention_mask_binds_every_pass() -> None:
    async def program(engine: hw.Engine) -> None:
        prompt = list(range(40))
        async with engine.context().fill(prompt) as context:
            tokens = await hw.Generation(
                context, hw.Argmax(), max_tokens=12, attention_mask=hw.Mask.sink(2, 6)
            ).tokens()
        async with engine.context() as context:
            by_hand: list[int] = []
            fed = prompt
            while len(by_hand) < 12:
                forward = context.forward().input(fed).attention_mask(hw.Mask.sink(2, 6))
                handle = forward.sample([-1], hw.Argmax())
                fed = [(await forward.execute()).token(handle)]
                by_hand += fed
        async with engine.context().fill(prompt) as context:
            plain = await context.generate(hw.Argmax(), max_tokens=12).tokens()
        assert tokens == by_hand
        assert tokens != plain

    with hw.Engine(random_model(layers=2), pages=64, threads=1) as engine:
        engine.run(program)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"attention_mask": [[0, 1]]}, hw.WrongType, "a Mask is needed"),
        ({"attention_mask": hw.Mask.from_runs([[0, 1]])}, hw.InvalidInput, "1 rows of its own"),
        ({"adapter": "some"}, hw.WrongType, "adapter is 'some'"),
        ({"speculate": 3}, hw.WrongType, "speculate is 3"),
        ({"stop": [str(i) for i in range(10_000)]}, hw.InvalidInput, "10000 stops were given; at most 1024"),
    ],
)
def test_what_a_generation_cannot_do_is_refused(
    engine: hw.Engine, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with engine.context().fill([1]) as context, pytest.raises(kind, match=says):
        hw.Generation(context, hw.Argmax(), max_tokens=3, **options)
    assert engine.stats().pages_held == 0
