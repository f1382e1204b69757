"""Amounts of memory: as people read them, and the share that may be used."""

from __future__ import annotations

from headway.base.errors import InvalidInput

UNITS = {1000: ("B", "kB", "MB", "GB", "TB"), 1024: ("B", "KiB", "MiB", "GiB", "TiB")}


def amount(count: float, base: int = 1024) -> str:
    """Bytes as people read them: 98.4 MiB, 1.6 GiB; with base 1000, as disks and wires count, 98.4 MB, 1.6 GB."""
    power = sum(count >= base**n for n in range(1, len(UNITS[base])))
    return f"{count / base**power:.{min(power, 1)}f} {UNITS[base][power]}"


def check_fraction(fraction: float | None, name: str = "memory_fraction") -> float | None:
    """None, or a number above 0 and up to 1."""
    if fraction is None:
        return None
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise InvalidInput(f"{name} is {fraction!r}; it takes a number above 0 and up to 1")
    return float(fraction)
