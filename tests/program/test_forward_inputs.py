"""What goes into a pass: input, input_at, several calls, pending tokens first, handles, passes built by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import headway as hw
from headway.base.specs.brle import Brle
from headway.base.specs.samplers import resolve
from headway.runtime.passes import Pass, Readout
from support import world as w
from support.checks import assert_close, random_tokens
from support.world import Choice, Judge, Twin

MODELS = ("llama-gqa-tied", "mistral-window", "qwen2-layer-types", "qwen3-headdim24")
V = 97


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[hw.Engine, Judge]]:
    folder, judge = w.model(request.param)
    with hw.Engine(folder, threads=1, pages=64) as engine:
        yield engine, judge


@pytest.fixture
def twin(pair: tuple[hw.Engine, Judge]) -> Iterator[Twin]:
    engine, judge = pair
    with engine.context() as context:
        yield Twin(context, judge)


PLACES = {
    "gaps": [0, 5, 6, 40, 41, 300],
    "repeats": [3, 3, 3, 4, 4, 3],
    "reversed": [5, 4, 3, 2, 1, 0],
    "interleaved": [0, 100, 1, 101, 2, 102],
    "the last there is": [1018, 1019, 1020, 1021, 1022, 1023],
}


@pytest.mark.parametrize("name", PLACES)
def test_explicit_positions(twin: Twin, name: str) -> None:
    places = PLACES[name]
    twin.run(random_tokens(V, 6), at=places)
    assert list(twin.context._table.positions) == places
    if max(places) < 1023:
        twin.run([7])
        assert twin.context._table.positions[-1] == max(places) + 1
    else:
        with pytest.raises(hw.ContextLengthExceeded, match="position is 1024"):
            twin.context.forward().input([7]).execute()
    twin.run([8, 9], at=[2, 2])  # slots go on where positions cannot
    twin.check()


def test_calls_append_in_order_and_pending_tokens_come_first(twin: Twin) -> None:
    twin.fill([1, 2])
    forward = twin.context.forward().input([3]).input_at([4, 5], [50, 9]).input([6]).input([]).input_at([], [])
    handles = [forward.probe(i, hw.Logits()) for i in (0, 1, 2, 3, -1, -4, -5)]
    plan = twin.plan([3, 4, 5, 6], [None, 50, 9, None])
    out = forward.execute().result()
    assert [c.position for c in plan.cells] == [0, 1, 2, 50, 9, 51]
    assert list(twin.context._table.positions) == [0, 1, 2, 50, 9, 51]
    assert list(twin.context._table.tokens) == [1, 2, 3, 4, 5, 6]
    cells = [plan.cells[i] for i in (2, 3, 4, 5, 5, 2, 1)]
    assert_close(np.stack([out.logits(h) for h in handles]), twin.judge.logits(cells))
    assert out.stats.rows == 4


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33])
def test_one_pass_many_passes_and_a_flush_are_the_same(pair: tuple[hw.Engine, Judge], n: int) -> None:
    engine, judge = pair
    tokens = random_tokens(V, n + 1)
    found = []
    for way in ("whole", "one by one", "flush", "pending"):
        with engine.context() as context:
            if way == "one by one":
                for token in tokens[:-1]:
                    context.forward().input([token]).execute().result()
            elif way != "whole":
                context.fill(tokens[:-1])
            if way == "flush":
                asyncio.run(context.flush())
                assert (context.seq_len, context.pending) == (n, ())
            forward = context.forward().input(tokens if way == "whole" else tokens[-1:])
            handle = forward.probe(-1, hw.Logits())
            found.append(forward.execute().result().logits(handle))
            assert (context.seq_len, context.pending) == (n + 1, ())
    world = w.World(16, judge.oracle.shape.windows)
    expected = judge.logits(world.plan(tokens, [None] * (n + 1), None).cells[-1:])[0]
    for logits in found:
        assert_close(logits, expected)


def test_reading_the_last_token_needs_no_input(twin: Twin) -> None:
    twin.fill(random_tokens(V, 20))
    asyncio.run(twin.context.flush())
    twin.world.advance(twin.plan())
    for _ in range(2):
        forward = twin.context.forward()
        handle, kept = forward.probe(-1, hw.Logits()), forward.sample([-1], hw.Argmax())
        out = forward.execute().result()
        expected = twin.judge.logits(twin.world.cells[-1:])[0]
        assert_close(out.logits(handle), expected)
        assert out.token(kept) == int(out.logits(handle).argmax())
        assert (out.stats.rows, twin.context.seq_len) == (0, 20)
        twin.context.truncate(1)  # and when its final state is not kept it is computed again
        twin.world.truncate(1)
        twin.run([])
        twin.run([4])


def test_reading_again_uses_the_mask_the_token_had(twin: Twin) -> None:
    mask = Choice(hw.Mask.sink(1, 3), sees=w.sink(1, 3))
    twin.run(random_tokens(V, 12), mask=mask)
    twin.context.truncate(2)
    twin.world.truncate(2)
    twin.run([])
    forward = twin.context.forward().input([1, 2])
    scores, logits = forward.probe(-3, hw.AttentionScores(0)), forward.probe(-3, hw.Logits())
    out = forward.execute().result()
    order, result = twin.judge.run(twin.world.cells[-1:])
    last = twin.world.cells[-1]
    assert_close(out.logits(logits), result.logits[order[last]].numpy())
    expected = np.zeros_like(out.attention(scores))
    for slot, cell in enumerate(twin.world.cells):
        if cell in order:
            expected[:, slot] = result.attention[0][:, order[last], order[cell]].numpy()
    assert_close(out.attention(scores), expected)
    assert (expected != 0).sum(1).max() <= 4


FORMS = {
    "list": lambda ids: ids,
    "tuple": tuple,
    "range-like generator": lambda ids: (i for i in ids),
    "numpy int64": np.array,
    "numpy uint8": lambda ids: np.array(ids, dtype=np.uint8),
    "numpy scalars": lambda ids: [np.int32(i) for i in ids],
    "torch": torch.tensor,
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "torch scalars": lambda ids: list(torch.tensor(ids)),
    "a strided view": lambda ids: np.repeat(np.array(ids), 2)[::2],
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_positions_in_any_form_of_whole_numbers(pair: tuple[hw.Engine, Judge], form: str) -> None:
    engine, judge = pair
    make = FORMS[form]
    with engine.context() as context:
        twin = Twin(context, judge)
        context.fill(make([1, 2]))
        twin.world.pending += [1, 2]
        forward = context.forward().input(make([3])).input_at(make([4, 5]), make([9, 7]))
        handle = forward.sample(make([0, 2]), hw.Argmax(), history=make([1]), generated=make([]))
        logits = forward.probe(make([1])[0] if hasattr(make([1]), "__getitem__") else 1, hw.Logits())
        plan = twin.plan([3, 4, 5], [None, 9, 7])
        out = forward.execute().result()
        assert_close(out.logits(logits), judge.logits([plan.cells[3]])[0])
        assert len(out.tokens(handle)) == 2
        assert context.tokens == (1, 2, 3, 4, 5)
        assert all(type(t) is int for t in context.tokens)


def test_empty_lists_have_their_obvious_meaning(twin: Twin) -> None:
    twin.context.fill([]).fill(iter(())).fill(np.array([]))
    assert twin.context.pending == ()
    with pytest.raises(hw.InvalidInput, match="no input and reads nothing"):
        twin.context.forward().input([]).execute()
    asyncio.run(twin.context.flush())
    forward = twin.context.forward()
    with pytest.raises(hw.InvalidInput, match="no rows"):
        forward.sample([], hw.Argmax())
    twin.check()


# -- tokens nobody has read yet ------------------------------------------------------------------------------------


def test_a_handle_feeds_the_token_that_was_sampled(twin: Twin) -> None:
    """A chain of passes, submitted before the first has run, gives what reading each token would."""
    prompt = random_tokens(V, 9)
    with twin.context.fork() as slow:
        slow.fill(prompt)
        expected = []
        for _ in range(6):
            forward = slow.forward()
            handle = forward.sample([-1], hw.Multinomial(temperature=0.8, seed=5))
            expected.append(forward.execute().result().token(handle))
            slow.fill(expected[-1:])
    first = twin.context.forward().input(prompt)
    handles = [first.sample([-1], hw.Multinomial(temperature=0.8, seed=5))]
    running = [first.execute()]
    for _ in range(5):
        forward = twin.context.forward().input(handles[-1])
        handles.append(forward.sample([-1], hw.Multinomial(temperature=0.8, seed=5)))
        running.append(forward.execute())
    found = [execution.result().token(handle) for execution, handle in zip(running, handles, strict=True)]
    assert found == expected
    assert list(twin.context.tokens) == prompt + expected[:-1]


def test_handles_of_many_rows_and_rows_around_them(twin: Twin) -> None:
    first = twin.context.forward().input([1, 2, 3])
    many = first.sample([0, 1, 2], hw.Argmax())
    running = first.execute()
    second = twin.context.forward().input([10]).input(many).input_at([11], [60]).input(many)
    logits = [second.probe(i, hw.Logits()) for i in range(8)]
    out = second.execute().result()
    tokens = running.result().tokens(many)
    twin.world.advance(twin.plan([1, 2, 3]))
    rows = [10, *tokens, 11, *tokens]
    plan = twin.plan(rows, [None] * 4 + [60] + [None] * 3)
    assert_close(np.stack([out.logits(h) for h in logits]), twin.judge.logits(plan.cells))
    twin.world.advance(plan)
    twin.check()
    assert list(twin.context.tokens) == [1, 2, 3, *rows]


def test_a_handle_can_be_fed_after_it_was_read_and_after_others(twin: Twin) -> None:
    forward = twin.context.forward().input([1, 2])
    handle = forward.sample([-1], hw.Argmax())
    token = forward.execute().result().token(handle)
    twin.context.forward().input([3]).execute().result()
    twin.context.forward().input(handle).execute().result()
    assert list(twin.context.tokens) == [1, 2, 3, token]


@pytest.mark.parametrize("length", [2, 3, 5])
def test_penalties_count_the_tokens_that_were_fed(twin: Twin, length: int) -> None:
    """The history of a pass that runs ahead is the same as if every token had been read."""
    sampler = hw.Sampling(temperature=0, repetition_penalty=3.0, frequency_penalty=4.0, presence_penalty=2.0)
    prompt = [5, 5, 0, 9]
    for generated in (None, [7, 7, 8]):
        with twin.context.fork() as slow, twin.context.fork() as fast:
            slow.fill(prompt)
            expected = []
            for _ in range(length):
                forward = slow.forward()
                handle = forward.sample([-1], sampler, generated=generated)
                expected.append(forward.execute().result().token(handle))
                slow.fill(expected[-1:])
            forward = fast.forward().input(prompt)
            handles = [forward.sample([-1], sampler, generated=generated)]
            running = [forward.execute()]
            while len(running) < length:
                forward = fast.forward().input(handles[-1])
                handles.append(forward.sample([-1], sampler, generated=generated))
                running.append(forward.execute())
            assert [e.result().token(h) for e, h in zip(running, handles, strict=True)] == expected


def test_masks_and_positions_of_a_pass_that_runs_ahead_of_two(twin: Twin) -> None:
    """Windows and next positions know every pass in flight, not just the last."""
    forward = twin.context.forward().input_at(random_tokens(V, 6), [0, 1, 2, 70, 71, 72])
    handle = forward.sample([-1], hw.Argmax())
    running = [(forward, handle, forward.execute())]
    for _ in range(3):
        forward = twin.context.forward().input(running[-1][1]).attention_mask(hw.Mask.window(2))
        running.append((forward, forward.sample([-1], hw.Argmax()), forward.execute()))
    tokens = [execution.result().token(handle) for _, handle, execution in running]
    twin.world.advance(twin.plan(random_tokens(V, 6), [0, 1, 2, 70, 71, 72]))
    for token in tokens[:-1]:
        twin.world.advance(twin.plan([token], mask=Choice(None, sees=w.window(2))))
    twin.check()
    assert list(twin.context._table.positions) == [c.position for c in twin.world.cells]
    twin.run([tokens[-1]])


# -- passes built by hand ------------------------------------------------------------------------------------------


def test_a_pass_built_by_hand_is_the_same_as_a_forward(twin: Twin) -> None:
    twin.fill([1, 2])
    bits = np.array([True, False, True, True])
    masks = (None, None, None, Brle.from_bool(bits))
    work = Pass(
        tokens=(1, 2, 3, 4),
        positions=(0, 1, 2, 9),
        masks=masks,
        readouts=(Readout(3, hw.Logits()), Readout(1, hw.Logits()), Readout(3, resolve(hw.Argmax()))),
        pending=2,
        commit=False,
    )
    rows = np.array([[True, True, True, False], bits])
    plan = twin.plan([3, 4], [None, 9], Choice(None, rows=rows))
    result = twin.context.execute(work).result()
    logits = np.stack([result.values[0], result.values[1]])  # type: ignore[list-item]
    assert_close(logits, twin.judge.logits([plan.cells[3], plan.cells[1]]))
    assert result.values[2] == int(logits[0].argmax())
    twin.world.advance(plan, commit=False)
    twin.check()
    twin.run([5])
