"""Run-length bits against numpy arrays of booleans."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import HeadwayError, InvalidInput, InvalidMask, WrongType
from headway.base.specs.brle import Brle

bits = st.lists(st.booleans(), max_size=40).map(lambda values: np.array(values, dtype=bool))
chunky = st.lists(st.integers(0, 20), max_size=8)  # run lengths, zero-length ones among them
bound = st.none() | st.integers(-50, 50)


def dense(runs) -> np.ndarray:
    return np.array([i % 2 == 1 for i, run in enumerate(runs) for _ in range(run)], dtype=bool)


def is_canonical(brle: Brle) -> bool:
    return all(run > 0 for run in brle.runs[1:]) and brle.runs != (0,)


@given(chunky)
def test_runs_of_any_shape_become_the_same_bits_in_one_form(runs):
    brle = Brle.from_runs(runs)
    assert np.array_equal(brle.to_bool(), dense(runs))
    assert len(brle) == sum(runs)
    assert is_canonical(brle)
    assert brle == Brle.from_bool(dense(runs)) == Brle(tuple(runs))
    assert hash(brle) == hash(Brle.from_bool(dense(runs)))


@given(bits)
def test_a_round_trip_through_booleans_changes_nothing(array):
    brle = Brle.from_bool(array)
    assert brle.to_bool().dtype == bool
    assert np.array_equal(brle.to_bool(), array)
    assert is_canonical(brle)
    assert Brle.from_runs(brle.runs) == brle
    assert brle.count() == array.sum()


@given(st.data(), bits)
def test_and_or_not_equal_numpys(data, left):
    right = np.array(data.draw(st.lists(st.booleans(), min_size=len(left), max_size=len(left))), dtype=bool)
    a, b = Brle.from_bool(left), Brle.from_bool(right)
    for result, expected in ((a & b, left & right), (a | b, left | right), (~a, ~left)):
        assert np.array_equal(result.to_bool(), expected)
        assert is_canonical(result)


@given(bits, bound, bound)
def test_slices_any_and_all_equal_numpys(array, start, stop):
    brle = Brle.from_bool(array)
    assert np.array_equal(brle[start:stop].to_bool(), array[start:stop])
    assert is_canonical(brle[start:stop])
    assert brle.any(start, stop) == array[start:stop].any()
    assert brle.all(start, stop) == array[start:stop].all()


@given(st.lists(bits, min_size=1, max_size=4))
def test_concat_equals_numpys(parts):
    first, *rest = map(Brle.from_bool, parts)
    assert np.array_equal(first.concat(*rest).to_bool(), np.concatenate(parts))
    assert is_canonical(first.concat(*rest))


@given(bits)
def test_intervals_are_the_maximal_stretches_of_ones(array):
    brle = Brle.from_bool(array)
    pairs = list(brle.intervals())
    assert all(start < stop for start, stop in pairs)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(pairs))
    assert Brle.from_intervals(len(array), pairs) == brle


@given(st.integers(0, 30), st.data())
def test_intervals_may_overlap_touch_and_come_in_any_order(length, data):
    ends = st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda pair: (min(pair), max(pair)))
    pairs = data.draw(st.lists(ends, max_size=5))
    expected = np.zeros(length, dtype=bool)
    for start, stop in pairs:
        expected[start:stop] = True
    assert np.array_equal(Brle.from_intervals(length, pairs).to_bool(), expected)


def test_the_documents_example():
    assert Brle.from_runs([3, 2, 4, 1]).to_bool().astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]


def test_ones_zeros_span_and_nothing():
    assert Brle.ones(3).runs == (0, 3)
    assert Brle.zeros(3).runs == (3,)
    assert Brle.ones(0) == Brle.zeros(0) == Brle.from_bool([]) == ~Brle.ones(0) == Brle()
    assert Brle._span(5, 1, 3).runs == (1, 2, 2)
    assert Brle._span(5, 0, 5) == Brle.ones(5)
    assert not Brle().any()
    assert Brle().all()


def test_integers_of_every_kind_are_runs():
    torch = pytest.importorskip("torch")
    for runs in ([3, np.int8(2)], np.array([3, 2], dtype=np.uint16), (n for n in (3, 2)), torch.tensor([3, 2])):
        made = Brle.from_runs(runs)
        assert made.runs == (3, 2)
        assert all(type(run) is int for run in made.runs)


@pytest.mark.parametrize(
    ("runs", "error", "words"),
    [
        ([3, -1], InvalidMask, ["run 1", "-1", "at least 0"]),
        ([3.0], WrongType, ["run 0", "3.0", "integer"]),
        ([float("nan")], WrongType, ["nan"]),
        ([True, False], WrongType, ["True", "bool"]),
        (np.array([True]), WrongType, ["True"]),
        (np.array([[1, 2]]), WrongType, ["[1, 2]"]),
        (["3"], WrongType, ["'3'"]),
        ("32", WrongType, ["'32'"]),
        (b"32", WrongType, ["bytes"]),
        (7, WrongType, ["7", "int"]),
        (None, WrongType, ["NoneType"]),
        ({3, 2}, WrongType, ["set"]),
    ],
)
def test_what_is_not_runs_is_refused(runs, error, words):
    for make in (Brle.from_runs, Brle):
        with pytest.raises(error) as caught:
            make(runs)
        assert isinstance(caught.value, HeadwayError)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_other_misuse_is_refused():
    brle = Brle.from_runs([2, 3])
    with pytest.raises(InvalidMask, match="lengths 5 and 4"):
        brle & Brle.ones(4)
    with pytest.raises(WrongType, match="another Brle"):
        brle | [1, 2]  # type: ignore[operator]
    with pytest.raises(WrongType, match="slices of step 1"):
        brle[::2]
    with pytest.raises(WrongType, match="slices of step 1"):
        brle[0]  # type: ignore[index]
    with pytest.raises(WrongType, match="truth value"):
        bool(brle)
    with pytest.raises(InvalidMask, match=r"\(2, 6\)"):
        Brle.from_intervals(5, [(2, 6)])
    with pytest.raises(InvalidMask, match=r"\(3, 2\)"):
        Brle.from_intervals(5, [(3, 2)])
    with pytest.raises(InvalidInput, match="-1"):
        Brle.ones(-1)
    with pytest.raises(WrongType, match="int64"):
        Brle.from_bool(np.array([0, 1]))
    with pytest.raises(InvalidMask, match="shape"):
        Brle.from_bool(np.ones((2, 2), dtype=bool))
    with pytest.raises(AttributeError):
        brle.runs = (1,)  # type: ignore[misc]


def test_it_survives_pickling():
    brle = Brle.from_runs([2, 3, 1])
    copy = pickle.loads(pickle.dumps(brle))
    assert copy == brle
    assert copy.any(2, 3)


def test_a_vector_may_have_a_trillion_bits():
    far = 10**12
    brle = Brle.from_intervals(far, [(5, 10), (far - 7, far)])
    assert (brle & ~Brle._span(far, 6, far - 3)).count() == 1 + 3
    assert brle[far - 9 : far].runs == (2, 7)
    assert not brle.any(10, far - 7)
