"""What generations leave behind: a finished sequence, and what speculation has come to. Plain values."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Generic

from headway.base.dataclass import dataclass
from headway.base.specs.probes import Value_co


@dataclass(frozen=True)
class Continuation(Generic[Value_co]):
    """One finished sequence: its tokens without the end token, its text, and why it ended.

    `score` is a beam's log-probability over length ** length_penalty, nan where no beams ran; `seed` is that of its
    draws, None where nothing was drawn; `probes` are a probe's values, one a step. A model without a tokenizer has no
    text: it is "" then.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    score: float = math.nan
    seed: int | None = None
    probes: tuple[Value_co, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class SpeculationStats:
    """Rounds of a generation, the drafts that they computed, and those of them that were kept."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that were kept; 0 before the first."""
        return self.accepted / self.drafted if self.drafted else 0.0
