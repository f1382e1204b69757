"""Events of the engine, as data: one per step."""

from __future__ import annotations

from headway.base.dataclass import dataclass


@dataclass(frozen=True)
class StepEvent:
    """One step of the loop, and the engine's state after it; the last five counts are totals."""

    step: int
    seconds: float
    passes: int
    rows: int
    queued: int
    pages_free: int
    pages_cached: int
    pages_held: int
    cache_hits: int
    pages_trimmed: int
    preemptions: int
    tokens: int
