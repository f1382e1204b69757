"""The batcher: one thread that owns the device and computes rows of all callers together.

Tickets come from any thread, already preprocessed; their rows wait by length and age (`planning`). A batch that runs
out of memory is halved and tried again; a batch that fails otherwise is halved too, so that only the row at fault
fails. Results go to the ticket's sink, which decides who postprocesses. The batcher knows nothing of users or order.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headway.base.errors import Closed, HeadwayError, PassFailed
from headway.pipelines.backends.forward import HostCopy, OnItsWay
from headway.pipelines.budget import Budget
from headway.pipelines.planning import Limits, Slot, Waiting
from headway.pipelines.task import PreparedItem, Task

LINGER = 0.001  # seconds that arrivals are waited for when the last batch was larger than what has come


class Sink(Protocol):
    """Who is told that tickets are finished, once for each batch; called on the batcher's thread."""

    def finished(self, tickets: list[Ticket]) -> None: ...


class Ticket:
    """One item on its way: `results` has a dict of arrays for each row once it is `done`, or `error` says why not."""

    __slots__ = ("done", "error", "item", "left", "mark", "options", "prepared", "results", "sink")

    def __init__(self, item: Any, options: Any, sink: Sink, mark: Any = None) -> None:
        self.item, self.options, self.sink, self.mark = item, options, sink, mark
        self.prepared: PreparedItem | None = None
        self.results: list[Any] = []
        self.left = 0
        self.error: BaseException | None = None
        self.done = False

    def ready(self, prepared: PreparedItem) -> None:
        """Preprocessing is over."""
        self.prepared = prepared
        self.left = len(prepared.rows)
        self.results = [None] * self.left

    def fail(self, error: BaseException) -> None:
        self.error, self.done = error, True


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """A batch on the device: its rows, its answer on the way, and what the budget wants to know of it."""

    slots: list[Slot]
    copy: OnItsWay
    size: int
    budget: int  # tokens that it might have had
    began: float


