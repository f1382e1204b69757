"""A step in flight: its plan, what the runner has begun, and since when."""

from __future__ import annotations

from headway.base.dataclass import dataclass
from headway.runtime.runners.base import InFlight, StepResult
from headway.runtime.scheduler.step_plan import StepPlan


@dataclass(eq=False)
class Started:
    """A step in flight."""

    plan: StepPlan
    step: InFlight
    began: float

    @property
    def has_failed(self) -> bool:
        """Whether it could not begin, or its rows could not be sampled."""
        return isinstance(self.step, Failed)


class Failed:
    """A step that could not begin, or whose rows could not be sampled."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def masks(self, masks: object) -> None:
        """There is nothing to sample."""

    def result(self) -> StepResult:
        raise self._error
