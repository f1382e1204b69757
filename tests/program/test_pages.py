"""Pages: what forks share, what cuts copy, the raw operations, and that nobody sees another's writes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headway as hw
from support import world as w
from support.checks import assert_close, random_tokens
from support.world import Judge, Twin

V = 97
SIZES = (1, 15, 16, 17, 31, 32, 33)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[hw.Engine, Judge]]:
    folder, judge = w.model("llama-gqa-tied")
    with hw.Engine(folder, threads=1, pages=24) as engine:
        yield engine, judge


@pytest.fixture
def twin(pair: tuple[hw.Engine, Judge]) -> Iterator[Twin]:
    engine, judge = pair
    engine.cache.clear()
    with engine.context() as context:
        yield Twin(context, judge)
    engine.cache.clear()
    assert engine.stats().pages_free == 24


def held(*contexts: hw.Context) -> list[list[int | None]]:
    return [list(c._table.pages) for c in contexts]


# -- a page is sixteen slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_full_pages_commit_by_themselves_and_the_rest_is_working(twin: Twin, n: int) -> None:
    twin.run(random_tokens(V, n))
    inner = twin.context.inner()
    assert inner.page_size == twin.context.page_size == 16
    assert inner.committed_page_count == n // 16
    assert inner.working_page_count == (1 if n % 16 else 0)
    assert inner.working_page_token_count == n % 16
    assert twin.context.engine.stats().pages_held == -(-n // 16)


@pytest.mark.parametrize("n", SIZES)
def test_a_deferred_commit_leaves_full_pages_working_until_they_are_committed(twin: Twin, n: int) -> None:
    context, inner = twin.context, twin.context.inner()
    context.forward().input(random_tokens(V, n)).defer_commit().execute().result()
    assert (inner.committed_page_count, inner.working_page_count) == (0, -(-n // 16))
    assert inner.working_page_token_count == n
    for k in range(n // 16):
        inner.commit_working_pages(1)
        assert (inner.committed_page_count, inner.working_page_token_count) == (k + 1, n - 16 * (k + 1))
    with pytest.raises(hw.InvalidInput, match="only full pages commit"):
        inner.commit_working_pages(1)
    inner.commit_working_pages(0)


def test_the_next_pass_commits_what_was_deferred(twin: Twin) -> None:
    context, inner = twin.context, twin.context.inner()
    context.forward().input(random_tokens(V, 33)).defer_commit().execute().result()
    context.forward().input([1]).execute().result()
    assert inner.committed_page_count == 2


# -- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_a_fork_shares_committed_pages_and_copies_working_ones(twin: Twin, n: int) -> None:
    twin.run(random_tokens(V, n))
    twin.fill([1, 2])
    fork = twin.fork()
    mine, theirs = held(twin.context, fork.context)
    assert mine[: n // 16] == theirs[: n // 16]
    assert not set(mine[n // 16 :]) & set(theirs[n // 16 :])
    assert len(theirs) == -(-n // 16)
    fork.check()
    assert fork.context.pending == (1, 2)
    fork.context.release()


@pytest.mark.parametrize("n", SIZES)
def test_neither_side_sees_the_others_later_writes(twin: Twin, n: int) -> None:
    twin.run(random_tokens(V, n))
    fork = twin.fork()
    for i in range(20):
        twin.run([i])
        fork.run([V - 1 - i])
    grandchild = fork.fork()
    fork.context.truncate(19)
    fork.world.truncate(19)
    fork.run([3, 4])
    grandchild.run([5])
    twin.run([6])
    for context in (fork.context, grandchild.context):
        context.release()


def test_a_fork_leaves_reserved_pages_behind_and_survives_its_parent(twin: Twin) -> None:
    twin.run(random_tokens(V, 20))
    twin.context.inner().reserve_working_pages(2)
    fork = twin.fork()
    assert fork.context.inner().working_page_count == 1
    twin.context.truncate(20)
    twin.world.truncate(20)
    fork.run([1, 2, 3])
    twin.run(random_tokens(V, 17, 9))
    fork.run([4])
    fork.context.release()


def test_a_tree_of_forks_holds_each_shared_page_once(twin: Twin) -> None:
    twin.run(random_tokens(V, 64))
    forks = [twin.fork() for _ in range(12)]
    assert twin.context.engine.stats().pages_held == 4
    for i, fork in enumerate(forks):
        fork.run([i])
    assert twin.context.engine.stats().pages_held == 4 + 12
    for fork in forks:
        fork.context.release()


def test_explicit_seeds_come_along(pair: tuple[hw.Engine, Judge]) -> None:
    engine, _ = pair
    with engine.context(seed=7) as context:
        context.forward().input(random_tokens(V, 5)).execute().result()
        tokens = []
        with context.fork() as fork:
            for c in (context, fork):
                forward = c.forward()
                handle = forward.sample([-1] * 8, hw.Multinomial(temperature=3.0))
                out = forward.execute().result()
                tokens.append(out.tokens(handle))
                assert set(out.stats.seeds) == {7}
        assert tokens[0] == tokens[1]


# -- cutting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("cut", SIZES)
def test_a_cut_anywhere_continues_exactly(twin: Twin, n: int, cut: int) -> None:
    if cut > n:
        with pytest.raises(hw.InvalidInput, match=rf"truncate\({cut}\): the context has 0 tokens"):
            twin.context.truncate(cut)
        return
    twin.run(random_tokens(V, n))
    fork = twin.fork()
    twin.context.truncate(cut)
    twin.world.truncate(cut)
    twin.check()
    twin.run(random_tokens(V, 18, 3))
    fork.run(random_tokens(V, 2, 4))
    fork.context.release()


def test_pending_tokens_go_first(twin: Twin) -> None:
    twin.run(random_tokens(V, 18))
    twin.fill([1, 2, 3])
    for n in (2, 4, 0):
        twin.context.truncate(n)
        twin.world.truncate(n)
        twin.check()
    assert (twin.context.seq_len, twin.context.pending) == (15, ())


def test_a_cut_inside_a_shared_page_copies_it(twin: Twin) -> None:
    twin.run(random_tokens(V, 32))
    fork = twin.fork()
    shared = held(twin.context)[0][1]
    twin.context.truncate(5)
    twin.world.truncate(5)
    assert held(twin.context)[0][1] != shared
    assert held(fork.context)[0][1] == shared
    twin.run([1])
    fork.run([2])
    fork.context.release()


def test_a_cut_that_finds_no_page_for_its_copy_changes_nothing(twin: Twin) -> None:
    engine = twin.context.engine
    twin.run(random_tokens(V, 48))
    twin.context.inner().discard_pages(0, 1)  # so that it cannot be computed again from its log
    twin.world.gone = {0}
    fork = twin.fork()
    engine.cache.clear()
    free = engine.stats().pages_free
    twin.context.inner().reserve_working_pages(free)
    with pytest.raises(hw.OutOfPages, match="needs one free page"):
        twin.context.truncate(5)
    twin.context.inner().release_working_pages(free)
    twin.check()
    twin.run([1])
    fork.run([2])
    fork.context.release()


@pytest.mark.parametrize("act", ["fork", "save", "truncate", "open"])
def test_verbs_that_need_pages_get_those_of_an_idle_context_as_a_pass_would(
    twin: Twin, act: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = twin.context.engine
    monkeypatch.setattr(engine._snapshots, "_folder", tmp_path)
    other = Twin(engine.context(priority=9), twin.judge)
    other.run(random_tokens(V, 48, seed=5))  # idle: whatever its bid, it can come back
    twin.run(random_tokens(V, 40))
    twin.context.inner().discard_pages(0, 1)  # so that it cannot be computed again from its log
    twin.world.gone = {0}
    shared = twin.fork()
    twin.context.save("disk", durable=True)
    engine.cache.clear()
    with engine.context() as rest:
        rest.inner().reserve_working_pages(engine.stats().pages_free)
        made: hw.Context | None = None
        if act == "fork":
            made = twin.context.fork()
        elif act == "save":
            twin.context.save("memory")
        elif act == "open":
            made = engine.open("disk")
        else:
            twin.context.truncate(10)
        assert rest._table.is_preempted or other.context._table.is_preempted
        if act == "truncate":
            twin.world.truncate(10)
        elif act == "save":
            made = engine.take("memory")
        if made is not None:
            Twin(made, twin.judge, twin.world.fork()).run([3])
            made.release()
    for each in (twin, other, shared):
        each.run([1])
        each.context.release()
    assert engine.delete("disk")


def test_a_cut_without_free_pages_is_computed_again_where_it_can_be(twin: Twin) -> None:
    engine = twin.context.engine
    twin.run(random_tokens(V, 32))
    fork = twin.fork()
    rest = engine.context()
    rest.inner().reserve_working_pages(engine.stats().pages_free)
    twin.context.truncate(5)
    twin.world.truncate(5)
    twin.check()
    rest.release()
    twin.run([1])
    fork.run([2])
    fork.context.release()


def test_the_next_position_follows_the_largest_that_is_left(twin: Twin) -> None:
    twin.run([1, 2, 3], at=[5, 90, 7])
    twin.run([4])
    assert twin.world.cells[-1].position == 91
    twin.context.truncate(3)
    twin.world.truncate(3)
    twin.run([5])
    assert twin.context._table.positions[-1] == 6


# -- the raw operations --------------------------------------------------------------------------------------------


def test_reserved_pages_are_used_by_the_next_pass(twin: Twin) -> None:
    engine, inner = twin.context.engine, twin.context.inner()
    inner.reserve_working_pages(3)
    assert (engine.stats().pages_held, inner.working_page_count, inner.working_page_token_count) == (3, 3, 0)
    reserved = held(twin.context)[0]
    twin.world.pages = 3
    twin.run(random_tokens(V, 33))
    assert held(twin.context)[0] == reserved
    inner.reserve_working_pages(0)


def test_reserving_more_than_there_is_raises_and_takes_nothing(twin: Twin) -> None:
    engine, inner = twin.context.engine, twin.context.inner()
    with pytest.raises(hw.OutOfPages, match="25 pages are needed and 24 of 24 are free"):
        inner.reserve_working_pages(25)
    assert engine.stats().pages_held == 0
    inner.reserve_working_pages(24)
    with engine.context() as other, pytest.raises(hw.OutOfPages):
        other.inner().reserve_working_pages(1)
    inner.release_working_pages(24)


def test_releasing_from_the_tail_drops_the_tokens_there(twin: Twin) -> None:
    context, inner = twin.context, twin.context.inner()
    context.forward().input(random_tokens(V, 40)).defer_commit().execute().result()
    inner.reserve_working_pages(1)
    inner.release_working_pages(1)
    assert context.seq_len == 40
    inner.release_working_pages(1)
    assert (context.seq_len, inner.working_page_count) == (32, 2)
    inner.commit_working_pages(1)
    with pytest.raises(hw.InvalidInput, match=r"release_working_pages\(2\): there are 1 working pages"):
        inner.release_working_pages(2)
    inner.release_working_pages(1)
    assert (context.seq_len, inner.committed_page_count, inner.working_page_count) == (16, 1, 0)


def test_rolling_a_draft_back_by_hand(twin: Twin) -> None:
    """Two drafts in uncommitted pages, one thrown away: the accepted path is as if the other had never been."""
    prompt, wrong, right = random_tokens(V, 15), [1, 2, 3], [4, 5]
    twin.run(prompt)
    context, inner = twin.context, twin.context.inner()
    for draft in (wrong, right):
        plan = twin.plan(draft)
        forward = context.forward().input(draft).defer_commit()
        handle = forward.probe(-1, hw.Logits())
        assert_close(forward.execute().result().logits(handle), twin.judge.logits(plan.cells[-1:])[0])
        assert inner.committed_page_count == 0
        if draft is wrong:
            inner.truncate_working_page_tokens(3)
            assert (context.seq_len, inner.working_page_count) == (15, 2)
    inner.commit_working_pages(1)
    with pytest.raises(hw.InvalidInput, match="the working pages hold 1 tokens"):
        inner.truncate_working_page_tokens(2)
    inner.truncate_working_page_tokens(1)
    assert context.seq_len == 16


def test_a_discard_frees_pages_at_once_and_numbers_stay(twin: Twin) -> None:
    engine, inner = twin.context.engine, twin.context.inner()
    twin.run(random_tokens(V, 70))
    engine.cache.clear()
    free = engine.stats().pages_free
    inner.discard_pages(0, 2)
    inner.discard_pages(3, 1)
    twin.world.gone |= {0, 1, 3}
    assert engine.stats().pages_free == free + 3
    twin.check()
    with engine.context() as other:  # others may have them now
        other.inner().reserve_working_pages(engine.stats().pages_free)
    twin.run([1])
    fork = twin.fork()
    fork.run([2])
    twin.run(random_tokens(V, 20, 1))
    fork.run([3, 4])
    fork.context.release()


def test_a_discarded_page_stays_for_the_fork_that_shares_it(twin: Twin) -> None:
    twin.run(random_tokens(V, 40))
    fork = twin.fork()
    fork.context.inner().discard_pages(0, 1)
    fork.world.gone = {0}
    twin.run([1])
    fork.run([1])
    fork.context.release()


@pytest.mark.parametrize(
    ("start", "n", "error"),
    [(0, 3, IndexError), (2, 1, IndexError), (3, 1, IndexError), (1, 2, IndexError), (0, 1, ValueError)],
)
def test_only_full_pages_before_the_last_token_can_be_discarded_once(
    twin: Twin, start: int, n: int, error: type[Exception]
) -> None:
    twin.run(random_tokens(V, 40))
    twin.context.inner().discard_pages(0, 1)
    twin.world.gone = {0}
    before = held(twin.context)
    with pytest.raises(error) as caught:
        twin.context.inner().discard_pages(start, n)
    assert isinstance(caught.value, hw.HeadwayError)
    assert held(twin.context) == before
    twin.run([1])


def test_a_cut_inside_a_discarded_page_is_refused_and_one_at_its_border_is_not(twin: Twin) -> None:
    twin.run(random_tokens(V, 40))
    twin.context.inner().discard_pages(0, 2)
    twin.world.gone = {0, 1}
    with pytest.raises(hw.InvalidInput, match="page 1, which was discarded"):
        twin.context.truncate(10)
    twin.check()
    twin.context.truncate(8)
    twin.world.truncate(8)
    twin.check()
    twin.run([1, 2])  # nothing is left to attend to but themselves
    assert [len(c.attends) for c in twin.world.cells[-2:]] == [1, 2]


def test_a_roll_back_into_a_discarded_working_page_is_refused(twin: Twin) -> None:
    context, inner = twin.context, twin.context.inner()
    plan = twin.plan(random_tokens(V, 40))
    context.forward().input(random_tokens(V, 40)).defer_commit().execute().result()
    twin.world.advance(plan, commit=False)
    inner.discard_pages(1, 1)
    twin.world.gone = {1}
    for n in (9, 24):
        with pytest.raises(hw.InvalidInput, match="page 1, which was discarded"):
            inner.truncate_working_page_tokens(n)
        twin.check()
    inner.truncate_working_page_tokens(8)
    twin.world.cut(32)
    twin.check()
    context.truncate(16)
    twin.world.truncate(16)
    twin.check()
    twin.run(random_tokens(V, 3, 1))


def test_a_token_whose_slots_are_gone_is_not_computed_again(twin: Twin) -> None:
    twin.run(random_tokens(V, 40))
    twin.context.inner().discard_pages(0, 1)
    twin.world.gone = {0}
    forward = twin.context.forward()
    final = forward.probe(-1, hw.Logits())  # its final state is still kept
    assert_close(forward.execute().result().logits(final), twin.judge.logits(twin.world.cells[-1:])[0])
    probes: list[Any] = [hw.Hidden(1), hw.AttentionScores(0), hw.LogitLens([0], 2)]
    for probe in probes:
        forward = twin.context.forward()
        forward.probe(-1, probe)
        with pytest.raises(hw.Unsupported, match="discarded"):
            forward.execute()
    twin.context.truncate(1)
    twin.world.truncate(1)
    forward = twin.context.forward()
    forward.probe(-1, hw.Logits())
    with pytest.raises(hw.Unsupported, match="discarded"):
        forward.execute()
    twin.run([1])


# -- saved contexts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("n", [0, 1, 16, 33])
def test_a_saved_context_is_what_it_was(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, n: int, durable: bool) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    folder, judge = w.model("llama-gqa-tied")
    with hw.Engine(folder, threads=1, pages=24) as engine, engine.context(seed=3) as context:
        twin = Twin(context, judge)
        if n:
            twin.run(random_tokens(V, n))
        twin.fill([5, 6])
        context.save("here", durable=durable)
        kept = twin.world.fork()
        twin.run([1, 2, 3])
        context.truncate(4)
        for _ in range(2):
            opened = engine.open("here")
            assert opened is not None
            assert opened.seed == 3
            Twin(opened, judge, kept.fork()).check()
            Twin(opened, judge, kept.fork()).run([9])
            opened.release()
        taken = engine.take("here")
        assert taken is not None
        Twin(taken, judge, kept.fork()).run([8])
        taken.release()
        assert engine.open("here") is None
        assert not engine.delete("here")


def test_pages_that_stay_out_of_the_prefix_cache_stay_out_of_it_when_they_come_from_disk(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    folder, _ = w.model("llama-gqa-tied")
    with hw.Engine(folder, threads=1, pages=24) as engine:
        with engine.context() as context:
            everywhere = hw.Mask.from_bool(np.ones((32, 32), dtype=bool))
            context.forward().input(random_tokens(V, 32)).attention_mask(everywhere, causal=False).execute().result()
            context.save("ahead", durable=True)
        with engine.open("ahead") as opened:  # type: ignore[union-attr]
            opened.forward().input(random_tokens(V, 16)).execute().result()
        assert engine.stats().pages_cached == 0


def test_a_context_from_disk_has_its_salt(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    folder, _ = w.model("llama-gqa-tied")
    with hw.Engine(folder, threads=1, pages=24) as engine:
        with engine.context(salt="mine") as context:
            context.forward().input(random_tokens(V, 32)).execute().result()
            context.save("salted", durable=True)
        engine.cache.clear()
        with engine.open("salted") as opened, engine.context() as other, engine.context(salt="mine") as same:  # type: ignore[union-attr]
            opened.forward().input([1]).execute().result()
            for context, hits in ((other, 0), (same, 2)):
                assert context.forward().input([*random_tokens(V, 32), 1]).execute().result().stats.cache_hits == hits


def test_a_saved_context_in_memory_holds_its_pages_until_it_is_deleted(twin: Twin) -> None:
    engine = twin.context.engine
    twin.run(random_tokens(V, 20))
    twin.context.save("a")
    assert engine.stats().pages_held == 3  # the full page is shared, the working one copied
    twin.context.save("a")
    assert engine.stats().pages_held == 3
    assert engine.delete("a")
    assert engine.stats().pages_held == 2


# -- letting go ----------------------------------------------------------------------------------------------------


def test_pages_come_back_however_a_context_ends(pair: tuple[hw.Engine, Judge]) -> None:
    engine, _ = pair

    async def leaving(engine: hw.Engine) -> None:
        async with engine.context() as context:
            context.fill(random_tokens(V, 40))
            await context.flush()
            assert engine.stats().pages_held == 3

    engine.run(leaving)
    assert engine.stats().pages_held == 0
    context = engine.context()
    context.forward().input(random_tokens(V, 40)).execute().result()
    context.release()
    context.release()
    assert engine.stats().pages_held == 0
    lost = engine.context()
    lost.forward().input(random_tokens(V, 40)).execute().result()
    assert engine.stats().pages_held == 3
    del lost
    gc.collect()
    assert engine.stats().pages_held == 0


def test_pages_that_were_another_contexts_are_clean(pair: tuple[hw.Engine, Judge]) -> None:
    """A new owner never sees old keys and values, whatever they were."""
    engine, judge = pair
    for seed in range(3):
        with engine.context() as context:
            context.forward().input(random_tokens(V, 24 * 16, seed)).execute().result()
        engine.cache.clear()
        with engine.context() as context:
            Twin(context, judge).run(random_tokens(V, 7, seed + 9))
            pages = np.array(context._table.held())
            assert not engine._pool.read(pages.tolist())[:, :, :, 7:].any()


# -- who holds which -----------------------------------------------------------------------------------------------


def test_the_page_map_names_the_state_of_every_page(pair: tuple[hw.Engine, Judge]) -> None:
    engine, _ = pair
    engine.cache.clear()
    with engine.context() as other:
        other.forward().input(random_tokens(V, 32, 1)).execute().result()
    with engine.context() as context:
        context.forward().input(random_tokens(V, 53)).execute().result()
        alone = Counter(state.name for state in engine.page_map().states)
        assert alone == {"FREE": 18, "CACHED": 2, "COMMITTED": 3, "WORKING": 1}
        with context.fork():
            shared = engine.page_map()
        assert Counter(state.name for state in shared.states) == {"FREE": 17, "CACHED": 2, "SHARED": 3, "WORKING": 2}
        assert (len(shared.states), shared.contexts, shared.queued) == (engine.pages, 2, 0)
        places = [page.page for page in context.inner().pages]
        assert {shared.states[page - 1].name for page in places[:3] if page is not None} == {"SHARED"}
    engine.cache.clear()


def test_a_context_lists_its_own_pages(pair: tuple[hw.Engine, Judge]) -> None:
    engine, _ = pair
    with engine.context() as context:
        context.forward().input(random_tokens(V, 53)).execute().result()
        context.inner().discard_pages(1, 1)
        with context.fork():
            pages = context.inner().pages
        assert [page.state for page in pages] == ["committed", "discarded", "committed", "working"]
        assert [page.holders for page in pages] == [2, 0, 2, 1]
        assert [page.page for page in pages] == held(context)[0]


def test_the_next_position_follows_the_largest_and_the_pending_tokens(pair: tuple[hw.Engine, Judge]) -> None:
    engine, _ = pair
    with engine.context() as context:
        assert context.next_position == 0
        context.forward().input_at([1, 2, 3], [4, 40, 7]).execute().result()
        assert context.next_position == 41
        assert context.fill([5, 6]).next_position == 43
        assert context.truncate(3).next_position == 41
