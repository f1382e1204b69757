"""Programs' own constraints, followed in a thread of the engine's while rows decode: as if asked in the program."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.base.specs.masks import logit_mask, packed_logit_mask
from headway.testing import random_model, scripted_model
from support.checks import random_tokens
from support.overlapping import OverlappingRunner

V = 97
SEEDED = hw.Multinomial(0.9, seed=11)
ENDS = (3, 5)
THREAD = "headway-constraints"


class Own:
    """Allows a set that depends on the tokens so far. `quirks` name what else it does, and after how many tokens."""

    def __init__(self, seed: int, quirks: dict[str, int] | None = None) -> None:
        self.seed, self.quirks, self.tokens = seed, quirks or {}, list[int]()
        self.threads: set[str] = set()

    def _is(self, quirk: str) -> bool:
        return self.quirks.get(quirk) == len(self.tokens)

    def mask(self) -> Any:
        self.threads.add(threading.current_thread().name)
        if self._is("mask raises"):
            raise ValueError(f"no mask after {self.tokens}")
        if self._is("allows nothing"):
            return np.zeros(V, bool)
        if self._is("allows all"):
            return None
        rng = np.random.default_rng([self.seed, len(self.tokens), *self.tokens[-2:]])
        allowed = rng.random(V) < 0.4
        allowed[0] = True
        match self.seed % 3:
            case 0:
                return allowed
            case 1:
                return np.packbits(np.pad(allowed, (0, -V % 32)), bitorder="little").view(np.uint32)
        return allowed.tolist()

    def accept(self, token: int) -> None:
        if self._is("refuses"):
            raise hw.InvalidInput(f"{token} after {self.tokens}")
        if self._is("fails"):
            raise RuntimeError(f"{token} after {self.tokens}")
        self.tokens.append(token)

    def rollback(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]

    def copy(self) -> Own:
        twin = type(self)(self.seed, self.quirks)
        twin.tokens, twin.threads = self.tokens[:], self.threads
        return twin

    @property
    def finished(self) -> bool:
        return self._is("ends")

    def forced(self) -> list[int]:
        return [7, 8, 9] if self._is("forces") else []


class InProgram(Own):
    in_program = True


QUIRKS = ("mask raises", "allows nothing", "allows all", "refuses", "fails", "ends", "forces")


@pytest.fixture(scope="module", params=["cpu", "overlapping"])
def engine(request: pytest.FixtureRequest) -> Iterator[hw.Engine]:
    """One that computes when it is asked for the result, and one whose next step begins before the tokens are known."""
    if request.param == "cpu":
        with hw.Engine(random_model(), pages=512, threads=1, deterministic=True) as made:
            yield made
        return
    runner = OverlappingRunner(V, 16)
    runner.decode_limit = 64
    with hw.Engine(scripted_model(vocab_size=V), runner=runner, pages=512, threads=1) as made:
        yield made
        assert not runner.faults


async def one(engine: hw.Engine, constraint: Own, row: int, **options: Any) -> tuple[Any, ...]:
    """What comes of a row: its tokens, how it ended, what it has raised, and what its constraint knows."""
    prompt = random_tokens(V, 20, row)
    given: dict[str, Any] = {"max_tokens": 40, "stop": ENDS, **options, "constrain": constraint}
    async with engine.context().fill(prompt) as context:
        generation, errors = context.generate(SEEDED, **given), []
        for _ in range(3):
            try:
                await generation.tokens()
                break
            except (hw.HeadwayError, ValueError, RuntimeError) as error:
                errors.append(repr(error))
                assert list(context.tokens) == [*prompt, *generation.generated]
        tokens = generation.generated
        assert list(context.tokens) == [*prompt, *tokens]
        assert constraint.tokens == list(tokens)
        return tokens, generation.finish, errors


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_as_if_each_was_asked_in_its_program(engine: hw.Engine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    quirks = [{q: int(rng.integers(0, 30)) for q in QUIRKS if rng.random() < 0.25} for _ in range(10)]

    async def program(engine: hw.Engine, kind: type[Own]) -> tuple[list[Any], set[str]]:
        constraints = [kind(10 * seed + row, each) for row, each in enumerate(quirks)]
        rows = [one(engine, constraint, row) for row, constraint in enumerate(constraints)]
        return await asyncio.gather(*rows), set().union(*(c.threads for c in constraints))

    expected, asked = engine.run(program, InProgram)
    assert THREAD not in asked
    found, asked = engine.run(program, Own)
    assert found == expected
    assert THREAD in asked
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("options", [{"min_tokens": 20}, {"no_repeat_ngram_size": 2}, {"speculate": hw.PromptLookup()}])
def test_so_beside_what_else_binds_a_token(engine: hw.Engine, options: dict[str, Any]) -> None:
    async def program(engine: hw.Engine, kind: type[Own]) -> list[Any]:
        return await asyncio.gather(*(one(engine, kind(row), row, **options) for row in range(4)))

    assert engine.run(program, Own) == engine.run(program, InProgram)


def test_cuts_forks_and_pauses_change_nothing(engine: hw.Engine) -> None:
    async def steered(engine: hw.Engine, kind: type[Own], seed: int) -> list[Any]:
        rng, seen = np.random.default_rng(seed), list[Any]()
        async with engine.context().fill(random_tokens(V, 20, seed)) as context:
            constraint = kind(seed)
            generation = context.generate(SEEDED, max_tokens=60, stop_only=True, constrain=constraint)
            for _ in range(25):
                for _ in range(int(rng.integers(1, 5))):
                    await anext(generation, None)
                if rng.random() < 0.3:
                    seen.append((context.tokens, tuple(constraint.tokens)))  # who looks at the context sees both alike
                match int(rng.integers(5)):
                    case 0:
                        context.truncate(min(int(rng.integers(1, 9)), len(generation.generated)))
                        generation.reseed(int(rng.integers(99)))
                    case 1:
                        twin = generation.fork(seed=5)
                        seen += [await anext(twin, None), await anext(twin, None), twin.generated]
                        twin.context.release()
                    case 2 if generation.finish is None and len(generation.generated) < 60:
                        seen.append(generation.accept([0]).tokens)
                    case 3:
                        await asyncio.sleep(0.001)
            seen.append((await generation.tokens(), constraint.tokens, list(context.tokens)))
        return seen

    for seed in range(5):
        assert engine.run(steered, Own, seed) == engine.run(steered, InProgram, seed), seed
    assert engine.stats().pages_held == 0


def test_a_constraint_that_looks_at_its_context_sees_its_tokens(engine: hw.Engine) -> None:
    class Looks(Own):
        context: hw.Context

        def mask(self) -> Any:
            length = 0
            try:
                length = len(self.context.tokens)
            except Exception:  # what it does with the error does not matter
                return None
            self.seed = 3 * length
            return super().mask()

    class LooksInProgram(Looks):
        in_program = True

    async def program(engine: hw.Engine, kind: type[Looks]) -> list[int]:
        async with engine.context().fill(random_tokens(V, 20, 1)) as context:
            constraint = kind(0)
            constraint.context = context
            return await context.generate(SEEDED, max_tokens=30, stop_only=True, constrain=constraint).tokens()

    assert engine.run(program, Looks) == engine.run(program, LooksInProgram)


def test_a_constraint_sees_the_variables_of_its_program(engine: hw.Engine) -> None:
    shift: ContextVar[int] = ContextVar("shift")

    class Shifted(Own):
        def mask(self) -> Any:
            self.threads.add(threading.current_thread().name)
            return [5 + shift.get(), 1, V - 6 - shift.get()]

    async def program(engine: hw.Engine) -> None:
        shift.set(4)
        constraint = Shifted(0)
        async with engine.context().fill(random_tokens(V, 20, 1)) as context:
            tokens = await context.generate(SEEDED, max_tokens=12, stop_only=True, constrain=constraint).tokens()
        assert tokens == [9] * 12
        assert THREAD in constraint.threads

    engine.run(program)


def test_one_that_takes_long_is_asked_in_its_program_and_holds_nobody_up(engine: hw.Engine) -> None:
    class Slow(Own):
        def mask(self) -> Any:
            if len(self.tokens) in (3, 4, 15):
                time.sleep(0.04)
            return super().mask()

    async def program(engine: hw.Engine, kind: Callable[[int], Own]) -> list[Any]:
        rows = [kind(0), *(Own(row) for row in range(1, 4))]
        return await asyncio.gather(*(one(engine, constraint, row) for row, constraint in enumerate(rows)))

    assert engine.run(program, Slow) == engine.run(program, Own)


def test_steps_of_other_programs_go_on_while_one_is_stuck(engine: hw.Engine) -> None:
    stuck, goes_on = threading.Event(), threading.Event()

    class Stuck(Own):
        def mask(self) -> Any:
            if len(self.tokens) == 4:
                stuck.set()
                assert goes_on.wait(60)
            return super().mask()

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(engine.run(one, Stuck(1), 1)))
    thread.start()
    assert stuck.wait(60)
    try:
        free = engine.run(one, Own(2), 2)
    finally:
        goes_on.set()
        thread.join()
    assert found == [engine.run(one, InProgram(1), 1)]
    assert free == engine.run(one, InProgram(2), 2)


@pytest.mark.timeout(120)
def test_one_that_asks_its_engine_never_waits_for_who_waits_for_it(engine: hw.Engine) -> None:
    class Asks(Own):
        def mask(self) -> Any:
            if threading.current_thread().name == THREAD:
                time.sleep(0.005)  # meanwhile its program looks at the context, and waits under the engine's lock
            assert engine.stats().pages_total > 0
            return super().mask()

    class AsksInProgram(Asks):
        in_program = True

    async def program(engine: hw.Engine, kind: type[Asks]) -> tuple[int, ...]:
        constraint = kind(0)
        async with engine.context().fill(random_tokens(V, 20, 1)) as context:
            generation = context.generate(SEEDED, max_tokens=40, stop_only=True, constrain=constraint)
            async for step in generation:
                await asyncio.sleep(0.003 * (len(generation.generated) % 3))
                if len(generation.generated) % 4 == 0:
                    assert context.tokens[-1] == step.tokens[-1]
            assert THREAD in constraint.threads or kind is AsksInProgram
            return generation.generated

    assert engine.run(program, Asks) == engine.run(program, AsksInProgram)


def test_any_form_of_a_mask_is_packed_as_it_is_read() -> None:
    for vocab in (1, 31, 32, 33, 97):
        rng = np.random.default_rng(vocab)
        allowed = rng.random(vocab) < 0.5
        allowed[0] = True
        packed = np.packbits(np.pad(allowed, (0, -vocab % 32)), bitorder="little").view(np.uint32)
        packed[-1] |= np.uint32((1 << 32) - (1 << (vocab % 32)) if vocab % 32 else 0)  # bits of no token
        for form in (allowed, packed, allowed.tolist()):
            words = packed_logit_mask(vocab, form)
            assert words is not form
            assert np.array_equal(logit_mask(vocab, words), allowed)
            assert np.array_equal(np.unpackbits(words.view(np.uint8), bitorder="little")[vocab:].any(), False)


@pytest.mark.parametrize("form", [np.zeros(V, bool), np.zeros(4, np.uint32), np.zeros(9, np.uint32), [V]])
def test_a_mask_that_allows_nothing_or_does_not_fit_is_refused(form: Sequence[int]) -> None:
    with pytest.raises(hw.InvalidMask):
        packed_logit_mask(V, form)
