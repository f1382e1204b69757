"""Cancellation and failure: at every await point the context, its pages and its neighbors are exactly as before."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.runtime.batch import Batch
from headway.testing import random_model
from support import world as w
from support.checks import assert_close, logit_rows, random_tokens
from support.watched import WatchedRunner, tokens_of
from support.world import Judge, Twin

V = 97
POISON = 13


class Gate(WatchedRunner):
    """The engine's own runner behind a gate: steps wait while it is shut, and a step with a poisoned token fails."""

    def __init__(self, engine: hw.Engine) -> None:
        super().__init__(engine)
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.poison: int | None = None
        self.steps_before_shutting = -1
        self.open.set()

    def before(self, batch: Batch) -> None:
        if self.steps_before_shutting == 0:
            self.open.clear()
        self.steps_before_shutting -= 1
        self.entered.release()
        assert self.open.wait(60)
        if self.poison is not None and self.poison in tokens_of(batch):
            raise RuntimeError("no such memory")

    def shut(self, after: int = 0) -> None:
        """From now on steps wait, the first `after` excepted."""
        while self.entered.acquire(blocking=False):
            pass
        if after:
            self.steps_before_shutting = after
        else:
            self.open.clear()

    def someone_waits(self) -> None:
        assert self.entered.acquire(timeout=60)


@pytest.fixture(params=["llama-gqa-tied", "mistral-window"])
def parts(request: pytest.FixtureRequest) -> Iterator[tuple[hw.Engine, Gate, Judge]]:
    folder, judge = w.model(request.param)
    with hw.Engine(folder, threads=1, pages=64, page_size=8, max_batch_tokens=32) as engine:
        gate = Gate(engine)
        yield engine, gate, judge
        gate.open.set()


def snapshot(*contexts: hw.Context) -> Any:
    """Everything a context is, and who holds which page."""
    engine = contexts[0].engine
    with engine._lock:
        engine._loop.drain()
        tables = [c._table for c in contexts]
        return (
            [(t.length, list(t.pages), t.committed, list(t.tokens), list(t.positions), list(t.peaks)) for t in tables],
            [(list(t.masks), list(t.spans), t.repeatable, list(t.keys), id(t.state)) for t in tables],
            [c.pending for c in contexts],
            [engine._allocator.holders(p) for p in range(1, engine._allocator.total + 1)],
        )


def settled(engine: hw.Engine) -> None:
    """Wait until no step runs."""
    engine._loop.call(lambda: None)


def begun(engine: hw.Engine, judge: Judge, n: int = 21) -> Twin:
    twin = Twin(engine.context(), judge)
    twin.run(random_tokens(V, n))
    return twin.fill([3, 4])


async def until_cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- every await point ---------------------------------------------------------------------------------------------


