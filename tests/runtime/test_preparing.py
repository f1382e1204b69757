"""Passes that come while the device computes are prepared then: pages taken, rows laid out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import headway as hw
from headway.runtime.batch import Batch
from headway.runtime.job import Job
from support.scripted import Hand, by_hand, check_pages, continued, faulty_engine, greedy, numbers, plain


class Meanwhile:
    """Does once, in the middle of the next step, what it was given; keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.what: Callable[[], None] | None = None

    def __call__(self, batch: Batch) -> None:
        self.batches.append(batch)
        what, self.what = self.what, None
        if what is not None:
            what()


def job_of(context: hw.Context) -> Job:
    job = context.engine._loop.last_job(context._table)
    assert job is not None
    return job


def laid_out(context: hw.Context) -> bool:
    job = job_of(context)
    return job.chunk is not None and not job.running


def test_a_pass_that_comes_during_a_step_has_its_pages_before_the_step_ends() -> None:
    device, seen = Meanwhile(), []
    with faulty_engine(device, pages=64, max_batch_tokens=64) as engine, by_hand(engine) as hand:
        first, second = engine.context(), engine.context()
        running, _ = greedy(first, numbers(5, 1))

        def come() -> None:
            execution, handle = greedy(second, numbers(20, 2))
            job = job_of(second)
            seen.append((execution, handle, job.started, len(job.pages), job.chunk))

        device.what = come
        hand.until(running)
        ((execution, handle, started, pages, chunk),) = seen
        assert started
        assert pages == 2
        assert chunk is not None
        hand.until(execution)
        assert execution.result(0).token(handle) == plain(numbers(20, 2))
        check_pages(engine)


def chained(
    engine: hw.Engine, hand: Hand, device: Meanwhile, prompt: list[int], sees: Callable[[hw.Context], None]
) -> int:
    """The second token after a prompt, from a pass that comes while the first is computed."""
    context, found = engine.context(), []
    running, first = greedy(context, prompt)

    def come() -> None:
        forward = context.forward().input(first)
        handle = forward.sample([-1], hw.Argmax())
        found.append((forward.execute(), handle))
        sees(context)

    device.what = come
    hand.until(running)
    ((execution, handle),) = found
    hand.until(execution)
    check_pages(engine)
    return execution.result(0).token(handle)


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 31, 32, 33])
def test_a_pass_over_a_token_to_come_is_laid_out_before_the_token_is_there(length: int) -> None:
    """At the edges of pages too, where it needs a page that its context does not have yet."""
    device, was = Meanwhile(), []
    with faulty_engine(device, pages=64, max_batch_tokens=64) as engine, by_hand(engine) as hand:
        prompt = numbers(length, 3)
        token = chained(engine, hand, device, prompt, lambda context: was.append(laid_out(context)))
        assert was == [True]
        assert token == continued(prompt, 2)[1]


def test_a_pass_is_laid_out_after_one_that_only_reads() -> None:
    """As when a generation begins on a context that has nothing pending."""
    device, found = Meanwhile(), []
    with faulty_engine(device, pages=64, max_batch_tokens=64) as engine, by_hand(engine) as hand:
        prompt, context = numbers(16, 8), engine.context()
        hand.compute(context, prompt)
        forward = context.forward()
        first = forward.sample([-1], hw.Argmax())
        running = forward.execute()

        def come() -> None:
            forward = context.forward().input(first)
            handle = forward.sample([-1], hw.Argmax())
            found.append((forward.execute(), handle, laid_out(context)))

        device.what = come
        hand.until(running)
        ((execution, handle, was),) = found
        assert was
        hand.until(execution)
        assert execution.result(0).token(handle) == continued(prompt, 2)[1]
        check_pages(engine)


def test_a_chunk_laid_out_ahead_is_the_one_that_would_be_laid_out_at_its_turn() -> None:
    """Arrays of the batch that a pass runs in, prepared during the step before or, where pages are short, after it."""
    found = []
    for pages in (64, 3):
        device, was = Meanwhile(), []
        with faulty_engine(device, pages=pages, max_batch_tokens=64) as engine, by_hand(engine) as hand:
            chained(engine, hand, device, numbers(32, 4), lambda context: was.append(laid_out(context)))  # noqa: B023
            assert was == [pages == 64]
        batch = device.batches[-1]
        (segment,) = batch.segments
        rows = [(index, row) for index, row, _ in segment.readouts]
        arrays = (batch.tokens, batch.positions, batch.write_rows, segment.slots, segment.numbers)
        found.append(([a.tolist() for a in arrays], segment.rows, segment.masks, rows, segment.before_position))
        assert batch.write_slots.tolist() == [int(segment.pages[-1]) * 16]
        assert len(np.unique(segment.pages)) == 3
    assert found[0] == found[1]


@pytest.mark.parametrize("which", ["first", "second"])
def test_pages_that_were_taken_ahead_come_back_when_the_pass_is_cancelled(which: str) -> None:
    device, cancelled = Meanwhile(), []
    with faulty_engine(device, pages=64, max_batch_tokens=64) as engine, by_hand(engine) as hand:
        prompt = numbers(16, 5)
        context = engine.context()
        running, first = greedy(context, prompt)

        def come() -> None:
            forward = context.forward().input(first)
            forward.sample([-1], hw.Argmax())
            later = forward.execute()
            assert job_of(context).pages
            (running if which == "first" else later).cancel()
            cancelled.append(later)

        device.what = come
        hand.until(running)
        assert cancelled[0].done()
        hand.step()
        assert context.seq_len == (0 if which == "first" else 16)
        check_pages(engine)
        assert context.engine.stats().pages_held == (0 if which == "first" else 1)
        execution, handle = greedy(context, [7])  # what is left of it is right
        hand.until(execution)
        assert execution.result(0).token(handle) == plain([7] if which == "first" else [*prompt, 7])


def test_nothing_is_taken_ahead_where_pages_are_short() -> None:
    device, was = Meanwhile(), []
    with faulty_engine(device, pages=8, max_batch_tokens=256) as engine, by_hand(engine) as hand:
        first, modest, dear = engine.context(), engine.context(priority=-1), engine.context(priority=5)
        running, _ = greedy(first, numbers(70, 1))

        def come() -> None:
            was.extend([greedy(modest, numbers(20, 2))[0], greedy(dear, numbers(40, 3))[0]])
            assert not job_of(modest).started

        device.what = come
        hand.until(running)
        hand.step()
        assert was[1].done()  # it was the second to ask and claims more
        assert not was[0].done()
        first.release()
        hand.until(*was)
        check_pages(engine)
