"""Slots that move: kept ones of a tail, another context's pages, the last full page; against the dense oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.testing import random_model
from support import world as w
from support.checks import assert_close, random_tokens
from support.world import Choice, Judge, Twin

V, SIZE = 97, 8
MODELS = ("llama-gqa-tied", "mistral-window", "qwen3-headdim24")


@pytest.fixture(scope="module", params=[(name, "auto") for name in MODELS] + [("llama-gqa-tied", "off")])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[hw.Engine, Judge]]:
    name, native = request.param
    folder, judge = w.model(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, threads=1, pages=32, page_size=SIZE) as engine:
            yield engine, judge


@pytest.fixture
def twin(pair: tuple[hw.Engine, Judge]) -> Iterator[Twin]:
    engine, judge = pair
    engine.cache.clear()
    with engine.context() as context:
        yield Twin(context, judge)
    engine.cache.clear()
    assert engine.stats().pages_free == 32


def keep(twin: Twin, slots: list[int], start: int | None = None) -> None:
    twin.context.inner().keep_slots(slots, start)
    twin.world.keep(slots, slots[0] if start is None else start)
    twin.check()


def append(twin: Twin, other: Twin, pages: list[int], shift: int = 0) -> None:
    twin.context.inner().append_from(other.context, pages, shift)
    twin.world.append(other.world, pages, shift)
    twin.check()


def another(twin: Twin) -> Twin:
    return Twin(twin.context.engine.context(), twin.judge)


# -- kept slots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 8, 9, 20, 33])
@pytest.mark.parametrize("share", [0.2, 0.7])
def test_rows_that_come_later_see_the_slots_that_stay_at_their_positions(twin: Twin, count: int, share: float) -> None:
    rng = np.random.default_rng(count)
    twin.run(random_tokens(V, count))
    kept = [slot for slot in range(count) if rng.random() < share] or [0]
    keep(twin, kept, 0)
    assert twin.context.next_position == kept[-1] + 1
    twin.run(random_tokens(V, 3, 1))
    keep(twin, sorted(rng.choice(len(twin.world.cells), 2, replace=False).tolist()))
    twin.run(random_tokens(V, SIZE, 2))


def test_memory_of_the_others_is_given_back(twin: Twin) -> None:
    engine = twin.context.engine
    twin.run(random_tokens(V, 64))
    engine.cache.clear()
    assert engine.stats().pages_free == 32 - 8
    keep(twin, [0, 1, *range(40, 54)], 0)
    engine.cache.clear()
    assert engine.stats().pages_free == 32 - 2
    twin.run([5])


def test_a_fork_keeps_what_it_had_and_forks_of_the_result_share_it(twin: Twin) -> None:
    twin.run(random_tokens(V, 30))
    fork = twin.fork()
    keep(twin, [0, 3, *range(9, 30, 2)], 0)
    fork.run([1, 2])
    second = twin.fork()
    second.run([3])
    twin.run([4])
    for each in (fork, second):
        each.context.release()


def test_the_path_of_a_tree_becomes_a_plain_sequence(twin: Twin) -> None:
    """Drafts a, b after the root, then c, d after b: b and d are kept. Nothing is computed again."""
    engine = twin.context.engine
    prompt = random_tokens(V, 13)
    twin.run(prompt)
    tree = np.zeros((5, 18), bool)
    parents = [None, 0, 0, 2, 2]
    for i, parent in enumerate(parents):
        tree[i, 13 + i] = True
        tree[i] |= tree[parent] if parent is not None else np.arange(18) < 13
    tokens, at = [7, 8, 9, 10, 11], [13, 14, 14, 15, 15]
    twin.run(tokens, at, Choice(hw.Mask.from_bool(tree), rows=tree))
    keep(twin, [13, 15, 17])
    forward = twin.context.forward()
    last = forward.probe(-1, hw.Logits())
    assert_close(forward.execute().result().logits(last), twin.judge.logits(twin.world.cells[-1:])[0])
    assert twin.context._table.can_replay
    twin.run(random_tokens(V, SIZE + 3, 1))
    same = Twin(engine.context(), twin.judge)  # the same tokens in a plain sequence: found in the prefix cache
    same.fill([*prompt, 7, 9, 11, *random_tokens(V, SIZE + 3, 1)])
    assert same.run([1]).stats.cache_hits == 3
    same.context.release()


def test_what_attended_to_slots_that_are_gone_stays_out_of_the_prefix_cache(twin: Twin) -> None:
    engine, tokens = twin.context.engine, random_tokens(V, 40)
    twin.run(tokens)
    kept = [*range(10), *range(20, 40)]
    keep(twin, kept, 0)
    engine.cache.clear()
    same = Twin(engine.context(), twin.judge)
    forward = same.context.forward().input_at([tokens[slot] for slot in kept], kept)
    forward.probe(-1, hw.Logits())
    assert forward.execute().result().stats.cache_hits == 0
    same.context.release()
    forward = twin.context.forward()
    forward.probe(-1, hw.Hidden(1))
    with pytest.raises(hw.Unsupported, match="attended to were discarded"):
        forward.execute()


def test_kept_slots_survive_preemption_saving_and_cuts(
    twin: Twin, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = twin.context.engine
    twin.run(random_tokens(V, 50))
    keep(twin, [0, 2, 4, *range(30, 50)], 0)
    hog = engine.context()
    hog.inner().reserve_working_pages(engine._allocator.available)
    with engine._lock:
        engine._loop.kv_cache.preempt(twin.context._table, engine._loop._queue)
    assert twin.context._table.is_preempted
    hog.release()
    twin.run([1, 2])
    monkeypatch.setattr(engine._snapshots, "_folder", tmp_path)
    twin.context.save("moved", durable=True)
    opened = engine.open("moved")
    assert opened is not None
    back = Twin(opened, twin.judge, twin.world.fork())
    back.run([3])
    assert opened._table.altered == twin.context._table.altered
    opened.release()
    twin.context.truncate(18)
    twin.world.truncate(18)
    twin.check()
    twin.run(random_tokens(V, 12, 4))


def test_a_compaction_in_a_full_pool_needs_one_page(twin: Twin) -> None:
    engine = twin.context.engine
    twin.run(random_tokens(V, 31 * SIZE))
    fork = twin.context.fork()  # shares all: nothing is freed, so copies find no room
    with pytest.raises(hw.OutOfPages, match="keep_slots needs"):
        twin.context.inner().keep_slots(list(range(1, 31 * SIZE, 2)), 0)
    fork.release()
    twin.check()
    engine.cache.clear()
    keep(twin, list(range(1, 31 * SIZE, 2)), 0)
    twin.run([1])


def test_without_a_move_it_is_a_cut(twin: Twin) -> None:
    twin.run(random_tokens(V, 20))
    keep(twin, list(range(5, 20)))
    keep(twin, list(range(12)), 0)
    twin.run([1])


@pytest.mark.parametrize(
    ("slots", "start", "error", "says"),
    [
        ([], None, hw.InvalidInput, "no slots"),
        ([3, 2], None, hw.InvalidInput, "slot 2 follows 3"),
        ([2, 2], None, hw.InvalidInput, "slot 2 follows 2"),
        ([2, 20], None, hw.OutOfRange, "slot 20 is out of range; the context has slots 0 to 19"),
        ([-1, 2], None, hw.HeadwayError, "-1"),
        ([2, 3], 4, hw.InvalidInput, "slot 2 lies before the tail, which begins at start=4"),
        ([2, 3], -1, hw.InvalidInput, "start is -1"),
        ([1.5], None, hw.WrongType, "integer"),
        ("ab", None, hw.WrongType, "text"),
        ([9], None, hw.InvalidInput, "slot 9 was discarded with page 1"),
        ([17], 10, hw.InvalidInput, "slot 10 was discarded with page 1"),
    ],
)
def test_slots_that_cannot_be_kept_are_refused(twin: Twin, slots: Any, start: Any, error: Any, says: str) -> None:
    twin.run(random_tokens(V, 20))
    twin.context.inner().discard_pages(1, 1)
    twin.world.gone = {1}
    pages, edits = list(twin.context._table.pages), len(twin.context.engine._allocator._edits)
    with pytest.raises(error, match=says):
        twin.context.inner().keep_slots(slots, start)
    assert list(twin.context._table.pages) == pages
    assert len(twin.context.engine._allocator._edits) == edits
    twin.run([1])
    with pytest.raises(hw.OutOfRange, match="the context has none"):
        twin.context.engine.context().inner().keep_slots([0])


def test_a_generation_goes_on_while_slots_are_evicted(pair: tuple[hw.Engine, Judge]) -> None:
    """Memory stays bounded, what was generated stays generated, and every token is the oracle's."""

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx:
            twin = Twin(ctx, pair[1])
            twin.run(random_tokens(V, 12))
            gen = ctx.generate(hw.Argmax(), max_tokens=30, stop_only=True)
            count = 0
            async for step in gen:
                count += 1
                logits = twin.judge.logits(twin.world.cells[-1:])[0]
                (token,) = step.tokens
                assert logits[token] >= logits.max() - 1e-4 * max(1, np.abs(logits).max())
                if step.finish is None:
                    await ctx.flush()
                    twin.world.advance(twin.plan([token]))
                    if ctx.seq_len > 16:
                        keep(twin, [0, 1, *range(ctx.seq_len - 8, ctx.seq_len)], 0)
            assert (count, gen.finish, len(gen.generated)) == (30, "length", 30)
            assert ctx.seq_len < 20

    pair[0].run(program)


