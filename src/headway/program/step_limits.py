"""How large a step may be: rows, and milliseconds while sequences decode."""

from __future__ import annotations

from headway.base.checks import check_integer, check_number
from headway.base.errors import InvalidInput
from headway.base.system.device import AnyDevice
from headway.base.text import short_repr
from headway.runtime.scheduler.step_time import StepTime

STEP_TOKENS = 512  # rows of one step, by default
MAX_STEP_MS = 3_600_000  # an hour
CUDA_STEP_TOKENS = 2048  # on a CUDA device
CUDA_MIXED_TOKENS = (
    640  # of a step with decode rows: prompts in every step, so that none reads the weights for a few rows
)


def row_budgets(max_batch_tokens: int | None, device: AnyDevice) -> tuple[int, int]:
    """Rows of a step at most, and of one with decode rows."""
    if max_batch_tokens is not None:
        most = check_integer(max_batch_tokens, "max_batch_tokens", 1, 1 << 20)
        return most, most
    return (CUDA_STEP_TOKENS, CUDA_MIXED_TOKENS) if device.type == "cuda" else (STEP_TOKENS, STEP_TOKENS)


def step_target(step_ms: float | None, *, paced: bool) -> StepTime | None:
    """The target for steps with decode rows; `paced` is whether there is one by default."""
    if step_ms is None:
        return StepTime() if paced else None
    if not 0 < check_number(step_ms, "step_ms") <= MAX_STEP_MS:
        raise InvalidInput(f"step_ms is {short_repr(step_ms)}; it must be milliseconds above 0, at most {MAX_STEP_MS}")
    return StepTime(step_ms / 1000)
