"""The prefix cache: what is found again, what is not, who waits for whom, what goes first when pages are needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.base.specs.brle import Brle
from headway.kv.prefix import chain, root
from headway.runtime.batch import Batch
from headway.testing import random_model, scripted_engine, scripted_result
from support.eventually import eventually
from support.scripted import Hand, V, by_hand, check_pages, continued, faulty_engine, greedy, numbers, plain

PROMPT = numbers(40)  # two whole pages and a half


@pytest.fixture
def engine() -> Iterator[hw.Engine]:
    with scripted_engine(pages=64) as made:
        yield made


def asked(context: hw.Context, tokens: Sequence[int]) -> tuple[int, int]:
    """The token drawn after a prompt, and how many pages were found."""
    execution, handle = greedy(context, tokens)
    out = execution.result()
    return out.token(handle), out.stats.cache_hits


def computed(engine: hw.Engine, act: Callable[[], object]) -> int:
    """How many tokens the device computed meanwhile."""
    before = engine.stats().tokens
    act()
    return engine.stats().tokens - before


# -- hits ------------------------------------------------------------------------------------------------------------


def test_another_program_finds_what_one_computed(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> tuple[int, int]:
        context = engine.context()
        execution, handle = greedy(context, PROMPT)
        out = await execution
        return out.token(handle), out.stats.cache_hits

    assert engine.run(program) == (plain(PROMPT), 0)
    assert engine.run(program) == (plain(PROMPT), 2)
    with engine.context() as context:
        assert computed(engine, lambda: asked(context, PROMPT)) == 8


def test_pages_are_found_while_they_are_held_and_after_their_release(engine: hw.Engine) -> None:
    first = engine.context()
    asked(first, PROMPT)
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 2)
    held = engine.stats().pages_held
    first.release()
    assert engine.stats().pages_held <= held
    assert engine.stats().pages_cached == 2
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 2)


def test_contexts_that_hit_share_pages(engine: hw.Engine) -> None:
    contexts = [engine.context() for _ in range(5)]
    for context in contexts:
        asked(context, PROMPT)
    assert engine.stats().pages_held == 2 + 5
    assert len({tuple(c._table.held()[:2]) for c in contexts}) == 1


def test_a_prompt_that_goes_another_way_hits_up_to_the_last_whole_page_in_common(engine: hw.Engine) -> None:
    asked(engine.context(), PROMPT)
    other = [*PROMPT[:30], *numbers(20, 9)]
    assert asked(engine.context(), other) == (plain(other), 1)


def test_forks_hit_each_other_s_pages(engine: hw.Engine) -> None:
    parent = engine.context()
    parent.forward().input(PROMPT[:16]).execute().result()
    one, two = parent.fork(), parent.fork()
    rest = numbers(33, 4)
    assert asked(one, rest) == (plain([*PROMPT[:16], *rest]), 0)
    assert asked(two, rest) == (plain([*PROMPT[:16], *rest]), 2)
    assert two._table.held()[:3] == one._table.held()[:3]


def test_what_was_generated_is_found_as_a_prompt_and_the_other_way_round(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            return await context.fill(PROMPT).generate(hw.Argmax(), max_tokens=30).tokens()

    tokens = engine.run(program)
    whole = [*PROMPT, *tokens]
    assert asked(engine.context(), whole) == (plain(whole), 4)


def test_a_prompt_in_several_passes_hits_where_a_pass_starts_at_a_page(engine: hw.Engine) -> None:
    asked(engine.context(), numbers(70))
    context = engine.context()
    assert asked(context, numbers(70)[:32])[1] == 1  # the last page is read
    assert asked(context, numbers(70)[32:70]) == (plain(numbers(70)), 2)
    apart = engine.context()
    assert asked(apart, numbers(70)[:10])[1] == 0
    assert asked(apart, numbers(70)[10:]) == (plain(numbers(70)), 0)  # it starts inside a page of its own


def test_a_flush_of_what_is_all_there_computes_nothing_and_can_be_read_on(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[int]:
        await engine.context().fill(PROMPT[:32]).flush()
        before = engine.stats().tokens
        context = engine.context().fill(PROMPT[:32])
        await context.flush()
        assert engine.stats().tokens == before
        assert context.seq_len == 32
        return await context.generate(hw.Argmax(), max_tokens=3).tokens()

    assert engine.run(program) == continued(PROMPT[:32], 3)


# -- where it stops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "hits"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (39, 2)])
def test_it_stops_before_the_first_row_that_is_read(engine: hw.Engine, row: int, hits: int) -> None:
    asked(engine.context(), PROMPT)
    context = engine.context()
    forward = context.forward().input(PROMPT)
    early, late = forward.sample([row], hw.Argmax()), forward.probe(39, hw.Logits())
    out = forward.execute().result()
    assert out.stats.cache_hits == hits
    assert out.token(early) == plain(PROMPT[: row + 1])
    assert len(out.logits(late)) == V


@pytest.mark.parametrize("kept", [True, False])
def test_a_pass_that_reads_the_token_before_its_rows_hits_nothing_and_is_right(engine: hw.Engine, kept: bool) -> None:
    asked(engine.context(), PROMPT)
    context = engine.context()
    start = context.forward().input(PROMPT[:16])
    if kept:
        start.sample([-1], hw.Argmax())  # else all of it is found, and nothing computed that could be kept
    start.execute().result()
    assert (context._table.state is not None) == kept
    forward = context.forward().input(PROMPT[16:])
    handle = forward.sample([-25], hw.Argmax())
    out = forward.execute().result()
    assert out.token(handle) == plain(PROMPT[:16])
    assert out.stats.cache_hits == 0
    assert context.seq_len == 40


def test_counts_of_passes_add_up_to_the_total(engine: hw.Engine) -> None:
    hits = [asked(engine.context(), PROMPT[:n])[1] for n in (40, 40, 33, 32, 31, 17, 16, 1)]
    assert hits == [0, 2, 2, 1, 1, 1, 0, 0]
    assert engine.cache.hits == engine.stats().cache_hits == sum(hits)


# -- the key ---------------------------------------------------------------------------------------------------------


def test_salts_keep_tenants_apart(engine: hw.Engine) -> None:
    for salt in ("", "a", "b"):
        assert asked(engine.context(salt=salt), PROMPT) == (plain(PROMPT), 0)
    for salt in ("", "a", "b"):
        assert asked(engine.context(salt=salt), PROMPT) == (plain(PROMPT), 2)
    with pytest.raises(hw.WrongType, match="salt"):
        engine.context(salt=3)  # type: ignore[arg-type]


def test_a_fork_keeps_its_parent_s_salt(engine: hw.Engine) -> None:
    parent = engine.context(salt="a")
    parent.forward().input(PROMPT[:16]).execute().result()
    asked(parent.fork(), PROMPT[16:])
    plain_one = engine.context()
    plain_one.forward().input(PROMPT[:16]).execute().result()
    assert asked(plain_one, PROMPT[16:])[1] == 0
    assert asked(parent.fork(), PROMPT[16:])[1] == 1


def test_other_positions_miss(engine: hw.Engine) -> None:
    def at(positions: Sequence[int]) -> tuple[int, int]:
        forward = engine.context().forward().input_at(PROMPT, positions)
        handle = forward.sample([-1], hw.Argmax())
        out = forward.execute().result()
        expected = scripted_result(PROMPT, positions, np.tril(np.ones((40, 40), bool)), 39) % V
        assert out.token(handle) == expected
        return out.token(handle), out.stats.cache_hits

    asked(engine.context(), PROMPT)
    assert at(range(40))[1] == 2  # explicit positions that are the usual ones
    assert at(range(5, 45))[1] == 0
    assert at([*range(20), *range(30, 50)])[1] == 1  # a gap inside the second page
    assert at(range(5, 45))[1] == 2


def masked(engine: hw.Engine, mask: Any, *, causal: bool = True) -> int:
    forward = engine.context().forward().input(PROMPT).attention_mask(mask, causal=causal)
    forward.sample([-1], hw.Argmax())
    return forward.execute().result().stats.cache_hits


def test_an_explicit_causal_mask_equals_none(engine: hw.Engine) -> None:
    asked(engine.context(), PROMPT)
    rows = [[i + 1] for i in range(40)]
    same = [hw.Mask.causal(), hw.Mask.window(1000), hw.Mask.from_bool(np.ones((40, 40), bool)), rows]
    assert [masked(engine, m) for m in same] == [2, 2, 2, 2]


def test_another_mask_misses_and_hits_itself(engine: hw.Engine) -> None:
    asked(engine.context(), PROMPT)
    assert masked(engine, hw.Mask.window(5)) == 0
    assert masked(engine, hw.Mask.window(5)) == 2
    assert masked(engine, hw.Mask.window(6)) == 0
    assert masked(engine, hw.Mask.window(20)) == 1  # no slot of the first page is farther away
    assert masked(engine, hw.Mask.sink(2, 3)) == 0
    late = np.tril(np.ones((40, 40), bool))
    late[39, 3] = False
    assert masked(engine, hw.Mask.from_bool(late)) == 2  # only a row that is computed anyway differs
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 2)


def test_the_key_is_a_chain_over_all_that_matters() -> None:
    tokens, positions = PROMPT[:32], range(32)
    keys = chain(root(""), tokens, positions, None, 16)
    assert len(keys) == len(set(keys)) == 2
    assert chain(root(""), tokens, positions, [None] * 32, 16) == keys
    assert chain(keys[0], tokens[16:], positions[16:], None, 16) == keys[1:]
    assert not set(keys) & set(chain(root("x"), tokens, positions, None, 16))
    assert not set(keys) & set(chain(root(""), [*tokens[1:], tokens[0]], positions, None, 16))
    swapped = chain(root(""), [*tokens[:16], *tokens[31:15:-1]], positions, None, 16)
    assert (swapped[0], swapped[1] != keys[1]) == (keys[0], True)
    masks = [Brle.from_intervals(i + 1, [(i, i + 1)]) for i in range(32)]
    own = chain(root(""), tokens, positions, masks, 16)
    assert not set(keys) & set(own)
    moved: list[Brle | None] = [None, *masks[1:]]
    assert chain(root(""), tokens, positions, moved, 16)[0] != own[0]


def test_runs_of_neighboring_masks_cannot_be_told_otherwise() -> None:
    """Two rows whose runs, written one after the other, read the same must not have one key."""
    one: list[Brle | None] = [Brle.from_intervals(4, [(0, 2)]), Brle.from_intervals(4, [(0, 1), (2, 3)])]
    two: list[Brle | None] = [Brle.from_intervals(4, [(0, 1), (2, 3)]), Brle.from_intervals(4, [(0, 2)])]
    assert chain(root(""), [1, 1], [0, 1], one, 2) != chain(root(""), [1, 1], [0, 1], two, 2)
    assert chain(root(""), [1, 1], [0, 1], [None, one[0]], 2) != chain(root(""), [1, 1], [0, 1], [one[0], None], 2)


def test_pages_that_saw_later_tokens_stay_out_and_so_do_those_after_them(engine: hw.Engine) -> None:
    everything = np.ones((40, 40), bool)
    assert masked(engine, hw.Mask.from_bool(everything), causal=False) == 0
    assert masked(engine, hw.Mask.from_bool(everything), causal=False) == 0
    for _ in range(2):
        context = engine.context()
        context.forward().input(PROMPT[:16]).execute().result()
        block = context.forward().input(PROMPT[16:32]).attention_mask([[32]] * 16, causal=False)
        block.execute().result()
        assert asked(context, numbers(33, 5))[1] == 0
        context.release()
    assert engine.stats().pages_cached == 1  # the page before the block


def test_deferred_pages_stay_out_until_they_are_committed(engine: hw.Engine) -> None:
    context = engine.context()
    context.forward().input(PROMPT[:32]).defer_commit().execute().result()
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 0)
    engine.cache.clear()
    late = engine.context()
    late.forward().input(PROMPT[:32]).defer_commit().execute().result()
    late.inner().commit_working_pages(1)
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 1)


def test_what_was_cut_off_and_written_anew_is_not_found_under_the_old_key(engine: hw.Engine) -> None:
    context = engine.context()
    asked(context, PROMPT[:32])
    context.truncate(20)
    other = [*PROMPT[:12], *numbers(28, 8)]
    assert asked(context, other[12:])[0] == plain(other)
    assert asked(engine.context(), other)[0] == plain(other)
    assert asked(engine.context(), PROMPT)[0] == plain(PROMPT)


# -- together --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hand() -> Iterator[Hand]:
    with scripted_engine(pages=64, max_batch_tokens=16) as engine, by_hand(engine) as hand:
        yield hand


@pytest.mark.parametrize("crowd", [2, 5])
def test_cold_requests_with_one_prompt_compute_it_once(hand: Hand, crowd: int) -> None:
    contexts = [hand.engine.context() for _ in range(crowd)]
    running = [greedy(c, PROMPT) for c in contexts]
    hand.until(*(e for e, _ in running))
    assert [e.result(0).token(h) for e, h in running] == [plain(PROMPT)] * crowd
    assert [e.result(0).stats.cache_hits for e, _ in running] == [0] + [2] * (crowd - 1)
    assert hand.engine.stats().tokens == 40 + 8 * (crowd - 1)
    assert hand.engine.stats().pages_held == 2 + crowd


def test_a_request_that_shares_only_the_beginning_waits_only_for_that(hand: Hand) -> None:
    short = [*PROMPT[:16], *numbers(10, 6)]
    (long, l_handle), (other, o_handle) = (greedy(hand.engine.context(), t) for t in (numbers(200, 77), short))
    first, f_handle = greedy(hand.engine.context(), PROMPT)
    hand.until(other, first)
    assert not long.done()
    assert other.result(0).token(o_handle) == plain(short)
    assert first.result(0).token(f_handle) == plain(PROMPT)
    hand.until(long)
    assert long.result(0).token(l_handle) == plain(numbers(200, 77))
    assert hand.engine.stats().tokens == 200 + 40 + 10


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_the_first_is_cancelled_the_second_takes_over(hand: Hand, steps: int) -> None:
    (first, _), (second, handle) = (greedy(hand.engine.context(), PROMPT) for _ in range(2))
    for _ in range(steps):
        hand.step()
    first.cancel()
    hand.until(second)
    assert second.result(0).token(handle) == plain(PROMPT)
    assert second.result(0).stats.cache_hits == steps  # what was computed by then stays
    assert hand.engine.stats().tokens == 40
    check_pages(hand.engine)


@pytest.mark.parametrize("failing", [1, 2])
def test_when_the_first_fails_the_second_takes_over(failing: int) -> None:
    step = 0

    def before(batch: Batch) -> None:
        nonlocal step
        step += 1
        if step == failing:
            raise RuntimeError("once")

    with faulty_engine(before, pages=64, max_batch_tokens=16) as engine, by_hand(engine) as hand:
        (first, _), (second, handle) = (greedy(engine.context(), PROMPT) for _ in range(2))
        hand.until(first, second)
        with pytest.raises(hw.PassFailed, match="once"):
            first.result(0)
        assert second.result(0).token(handle) == plain(PROMPT)
        assert second.result(0).stats.cache_hits == failing - 1
        check_pages(engine)


def test_when_the_first_is_released_the_second_takes_over(hand: Hand) -> None:
    leader = hand.engine.context()
    first, _ = greedy(leader, PROMPT)
    second, handle = greedy(hand.engine.context(), PROMPT)
    hand.step()
    leader.release()
    hand.until(second)
    assert second.result(0).token(handle) == plain(PROMPT)
    with pytest.raises(hw.Closed):
        first.result(0)


def test_a_crowd_in_threads_computes_a_prompt_once() -> None:
    async def program(engine: hw.Engine) -> list[list[int]]:
        async def one() -> list[int]:
            async with engine.context() as context:
                return await context.fill(numbers(100)).generate(hw.Argmax(), max_tokens=4).tokens()

        return await asyncio.gather(*(one() for _ in range(32)))

    with scripted_engine(pages=400, max_batch_tokens=24) as engine:
        assert engine.run(program) == [continued(numbers(100), 4)] * 32
        assert engine.stats().tokens <= 100 + 32 * (4 + 4)
        assert engine.stats().cache_hits == 31 * 6


# -- what goes first -------------------------------------------------------------------------------------------------


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    with scripted_engine(pages=8) as engine:
        prompts = {name: numbers(33, seed) for seed, name in enumerate("abc", 20)}  # two whole pages each

        def use(name: str) -> int:
            with engine.context() as context:
                token, hits = asked(context, prompts[name])
                assert token == plain(prompts[name])
                return hits

        assert [use(n) for n in "abc"] == [0, 0, 0]
        assert use("a") == 2  # b is the oldest now
        with engine.context() as big:
            asked(big, numbers(33, 99))  # 3 pages, 2 are free: one cached page goes
        assert engine.stats().pages_cached == 5 + 2
        assert use("b") == 1
        assert use("a") == 2


def test_cached_pages_are_free_for_whoever_needs_them() -> None:
    with scripted_engine(pages=4) as engine:
        for seed in range(6):
            with engine.context() as context:
                assert asked(context, numbers(60, seed)) == (plain(numbers(60, seed)), 0)
        assert engine.stats().preemptions == 0
        assert engine.stats().pages_held == 0


def test_clear_forgets_everything_and_says_how_many_pages_became_free(engine: hw.Engine) -> None:
    with engine.context() as context:
        asked(context, PROMPT)
    kept = engine.context()
    asked(kept, numbers(40, 3))
    assert engine.cache.pages == 2
    assert engine.cache.clear() == 2
    assert (engine.cache.pages, engine.stats().pages_held) == (0, 3)
    assert asked(engine.context(), PROMPT)[1] == 0
    assert asked(engine.context(), numbers(40, 3))[1] == 0  # in use, but found no more
    assert asked(kept, [1])[0] == plain([*numbers(40, 3), 1])


# -- pins ------------------------------------------------------------------------------------------------------------


def flood(engine: hw.Engine) -> None:
    """Use every page that is not held."""
    free = engine.stats().pages_free + engine.stats().pages_cached
    with engine.context() as context:
        asked(context, numbers(free * 16, 1234))


def test_pinned_pages_outlive_a_flood_and_unpinned_ones_do_not(engine: hw.Engine) -> None:
    with engine.context() as context:
        asked(context, PROMPT)
    assert engine.cache.pin(PROMPT) == 2
    assert engine.stats().pages_held == 2
    flood(engine)
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 2)
    assert engine.cache.unpin(PROMPT) is True
    assert engine.cache.unpin(PROMPT) is False
    for context in list(engine._loop.kv_cache.tables):
        context.close()
    flood(engine)
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 0)


def test_only_what_is_there_is_pinned(engine: hw.Engine) -> None:
    with engine.context() as context:
        asked(context, PROMPT)
    assert engine.cache.pin(PROMPT[:31]) == 1
    assert engine.cache.pin([*PROMPT, *numbers(40, 2)]) == 2
    assert engine.cache.pin(numbers(40, 2)) == 0
    assert engine.cache.pin(PROMPT, salt="a") == 0
    assert engine.stats().pages_held == 2


def test_pins_of_one_name_replace_each_other_and_salts_are_apart(engine: hw.Engine) -> None:
    for salt in ("", "a"):
        with engine.context(salt=salt) as context:
            asked(context, PROMPT)
    assert engine.cache.pin(PROMPT) == engine.cache.pin(PROMPT) == engine.cache.pin(PROMPT, salt="a") == 2
    assert engine.stats().pages_held == 4
    assert engine.cache.unpin(PROMPT)
    assert engine.stats().pages_held == 2
    assert engine.cache.unpin(PROMPT, salt="a")
    assert engine.stats().pages_held == 0


def test_a_saved_context_is_pinned_by_its_name(engine: hw.Engine) -> None:
    with engine.context() as context:
        asked(context, PROMPT)
        context.save("it")
    assert engine.cache.pin("it") == 3
    engine.delete("it")
    flood(engine)
    assert asked(engine.context(), PROMPT) == (plain(PROMPT), 2)
    assert engine.cache.unpin("it")
    with pytest.raises(hw.InvalidInput, match="no context is saved in memory as 'gone'"):
        engine.cache.pin("gone")
    with pytest.raises(hw.InvalidInput):
        engine.cache.pin("not a name!")


def test_a_pin_ends_with_its_time(engine: hw.Engine) -> None:
    with engine.context() as context:
        asked(context, PROMPT)
    assert engine.cache.pin(PROMPT, ttl=3600) == 2
    assert engine.stats().pages_held == 2
    assert engine.cache.unpin(PROMPT)
    assert engine.cache.pin(PROMPT, ttl=0.5) == 2
    eventually(lambda: engine.stats().pages_held == 0)
    assert engine.cache.pages == 2
    assert engine.cache.unpin(PROMPT) is False


def test_a_pass_that_waits_for_pages_gets_those_of_a_pin_whose_time_is_over() -> None:
    with scripted_engine(pages=4) as engine:
        with engine.context() as context:
            asked(context, PROMPT)
        engine.cache.pin(PROMPT, ttl=0.05)
        time.sleep(0.06)
        assert asked(engine.context(), numbers(60, 2))[0] == plain(numbers(60, 2))


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan"), "1"])
def test_a_ttl_that_is_no_time_is_refused(engine: hw.Engine, ttl: Any) -> None:
    with pytest.raises((hw.InvalidInput, hw.WrongType), match="ttl"):
        engine.cache.pin(PROMPT, ttl=ttl)


def test_ids_outside_the_vocabulary_are_refused(engine: hw.Engine) -> None:
    with pytest.raises(hw.InvalidToken):
        engine.cache.pin([1, V])
    with pytest.raises(hw.InvalidToken):
        engine.cache.unpin([-1])


# -- the same with and without ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_results_are_the_same_bit_for_bit_with_and_without_the_cache(family: str) -> None:
    decoder = random_model(family, layers=2)
    prompts = [[*numbers(n, 50)[:n], *numbers(m, m)] for n, m in ((35, 7), (40, 3), (17, 20), (48, 1), (35, 7))]

    def run(*, caching: bool) -> list[np.ndarray]:
        with hw.Engine(decoder, pages=128, threads=1, deterministic=True, max_batch_tokens=24) as engine:
            engine._loop.kv_cache.caching = caching
            found = []
            for prompt in prompts:
                context = engine.context()
                forward = context.forward().input(prompt)
                handle = forward.probe(-1, hw.Logits())
                found.append(forward.execute().result().logits(handle))
                more = context.forward().input([5, 6])
                handle = more.probe(-1, hw.Logits())
                found.append(more.execute().result().logits(handle))
            assert (engine.stats().cache_hits > 4) == caching
            return found

    for with_cache, without in zip(run(caching=True), run(caching=False), strict=True):
        np.testing.assert_array_equal(with_cache, without)


def test_generations_are_the_same_with_and_without_the_cache() -> None:
    decoder = random_model(layers=2)

    async def program(engine: hw.Engine) -> list[list[int]]:
        async def one(n: int) -> list[int]:
            async with engine.context() as context:
                context.fill([*numbers(40, 1), n % 7])
                return await context.generate(hw.Multinomial(seed=n), max_tokens=12).tokens()

        return await asyncio.gather(*(one(n) for n in range(16)))

    found = []
    for caching in (True, False):
        with hw.Engine(decoder, pages=256, threads=1, deterministic=True) as engine:
            engine._loop.kv_cache.caching = caching
            found.append(engine.run(program))
            assert (engine.stats().cache_hits > 0) == caching
    assert found[0] == found[1]
