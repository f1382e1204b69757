"""Programs side by side: cancellation in all its forms, closing, ctrl-C, and the same results as one at a time."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.base.rng import uniform
from headway.runtime.batch import Batch
from headway.testing import random_model, scripted_engine
from support.scripted import by_hand, check_pages, continued, faulty_engine, greedy, numbers, plain
from support.sweeps import swept

# -- cancellation ----------------------------------------------------------------------------------------------------


class Gate:
    """A device that stops in the middle of a step until it is let go."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, batch: Batch) -> None:
        self.entered.set()
        assert self.open.wait(60)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[hw.Engine]:
    """64 pages; the first step stops at the gate."""
    with faulty_engine(gate, pages=64, max_batch_tokens=16) as made:
        try:
            yield made
        finally:
            gate.open.set()


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 10)


def idle(engine: hw.Engine) -> bool:
    """Whether nothing is queued or running any more; waits for the step in progress."""
    engine._loop.call(lambda: None)
    check_pages(engine)
    return engine.stats().queued == 0


async def asked(context: hw.Context, tokens: list[int]) -> int:
    execution, handle = greedy(context, tokens)
    return (await execution).token(handle)


def test_a_cancelled_task_s_pass_leaves_the_queue_at_once(engine: hw.Engine, gate: Gate) -> None:
    async def program(engine: hw.Engine) -> None:
        running = asyncio.create_task(asked(engine.context(), numbers(5, 1)))
        await entered(gate)
        contexts = [engine.context() for _ in range(3)]
        queued = [asyncio.create_task(asked(c, numbers(20, n))) for n, c in enumerate(contexts)]
        await asyncio.sleep(0)
        assert engine.stats().queued == 4
        queued[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued[1]
        assert engine.stats().queued == 3  # while the device is still at its step
        assert contexts[1].seq_len == 0
        gate.open.set()
        assert await running == plain(numbers(5, 1))
        assert [await queued[n] for n in (0, 2)] == [plain(numbers(20, n)) for n in (0, 2)]
        assert await asked(contexts[1], [7]) == plain([7])

    engine.run(program)
    assert idle(engine)


def test_running_work_of_a_cancelled_task_finishes_unread_and_is_undone(engine: hw.Engine, gate: Gate) -> None:
    async def program(engine: hw.Engine) -> None:
        context = engine.context().fill([3])
        running = asyncio.create_task(asked(context, numbers(40, 1)))  # three steps
        await entered(gate)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (context.seq_len, context.pending) == (0, (3,))
        gate.open.set()
        assert await asked(context, [4]) == plain([3, 4])
        assert engine.stats().pages_held == 1

    engine.run(program)
    assert idle(engine)
    assert engine.stats().passes == 1


def test_a_timeout_undoes_the_pass_and_leaves_the_context(engine: hw.Engine, gate: Gate) -> None:
    async def program(engine: hw.Engine) -> None:
        context = engine.context()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asked(context, numbers(40, 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked(context, numbers(40, 1)), 0.05)
        gate.open.set()
        assert await asked(context, numbers(40, 1)) == plain(numbers(40, 1))

    engine.run(program)
    assert idle(engine)


def test_a_timeout_in_a_thread_undoes_the_pass(engine: hw.Engine, gate: Gate) -> None:
    context = engine.context()
    with pytest.raises(hw.DeadlineExceeded, match=r"did not end within 0\.05 seconds and was undone"):
        context.forward().input([1, 2]).execute().result(0.05)
    assert engine.stats().queued == 0
    gate.open.set()
    assert idle(engine)
    assert context.seq_len == 0


@pytest.mark.parametrize("is_running", [True, False])
def test_releasing_a_context_ends_its_pass_with_an_error(engine: hw.Engine, gate: Gate, is_running: bool) -> None:
    async def program(engine: hw.Engine) -> None:
        first, second = engine.context(), engine.context()
        tasks = [asyncio.create_task(asked(c, numbers(30, 1))) for c in (first, second)]
        await entered(gate)
        released, task = (first, tasks[0]) if is_running else (second, tasks[1])
        other = tasks[1] if is_running else tasks[0]
        released.release()
        with pytest.raises(hw.Closed, match="released while this pass was in flight"):
            await task
        assert engine.stats().queued == 1
        gate.open.set()
        assert await other == plain(numbers(30, 1))

    engine.run(program)
    gc.collect()
    assert idle(engine)
    assert engine.stats().pages_held == 0


def test_a_context_that_is_lost_takes_its_pass_out_of_the_queue(engine: hw.Engine, gate: Gate) -> None:
    kept = engine.context()
    running = kept.forward().input([1]).execute()
    assert gate.entered.wait(60)
    gc.disable()
    try:
        lost = engine.context().forward().input(numbers(30, 1)).execute()
        assert engine.stats().queued == 2
        del lost
        assert engine.stats().queued == 1
    finally:
        gc.enable()
    gate.open.set()
    running.result()
    assert idle(engine)
    assert engine.stats().pages_held == 1


def test_leaving_async_with_frees_pages_also_after_an_error(engine: hw.Engine, gate: Gate) -> None:
    gate.open.set()

    async def program(engine: hw.Engine) -> None:
        context = engine.context()
        with pytest.raises(ZeroDivisionError):
            await fails_inside(context)
        assert engine.stats().pages_held == 0
        with pytest.raises(hw.Closed):
            context.fill([1])

    async def fails_inside(context: hw.Context) -> None:
        async with context:
            await asked(context, numbers(30, 1))
            raise ZeroDivisionError

    engine.run(program)


def test_a_pass_that_succeeded_but_was_cancelled_before_it_was_read_is_undone() -> None:
    with scripted_engine(pages=8) as engine, by_hand(engine) as hand:
        context = engine.context().fill([9])
        hand.compute(context, [1, 2])
        execution = context.forward().input(numbers(30, 1)).execute()
        hand.until(execution)
        execution.cancel()
        assert context.tokens == (9, 1, 2)
        again, handle = greedy(context, [5])
        hand.until(again)
        assert again.result(0).token(handle) == plain([9, 1, 2, 5])
        check_pages(engine)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_a_cancelled_generation_leaves_a_context_that_goes_on_rightly(after: int) -> None:
    async def read(context: hw.Context, got: list[int], enough: asyncio.Event) -> None:
        async for step in context.generate(hw.Argmax(), max_tokens=1000):
            got.extend(step.tokens)
            if len(got) >= after:
                enough.set()

    async def program(engine: hw.Engine) -> None:
        prompt, got, enough = numbers(14, after), [], asyncio.Event()
        context = engine.context().fill(prompt)
        task = asyncio.create_task(read(context, got, enough))
        await (enough.wait() if after else asyncio.sleep(0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        whole = continued(prompt, len(got) + 5)
        assert got == whole[: len(got)]
        known = list(context.tokens)
        assert known == [*prompt, *whole][: len(known)]
        assert len(prompt) <= len(known) <= len(prompt) + len(got)
        assert await context.generate(hw.Argmax(), max_tokens=3).tokens() == continued(known, 3)
        context.release()

    with scripted_engine(pages=200) as engine:
        engine.run(program)
        assert idle(engine)
        assert engine.stats().pages_held == 0


def test_a_generation_that_is_left_early_gives_its_context_back() -> None:
    async def program(engine: hw.Engine) -> None:
        context = engine.context().fill([1, 2])
        async for _ in context.generate(hw.Argmax(), max_tokens=50):
            break
        assert context.tokens == (1, 2, *continued([1, 2], 1))
        fork = context.fork()
        assert await fork.generate(hw.Argmax(), max_tokens=2).tokens() == continued([1, 2], 3)[1:]

    with scripted_engine(pages=8) as engine:
        engine.run(program)
        gc.collect()
        assert engine.stats().pages_held == 0


def test_a_second_pass_over_a_busy_context_is_refused_and_the_first_goes_on(engine: hw.Engine, gate: Gate) -> None:
    async def program(engine: hw.Engine) -> None:
        context = engine.context()
        task = asyncio.create_task(asked(context, [1, 2]))
        await entered(gate)
        acts: list[Callable[[], object]] = [
            lambda: context.forward().input([3]).execute(),
            context.fork,
            lambda: context.fill([1]),
            lambda: context.truncate(0),
            lambda: context.save("x"),
            lambda: context.inner().reserve_working_pages(1),
        ]
        for act in acts:
            with pytest.raises(hw.ContextBusy):
                act()
        gate.open.set()
        assert await task == plain([1, 2])

    engine.run(program)


def test_programs_in_many_threads_and_event_loops_share_one_engine() -> None:
    found: dict[int, list[int]] = {}

    async def program(engine: hw.Engine, n: int) -> None:
        async with engine.context() as context:
            found[n] = await context.fill(numbers(20, n)).generate(hw.Argmax(), max_tokens=20).tokens()

    def plainly(engine: hw.Engine, n: int) -> None:
        tokens = numbers(20, n)
        with engine.context() as context:
            execution, handle = greedy(context, tokens)
            for _ in range(20):
                tokens.append(execution.result().token(handle))
                execution, handle = greedy(context, tokens[-1:])
            execution.result()
        found[n] = tokens[20:]

    with scripted_engine(pages=60) as engine:
        threads = [threading.Thread(target=engine.run, args=(program, n)) for n in range(6)]
        threads += [threading.Thread(target=plainly, args=(engine, n)) for n in range(6, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == {n: continued(numbers(20, n), 20) for n in range(12)}
        assert engine.stats().pages_held == 0


# -- closing ---------------------------------------------------------------------------------------------------------


def test_closing_a_busy_engine_ends_everything_and_does_not_hang() -> None:
    gate = Gate()
    engine = faulty_engine(gate, pages=64)

    async def program(engine: hw.Engine) -> list[int | BaseException]:
        tasks = [asyncio.create_task(asked(engine.context(), numbers(20, n))) for n in range(20)]
        await entered(gate)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while engine.alive:  # its thread has yet to begin
            await asyncio.sleep(0.001)
        gate.open.set()
        await asyncio.wait_for(closing, 60)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    results = engine.run(program)
    assert all(isinstance(r, hw.Closed) for r in results)
    assert "the engine was closed while this pass was in flight" in str(results[0])
    engine.close()  # twice is once
    with pytest.raises(hw.Closed, match="the engine is closed"):
        engine.context()
    assert not engine._loop._thread.is_alive()


def test_a_program_may_close_its_own_engine_while_others_generate() -> None:
    engine = scripted_engine(pages=400)

    async def program(engine: hw.Engine) -> list[Any]:
        contexts = [engine.context().fill(numbers(9, n)) for n in range(8)]
        tasks = [asyncio.create_task(c.generate(hw.Argmax(), max_tokens=600).tokens()) for c in contexts]
        await asyncio.sleep(0.02)
        engine.close()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for context in contexts:
            context.release()  # still allowed
            with pytest.raises(hw.Closed):
                context.forward()
        return found

    assert all(isinstance(e, hw.Closed) for e in engine.run(program))


def test_an_engine_that_is_lost_ends_its_threads() -> None:
    before = {t for t in threading.enumerate() if t.name.startswith("headway")}
    engine = scripted_engine(pages=8)
    engine.context().forward().input([1]).execute().result()
    mine = {t for t in threading.enumerate() if t.name.startswith("headway")} - before
    assert len(mine) == 2
    del engine
    gc.collect()
    for thread in mine:
        thread.join(60)
        assert not thread.is_alive()


# -- ctrl-C ----------------------------------------------------------------------------------------------------------

BUSY = """
    async def forever(engine):
        print("ready", flush=True)
        async def one(n):
            while True:
                async with engine.context() as context:
                    await context.fill([n, 2, 3]).generate(hw.Argmax(), max_tokens=50).tokens()
        await asyncio.gather(*(one(n) for n in range(8)))
"""
ENDINGS = {
    "scripted": "scripted_engine(pages=256).run(forever)",
    "real": "hw.Engine(random_model(layers=4, hidden_size=256), pages=256, threads=2).run(forever)",
    "with": "\nwith scripted_engine(pages=64) as engine:\n    engine.run(forever)",
    "no room": "scripted_engine(pages=6).run(forever)",
    "own loop": "engine = scripted_engine(pages=64); asyncio.run(forever(engine))",
    "in a loop": """
async def outer():
    scripted_engine(pages=64).run(forever)
asyncio.run(outer())""",
    "plain": """
engine = scripted_engine(pages=64)
print("ready", flush=True)
while True:
    engine.context().forward().input([1, 2]).execute().result()""",
}


@pytest.mark.parametrize("ending", swept(ENDINGS, 2))
def test_ctrl_c_ends_a_busy_process_soon_and_quietly(ending: str) -> None:
    head = "import asyncio\nimport headway as hw\nfrom headway.testing import random_model, scripted_engine\n"
    source = head + textwrap.dedent(BUSY) + ENDINGS[ending]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        err, presses = _interrupted(process)
    finally:
        process.kill()
    text = err.decode()
    assert "KeyboardInterrupt" in text
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert text.count("Exception ignored") < presses, text
    for bad in ("terminate called", "Fatal Python error", "Segmentation", "never awaited"):
        assert bad not in text, text


def _interrupted(process: subprocess.Popen[bytes]) -> tuple[bytes, int]:
    """What it says in the end, and how often ctrl-C was pressed: Python ignores one within a weak reference's callback,
    and says so."""
    for presses in (1, 2, 3):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=60)[1], presses
    raise AssertionError("ctrl-C does not end it")


# -- the same as one at a time ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drawn:
    """A token, how it was drawn (seed and position; None for the best), and the logits it comes from, if read."""

    token: int
    draw: tuple[int, int] | None
    logits: np.ndarray | None


@dataclass(frozen=True)
class Mix:
    """A mix of programs over one model; `look` has every row's logits read."""

    prompts: list[list[int]]
    look: bool = False

    async def one(self, engine: hw.Engine, n: int) -> list[list[Drawn]]:
        """The n-th program: greedy, seeded, under masks, or forking; each of its own length."""
        count = 3 + n % 6
        async with engine.context() as context:
            context.fill(self.prompts[n])
            match n % 4:
                case 0:
                    return [await self.generated(context, None, count)]
                case 1:
                    return [await self.generated(context, n, count)]
                case 2:
                    await context.flush(attention_mask=hw.Mask.window(5 + n % 3))
                    return [await self.masked(context, count)]
                case _:
                    first = await self.generated(context, None, 2)
                    async with context.fork() as fork:
                        rest = await asyncio.gather(
                            self.generated(context, None, count - 2), self.generated(fork, n, count - 2)
                        )
                    return [first, *rest]

    async def generated(self, context: hw.Context, seed: int | None, count: int) -> list[Drawn]:
        sampler = hw.Argmax() if seed is None else hw.Multinomial(temperature=0.8, seed=seed)
        at = len(context.tokens) - 1
        found: list[Drawn] = []
        async for step in context.generate(sampler, max_tokens=count, probe=hw.Logits() if self.look else None):
            logits = step.probes[0] if self.look else None
            found += [Drawn(token, None if seed is None else (seed, at + len(found)), logits) for token in step.tokens]
        return found

    async def masked(self, context: hw.Context, count: int) -> list[Drawn]:
        found: list[Drawn] = []
        token = 5
        for _ in range(count):
            forward = context.forward().input([token]).attention_mask(hw.Mask.sink(2, 6))
            handle = forward.sample([-1], hw.Argmax())
            probe = forward.probe(-1, hw.Logits()) if self.look else None
            out = await forward.execute()
            token = out.token(handle)
            found.append(Drawn(token, None, None if probe is None else out.logits(probe)))
        return found

    async def in_turn(self, engine: hw.Engine, numbers: range) -> dict[int, list[list[Drawn]]]:
        return {n: await self.one(engine, n) for n in numbers}

    async def at_once(self, engine: hw.Engine, numbers: list[int]) -> list[list[list[Drawn]]]:
        return await asyncio.gather(*(self.one(engine, n) for n in numbers))


async def among_cancelled(mix: Mix, engine: hw.Engine, numbers: list[int]) -> list[list[list[Drawn]]]:
    """The same while other tasks come and are cancelled at random."""
    rng = random.Random(5)
    over = asyncio.Event()

    async def noise() -> None:
        while not over.is_set():
            task = asyncio.create_task(mix.one(engine, rng.randrange(len(mix.prompts))))
            await asyncio.sleep(rng.random() * 0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    others = [asyncio.create_task(noise()) for _ in range(6)]
    found = await mix.at_once(engine, numbers)
    over.set()
    await asyncio.gather(*others)
    return found


def assert_same_tokens(one: list[list[Drawn]], other: list[list[Drawn]], tolerance: float = 1e-3) -> None:
    """Token for token, or up to one whose choice was closer than the tolerance; `one` has the logits."""
    for first, second in zip(one, other, strict=True):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            if a.token != b.token:
                assert is_close_call(a, b.token, tolerance), f"{a.token} and {b.token} are not close"
                return  # from here on everything may differ


def is_close_call(drawn: Drawn, other: int, tolerance: float) -> bool:
    assert drawn.logits is not None
    logits = drawn.logits.astype(np.float64)
    if drawn.draw is None:
        return bool(logits.max() - min(logits[drawn.token], logits[other]) <= tolerance)
    weights = np.exp((logits - logits.max()) / 0.8)
    reached = np.cumsum(weights) / weights.sum()
    low, high = (np.searchsorted(reached, uniform(*drawn.draw, 0) + d) for d in (-tolerance, tolerance))
    return bool(low <= min(drawn.token, other) and max(drawn.token, other) <= high)


def test_close_calls_are_told_from_wrong_tokens() -> None:
    logits = np.zeros(10, np.float32)
    logits[3], logits[4] = 5.0, 5.0005
    assert is_close_call(Drawn(4, None, logits), 3, 1e-3)
    assert not is_close_call(Drawn(4, None, logits), 5, 1e-3)
    even = np.zeros(10, np.float32)  # each has a tenth
    token = int(uniform(7, 3, 0) * 10)
    assert not is_close_call(Drawn(token, (7, 3), even), (token + 5) % 10, 1e-3)
    assert is_close_call(Drawn(token, (7, 3), even), token, 1e-3)


RUNS: dict[str, Callable[[Mix, hw.Engine, list[int]], Awaitable[list[list[list[Drawn]]]]]] = {
    "at once": Mix.at_once,
    "with hardly any pages": Mix.at_once,
    "while others are cancelled": among_cancelled,
}


# small: bit for bit


@pytest.fixture(scope="module")
def small() -> tuple[Any, Mix, dict[int, list[list[Drawn]]]]:
    decoder = random_model("qwen3", layers=2)
    mix = Mix([numbers(4 + n * 7 % 40, n % 20) for n in range(64)], look=True)
    with hw.Engine(decoder, pages=256, threads=1, deterministic=True) as engine:
        return decoder, mix, engine.run(mix.in_turn, range(64))


@pytest.mark.parametrize("how", RUNS)
def test_64_programs_get_the_same_bits_as_one_at_a_time(small: tuple[Any, Mix, Any], how: str) -> None:
    decoder, mix, alone = small
    pages = 7 if how == "with hardly any pages" else 256
    with hw.Engine(decoder, pages=pages, threads=1, deterministic=True, max_batch_tokens=48) as engine:
        found = engine.run(lambda e: RUNS[how](mix, e, list(range(64))))
        assert (engine.stats().preemptions > 20) == (pages == 7)
        assert idle(engine)
        assert engine.stats().pages_held == 0
    for ours, theirs in zip(found, alone.values(), strict=True):
        for a, b in zip(chain(*ours), chain(*theirs), strict=True):
            assert a.token == b.token
            assert a.logits is not None
            assert b.logits is not None
            np.testing.assert_array_equal(a.logits, b.logits)


# the real model: to tolerance

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small",
    "def add(a, b):\n    return",
    "Water boils at a temperature of",
    "My favourite colour is",
)


@pytest.fixture(scope="module")
def mix(smollm2: hw.Engine) -> Mix:
    texts = [smollm2.tokenizer.encode(text) for text in TEXTS]
    return Mix([[*texts[n % 5], *texts[n % 3][: n % 4]] for n in range(64)])


@pytest.fixture(scope="module")
def alone(smollm2: hw.Engine, mix: Mix) -> Callable[[int], dict[int, list[list[Drawn]]]]:
    """What a third of the programs, of every kind, get by themselves, on pages of one size.

    Sums over a page are taken in the order of its slots, and rows quantized to 8 bits make more of the last bit.
    """

    @cache
    def found(size: int) -> dict[int, list[list[Drawn]]]:
        return one_at_a_time(smollm2.decoder, mix, size, range(0, 64, 3))

    return found


def one_at_a_time(decoder: Any, mix: Mix, size: int, programs: range) -> dict[int, list[list[Drawn]]]:
    with hw.Engine(decoder, pages=4096 // size, page_size=size, threads=2) as engine:
        return engine.run(Mix(mix.prompts, look=True).in_turn, programs)


SIZES = {how: 4 if how == "with hardly any pages" else 16 for how in RUNS}


@pytest.mark.parametrize("how", swept(RUNS))
def test_64_generations_of_the_real_model_are_those_of_one_at_a_time(
    smollm2: hw.Engine, mix: Mix, alone: Callable[[int], dict[int, list[list[Drawn]]]], how: str
) -> None:
    compare(smollm2.decoder, mix, alone(SIZES[how]), how)


@pytest.mark.slow
@pytest.mark.parametrize("how", RUNS)
def test_every_one_of_64_generations_of_the_real_model(smollm2: hw.Engine, mix: Mix, how: str) -> None:
    compare(smollm2.decoder, mix, one_at_a_time(smollm2.decoder, mix, SIZES[how], range(64)), how)


def compare(decoder: Any, mix: Mix, alone: dict[int, list[list[Drawn]]], how: str) -> None:
    pages, size, programs = 256, SIZES[how], list(range(64))
    if size == 4:
        pages, programs = 12, list(alone)
    with hw.Engine(decoder, pages=pages, page_size=size, threads=2) as engine:
        found = dict(zip(programs, engine.run(lambda e: RUNS[how](mix, e, programs)), strict=True))
        assert (engine.stats().preemptions > 20) == (size == 4)
        assert idle(engine)
        assert engine.stats().pages_held == 0
        exact = engine.info.runner != "torch"  # the native step's bits depend on the row alone
    for n, theirs in alone.items():
        assert_same_tokens(theirs, found[n])
    assert sum(tokens(found[n]) != tokens(theirs) for n, theirs in alone.items()) <= (0 if exact else 2)


def tokens(drawn: list[list[Drawn]]) -> list[int]:
    return [d.token for d in chain(*drawn)]
