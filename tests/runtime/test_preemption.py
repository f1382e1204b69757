"""When pages run out: what goes first, that everything comes back as it was, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import headway as hw
from headway.runtime.job import PATIENCE
from headway.testing import random_model, scripted_engine, scripted_result
from support.scripted import Hand, V, by_hand, check_pages, continued, greedy, numbers, plain


@pytest.fixture
def hand() -> Iterator[Hand]:
    """8 pages, 32 rows a step."""
    with scripted_engine(pages=8, max_batch_tokens=32) as engine, by_hand(engine) as hand:
        yield hand


def filled(hand: Hand, pages: int, seed: int, **options: float) -> hw.Context:
    """A context that holds this many pages, none of them shared."""
    context = hand.engine.context(**options)  # type: ignore[arg-type]
    hand.compute(context, numbers(pages * 16, seed))
    return context


def drawn(hand: Hand, context: hw.Context, tokens: Sequence[int]) -> int:
    execution, handle = greedy(context, tokens)
    hand.until(execution)
    return execution.result(0).token(handle)


def aside(*contexts: hw.Context) -> list[bool]:
    return [c._table.is_preempted for c in contexts]


# -- who goes --------------------------------------------------------------------------------------------------------


def test_cached_pages_go_before_any_context(hand: Hand) -> None:
    filled(hand, 5, 1).release()
    kept = filled(hand, 3, 2)
    other = filled(hand, 5, 3)
    assert aside(kept, other) == [False, False]
    assert hand.engine.stats().preemptions == 0


def test_saved_contexts_go_before_live_ones_whatever_their_bid_and_age(hand: Hand) -> None:
    saved = filled(hand, 3, 1, priority=9)
    saved.save("it")
    saved.release()
    low = filled(hand, 3, 2, priority=-9)
    newest = filled(hand, 4, 3)
    kept = hand.engine._snapshots.table("it")
    assert kept is not None
    assert kept.is_preempted
    assert aside(low, newest) == [False, False]
    opened = hand.engine.open("it")
    assert opened is not None
    assert drawn(hand, opened, [5]) == plain([*numbers(48, 1), 5])


def test_the_lowest_bid_goes_first_and_among_equals_the_youngest(hand: Hand) -> None:
    contexts = [filled(hand, 2, n, priority=bid) for n, bid in enumerate([0, -3, 0, 5])]
    first = hand.engine.context(priority=9)
    hand.compute(first, numbers(16, 10))
    assert aside(*contexts) == [False, True, False, False]
    hand.compute(first, numbers(32, 11))
    assert aside(*contexts) == [False, True, True, False]
    hand.compute(first, numbers(32, 12))
    assert aside(*contexts) == [True, True, True, False]
    for n, context in enumerate(contexts):
        assert drawn(hand, context, [n]) == plain([*numbers(32, n), n])


def test_no_more_contexts_go_than_it_takes(hand: Hand) -> None:
    contexts = [filled(hand, 1, n) for n in range(8)]
    big = hand.engine.context(priority=1)
    hand.compute(big, numbers(48, 20))
    assert aside(*contexts) == [False] * 5 + [True] * 3
    assert hand.engine.stats().preemptions == 3


def test_nobody_goes_in_vain(hand: Hand) -> None:
    """A pass that would not get enough pages even so takes none."""
    old = filled(hand, 4, 1, priority=5)
    young = filled(hand, 2, 2, priority=-5)
    busy = [greedy(old, [1])[0]]
    middle = hand.engine.context()
    waiting, handle = greedy(middle, numbers(16 * 6, 3))  # needs 6; 2 are free, the low one has 2, the high one stays
    hand.step()
    assert aside(old, young) == [False, False]
    hand.until(*busy, waiting)
    assert waiting.result(0).token(handle) == plain(numbers(96, 3))
    assert aside(old, young) == [True, False] or aside(old, young) == [True, True]


def test_forks_that_share_all_their_pages_go_together(hand: Hand) -> None:
    parent = filled(hand, 6, 1)
    forks = [parent.fork() for _ in range(3)]
    other = hand.engine.context()
    assert drawn(hand, other, numbers(64, 2)) == plain(numbers(64, 2))
    assert aside(parent, *forks) == [True] * 4
    for n, context in enumerate([*forks, parent]):
        assert drawn(hand, context, [n]) == plain([*numbers(96, 1), n])
    check_pages(hand.engine)


def test_a_pass_that_is_preempted_half_way_starts_over(hand: Hand) -> None:
    low = hand.engine.context(priority=-5)
    running, handle = greedy(low, numbers(80, 1))
    hand.step()  # 32 of its tokens are there
    high = hand.engine.context(priority=5)
    first, first_handle = greedy(high, numbers(64, 2))
    hand.until(first)
    assert (running.done(), hand.engine.stats().preemptions) == (False, 1)
    hand.until(running)
    assert first.result(0).token(first_handle) == plain(numbers(64, 2))
    assert running.result(0).token(handle) == plain(numbers(80, 1))


def test_a_pass_that_got_its_pages_by_waiting_is_not_robbed_before_it_ends() -> None:
    """An old context that never rests, and a younger one whose prompt takes several steps."""
    with scripted_engine(pages=4, max_batch_tokens=8) as engine, by_hand(engine) as hand:
        old = engine.context()
        hand.compute(old, numbers(40, 1))
        waiting, handle = greedy(engine.context(), numbers(40, 2))
        steps = 0
        while not waiting.done():
            assert steps < 4 * PATIENCE
            more, _ = greedy(old, [1])
            while not (more.done() or waiting.done()):
                hand.step()
                steps += 1
            if more.done():
                more.result(0)
                old.truncate(1)
            else:
                more.cancel()
        assert waiting.result(0).token(handle) == plain(numbers(40, 2))
        assert steps >= PATIENCE - 1  # contexts that fit are left in peace for a while


@pytest.mark.parametrize("count", [2, 4])
def test_long_prefills_that_do_not_fit_together_all_end_and_little_is_computed_twice(count: int) -> None:
    """Each takes far longer than it takes to gain a claim by waiting."""
    length = 8 * 3 * PATIENCE
    pages = length // 16 + 8
    with scripted_engine(pages=pages, max_batch_tokens=8) as engine, by_hand(engine) as hand:
        passes = [greedy(engine.context(), numbers(length, seed)) for seed in range(count)]
        hand.until(*(execution for execution, _ in passes), limit=2 * count * length // 8)
        assert engine.stats().tokens <= count * length + 16 * count
        for seed, (execution, handle) in enumerate(passes):
            assert execution.result(0).token(handle) == plain(numbers(length, seed))


@pytest.mark.parametrize("more", [1, 3])
def test_what_was_computed_again_is_used_before_it_is_lost_again(more: int) -> None:
    """Two contexts that do not fit together, each of which takes longer to come back than the other waits."""
    length = 3 * 2 * PATIENCE
    with scripted_engine(pages=length // 16 + 8, max_batch_tokens=3) as engine, by_hand(engine) as hand:
        contexts, texts = [engine.context(), engine.context()], [list(numbers(length, seed)) for seed in range(2)]
        running = [greedy(context, text) for context, text in zip(contexts, texts, strict=True)]
        for turn in range(1 + more):
            hand.until(*(execution for execution, _ in running), limit=6 * length)
            for n, (execution, handle) in enumerate(running):
                texts[n].append(execution.result(0).token(handle))
                assert texts[n][-1] == plain(texts[n][:-1])
                if turn < more:
                    running[n] = greedy(contexts[n], texts[n][-1:])
        assert engine.stats().tokens <= 2 * (1 + more) * (length + 16)


def test_generations_that_do_not_fit_together_all_end() -> None:
    length = 4 * PATIENCE

    async def one(engine: hw.Engine, seed: int) -> list[int]:
        async with engine.context() as context:
            context.fill(numbers(length, seed))
            return await context.generate(hw.Argmax(), max_tokens=7).tokens()

    async def both(engine: hw.Engine) -> list[list[int]]:
        return await asyncio.wait_for(asyncio.gather(*(one(engine, seed) for seed in range(2))), 60)

    with scripted_engine(pages=length // 16 + 4, max_batch_tokens=1) as engine:
        for seed, tokens in enumerate(engine.run(both)):
            assert tokens == continued(numbers(length, seed), 7)
        assert engine.stats().tokens <= 2 * 8 * (length + 16)


def test_a_higher_bid_may_undo_the_work_of_a_running_prefill() -> None:
    length = 8 * 3 * PATIENCE
    with scripted_engine(pages=length // 16 + 8, max_batch_tokens=8) as engine, by_hand(engine) as hand:
        low, _ = greedy(engine.context(), numbers(length, 1))
        for _ in range(5):
            hand.step()
        high, _ = greedy(engine.context(priority=5), numbers(length, 2))
        hand.until(high)
        assert not low.done()
        hand.until(low)


def test_contexts_that_do_not_fit_together_take_turns() -> None:
    """Each advances again and again, whatever its bid, as long as the difference is not more than it can wait."""
    with scripted_engine(pages=4, max_batch_tokens=64) as engine, by_hand(engine) as hand:
        contexts = [engine.context(priority=bid) for bid in (1, 0, -1)]
        tokens = [list(numbers(33, n)) for n in range(3)]
        progress = [0, 0, 0]
        running = [greedy(c, t) for c, t in zip(contexts, tokens, strict=True)]
        for _ in range(20 * PATIENCE):
            hand.step()
            for n, (execution, handle) in enumerate(running):
                if execution.done():
                    new = execution.result(0).token(handle)
                    assert new == plain(tokens[n])
                    if len(tokens[n]) > 60:
                        contexts[n].truncate(len(tokens[n]) - 33)
                        del tokens[n][33:]
                    tokens[n].append(new)
                    progress[n] += 1
                    running[n] = greedy(contexts[n], [new])
        assert progress[0] > progress[2] >= 2


# -- coming back -----------------------------------------------------------------------------------------------------


def test_a_program_only_sees_a_longer_await() -> None:
    async def one(engine: hw.Engine, n: int) -> list[int]:
        async with engine.context() as context:
            context.fill(numbers(30, n))
            return await context.generate(hw.Argmax(), max_tokens=25).tokens()

    async def everyone(engine: hw.Engine) -> list[list[int]]:
        return await asyncio.gather(*(one(engine, n) for n in range(12)))

    with scripted_engine(pages=9, max_batch_tokens=64) as engine:
        assert engine.run(everyone) == [continued(numbers(30, n), 25) for n in range(12)]
        assert engine.stats().preemptions > 0
        assert engine.stats().pages_held == 0


def test_a_context_that_is_aside_can_be_asked_and_changed_as_ever(hand: Hand) -> None:
    tokens = numbers(40, 1)
    context = hand.engine.context(priority=-1)
    hand.compute(context, tokens)
    context.fill([3])
    other = filled(hand, 8, 2)
    assert aside(context) == [True]
    assert (context.seq_len, context.pending, context.tokens) == (40, (3,), (*tokens, 3))
    fork = context.fork()
    context.save("it")
    context.truncate(5)  # the pending one and four of the last page
    other.release()
    assert drawn(hand, context, [8]) == plain([*tokens[:36], 8])
    assert drawn(hand, fork, [9]) == plain([*tokens, 3, 9])
    opened = hand.engine.take("it")
    assert opened is not None
    opened.truncate(20)  # into the second page
    assert drawn(hand, opened, [7]) == plain([*tokens[:21], 7])
    check_pages(hand.engine)


def test_the_last_token_is_read_as_if_its_context_had_never_left(hand: Hand) -> None:
    context = filled(hand, 2, 1, priority=-1)
    filled(hand, 8, 2).release()
    assert aside(context) == [True]
    forward = context.forward()
    handle = forward.sample([-1], hw.Argmax())
    execution = forward.execute()
    hand.until(execution)
    assert execution.result(0).token(handle) == plain(numbers(32, 1))


def test_what_is_still_cached_is_not_computed_again(hand: Hand) -> None:
    context = filled(hand, 4, 1, priority=-1)
    other = filled(hand, 5, 2)  # takes one page of the four
    other.release()
    before = hand.engine.stats().tokens
    assert drawn(hand, context, [1]) == plain([*numbers(64, 1), 1])
    assert hand.engine.stats().tokens - before == 16 + 1


def test_masks_and_positions_are_part_of_what_comes_back(hand: Hand) -> None:
    tokens, positions = numbers(40, 1), [*range(20), *range(30, 50)]
    context = hand.engine.context(priority=-1)
    forward = context.forward().input_at(tokens, positions).attention_mask(hw.Mask.window(7))
    execution = forward.execute()
    hand.until(execution)
    execution.result(0)
    filled(hand, 8, 2).release()
    hand.engine.cache.clear()
    assert aside(context) == [True]
    attend = np.tril(np.ones((41, 41), bool)) & ~np.tril(np.ones((41, 41), bool), -7)
    attend[40] = True
    assert drawn(hand, context, [4]) == scripted_result([*tokens, 4], [*positions, 50], attend, 40) % V


def test_discarding_pages_of_a_context_that_is_aside_brings_it_back_first() -> None:
    with scripted_engine(pages=8) as engine:
        context = engine.context(priority=-1)
        context.forward().input(numbers(40, 1)).execute().result()
        with engine.context() as other:
            other.forward().input(numbers(128, 2)).execute().result()
        assert context._table.is_preempted
        context.inner().discard_pages(0, 1)
        assert not context._table.is_preempted
        attend = np.tril(np.ones((41, 41), bool))
        attend[40, :16] = False
        execution, handle = greedy(context, [6])
        expected = scripted_result([*numbers(40, 1), 6], range(41), attend, 40) % V
        assert execution.result().token(handle) == expected


def test_a_context_that_is_aside_is_saved_to_disk_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    tokens = numbers(40, 1)

    def read(context: hw.Context) -> np.ndarray:
        forward = context.forward().input([5])
        handle = forward.probe(-1, hw.Logits())
        return forward.execute().result().logits(handle)

    with hw.Engine(random_model(), pages=8, threads=1, deterministic=True) as engine:
        context = engine.context(priority=-1)
        context.forward().input(tokens).execute().result()
        with engine.context() as other:
            other.forward().input(numbers(128, 2)).execute().result()
        assert context._table.is_preempted
        context.save("durable", durable=True)
        opened = engine.take("durable")
        assert opened is not None
        np.testing.assert_array_equal(read(opened), read(context))


STAGES = 3
KINDS = ["plain", "window", "positions", "discard", "not causal", "deferred", "cut", "forked"]


async def grow(context: hw.Context, kind: str, stage: int, seed: int) -> tuple[hw.Context, np.ndarray]:
    """One more stage of a context's life, in its own manner; its last logits."""
    if stage and kind == "discard":
        context.inner().discard_pages(stage - 1, 1)
    if stage and kind == "cut":
        context.truncate(3)
    if stage and kind == "forked":
        parent, context = context, context.fork()
        parent.release()
    forward = context.forward()
    tokens = numbers(18, 100 * seed + stage)
    if kind == "positions":
        forward.input_at(tokens, range(stage * 50, stage * 50 + 18))
    else:
        forward.input(tokens)
    if kind == "window":
        forward.attention_mask(hw.Mask.window(9))
    if kind == "not causal" and stage == 1:
        forward.attention_mask([[context.seq_len + 18]] * 18, causal=False)
    if kind == "deferred":
        forward.defer_commit()
    handle = forward.probe(-1, hw.Logits())
    return context, (await forward.execute()).logits(handle)


