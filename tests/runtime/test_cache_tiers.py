"""Pages that leave the pool and come back, from host memory and from files: the same results, and less to compute."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import headway as hw
from headway.kv.allocator import Edit, Load, Save
from headway.models.description import ShortConv
from headway.runtime.scheduler import cache_tiers
from headway.testing import random_adapter, random_model, scripted_engine
from support.properties import examples
from support.scripted import QUIET, Sticking, V, by_hand, check_pages, greedy, numbers, opened, plain, result, seen
from support.tiers import with_host_tier


@pytest.fixture(autouse=True)
def computing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computing takes is not known, so that copies pay on any machine, however busy."""
    monkeypatch.setattr(cache_tiers, "COLD", 1 << 30)


Ask = tuple[list[int], dict[str, Any]]  # a prompt and how it is asked


def logits_after(engine: hw.Engine, prompt: Sequence[int], **how: Any) -> np.ndarray:
    """The logits at the end of a prompt, in a context that is gone then."""
    adapter, mask, salt = how.get("adapter"), how.get("mask"), how.get("salt", "")
    with engine.context(salt=salt) as context:
        forward = context.forward().input(prompt)
        if adapter is not None:
            forward = forward.adapter(adapter)
        if mask is not None:
            forward = forward.attention_mask(mask)
        handle = forward.probe(-1, hw.Logits())
        return forward.execute().result().logits(handle)


def conversations(users: int, turns: int, *, first: int = 60, more: int = 25) -> Iterator[list[int]]:
    """Prompts of users in turn, each longer than its last: together more than a small pool holds."""
    for turn in range(turns):
        for user in range(users):
            yield numbers(first + turns * more, user)[: first + turn * more]


def answers(engine: hw.Engine) -> list[np.ndarray]:
    return [logits_after(engine, prompt) for prompt in conversations(5, 3)]


# -- the same results, less to compute ---------------------------------------------------------------------------------


@pytest.mark.parametrize("native", ["require", "off"])
@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"page_size": 5, "pages": 60},
        {"kv_dtype": "float16"},
        {"kv_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_load_larger_than_the_pool_gives_the_same_and_computes_less(
    native: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    how = {"pages": 20, "threads": 1, "device": "cpu", **options}
    with hw.Engine(random_model(layers=2), **how) as engine:
        expected, before = answers(engine), engine.stats()
    with hw.Engine(random_model(layers=2), cache_host="4M", **how) as engine:
        found, after = answers(engine), engine.stats()
    exact = "deterministic" in options
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0 if exact else 1e-4, rtol=0)
    assert (before.cache_host_saves, before.cache_host_hits, before.cache_host_bytes) == (0, 0, 0)
    assert after.cache_host_hits > 20
    assert after.cache_hits > before.cache_hits
    assert after.tokens < 0.7 * before.tokens
    assert after.cache_host_bytes == after.cache_host_pages * engine.info.kv_bytes_per_token * engine.page_size
    assert after.cache_tier_errors == 0


def test_salts_adapters_and_masks_stay_apart() -> None:
    model = random_model(layers=2)
    adapter, window = random_adapter(model.config), hw.Mask.window(5)
    asks: list[Ask] = [
        (numbers(70, 1), {"salt": "north"}),
        (numbers(70, 1), {"salt": "south"}),
        (numbers(70, 1), {"adapter": adapter}),
        (numbers(70, 1), {"mask": window}),
        (numbers(70, 1), {}),
    ]
    with hw.Engine(model, pages=64, threads=1, deterministic=True) as engine:
        engine._loop.kv_cache.caching = False
        expected = [logits_after(engine, prompt, **how) for prompt, how in asks]
    with hw.Engine(model, pages=6, threads=1, deterministic=True, cache_host="1M") as engine:
        for _ in range(2):
            found = [logits_after(engine, prompt, **how) for prompt, how in asks]
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        assert engine.stats().cache_hits == 4 * len(asks), "each finds its own, and only in the second round"
        assert engine.stats().cache_host_hits > 3 * len(asks)


def test_pages_of_a_preempted_context_come_back_by_copy() -> None:
    with with_host_tier(scripted_engine(pages=8), 100) as engine:
        first, second = engine.context(), engine.context(priority=1)
        assert greedy(first, numbers(90, 1))[0].result()
        greedy(second, numbers(100, 2))[0].result()
        second.release()
        before = engine.stats().tokens
        execution, handle = greedy(first, [5])
        assert execution.result().token(handle) == plain([*numbers(90, 1), 5])
        assert engine.stats().preemptions == 1
        assert engine.stats().tokens - before == 1 + 90 % 16, "whole pages are copied"


