"""Many programs at once over the scripted runner: pages, results, order. No weights, so thousands are cheap.

The state machine steps the loop by hand, so a failing example is a list of operations that fails every time; the storm
below it uses real threads and event loops.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import headway as hw
from headway.program.execution import Execution
from headway.runtime.batch import Batch
from headway.runtime.job import PATIENCE
from headway.runtime.runners.base import SegmentResult
from headway.testing import scripted_engine, stepping
from support.properties import examples
from support.scripted import QUIET, Sticking, V, check_pages, continued, opened, result, seen

POISON = 13  # a token that makes the device fail
COUNTS = st.sampled_from([1, 1, 1, 2, 15, 16, 17, 31, 33, 48])
BIDS = 5  # bids lie between -BIDS and BIDS here
LONGEST_WAIT = (2 * BIDS + 2) * PATIENCE * 4  # steps; a claim on pages rises by 1 every PATIENCE steps


class FailingRunner(Sticking):
    """Fails every batch that has the poison in it. What is in `meanwhile` happens while it computes."""

    def __init__(self, vocab: int, page_size: int) -> None:
        super().__init__(vocab, page_size)
        self.meanwhile: list[Callable[[], None]] = []

    def execute(self, batch: Batch) -> list[SegmentResult]:
        while self.meanwhile and batch.segments:
            self.meanwhile.pop(0)()
        if (batch.tokens == POISON).any():
            raise RuntimeError("poisoned")
        return super().execute(batch)


@dataclass(eq=False)
class Twin:
    """A context and what it must be: tokens, and what each attended to."""

    context: hw.Context
    tokens: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    running: Running | None = None
    next: Running | None = None  # a pass that takes the token of the one in flight


@dataclass(eq=False)
class Running:
    execution: Execution[hw.Output]
    handle: hw.SampleHandle
    tokens: list[int]
    rows: list[np.ndarray]
    row: int


class Machine(RuleBasedStateMachine):
    """Operations of many programs, one at a time; the loop is stepped by hand."""

    @initialize(pages=st.sampled_from([6, 9, 14, 40]), budget=st.sampled_from([5, 16, 64]))
    def start(self, pages: int, budget: int) -> None:
        self.pages = pages
        self.device = FailingRunner(V, 16)
        self.engine = opened(self.device, pages=pages, max_batch_tokens=budget, trim=True)
        self.by_hand = stepping(self.engine)
        self.step = self.by_hand.__enter__()
        self.twins: list[Twin] = []

    # -- programs --------------------------------------------------------------------------------------------------

    @rule(bid=st.integers(-BIDS, BIDS), salt=st.sampled_from(["", "", "a"]))
    def opens(self, bid: int, salt: str) -> None:
        if len(self.twins) < 8:
            self.twins.append(Twin(self.engine.context(priority=bid, salt=salt)))

    @rule(which=st.integers(0, 7), count=COUNTS, seed=st.integers(0, 3), window=st.sampled_from([None, None, 5, 20]))
    def submits(self, which: int, count: int, seed: int, window: int | None) -> None:
        twin = self.idle(which)
        if twin is None:
            return
        new = [t if t != POISON else 1 for t in np.random.default_rng(seed).integers(0, V, count).tolist()]
        base, total = len(twin.tokens), len(twin.tokens) + count
        if -(-total // 16) > self.pages:
            with pytest.raises(hw.OutOfPages, match="the pool has"):
                twin.context.forward().input(new).execute()
            return
        forward = twin.context.forward().input(new)
        if window is not None:
            forward.attention_mask(hw.Mask.window(window))
        row = count - 1 if seed else 0
        handle = forward.sample([row], hw.Argmax())
        rows = [seen(slot, window) for slot in range(base, total)]
        twin.running = Running(forward.execute(), handle, new, rows, base + row)

    @rule(which=st.integers(0, 7), more=st.sampled_from([0, 0, 0, 1, 14, 16, 40]))
    def submits_the_next(self, which: int, more: int) -> None:
        """A pass over the token that the one in flight samples, and some more."""
        twin = self.twins[which % len(self.twins)] if self.twins else None
        if twin is None or twin.running is None or twin.next is not None or twin.running.execution.done():
            return
        total = len(twin.tokens) + len(twin.running.tokens) + 1 + more
        if -(-total // 16) > self.pages:
            return
        forward = twin.context.forward().input(twin.running.handle).input([2] * more)
        handle = forward.sample([-1], hw.Argmax())
        rows = [seen(slot) for slot in range(total - 1 - more, total)]
        with suppress(hw.PassFailed):  # the one before has failed in the step that is going on
            twin.next = Running(forward.execute(), handle, [-1] + [2] * more, rows, total - 1)

    @rule(
        what=st.sampled_from(["submits", "submits", "submits_the_next", "submits_the_next", "cancels", "releases"]),
        which=st.integers(0, 7),
        count=COUNTS,
        seed=st.integers(0, 3),
    )
    def while_the_device_computes(self, what: str, which: int, count: int, seed: int) -> None:
        given = {"submits": (count, seed, None), "submits_the_next": (0,)}.get(what, ())
        self.device.meanwhile.append(lambda: getattr(self, what)(which, *given))

    @rule(which=st.integers(0, 7))
    def submits_poison(self, which: int) -> None:
        twin = self.idle(which)
        if twin is None or -(-(len(twin.tokens) + 1) // 16) > self.pages:
            return
        forward = twin.context.forward().input([POISON])
        handle = forward.sample([0], hw.Argmax())
        twin.running = Running(forward.execute(), handle, [POISON], [], 0)

    @rule(which=st.integers(0, 7))
    def forks(self, which: int) -> None:
        twin = self.idle(which)
        if twin is None or len(self.twins) >= 8:
            return
        try:
            context = twin.context.fork()
        except hw.OutOfPages:
            return
        self.twins.append(Twin(context, list(twin.tokens), list(twin.rows)))

    @rule(which=st.integers(0, 7), part=st.floats(0, 1))
    def truncates(self, which: int, part: float) -> None:
        twin = self.idle(which)
        if twin is None:
            return
        drop = int(part * len(twin.tokens))
        try:
            twin.context.truncate(drop)
        except hw.OutOfPages:
            return
        keep = len(twin.tokens) - drop
        twin.tokens, twin.rows = twin.tokens[:keep], twin.rows[:keep]

    @rule(which=st.integers(0, 7))
    def cancels(self, which: int) -> None:
        if self.twins and (twin := self.twins[which % len(self.twins)]).running is not None:
            twin.running.execution.cancel()
            twin.running = twin.next = None

    @rule(which=st.integers(0, 7), bid=st.integers(-BIDS, BIDS))
    def bids(self, which: int, bid: int) -> None:
        if self.twins:
            self.twins[which % len(self.twins)].context.set_bid(bid)

    @rule(which=st.integers(0, 7))
    def releases(self, which: int) -> None:
        if self.twins:
            self.twins.pop(which % len(self.twins)).context.release()

    @rule(which=st.integers(0, 7), name=st.sampled_from(["x", "y"]))
    def saves_and_opens(self, which: int, name: str) -> None:
        twin = self.idle(which)
        if twin is None or len(self.twins) >= 8:
            return
        try:
            twin.context.save(name)
            context = self.engine.open(name)
        except hw.OutOfPages:
            return
        assert context is not None
        self.twins.append(Twin(context, list(twin.tokens), list(twin.rows)))

    @rule(seed=st.integers(0, 3), count=COUNTS)
    def pins(self, seed: int, count: int) -> None:
        ids = np.random.default_rng(seed).integers(0, V, count).tolist()
        if self.engine.cache.pin(ids) and seed % 2:
            assert self.engine.cache.unpin(ids)

    @rule(times=st.integers(1, 4))
    def the_device_fails_at_edits(self, times: int) -> None:
        self.device.broken = times

    @rule()
    def clears_the_cache(self) -> None:
        self.engine.cache.clear()

    # -- the loop --------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.look()

    def look(self) -> None:
        """Every pass that has ended has the right result, or was refused for a reason."""
        for twin in self.twins:
            running = twin.running
            if running is None or not running.execution.done():
                continue
            twin.running, later, twin.next = None, twin.next, None
            out = self.outcome(running)
            if out is None:
                if later is not None:
                    with pytest.raises(hw.PassFailed, match="the pass whose token this one takes failed"):
                        later.execution.result(0)
                continue
            twin.tokens += running.tokens
            twin.rows += running.rows
            assert out.token(running.handle) == result(twin.tokens, twin.rows, running.row) % V
            assert twin.context.seq_len == len(twin.tokens)
            if later is not None:
                later.tokens[0] = out.token(running.handle)
                twin.running = later

    def outcome(self, running: Running) -> hw.Output | None:
        """What became of a pass that has ended: None when it failed, for a reason that there was."""
        if running.tokens == [POISON]:
            with pytest.raises(hw.PassFailed, match=r"poisoned|preparing pages"):
                running.execution.result(0)
            return None
        try:
            return running.execution.result(0)
        except hw.OutOfPages:
            assert self.engine._loop.kv_cache.pins or len(self.twins) > 1
        except hw.PassFailed as e:
            if "preparing pages" not in str(e) and not (POISON in running.tokens and "poisoned" in str(e)):
                raise
        return None

    @invariant()
    def pages_are_conserved(self) -> None:
        if hasattr(self, "engine"):
            check_pages(self.engine)

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if hasattr(self, "engine"):
            assert all(job.waited <= LONGEST_WAIT for job in self.engine._loop.jobs())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.engine._loop.kv_cache.pins):
            with self.engine._lock:
                self.engine._loop.kv_cache.unpin(name)
        for _ in range(5000):
            if all(t.running is None for t in self.twins):
                break
            self.step()
            self.look()
        assert all(t.running is None for t in self.twins), "a pass neither ended nor was refused"
        for twin in self.twins:
            twin.context.release()
        self.engine.delete("x")
        self.engine.delete("y")
        assert self.engine.stats().pages_held == 0
        self.pages_are_conserved()
        self.by_hand.__exit__(None, None, None)
        self.engine.close()

    def idle(self, which: int) -> Twin | None:
        if not self.twins:
            return None
        twin = self.twins[which % len(self.twins)]
        return twin if twin.running is None else None


TestManyPrograms = Machine.TestCase
TestManyPrograms.settings = settings(max_examples=examples(60), stateful_step_count=60, **QUIET)


@pytest.mark.slow
class TestManyProgramsLong(Machine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=120, **QUIET)


# -- real threads ----------------------------------------------------------------------------------------------------


async def one_program(engine: hw.Engine, rng: random.Random, prompts: list[list[int]]) -> None:
    """A prompt, some tokens, perhaps a fork, each checked."""
    prompt = rng.choice(prompts)
    count = rng.randrange(1, 12)
    async with engine.context(priority=rng.randrange(-3, 4)) as context:
        context.fill(prompt)
        tokens = await context.generate(hw.Argmax(), max_tokens=count).tokens()
        assert tokens == continued(prompt, count)
        if rng.random() < 0.3:
            async with context.fork() as fork:
                more = await fork.generate(hw.Argmax(), max_tokens=3).tokens()
                assert more == continued([*prompt, *tokens], 3)


async def storm(engine: hw.Engine, programs: int, seed: int) -> int:
    rng = random.Random(seed)
    prompts = [[rng.randrange(V) for _ in range(n)] for n in (1, 15, 16, 17, 40, 64, 70)]
    gate = asyncio.Semaphore(48)
    cancelled = 0

    async def guarded(number: int) -> None:
        nonlocal cancelled
        async with gate:
            task = asyncio.create_task(one_program(engine, random.Random(seed * 100_003 + number), prompts))
            if number % 5 == 0:
                await asyncio.sleep(rng.random() * 0.02)
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1

    await asyncio.gather(*(guarded(i) for i in range(programs)))
    return cancelled


@pytest.mark.parametrize("pages", [8, 30, 400])
def test_a_storm_of_programs_gets_right_results_and_leaves_nothing(pages: int) -> None:
    with scripted_engine(pages=pages, max_batch_tokens=64) as engine:
        assert engine.run(storm, 150, pages) > 0
        assert engine.stats().pages_held == 0
        assert (engine.stats().preemptions > 0) == (pages < 400)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [8, 30, 400])
def test_thousands_of_programs(pages: int) -> None:
    with scripted_engine(pages=pages, max_batch_tokens=64) as engine:
        engine.run(storm, 4000, pages)
        assert engine.stats().pages_held == 0
