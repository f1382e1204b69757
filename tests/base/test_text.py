"""Amounts of memory as people read them, shares of it, and searches in short calls."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base import text as texts
from headway.base.checks import check_fraction
from headway.base.errors import InvalidInput
from headway.base.text import find_all, format_bytes, replace_all


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_memory_is_counted_in_powers_of_1024(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0.4, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_400_000, "98.4 MB"), (4.8e12, "4.8 TB")]
)
def test_disks_and_wires_are_counted_in_powers_of_1000(count: float, text: str) -> None:
    assert format_bytes(count, 1000) == text


def test_a_share_is_above_0_and_up_to_1() -> None:
    assert [check_fraction(f) for f in (None, 0.5, 1)] == [None, 0.5, 1.0]
    with pytest.raises(InvalidInput, match=r"^--share is 0\.0; it must be a number above 0 and at most 1$"):
        check_fraction(0.0, "--share")


@given(st.text("<|abc>", max_size=80), st.integers(1, 12))
def test_a_search_in_pieces_finds_what_one_search_finds(text: str, piece: int) -> None:
    pattern = re.compile(r"<\|abc\|>|<\|a|abc|[|>]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", piece)
        assert [m.span() for m in find_all(pattern, text, 7)] == [m.span() for m in pattern.finditer(text)]
        assert replace_all(pattern, lambda m: m[0].upper(), text, 7) == pattern.sub(lambda m: m[0].upper(), text)