def test_a_hit_of_a_recurrent_model_ends_at_a_state_that_is_kept() -> None:
    with with_host_tier(opened(Sticking(V, 16), pages=8, recurrence=ShortConv(40)), 100) as engine:
        for seed in (1, 2, 1, 2):
            with engine.context() as context:
                prompt = numbers(100, seed)
                execution, handle = greedy(context, prompt)
                rows = [seen(slot) for slot in range(len(prompt))]
                assert execution.result().token(handle) == result(prompt, rows, recurrent=True) % V
        assert engine._loop.kv_cache.tiers.host_hits > 0  # type: ignore[union-attr]


# -- what changes everything -------------------------------------------------------------------------------------------


def test_new_weights_find_nothing_of_the_old_ones(tmp_path: Path) -> None:
    old, new = random_model(seed=0), random_model(seed=1)
    names = ("model.embed_tokens.weight",)
    tensors = {names[0]: new.embedding}
    where: dict[str, Any] = {"cache_host": "60K", "cache_folder": tmp_path / "pages"}
    with hw.Engine(old, pages=8, threads=1, **where) as engine:
        stale = [logits_after(engine, numbers(90, n)) for n in range(4)]
        engine.update_weights(tensors)
        found = [logits_after(engine, numbers(90, n)) for n in range(4)]
        assert engine.stats().cache_host_hits == engine.stats().cache_folder_hits == 0
    with hw.Engine(old, pages=64, threads=1) as plain_engine:
        plain_engine.update_weights(tensors)
        for n in range(4):
            np.testing.assert_allclose(found[n], logits_after(plain_engine, numbers(90, n)), atol=1e-4)
            assert np.abs(found[n] - stale[n]).max() > 1e-2


def test_sleep_keeps_what_is_in_host_memory() -> None:
    with hw.Engine(random_model(), pages=16, threads=1, cache_host="1M") as engine:
        expected = logits_after(engine, numbers(100))
        engine.sleep()
        engine.wake()
        before = engine.stats().tokens
        np.testing.assert_allclose(logits_after(engine, numbers(100)), expected, atol=1e-4)
        assert engine.stats().tokens - before == 100 - 6 * 16


def test_clearing_the_cache_clears_what_is_below(tmp_path: Path) -> None:
    where: dict[str, Any] = {"cache_host": "60K", "cache_folder": tmp_path / "pages"}
    with hw.Engine(random_model(), pages=8, threads=1, **where) as engine:
        for n in range(4):
            logits_after(engine, numbers(90, n))
        engine.cache.clear()
        stats = engine.stats()
        assert (stats.cache_host_pages, stats.cache_folder_pages, stats.pages_cached) == (0, 0, 0)
    assert list((tmp_path / "pages").glob("*.page")) == []


