"""Amounts of memory as people read them, and shares of it."""

from __future__ import annotations

import pytest

from headway.base.checks import check_fraction
from headway.base.errors import InvalidInput
from headway.base.text import format_bytes


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
