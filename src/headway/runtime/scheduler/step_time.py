"""How many tokens of prefills may share a step with decode rows, so that the step takes no longer than it should.

What steps cost is measured as they run: those of decode rows alone, and what each token of a prefill adds. Bookkeeping
under the engine's lock; it reads no clock.
"""

from __future__ import annotations

SLOWDOWN = 3.0  # a step with prefills may take this many times one of decode rows alone, where no time is set
QUICK = 0.01  # seconds of a step that nobody minds: no target is below
FIRST = 256  # tokens of prefills in a step with decode rows, before it is known what they cost
LEAST = 16  # tokens of prefills that a step has in any case: they go on, whatever the target
SHORT = 16  # a pass of at most so many tokens is a decode too: somebody waits for each of its steps
WEIGHT = 0.25  # of the newest measurement
OUTLIER = 2.0  # a step that took this many times the mean counts as that: something else had the machine


class StepTime:
    """A target for steps with decode rows: `seconds`, or SLOWDOWN times what they take alone, at least QUICK."""

    def __init__(self, seconds: float | None = None) -> None:
        self._target = seconds
        self._decode: float | None = None  # seconds of a step with decode rows alone
        self._guess: float | None = None  # the same, before there was one
        self._alone: float | None = None  # seconds of a prefill's token, in steps of prefills alone
        self._added: float | None = None  # the same, in steps with decode rows

    def note(self, decodes: int, prefill: int, seconds: float) -> None:
        """A step of so many decode rows and tokens of prefills took this long."""
        if not prefill:
            self._decode = _mean(self._decode, seconds) if decodes else self._decode
        elif not decodes:
            self._alone = _mean(self._alone, seconds / prefill)
        elif self._decode is not None:
            self._added = _mean(self._added, max(seconds - self._decode, 0.0) / prefill)
        elif self._alone is not None:
            self._guess = _mean(self._guess, max(seconds - prefill * self._alone, 0.0))

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prefills that a step with decode rows may have."""
        each = self._alone if self._added is None else self._added
        decode = self._guess if self._decode is None else self._decode
        if not each or (decode is None and self._target is None):
            return FIRST
        target = max(QUICK, SLOWDOWN * (decode or 0.0)) if self._target is None else self._target
        return max(LEAST, int((target - (decode or 0.0)) / each))


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (min(value, OUTLIER * mean) - mean)
