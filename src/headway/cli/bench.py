"""`headway bench`: what the engine itself costs, measured with a device that computes nothing."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.base.errors import InvalidInput
from headway.base.machine import read_machine
from headway.cli import bench_serve, bench_speed
from headway.cli.options import Json
from headway.cli.render import emit_json, show_table

if TYPE_CHECKING:
    from headway.base.samplers import Sampling
    from headway.kv.allocator import Edit
    from headway.runtime.batch import Batch
    from headway.runtime.passes import DecodeMask
    from headway.runtime.runners.base import InFlight, Runner, StepResult

STEPS = 120  # measured for each number of rows
WARM_STEPS = 10  # before that, while everything is first touched
LENGTH = WARM_STEPS + STEPS + 20  # tokens of each program, so that all of them run all that time
STEP_ALLOWANCE, ROW_ALLOWANCE = 500.0, 30.0  # µs
DEVICE_STEP, DEVICE_ROW = 0.02, 0.0005  # seconds a step of the stand-in takes: long enough for programs to be done
ROWS_LIMIT = 512  # what one step computes
VOCAB, PAGE = 97, 16

app = typer.Typer(
    help="Measure speed here: decoding, prompts, batches, start-up, a server, and what the engine itself costs."
)
bench_speed.register(app)
app.command("serve")(bench_serve.serve)


@dataclass(frozen=True)
class Overhead:
    """The engine's own time a step, in µs, with this many rows."""

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


@app.callback()
def bench() -> None:
    """Measure speed here: decoding, prompts, batches, start-up, a server, and what the engine itself costs."""


@app.command("overhead")
def overhead(
    rows: Annotated[str, typer.Option("--rows", metavar="N,…", help="Programs that run at a time.")] = "1,8,64",
    json: Json = False,
) -> None:
    """The engine's own time a step: from the end of one batch on the device to the start of the next.

    Programs that generate, one for each row, on a stand-in for the device that sleeps; the model computes nothing.

    The allowance is 500 µs a step and 30 µs a row.
    """
    sizes = row_counts(rows)
    with _progress(len(sizes)) as tick:
        found = [measure(size, lambda step, size=size: tick(size, step)) for size in sizes]
    if json:
        emit_json({"machine": asdict(read_machine()), "results": [one.to_json() for one in found]})
        return
    show_table(
        ("rows", "median µs", "p95 µs", "µs a row", "allowed µs", "within"),
        [
            (
                str(one.rows),
                f"{one.median:.0f}",
                f"{one.p95:.0f}",
                f"{one.median / one.rows:.1f}",
                f"{one.allowance:.0f}",
                "yes" if one.within else "no",
            )
            for one in found
        ],
        title=f"the engine's own time a step, over {STEPS} steps",
        numbers=range(5),
    )


def row_counts(text: str) -> list[int]:
    """The numbers of a list like 1,8,64."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isdecimal() and 1 <= int(part) <= ROWS_LIMIT)]
    if wrong:
        raise InvalidInput(
            f"--rows has {wrong[0]!r}; it takes whole numbers from 1 to {ROWS_LIMIT}, with commas between them"
        )
    return [int(part) for part in parts]


def measure(rows: int, tick: Callable[[int], None] = lambda step: None) -> Overhead:
    """Run `rows` generating programs and take the gaps between the device's steps."""
    from headway.base.samplers import Argmax
    from headway.program.engine import Engine
    from headway.testing import ScriptedRunner, random_model

    runner = StopWatch(ScriptedRunner(VOCAB, PAGE), rows, DEVICE_STEP + DEVICE_ROW * rows, tick)
    tiny: dict[str, Any] = {"layers": 1, "hidden_size": 2, "heads": 1, "kv_heads": 1, "head_dim": 2}
    model = random_model(vocab_size=VOCAB, intermediate_size=1, **tiny)

    async def one(engine: Engine, number: int) -> None:
        async with engine.context() as ctx:
            # Lengths differ, so that steps in which a row needs a new page are spread as they are among real programs.
            ctx.fill([number % VOCAB, *range(1, 1 + number % PAGE)])
            await ctx.generate(Argmax(), max_tokens=LENGTH).tokens()

    async def everyone(engine: Engine) -> None:
        await asyncio.gather(*(one(engine, number) for number in range(rows)))

    pages = rows * (2 + (LENGTH + PAGE) // PAGE)
    with Engine(model, runner=runner, pages=pages, page_size=PAGE, threads=1) as engine:
        engine.run(everyone)
    gaps = sorted(1e6 * gap for gap in runner.gaps[WARM_STEPS : WARM_STEPS + STEPS])
    return Overhead(rows, len(gaps), statistics.median(gaps), gaps[int(0.95 * len(gaps))])


class StopWatch:
    """A device that does what another runner does, takes a given time for it, and notes the time between its steps.

    Only steps with a pass of every program count. Edits of pages are the device's work: their time is not the engine's.
    """

    def __init__(self, runner: Runner, passes: int, seconds: float, tick: Callable[[int], None]) -> None:
        self.gaps: list[float] = []
        self._runner, self._passes, self._seconds, self._tick = runner, passes, seconds, tick
        self._ended: float | None = None

    overlaps = False
    decode_limit = ROWS_LIMIT

    def samples(self, how: Sampling) -> bool:
        return self._runner.samples(how)

    def edit(self, edits: Sequence[Edit]) -> None:
        began = time.perf_counter()
        self._runner.edit(edits)
        if self._ended is not None:
            self._ended += time.perf_counter() - began

    def begin(self, batch: Batch) -> InFlight:
        began = time.perf_counter()
        whole = batch.decode_count == self._passes and not batch.segments  # one row of every program
        if whole and self._ended is not None:
            self.gaps.append(began - self._ended)
        return TimedStep(self, self._runner.begin(batch), began, whole)

    def end(self, began: float, whole: bool) -> None:
        """The inner runner has computed a step: let it take its time."""
        time.sleep(max(0.0, began + self._seconds - time.perf_counter()))
        self._tick(len(self.gaps))
        self._ended = time.perf_counter() if whole else None


class TimedStep:
    """A step of the inner runner that takes a given time."""

    def __init__(self, watch: StopWatch, step: InFlight, began: float, whole: bool) -> None:
        self._watch, self._step, self._began, self._whole = watch, step, began, whole

    def masks(self, masks: Sequence[DecodeMask | None]) -> None:
        self._step.masks(masks)

    def result(self) -> StepResult:
        result = self._step.result()
        self._watch.end(self._began, self._whole)
        return result


@contextmanager
def _progress(sizes: int) -> Iterator[Callable[[int, int], None]]:
    """A callback for (rows, step): a bar on a terminal, a line for each number of rows in a pipe."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bars:
            tasks: dict[int, Any] = {}

            def bar(rows: int, step: int) -> None:
                if rows not in tasks:
                    tasks[rows] = bars.add_task(f"{rows} rows", total=WARM_STEPS + STEPS)
                bars.update(tasks[rows], completed=min(step, WARM_STEPS + STEPS))

            yield bar
        return
    begun: set[int] = set()

    def line(rows: int, step: int) -> None:
        if rows not in begun:
            begun.add(rows)
            print(f"{rows} rows, {len(begun)} of {sizes}", file=sys.stderr, flush=True)

    yield line
