"""Page-trim: exactly the pages the rule names are left out, and no result changes.

The rule, written here a second time (`Plan.trimmed`): a page that the pass does not write, and that was discarded or
that every row of the pass masks, pending rows included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headway as hw
from headway import Mask
from headway.runtime.batch import Batch
from headway.runtime.runners.base import as_segments
from support import world as w
from support.checks import assert_close, random_tokens
from support.properties import examples
from support.watched import WatchedRunner
from support.world import Choice, Judge, Twin

MODELS = ("llama-gqa-tied", "qwen2-layer-types")
V, PAGE = 97, 4


class Watcher(WatchedRunner):
    """The engine's own runner, with an eye on the pages that reach it."""

    def __init__(self, engine: hw.Engine) -> None:
        super().__init__(engine)
        self.batches: list[Batch] = []

    def before(self, batch: Batch) -> None:
        if batch.rows:
            self.batches.append(as_segments(batch, (None,) * batch.decode_count, PAGE))

    def numbers(self) -> list[set[int]]:
        """The page numbers of each segment since the last look."""
        found = [set(s.numbers.tolist()) for b in self.batches for s in b.segments]
        self.batches.clear()
        return found


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[hw.Engine, hw.Engine, Watcher, Judge]]:
    folder, judge = w.model(request.param)
    options: dict[str, Any] = {"threads": 1, "pages": 128, "page_size": PAGE}
    with hw.Engine(folder, **options) as trimming, hw.Engine(folder, trim=False, **options) as plain:
        yield trimming, plain, Watcher(trimming), judge


def page_bits(pattern: str, slots: int, count: int = 1) -> np.ndarray:
    """Attend bits from a picture of pages: x attended, . masked; the rest of the row attends to itself alone."""
    line = np.repeat([c == "x" for c in pattern], PAGE)[:slots]
    bits = np.zeros((count, slots + count), dtype=bool)
    bits[:, : len(line)] = line
    bits[np.arange(count), slots + np.arange(count)] = True
    return bits


