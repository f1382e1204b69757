"""Attention masks in a pass: every form, for prompts and decodes alike, equals the oracle under the same matrix."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway import Mask
from support import world as w
from support.checks import assert_close, random_tokens
from support.world import Choice, Judge, Twin

MODELS = ("llama-gqa-tied", "mistral-window", "qwen2-layer-types", "qwen3-headdim24")
V = 97


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[hw.Engine, Judge]]:
    folder, judge = w.model(request.param)
    with hw.Engine(folder, threads=1, pages=64, page_size=8) as engine:
        yield engine, judge


@pytest.fixture
def twin(pair: tuple[hw.Engine, Judge]) -> Iterator[Twin]:
    engine, judge = pair
    with engine.context() as context:
        yield Twin(context, judge)


def every_third(slot: int, slots: int) -> np.ndarray:
    return (slot - np.arange(slots)) % 3 == 0


BLOCKS = ([5, 11, 3, 7], [(1, 0), (3, 1), (2, 3)])
SYMBOLIC: dict[str, tuple[Mask, w.Sees]] = {
    "causal": (Mask.causal(), w.causal),
    "window": (Mask.window(4), w.window(4)),
    "window of one": (Mask.window(1), w.window(1)),
    "sink": (Mask.sink(3, 5), w.sink(3, 5)),
    "sink of nothing": (Mask.sink(0, 2), w.sink(0, 2)),
    "blocks": (Mask.blocks(*BLOCKS), w.blocks(*BLOCKS)),
    "and": (Mask.blocks(*BLOCKS) & Mask.window(6), w.both(w.blocks(*BLOCKS), w.window(6))),
    "or": (Mask.blocks(*BLOCKS) | Mask.sink(2, 1), w.either(w.blocks(*BLOCKS), w.sink(2, 1))),
    "rule": (Mask.rule(lambda row, slots: (row - slots) % 3 == 0), every_third),
    "not a rule": (
        ~Mask.rule(lambda row, slots: row - slots > 4) & Mask.causal(),
        w.both(w.neither(lambda slot, slots: slot - np.arange(slots) > 4), w.causal),
    ),
    "not": (~Mask.window(3) | Mask.window(1), w.either(w.neither(w.window(3)), w.window(1))),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_masks_for_prompt_and_decode_rows(twin: Twin, name: str, causal: bool) -> None:
    mask, sees = SYMBOLIC[name]
    choice = Choice(mask, sees=sees, causal=causal)
    twin.run(random_tokens(V, 21, 1), mask=choice)  # a prompt
    twin.run(random_tokens(V, 1, 2), mask=choice)  # a decode
    twin.run(random_tokens(V, 10, 3), mask=choice)  # a prompt after others
    twin.run(random_tokens(V, 3, 4))  # rows without a mask read what was written under one


def raw(rng: np.random.Generator, base: int, count: int, density: float) -> np.ndarray:
    bits = rng.random((count, base + count)) < density
    bits[np.arange(count), base + np.arange(count)] = True
    return bits


def runs(attend: np.ndarray) -> list[int]:
    """Raw runs: zeros first, 0 = attend, 1 = masked."""
    return w.runs_of(~attend)


@pytest.mark.parametrize("own", ["itself left out", "itself given"])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_raw_runs_say_zero_for_attend_and_may_leave_the_token_itself_out(twin: Twin, density: float, own: str) -> None:
    rng = np.random.default_rng(int(density * 10))
    twin.run(random_tokens(V, 13))
    for count in (1, 9, 1, 16):
        base = len(twin.world.cells)
        bits = raw(rng, base, count, density)
        given = [runs(line[: base + i + (own == "itself given")]) for i, line in enumerate(bits)]
        twin.run(random_tokens(V, count, count), mask=Choice(given, rows=bits))


@pytest.mark.parametrize("form", ["runs", "from_runs", "from_bool", "brle"])
@pytest.mark.parametrize("causal", [True, False])
def test_every_raw_form_means_the_same(twin: Twin, form: str, causal: bool) -> None:
    twin.run(random_tokens(V, 10))
    rng, base, count = np.random.default_rng(3), 10, 12
    bits = raw(rng, base, count, 0.4)
    bits[2, base + 2] = False  # a row that does not see itself
    lines = [line if not causal else line[: base + i + 1] for i, line in enumerate(bits)]
    given: Any = [runs(line) for line in lines]
    if form == "from_runs":
        given = Mask.from_runs(np.array(r) for r in given)
    elif form == "from_bool":
        given = Mask.from_bool(bits if not causal else [line.tolist() for line in lines])
    elif form == "brle":
        given = [hw.Brle.from_bool(~line) for line in lines]
    twin.run(random_tokens(V, count, 1), mask=Choice(given, rows=bits, causal=causal))
    twin.run(random_tokens(V, 2, 2))


def test_a_rectangle_of_booleans_covers_every_slot_of_the_pass(twin: Twin) -> None:
    twin.run(random_tokens(V, 6))
    bits = raw(np.random.default_rng(5), 6, 7, 0.5)
    twin.run(random_tokens(V, 7, 1), mask=Choice(Mask.from_bool(bits), rows=bits))


def test_rows_of_a_pass_that_is_not_causal_see_later_rows(twin: Twin) -> None:
    twin.run(random_tokens(V, 5))
    bits = np.ones((6, 11), dtype=bool)
    twin.run(random_tokens(V, 6, 1), mask=Choice(Mask.from_bool(bits), rows=bits, causal=False))
    plan = twin.plan([1])
    assert twin.world.cells[5] in twin.world.cells[5].attends
    assert twin.world.cells[10] in twin.world.cells[5].attends
    assert not plan.refused
    twin.run([1])


def test_a_symbolic_mask_binds_pending_rows_and_raw_rows_do_not(twin: Twin) -> None:
    twin.run(random_tokens(V, 7))
    twin.fill(random_tokens(V, 9, 1))
    twin.run(random_tokens(V, 4, 2), mask=Choice(Mask.window(2), sees=w.window(2)))
    assert len(twin.world.cells[10].attends) == 2
    twin.fill(random_tokens(V, 5, 3))
    base = len(twin.world.cells) + 5
    bits = raw(np.random.default_rng(0), base, 2, 0.2)
    given = [runs(bits[0, :base]), runs(bits[1, : base + 1])]
    twin.run(random_tokens(V, 2, 4), mask=Choice(given, rows=bits))
    assert len(twin.world.cells[base - 1].attends) == base


def test_pending_rows_stay_causal_in_a_pass_that_is_not(twin: Twin) -> None:
    twin.fill(random_tokens(V, 6))
    twin.run(
        random_tokens(V, 5, 1),
        mask=Choice(~Mask.window(1) | Mask.window(1), sees=w.neither(lambda s, n: np.zeros(n, bool)), causal=False),
    )
    assert len(twin.world.cells[3].attends) == 4
    assert len(twin.world.cells[6].attends) == 11


@pytest.mark.parametrize("given", ["raw", "symbolic"])
def test_a_flush_binds_pending_tokens_with_either_kind(twin: Twin, given: str) -> None:
    twin.run(random_tokens(V, 4))
    twin.fill(random_tokens(V, 11, 1))
    bits = raw(np.random.default_rng(2), 4, 11, 0.3)
    choice = Choice(Mask.sink(1, 3), sees=w.sink(1, 3))
    if given == "raw":
        choice = Choice([runs(line[: 4 + i + 1]) for i, line in enumerate(bits)], rows=bits)
    world = twin.world
    tokens, world.pending = world.pending, []
    plan = world.plan(tokens, [None] * 11, choice)
    asyncio.run(twin.context.flush(choice.given))  # type: ignore[arg-type]
    world.advance(plan)
    twin.check()
    twin.run([5])


def test_an_explicit_causal_mask_equals_none(pair: tuple[hw.Engine, Judge]) -> None:
    engine, _ = pair
    tokens = random_tokens(V, 30)
    bits = np.tril(np.ones((30, 30), dtype=bool))
    found = []
    for mask in (
        None,
        Mask.causal(),
        Mask.from_bool(bits),
        [[i + 1] for i in range(30)],
        [[i] for i in range(30)],
        Mask.window(30),
    ):
        with engine.context() as context:
            forward = context.forward().input(tokens)
            if mask is not None:
                forward.attention_mask(mask)
            handle = forward.probe(-1, hw.Logits())
            out = forward.execute().result()
            found.append(out.logits(handle))
            assert out.stats.pages_trimmed == 0
            assert context._table.masks == [None] * 30
    for logits in found[1:]:
        assert_close(logits, found[0])


def test_a_windowed_model_counts_its_window_by_position_and_masks_by_slot() -> None:
    folder, judge = w.model("mistral-window")
    with hw.Engine(folder, threads=1, pages=32) as engine, engine.context() as context:
        twin = Twin(context, judge)
        twin.run(random_tokens(V, 8), at=[0, 1, 2, 30, 31, 3, 4, 5])
        twin.run(random_tokens(V, 3, 1), at=[6, 32, 7], mask=Choice(Mask.window(6), sees=w.window(6)))
        with pytest.raises(hw.InvalidMask, match=r"own window of 5 positions"):
            context.forward().input_at([1], [200]).attention_mask([[11, 1]]).execute()
        twin.check()
        twin.run([3])


def test_masks_over_live_slots_after_a_discard(twin: Twin) -> None:
    twin.run(random_tokens(V, 36))
    twin.context.inner().discard_pages(1, 2)
    twin.world.gone |= {1, 2}
    twin.run(random_tokens(V, 2, 1))
    for mask, sees in SYMBOLIC.values():
        choice = Choice(mask, sees=sees)
        if not twin.plan([7], mask=choice).refused:
            twin.run([7], mask=choice)
    slots = len(twin.world.cells)
    with pytest.raises(hw.InvalidMask, match="discarded"):
        twin.context.forward().input([1]).attention_mask([[slots]]).execute()
    twin.check()
    bits = np.ones((1, slots + 1), dtype=bool)
    bits[0, 8:24] = False
    twin.run([1], mask=Choice([runs(bits[0])], rows=bits))
    with pytest.raises(hw.InvalidMask):  # a window that holds discarded slots only
        twin.context.forward().input([1]).attention_mask(
            Mask.blocks([8, 16], sees=[(0, 1)]) & ~Mask.sink(8, 10000)
        ).execute()
    twin.check()


def test_a_row_is_judged_under_the_mask_it_was_computed_with_even_after_a_cut(twin: Twin) -> None:
    bits = np.ones((6, 6), dtype=bool)
    twin.run(random_tokens(V, 6), mask=Choice(Mask.from_bool(bits), rows=bits, causal=False))
    twin.context.truncate(2)
    twin.world.truncate(2)
    twin.check()
    twin.run(random_tokens(V, 3, 1))  # reads slots that had seen the two that are gone


def test_the_last_token_of_a_cut_pass_that_was_not_causal_cannot_be_read_again(twin: Twin) -> None:
    bits = np.ones((6, 6), dtype=bool)
    twin.run(random_tokens(V, 6), mask=Choice(Mask.from_bool(bits), rows=bits, causal=False))
    twin.context.truncate(2)
    twin.world.truncate(2)
    for tokens in ([], [3]):
        forward = twin.context.forward().input(tokens)
        forward.probe(-len(tokens) - 1, hw.Logits())
        with pytest.raises(hw.Unsupported, match="cut off"):
            forward.execute()
        twin.check()


# -- rules -------------------------------------------------------------------------------------------------------------


def test_a_rule_is_given_position_ids_and_binds_pending_tokens(twin: Twin) -> None:
    rng = np.random.default_rng(5)
    twin.run(random_tokens(V, 6), at=(places := [3, 9, 4, 20, 11, 5]))
    seen: list[tuple[int, list[int]]] = []

    def rule(row: int, slots: np.ndarray) -> np.ndarray:
        seen.append((row, slots.tolist()))
        return (slots % 2 == row % 2) | (slots == row)

    twin.fill(random_tokens(V, 3, 1))
    places += [21, 22, 23]
    rows = rng.integers(0, 40, 4).tolist()
    places += rows

    def sees(slot: int, slots: int) -> np.ndarray:
        at = np.array(places[:slots])
        return (at % 2 == places[slot] % 2) | (at == places[slot])

    twin.run(random_tokens(V, 4, 2), at=rows, mask=Choice(Mask.rule(rule), sees=sees))
    assert seen == [(places[i], places[: i + 1]) for i in range(6, 13)]


@pytest.mark.parametrize("places", [None, [4, 2, 9]])
def test_a_generation_under_a_rule_equals_one_under_the_same_rows(
    pair: tuple[hw.Engine, Judge], places: list[int] | None
) -> None:
    def rule(row: int, slots: np.ndarray) -> np.ndarray:
        return (slots < 3) | ((row - slots) % 4 == 0)

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx, engine.context() as by_hand:
            for each in (ctx, by_hand):
                mask = Mask.rule(rule)
                at = range(3) if places is None else places
                await each.forward().input_at([5, 6, 7], at).attention_mask(mask).execute()
            found = await ctx.generate(
                hw.Argmax(), max_tokens=14, attention_mask=Mask.rule(rule), stop_only=True
            ).tokens()
            expected: list[int] = []
            positions = [*(range(3) if places is None else places)]
            for _ in range(14):
                forward = by_hand.forward()
                if expected:
                    positions.append(max(positions) + 1)
                    forward.input(expected[-1:]).attention_mask(
                        Mask.from_bool(rule(positions[-1], np.array(positions))[None])
                    )
                token = forward.sample([-1], hw.Argmax())
                expected.append((await forward.execute()).token(token))
            assert found == expected

    pair[0].run(program)


def test_a_rule_that_fails_or_answers_nonsense_changes_nothing(pair: tuple[hw.Engine, Judge]) -> None:
    def broken(row: int, slots: np.ndarray) -> np.ndarray:
        raise KeyError("mine")

    def writes(row: int, slots: np.ndarray) -> np.ndarray:
        slots[0] = 7
        return slots == 0

    cases: list[tuple[Any, type[Exception], str]] = [
        (broken, KeyError, "mine"),
        (writes, ValueError, "read-only"),
        (lambda row, slots: slots, hw.WrongType, "booleans"),
        (lambda row, slots: True, hw.InvalidMask, r"shape \(\) for row 0; expected a boolean for each of 3 slots"),
        (lambda row, slots: slots[:-1] > 0, hw.InvalidMask, r"shape \(2,\)"),
        (lambda row, slots: slots < 0, hw.InvalidMask, "attends to none"),
    ]
    with pair[0].context() as ctx:
        asyncio.run(ctx.fill([1, 2]).flush())
        for rule, error, says in cases:
            with pytest.raises(error, match=says):
                ctx.forward().input([3]).attention_mask(Mask.rule(rule)).execute()
            with pytest.raises(error):
                asyncio.run(ctx.fork().fill([2]).generate(attention_mask=Mask.rule(rule)).tokens())
            assert ctx.seq_len == 2
    with pytest.raises(hw.WrongType, match="function"):
        Mask.rule(3)  # type: ignore[arg-type]


def test_errors_name_the_shape_with_pending_tokens(pair: tuple[hw.Engine, Judge]) -> None:
    with pair[0].context() as ctx:
        asyncio.run(ctx.fill([1, 2, 3, 4]).flush())
        ctx.fill([5, 6, 7])
        expected = r"shape \[2, 9\]: 4 computed slots, 3 pending tokens and 2 rows"
        for wrong in (np.ones((2, 6), bool), np.ones((3, 9), bool), np.ones(9, bool)):
            with pytest.raises(hw.InvalidMask, match=expected):
                ctx.forward().input([8, 9]).attention_mask(Mask.from_bool(wrong)).execute()
        ctx.forward().input([8, 9]).attention_mask(Mask.from_bool(np.ones((2, 9), bool))).execute().result()
