"""The fleet: streaks that step together and alone, as flat arrays, with as little of Python as can be.

While nothing but streaks (streak.py) is to run, a step differs from the one before by one token a row: arrays go up by
one, and a page is added here and there. Where the device computes beside the host, the next step is set going before
the last one's tokens are known: the device has them. A row that was started in vain, because its streak has ended
meanwhile, is ignored, and what it wrote is wiped. Bookkeeping under the engine's lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.base.brle import Brle
from headway.base.errors import HeadwayError
from headway.base.samplers import Sampling
from headway.runtime.batch import Rows, joined, needed_of
from headway.runtime.passes import Followed
from headway.runtime.readout import not_a_number
from headway.runtime.runners.base import NO_TOKEN, RowRunner
from headway.runtime.scheduler.decode import AHEAD, Streak
from headway.runtime.scheduler.kv_cache import Supply
from headway.runtime.scheduler.order import Job, Queue

Masks = tuple[Brle | None, ...] | None  # as in Rows


@dataclass(frozen=True, eq=False)
class Flight:
    """A step of the fleet: whose rows, and what the device is told. With `bound` some draw under masks that follow."""

    jobs: list[Job]
    rows: Rows
    bound: bool


class Fleet:
    """Forms flights and applies what they draw."""

    def __init__(
        self,
        queue: Queue,
        supply: Supply,
        budget: int,
        runner: RowRunner | None,
        *,
        plain: bool,
        trim: bool,
    ) -> None:
        self._queue, self._supply, self._runner, self._trim = queue, supply, runner, trim
        self._most = 0 if runner is None else min(budget, runner.most_rows)
        self._plain = plain  # whether attention does not look at positions: the model has no windows
        self._jobs: list[Job] = []
        self._rows: Rows | None = None
        self._tables: list[np.ndarray] = []
        self._aloft: list[Flight] = []  # formed, and neither applied nor grounded
        self.drawn = self.pages_trimmed = 0

    def forget(self) -> None:
        """Behind an ordinary turn tables may have other pages; and who has failed is not to be held on to."""
        self._jobs, self._rows, self._tables = [], None, []

    def form(self, flying: Flight | None) -> Flight | None:
        """The next step, while `flying` is on its way; None where it takes an ordinary turn, or there is nothing."""
        ahead = _counting(flying)
        jobs = self._ready(ahead)
        if not jobs:
            return None
        at = [job.table.length + (job in ahead) for job in jobs]
        masks = _masks(jobs, at)
        if masks is not None and not all(mask is None or mask.any() for mask in masks):
            return None  # an ordinary turn refuses a row that sees nothing
        if not self._provide(jobs, at, early=flying is not None):
            return None
        same = self._rows is not None and jobs == self._jobs and at == (self._rows.slots + 1).tolist()
        rows = self._following(at, flying, masks) if same else self._gathered(jobs, at, flying, masks)
        for job in jobs:
            job.running, job.chunk, job.started = True, None, False
        self._jobs, self._rows = jobs, rows
        bound = any(_streak(job).follower is not None for job in jobs)
        self._aloft.append(Flight(jobs, rows, bound))
        return self._aloft[-1]

    def _ready(self, ahead: set[Job]) -> list[Job] | None:
        """Whose rows the next step has; None where something else is to run, too."""
        now, jobs = time.monotonic(), []
        for job in self._queue:
            streak, table = job.streak, job.table
            if streak is None or not streak.begun:
                return None
            flies = job in ahead
            if job.resting or (flies and (streak.left <= 1 or len(streak.drawn) + 1 >= AHEAD)):
                continue
            if streak.quick is None and self._runner is not None:
                streak.quick = isinstance(streak.readout.what, Sampling) and self._runner.draws(streak.readout.what)
            unfit = table.is_aside or streak.walks or not streak.quick or job.replay is not None or bool(job.keys)
            if unfit or table.deadline < now or not (self._plain or streak.in_line(table)):
                return None
            jobs.append(job)
        return jobs if len(jobs) <= self._most else None

    def _provide(self, jobs: list[Job], at: list[int], *, early: bool) -> bool:
        """Pages for rows that begin one; False where they are short, and an ordinary turn must see to it."""
        size = jobs[0].table.page_size
        new = [job for job, slot in zip(jobs, at, strict=True) if slot // size >= len(job.table.pages) + len(job.pages)]
        if not new:
            return True
        pool = self._supply.allocator
        if len(new) > pool.available or (early and not self._supply.plenty(len(new))):
            return False
        for job, page in zip(new, pool.take(len(new)), strict=True):
            job.pages.append(page)
        return True

    def _gathered(self, jobs: list[Job], at: list[int], flying: Flight | None, masks: Masks) -> Rows:
        """The rows of these jobs, put side by side anew."""
        size = jobs[0].table.page_size
        slots = np.array(at)
        self._tables = [joined(job.table.physical, job.pages) for job in jobs]
        last = np.array([table[slot // size] for table, slot in zip(self._tables, at, strict=True)])
        readouts = tuple([_streak(job).readout for job in jobs])
        place = {} if flying is None else {job: i for i, job in enumerate(flying.jobs)}
        tokens = [
            -1 - place[job] if slot > job.table.length else _streak(job).token
            for job, slot in zip(jobs, at, strict=True)
        ]
        return Rows(
            tokens=np.array(tokens),
            positions=np.array([job.table.next_position + slot - job.table.length for job, slot in zip(jobs, at)]),
            slots=slots,
            write_slots=last * size + slots % size,
            pages=np.concatenate(self._tables),
            page_ends=np.cumsum([len(table) for table in self._tables]),
            masks=masks,
            readouts=readouts,
            seeds=np.array([r.seed for r in readouts], np.uint64),
        )

    def _following(self, at: list[int], flying: Flight | None, masks: Masks) -> Rows:
        """The rows of the same jobs, one slot on."""
        rows, jobs, size = self._rows, self._jobs, self._jobs[0].table.page_size
        assert rows is not None
        slots, written = rows.slots + 1, rows.write_slots + 1
        pages, ends = rows.pages, rows.page_ends
        begun = np.flatnonzero(slots % size == 0)
        for i in begun.tolist():
            self._tables[i] = joined(jobs[i].table.physical, jobs[i].pages)
            written[i] = self._tables[i][at[i] // size] * size
        if len(begun):
            pages, ends = np.concatenate(self._tables), np.cumsum([len(table) for table in self._tables])
        if flying is None:
            tokens = np.array([_streak(job).token for job in jobs])
        else:
            tokens = -1 - np.arange(len(jobs))
        return Rows(
            tokens=tokens,
            positions=rows.positions + 1,
            slots=slots,
            write_slots=written,
            pages=pages,
            page_ends=ends,
            masks=masks,
            readouts=rows.readouts,
            seeds=rows.seeds,
        )

    # -- when it is over -------------------------------------------------------------------------------------------

    @staticmethod
    def masks(flight: Flight) -> list[Followed | None]:
        """What binds each row of a flight, now that the tokens that it computes are known."""
        return [None if job.abandoned else _streak(job).later for job in flight.jobs]

    def apply(
        self, flight: Flight, tokens: Sequence[int | HeadwayError], flying: Flight | None
    ) -> list[tuple[Job, HeadwayError]]:
        """Fold a flight's tokens in, while `flying` is on its way already. The jobs that failed, and why."""
        self._aloft.remove(flight)
        failed: list[tuple[Job, HeadwayError]] = []
        ahead = set() if flying is None else set(flying.jobs)
        masks = flight.rows.masks
        rows = zip(flight.jobs, tokens, flight.rows.slots.tolist(), strict=True)
        for i, (job, token, slot) in enumerate(rows):
            job.running = job in ahead
            streak = _streak(job)
            if job.abandoned or streak.over or slot != job.table.length:
                job.table.wipe()  # it was in vain: its step before failed, was the last, or is taken again
            elif isinstance(token, HeadwayError):
                job.table.wipe()
                failed.append((job, token))
            elif token < 0:
                streak.walks = True
                if token == NO_TOKEN:
                    job.table.wipe()
                    failed.append((job, not_a_number()))
            elif streak.stops(job):
                job.table.wipe()
            else:
                mask = None if masks is None else masks[i]
                if mask is not None and self._trim:
                    self._count(job, mask, slot)
                streak.draw(job, token, mask)
                self.drawn += 1
            if job.pages and not job.running:
                self._land(job)
        if failed:
            self.forget()
        return failed

    def _land(self, job: Job) -> None:
        """A job that is in no flight keeps no pages beside its table's."""
        self._supply.allocator.drop(job.pages)
        job.pages = []

    def ground(self, flight: Flight) -> None:
        """A flight came to nothing: its rows are taken again, in an ordinary turn.

        What a row of another flight needs that is still on its way is seen to when that one lands.
        """
        self._aloft.remove(flight)
        for job in flight.jobs:
            job.running = any(job in other.jobs for other in self._aloft)
            _streak(job).walks = True
            if not job.running:
                job.table.wipe()
                self._land(job)
        self.forget()

    def _count(self, job: Job, mask: Brle, slot: int) -> None:
        """Pages that attention left out."""
        size = job.table.page_size
        self.pages_trimmed += slot // size + 1 - len(needed_of((mask,), slot, slot + 1, size))


def _counting(flying: Flight | None) -> set[Job]:
    """The jobs of a flight whose rows count."""
    if flying is None:
        return set()
    found = zip(flying.jobs, flying.rows.slots.tolist(), strict=True)
    return {job for job, slot in found if not job.abandoned and slot == job.table.length}


def _masks(jobs: list[Job], at: list[int]) -> Masks:
    found = [_streak(job).sees(slot) for job, slot in zip(jobs, at, strict=True)]
    return None if all(mask is None for mask in found) else tuple(found)


def _streak(job: Job) -> Streak:
    assert job.streak is not None
    return job.streak
