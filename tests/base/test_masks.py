"""Attention masks against dense numpy matrices, and every form of logit mask."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import InvalidInput, InvalidMask, InvalidToken, WrongType
from headway.base.specs.brle import Brle
from headway.base.specs.masks import Mask, check_rows, logit_mask
from support.properties import examples

firsts = st.integers(0, 20)
counts = st.integers(0, 9)


# Dense rules, written from the definitions: what a row at `slot` sees of `total` slots, causality aside.
def see_causal(slot, total):
    return [s <= slot for s in range(total)]


def see_window(n):
    return lambda slot, total: [slot - n < s <= slot for s in range(total)]


def see_sink(sink, window):
    return lambda slot, total: [s < sink or slot - window < s <= slot for s in range(total)]


def see_blocks(lengths, sees):
    def block(slot):
        for number, length in enumerate(lengths):
            if slot < length:
                return number
            slot -= length
        return len(lengths)

    def rule(slot, total):
        own = block(slot)
        return [own == len(lengths) or block(s) == own or (own, block(s)) in sees for s in range(total)]

    return rule


@st.composite
def symbolic(draw):
    """(mask, dense rule) pairs."""
    kind = draw(st.sampled_from(["causal", "window", "sink", "blocks"]))
    if kind == "causal":
        return Mask.causal(), see_causal
    if kind == "window":
        n = draw(st.integers(1, 12))
        return Mask.window(n), see_window(n)
    if kind == "sink":
        sink, window = draw(st.integers(0, 6)), draw(st.integers(1, 6))
        return Mask.sink(sink, window), see_sink(sink, window)
    lengths = draw(st.lists(st.integers(0, 7), max_size=4))
    number = st.integers(0, len(lengths))
    sees = draw(st.lists(st.tuples(number, number), max_size=4))
    return Mask.blocks(lengths, sees), see_blocks(lengths, sees)


@st.composite
def expressions(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        return draw(symbolic())
    mask, rule = draw(expressions(depth=depth - 1))
    kind = draw(st.sampled_from("&|~"))
    if kind == "~":
        return ~mask, lambda slot, total: [not bit for bit in rule(slot, total)]
    other, second = draw(expressions(depth=depth - 1))

    def both(slot, total):
        return zip(rule(slot, total), second(slot, total))

    if kind == "&":
        return mask & other, lambda slot, total: [a and b for a, b in both(slot, total)]
    return mask | other, lambda slot, total: [a or b for a, b in both(slot, total)]


@settings(max_examples=examples(200))
@given(expressions(), firsts, counts)
def test_symbolic_masks_and_their_combinations_equal_the_dense_rule_cut_by_causality(pair, first, rows):
    mask, rule = pair
    bound = mask.bind(first, rows)
    assert len(bound) == rows
    for i, row in enumerate(bound):
        slot = first + i
        assert row.to_bool().tolist() == rule(slot, slot + 1)
    dense = np.array([rule(first + i, first + rows) for i in range(rows)], dtype=bool).reshape(rows, first + rows)
    assert np.array_equal(mask.to_bool(first, rows), dense & np.tri(rows, first + rows, first, dtype=bool))
    assert mask.covers_pending
    assert mask.rows is None


@given(expressions(), firsts, counts, st.integers(0, 5))
def test_without_causality_every_row_covers_all_slots(pair, first, rows, beyond):
    mask, rule = pair
    total = first + rows + beyond
    for i, row in enumerate(mask.bind(first, rows, causal=False, total=total)):
        assert row.to_bool().tolist() == rule(first + i, total)
    assert mask.bind(first, rows, causal=False) == mask.bind(first, rows, causal=False, total=first + rows)


@given(expressions(), expressions(), firsts, counts)
def test_boolean_laws_hold(left, right, first, rows):
    a, b = left[0], right[0]

    def same(x, y):
        return x.bind(first, rows) == y.bind(first, rows)

    assert same(~~a, a)
    assert same(~(a & b), ~a | ~b)
    assert same(a & b, b & a)
    assert same(a | (a & b), a)
    assert same(a & Mask.causal(), a)


@given(st.data(), firsts, st.integers(1, 6))
def test_raw_rows_cover_the_slots_before_the_token_or_those_and_itself(data, first, rows):
    lengths = [first + i + data.draw(st.integers(0, 1)) for i in range(rows)]
    attend = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    expected = [row if len(row) == first + i + 1 else [*row, True] for i, row in enumerate(attend)]
    masked_runs = [list((~Brle.from_bool(row)).runs) for row in attend]
    for mask in (Mask.from_bool(attend), Mask.from_runs(masked_runs)):
        assert [row.to_bool().tolist() for row in mask.bind(first, rows)] == expected
        assert mask.rows == rows
        assert not mask.covers_pending
    flipped = [[not bit for bit in row] for row in attend]
    assert (~Mask.from_runs(masked_runs)).bind(first, rows) == Mask.from_bool(flipped).bind(first, rows)


@given(expressions(), firsts, st.integers(1, 6))
def test_a_mask_survives_the_way_through_numpy_and_runs(pair, first, rows):
    bound = pair[0].bind(first, rows)
    assert Mask.from_bool(pair[0].to_bool(first, rows)).bind(first, rows) == bound
    assert Mask.from_runs(pair[0].to_runs(first, rows)).bind(first, rows) == bound


@given(expressions(), st.data(), firsts, st.integers(1, 5))
def test_raw_and_symbolic_masks_combine(pair, data, first, rows):
    mask, rule = pair
    total = first + rows
    attend = np.array(data.draw(st.lists(st.booleans(), min_size=rows * total, max_size=rows * total)), dtype=bool)
    attend = attend.reshape(rows, total)
    dense = np.array([rule(first + i, total) for i in range(rows)])
    causal = np.tri(rows, total, first, dtype=bool)
    raw = Mask.from_bool(attend)
    assert np.array_equal((mask & raw).to_bool(first, rows), dense & attend & causal)
    assert np.array_equal((raw | ~mask).to_bool(first, rows), (attend | ~dense) & causal)
    assert np.array_equal((~(raw & mask)).to_bool(first, rows), ~(attend & dense) & causal)
    assert (mask & raw).rows == rows
    assert not (mask & raw).covers_pending


def test_the_polarity_of_raw_runs_is_the_documents():
    window = Mask.from_runs([[0, 5, 3]])  # a row at slot 8: five masked, three attended, itself left out
    assert window.to_bool(8, 1).tolist() == [[False] * 5 + [True] * 4]
    sink = Mask.from_runs([[2, 4, 2]])  # sink, masked middle, window
    assert sink.to_bool(7, 1).tolist() == [[True] * 2 + [False] * 4 + [True] * 2]
    assert sink.bind(7, 1) == Mask.sink(2, 2).bind(7, 1)


def test_a_row_that_leaves_itself_out_sees_itself_also_after_not():
    mask = Mask.from_bool([[True, False, True]])
    assert mask.to_bool(3, 1).tolist() == [[True, False, True, True]]
    assert (~mask).to_bool(3, 1).tolist() == [[False, True, False, True]]


def test_blocks_past_the_last_one_form_an_open_block_that_sees_all():
    mask = Mask.blocks([2, 3], sees=[(1, 0)])
    assert mask.to_bool(0, 7).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]
    assert not Mask.blocks([2, 3]).to_bool(0, 5)[2:, :2].any()


def test_one_row_may_be_given_flat_and_tensors_are_arrays():
    torch = pytest.importorskip("torch")
    assert Mask.from_bool([True, False]).bind(2, 1) == Mask.from_bool([[True, False]]).bind(2, 1)
    assert Mask.from_bool(torch.tensor([[True, False]])) == Mask.from_bool([[True, False]])
    assert Mask.from_bool([]).bind(0, 1) == (Brle.ones(1),)
    assert Mask.from_runs([]).bind(3, 0) == ()
    assert Mask.from_runs(np.array([[1, 2]])).rows == 1


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Mask.window(0), InvalidInput, ["window", "0", "at least 1"]),
        (lambda: Mask.window(-3), InvalidInput, ["-3"]),
        (lambda: Mask.window(2.5), WrongType, ["2.5", "integer"]),
        (lambda: Mask.window(True), WrongType, ["True"]),
        (lambda: Mask.sink(-1, 4), InvalidInput, ["sink", "-1"]),
        (lambda: Mask.sink(1, 0), InvalidInput, ["window", "0"]),
        (lambda: Mask.blocks(5), WrongType, ["lengths", "5"]),
        (lambda: Mask.blocks([2, -1]), InvalidInput, ["lengths[1]", "-1"]),
        (lambda: Mask.blocks([2], sees=[(0, 2)]), InvalidInput, ["2", "[0, 1]"]),
        (lambda: Mask.blocks([2], sees=[1]), WrongType, ["pairs"]),
        (lambda: Mask.from_runs([3, 2]), WrongType, ["row 0", "a list of runs per row"]),
        (lambda: Mask.from_runs([[3], [2, -1]]), InvalidMask, ["row 1", "run 1", "-1", "0 = attend"]),
        (lambda: Mask.from_runs([[3.5]]), WrongType, ["row 0", "3.5"]),
        (lambda: Mask.from_runs("32"), WrongType, ["'32'"]),
        (lambda: Mask.from_bool([[0, 1]]), WrongType, ["int64", "booleans"]),
        (lambda: Mask.from_bool(np.zeros((1, 3))), WrongType, ["float64"]),
        (lambda: Mask.from_bool(np.ones((1, 1, 2), dtype=bool)), InvalidMask, ["(1, 1, 2)"]),
        (lambda: Mask.from_bool(np.bool_(True)), InvalidMask, ["()"]),
        (lambda: Mask.from_runs([[1]]) & Mask.from_runs([[1], [2]]), InvalidMask, ["1 and 2 rows"]),
        (lambda: Mask.causal() & [[True]], WrongType, ["list"]),
        (lambda: bool(Mask.causal()), WrongType, ["truth value"]),
    ],
)
def test_a_mask_that_cannot_be_made_is_refused_with_its_value(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("length", [0, 5, 6, 9, 10])
def test_a_row_of_another_length_is_refused_with_row_length_and_polarity(length):
    for mask, polarity in (
        (Mask.from_runs([[7], [length]]), "0 = attend, 1 = masked"),
        (Mask.from_bool([[True] * 7, [True] * length]), "True = attend"),
    ):
        with pytest.raises(InvalidMask, match=rf"row 1 .* covers {length} slots; expected 7 .* or 8 .*{polarity}"):
            mask.bind(6, 2)


def test_without_causality_a_raw_row_covers_exactly_all_slots():
    mask = Mask.from_runs([[2, 4], [6]])
    assert mask.bind(3, 2, causal=False, total=6)[0].runs == (0, 2, 4)
    for total in (5, 7):
        with pytest.raises(InvalidMask, match=f"row 0 .* covers 6 slots; expected {total}"):
            mask.bind(3, 2, causal=False, total=total)


def test_rows_and_totals_that_do_not_fit_are_refused():
    with pytest.raises(InvalidMask, match="2 rows for 3 input rows"):
        Mask.from_runs([[1], [2]]).bind(1, 3)
    with pytest.raises(InvalidMask, match="1 rows for 2 input rows"):
        (Mask.from_runs([[1]]) & Mask.window(2)).bind(1, 2)
    with pytest.raises(InvalidInput, match="total is 9"):
        Mask.causal().bind(3, 2, total=9)
    with pytest.raises(InvalidInput, match="total is 4"):
        Mask.causal().bind(3, 2, causal=False, total=4)
    with pytest.raises(InvalidInput, match="first_slot is -1"):
        Mask.causal().bind(-1, 2)


def test_a_row_that_attends_to_nothing_is_refused_with_its_number_and_polarity():
    mask = Mask.from_runs([[4], [0, 5]])
    rows = mask.bind(3, 2)
    with pytest.raises(InvalidMask, match=r"this pass: row 1 attends to none of its 5 slots.*0 = attend, 1 = masked"):
        check_rows(rows, where="this pass", read=mask.polarity)
    with pytest.raises(InvalidMask, match="row 0"):
        check_rows((~Mask.causal()).bind(0, 3))
    check_rows(Mask.window(1).bind(0, 30))
    check_rows(())


def test_equal_masks_are_equal_and_hashable():
    assert Mask.window(3) & Mask.causal() == Mask.window(3) & Mask.causal()
    assert hash(Mask.from_runs([[2, 1]])) == hash(Mask.from_runs([[2, 1, 0]]))
    assert Mask.window(3) != Mask.window(4)


def test_the_repr_reads_as_it_was_written():
    mask = (Mask.window(3) | Mask.sink(1, 2)) & ~Mask.blocks([2, 2], sees=[(1, 0)])
    assert repr(mask) == "(Mask.window(3) | Mask.sink(1, 2)) & ~Mask.blocks([2, 2], sees=[(1, 0)])"
    assert repr(Mask.from_runs([[3], [4]])) == "Mask.from_runs(<2 rows>)"


def test_a_long_chain_binds():
    mask = Mask.causal()
    for _ in range(3000):
        mask = mask & Mask.window(5)
    assert mask.bind(9, 1) == Mask.window(5).bind(9, 1)


def test_pictures_show_the_rows():
    assert Mask.window(2).picture(rows=3).split() == ["0", "█", "1", "██", "2", "·██"]
    assert Mask.from_runs([[2, 3, 1]]).picture().split() == ["5", "██···█"]
    assert Mask.from_bool([[True, False], [False, True]]).picture().split() == ["0", "█", "1", "·█"]
    assert Mask.from_runs([]).picture() == ""
    large = Mask.causal().picture(first_slot=10_000, rows=500)
    assert "436 more rows" in large
    assert max(map(len, large.splitlines())) < 160


def test_the_notebook_picture_is_bounded_and_escaped():
    html = Mask.window(3)._repr_html_()
    assert html.count("<rect") == 17  # the ground and one run for each of 16 rows
    noise = np.random.default_rng(0).random((300, 5000)) < 0.5
    assert len(Mask.from_bool(noise)._repr_html_()) < 600_000
    named = Mask.from_runs([[3], [1]])._repr_html_()  # fits no pass: says so instead of failing
    assert "&lt;2 rows&gt;" in named
    assert "<2 rows>" not in named
    assert "expected" in named
    assert re.fullmatch(r"<div>.*</div>", Mask.from_runs([])._repr_html_())


# Logit masks.
@given(st.lists(st.booleans(), min_size=1, max_size=80).filter(any))
def test_every_form_of_logit_mask_means_the_same(allowed):
    array = np.array(allowed)
    vocab = len(allowed)
    ids = np.flatnonzero(array)
    words = np.zeros(-(-vocab // 32), dtype=np.uint32)
    for i in ids.tolist():
        words[i // 32] |= np.uint32(1 << (i % 32))
    words[-1] |= np.uint32((0xFFFFFFFF << (vocab % 32)) & 0xFFFFFFFF if vocab % 32 else 0)  # leftover bits are ignored
    runs = list(Brle.from_bool(array).runs)
    forms = [
        logit_mask(vocab, runs),
        logit_mask(vocab, np.array(runs)),
        logit_mask(vocab, Brle.from_runs(runs)),
        logit_mask(vocab, array),
        logit_mask(vocab, allowed),
        logit_mask(vocab, words),
        logit_mask(vocab, allow=ids),
        logit_mask(vocab, allow=set(ids.tolist())),
        logit_mask(vocab, forbid=(int(i) for i in np.flatnonzero(~array))),
    ]
    for form in forms:
        assert form.dtype == bool
        assert np.array_equal(form, array)


def test_forms_of_one_call_and_together():
    assert logit_mask(6, [0, 4, 2], allow=[1, 2, 5], forbid=[2]).nonzero()[0].tolist() == [1]
    assert logit_mask(5, forbid=[]).all()


def test_the_callers_array_is_not_shared():
    mine = np.ones(4, dtype=bool)
    logit_mask(4, mine)[0] = False
    logit_mask(4, mine, forbid=[1])
    assert mine.all()


def test_tensors_are_read_by_their_type():
    torch = pytest.importorskip("torch")
    assert logit_mask(3, torch.tensor([True, False, True])).tolist() == [True, False, True]
    assert logit_mask(3, torch.tensor([1, 2])).tolist() == [False, True, True]
    assert logit_mask(3, allow=torch.tensor([2])).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, InvalidInput, ["allow=ids"]),
        ({"runs": [2, 3]}, InvalidMask, ["sum to 5", "expected 7", "1 = allowed"]),
        ({"runs": []}, InvalidMask, ["sum to 0"]),
        ({"runs": [2, -3, 8]}, InvalidMask, ["run 1", "-3"]),
        ({"runs": [2.0, 5]}, WrongType, ["2.0"]),
        ({"runs": 7}, WrongType, ["7"]),
        ({"runs": [7]}, InvalidMask, ["none of 7"]),
        ({"runs": np.zeros(7, dtype=bool)}, InvalidMask, ["none of 7"]),
        ({"runs": np.ones(8, dtype=bool)}, InvalidMask, ["8 booleans", "7"]),
        ({"runs": np.ones((1, 7), dtype=bool)}, InvalidMask, ["(1, 7)"]),
        ({"runs": np.zeros(2, dtype=np.uint32)}, InvalidMask, ["2 words", "expected 1"]),
        ({"runs": np.array([128], dtype=np.uint32)}, InvalidMask, ["none of 7"]),
        ({"runs": np.zeros(7)}, WrongType, ["0.0"]),
        ({"allow": []}, InvalidMask, ["none of 7"]),
        ({"allow": [1], "forbid": [1]}, InvalidMask, ["none of 7"]),
        ({"allow": 3}, WrongType, ["3"]),
        ({"allow": [1.5]}, WrongType, ["1.5"]),
        ({"allow": np.array([True])}, WrongType, ["allow"]),
        *(({"allow": [bad]}, InvalidToken, [str(bad), "[0, 6]"]) for bad in (-1, 7, 38, 2**31, 2**63, -(2**70))),
        *(({"forbid": [bad]}, InvalidToken, [str(bad), "[0, 6]"]) for bad in (-1, 7, 2**63)),
    ],
)
def test_a_logit_mask_that_cannot_be_used_is_refused(arguments, error, words):
    with pytest.raises(error) as caught:
        logit_mask(7, **arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)