def test_an_idle_engine_keeps_its_cached_pages() -> None:
    with hw.Engine(random_model(), pages=8, threads=1, cache_host="1M") as engine:
        logits_after(engine, numbers(90))
        with engine._lock:
            assert engine._loop._on_idle() is False
        assert engine.stats().pages_cached == 5


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", ["require", "off"])
def test_files_serve_the_engine_that_comes_next(native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    how: dict[str, Any] = {"pages": 8, "threads": 1, "cache_host": "60K", "cache_folder": tmp_path / "pages"}
    with hw.Engine(random_model(), **how) as engine:
        expected = [logits_after(engine, numbers(90, n)) for n in range(6)]
    with hw.Engine(random_model(), **how) as engine:
        found = [logits_after(engine, numbers(90, n)) for n in range(6)]
        stats = engine.stats()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert stats.cache_folder_hits >= 10
    assert stats.tokens <= 6 * 90 - 16 * stats.cache_folder_hits
    assert stats.cache_folder_bytes == sum(path.stat().st_size for path in (tmp_path / "pages").glob("*.page"))


def test_passes_that_wait_for_the_same_files_all_end(tmp_path: Path) -> None:
    how: dict[str, Any] = {"threads": 1, "cache_host": "60K", "cache_folder": tmp_path / "pages"}
    prompts = [[*numbers(70, n // 4), n] for n in range(12)]
    with hw.Engine(random_model(), pages=6, **how) as engine:
        expected = [logits_after(engine, prompt) for prompt in [*prompts, *prompts]]
    with hw.Engine(random_model(), pages=20, **how) as engine:
        contexts = [engine.context() for _ in prompts]
        running = []
        for context, prompt in zip(contexts, prompts, strict=True):
            forward = context.forward().input(prompt)
            running.append((forward.probe(-1, hw.Logits()), forward.execute()))
        gone = contexts.pop(0)
        gone.release()  # which reads for the next ones
        for (handle, execution), wanted in zip(running[1:], expected[1:12], strict=True):
            np.testing.assert_allclose(execution.result(60).logits(handle), wanted, atol=1e-4)
        assert engine.stats().cache_folder_hits > 0
        for context in contexts:
            context.release()
        assert engine.stats().pages_held == 0


def test_damaged_files_are_computed_again(tmp_path: Path) -> None:
    how: dict[str, Any] = {"pages": 8, "threads": 1, "cache_host": "30K", "cache_folder": tmp_path / "pages"}
    with hw.Engine(random_model(), **how) as engine:
        expected = [logits_after(engine, numbers(90, n)) for n in range(4)]
    for path in (tmp_path / "pages").glob("*.page"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    with hw.Engine(random_model(), **how) as engine:
        for n in range(4):
            np.testing.assert_allclose(logits_after(engine, numbers(90, n)), expected[n], atol=1e-4)
        assert engine.stats().cache_folder_hits == 0
        assert engine.stats().cache_tier_errors > 0


# -- what fails --------------------------------------------------------------------------------------------------------


class Breaking(Sticking):
    """Fails at edits that `bad` picks."""

    bad: Callable[[Edit], bool] = staticmethod(lambda edit: False)

    def _edit(self, edit: Edit) -> None:
        if self.bad(edit):
            raise RuntimeError("no memory for it")
        super()._edit(edit)


@pytest.mark.parametrize("kind", [Save, Load])
def test_a_copy_that_fails_costs_a_computation_and_no_pass(kind: type[Edit]) -> None:
    device = Breaking(V, 16)
    with with_host_tier(opened(device, pages=8), 100) as engine:
        for n in (1, 2):
            device.bad = lambda edit: isinstance(edit, kind)
            for seed in (1, 2, 1, 2):
                with engine.context() as context:
                    execution, handle = greedy(context, numbers(90 + n, seed))
                    assert execution.result().token(handle) == plain(numbers(90 + n, seed))
            device.bad = lambda edit: False
        check_pages(engine)
        assert engine._loop.kv_cache.tiers.misses > 0  # type: ignore[union-attr]


def test_a_copy_back_that_takes_longer_than_computing_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with hw.Engine(random_model(), pages=8, threads=1, cache_host="1M") as engine:
        tiers = engine._tiers
        assert tiers is not None
        for n in range(3):
            logits_after(engine, numbers(90, n))
        assert tiers.pays(1), "while nothing is known"
        logits_after(engine, numbers(90, 0))
        copied = engine.stats().cache_host_hits
        assert copied > 0
        monkeypatch.setattr(cache_tiers, "COLD", 0)
        logits_after(engine, numbers(50, 7))
        tiers.host.store.memory.page_seconds = 1e6  # type: ignore[misc]
        assert not tiers.pays(1)
        logits_after(engine, numbers(90, 1))
        assert engine.stats().cache_host_hits == copied


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_host": "much"}, "cache_host is 'much'; it must be a number of bytes"),
        ({"cache_host": 0}, "cache_host is 0; it must be"),
        ({"cache_host": "900T"}, "cache_host is 900.0 TiB and this machine has"),
        ({"cache_host": 10}, "cache_host is 10 B and a page takes"),
        ({"cache_folder": "here"}, "there is no cache_host"),
        ({"cache_folder_size": "1G"}, "there is no cache_folder"),
        ({"cache_host": "1M", "cache_folder": 3}, "cache_folder is 3; it must be a folder"),
        (
            {"cache_host": "1M", "cache_folder": "", "cache_folder_size": 10},
            "cache_folder_size is 10 B and a page takes",
        ),
        ({"cache_host": "1M", "tensor_parallel": 2}, "not supported with tensor_parallel"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    if options.get("cache_folder") == "":
        options = options | {"cache_folder": tmp_path / "pages"}
    with pytest.raises((hw.HeadwayError), match=says):
        hw.Engine(random_model(), pages=8, threads=1, **options)


def test_an_engine_with_a_runner_of_ones_own_has_no_tiers() -> None:
    with pytest.raises(hw.Unsupported, match="runner of their own"):
        scripted_engine(pages=8, cache_host="1M")


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRWXU | stat.S_IWOTH)
    with pytest.raises(hw.InvalidInput, match="others can write to it"):
        hw.Engine(random_model(), pages=8, threads=1, cache_host="1M", cache_folder=tmp_path)


# -- at random ---------------------------------------------------------------------------------------------------------


LONGEST = 7 * 16  # slots of a context: all pages of the smallest pool


class Machine(RuleBasedStateMachine):
    """Contexts that come, go on, fork, are cut, saved and preempted in a pool of few pages, over a tier of few places,
    on a device whose edits may fail: every token is what the whole sequence gives when it is computed at once."""

    @initialize(
        pages=st.sampled_from([7, 9, 14]), places=st.sampled_from([1, 4, 100]), budget=st.sampled_from([8, 40, 512])
    )
    def begins(self, pages: int, places: int, budget: int) -> None:
        self.device = Sticking(V, 16)
        self.engine = with_host_tier(opened(self.device, pages=pages, max_batch_tokens=budget), places)
        self.stack = ExitStack()
        self.hand = self.stack.enter_context(by_hand(self.engine))
        self.contexts: list[tuple[hw.Context, list[int]]] = []

    def compute(self, parts: Sequence[tuple[hw.Context, list[int], list[int]]]) -> None:
        """Add tokens to contexts, all at once; those whose pass fails are gone."""
        running = []
        for context, before, more in parts:
            if len(before) + len(more) > LONGEST:
                context.release()
            else:
                running.append((context, [*before, *more], *greedy(context, more)))
        self.hand.until(*(execution for _, _, execution, _ in running))
        for context, tokens, execution, handle in running:
            try:
                assert execution.result(0).token(handle) == plain(tokens)
            except (hw.PassFailed, hw.OutOfPages):
                context.release()
                continue
            self.contexts.append((context, tokens))

    @rule(
        asks=st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from([17, 33, 48, 60, 90]), st.integers(-1, 1)),
            min_size=1,
            max_size=3,
        ),
        stay=st.booleans(),
    )
    def asks(self, asks: list[tuple[int, int, int]], stay: bool) -> None:
        count = len(self.contexts)
        self.compute([(self.engine.context(priority=bid), [], numbers(90, seed)[:n]) for seed, n, bid in asks])
        while len(self.contexts) > (min(count + 1, 4) if stay else count):
            self.contexts.pop()[0].release()

    @precondition(lambda self: self.contexts)
    @rule(which=st.integers(0, 3), more=st.sampled_from([1, 5, 16, 20]))
    def goes_on(self, which: int, more: int) -> None:
        context, tokens = self.contexts.pop(which % len(self.contexts))
        self.compute([(context, tokens, numbers(more, 9))])

    @precondition(lambda self: self.contexts)
    @rule(which=st.integers(0, 3), cut=st.sampled_from([0, 1, 16, 30]))
    def forks_and_cuts(self, which: int, cut: int) -> None:
        context, tokens = self.contexts[which % len(self.contexts)]
        try:
            twin = context.fork()
        except hw.OutOfPages:
            return
        cut = min(cut, len(tokens) - 1)
        try:
            twin.truncate(cut)
        except hw.OutOfPages:
            twin.release()
            return
        self.compute([(twin, tokens[: len(tokens) - cut], [3])])

    @precondition(lambda self: self.contexts)
    @rule(which=st.integers(0, 3), name=st.sampled_from(["a", "b"]))
    def is_saved_and_opened(self, which: int, name: str) -> None:
        context, tokens = self.contexts.pop(which % len(self.contexts))
        try:
            context.save(name, durable=False)
        except hw.OutOfPages:
            context.release()
            return
        context.release()
        again = self.engine.take(name)
        assert again is not None
        self.compute([(again, tokens, [4])])

    @precondition(lambda self: self.contexts)
    @rule(which=st.integers(0, 3))
    def leaves(self, which: int) -> None:
        self.contexts.pop(which % len(self.contexts))[0].release()

    @rule()
    def clears(self) -> None:
        self.engine.cache.clear()

    @rule(times=st.integers(1, 3))
    def the_device_fails_at_edits(self, times: int) -> None:
        self.device.broken = times

    @invariant()
    def all_adds_up(self) -> None:
        if hasattr(self, "engine"):
            check_pages(self.engine)
            with self.engine._lock:
                self.engine._loop.kv_cache.tiers.host.check()  # type: ignore[union-attr]
                assert not self.engine._loop.kv_cache.computing

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.device.broken = 0
            for context, _ in self.contexts:
                context.release()
            for seed in range(4):
                self.contexts = []
                self.compute([(self.engine.context(), [], numbers(90, seed))])
                self.contexts[0][0].release()
            assert self.engine.stats().pages_held == 0
            self.stack.close()
            self.engine.close()


TestTiers = Machine.TestCase
TestTiers.settings = settings(max_examples=examples(60), stateful_step_count=30, **QUIET)


@pytest.mark.slow
class TestTiersLong(Machine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60, **QUIET)


def test_the_staging_of_a_torch_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pages move a few at a time, whatever their number."""
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    monkeypatch.setattr("headway.kv.tiers.page_store.AT_ONCE", 3 * 8192)
    with hw.Engine(random_model(), pages=20, threads=1, device="cpu", cache_host="2M") as engine:
        assert engine._tiers is not None
        assert engine._tiers.host.store.memory.page_bytes == 8192
        expected = [logits_after(engine, numbers(250, n)) for n in (1, 2)]
        found = [logits_after(engine, numbers(250, n)) for n in (1, 2)]
        assert engine.stats().cache_host_hits >= 20
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