async def story(engine: hw.Engine, kind: str) -> list[np.ndarray]:
    """Four contexts, of which two live in the manner named, taking turns."""
    contexts, found = [engine.context() for _ in range(4)], []
    for stage in range(STAGES):
        for n in range(4):
            contexts[n], logits = await grow(contexts[n], kind if n % 2 == 0 else "plain", stage, n)
            found.append(logits)
    for context in contexts:
        forward = context.forward()
        handle = forward.probe(-1, hw.Logits())
        found.append((await forward.execute()).logits(handle))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_everything_comes_back_bit_for_bit(kind: str) -> None:
    decoder = random_model(layers=2)
    results = []
    for pages in (64, 5):
        with hw.Engine(decoder, pages=pages, threads=1, deterministic=True, max_batch_tokens=24) as engine:
            results.append(engine.run(story, kind))
            stats = engine.stats()
            assert (stats.preemptions >= 6) == (pages == 5)
            check_pages(engine)
    for with_room, without in zip(*results, strict=True):
        np.testing.assert_array_equal(with_room, without)


@pytest.mark.parametrize("kind", ["discard", "not causal", "deferred"])
def test_what_the_log_cannot_repeat_goes_to_host_memory(kind: str) -> None:
    async def program(engine: hw.Engine) -> bool:
        context = engine.context(priority=-1)
        for stage in range(2):
            context, _ = await grow(context, kind, stage, 1)
        async with engine.context() as other:
            other.fill(numbers(64, 9))
            await other.flush()
            return context._table.host is not None

    with hw.Engine(random_model(), pages=4, threads=1) as engine:
        assert engine.run(program)


