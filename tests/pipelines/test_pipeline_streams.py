"""Streams: lazily, in order, in constant memory; and nothing depends on batch mates."""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headway as hw
from headway.pipelines.row_queue import MAX_PADDING, BatchLimits, RowQueue, WaitingRow
from headway.pipelines.task import Row
from headway.pipelines.tasks.embedding import SentenceEmbedding
from support import encoders
from support.properties import examples


@pytest.fixture(scope="module")
def embed() -> Iterator[hw.Pipeline]:
    model = encoders.model("bert", "base")
    with hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
        yield p


@pytest.fixture(scope="module", params=["bert", "deberta"])
def either(request: pytest.FixtureRequest) -> Iterator[hw.Pipeline]:
    """One that unpads rows and one that pads them."""
    model = encoders.model(request.param, "base")
    with hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer(request.param), device="cpu") as p:
        yield p


def test_an_item_does_not_depend_on_its_batch_mates(either: hw.Pipeline) -> None:
    texts = encoders.texts(60, seed=1)
    alone = np.stack([either(text) for text in texts])
    for seed in range(3):
        order = random.Random(seed).sample(range(60), 60)
        together = either([texts[i] for i in order])
        for i, vector in zip(order, together):
            np.testing.assert_allclose(vector, alone[i], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_a_batch_size_is_a_number_of_rows_and_changes_nothing(batch_size: int) -> None:
    model, texts = encoders.model("bert", "base"), encoders.texts(50)
    words = encoders.tokenizer("bert")
    with hw.pipeline("sentence-embedding", model, tokenizer=words, device="cpu") as p:
        want = np.stack(p(texts))
    with hw.pipeline("sentence-embedding", model, tokenizer=words, device="cpu", batch_size=batch_size) as p:
        np.testing.assert_allclose(np.stack(p(texts)), want, rtol=1e-4, atol=2e-6)
        assert p.stats()["batches"] >= 50 / batch_size


def test_results_come_in_order_from_any_iterable(embed: hw.Pipeline) -> None:
    texts = encoders.texts(700, seed=2)
    want = embed(texts)
    lazy = embed(text for text in texts)
    assert not isinstance(lazy, list)
    for mine, other in zip(lazy, want, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-6)

    class Indexed:
        def __getitem__(self, i: int) -> str:
            return texts[i]  # IndexError ends it

    assert len(list(embed(Indexed()))) == 700
    assert embed(()) == []
    assert list(embed(iter([]))) == []


def test_a_source_is_read_a_bounded_way_ahead(embed: hw.Pipeline) -> None:
    read = 0

    def source() -> Iterator[str]:
        nonlocal read
        for text in encoders.texts(20_000):
            read += 1
            yield text

    ahead = 0
    for i, _ in enumerate(embed(source())):
        ahead = max(ahead, read - i)
        if i == 3000:
            break
    assert ahead <= embed.implementation.lookahead + 1
    assert read <= 3000 + embed.implementation.lookahead + 1


@pytest.mark.parametrize("ahead", [1, 2, 8, 31, 32, 33])
def test_a_stream_is_whole_however_few_items_may_be_ahead(ahead: int) -> None:
    class Narrow(SentenceEmbedding):
        lookahead = ahead

    hw.register_task("narrow-embedding", Narrow, replace=True)
    read = 0

    def source() -> Iterator[str]:
        nonlocal read
        for text in encoders.texts(100):
            read += 1
            yield text

    model = encoders.model("bert", "base")
    with hw.pipeline("narrow-embedding", model, tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
        for i, _ in enumerate(p(source())):
            assert read - i <= ahead + 1
        assert read == i + 1 == 100
        assert len(p(encoders.texts(100))) == 100


def test_a_slow_source_gets_each_result_before_its_next_item(embed: hw.Pipeline) -> None:
    seen: list[Any] = []

    def source() -> Iterator[str]:
        for i in range(4):
            time.sleep(0.02)
            assert len(seen) == i  # every earlier result was delivered before this item was asked for
            yield "the film"

    for result in embed(source()):
        seen.append(result)
    assert len(seen) == 4


def test_the_first_results_do_not_wait_for_a_source_that_stops_to_think(embed: hw.Pipeline) -> None:
    seen: list[Any] = []

    def source() -> Iterator[str]:
        yield from encoders.texts(7)
        assert len(seen) == 7  # and now it may take its time
        yield from encoders.texts(90)

    for result in embed(source()):
        seen.append(result)
    assert len(seen) == 97


def test_the_source_is_read_on_the_callers_thread(embed: hw.Pipeline) -> None:
    threads = set()

    def source() -> Iterator[str]:
        for text in encoders.texts(300):
            threads.add(threading.get_ident())
            yield text

    list(embed(source()))
    assert threads == {threading.get_ident()}


def test_an_iterator_that_raises_delivers_what_came_before(embed: hw.Pipeline) -> None:
    def source() -> Iterator[str]:
        yield from encoders.texts(150)
        raise OSError("the disk is gone")

    got: list[Any] = []
    with pytest.raises(hw.ItemFailed, match=r"item 150 could not be read: OSError: the disk is gone") as caught:
        got.extend(embed(source()))
    assert len(got) == 150
    assert caught.value.index == 150
    assert isinstance(caught.value.__cause__, OSError)


def test_a_bad_item_in_a_stream_is_named_and_ends_it_or_takes_its_place(embed: hw.Pipeline) -> None:
    items = ["the film", "great", None, "dull"]
    got: list[Any] = []
    with pytest.raises(hw.WrongType, match=r"item 2: expected a string, got None") as caught:
        got.extend(embed(iter(items)))
    assert len(got) == 2
    assert caught.value.index == 2  # type: ignore[attr-defined]
    kept = embed(items, on_error="return")
    assert isinstance(kept[2], hw.WrongType)
    np.testing.assert_allclose(kept[3], embed("dull"), rtol=1e-4, atol=2e-6)


def test_a_stream_may_be_left_and_the_pipeline_goes_on(embed: hw.Pipeline) -> None:
    stream = embed(text for text in encoders.texts(5000))
    next(stream)
    stream.close()
    assert embed("the film").shape == (32,)


def test_memory_does_not_grow_with_the_stream(embed: hw.Pipeline) -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        for _ in embed(f"w{i % 97} film" for i in range(count)):
            pass
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(3000)
    short, long = peak(3000), peak(12_000)
    assert long < 2 * short  # four times, if anything were kept


def test_a_forgotten_pipeline_ends_its_threads_and_frees_its_model() -> None:
    model = encoders.model("bert", "base")
    p = hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer("bert"), device="cpu")
    p(encoders.texts(5))
    gone = weakref.ref(p.implementation)
    batcher = p._batcher._thread
    assert batcher is not None
    del p
    gc.collect()
    batcher.join(60)
    assert not batcher.is_alive()
    gc.collect()
    assert gone() is None


def test_a_closed_pipeline_says_so() -> None:
    p = hw.pipeline(
        "sentence-embedding", encoders.model("bert", "base"), tokenizer=encoders.tokenizer("bert"), device="cpu"
    )
    p.close()
    p.close()
    with pytest.raises(hw.Closed, match="closed"):
        p("the film")


class TestPlanning:
    """The choice of rows: pure, so any mix of lengths can be tried."""

    @given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 200), st.integers(1, 9), st.booleans())
    @settings(max_examples=examples(150), deadline=None)
    def test_every_row_is_taken_once_within_the_limits(
        self, lengths: list[int], tokens: int, rows: int, padded: bool
    ) -> None:
        waiting, limits = RowQueue(), BatchLimits(tokens, rows, padded)
        half = len(lengths) // 2
        slots = [WaitingRow(Row({}, n), None, 0, i) for i, n in enumerate(lengths)]
        waiting.add(slots[:half])
        taken: list[WaitingRow] = []
        added = False
        while len(waiting) or not added:
            if not added:
                waiting.add(slots[half:])
                added = True
            oldest = min(s.serial for s in slots if s not in taken)
            batch = waiting.take(limits)
            assert oldest in [s.serial for s in batch]  # nothing starves
            assert 1 <= len(batch) <= rows
            longest, total = max(s.length for s in batch), sum(s.length for s in batch)
            if len(batch) > 1:
                cost = longest * len(batch) if padded else total
                assert cost <= tokens
                assert not padded or cost - total <= MAX_PADDING * cost
            taken += batch
        assert sorted(s.serial for s in taken) == list(range(len(lengths)))

    def test_one_long_row_does_not_pad_short_ones(self) -> None:
        waiting = RowQueue()
        waiting.add([WaitingRow(Row({}, n), None, 0, i) for i, n in enumerate([400, *[20] * 63])])
        assert [s.length for s in waiting.take(BatchLimits(10_000, 64))] == [400]
        assert [s.length for s in waiting.take(BatchLimits(10_000, 64))] == [20] * 63


@pytest.mark.slow
def test_a_million_items_in_constant_memory() -> None:
    """Through a two-layer model; the resident size after the first fifth is that at the end."""
    model = encoders.model("bert", "classify", num_labels=2)
    count = 1_000_000

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    with hw.pipeline("text-classification", model, tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
        settled = done = 0
        for result in p(("the film", "a bank in paris", "great")[i % 3] for i in range(count)):
            done += 1
            assert result["label"] in ("LABEL_0", "LABEL_1")
            if done == count // 5:
                settled = resident()
        assert done == count
        assert resident() < settled + 50_000_000
