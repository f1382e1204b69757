"""Rows that end the process that computes them: they are found, and left out, instead of ending every later run.

A note beside the journal says up to which line rows were read. A process that ends in good order, with an error or by
ctrl-C, says so in it; one that is killed, or dies of a row, cannot. After TRIES such deaths the rows that were read by
then are computed one at a time, each named in the note before; one of which MAX_DEATHS processes died is a failure.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from headway.base.dataclass import dataclass
from headway.jobs.records import Record
from headway.jobs.run import RowResult, Worker

TRIES = 2  # of all rows at once: a process may have been killed for another reason
MAX_DEATHS = 2  # of processes that computed nothing but one row, after which it fails
NOTE_BYTES = 128  # so that a note is replaced by one write
ENDED = "the process has ended {} times while it computed nothing else; it is left out"


@dataclass(eq=False)
class DeathNote:
    """What is known of the processes that computed a job: how many died, and of which rows they may have died."""

    job: int = 0  # a checksum of what identifies the job
    running: bool = False
    read: int = 0  # the last line that the process has read
    deaths: int = 0  # of processes before it
    suspects: int = 0  # the last line that one of those had read
    alone: int = 0  # the line that is computed alone
    times: int = 0  # how many processes have begun to

    @classmethod
    def of(cls, path: Path, job: int) -> DeathNote:
        """The note of the last process, or a new one if there is none of this job."""
        try:
            note = cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return cls(job)
        return note if note.job == job else cls(job)

    def begin(self, line: int) -> None:
        """A process begins at this line: deaths before which all suspects were computed since are of no account."""
        if line > self.suspects:
            self.deaths = 0
        if self.running:
            self.deaths, self.suspects = self.deaths + 1, max(self.suspects, self.read)
        self.running = True


class CarefulWorker:
    """A worker whose process may die of its rows. `left_out` makes the failure of a row with this reason."""

    def __init__(self, worker: Worker, path: Path, job: Any, left_out: Callable[[Record, str], RowResult]) -> None:
        self._worker, self._path, self._left_out = worker, path, left_out
        self._note = DeathNote.of(path, zlib.crc32(json.dumps(job, sort_keys=True).encode()))

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        note, todo = self._note, iter(todo)
        if (first := next(todo, None)) is None:
            return
        note.begin(first.line)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield from self._results(chain([first], todo))
            note.deaths = 0
        finally:
            note.running, note.times = False, max(note.times - 1, 0)  # whatever ends this, it is not that row
            self._write()
            os.close(self._file)
            if not note.deaths:
                self._path.unlink(missing_ok=True)

    def _results(self, todo: Iterator[Record]) -> Iterator[RowResult]:
        note = self._note
        for record in todo:
            if record.line > note.suspects:
                note.deaths = note.times = 0
            if note.deaths < TRIES:
                yield from self._worker.results(self._noted(chain([record], todo)))
                return
            yield from self._computed_alone(record)

    def _computed_alone(self, record: Record) -> Iterator[RowResult]:
        note = self._note
        note.alone, note.times = record.line, note.times if note.alone == record.line else 0
        if note.times >= MAX_DEATHS:
            yield self._left_out(record, ENDED.format(note.times))
            return
        note.times += 1
        self._write()
        yield from self._worker.results([record])

    def _noted(self, todo: Iterable[Record]) -> Iterator[Record]:
        """The records, each in the note before it is computed."""
        for record in todo:
            self._note.read = record.line
            self._write()
            yield record

    def _write(self) -> None:
        os.pwrite(self._file, json.dumps(vars(self._note)).encode().ljust(NOTE_BYTES), 0)