# -- what cannot be --------------------------------------------------------------------------------------------------


def test_a_pass_that_can_never_fit_is_refused_at_once_with_the_numbers(hand: Hand) -> None:
    context = filled(hand, 2, 1)
    with pytest.raises(hw.OutOfPages, match=r"needs 9 pages of 16 slots; the pool has 8"):
        context.forward().input(numbers(16 * 6 + 1, 2)).execute()
    assert (context.seq_len, hand.engine.stats().queued) == (32, 0)
    assert drawn(hand, context, numbers(96, 2)) == plain([*numbers(32, 1), *numbers(96, 2)])


def test_discarded_pages_do_not_count_towards_what_can_never_fit() -> None:
    with scripted_engine(pages=4) as engine:
        context = engine.context()
        for n in range(8):
            context.forward().input(numbers(16, n)).execute().result()
            if n >= 2:
                context.inner().discard_pages(n - 2, 1)
        assert (context.seq_len, engine.stats().pages_held) == (128, 2)
        with pytest.raises(hw.OutOfPages, match="needs 5 pages"):
            context.forward().input(numbers(33, 9)).execute()


def test_reserving_pages_takes_what_is_there_now_and_no_more(hand: Hand) -> None:
    context, other = filled(hand, 3, 1), filled(hand, 3, 2)
    context.inner().reserve_working_pages(2)
    with pytest.raises(hw.OutOfPages, match="1 pages are needed and 0 of 8"):
        other.inner().reserve_working_pages(1)
    assert drawn(hand, other, [1]) == plain([*numbers(48, 2), 1])  # a pass may wait, so reserved pages go aside
    assert aside(context) == [True]
    assert drawn(hand, context, numbers(20, 3)) == plain([*numbers(48, 1), *numbers(20, 3)])


