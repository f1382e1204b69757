"""`headway bench overhead`: what the engine itself costs, measured with a device that computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

from headway.base.errors import InvalidInput
from headway.base.system.machine import read_machine
from headway.bench.overhead import STEPS, WARM_STEPS, measure_overhead
from headway.cli.flags.declare import Option
from headway.cli.flags.shared import Json
from headway.cli.terminal.render import emit_json, show_table

ROWS_LIMIT = 512  # rows that one step computes


def overhead(
    rows: Annotated[str, Option("--rows", metavar="N,…", help="Programs that run concurrently.")] = "1,8,64",
    json: Json = False,
) -> None:
    """The engine's own time per step: from the end of one batch on the device to the start of the next.

    Generating programs, one per row, run on a stand-in for the device that sleeps; the model computes nothing.

    The allowance is 500 µs per step and 30 µs per row.
    """
    counts = parse_row_counts(rows)
    with _progress(len(counts)) as tick:
        results = [measure_overhead(count, lambda step, count=count: tick(count, step)) for count in counts]
    if json:
        emit_json({"machine": asdict(read_machine()), "results": [result.to_json() for result in results]})
        return
    show_table(
        ("rows", "median µs", "p95 µs", "µs per row", "allowed µs", "within"),
        [
            (
                str(one.rows),
                f"{one.median:.0f}",
                f"{one.p95:.0f}",
                f"{one.median / one.rows:.1f}",
                f"{one.allowance:.0f}",
                "yes" if one.within else "no",
            )
            for one in results
        ],
        title=f"the engine's own time per step, over {STEPS} steps",
        numbers=range(5),
    )


def parse_row_counts(text: str) -> list[int]:
    """The integers of a list like 1,8,64."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isdecimal() and 1 <= int(part) <= ROWS_LIMIT):
            raise InvalidInput(f"--rows has {part!r}; it must be integers in [1, {ROWS_LIMIT}], separated by commas")
    return [int(part) for part in parts]


@contextmanager
def _progress(counts: int) -> Iterator[Callable[[int, int], None]]:
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
    started: set[int] = set()

    def line(rows: int, step: int) -> None:
        if rows not in started:
            started.add(rows)
            print(f"{rows} rows, {len(started)} of {counts}", file=sys.stderr, flush=True)

    yield line
