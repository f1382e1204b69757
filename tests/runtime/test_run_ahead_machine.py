"""Run-ahead decoding, in any order of what programs and the device may do, on pages of the scripted model.

The state machine steps the loop and an event loop by hand, so a failing example is a list of operations that fails
every time. Every token is compared with what the sequence gives when it is computed at once, and every slot of every
page with what must stand there.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import headway as hw
from headway.base.rng import uniform
from headway.kv.allocator import Clear, Edit
from headway.models.description import ShortConv
from headway.runtime.decode import Decode
from headway.runtime.scheduler.step_plan import StepPlan
from headway.testing import _hash
from support.overlapping import DecodingRunner, OverlappingRunner
from support.properties import examples
from support.run_ahead import abandoned, alike, by_hand, ends, run_ahead, steered
from support.scripted import QUIET, V, opened, result, seen
from support.stepped import Both, check_contents, check_engine

SIZE = 16
WHICH = st.integers(0, 5)
COUNTS = st.sampled_from([1, 2, 13, 15, 16, 17, 30])
STOPS = [list(range(7, V, 12)), [], []]  # about one token in twelve ends a generation of the first kind


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """A rule collects garbage: it need not look at what other modules have made."""
    gc.collect()
    gc.freeze()


@dataclass(eq=False)
class Said:
    """A generation and how it draws."""

    generation: hw.Generation
    seed: int | None
    window: int | None
    stops: list[int]
    limit: int


@dataclass(eq=False)
class Twin:
    """A context and what it must be: its tokens, and what those that are computed attended to."""

    context: hw.Context
    tokens: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    task: asyncio.Future[Any] | None = None
    step_of: Said | None = None  # whose step the task makes; None for a flush

    def compute(self, window: int | None) -> None:
        """All tokens have been computed now, those that waited under this mask."""
        for slot in range(len(self.rows), len(self.tokens)):
            self.rows.append(seen(slot, window))

    def next(self, said: Said) -> int:
        """The token that must come."""
        recurrent = self.context.engine._states is not None
        found = result(self.tokens, self.rows, recurrent=recurrent)
        if said.seed is not None:
            found = _hash(found, int(uniform(said.seed, len(self.tokens) - 1) * (1 << 53)))
        return found % V


class Machine(RuleBasedStateMachine):
    """Programs with generations, one operation at a time."""

    @initialize(
        beside=st.booleans(),
        pages=st.sampled_from([7, 10, 16, 60]),
        budget=st.sampled_from([2, 5, 16, 64, 64]),
        counts=st.lists(COUNTS, min_size=1, max_size=4),
        window=st.sampled_from([None, None, 5, 20]),
        stops=st.sampled_from(STOPS),
    )
    def begins(
        self, *, beside: bool, pages: int, budget: int, counts: list[int], window: int | None, stops: list[int]
    ) -> None:
        self.device = OverlappingRunner(V, SIZE) if beside else DecodingRunner(V, SIZE)
        self.engine = self.opened(pages=pages, max_batch_tokens=budget)
        self.hand = Both(self.engine).__enter__()
        self.twins: list[Twin] = []
        for i, count in enumerate(counts):
            self.opens(count, i, 0)
            self.generates(i, i % 2 or None, window, stops, 60)

    def opened(self, **options: Any) -> hw.Engine:
        return opened(self.device, **options)

    # -- programs --------------------------------------------------------------------------------------------------

    @rule(count=COUNTS, seed=st.integers(0, 3), bid=st.integers(-2, 2))
    def opens(self, count: int, seed: int, bid: int) -> None:
        if len(self.twins) < 6:
            ids = np.random.default_rng(seed).integers(0, V, count).tolist()
            self.twins.append(Twin(self.engine.context(priority=bid).fill(ids), ids))

    @rule(rounds=st.integers(1, 20), steps=st.integers(0, 3), all_of=st.booleans())
    def works(self, rounds: int, steps: int, all_of: bool) -> None:
        """Programs take steps, one of them or all, and the loop goes on."""
        for _ in range(rounds):
            for i in range(len(self.twins) if all_of else 1):
                self.takes_a_step(i, False)
            self.steps(steps)

    @rule(
        which=WHICH,
        seed=st.sampled_from([None, None, 1, 2]),
        window=st.sampled_from([None, None, None, 5, 20]),
        stops=st.sampled_from(STOPS),
        limit=st.sampled_from([1, 3, 20, 60, 60]),
    )
    def generates(self, which: int, seed: int | None, window: int | None, stops: list[int], limit: int) -> None:
        if (twin := self.idle(which)) is None or not twin.tokens:
            return
        sampler = hw.Argmax() if seed is None else hw.Multinomial(seed=seed)
        window = window if self.engine._states is None else None  # recurrent layers see every slot
        mask = None if window is None else hw.Mask.window(window)
        made = twin.context.generate(sampler, max_tokens=limit, stop=stops, stop_only=True, attention_mask=mask)
        twin.said = [*twin.said[-1:], Said(made, seed, window, stops, limit)]

    @rule(which=WHICH, older=st.booleans())
    def takes_a_step(self, which: int, older: bool) -> None:
        twin = self.idle(which)
        if twin is None or not twin.said or not twin.tokens:
            return
        said = twin.said[0 if older else -1]
        if said.generation.finish is None:
            twin.step_of, twin.task = said, self.hand.start(anext(said.generation))
            self.look()

    @rule(which=WHICH)
    def flushes(self, which: int) -> None:
        if (twin := self.idle(which)) is not None:
            twin.step_of, twin.task = None, self.hand.start(twin.context.flush())
            self.look()

    @rule(which=WHICH, part=st.floats(0, 1))
    def truncates(self, which: int, part: float) -> None:
        if (twin := self.idle(which)) is None:
            return
        drop = int(part * len(twin.tokens))
        try:
            twin.context.truncate(drop)
        except hw.OutOfPages:
            return
        keep = len(twin.tokens) - drop
        twin.tokens, twin.rows = twin.tokens[:keep], twin.rows[:keep]

    @rule(which=WHICH, ids=st.lists(st.integers(0, V - 1), min_size=1, max_size=3))
    def fills(self, which: int, ids: list[int]) -> None:
        if (twin := self.idle(which)) is not None:
            twin.context.fill(ids)
            twin.tokens += ids

    @rule(which=WHICH, whole=st.booleans())
    def forks(self, which: int, whole: bool) -> None:
        twin = self.idle(which)
        if twin is None or len(self.twins) >= 6:
            return
        try:
            if whole and twin.said:
                said = twin.said[-1]
                made = said.generation.fork()
                if said.seed is None:
                    self.twins.append(Twin(made.context, list(twin.tokens), list(twin.rows)))
                    self.twins[-1].said = [Said(made, None, said.window, said.stops, said.limit)]
                    return
                made.context.release()
            self.twins.append(Twin(twin.context.fork(), list(twin.tokens), list(twin.rows)))
        except hw.OutOfPages:
            return

    @rule(which=WHICH)
    def looks(self, which: int) -> None:
        if (twin := self.idle(which)) is not None:
            self.agree(twin)

    @rule(which=WHICH, more=st.sampled_from([None, 1, 5, 30]), seed=st.sampled_from([None, 5]))
    def steers(self, which: int, more: int | None, seed: int | None) -> None:
        """A generation that goes on after its end, or up to another one, or draws otherwise."""
        if (twin := self.idle(which)) is None or not twin.said:
            return
        said = twin.said[-1]
        if seed is not None and said.seed is not None:
            said.generation.reseed(seed)
            said.seed = seed
        else:
            said.generation.resume(more)
            said.limit = said.limit if more is None else len(said.generation.generated) + more

    @rule(which=WHICH)
    def accepts(self, which: int) -> None:
        twin = self.idle(which)
        if twin is None or not twin.said:
            return
        said = twin.said[-1]
        if said.generation.finish is None and len(said.generation.generated) < said.limit and 1 not in said.stops:
            said.generation.accept([1])
            twin.tokens.append(1)

    @rule(which=WHICH)
    def cancels(self, which: int) -> None:
        if self.twins and (twin := self.twins[which % len(self.twins)]).task is not None:
            twin.task.cancel()
            self.hand.pump()
            self.look()

    @rule(which=WHICH)
    def releases(self, which: int) -> None:
        if self.twins:
            twin = self.twins.pop(which % len(self.twins))
            twin.context.release()
            self.hand.pump()
            assert twin.task is None or twin.task.done()
            if twin.task is not None and twin.task.exception() is not None:
                assert isinstance(twin.task.exception(), hw.Closed)
            for said in twin.said:
                if said.generation.finish is None:
                    with pytest.raises((hw.HeadwayError, StopAsyncIteration)):
                        self.hand.run(anext(said.generation), limit=0)

    @rule(which=WHICH)
    def forgets(self, which: int) -> None:
        """A context that nobody has any more."""
        if self.twins and self.twins[which % len(self.twins)].task is None:
            self.twins.pop(which % len(self.twins))
            gc.collect()

    @rule(which=WHICH, bid=st.integers(-2, 2))
    def bids(self, which: int, bid: int) -> None:
        if self.twins:
            self.twins[which % len(self.twins)].context.set_bid(bid)

    @rule(which=WHICH)
    def is_late(self, which: int) -> None:
        """Its deadline passes."""
        if self.twins:
            self.twins[which % len(self.twins)].context._table.deadline = 0.0

    # -- the device ------------------------------------------------------------------------------------------------

    @rule(moods=st.lists(st.sampled_from(["well", "refuses", "fails", "undecided", "nan"]), min_size=1, max_size=3))
    def the_device_has_moods(self, moods: list[str]) -> None:
        self.device.moods[:] = moods

    @rule(times=st.integers(1, 3))
    def the_device_fails_at_edits(self, times: int) -> None:
        self.device.broken = times

    @rule()
    def clears_the_cache(self) -> None:
        self.engine.cache.clear()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.hand.step()
            self.look()

    # -- what must be ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Every step that was made has the right token; one that was not has changed nothing."""
        for twin in list(self.twins):
            if twin.task is None or not twin.task.done():
                continue
            task, twin.task = twin.task, None
            if task.cancelled():
                self.agree(twin)
            elif (error := task.exception()) is not None:
                self.excused(twin, error)
            elif twin.step_of is None:
                twin.compute(None)
            else:
                self.made(twin, twin.step_of, task.result())

    def made(self, twin: Twin, said: Said, step: hw.Step) -> None:
        if not step.tokens and step.finish == "length":  # no token was left to be drawn
            assert len(said.generation.generated) >= said.limit
            return
        twin.compute(said.window)
        expected = twin.next(said)
        if expected in said.stops:
            assert (step.tokens, step.finish) == ((), "stop")
        else:
            assert step.tokens == (expected,)
            twin.tokens.append(expected)
            assert step.finish == ("length" if len(said.generation.generated) >= said.limit else None)

    def excused(self, twin: Twin, error: BaseException) -> None:
        """A step failed: for a reason that there was, and the context is as before."""
        if isinstance(error, hw.DeadlineExceeded):
            assert twin.context._table.deadline == 0.0
        elif not isinstance(error, hw.OutOfPages):
            assert isinstance(error, hw.PassFailed), error
            assert any(why in str(error) for why in ("preparing pages", "not a number", "failed")), error
        self.agree(twin)

    def agree(self, twin: Twin) -> None:
        context = twin.context
        assert context._table.lost is None  # every slot can be computed again
        assert list(context.tokens) == twin.tokens
        assert context.seq_len + len(context.pending) == len(twin.tokens)
        if context.seq_len > len(twin.rows) and twin.said:  # a first pass that stayed, though nobody waited for it
            twin.rows += [seen(slot) for slot in range(len(twin.rows), context.seq_len)]

    @invariant()
    def pages_are_right(self) -> None:
        if hasattr(self, "engine"):
            check_engine(self.engine)
            check_contents(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.device.broken, self.device.moods = 0, []
        for _ in range(3000):
            if all(t.task is None for t in self.twins):
                break
            self.steps(1)
        assert all(t.task is None for t in self.twins), "a step neither ended nor was refused"
        for twin in list(self.twins):
            self.agree(twin)
        for twin in self.twins:
            twin.context.release()
        gc.collect()
        for _ in range(3):
            self.hand.step()
        self.pages_are_right()
        assert self.engine.stats().pages_held == 0
        self.hand.__exit__()

    def idle(self, which: int) -> Twin | None:
        if not self.twins:
            return None
        twin = self.twins[which % len(self.twins)]
        return twin if twin.task is None else None


TestRunAhead = Machine.TestCase
TestRunAhead.settings = settings(max_examples=examples(60), stateful_step_count=50, **QUIET)


@pytest.mark.slow
class TestRunAheadLong(Machine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=80, **QUIET)


class RecurrentMachine(Machine):
    """The same on a model with recurrent layers, whose state has few places or many, kept often or seldom."""

    @initialize(places=st.sampled_from([2, 3, 8]), taps=st.sampled_from([2, 40, 100, 100_000]))
    def has_places(self, *, places: int, taps: int) -> None:
        self.places, self.taps = places, taps

    def opened(self, **options: Any) -> hw.Engine:
        with patch("headway.program.engine.LEAST_PLACES", getattr(self, "places", 8)):
            return opened(self.device, recurrence=ShortConv(getattr(self, "taps", 40)), **options)


TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = settings(max_examples=40, stateful_step_count=50, **QUIET)


@pytest.mark.slow
class TestRecurrentLong(RecurrentMachine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=80, **QUIET)


# -- one thing at a time ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[DecodingRunner, OverlappingRunner])
def hand(request: pytest.FixtureRequest) -> Iterator[Both]:
    with Both(opened(request.param(V, SIZE), pages=40)) as made:
        yield made


def device(hand: Both) -> DecodingRunner:
    runner = hand.engine._loop._runner
    assert isinstance(runner, DecodingRunner)
    return runner


def begun(hand: Both, ids: list[int], **options: Any) -> tuple[Twin, hw.Generation]:
    """A context with these tokens and a generation that has made its first step, with its model."""
    twin = Twin(hand.engine.context().fill(ids), list(ids))
    made = twin.context.generate(hw.Argmax(), max_tokens=400, stop_only=True, **options)
    twin.said = [Said(made, None, None, [], 400)]
    take(hand, twin)
    return twin, made


def take(hand: Both, twin: Twin, count: int = 1) -> None:
    """So many steps, each with the right token."""
    for _ in range(count):
        step = hand.run(anext(twin.said[0].generation))
        twin.compute(None)
        assert step.tokens == (twin.next(twin.said[0]),)
        twin.tokens += step.tokens


def rest(hand: Both) -> None:
    """Step until nothing is to be done."""
    for _ in range(200):
        hand.step()
    assert hand.engine._loop.waiting() == 0


def decoding(hand: Both) -> list[Decode]:
    return [job.decode for job in hand.engine._loop.jobs() if job.decode is not None]


def test_a_released_context_gives_no_more_tokens(hand: Both) -> None:
    twin, generation = begun(hand, [1, 2, 3])
    rest(hand)
    assert len(decoding(hand)[0].buffer) > 3
    twin.context.release()
    with pytest.raises(hw.Closed):
        hand.run(anext(generation), limit=5)


def test_a_sequence_that_has_failed_gives_no_tokens_of_a_released_context(hand: Both) -> None:
    twin, generation = begun(hand, [1, 2, 3])
    device(hand).moods = ["well"] * 3 + ["nan"]
    rest(hand)
    assert not hand.engine._loop.busy(twin.context._table)
    twin.context.release()
    with pytest.raises(hw.PassFailed, match="not a number"):
        hand.run(anext(generation), limit=5)


def test_a_closed_engine_gives_no_more_tokens() -> None:
    with Both(opened(OverlappingRunner(V, SIZE), pages=40)) as hand:
        twin, generation = begun(hand, [1, 2, 3])
        rest(hand)
        waits, late = begun(hand, [4, 5])
        task = hand.start(_all(late))
    with Both(opened(OverlappingRunner(V, SIZE), pages=40)) as other:
        with pytest.raises(hw.Closed):
            other.run(anext(generation), limit=5)
        assert twin.context.engine is waits.context.engine
    assert isinstance(task.exception(), hw.Closed)


async def _all(generation: hw.Generation) -> None:
    async for _ in generation:
        pass


@pytest.mark.parametrize("mood", ["refuses", "fails", "undecided"])
@pytest.mark.parametrize("length", [1, 12, 14])
def test_a_step_that_comes_to_nothing_is_taken_again(hand: Both, mood: str, length: int) -> None:
    """Whatever becomes of one, the one before it, which may be on its way, stays what it was."""
    for good in range(6):
        twin, _ = begun(hand, [good, *range(length)])
        device(hand).moods = ["well"] * good + [mood] * 2
        for _ in range(24):
            take(hand, twin)
            check_engine(hand.engine)
        check_contents(hand.engine)
        twin.context.release()


def spoil(hand: Both, twin: Twin, *, flying: bool = False) -> None:
    """A page cannot be wiped after a sequence's end: before a step of decode rows, or before an ordinary one."""
    table = twin.context._table
    assert table.length // SIZE > table.committed  # a page is full of tokens that the program has not all taken
    with hand.engine._lock:
        hand.engine._allocator.edit(Clear(table.held()[-1], table.length % SIZE))
    device(hand).broken = 2  # with all others, and alone
    if flying:
        hand.step()
    else:
        hand.run(hand.engine.context().fill([7]).flush())
    assert (table.is_preempted, table.lost, device(hand).broken) == (True, None, 0)


@pytest.mark.parametrize("taken", [0, 3, 7])
@pytest.mark.parametrize("length", [1, 12, 16])
def test_a_sequence_that_rests_ahead_is_computed_again_when_its_page_is_spoilt(
    hand: Both, length: int, taken: int
) -> None:
    twin, _ = begun(hand, list(range(length)))
    rest(hand)
    take(hand, twin, taken)
    spoil(hand, twin)
    take(hand, twin, 30)
    check_engine(hand.engine)
    check_contents(hand.engine)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("length", [1, 12, 15])
def test_a_sequence_whose_page_is_damaged_before_its_step_is_computed_again(
    hand: Both, length: int, alone: bool
) -> None:
    twin, _ = begun(hand, list(range(length)))
    rest(hand)
    take(hand, twin, 8)
    assert not any(job.resting for job in hand.engine._loop.jobs())
    spoil(hand, twin, flying=alone)
    take(hand, twin, 40)
    check_engine(hand.engine)
    check_contents(hand.engine)


@pytest.mark.parametrize("pages", [7, 40])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_whose_next_page_cannot_be_cleared_is_taken_again(count: int, pages: int) -> None:
    """With another page; where pages are short, another context makes room for it."""
    for kind in (DecodingRunner, OverlappingRunner):
        with Both(opened(kind(V, SIZE), pages=pages)) as hand, failing_steps(hand) as failed:
            twins = [begun(hand, [i, *range(9)])[0] for i in range(count)]
            for _ in range(40):
                for twin in twins:
                    take(hand, twin)
                check_engine(hand.engine)
            check_contents(hand.engine)
            assert failed
            assert (hand.engine.stats().preemptions > 0) == (pages == 7 and count == 3)


@contextmanager
def failing_steps(hand: Both) -> Iterator[list[Clear]]:
    """No page can be cleared before a step of decode rows; those that could not."""
    loop, runner, failed = hand.engine._loop, device(hand), list[Clear]()
    begin, edit = loop._begin, runner.edit

    def fail(edits: Sequence[Edit]) -> None:
        if clears := [e for e in edits if isinstance(e, Clear)]:
            failed.extend(clears)
            raise RuntimeError("stuck")
        edit(edits)

    def begin_failing(plan: StepPlan | None, *rest: Any) -> Any:
        runner.edit = fail if plan is not None and not plan.chunks else edit  # type: ignore[method-assign]
        return begin(plan, *rest)

    loop._begin = begin_failing  # type: ignore[method-assign]
    yield failed
    loop._begin, runner.edit = begin, edit  # type: ignore[method-assign]


def test_logits_that_are_not_numbers_leave_nothing_behind(hand: Both) -> None:
    for good in range(1, 12):
        twin, generation = begun(hand, [good, *range(9)])
        device(hand).moods = ["well"] * good + ["nan"]
        task = hand.start(_all(generation))
        for _ in range(40):
            hand._step()  # and nobody hears of it before all are applied
        hand.pump()
        with pytest.raises(hw.PassFailed, match="not a number"):
            task.result()
        assert twin.context.tokens == (good, *range(9), *generation.generated)
        twin.tokens = list(twin.context.tokens)
        check_contents(hand.engine)
        take(hand, twin, 20)
        check_engine(hand.engine)
        twin.context.release()


def test_pages_may_be_others_after_an_ordinary_step(hand: Both) -> None:
    """A decoding sequence that ran alone, was preempted, resumed, and runs alone again."""
    loop = hand.engine._loop
    twin, _ = begun(hand, list(range(24)))
    rest(hand)
    take(hand, twin, 9)
    other = hand.start(hand.engine.context().fill([5] * 40).flush())
    with hand.engine._lock:
        loop.kv_cache.preempt(twin.context._table, loop._queue)
        taken = hand.engine._allocator.take(3)  # those that it had
    while not other.done():
        hand.step()
    assert not twin.context._table.is_preempted
    take(hand, twin, 40)
    with hand.engine._lock:
        hand.engine._allocator.drop(taken)
    check_engine(hand.engine)
    check_contents(hand.engine)


def test_what_was_cut_while_it_was_aside_does_not_come_back(hand: Both) -> None:
    twin, _ = begun(hand, list(range(12)))
    rest(hand)
    table = twin.context._table
    with hand.engine._lock:
        assert not table.can_replay  # a page is full that the program has not taken
        hand.engine._loop.kv_cache.preempt(table, hand.engine._loop._queue)
    assert list(twin.context.tokens) == twin.tokens
    take(hand, twin, 30)
    check_engine(hand.engine)
    check_contents(hand.engine)


def test_nothing_is_drawn_after_an_end_token(hand: Both) -> None:
    twin, _ = begun(hand, [1, 2, 3])
    take(hand, twin, 12)
    end = twin.tokens[9]
    first = twin.tokens.index(end, 3)
    again = hand.engine.context().fill([1, 2, 3])
    generation = again.generate(hw.Argmax(), max_tokens=100, stop=[end], stop_only=True)
    hand.run(anext(generation))
    rest(hand)
    assert list(decoding(hand)[-1].buffer) == twin.tokens[4 : first + 1]
    assert hand.run(generation.tokens()) == twin.tokens[3:first]
    assert list(again.tokens) == twin.tokens[:first]


def test_a_lost_context_gives_its_pages_back_while_others_fly(hand: Both) -> None:
    twin, _ = begun(hand, [1, 2, 3])
    lost = begun(hand, [4, 5, 6])
    hand.step()
    assert (hand.engine._loop._in_flight is not None) == isinstance(device(hand), OverlappingRunner)
    table = lost[0].context._table
    del lost
    gc.collect()
    for _ in range(4):
        take(hand, twin)
        hand.step()
    assert table.closed


def test_nobody_holds_on_to_a_sequence_that_has_failed(hand: Both) -> None:
    twin, generation = begun(hand, [1, 2, 3])
    table = twin.context._table
    device(hand).moods = ["nan"]
    with pytest.raises(hw.PassFailed):
        hand.run(_all(generation))
    rest(hand)
    del twin, generation
    gc.collect()
    with hand.engine._lock:
        hand.engine._loop.drain()
    assert table.closed


def test_a_sequence_has_waited_for_its_next_token_alone() -> None:
    """What it waited for earlier tokens gives it no claim on pages."""
    with Both(opened(DecodingRunner(V, SIZE), pages=40, max_batch_tokens=1)) as hand:
        twins = [begun(hand, [i])[0] for i in range(3)]
        for _ in range(30):
            for twin in twins:
                take(hand, twin)
        assert all(job.waited + job.waited_before <= 3 for job in hand.engine._loop.jobs())


def test_a_generation_that_is_cut_short_leaves_no_sequence(hand: Both) -> None:
    twin, generation = begun(hand, [1, 2, 3])
    generation.resume(2)
    take(hand, twin, 2)
    assert generation.finish == "length"
    assert decoding(hand) == []


def test_a_context_that_was_changed_after_a_failure_is_left_alone(hand: Both) -> None:
    for good in range(1, 5):
        twin, generation = begun(hand, [good, 2, 3, 4, 5, 6])
        device(hand).moods = ["well"] * good + ["nan"]
        task = hand.start(_all(generation))
        while hand.engine._loop.busy(twin.context._table):
            hand._step()  # and nobody hears of it yet
        twin.context.truncate(4).fill([7])
        left = twin.context.tokens
        hand.pump()
        assert isinstance(task.exception(), hw.PassFailed)
        assert twin.context.tokens == left
        assert generation.generated == left[6:-1]
        check_engine(hand.engine)
        twin.context.release()


def test_whoever_comes_while_the_worker_sleeps_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding sequence that rests is no reason to wait for more passes."""

    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill([1, 2, 3]) as one, engine.context().fill([4]) as other:
            await anext(one.generate(hw.Argmax(), max_tokens=100, stop_only=True))
            while engine._loop.waiting():
                await asyncio.sleep(0.001)
            wait = engine._loop._changed.wait
            monkeypatch.setattr(engine._loop._changed, "wait", lambda timeout=None: wait())
            with engine._lock:
                engine._loop._gathering.expected = 5
                engine._loop._changed.notify_all()
            await asyncio.sleep(0.01)
            try:
                await asyncio.wait_for(other.flush(), 30)
            finally:
                monkeypatch.undo()

    with opened(DecodingRunner(V, SIZE), pages=40) as engine:
        engine.run(program)


@pytest.mark.parametrize("pages", [3, 4])
def test_a_sequence_that_fills_all_pages_ends_as_steps_by_hand_do(pages: int) -> None:
    for kind in (DecodingRunner, OverlappingRunner):
        with Both(opened(kind(V, SIZE), pages=pages)) as hand:
            twin, generation = begun(hand, [1, 2, 3])
            with pytest.raises(hw.OutOfPages):
                hand.run(_all(generation))
            assert twin.context.tokens == (1, 2, 3, *generation.generated)
            assert (twin.context.seq_len, len(twin.context.pending)) == (pages * SIZE, 1)
            check_engine(hand.engine)
            check_contents(hand.engine)
            twin.context.truncate(10)
            twin.tokens = list(twin.context.tokens)
            take(hand, twin, 5)


@pytest.mark.parametrize("kind", [DecodingRunner, OverlappingRunner])
@pytest.mark.parametrize("least", [0, 7, 38])
def test_the_limit_of_positions_ends_it_as_steps_by_hand_do(kind: type[DecodingRunner], least: int) -> None:
    async def program(engine: hw.Engine, prompt: int, way: Any) -> Any:
        async with engine.context().fill([3] * prompt) as context:
            found = await way(context, hw.Multinomial(seed=3), max_tokens=100, min_tokens=least, stop=[50])
            return found, context.tokens, context.seq_len

    with opened(kind(V, SIZE), pages=30, max_positions=40) as engine:
        for prompt in (1, 5, 38, 39, 40):
            assert engine.run(program, prompt, run_ahead) == engine.run(program, prompt, by_hand)


def test_whatever_a_sequence_holds_is_given_back_before_its_next_token(hand: Both) -> None:
    """Pages that it was to come back into included, should it ever go on with some."""
    twin, _ = begun(hand, [1, 2, 3])
    rest(hand)
    loop, pool = hand.engine._loop, hand.engine._allocator
    (job,) = loop.jobs()
    with hand.engine._lock:
        job.pages, job.replay_pages = pool.take(1), pool.take(2)
        job.base = -1
        loop._scheduler._renewed(job)
        assert (job.base, job.pages, job.replay_pages) == (twin.context._table.length, [], [])
    check_engine(hand.engine)


def test_nobody_is_woken_for_tokens_that_wait(hand: Both) -> None:
    twin, _ = begun(hand, [1, 2, 3])
    take(hand, twin, 3)
    (job,) = hand.engine._loop.jobs()
    assert job.waiters == []


# -- real threads ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[DecodingRunner, OverlappingRunner])
def engine(request: pytest.FixtureRequest) -> Iterator[hw.Engine]:
    with opened(request.param(V, SIZE), pages=400) as made:
        yield made
        gc.collect()
        assert made.stats().pages_held == 0
        assert not made._loop._runner.faults  # type: ignore[attr-defined]


def test_many_generations_are_what_each_is_alone(engine: hw.Engine) -> None:
    engine.run(alike)
    engine.run(ends)


@pytest.mark.parametrize("seed", range(3))
def test_contexts_can_be_changed_between_steps(engine: hw.Engine, seed: int) -> None:
    engine.run(steered, seed)
    engine.run(abandoned, seed)


@pytest.mark.parametrize("kind", [DecodingRunner, OverlappingRunner])
@pytest.mark.parametrize("pages", [10, 14, 20])
def test_where_pages_are_short_contexts_are_preempted(kind: type[DecodingRunner], pages: int) -> None:
    with opened(kind(V, SIZE), pages=pages) as engine:
        engine.run(alike)
        assert engine.stats().preemptions > 0
        engine.run(abandoned, 1)
        gc.collect()
        assert engine.stats().pages_held == 0
        assert not engine._loop._runner.faults  # type: ignore[attr-defined]


def test_steps_may_be_taken_from_many_event_loops(engine: hw.Engine) -> None:
    context, again = engine.context().fill([1, 2, 3]), engine.context().fill([1, 2, 3])
    generation = context.generate(hw.Argmax(), max_tokens=60, stop_only=True)
    expected, _ = engine.run(lambda _: by_hand(again, hw.Argmax(), max_tokens=60, stop_only=True))
    while generation.finish is None:
        engine.run(lambda _: _next(generation))
    assert list(generation.generated) == expected
    context.release()
    again.release()


async def _next(generation: hw.Generation) -> hw.Step:
    return await anext(generation)


def test_other_threads_may_look_at_any_time(engine: hw.Engine) -> None:
    """Whoever looks between two steps takes the decoding sequence back, and nothing else changes."""
    context, again = engine.context().fill([1, 2, 3]), engine.context().fill([1, 2, 3])
    generation = context.generate(hw.Argmax(), max_tokens=150, stop_only=True)
    over, problems = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            try:
                if len(context.tokens) < 3 or context.seq_len < 0:
                    problems.append("short")
                with context.fork() as twin:
                    twin.truncate(1)
            except hw.ContextBusy:
                pass
            except BaseException as e:
                problems.append(repr(e))
                raise

    thread = threading.Thread(target=look)
    thread.start()
    try:
        tokens = engine.run(lambda _: generation.tokens())
    finally:
        over.set()
        thread.join()
    expected, _ = engine.run(lambda _: by_hand(again, hw.Argmax(), max_tokens=150, stop_only=True))
    assert (tokens, problems) == (expected, [])
    assert list(context.tokens) == [1, 2, 3, *expected]
    context.release()
    again.release()
