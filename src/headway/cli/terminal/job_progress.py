"""Progress of a job over a file: a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.cli.terminal.render import PLAIN_SECONDS, is_quiet, note
from headway.jobs.records import Record


@contextmanager
def job_progress() -> Iterator[Callable[[Record], None]]:
    """A callback for finished records: a bar on a terminal, a line now and then in a pipe."""
    if not sys.stderr.isatty() or is_quiet():
        plain = _PlainLines()
        try:
            yield plain
        finally:
            plain.end()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[lines]} lines"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}/s"),
        TimeRemainingColumn(),
    )
    done = _LineCount()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("", total=None, lines=0, rate="0")

        def show(record: Record) -> None:
            done.count += 1
            share = record.reached
            total = None if share is None else 1.0
            bars.update(bar, completed=share or 0, total=total, lines=done.count, rate=done.rate_text())

        yield show
    note(done.summary())


class _LineCount:
    """How many lines are done, and at what rate."""

    def __init__(self) -> None:
        self.began, self.count = time.monotonic(), 0
        self.first: float | None = None  # the fraction of the file that was done before this run

    def rate_text(self) -> str:
        return f"{self.count / max(time.monotonic() - self.began, 1e-9):.3g}"

    def summary(self) -> str:
        return f"{self.count} lines in {time.monotonic() - self.began:.1f} s, {self.rate_text()}/s"


class _PlainLines(_LineCount):
    """Progress as plain lines."""

    def __init__(self) -> None:
        super().__init__()
        self._next = self.began + PLAIN_SECONDS

    def __call__(self, record: Record) -> None:
        self.count += 1
        if self.first is None:
            self.first = record.reached
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + PLAIN_SECONDS
        note(f"{self.count} lines{self._share(record.reached, now)}, {self.rate_text()}/s")

    def _share(self, reached: float | None, now: float) -> str:
        if reached is None or self.first is None:
            return ""
        gone = reached - self.first
        left = f", {(now - self.began) * (1 - reached) / gone:.0f} s left" if gone > 0 else ""
        return f" ({reached:.0%}{left})"

    def end(self) -> None:
        note(self.summary())
