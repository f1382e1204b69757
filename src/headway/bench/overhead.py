"""The engine's own time per step: from the end of one batch on the device to the start of the next.

Generating programs, one per row, run on a stand-in for the device that sleeps; the model computes nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass

if TYPE_CHECKING:
    from headway.base.specs.probes import Probe
    from headway.base.specs.samplers import Sampling
    from headway.kv.allocator import Edit
    from headway.models.adapters.bound import BoundAdapter
    from headway.runtime.adapters import DeviceWeights
    from headway.runtime.batch import Batch
    from headway.runtime.passes import DecodeMask
    from headway.runtime.runners.base import InFlight, Runner, StepResult

STEPS = 120  # measured for each number of rows
WARM_STEPS = 10  # before that, while everything is first touched
LENGTH = WARM_STEPS + STEPS + 20  # tokens of each program, so that all of them run all that time
STEP_ALLOWANCE, ROW_ALLOWANCE = 110.0, 10.0  # µs
DEVICE_STEP, DEVICE_ROW = 0.02, 0.0005  # seconds per step of the stand-in: long enough for programs to catch up
ROWS_LIMIT = 512  # decode rows of one step
VOCAB, PAGE = 97, 16


@dataclass(frozen=True)
class Overhead:
    """The engine's own time per step, in µs, with this many rows."""

    rows: int
    steps: int
    median: float
    p95: float

    @property
    def allowance(self) -> float:
        return STEP_ALLOWANCE + ROW_ALLOWANCE * self.rows

    @property
    def within(self) -> bool:
        return self.median <= self.allowance

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "steps": self.steps,
            "median_us": round(self.median, 1),
            "p95_us": round(self.p95, 1),
            "us_per_row": round(self.median / self.rows, 1),
            "allowance_us": self.allowance,
            "within": self.within,
        }


def measure_overhead(rows: int, tick: Callable[[int], None] = lambda step: None) -> Overhead:
    """Run `rows` generating programs and time the gaps between the device's steps."""
    from headway.base.specs.samplers import Argmax
    from headway.program.engine import Engine
    from headway.testing import ScriptedRunner, random_model

    runner = GapTimer(ScriptedRunner(VOCAB, PAGE), rows, DEVICE_STEP + DEVICE_ROW * rows, tick)
    tiny: dict[str, Any] = {"layers": 1, "hidden_size": 2, "heads": 1, "kv_heads": 1, "head_dim": 2}
    model = random_model(vocab_size=VOCAB, intermediate_size=1, **tiny)

    async def one(engine: Engine, number: int) -> None:
        async with engine.context() as ctx:
            # Lengths differ, so that steps in which a row needs a new page are spread as among real programs.
            ctx.fill([number % VOCAB, *range(1, 1 + number % PAGE)])
            await ctx.generate(Argmax(), max_tokens=LENGTH).tokens()

    async def everyone(engine: Engine) -> None:
        await asyncio.gather(*(one(engine, number) for number in range(rows)))

    pages = rows * (2 + (LENGTH + PAGE) // PAGE)
    with Engine(model, runner=runner, pages=pages, page_size=PAGE, threads=1) as engine:
        engine.run(everyone)
    gaps = sorted(1e6 * gap for gap in runner.gaps[WARM_STEPS : WARM_STEPS + STEPS])
    return Overhead(rows, len(gaps), statistics.median(gaps), gaps[int(0.95 * len(gaps))])


class GapTimer:
    """A runner that delegates to another, takes a fixed time for each step, and records the gaps between steps.

    Only steps with a row of every program count. Page edits are the device's work: their time is left out.
    """

    def __init__(self, runner: Runner, passes: int, seconds: float, tick: Callable[[int], None]) -> None:
        self.gaps: list[float] = []
        self._runner, self._passes, self._seconds, self._tick = runner, passes, seconds, tick
        self._ended: float | None = None

    overlaps = False
    decode_limit = ROWS_LIMIT

    def reads(self, what: Probe, how: Sampling) -> bool:
        return self._runner.reads(what, how)

    def samples(self, how: Sampling) -> bool:
        return self._runner.samples(how)

    def load_adapter(self, adapter: BoundAdapter) -> DeviceWeights:
        return self._runner.load_adapter(adapter)

    def edit(self, edits: Sequence[Edit]) -> None:
        began = time.perf_counter()
        self._runner.edit(edits)
        if self._ended is not None:
            self._ended += time.perf_counter() - began

    def begin(self, batch: Batch) -> InFlight:
        began = time.perf_counter()
        complete = batch.decode_count == self._passes and not batch.segments  # one row of every program
        if complete and self._ended is not None:
            self.gaps.append(began - self._ended)
        return TimedStep(self, self._runner.begin(batch), began, complete)

    def end(self, began: float, complete: bool) -> None:
        """The inner runner has computed a step: let it take its time."""
        time.sleep(max(0.0, began + self._seconds - time.perf_counter()))
        self._tick(len(self.gaps))
        self._ended = time.perf_counter() if complete else None


class TimedStep:
    """A step of the inner runner that takes a fixed time."""

    def __init__(self, timer: GapTimer, step: InFlight, began: float, complete: bool) -> None:
        self._timer, self._step, self._began, self._complete = timer, step, began, complete

    def masks(self, masks: Sequence[DecodeMask | None]) -> None:
        self._step.masks(masks)

    def result(self) -> StepResult:
        result = self._step.result()
        self._timer.end(self._began, self._complete)
        return result