def test_cancelled_before_its_step(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin, other = begun(engine, judge), begun(engine, judge, 5)
    before = snapshot(twin.context)

    async def program() -> None:
        gate.shut()
        neighbor = asyncio.ensure_future(asyncio.to_thread(other.run, [1]))
        await asyncio.to_thread(gate.someone_waits)
        task = asyncio.ensure_future(wait_for(twin.build(random_tokens(V, 20, 1))))
        await asyncio.sleep(0)
        with pytest.raises(hw.ContextBusy):
            twin.context.fill([1])
        await until_cancelled(task)
        assert snapshot(twin.context)[:3] == before[:3]
        twin.context.fill([5]).truncate(1)
        gate.open.set()
        await neighbor

    asyncio.run(program())
    other.context.release()
    assert snapshot(twin.context)[:3] == before[:3]
    twin.run([9])


def test_cancelled_during_its_step(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)

    async def program() -> None:
        gate.shut()
        task = asyncio.ensure_future(wait_for(twin.build(random_tokens(V, 20, 1))))
        await asyncio.to_thread(gate.someone_waits)
        held = engine.stats().pages_held
        await until_cancelled(task)
        assert snapshot(twin.context)[:3] == before[:3]
        assert engine.stats().pages_held == held  # the device still writes to them
        gate.open.set()

    asyncio.run(program())
    settled(engine)
    assert snapshot(twin.context) == before
    twin.run([9])


def test_a_new_pass_can_follow_while_the_cancelled_one_still_runs(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    gate.shut()
    doomed = twin.build(random_tokens(V, 20, 1)).execute()
    gate.someone_waits()
    doomed.cancel()
    threading.Timer(0.05, gate.open.set).start()
    twin.run(random_tokens(V, 3, 2))
    twin.run([1])


@pytest.mark.parametrize("chunk", [1, 2])
def test_cancelled_between_chunks(parts: tuple[hw.Engine, Gate, Judge], chunk: int) -> None:
    """Finished chunks are undone too; their pages may stay cached."""
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    free = engine._allocator.available

    async def program() -> None:
        gate.shut(after=chunk)
        task = asyncio.ensure_future(wait_for(twin.build(random_tokens(V, 90, 1))))
        for _ in range(chunk + 1):
            await asyncio.to_thread(gate.someone_waits)
        await until_cancelled(task)
        gate.open.set()

    asyncio.run(program())
    settled(engine)
    assert snapshot(twin.context) == before
    assert engine._allocator.available == free
    twin.run([9])


@pytest.mark.parametrize("turns", range(5))
def test_cancelled_after_its_result_was_there(parts: tuple[hw.Engine, Gate, Judge], turns: int) -> None:
    """The step is over and the task has not gone on yet: the pass is taken back, or it was delivered."""
    engine, _, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    plan = twin.plan([7, 8])

    async def program() -> bool:
        execution = twin.build([7, 8]).execute()
        task = asyncio.ensure_future(wait_for_execution(execution))
        await asyncio.sleep(0)
        while not execution._job.outcome.done():
            time.sleep(0.001)  # the event loop stands still: nobody has heard of it
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            return True
        await until_cancelled(task)
        return False

    if asyncio.run(program()):
        twin.world.advance(plan)
        twin.check()
    else:
        assert snapshot(twin.context) == before
    twin.run([9])


async def wait_for(forward: hw.Forward) -> hw.Output:
    return await forward.execute()


async def wait_for_execution(execution: Any) -> Any:
    return await execution


@pytest.mark.parametrize("way", ["timeout", "wait_for", "group", "result", "cancel"])
def test_every_way_to_give_up(parts: tuple[hw.Engine, Gate, Judge], way: str) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    gate.shut()

    async def program() -> None:
        if way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await twin.build([1, 2]).execute()
        elif way == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait_for(twin.build([1, 2])), 0.03)
        else:
            with pytest.raises(ExceptionGroup):
                await together()

    async def together() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for(twin.build([1, 2])))
            group.create_task(failing())

    async def failing() -> None:
        await asyncio.sleep(0.03)
        raise ValueError("mine")

    if way == "result":
        with pytest.raises(TimeoutError):
            twin.build([1, 2]).execute().result(timeout=0.03)
    elif way == "cancel":
        execution = twin.build([1, 2]).execute()
        execution.cancel()
        execution.cancel()
    else:
        asyncio.run(program())
    gate.open.set()
    settled(engine)
    assert snapshot(twin.context) == before
    twin.run([9])


def test_a_cancelled_flush_keeps_the_pending_tokens(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)

    async def program() -> None:
        gate.shut()
        task = asyncio.ensure_future(twin.context.flush())
        await asyncio.to_thread(gate.someone_waits)
        await until_cancelled(task)
        gate.open.set()

    asyncio.run(program())
    settled(engine)
    assert snapshot(twin.context) == before
    assert twin.context.pending == (3, 4)
    twin.run([9])