# -- another context's pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 5, 60, -3])
@pytest.mark.parametrize("before", [0, SIZE, 5, SIZE + 3])
def test_appended_pages_are_seen_as_they_were_computed(twin: Twin, before: int, shift: int) -> None:
    module = another(twin)
    module.run(random_tokens(V, 20, 1), at=list(range(10, 30)))
    if before:
        twin.run(random_tokens(V, before))
    append(twin, module, [0, 1], shift)
    twin.run(random_tokens(V, 3, 2))
    twin.run([1])
    append(twin, module, [1], shift)  # without the page that it attended to
    twin.run(random_tokens(V, 2, 3))
    module.context.release()  # shared pages stay
    twin.run([2])


def test_whole_pages_at_their_positions_are_shared_and_others_copied(twin: Twin) -> None:
    engine, module = twin.context.engine, another(twin)
    module.run(random_tokens(V, 2 * SIZE, 1))
    twin.run(random_tokens(V, SIZE))
    held = engine.stats().pages_held
    append(twin, module, [0, 1])
    assert engine.stats().pages_held == held
    append(twin, module, [0], shift=50)
    assert engine.stats().pages_held == held + 1
    twin.run([1])
    append(twin, module, [0, 1])
    assert engine.stats().pages_held == held + 4
    twin.run([2])
    module.run([3])
    module.context.release()


