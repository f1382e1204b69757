"""How far to draft: as far as the measured acceptance and the measured cost of a wider step pay for it.

    a round with n drafts adds    1 + a + ab + abb + … tokens     a, b: how often the first draft, a later one is right
and takes                     a step of n more rows + the draft + the host's way there and back
a decode step adds            1 token, and takes a step
"""

from __future__ import annotations

from dataclasses import replace

from headway.base.dataclass import dataclass
from headway.runtime.step_costs import StepCosts

MEMORY = 0.9  # weight of what was measured before, against one more round or guess
PRIOR = 2.0  # drafts that a first guess at their chance counts as
DOUBT = 0.6  # that chance, where the guess before was wrong
GAIN = 1.04  # what a round must bring over decoding, so that noise does not decide
WEIGHT = 0.25  # of the newest measurement of time
HICCUP = 0.005  # seconds of overhead that count at most, unless it was half as long before
LEAST = 0.02  # a draft that is kept less often is not worth a row

State = tuple[int, bool]  # a draft's kind, and whether what was drafted just before was right


@dataclass
class AcceptanceCount:
    """Drafts that were looked at in one state, and those that were right; older ones count less."""

    right: float = 0.0
    tried: float = 0.0


class Pace:
    """What one generation has measured of its drafts."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._records: dict[State, AcceptanceCount] = {}
        self._all = AcceptanceCount()
        self._expected = 0.0  # drafts that should have been right, by their chances
        self.was_right = False  # what was drafted last
        self.overhead = 0.0  # seconds of a round besides its step and its draft
        self.per_token = 0.0  # seconds of drafting one token

    def copy(self) -> Pace:
        """The same, for another sequence."""
        twin = Pace(self._costs)
        twin._records = {state: replace(record) for state, record in self._records.items()}
        twin._all, twin._expected = replace(self._all), self._expected
        twin.overhead, twin.per_token = self.overhead, self.per_token
        return twin

    def rate(self, kind: int, after_right: bool, chance: float) -> float:
        """How often a draft of this kind is right. Where little is known it is its chance, if chances held so far."""
        record = self._records.get((kind, after_right), AcceptanceCount())
        chance *= min(1.2, (self._all.right + PRIOR) / (self._expected + PRIOR))
        chance *= 1.0 if after_right else DOUBT
        return min(1.0, (record.right + PRIOR * chance) / (record.tried + PRIOR))

    def length(self, kind: int, chance: float, limit: int, others: int, *, right: bool | None = None) -> int:
        """How many tokens to draft, at most `limit`, while `others` sequences share the steps; 0 where none pay.

        `right` is whether what was drafted before it was.
        """
        first = self.rate(kind, self.was_right if right is None else right, chance)
        later, rows, seconds = self.rate(kind, True, chance), others + 1, self._costs.seconds
        best, chosen = GAIN * rows / seconds(rows), 0
        tokens, kept = float(rows), first
        for n in range(1, limit + 1):
            if kept < LEAST:
                break
            tokens += kept
            worth = tokens / (seconds(rows + n) + (self.overhead + n * self.per_token) / rows)
            if worth > best:
                best, chosen = worth, n
            kept *= later
        return chosen

    def observe(self, kind: int, chance: float, right: int, tried: int) -> None:
        """Of `tried` drafts that were looked at, one after the other, `right` were what came."""
        if not tried:
            return
        self._count((kind, self.was_right), int(right > 0), 1)
        if tried > 1:
            self._count((kind, True), right - 1, tried - 1)
        self._all.right = self._all.right * MEMORY + right
        self._expected = self._expected * MEMORY + tried * chance
        self.was_right = right == tried

    def _count(self, state: State, right: int, tried: int) -> None:
        record = self._records.setdefault(state, AcceptanceCount())
        record.right, record.tried = record.right * MEMORY + right, record.tried * MEMORY + tried

    def took(self, *, overhead: float, drafting: float, drafted: int) -> None:
        """The seconds of a round besides its step, and those of its draft."""
        overhead = min(max(0.0, overhead), max(HICCUP, 2 * self.overhead))
        self.overhead += WEIGHT * (overhead - self.overhead)
        if drafted:
            self.per_token += WEIGHT * (drafting / drafted - self.per_token)
