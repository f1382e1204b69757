"""Flights on their way: the worker sets one going, has its tokens drawn, and folds in the one before.

Where the device computes beside the host, one flight is always on its way while the last one's tokens are read. Masks
follow the tokens of the flight before, so they are computed while the next is on its way already. Whatever fails is
taken again in an ordinary turn, where it shows whose fault it is. Used by the worker thread alone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from headway.base.log import log_event
from headway.kv.allocator import Edit
from headway.runtime.edits import carry_out
from headway.runtime.runners.base import RowRunner, RowStep
from headway.runtime.scheduler.decode_batch import Fleet, Flight
from headway.runtime.scheduler.plan import Turns

SWITCH = 0.0005  # seconds that a program may keep the interpreter while a flight is on its way


class Landed(NamedTuple):
    """A step that is over."""

    rows: int
    seconds: float


class Flights:
    """At most one flight is on its way between two calls. With `beside` the device computes while the host goes on."""

    def __init__(
        self,
        fleet: Fleet,
        turns: Turns,
        runner: RowRunner | None,
        lock: threading.RLock,
        edit: Callable[[tuple[Edit, ...]], None],
        *,
        beside: bool,
    ) -> None:
        self._fleet, self._turns, self._runner, self._lock = fleet, turns, runner, lock
        self._edit, self._beside = edit, beside
        self._flight: tuple[Flight, RowStep] | None = None
        self._interval: float | None = None  # Python's own, while it is SWITCH

    @property
    def flying(self) -> Flight | None:
        """The flight on its way."""
        return None if self._flight is None else self._flight[0]

    def form(self, *, alone: bool) -> Flight | None:
        """The next step, if it has nothing but streaks and the runner takes those by themselves; the lock is held.

        `alone`: only when none is on its way.
        """
        if self._runner is None or self._runner.measures or (alone and self._flight is not None):
            return None
        return self._fleet.form(self.flying)

    def fly(self, flight: Flight | None, edits: tuple[Edit, ...], *, alone: bool) -> list[Landed]:
        """Set a flight going, and fold in the one before it; and this one too, where nothing runs beside the host."""
        start, landed = time.perf_counter(), list[Landed]()
        before, self._flight = self._flight, None
        step = None if flight is None else self._started(flight, edits)
        if flight is not None and step is not None:
            late = flight.bound and before is not None  # its masks are those of tokens that are still to come
            if late or self._drawn(flight, step):
                self._flight = flight, step
            if late and before is not None:
                landed += self._landed(*before, start)
                before = None
                self._flight = (flight, step) if self._drawn(flight, step) else None
        if before is not None:
            landed += self._landed(*before, start)
        if self._flight is not None and (alone or not self._beside):
            last, self._flight = self._flight, None
            landed += self._landed(*last, start)
        self._share()
        return landed

    def _share(self) -> None:
        """The device must not wait for the worker while programs take tokens; else they may queue many passes first."""
        if (self._flight is None) == (self._interval is None):
            return
        if self._interval is None:
            self._interval = sys.getswitchinterval()
            sys.setswitchinterval(min(self._interval, SWITCH))
        else:
            sys.setswitchinterval(self._interval)
            self._interval = None

    def _started(self, flight: Flight, edits: tuple[Edit, ...]) -> RowStep | None:
        """Set the device to work on a flight; None when that failed."""
        assert self._runner is not None
        damage = carry_out(edits, self._edit) if edits else None
        if damage:
            with self._lock:
                self._turns.recover(damage)
            self._ground(flight, damage.first)
            return None
        try:
            return self._runner.begin_rows(flight.rows)
        except Exception as error:
            self._ground(flight, error)
            return None

    def _ground(self, flight: Flight, error: Exception) -> None:
        """A flight failed: its rows take an ordinary turn, where it shows whose fault it is."""
        log_event(
            "a step of streaks failed and is taken again in an ordinary turn", rows=len(flight.rows), why=f"{error}"
        )
        with self._lock:
            self._fleet.ground(flight)

    def _drawn(self, flight: Flight, step: RowStep) -> bool:
        """Have a flight's tokens drawn; False when that failed."""
        with self._lock:
            masks = self._fleet.masks(flight)
        try:
            step.draw(masks)
            return True
        except Exception as error:
            self._ground(flight, error)
            return False

    def _landed(self, flight: Flight, step: RowStep, start: float) -> list[Landed]:
        """Wait for a flight's tokens, and fold them in; nothing comes of one that failed."""
        try:
            tokens = step.tokens()
        except Exception as error:
            self._ground(flight, error)
            return []
        with self._lock:
            for job, error in self._fleet.apply(flight, tokens, self.flying):
                self._turns.fail(job, error)
            for job in flight.jobs:
                self._turns.tell(job)
            self._count(len(tokens))
        return [Landed(len(tokens), time.perf_counter() - start)]

    def _count(self, rows: int) -> None:
        counters, fleet = self._turns.counters, self._fleet
        counters.steps += 1
        counters.batch_passes += rows
        counters.tokens += rows
        counters.passes, fleet.drawn = counters.passes + fleet.drawn, 0
        counters.pages_trimmed, fleet.pages_trimmed = counters.pages_trimmed + fleet.pages_trimmed, 0