def test_a_module_counts_in_the_prefix_cache_as_what_it_is(twin: Twin) -> None:
    """After a context of its own it is found again by who computes the same under the same mask, and by nobody else."""
    module = another(twin)
    first, second = random_tokens(V, SIZE), random_tokens(V, SIZE, 1)
    module.run(second, at=list(range(SIZE, 2 * SIZE)))
    twin.run(first)
    append(twin, module, [0])
    module.context.release()
    plain = another(twin)
    plain.fill([*first, *second])
    assert plain.run([1]).stats.cache_hits == 1  # in a plain sequence the second part sees the first
    masked = another(twin)
    masked.run(first)
    apart = np.zeros((SIZE, 2 * SIZE), bool)
    apart[:, SIZE:] = np.tri(SIZE, dtype=bool)
    masked.run(second, mask=Choice(hw.Mask.from_bool(apart), rows=apart))
    assert masked.context._table.keys == twin.context._table.keys
    twin.run([2])
    for each in (plain, masked):
        each.context.release()


def test_appended_pages_survive_preemption(twin: Twin) -> None:
    engine, module = twin.context.engine, another(twin)
    module.run(random_tokens(V, 2 * SIZE, 1))
    twin.run(random_tokens(V, 3))
    for shift in (0, 30):
        append(twin, module, [0, 1], shift)
        with engine._lock:
            engine._loop.kv_cache.preempt(twin.context._table, engine._loop._queue)
        engine.cache.clear()
        twin.run([1])
    module.context.release()


