"""What runs when: decodes before prompts, bids and ageing, budgets and deadlines, and passes that fail.

The loop is stepped by hand where an order is stated; real threads are used where a mean batch is.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.runtime.batch import Batch
from headway.runtime.job import PATIENCE
from headway.runtime.scheduler.order import BID_LIMIT
from headway.testing import random_model, scripted_engine, scripted_result
from support.eventually import eventually
from support.scripted import Hand, V, by_hand, check_pages, continued, faulty_engine, greedy, numbers, plain
from support.watched import PatientRunner

POISON = 13


@pytest.fixture
def hand() -> Iterator[Hand]:
    """64 rows a step."""
    with scripted_engine(pages=400, max_batch_tokens=64) as engine, by_hand(engine) as hand:
        yield hand


def decoding(hand: Hand, count: int, **options: Any) -> list[hw.Context]:
    """Contexts that have a prompt behind them."""
    contexts = [hand.engine.context(**options) for _ in range(count)]
    for n, context in enumerate(contexts):
        hand.compute(context, numbers(5, 100 + n))
    return contexts


# -- one batch -------------------------------------------------------------------------------------------------------


def test_a_long_prompt_never_holds_back_a_running_decode(hand: Hand) -> None:
    decodes = decoding(hand, 8)
    prompt = hand.engine.context().forward().input(numbers(4000)).execute()
    steps = 0
    while not prompt.done():
        waiting = [greedy(c, [1])[0] for c in decodes]
        assert hand.until(*waiting) == 1  # each of them advances in every single step
        steps += 1
    assert steps == math.ceil(4000 / (64 - 8))  # and the prompt gets all the rest
    prompt.result(0)


def test_a_long_prompt_advances_beside_decodes_that_fill_every_step() -> None:
    with scripted_engine(pages=400, max_batch_tokens=8) as engine, by_hand(engine) as hand:
        decodes = decoding(hand, 8)
        prompt = hand.engine.context().forward().input(numbers(40)).execute()
        longest = steps = 0
        while not prompt.done():
            waiting = [greedy(c, [1])[0] for c in decodes]
            longest = max(longest, taken := hand.until(*waiting))
            steps += taken
        assert longest <= 2  # a decode waits for one chunk at most
        assert steps <= 5 * (PATIENCE + 2)  # a chunk of the prompt every PATIENCE steps


def test_a_running_generation_gets_a_token_every_step_while_a_long_prompt_comes_in() -> None:
    arrived: list[int] = []
    prompt = numbers(4000)

    async def reader(engine: hw.Engine, done: asyncio.Event) -> None:
        async with engine.context() as context:
            async for _ in context.fill(numbers(7, 3)).generate(hw.Argmax(), max_tokens=4000):
                arrived.append(engine.stats().steps)
                if done.is_set():
                    break

    async def program(engine: hw.Engine) -> int:
        done = asyncio.Event()
        running = asyncio.create_task(reader(engine, done))
        while len(arrived) < 5:
            await asyncio.sleep(0.001)
        arrived.clear()
        execution, handle = greedy(engine.context(), prompt)
        out = await execution
        done.set()
        await running
        assert out.token(handle) == plain(prompt)
        return out.stats.steps

    with scripted_engine(pages=400, max_batch_tokens=128) as engine, engine.events(limit=1 << 16) as events:
        PatientRunner(engine)
        chunks = engine.run(program)
        assert chunks >= 31
        assert len(arrived) >= chunks // 2
        assert sum(e.passes == 2 and e.rows == 128 for e in iter(events.poll, None)) >= chunks // 2


def test_prompt_and_decode_masked_and_plain_sampled_and_probed_rows_share_a_step(hand: Hand) -> None:
    engine = hand.engine
    (decode,) = decoding(hand, 1)
    past = numbers(5, 100)
    window, block, probed, seeded, flushed = (engine.context() for _ in range(5))
    one = decode.forward().input([7])
    one_handle = one.sample([0], hw.Argmax())
    two = window.forward().input(range(20)).attention_mask(hw.Mask.window(3))
    two_handle = two.sample([4, 19], hw.Argmax())
    three = block.forward().input([4, 5, 6]).attention_mask([[3], [3], [3]], causal=False)
    three_handle = three.sample([0], hw.Argmax())
    four = probed.forward().input([9, 8])
    four_handle, logits = four.sample([1], hw.Argmax()), four.probe(0, hw.Logits())
    five = seeded.forward().input([1]).mask(allow=[3, 4])
    five_handle = five.sample([0], hw.Multinomial(seed=5))
    six = flushed.forward().input([2, 3])
    running = [f.execute() for f in (one, two, three, four, five, six)]
    assert hand.until(*running) == 1
    outs = [r.result(0) for r in running]
    assert {o.stats.batch_size for o in outs} == {6}
    assert outs[0].token(one_handle) == plain([*past, 7])
    near = np.tril(np.ones((20, 20), bool)) & ~np.tril(np.ones((20, 20), bool), -3)
    assert outs[1].tokens(two_handle) == [scripted_result(range(20), range(20), near, r) % V for r in (4, 19)]
    assert outs[2].token(three_handle) == scripted_result([4, 5, 6], range(3), np.ones((3, 3), bool), 0) % V
    assert outs[3].token(four_handle) == plain([9, 8])
    expected = np.random.default_rng(scripted_result([9], [0], np.ones((1, 1), bool), 0)).standard_normal(V)
    np.testing.assert_array_equal(outs[3].logits(logits), expected.astype(np.float32))
    assert outs[4].token(five_handle) in (3, 4)


async def sixty_four(engine: hw.Engine) -> list[list[int]]:
    contexts = [engine.context().fill(numbers(8 + n % 9, n)) for n in range(64)]
    return await asyncio.gather(*(c.generate(hw.Argmax(), max_tokens=40).tokens() for c in contexts))


def right_tokens() -> list[list[int]]:
    return [continued(numbers(8 + n % 9, n), 40) for n in range(64)]


def steady_mean(engine: hw.Engine) -> float:
    """The mean batch from the first decode of all 64 to the last."""
    with engine.events(limit=1 << 16) as events:
        engine.run(sixty_four)
        seen = list(iter(events.poll, None))
    full = [n for n, e in enumerate(seen) if e.passes == e.rows == 64]
    steady = [e.passes for e in seen[full[0] : full[-1] + 1]]
    assert sum(steady) >= 0.7 * 64 * 40
    return sum(steady) / len(steady)


class PatientlyStarting(PatientRunner):
    """Begins when all 64 are there."""

    def before(self, batch: Batch) -> None:
        super().before(batch)
        if self.engine.stats().steps == 0:
            eventually(lambda: self._contexts() == 64)

    def _contexts(self) -> int:
        with self.engine._lock:
            return len({id(job.table) for job in self.engine._loop.jobs()})


@pytest.mark.parametrize("kind", ["scripted", "random"])
def test_64_programs_decode_in_batches_of_56_and_more(kind: str) -> None:
    if kind == "scripted":
        made = scripted_engine(pages=600)
    else:
        made = hw.Engine(random_model(layers=4, hidden_size=256, intermediate_size=512), pages=600, threads=1)
    with made as engine:
        PatientlyStarting(engine)
        assert steady_mean(engine) >= 56


def test_a_step_never_has_more_rows_than_the_budget() -> None:
    with scripted_engine(pages=400, max_batch_tokens=48) as engine, engine.events(limit=1 << 16) as events:
        engine.run(sixty_four)
        assert max(e.rows for e in iter(events.poll, None)) == 48


def test_a_pass_that_must_run_whole_runs_alone_when_it_is_larger_than_a_step() -> None:
    with scripted_engine(pages=64, max_batch_tokens=8) as engine, by_hand(engine) as hand:
        decodes = decoding(hand, 8)
        whole = engine.context().forward().input(range(20))
        whole.attention_mask(hw.Mask.from_bool(np.ones((20, 20), bool)), causal=False)
        handle = whole.sample([0], hw.Argmax())
        execution, steps = whole.execute(), 0
        while not execution.done():
            steps += hand.until(*[greedy(c, [1])[0] for c in decodes])
        assert steps <= PATIENCE + 3
        out = execution.result(0)
        assert (out.stats.steps, out.stats.batch_size) == (1, 1)
        assert out.token(handle) == scripted_result(range(20), range(20), np.ones((20, 20), bool), 0) % V


def test_a_pass_that_must_run_whole_is_not_starved_by_sequences_that_decode_by_themselves() -> None:
    async def program(engine: hw.Engine) -> int:
        whole = engine.context().forward().input(range(20))
        whole.attention_mask(hw.Mask.from_bool(np.ones((20, 20), bool)), causal=False)
        context, execution, steps = engine.context().fill(numbers(3)), None, 0
        async for _ in context.generate(hw.Argmax(), max_tokens=2000, stop_only=True):
            if execution is None:
                execution = whole.execute()
            elif execution.done():
                return steps
            steps += 1
        raise AssertionError("2000 tokens came first")

    with scripted_engine(pages=400, max_batch_tokens=8) as engine:
        assert engine.run(program) <= PATIENCE + 40


# -- bids ------------------------------------------------------------------------------------------------------------


def finished_order(hand: Hand, executions: dict[str, Any]) -> list[str]:
    """Names in the order their passes end."""
    order: list[str] = []
    while len(order) < len(executions):
        hand.step()
        order += [name for name, e in executions.items() if e.done() and name not in order]
    return order


def test_the_higher_bid_runs_first_and_among_equals_the_first_come() -> None:
    with scripted_engine(pages=64, max_batch_tokens=1) as engine, by_hand(engine) as hand:
        bids = {"low": -2, "first": 0, "second": 0, "high": 30}
        contexts = {name: engine.context(priority=bid) for name, bid in bids.items()}
        waiting = {name: greedy(c, [1])[0] for name, c in contexts.items()}
        assert finished_order(hand, waiting) == ["high", "first", "second", "low"]


def test_set_bid_moves_a_pass_that_already_waits() -> None:
    with scripted_engine(pages=64, max_batch_tokens=1) as engine, by_hand(engine) as hand:
        contexts = {name: engine.context() for name in "abc"}
        waiting = {name: greedy(c, [1])[0] for name, c in contexts.items()}
        contexts["c"].set_bid(10)
        contexts["a"].set_bid(-10)
        assert finished_order(hand, waiting) == ["c", "b", "a"]


@pytest.mark.parametrize("difference", [0, 1, 7, 40])
def test_the_lowest_bid_waits_as_many_steps_as_the_bids_differ(difference: int) -> None:
    with scripted_engine(pages=64, max_batch_tokens=1) as engine, by_hand(engine) as hand:
        low, high = engine.context(priority=-difference), engine.context()
        waiting, steps = greedy(low, [1])[0], 0
        while not waiting.done():
            assert steps <= difference + 1, "a newer pass overtook it for longer than the bids differ"
            newer = greedy(high, [1])[0]
            hand.step()
            steps += 1
            if not newer.done():
                newer.cancel()
        assert steps >= difference


def test_the_lowest_prompt_of_all_still_advances_under_the_highest_decodes() -> None:
    with scripted_engine(pages=64, max_batch_tokens=1) as engine, by_hand(engine) as hand:
        (high,) = decoding(hand, 1, priority=BID_LIMIT)
        prompt = engine.context(priority=-BID_LIMIT).forward().input([1, 2]).execute()
        steps = 0
        while not prompt.done():
            assert steps <= 2 * (2 * BID_LIMIT + PATIENCE)
            newer = greedy(high, [1])[0]
            hand.step()
            steps += 1
            if newer.done():
                newer.result(0)
                high.truncate(1)
            else:
                newer.cancel()


def test_a_crowd_of_different_bids_all_end_in_the_order_of_bid_and_arrival(hand: Hand) -> None:
    contexts = [hand.engine.context(priority=n % 5) for n in range(40)]
    waiting = [greedy(c, numbers(30, n))[0] for n, c in enumerate(contexts)]
    done: list[int] = []
    while len(done) < 40:
        hand.step()
        done += [n for n, e in enumerate(waiting) if e.done() and n not in done]
    # 64 rows hold two prompts and a piece of a third; ages differ by 20 steps at most, so bids shift but do not vanish
    first, last = done[:8], done[-8:]
    assert sum(n % 5 for n in first) > sum(n % 5 for n in last)


@pytest.mark.parametrize("bid", [1001, -1000.5, math.nan, math.inf, True, "1", None])
def test_a_bid_out_of_bounds_is_refused(bid: Any) -> None:
    with scripted_engine(pages=8) as engine:
        context = engine.context(priority=3)
        with pytest.raises((hw.InvalidInput, hw.WrongType), match="-1000"):
            context.set_bid(bid)
        with pytest.raises((hw.InvalidInput, hw.WrongType), match="-1000"):
            engine.context(priority=bid)
        assert context._table.bid == 3


def test_set_bid_chains_and_a_released_context_has_none() -> None:
    with scripted_engine(pages=8) as engine:
        context = engine.context()
        assert context.set_bid(BID_LIMIT)._table.bid == 1000
        context.release()
        with pytest.raises(hw.Closed):
            context.set_bid(1)


# -- budgets and deadlines -------------------------------------------------------------------------------------------


def test_a_context_computes_as_many_tokens_as_its_budget() -> None:
    with scripted_engine(pages=8) as engine:
        context = engine.context(token_budget=10)
        context.forward().input(range(7)).execute().result()
        with pytest.raises(hw.TokenBudgetExceeded, match="has 4 tokens and the context may compute 3 more"):
            context.forward().input(range(4)).execute()
        assert context.seq_len == 7
        execution, handle = greedy(context, [7, 8, 9])
        assert execution.result().token(handle) == plain(range(10))
        with pytest.raises(hw.TokenBudgetExceeded, match="may compute 0 more"):
            context.forward().input([1]).execute()


@pytest.mark.parametrize("budget", [5, 6, 9])
def test_generation_gives_every_token_its_budget_allows(budget: int) -> None:
    prompt, got = numbers(5), []

    async def program(engine: hw.Engine) -> None:
        context = engine.context(token_budget=budget).fill(prompt)
        generation = context.generate(hw.Argmax(), max_tokens=50)
        for _ in range(budget - 5 + 1):  # the last one drawn is not computed
            got.extend((await anext(generation)).tokens)
        with pytest.raises(hw.TokenBudgetExceeded):
            await anext(generation)
        assert context.seq_len == budget

    with scripted_engine(pages=8) as engine:
        engine.run(program)
    assert got == continued(prompt, budget - 5 + 1)


def test_tokens_fed_ahead_count_before_they_are_computed() -> None:
    with scripted_engine(pages=8) as engine, by_hand(engine) as hand:
        context = engine.context(token_budget=3)
        first = context.forward().input([1, 2, 3])
        handle = first.sample([-1], hw.Argmax())
        execution = first.execute()
        with pytest.raises(hw.TokenBudgetExceeded, match="has 1 tokens and the context may compute 0 more"):
            context.forward().input(handle).execute()
        hand.until(execution)
        assert execution.result(0).token(handle) == plain([1, 2, 3])


def test_a_cancelled_pass_costs_no_budget() -> None:
    with scripted_engine(pages=8) as engine, by_hand(engine) as hand:
        context = engine.context(token_budget=3)
        context.forward().input([1, 2, 3]).execute().cancel()
        hand.compute(context, [1, 2, 3])
        assert context._table.token_budget == 0


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "9"])
def test_a_token_budget_that_is_no_count_is_refused(budget: Any) -> None:
    with scripted_engine(pages=8) as engine, pytest.raises((hw.InvalidInput, hw.WrongType), match="token_budget"):
        engine.context(token_budget=budget)


@pytest.mark.parametrize("deadline", [0, -1, math.inf, math.nan, "1"])
def test_a_deadline_that_is_no_time_is_refused(deadline: Any) -> None:
    with scripted_engine(pages=8) as engine, pytest.raises((hw.InvalidInput, hw.WrongType), match="deadline"):
        engine.context(deadline=deadline)


def test_a_pass_after_the_deadline_is_refused_at_once() -> None:
    with scripted_engine(pages=8) as engine:
        context = engine.context(deadline=60)
        context.forward().input([1]).execute().result()
        context._table.deadline = time.monotonic() - 1
        with pytest.raises(hw.DeadlineExceeded, match="deadline has passed"):
            context.forward().input([2]).execute()
        with pytest.raises(TimeoutError):
            context.forward().input([2]).execute()
        assert context.tokens == (1,)


def test_a_pass_that_waits_past_its_deadline_is_refused_and_others_go_on() -> None:
    with scripted_engine(pages=64, max_batch_tokens=4) as engine, by_hand(engine) as hand:
        late, other = engine.context(deadline=60), engine.context()
        execution = late.forward().input(range(30)).execute()
        fine, handle = greedy(other, [1, 2])
        hand.step()
        late._table.deadline = time.monotonic() - 1
        hand.until(execution, fine)
        with pytest.raises(hw.DeadlineExceeded):
            execution.result(0)
        assert fine.result(0).token(handle) == plain([1, 2])
        assert late.seq_len == 0
        check_pages(engine)


def test_generation_ends_at_its_deadline_with_its_own_error() -> None:
    got: list[int] = []

    async def program(engine: hw.Engine) -> None:
        async with engine.context(deadline=60) as context:
            async for step in context.fill([1, 2]).generate(hw.Argmax(), max_tokens=100_000):
                got.extend(step.tokens)
                context._table.deadline = time.monotonic() - 1

    with scripted_engine(pages=2000) as engine:
        with pytest.raises(hw.DeadlineExceeded):
            engine.run(program)
        assert engine.stats().pages_held == 0
    assert got == continued([1, 2], len(got))
    assert got


def test_forks_inherit_bid_deadline_and_the_rest_of_the_budget() -> None:
    with scripted_engine(pages=8) as engine:
        parent = engine.context(priority=4, deadline=60, token_budget=20)
        parent.forward().input(range(5)).execute().result()
        fork = parent.fork()
        assert (fork._table.bid, fork._table.token_budget) == (4, 15)
        fork.set_bid(1)
        fork.forward().input(range(10)).execute().result()
        assert (parent._table.bid, parent._table.token_budget, fork._table.token_budget) == (4, 15, 5)
        assert fork._table.deadline == parent._table.deadline < time.monotonic() + 60
        for context in (parent, fork):
            context._table.deadline = time.monotonic() - 1
            with pytest.raises(hw.DeadlineExceeded):
                context.forward().input([1]).execute()


# -- passes that fail ------------------------------------------------------------------------------------------------


def poisoned(error: Callable[[], BaseException]) -> Callable[[Batch], None]:
    def before(batch: Batch) -> None:
        if (batch.tokens == POISON).any():
            raise error()

    return before


ERRORS = [
    lambda: RuntimeError("a kernel failed"),
    lambda: MemoryError("no memory"),
    lambda: torch.OutOfMemoryError("CUDA out of memory"),
    lambda: ZeroDivisionError("bad value"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_a_pass_that_fails_fails_alone(error: Callable[[], BaseException]) -> None:
    with faulty_engine(poisoned(error), pages=64) as engine, by_hand(engine) as hand:
        good = [engine.context() for _ in range(5)]
        bad = engine.context()
        hand.compute(bad, [1, 2, 3])
        running = [greedy(c, [n, n + 1]) for n, c in enumerate(good)]
        failing = bad.forward().input([4, POISON]).execute()
        hand.until(failing, *(e for e, _ in running))
        said = "memory ran out" if "memory" in str(error()) else str(error())
        with pytest.raises(hw.PassFailed, match=said):
            failing.result(0)
        assert [e.result(0).token(h) for e, h in running] == [plain([n, n + 1]) for n in range(5)]
        assert bad.tokens == (1, 2, 3)
        again, handle = greedy(bad, [5])
        hand.until(again)
        assert again.result(0).token(handle) == plain([1, 2, 3, 5])
        check_pages(engine)


def test_a_pass_that_fails_in_a_later_chunk_is_undone_whole() -> None:
    with faulty_engine(poisoned(ERRORS[0]), pages=64, max_batch_tokens=16) as engine, by_hand(engine) as hand:
        context = engine.context()
        hand.compute(context, [1, 2, 3])
        tokens = [t if t != POISON else 1 for t in numbers(40)]
        failing = context.forward().input([*tokens, POISON]).execute()
        hand.until(failing)
        with pytest.raises(hw.PassFailed):
            failing.result(0)
        assert (context.tokens, engine.stats().pages_held) == ((1, 2, 3), 1)
        execution, handle = greedy(context, tokens)
        hand.until(execution)
        assert execution.result(0).token(handle) == plain([1, 2, 3, *tokens])


def test_the_pass_that_takes_the_token_of_one_that_fails_fails_with_it() -> None:
    with faulty_engine(poisoned(ERRORS[0]), pages=64) as engine, by_hand(engine) as hand:
        context = engine.context()
        first = context.forward().input([POISON])
        handle = first.sample([-1], hw.Argmax())
        one = first.execute()
        two = context.forward().input(handle).execute()
        hand.until(one, two)
        with pytest.raises(hw.PassFailed, match="a kernel failed"):
            one.result(0)
        with pytest.raises(hw.PassFailed, match="whose token this one takes failed"):
            two.result(0)
        assert context.seq_len == 0
        hand.compute(context, [1])


def test_a_device_that_fails_now_and_then_disturbs_nobody() -> None:
    """A failure that goes away when the batch is run pass by pass costs time, not results."""
    count = 0

    def before(batch: Batch) -> None:
        nonlocal count
        count += 1
        if len(batch.segments) > 1 and count % 3 == 0:
            raise RuntimeError("out of workspace")

    with faulty_engine(before, pages=600) as engine:
        assert engine.run(sixty_four) == right_tokens()
        assert engine.stats().pages_held == 0


def test_a_program_catches_its_own_failure_and_goes_on() -> None:
    async def program(engine: hw.Engine) -> list[int]:
        context = engine.context().fill([1, 2])
        await context.flush()
        context.fill([POISON])
        with pytest.raises(hw.PassFailed):
            await context.flush()
        assert context.pending == (POISON,)
        context.truncate(1)
        return await context.generate(hw.Argmax(), max_tokens=1).tokens()

    with faulty_engine(poisoned(ERRORS[1]), pages=64) as engine:
        assert engine.run(program) == continued([1, 2], 1)


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_generation_fails_with_the_device_s_own_error(fails_at: int) -> None:
    """Also when the pass has failed before the one ahead of it is asked for. A decode row is tried again as a pass."""
    steps, failing = 0, (fails_at,) if fails_at == 1 else (fails_at, fails_at + 1)

    def before(batch: Batch) -> None:
        nonlocal steps
        steps += 1
        if steps in failing:
            raise RuntimeError("a kernel failed")

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            generation = context.fill([1, 2]).generate(hw.Argmax(), max_tokens=9)
            for n in range(fails_at - 1):
                assert (await anext(generation)).tokens == tuple(continued([1, 2], n + 1)[-1:])
                time.sleep(0.005)  # the device is faster than this program
            with pytest.raises(hw.PassFailed, match="a kernel failed"):
                await anext(generation)
            assert await context.generate(hw.Argmax(), max_tokens=3).tokens()

    with faulty_engine(before, pages=64) as engine:
        engine.run(program)
        assert engine.stats().pages_held == 0


# -- figures ---------------------------------------------------------------------------------------------------------


def test_events_add_up_to_the_figures() -> None:
    with scripted_engine(pages=40, max_batch_tokens=64) as engine, engine.events(limit=1 << 16) as events:
        engine.run(sixty_four)
        seen = list(iter(events.poll, None))
        stats = engine.stats()
        assert [e.step for e in seen] == list(range(1, stats.steps + 1))
        last = seen[-1]
        assert (last.tokens, last.cache_hits, last.preemptions) == (stats.tokens, stats.cache_hits, stats.preemptions)
        assert stats.preemptions > 0
        assert sum(e.passes for e in seen) / len(seen) == pytest.approx(stats.batch_size_mean)
        assert all(e.pages_free + e.pages_cached + e.pages_held == 40 for e in seen)
        assert all(e.seconds > 0 for e in seen)
        assert (stats.queued, stats.pages_held) == (0, 0)


def test_a_reader_that_lags_loses_the_oldest_events_and_is_told() -> None:
    with scripted_engine(pages=8) as engine, engine.events(limit=3) as events:
        context = engine.context()
        for n in range(10):
            context.forward().input([n]).execute().result()
        while engine.stats().steps < 10:
            time.sleep(0.001)
        with engine._lock:
            assert events.lost == 7
            assert [e.step for e in iter(events.poll, None)] == [8, 9, 10]
    with scripted_engine(pages=8) as engine, pytest.raises(hw.InvalidInput, match="limit is 0"):
        engine.events(limit=0)


def test_events_come_to_threads_and_event_loops_and_end_when_closed() -> None:
    async def program(engine: hw.Engine) -> list[int]:
        with engine.events() as events:
            execution = engine.context().forward().input([1]).execute()
            await execution
            return [e.passes async for e in events if events.close() is None]

    with scripted_engine(pages=8) as engine:
        assert engine.run(program) == [1]
        engine.context().forward().input([1]).execute().result()
        assert engine._loop.listeners == []


def test_the_worker_says_since_when_it_is_at_a_step_and_that_it_waits() -> None:
    """Also while somebody has the lock: nobody who asks may have to wait for it."""
    begun, ends = threading.Event(), threading.Event()

    def hang(batch: Batch) -> None:
        begun.set()
        ends.wait(60)

    with faulty_engine(hang, pages=8) as engine:
        execution, _ = greedy(engine.context(), [1, 2, 3])
        assert begun.wait(60)
        found: list[float | None] = []
        with engine._lock:
            asks = threading.Thread(target=lambda: found.append(engine._loop.busy_since))
            asks.start()
            asks.join()
        assert found[0] is not None
        assert engine._loop.busy_since == found[0] <= time.monotonic()  # the same step
        ends.set()
        execution.result(60)
        asked = 0
        while engine._loop.busy_since is not None:
            assert (asked := asked + 1) < 60_000, "the worker never came to wait"
            time.sleep(0.001)
