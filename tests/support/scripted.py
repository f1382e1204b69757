"""What tests on the scripted engine need: the right results, and steps taken by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck

import headway as hw
from headway.kv.allocator import Edit
from headway.models.description import Recurrence
from headway.program.execution import Execution
from headway.runtime.batch import Batch
from headway.runtime.job import Job
from headway.runtime.runners.base import SegmentResult
from headway.testing import ScriptedRunner, scripted_model, scripted_result, stepping

V = 97
QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}  # for state machines


def plain(tokens: Sequence[int]) -> int:
    """The token that the scripted model draws greedily after these."""
    return result([*tokens], [seen(slot) for slot in range(len(tokens))]) % V


def result(tokens: Sequence[int], rows: Sequence[np.ndarray], row: int = -1, *, recurrent: bool = False) -> int:
    """What the scripted model makes of a row, where each of the first rows attended to these slots."""
    n = len(tokens)
    attend = np.zeros((n, n), bool)
    for i, slots in enumerate(rows):
        attend[i, : len(slots)] = slots
    return scripted_result(tokens, range(n), attend, row % n, recurrent=recurrent)


def seen(slot: int, window: int | None = None) -> np.ndarray:
    """Which slots the token at a slot attends to."""
    return np.arange(slot + 1) > (slot - window if window is not None else -1)


def continued(prompt: Sequence[int], count: int) -> list[int]:
    """What greedy generation adds to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(plain(tokens))
    return tokens[len(prompt) :]


def numbers(n: int, seed: int = 0) -> list[int]:
    """A prompt that shares no page with one of another seed."""
    return np.random.default_rng(seed).integers(0, V, n).tolist()


class Sticking(ScriptedRunner):
    """Fails at the next `broken` edits of pages."""

    broken = 0

    def _edit(self, edit: Edit) -> None:
        if self.broken:
            self.broken -= 1
            raise RuntimeError("stuck")
        super()._edit(edit)


class Faulty(ScriptedRunner):
    """Asks `before` about every batch that has rows; what that raises is the device's error."""

    def __init__(self, before: Callable[[Batch], None]) -> None:
        super().__init__(V, 16)
        self.before = before

    def execute(self, batch: Batch) -> list[SegmentResult]:
        if len(batch.segments):
            self.before(batch)
        return super().execute(batch)


def opened(
    runner: ScriptedRunner, *, max_positions: int = 4096, recurrence: Recurrence | None = None, **options: Any
) -> hw.Engine:
    """An engine of the scripted model on a device of one's own; the options are those of `Engine`."""
    model = scripted_model(vocab_size=runner.vocab_size, max_positions=max_positions, recurrence=recurrence)
    return hw.Engine(model, runner=runner, threads=1, page_size=runner.page_size, **options)


def faulty_engine(before: Callable[[Batch], None], **options: Any) -> hw.Engine:
    """A scripted engine whose device can fail, or be slow."""
    return opened(Faulty(before), **options)


@dataclass(eq=False)
class Hand:
    """The engine's loop, one step at a call."""

    engine: hw.Engine
    step: Callable[[], None]

    def until(self, *executions: Execution[Any], limit: int = 10_000) -> int:
        """Step until all are done; how many steps it took."""
        taken = 0
        while not all(e.done() for e in executions):
            assert taken < limit, f"not done after {limit} steps"
            self.step()
            taken += 1
        return taken

    def compute(self, context: hw.Context, tokens: Sequence[int]) -> None:
        """Have these tokens in the context."""
        execution = context.forward().input(tokens).execute()
        self.until(execution)
        execution.result(0)


@contextmanager
def by_hand(engine: hw.Engine) -> Iterator[Hand]:
    with stepping(engine) as step:
        yield Hand(engine, step)


def greedy(context: hw.Context, tokens: Sequence[int]) -> tuple[Execution[hw.Output], hw.SampleHandle]:
    """A pass over tokens that draws the next one."""
    forward = context.forward().input(tokens)
    handle = forward.sample([-1], hw.Argmax())
    return forward.execute(), handle


def check_pages(engine: hw.Engine) -> None:
    """Every page is free, cached or held by somebody known."""
    loop = engine._loop
    with engine._lock:
        loop.drain()
        tables = [t.held() for t in loop.kv_cache.tables if not t.closed]
        jobs = [[*job.pages, *job.replay_pages] for job in known_jobs(engine)]
        engine._allocator.check([*tables, *jobs, *(pin.pages for pin in loop.kv_cache.pins.values())])
        if engine._states is not None:
            own = [t.states for t in loop.kv_cache.tables if not t.closed and t.states is not None]
            engine._states.check([*own, *(job.saved for job in known_jobs(engine))])


def known_jobs(engine: hw.Engine) -> set[Job]:
    """The passes of a loop: those that wait and those on their way, though nobody may want them any more."""
    loop = engine._loop
    flying = [] if loop._in_flight is None else loop._in_flight.plan.jobs
    return {*loop.jobs(), *flying}