PICTURES = {
    "leading": "...xxx",
    "middle": "xx..xx",
    "sink and window": "x....x",
    "all but the last": "......",
    "every other": ".x.x.x",
    "none": "xxxxxx",
}


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("extra", [0, 2])
def test_the_pages_of_a_picture_are_left_out(engines: Any, picture: str, count: int, extra: int) -> None:
    trimming, plain, watcher, judge = engines
    slots = 6 * PAGE + extra
    bits = page_bits(PICTURES[picture], slots, count)
    found = []
    for engine in (trimming, plain):
        with engine.context() as context:
            twin = Twin(context, judge)
            twin.run(random_tokens(V, slots))
            choice = Choice(Mask.from_bool(bits), rows=bits)
            plan, forward = twin.plan([5] * count, mask=choice), twin.build([5] * count, mask=choice)
            handles = [forward.probe(i, hw.Logits()) for i in range(count)]
            watcher.batches.clear()
            out = forward.execute().result()
            found.append(np.stack([out.logits(h) for h in handles]))
            assert_close(found[-1], judge.logits(plan.cells))
            total = -(-(slots + count) // PAGE)
            expected = plan.trimmed(twin.world) if engine is trimming else 0
            assert (out.stats.pages_trimmed, out.stats.pages) == (expected, total - expected)
            if engine is trimming:
                masked = {i for i, c in enumerate(PICTURES[picture]) if c == "."}
                written = set(range(slots // PAGE, total))
                assert watcher.numbers() == [set(range(total)) - (masked - written)]
    assert_close(found[0], found[1])


def test_a_page_that_one_row_sees_stays(engines: Any) -> None:
    trimming, _, watcher, judge = engines
    with trimming.context() as context:
        twin = Twin(context, judge)
        twin.run(random_tokens(V, 20))
        bits = page_bits(".....", 20, 3)
        bits[1, 9] = True
        watcher.batches.clear()
        assert twin.run([1, 2, 3], mask=Choice(Mask.from_bool(bits), rows=bits)).stats.pages_trimmed == 4
        assert watcher.numbers() == [{2, 5}]
        # A row that masks slots 5 to 9 inside pages does not trim them.
        assert (
            twin.context.forward().input([1]).attention_mask([[5, 4, 14]]).execute().result().stats.pages_trimmed == 0
        )


def test_pending_rows_count_as_rows(engines: Any) -> None:
    trimming, _, _, judge = engines
    with trimming.context() as context:
        twin = Twin(context, judge)
        twin.run(random_tokens(V, 20))
        twin.fill([4, 5])  # raw rows do not bind them: they see everything
        bits = page_bits(".....", 22)
        assert twin.run([1], mask=Choice(Mask.from_bool(bits), rows=bits)).stats.pages_trimmed == 0
        twin.fill([4, 5])  # a symbolic mask binds them
        assert twin.run([1], mask=Choice(Mask.window(2), sees=w.window(2))).stats.pages_trimmed == 5


def test_pages_that_are_written_stay(engines: Any) -> None:
    trimming, _, _, judge = engines
    with trimming.context() as context:
        twin = Twin(context, judge)
        twin.run(random_tokens(V, 18))
        bits = page_bits(".....", 18)
        bits[0, 16:18] = False  # the row sees nothing of the page it is written to but itself
        assert twin.run([1], mask=Choice(Mask.from_bool(bits), rows=bits)).stats.pages_trimmed == 4


def test_discarded_pages_are_counted_as_left_out_in_every_pass(engines: Any) -> None:
    for engine in engines[:2]:
        with engine.context() as context:
            twin = Twin(context, engines[3])
            twin.run(random_tokens(V, 20))
            twin.context.inner().discard_pages(1, 2)
            twin.world.gone |= {1, 2}
            assert twin.run([3]).stats.pages_trimmed == 2
            assert twin.run([3], mask=Choice(Mask.sink(1, 99), sees=w.sink(1, 99))).stats.pages_trimmed == 2
            out = twin.run([3], mask=Choice(Mask.window(4), sees=w.window(4)))
            assert out.stats.pages_trimmed == (4 if engine is engines[0] else 2)


def test_trim_goes_by_request(engines: Any) -> None:
    """Two passes of one step leave out pages of their own."""
    trimming, _, watcher, judge = engines
    twins = [Twin(trimming.context(), judge) for _ in range(3)]
    for i, twin in enumerate(twins):
        twin.run(random_tokens(V, 24, i))
    masks = [Mask.window(3), Mask.sink(2, 5), None]
    with trimming._lock:
        watcher.batches.clear()
        running = []
        for twin, mask in zip(twins, masks, strict=True):
            forward = twin.context.forward().input([9])
            if mask is not None:
                forward.attention_mask(mask)
            running.append((forward.probe(-1, hw.Logits()), forward.execute()))
    outs = [(execution.result(), handle) for handle, execution in running]
    assert {out.stats.batch_size for out, _ in outs} == {3}
    assert [out.stats.pages_trimmed for out, _ in outs] == [5, 4, 0]
    assert watcher.numbers() == [{5, 6}, {0, 5, 6}, set(range(7))]
    rules = [w.window(3), w.sink(2, 5), w.causal]
    for (out, handle), twin, sees in zip(outs, twins, rules, strict=True):
        assert_close(out.logits(handle), judge.logits(twin.plan([9], mask=Choice(None, sees=sees)).cells)[0])
        twin.context.release()


def test_trim_never_touches_what_the_token_before_the_rows_needs(engines: Any) -> None:
    """Reading -(n+1) computes that token again, under its own mask, while the rows leave pages out."""
    trimming, plain, _, judge = engines
    for engine in (trimming, plain):
        with engine.context() as context:
            twin = Twin(context, judge)
            twin.run(random_tokens(V, 23))
            twin.context.truncate(2)  # its final state is gone
            twin.world.truncate(2)
            twin.run([1, 2], mask=Choice(Mask.window(2), sees=w.window(2)))


def test_the_engine_adds_up_what_was_left_out(engines: Any) -> None:
    trimming, plain, _, _ = engines
    for engine, expected in ((trimming, 5), (plain, 0)):
        with engine.context() as context:
            context.forward().input(random_tokens(V, 24)).execute().result()
            before = engine.stats().pages_trimmed
            context.forward().input([1]).attention_mask(Mask.window(2)).execute().result()
            assert engine.stats().pages_trimmed - before == expected


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    slots=st.integers(0, 40),
    count=st.integers(1, 10),
    waiting=st.integers(0, 6),
    seed=st.integers(0, 1 << 16),
    density=st.floats(0, 1),
    gone=st.sets(st.integers(0, 8), max_size=4),
    causal=st.booleans(),
)
def test_trimmed_and_untrimmed_agree(
    engines: Any, *, slots: int, count: int, waiting: int, seed: int, density: float, gone: set[int], causal: bool
) -> None:
    trimming, plain, _, judge = engines
    rng = np.random.default_rng(seed)
    base = slots + waiting
    bits = np.repeat(rng.random((1, 20)) < density, PAGE, axis=1)[:, : base + count]
    bits = np.repeat(bits, count, axis=0) & (rng.random((count, 1)) < 0.8)
    bits[np.arange(count), base + np.arange(count)] = True
    gone = {p for p in gone if p < (slots - 1) // PAGE}
    for page in gone:
        bits[:, page * PAGE : (page + 1) * PAGE] = False
    choice = Choice(Mask.from_bool(bits), rows=bits, causal=causal)
    found = []
    for engine in (trimming, plain):
        with engine.context() as context:
            twin = Twin(context, judge)
            if slots:
                twin.run(random_tokens(V, slots, seed))
            for page in gone:
                context.inner().discard_pages(page, 1)
            twin.world.gone |= gone
            twin.fill(random_tokens(V, waiting, seed + 1))
            expected = twin.plan([3] * count, mask=choice).trimmed(twin.world)
            out = twin.run([3] * count, mask=choice)
            assert out.stats.pages_trimmed == (expected if engine is trimming else len(gone))
            forward = context.forward()
            handle = forward.probe(-1, hw.Logits())
            found.append(forward.execute().result().logits(handle))
    assert_close(found[0], found[1])


def test_trim_from_many_threads(engines: Any) -> None:
    """Programs with masks of their own, all at once."""
    trimming, _, _, judge = engines
    wrong: list[BaseException] = []

    def work(n: int) -> None:
        try:
            with trimming.context() as context:
                twin = Twin(context, judge)
                twin.run(random_tokens(V, 8 + n, n))
                for i in range(6):
                    out = twin.run([i], mask=Choice(Mask.window(n + 1), sees=w.window(n + 1)))
                    first = max(0, len(twin.world.cells) - 1 - n) // PAGE
                    assert out.stats.pages_trimmed == first
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
