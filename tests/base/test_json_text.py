"""JSON parsed in pieces: the same values and errors as `json.loads`, with bounds, and never one long call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.base.json_text import MAX_NUMBERS, MAX_VALUES, Budget, TooManyValues, loads, write, written_size

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["[1,2]", '{"', ",", "]"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=40,
)
LAYOUTS = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"separators": (" , ", "\t:\n")}])


def result(text: str, **options: Any) -> Any:
    """What the text means, or where it fails and how."""
    try:
        return repr(loads(text, **options) if options else json.loads(text))
    except json.JSONDecodeError as error:
        return error.msg, error.pos


@given(VALUES, LAYOUTS, st.booleans(), st.integers(0, 9))
def test_values_are_those_of_json(value: Any, layout: dict[str, Any], ascii: bool, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii, **layout)
    assert result(text, piece=piece) == result(text)


@given(VALUES, st.integers(0), st.sampled_from(["", *'[]{},:"\\ 0n-.eE\ufeff']), st.integers(0, 2), st.integers(0, 9))
@example([1], 0, "\ufeff", 0, 0)
@example([1, 2], 2, ",", 0, 0)
def test_so_are_the_errors_of_damaged_texts(value: Any, at: int, new: str, removed: int, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    at %= len(text)
    text = text[:at] + new + text[at + removed :]
    assert result(text, piece=piece) == result(text)


def test_hooks_see_every_object_and_constant() -> None:
    text = '[{"a": [{"b": NaN}]}, {}]'
    options: dict[str, Any] = {"object_hook": sorted, "parse_constant": lambda name: name * 2}
    assert loads(text, piece=0, **options) == json.loads(text, **options) == [["a"], []]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" + "[]," * MAX_VALUES + "[]]", f"more than {MAX_VALUES} lists, objects and texts"),
        ('{"a":' * 200 + "[" + '"",' * MAX_VALUES + '""]' + "}" * 200, f"more than {MAX_VALUES} lists, objects"),
        ("[" + "1," * MAX_NUMBERS + "1,1]", f"more than {MAX_NUMBERS} numbers"),
    ],
    ids=["lists", "texts", "numbers"],
)
def test_a_bounded_text_has_so_many_values_at_most(text: str, match: str) -> None:
    with pytest.raises(TooManyValues, match=match):
        loads(text, bounded=True)
    with pytest.raises(TooManyValues, match=match) as caught:
        loads('{"a": {"b": 1, "c": ' + text + "}}", bounded=True)
    assert caught.value.where == "a"


def test_what_is_nested_too_deeply_is_an_error_and_no_crash() -> None:
    with pytest.raises(RecursionError):
        loads("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize("text", ["é\n", '\\"', "\\ud83d\\ude00", "😀", "\ud83d", "\ud83d\\u0061", "\\\\ud83d"])
def test_a_long_text_is_that_of_json(text: str) -> None:
    for written in (json.dumps(text * 30_000), json.dumps(text * 30_000, ensure_ascii=False)):
        assert loads(written) == json.loads(written)


@given(VALUES)
@example("é\ud83d" * 70_000)
def test_what_is_written_and_its_size(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert write(value) == text
    assert written_size(value) == len(text.encode("utf-8", "surrogatepass"))


def test_texts_may_share_what_they_have_together() -> None:
    budget, half = Budget(), "[" + "[]," * (MAX_VALUES // 2) + "[]]"
    assert loads(half, budget=budget) == json.loads(half)
    with pytest.raises(TooManyValues, match=f"more than {MAX_VALUES} lists"):
        loads(half, budget=budget)