def test_a_result_that_was_delivered_stays(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, _, judge = parts
    twin = begun(engine, judge)
    plan = twin.plan([5])
    execution = twin.build([5]).execute()
    out = execution.result()
    execution.cancel()
    assert execution.result().stats == out.stats
    twin.world.advance(plan)
    twin.check()
    twin.run([6])


# -- what was built on it ------------------------------------------------------------------------------------------


def finished(twin: Twin, tokens: list[int]) -> Any:
    """A pass that has succeeded and whose result nobody has heard of."""
    execution = twin.build(tokens).execute()
    while not execution._job.outcome.done():
        time.sleep(0.001)
    return execution


BUILT: dict[str, Callable[[Twin], Any]] = {
    "truncate": lambda t: (t.context.truncate(9), t.world.truncate(9)),
    "truncate everything": lambda t: (t.context.truncate(25), t.world.truncate(25)),
    "discard": lambda t: (t.context.inner().discard_pages(0, 1), t.world.gone.add(0)),
    "reserve": lambda t: (t.context.inner().reserve_working_pages(1), setattr(t.world, "pages", t.world.pages + 1)),
    "another pass": lambda t: t.run([50]),
    "roll back": lambda t: (t.context.inner().truncate_working_page_tokens(1), t.world.cut(24)),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_late_cancel_takes_nothing_back_that_others_built_on(parts: tuple[hw.Engine, Gate, Judge], name: str) -> None:
    engine, _, judge = parts
    twin = begun(engine, judge)
    plan = twin.plan([7, 8])
    execution = finished(twin, [7, 8])
    twin.world.advance(plan)
    BUILT[name](twin)
    execution.cancel()
    twin.check()
    engine._allocator.check([twin.context._table.held()])
    twin.run([9, 10])
    engine._allocator.check([twin.context._table.held()])


def test_a_late_cancel_leaves_a_fork_as_it_is(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    """The pass had filled and committed a page, which the fork shares; the parent goes back to a part of it."""
    engine, _, judge = parts
    twin = begun(engine, judge)
    before, plan = twin.world.fork(), twin.plan(random_tokens(V, 6, 1))
    execution = finished(twin, random_tokens(V, 6, 1))
    twin.world.advance(plan)
    fork = twin.fork()
    execution.cancel()
    parent = Twin(twin.context, judge, before)
    parent.check()
    parent.run(random_tokens(V, 9, 2))
    fork.run([1])
    parent.run([2])
    fork.run([3])
    engine._allocator.check([t.context._table.held() for t in (parent, fork)])


def test_a_late_cancel_leaves_tokens_that_were_filled_since(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, _, judge = parts
    twin = begun(engine, judge)
    execution = finished(twin, [7, 8])
    twin.context.fill([11])
    execution.cancel()
    twin.world.pending.append(11)
    twin.check()
    twin.run([9])


# -- passes that feed each other -----------------------------------------------------------------------------------


def chain(context: hw.Context, length: int = 3) -> list[Any]:
    forward = context.forward().input([1, 2])
    handles = [forward.sample([-1], hw.Argmax())]
    running = [forward.execute()]
    while len(running) < length:
        forward = context.forward().input(handles[-1])
        handles.append(forward.sample([-1], hw.Argmax()))
        running.append(forward.execute())
    return running


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancelling_the_first_of_a_chain_undoes_all_of_it(parts: tuple[hw.Engine, Gate, Judge], steps: int) -> None:
    """With 0, 1 or 2 of three passes computed and none delivered."""
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    gate.shut(after=steps)
    running = chain(twin.context)
    for _ in range(steps + 1):
        gate.someone_waits()
    running[0].cancel()
    gate.open.set()
    settled(engine)
    assert snapshot(twin.context)[:3] == before[:3]
    for execution in running[1:]:
        with pytest.raises((hw.Closed, CancelledError)):
            execution.result(timeout=60)
    twin.run([9])
    engine._allocator.check([twin.context._table.held()])


def test_cancelling_a_chain_that_has_all_succeeded_undoes_what_nobody_has_heard_of(
    parts: tuple[hw.Engine, Gate, Judge],
) -> None:
    engine, _, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    running = chain(twin.context)
    while not all(e._job.outcome.done() for e in running):
        time.sleep(0.001)
    running[0].cancel()
    assert snapshot(twin.context)[:3] == before[:3]
    with pytest.raises(hw.Closed, match="undone"):
        running[1].result()
    running[2].cancel()
    assert snapshot(twin.context)[:3] == before[:3]
    twin.run([9])


def test_cancelling_the_last_of_a_chain_leaves_the_others(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    gate.shut()
    running = chain(twin.context, 2)
    gate.someone_waits()
    running[1].cancel()
    gate.open.set()
    plan = twin.plan([1, 2])
    running[0].result()
    twin.world.advance(plan)
    twin.check()
    twin.run([9])


def test_a_token_of_a_pass_that_was_undone_cannot_be_fed(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    gate.poison = POISON
    forwards = []
    for tokens in ([1], [POISON]):
        forward = twin.build(tokens)
        handle = forward.sample([-1], hw.Argmax())
        execution = forward.execute()
        if tokens == [1]:
            while not execution._job.outcome.done():
                time.sleep(0.001)
            execution.cancel()
        else:
            with pytest.raises(hw.PassFailed):
                execution.result()
        forwards.append(handle)
    for handle in forwards:
        with pytest.raises(hw.HeadwayError, match="no token"):
            twin.context.forward().input(handle).execute()
    assert snapshot(twin.context)[:3] == before[:3]


# -- letting go while in flight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False])
def test_a_context_released_while_its_pass_is_in_flight(parts: tuple[hw.Engine, Gate, Judge], running: bool) -> None:
    engine, gate, judge = parts
    twin, other = begun(engine, judge), begun(engine, judge, 6)

    async def program() -> None:
        gate.shut()
        tasks = [asyncio.ensure_future(asyncio.to_thread(other.run, [1]))]
        if not running:
            await asyncio.to_thread(gate.someone_waits)
        task = asyncio.ensure_future(wait_for(twin.build([1, 2])))
        await asyncio.sleep(0)
        if running:
            await asyncio.to_thread(gate.someone_waits)
        twin.context.release()
        with pytest.raises(hw.Closed, match="released while this pass was in flight"):
            await task
        gate.open.set()
        await asyncio.gather(*tasks)

    asyncio.run(program())
    settled(engine)
    with pytest.raises(hw.Closed):
        twin.context.forward()
    engine._allocator.check([other.context._table.held()])
    other.run([2])


def test_leaving_the_block_of_a_context_while_its_pass_is_in_flight(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, _ = parts

    async def program() -> None:
        gate.shut()
        async with engine.context() as context:
            task = asyncio.ensure_future(wait_for(context.forward().input([1, 2])))
            await asyncio.to_thread(gate.someone_waits)
        with pytest.raises(hw.Closed):
            await task
        gate.open.set()

    asyncio.run(program())
    settled(engine)
    assert engine.stats().pages_held == 0


def test_losing_the_last_reference_frees_the_pages(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, _ = parts

    async def forgetful() -> None:
        context = engine.context()
        await context.forward().input(random_tokens(V, 20)).execute()
        gate.shut()
        task = asyncio.ensure_future(wait_for(context.forward().input([1, 2])))
        await asyncio.to_thread(gate.someone_waits)
        await until_cancelled(task)
        gate.open.set()

    asyncio.run(forgetful())
    gc.collect()
    settled(engine)
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("running", [True, False])
def test_closing_the_engine_with_work_queued_does_not_hang(running: bool) -> None:
    engine = hw.Engine(random_model(vocab_size=V), threads=1, pages=32)
    gate = Gate(engine)
    contexts = [engine.context() for _ in range(4)]
    if running:
        gate.shut()
    forwards = [c.forward().input(random_tokens(V, 20)) for c in contexts]

    async def program() -> list[Any]:
        with engine._lock:
            executions = [f.execute() for f in forwards]
            if not running:
                threading.Thread(target=engine.close).start()
                # It waits for the lock, after the four passes.
        tasks = [asyncio.ensure_future(wait_for_execution(e)) for e in executions]
        if running:
            await asyncio.to_thread(gate.someone_waits)
            threading.Timer(0.05, gate.open.set).start()
            await asyncio.to_thread(engine.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(program(), 30))
    assert all(isinstance(e, hw.Closed | hw.Output) for e in found)
    if running:
        assert all("engine was closed" in str(e) for e in found)
    engine.close()
    for context in contexts:
        with pytest.raises(hw.Closed):
            context.forward()
        context.release()


# -- a device that fails -------------------------------------------------------------------------------------------


def test_a_pass_that_fails_on_the_device_fails_alone(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    gate.poison = POISON
    twins = [begun(engine, judge, n) for n in (5, 16, 21, 30)]
    before = snapshot(*(t.context for t in twins))
    tokens = [[1], [2, POISON, 3], [4, 5], [6]]
    plans = [t.plan(ids) for t, ids in zip(twins, tokens, strict=True)]
    forwards = [t.build(ids) for t, ids in zip(twins, tokens, strict=True)]
    handles = [f.probe(-1, hw.Logits()) for f in forwards]
    with engine._lock:
        running = [f.execute() for f in forwards]
    for i, (twin, plan, execution, handle) in enumerate(zip(twins, plans, running, handles, strict=True)):
        if i == 1:
            with pytest.raises(hw.PassFailed, match="no such memory"):
                execution.result()
            twin.check()
        else:
            assert_close(execution.result().logits(handle), judge.logits(plan.cells[-1:])[0])
            twin.world.advance(plan)
    assert snapshot(twins[1].context)[0] == [before[0][1]]
    for twin in twins:
        twin.run([7, 8])
    engine._allocator.check([t.context._table.held() for t in twins])


def test_a_failure_in_a_later_chunk_undoes_the_earlier_ones(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    gate.poison = POISON
    tokens = [t if t != POISON else 0 for t in random_tokens(V, 90, 1)]
    with pytest.raises(hw.PassFailed):
        twin.build([*tokens[:80], POISON, *tokens[80:]]).execute().result()
    assert snapshot(twin.context) == before
    twin.run(tokens)


def test_copies_for_a_fork_are_made_though_the_pass_beside_them_fails(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    """Copying a forked page is noted for the next step; that the step's pass fails must not lose the copy."""
    engine, gate, judge = parts
    gate.poison = POISON
    twin, other = begun(engine, judge), begun(engine, judge, 5)
    settled(engine)
    with engine._lock:
        fork = twin.fork()
        doomed = other.build([POISON]).execute()
    with pytest.raises(hw.PassFailed):
        doomed.result()
    fork.run([1])
    twin.run([2])
    other.run([3])


def test_the_followers_of_a_pass_that_fails_fail_with_it(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    twin = begun(engine, judge)
    before = snapshot(twin.context)
    gate.poison = 1  # in the first pass of the chain
    gate.shut()
    running = chain(twin.context)
    gate.open.set()
    with pytest.raises(hw.PassFailed, match="no such memory"):
        running[0].result()
    for execution in running[1:]:
        with pytest.raises(hw.PassFailed, match="whose token this one takes failed"):
            execution.result()
    assert snapshot(twin.context) == before


def test_a_failure_while_a_mate_is_cancelled_and_cut(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    engine, gate, judge = parts
    gate.poison = POISON
    twin, other, third = begun(engine, judge), begun(engine, judge, 5), begun(engine, judge, 9)
    plan = third.plan([6])
    gate.shut()
    with engine._lock:
        mine, theirs, good = twin.build([1]).execute(), other.build([POISON]).execute(), third.build([6]).execute()
    gate.someone_waits()
    mine.cancel()
    twin.context.truncate(20)
    twin.world.truncate(20)
    gate.open.set()
    with pytest.raises(hw.PassFailed):
        theirs.result()
    good.result()
    third.world.advance(plan)
    for t in (twin, other, third):
        t.check()
        t.run([2])
    engine._allocator.check([t.context._table.held() for t in (twin, other, third)])


def test_logits_that_are_no_numbers_fail_the_pass_that_samples_them_and_nobody_else() -> None:
    decoder = random_model(vocab_size=V)
    decoder.embedding[POISON] = torch.nan
    with hw.Engine(decoder, threads=1, pages=32, page_size=8) as engine:
        prompt, tail = [t for t in random_tokens(V, 12) if t != POISON], [1, 2, 3]
        with engine.context() as clean:
            expected = logit_rows(clean, [*prompt, *tail])[-3:]
        engine.cache.clear()
        context, mate = engine.context(), engine.context()
        context.forward().input(prompt).execute().result()
        before = snapshot(context)
        bad = context.forward().input([POISON] * 4)
        bad.sample([-1], hw.Argmax())
        good = mate.forward().input([*prompt, *tail])
        handles = [good.probe(i, hw.Logits()) for i in range(-3, 0)]
        with engine._lock:
            running, beside = bad.execute(), good.execute()
        with pytest.raises(hw.PassFailed, match="not a number"):
            running.result()
        out = beside.result()
        assert_close(np.stack([out.logits(h) for h in handles]), expected)
        assert snapshot(context)[0] == before[0]
        assert_close(logit_rows(context, tail), expected)  # nothing is left of it in the page


@pytest.mark.parametrize("deterministic", [False, True])
def test_slots_that_hold_no_numbers_and_were_cut_off_are_forgotten(deterministic: bool) -> None:
    decoder = random_model(vocab_size=V)
    decoder.embedding[POISON] = torch.nan
    with hw.Engine(decoder, threads=1, pages=32, page_size=8, deterministic=deterministic) as engine:
        tail = [1, 2, 3]
        for n in (8, 9, 15):
            prompt = [t if t != POISON else 0 for t in random_tokens(V, n)]
            with engine.context() as clean:
                expected = logit_rows(clean, [*prompt, *tail])[-3:]
            engine.cache.clear()
            for way in ("truncate", "roll back", "cancel"):
                with engine.context() as context:
                    context.forward().input(prompt).execute().result()
                    forward = context.forward().input([POISON] * 5).defer_commit()
                    execution = forward.execute()
                    if way == "cancel":
                        while not execution._job.outcome.done():
                            time.sleep(0.001)
                        execution.cancel()
                    else:
                        execution.result()
                    if way == "truncate":
                        context.truncate(5)
                    elif way == "roll back":
                        context.inner().truncate_working_page_tokens(5)
                    assert context.seq_len == n
                    assert_close(logit_rows(context, tail), expected)
                engine.cache.clear()


# -- all at once ---------------------------------------------------------------------------------------------------


def test_a_storm_of_cancellations(parts: tuple[hw.Engine, Gate, Judge]) -> None:
    """Programs that are cancelled anywhere, beside others that are not: nothing leaks and every logit is right."""
    engine, _, judge = parts

    async def steady(seed: int) -> None:
        twin = Twin(engine.context(), judge)
        for i in range(12):
            plan, forward = twin.plan([seed + i]), twin.build([seed + i])
            handle = forward.probe(-1, hw.Logits())
            out = await forward.execute()
            assert_close(out.logits(handle), judge.logits(plan.cells[-1:])[0])
            twin.world.advance(plan)
        twin.context.release()

    async def nervous(seed: int) -> None:
        rng, twin = np.random.default_rng(seed), Twin(engine.context(), judge)
        for _ in range(10):
            tokens = random_tokens(V, int(rng.integers(1, 60)), int(rng.integers(99)))
            plan = twin.plan(tokens)
            task = asyncio.ensure_future(wait_for(twin.build(tokens)))
            for _ in range(int(rng.integers(0, 4))):
                await asyncio.sleep(float(rng.choice([0, 0, 0.001, 0.004])))
            task.cancel()
            try:
                await task
                twin.world.advance(plan)
            except asyncio.CancelledError:
                pass
            twin.check()
            if twin.context.seq_len > 200:
                twin.context.truncate(twin.context.seq_len)
                twin.world.truncate(len(twin.world.cells))
        await wait_for(twin.build([1]))
        twin.world.advance(twin.plan([1]))
        forward = twin.build([2])
        handle, plan = forward.probe(-1, hw.Logits()), twin.plan([2])
        out = await forward.execute()
        assert_close(out.logits(handle), judge.logits(plan.cells[-1:])[0])
        twin.context.release()

    async def program() -> None:
        await asyncio.gather(*(steady(s) for s in range(3)), *(nervous(s) for s in range(5)))

    asyncio.run(program())
    settled(engine)
    assert engine.stats().pages_held == 0
    engine._allocator.check([])
