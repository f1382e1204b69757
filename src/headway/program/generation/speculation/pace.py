"""How far to draft: as far as the measured acceptance and the measured cost of a wider step pay for it.

a round with n drafts adds    1 + r + r² + … + rⁿ tokens       r: how often a draft is right, given those before
and takes                     a step of n more rows + the draft + the host's way there and back
a decode step adds            1 token, and takes a step
"""

from __future__ import annotations

from headway.runtime.step_costs import StepCosts

MEMORY = 0.85  # weight of what was measured before, against one more round
PRIOR = 2.0  # drafts that the first guess counts as
GAIN = 1.04  # what a round must bring over decoding, so that noise does not decide
WEIGHT = 0.25  # of the newest measurement of time


class Pace:
    """What one generation has measured of its drafts."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._right: dict[int, float] = {}  # by kind of draft
        self._tried: dict[int, float] = {}
        self.overhead = 0.0  # seconds of a round besides its step and its draft
        self.per_token = 0.0  # seconds of drafting one token

    def copy(self) -> Pace:
        """The same, for another sequence."""
        twin = Pace(self._costs)
        twin._right, twin._tried = dict(self._right), dict(self._tried)
        twin.overhead, twin.per_token = self.overhead, self.per_token
        return twin

    def rate(self, kind: int, chance: float) -> float:
        """How often a draft of this kind is right, given that those before it are."""
        right, tried = self._right.get(kind, 0.0), self._tried.get(kind, 0.0)
        return (right + PRIOR * chance) / (tried + PRIOR)

    def length(self, kind: int, chance: float, limit: int, others: int) -> int:
        """How many tokens to draft, at most `limit`, while `others` sequences share the steps; 0 where none pay."""
        rate, rows, seconds = self.rate(kind, chance), others + 1, self._costs.seconds
        best, chosen = GAIN * rows / seconds(rows), 0
        tokens, power = float(rows), 1.0
        for n in range(1, limit + 1):
            power *= rate
            if power < 0.02:
                break
            tokens += power
            worth = tokens / (seconds(rows + n) + (self.overhead + n * self.per_token) / rows)
            if worth > best:
                best, chosen = worth, n
        return chosen

    def observe(self, kind: int, right: int, tried: int) -> None:
        """Of `tried` drafts that were looked at, one after the other, `right` were what came."""
        self._right[kind] = self._right.get(kind, 0.0) * MEMORY + right
        self._tried[kind] = self._tried.get(kind, 0.0) * MEMORY + tried

    def took(self, *, overhead: float, drafting: float, drafted: int) -> None:
        """The seconds of a round besides its step, and those of its draft."""
        self.overhead += WEIGHT * (max(0.0, overhead) - self.overhead)
        if drafted:
            self.per_token += WEIGHT * (drafting / drafted - self.per_token)