class Batcher:
    """Start it by adding work; `close` ends the thread."""

    def __init__(self, task: Task, budget: Budget, *, padded: bool, depth: int) -> None:
        """`padded` says whether rows are padded to one length; `depth` batches may follow the running one."""
        self._task, self.budget, self._padded, self._depth = task, budget, padded, depth
        self._wake = threading.Condition()
        self._arrived: deque[Sequence[Ticket]] = deque()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lines: dict[Hashable, Waiting] = {}
        self._options: dict[Hashable, Any] = {}
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._last_rows = 0
        self._landed = 0.0
        self.batches = self.rows = self.tokens = self.real_tokens = self.halvings = 0

    # -- from any thread -----------------------------------------------------------------------------------------------

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Compute these tickets, all of them prepared; sinks are told."""
        with self._wake:
            self._check_open()
            self._arrived.append(tickets)
            self._wake.notify()

    def call(self, job: Callable[[], Any]) -> Any:
        """What `job` returns when it has the device to itself."""
        future: Future[Any] = Future()
        with self._wake:
            self._check_open()
            self._jobs.append((job, future))
            self._wake.notify()
        return future.result()

    def close(self) -> None:
        """End the thread after its running batch; what waits fails with Closed."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this pipeline is closed; make a new one")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headway-batcher", daemon=True)
            self._thread.start()

    # -- on the batcher's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        flying: deque[Flight] = deque()
        while self._take_in(block=not flying):
            self._turn(flying)
        while flying:
            self._land(flying.popleft())
        self._abandon()

    def _turn(self, flying: deque[Flight]) -> None:
        """Start one batch and finish those that are due. Nothing of it is held when this returns."""
        slots, options = self._next()
        if slots:
            flying.extend(self._launch(slots, options))
        while flying and (len(flying) > self._depth or not slots):
            self._land(flying.popleft())

    def _take_in(self, *, block: bool) -> bool:
        """Put arrivals in line and run jobs; False when closed. Waits for something to do if `block`."""
        with self._wake:
            while block and not (self._arrived or self._jobs or self._closed or any(self._lines.values())):
                self._wake.wait()
                if self._arrived and sum(map(len, self._arrived)) < self._last_rows:
                    self._wake.wait_for(self._enough, LINGER)
            arrived, jobs = list(self._arrived), list(self._jobs)
            self._arrived.clear()
            self._jobs.clear()
            closed = self._closed
        for tickets in arrived:
            self._line_up(tickets)
        for job, future in jobs:
            _settle(future, job)
        return not closed

    def _enough(self) -> bool:
        return self._closed or sum(map(len, self._arrived)) >= self._last_rows

    def _line_up(self, tickets: Sequence[Ticket]) -> None:
        slots: dict[Hashable, list[Slot]] = {}
        options: Any = slots  # of no ticket
        line: list[Slot] = []
        for ticket in tickets:
            assert ticket.prepared is not None
            if not ticket.left:
                ticket.done = True
                ticket.sink.finished([ticket])
                continue
            if ticket.options is not options:  # those of a stream are the same object
                options = ticket.options
                key = self._task.batch_key(options)
                self._options.setdefault(key, options)
                line = slots.setdefault(key, [])
            for place, row in enumerate(ticket.prepared.rows):
                line.append(Slot(row, ticket, place, next(self._serial)))
        for key, line in slots.items():
            self._lines.setdefault(key, Waiting()).add(line)

    def _next(self) -> tuple[list[Slot], Any]:
        """The next batch: of the key whose oldest row is oldest."""
        while busy := [key for key, line in self._lines.items() if len(line)]:
            key = min(busy, key=lambda k: self._lines[k].oldest)
            limits = Limits(self.budget.tokens, self.budget.rows, self._padded)
            if slots := [slot for slot in self._lines[key].take(limits) if slot.ticket.error is None]:
                return slots, self._options[key]
        self._lines.clear()  # keys of calls that are over must not pile up
        self._options.clear()
        return [], None

    def _launch(self, slots: list[Slot], options: Any) -> list[Flight]:
        """Start the batch on the device; halves of it where it is too large or fails."""
        began = time.perf_counter()
        real = sum(slot.length for slot in slots)
        size = max(slot.length for slot in slots) * len(slots) if self._padded else real
        try:
            batch = self._task.assemble([slot.row for slot in slots])
            with self._task.loaded.run.context():
                answer = self._task.forward(batch, options)
                copy = answer if isinstance(answer, OnItsWay) else HostCopy(answer)
        except Exception as error:  # whatever a model raises belongs to its rows, not to this thread
            return self._halved(slots, options, size, error)
        self.batches += 1
        self.rows += len(slots)
        self.tokens += size
        self.real_tokens += real
        self._last_rows = len(slots)
        return [Flight(slots, copy, size, self.budget.tokens, began)]

    def _halved(self, slots: list[Slot], options: Any, size: int, error: Exception) -> list[Flight]:
        short = out_of_memory(error)
        if short and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(slots) == 1:
            ticket = slots[0].ticket
            if short:
                reason = f"a row of {slots[0].length} does not fit into memory by itself ({_line(error)})"
                ticket.fail(PassFailed(reason))
            else:
                ticket.fail(error if isinstance(error, HeadwayError) else _failed(error))
            ticket.sink.finished([ticket])
            return []
        if short:
            self.halvings += 1
            self.budget.shrink(size)
        middle = len(slots) // 2
        halves = (half for half in (slots[:middle], slots[middle:]))
        return [done for half in halves for done in self._launch(half, options)]

    def _land(self, flight: Flight) -> None:
        """Bring a batch's results to the host and to whoever waits for them."""
        slots = flight.slots
        try:
            arrays = flight.copy.wait()
        except Exception as error:  # a device that failed while computing
            self._fail(slots, _failed(error))
            return
        now = time.perf_counter()
        # of two batches on the device the second began to count when the first was done
        self.budget.record(flight.size, now - max(flight.began, self._landed), flight.budget)
        self._landed = now
        sinks: dict[Sink, list[Ticket]] = {}
        names = list(arrays.items())
        for i, slot in enumerate(slots):
            ticket = slot.ticket
            ticket.results[slot.place] = {name: array[i] for name, array in names}
            ticket.left -= 1
            if ticket.left == 0 and not ticket.done:
                ticket.done = True
                sinks.setdefault(ticket.sink, []).append(ticket)
        for sink, tickets in sinks.items():
            sink.finished(tickets)

    def _fail(self, slots: Sequence[Slot], error: BaseException) -> None:
        sinks: dict[Sink, list[Ticket]] = {}
        for slot in slots:
            if not slot.ticket.done:
                slot.ticket.fail(error)
                sinks.setdefault(slot.ticket.sink, []).append(slot.ticket)
        for sink, tickets in sinks.items():
            sink.finished(tickets)

    def _abandon(self) -> None:
        closed = Closed("the pipeline was closed while this item waited")
        for line in self._lines.values():
            while len(line):
                self._fail(line.take(Limits(1 << 62, 1 << 62, False)), closed)
        self._lines.clear()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("not enough memory", "can't allocate memory", "out of memory")
    )


def _settle(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # handed to whoever waits
        future.set_exception(error)


def _failed(error: BaseException) -> PassFailed:
    failed = PassFailed(f"the model failed on this item: {_line(error)}")
    failed.__cause__ = error
    return failed


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