def test_what_cannot_be_appended_is_refused(twin: Twin) -> None:
    engine, module = twin.context.engine, another(twin)
    module.run(random_tokens(V, 3 * SIZE + 2, 1))
    module.context.inner().discard_pages(1, 1)
    twin.run([1, 2])
    inner = twin.context.inner()
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (module.context, [3], 0, hw.OutOfRange, "page 3 of the other context is not committed; it has 3"),
        (module.context, [-1], 0, hw.OutOfRange, "page -1"),
        (module.context, [1], 0, hw.OutOfRange, "page 1 of the other context was discarded"),
        (module.context, [0], -1, hw.InvalidInput, "position"),
        (module.context, [0], 10**6, hw.ContextLengthExceeded, "position of slot 0"),
        (module.context, [0.5], 0, hw.WrongType, "integer"),
        (module.context, [0], 0.5, hw.WrongType, "integer"),
        (twin.context, [0], 0, hw.InvalidInput, "itself"),
        ("another", [0], 0, hw.WrongType, "another context"),
    ]
    for other, pages, shift, error, says in cases:
        with pytest.raises(error, match=says):
            inner.append_from(other, pages, shift)
    with (
        hw.Engine(random_model(vocab_size=V), threads=1, pages=4) as stranger,
        stranger.context() as foreign,
        pytest.raises(hw.InvalidInput, match="another engine"),
    ):
        inner.append_from(foreign, [])
    twin.context.fill([3])
    with pytest.raises(hw.InvalidInput, match="1 pending tokens"):
        inner.append_from(module.context, [0])
    twin.context.truncate(1)
    inner.append_from(module.context, [])
    twin.check()
    hog = engine.context()
    hog.inner().reserve_working_pages(engine._allocator.available)
    hog.set_bid(9)
    with engine._lock:  # a context that cannot be preempted, because it has a pass
        running = hog.fill([1]).forward().execute()
        with pytest.raises(hw.OutOfPages, match="append_from needs 2 pages"):
            inner.append_from(module.context, [0, 2])
    running.result()
    hog.release()
    module.context.release()
    with pytest.raises(hw.Closed):
        inner.append_from(module.context, [0])
    twin.check()
    twin.run([4])


def test_a_busy_context_cannot_be_moved(twin: Twin) -> None:
    module = another(twin)
    module.run(random_tokens(V, SIZE, 1))
    with twin.context.engine._lock:
        running = module.context.forward().input([1]).execute()
        with pytest.raises(hw.ContextBusy):
            module.context.inner().keep_slots([0])
        with pytest.raises(hw.ContextBusy):
            twin.context.inner().append_from(module.context, [0])
    running.result()
    module.context.release()


# -- the last full page ------------------------------------------------------------------------------------------------


def test_the_last_full_page_is_discarded_when_rows_follow(twin: Twin) -> None:
    twin.run(random_tokens(V, 2 * SIZE))
    twin.context.inner().discard_pages(1, 1)
    twin.world.gone = {1}
    twin.check()
    forward = twin.context.forward()
    final = forward.probe(-1, hw.Logits())  # its final state is still kept
    assert_close(forward.execute().result().logits(final), twin.judge.logits(twin.world.cells[-1:])[0])
    fork = twin.fork()
    fork.run([1, 2])
    twin.fill([3]).run([4])
    fork.context.release()
    with pytest.raises(hw.OutOfRange, match="pages 0 to 1 are full"):
        twin.context.inner().discard_pages(2, 1)


def test_all_pages_may_go(twin: Twin) -> None:
    twin.run(random_tokens(V, SIZE))
    twin.context.inner().discard_pages(0, 1)
    twin.world.gone = {0}
    twin.run([1, 2])
    assert [len(cell.attends) for cell in twin.world.cells[-2:]] == [1, 2]
    tokens = asyncio.run(twin.context.generate(hw.Argmax(), max_tokens=3, stop_only=True).tokens())
    assert len(tokens) == 3


# -- deterministic mode ------------------------------------------------------------------------------------------------


def test_moved_slots_have_the_same_bits_after_preemption_in_deterministic_mode() -> None:
    folder, _ = w.model("llama-gqa-tied")

    def logits(engine: hw.Engine, *, preempt: bool) -> np.ndarray:
        with engine.context() as context, engine.context() as module:
            asyncio.run(context.fill(random_tokens(V, 21)).flush())
            asyncio.run(module.fill(random_tokens(V, 16, 1)).flush())
            context.inner().keep_slots([0, 5, *range(11, 21)], 0)
            context.inner().append_from(module, [0, 1])
            if preempt:
                with engine._lock:
                    engine._loop.kv_cache.preempt(context._table, engine._loop._queue)
                engine.cache.clear()
            forward = context.forward().input([1])
            handle = forward.probe(-1, hw.Logits())
            return forward.execute().result().logits(handle)

    with hw.Engine(folder, threads=1, pages=16, page_size=SIZE, deterministic=True) as engine:
        assert np.array_equal(logits(engine, preempt=False), logits(engine, preempt=True))
