"""How long steps take, by their number of rows: measured as they run, read by whoever may choose how wide to make one.

Bookkeeping under the engine's lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort

WIDEST = 128  # steps of more rows are prefills, and nobody chooses their width
COLD = 2  # first steps of a width that do not count: on some devices kernels are compiled and graphs captured then
WEIGHT = 0.25  # of the newest measurement
OUTLIER = 2.0  # a step that took this many times the mean counts as that: something else had the machine
SLOPE = 0.1  # what one more row costs, relative to the widest step known, while only one width is


class StepCosts:
    """A moving mean of the seconds of a step for every number of rows seen so far."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._seconds: dict[int, float] = {}
        self._cold: dict[int, int] = {}  # steps of a width that did not count

    def note(self, rows: int, seconds: float) -> None:
        """A step of this many rows took this long."""
        if not 0 < rows <= WIDEST:
            return
        mean = self._seconds.get(rows)
        if mean is None and (seen := self._cold.get(rows, 0)) < COLD:
            self._cold[rows] = seen + 1
        elif mean is None:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = mean + WEIGHT * (min(seconds, OUTLIER * mean) - mean)

    def seconds(self, rows: int) -> float:
        """What a step of this many rows takes, as far as is known; relative to 1 while nothing is."""
        known = self._rows
        if not known:
            return 1.0 + SLOPE * rows
        at = bisect_left(known, rows)
        if at == len(known):  # wider than any: as the known ones grow on average
            first, last = known[0], known[-1]
            least, most = self._seconds[first], self._seconds[last]
            slope = SLOPE * most if first == last else max(0.0, most - least) / (last - first)
            return most + slope * (rows - last)
        high = known[at]
        if high == rows or at == 0:
            return self._seconds[high]
        low = known[at - 1]
        share = (rows - low) / (high - low)
        return self._seconds[low] * (1 - share) + self._seconds[high] * share