def test_pins_that_hold_everything_are_named_when_a_pass_finds_no_room(hand: Hand) -> None:
    filled(hand, 6, 1).release()
    assert hand.engine.cache.pin(numbers(96, 1)) == 6
    context = hand.engine.context()
    waiting = context.forward().input(numbers(48, 2)).execute()
    hand.until(waiting)
    with pytest.raises(hw.OutOfPages, match=r"needs 3 pages .* of 8 pages 2 are free and 6 are held, by pinned"):
        waiting.result(0)
    hand.engine.cache.unpin(numbers(96, 1))
    assert drawn(hand, context, numbers(48, 2)) == plain(numbers(48, 2))


def test_a_pass_that_pins_leave_no_room_for_waits_while_others_run(hand: Hand) -> None:
    """It is told only when nobody is left who could make room."""
    filled(hand, 4, 1).release()
    hand.engine.cache.pin(numbers(64, 1))
    busy = filled(hand, 2, 2)
    waiting = hand.engine.context().forward().input(numbers(80, 3)).execute()
    for _ in range(5):
        hand.until(greedy(busy, [1])[0])
        assert not waiting.done()
    hand.until(waiting)
    with pytest.raises(hw.OutOfPages):
        waiting.result(0)


def test_a_program_that_holds_everything_and_waits_for_itself_goes_on() -> None:
    async def program(engine: hw.Engine) -> list[int]:
        held = []
        for n in range(6):  # each takes half of the pool, and none is let go
            context = engine.context(priority=n % 3 - 1)
            context.fill(numbers(60, n))
            await context.flush()
            held.append(context)
        return [(await c.generate(hw.Argmax(), max_tokens=1).tokens())[0] for c in held]

    with scripted_engine(pages=8) as engine:
        assert engine.run(program) == [plain(numbers(60, n)) for n in range(6)]


def test_a_program_that_holds_everything_in_pins_is_told_and_does_not_hang() -> None:
    async def program(engine: hw.Engine) -> None:
        context = engine.context().fill(numbers(64, 1))
        await context.flush()
        assert engine.cache.pin(numbers(64, 1)) == 4
        other = engine.context().fill(numbers(8, 2))
        with pytest.raises(hw.OutOfPages, match="unpin"):
            await asyncio.wait_for(other.flush(), 10)
        assert (other.seq_len, len(other.pending)) == (0, 8)
        engine.cache.unpin(numbers(64, 1))
        await other.flush()

    with scripted_engine(pages=4) as engine:
        engine.run(program)


def test_forks_of_everything_at_once_all_end() -> None:
    """A tree of forks whose pages are many times the pool."""

    async def leaf(context: hw.Context, prompt: list[int], n: int) -> None:
        async with context:
            assert await context.fill([n]).generate(hw.Argmax(), max_tokens=20).tokens() == continued([*prompt, n], 20)

    async def program(engine: hw.Engine) -> None:
        prompt = numbers(70, 1)
        parent = engine.context().fill(prompt)
        await parent.flush()
        await asyncio.gather(*(leaf(parent.fork(), prompt, n) for n in range(24)))

    with scripted_engine(pages=10, max_batch_tokens=64) as engine:
        engine.run(program)
        assert engine.stats().preemptions > 0
        assert engine.stats().pages_held == 0
