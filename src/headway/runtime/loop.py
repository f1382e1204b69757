"""The loop: programs submit passes from any thread, one worker thread steps the device, futures come back.

One lock guards all bookkeeping (tables, allocator, queue) and is held only for pure work. The worker owns the device
and sees frozen batches. While the device computes, the results of the step before are put together and handed out, and
programs build and queue what comes next, which is prepared as it comes; between two steps stands only what the next
batch needs of the last (see turn.py).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.base.errors import Closed, HeadwayError, OutOfPages, PassFailed, TokenBudgetExceeded
from headway.base.events import StepEvent
from headway.kv.allocator import Allocator, Edit
from headway.kv.table import PageTable
from headway.runtime.batch import Batch, Chunk, needed_pages, pack
from headway.runtime.edits import Damage, carry_out
from headway.runtime.flights import Flights
from headway.runtime.memory import step_error
from headway.runtime.passes import Pass
from headway.runtime.results import Answer, resolve, wake_all
from headway.runtime.runners.base import RowRunner, Runner, SegmentResult
from headway.runtime.scheduler.decode import Streak
from headway.runtime.scheduler.decode_batch import Fleet, Flight
from headway.runtime.scheduler.kv_cache import Supply
from headway.runtime.scheduler.order import Job, Queue
from headway.runtime.scheduler.plan import Turn, Turns, late

GATHER = 0.02  # seconds at most to wait for programs to come back after a step, and never longer than the step took
GATHER_SHARE = 0.1  # of the step's own time: when nobody comes back for so long, the rest are busy with something else


Begin = Callable[[Batch], Callable[[], list[SegmentResult]]]  # sets the device to work; what it gives waits for it


class Loop:
    """Owns the queue and the worker thread."""

    def __init__(
        self,
        runner: Runner,
        allocator: Allocator,
        *,
        budget: int,
        trim: bool,
        positions: bool = True,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = threading.RLock()
        self.supply = Supply(allocator)
        self.listeners: list[Callable[[StepEvent], None]] = []
        self._changed = threading.Condition(self.lock)
        self._runner, self._allocator, self._trim = runner, allocator, trim
        self._begin: Begin | None = getattr(runner, "begin", None)  # a runner that computes beside the host has it
        self._positions = positions  # whether the runner looks at the position ids of slots
        self._queue = Queue()
        self._turns = Turns(self._queue, self.supply, budget, trim=trim)
        rows = runner if isinstance(runner, RowRunner) else None
        self._fleet = Fleet(self._queue, self.supply, budget, rows, plain=not positions, trim=trim)
        beside = self._begin is not None
        self._flights = Flights(self._fleet, self._turns, rows, self.lock, self._do, beside=beside)
        self.counters = self._turns.counters
        self._orders = itertools.count()
        self._released: deque[PageTable] = deque()  # a finalizer only appends here
        self._calls: deque[Callable[[], None]] = deque()  # work for the device that is no pass
        self._running: list[Job] = []  # what the running step computes
        self._window, self._gap, self._returning = 0.0, 0.0, 0
        self._closing = self._paused = self._one_by_one = False
        self._asleep = False  # it waits for anything to do, not for many to come back
        self._since: float | None = None  # when the worker began what it is at
        self._died: BaseException | None = None
        self._on_start = on_start
        # Waking an event loop hands the interpreter over to it, so a second thread does it while the device computes.
        self._notes: queue.SimpleQueue[list[Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="headway-worker", daemon=True)
        self._notifier = threading.Thread(target=self._notify, name="headway-notify", daemon=True)
        self._thread.start()
        self._notifier.start()

    # -- from any thread -------------------------------------------------------------------------------------------

    def adopt(self, table: PageTable) -> PageTable:
        """Know a table, so that it can be set aside."""
        self.supply.tables.add(table)
        return table

    def submit(
        self,
        table: PageTable,
        work: Pass,
        after: Job | None = None,
        on_success: Callable[[], None] = lambda: None,
        on_undo: Callable[[], None] = lambda: None,
    ) -> Job:
        """Queue a pass. What can never fit is refused here."""
        with self.lock:
            self.check_open()
            self.drain()
            base = table.length if after is None else after.base + len(after.work.tokens)
            self._check_size(table, base, len(work.tokens))
            job = Job(work, table, base, next(self._orders), time.perf_counter(), after)
            job.on_success, job.on_undo = on_success, on_undo
            if after is not None:
                after.then = job
            if self._trim:
                job.kept_pages = needed_pages(work, base, table.page_size)
            self._queue.add(job)
            if self._running:
                self._turns.prepare(job)
            # While the worker waits for many it looks by itself: waking it for each would take longer than the pass.
            if self._asleep or len(self._queue) >= self._returning:
                self._changed.notify_all()
        return job

    def keep_going(self, job: Job, streak: Streak) -> None:
        """Have a pass repeat itself that was submitted just now. The caller has held the lock since."""
        job.streak = streak
        if job.after is None:
            streak.begin(job)

    def taken(self, job: Job) -> int | None:
        """The next token of a streak, if one is there. The caller holds the lock."""
        assert job.streak is not None
        if job.table.closed:  # what has failed before is no longer known here
            return None
        token = job.streak.take()
        if token is not None and job.streak.wake(job):
            self._changed.notify_all()
        return token

    def _check_size(self, table: PageTable, base: int, tokens: int) -> None:
        gone = table.pages.count(None) if table.has_discards else 0
        need = max(len(table.pages), -(-(base + tokens) // table.page_size)) - gone
        if need > self._allocator.total:
            raise OutOfPages(
                f"this pass needs {need} pages of {table.page_size} slots; the pool has {self._allocator.total}; "
                "shorten it, or create the engine with a larger pages="
            )
        in_flight = base - table.length
        if table.token_budget is not None and tokens > table.token_budget - in_flight:
            raise TokenBudgetExceeded(
                f"this pass has {tokens} tokens and the context may compute {table.token_budget - in_flight} more; "
                "give it a larger token_budget="
            )
        if time.monotonic() > table.deadline:
            raise late()
        if table.lost is not None:
            raise PassFailed(f"this context's pages are lost; release it and create a new one: {table.lost}")

    def abandon(self, job: Job, error: HeadwayError | None = None) -> None:
        """Nobody wants this pass any more: it leaves the queue now, and what it did is undone.

        Whoever still waits for it gets the error; without one it counts as cancelled.
        """
        with self.lock:
            if job.then is not None and (job in self._queue or job.before is not None):
                self.abandon(job.then, error)
            if job.goes_on:
                self._turns.stop(job)
            elif job in self._queue:
                self._queue.remove(job)
                job.abandoned = True
                if not job.running:
                    self.supply.give_back(job)
            elif job.before is not None and not self.busy(job.table) and job.left is job.table.stamp:
                # It succeeded a moment before it was cancelled, and nobody has built on it.
                job.table.rewind(job.before)
                job.abandoned = True
                job.on_undo()
                job.settle()
        if error is None:
            job.outcome.cancel()
        else:
            job.outcome.fail(error)
        wake_all([job])

    def last_job(self, table: PageTable) -> Job | None:
        """The latest pass of this table that is queued or running."""
        return self._queue.last(table)

    def busy(self, table: PageTable) -> bool:
        """Whether a pass of this table is queued or running."""
        return self.last_job(table) is not None

    def jobs(self) -> list[Job]:
        """Passes that are queued or running, and streaks that rest. The caller holds the lock."""
        return list(self._queue)

    def waiting(self) -> int:
        """How many passes are queued or running."""
        with self.lock:
            return sum(not job.resting for job in self._queue)

    def release_later(self, table: PageTable) -> None:
        """Give a table's pages back soon; safe in a finalizer."""
        self._released.append(table)

    def drain(self) -> None:
        """Give back what finalizers left. The caller holds the lock."""
        while self._released:
            table = self._released.popleft()
            for job in self._queue.of(table):
                self.abandon(job, Closed("the context was released while this pass was in flight"))
            table.close()
        if self.supply.pins:
            self.supply.expire_pins(time.monotonic())

    def call(self, fn: Callable[[], None]) -> None:
        """Run fn on the worker thread, after all edits noted so far, and wait for it."""
        done, error = threading.Event(), []

        def wrapped() -> None:
            try:
                fn()
            except BaseException as e:
                error.append(e)
            finally:
                done.set()

        with self.lock:
            self.check_open()
            self._calls.append(wrapped)
            self._changed.notify_all()
        done.wait()
        if error:
            raise error[0]

    @property
    def busy_since(self) -> float | None:
        """When the worker began the step that it is at, by time.monotonic; None while it waits for work.

        It takes no lock: whoever asks wants to know of a worker that may be stuck with it.
        """
        return self._since

    def check_open(self) -> None:
        if self._died is not None:
            raise Closed(f"the engine's worker stopped after an internal error: {self._died!r}") from self._died
        if self._closing:
            raise Closed("the engine is closed; create a new one")
        if not self._thread.is_alive():
            raise Closed(
                "a forked child has its parent's engine and none of the threads that run it; "
                'create the engine in the child, or start the child with "spawn"'
            )

    def close(self) -> None:
        """Cancel what waits, let the running step end, stop the worker."""
        with self.lock:
            self._closing = True
            for job in list(self._queue):
                self.abandon(job, Closed("the engine was closed while this pass was in flight"))
            self._changed.notify_all()
        for thread in (self._thread, self._notifier):
            if threading.current_thread() is not thread:
                thread.join()

    # -- the worker ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._on_start()
            while self._step():
                self._rest()
        except BaseException as e:  # a fault of ours: nobody may be left waiting
            self._die(e)
        finally:
            self._since = None
            self._notes.put(None)

    def _rest(self) -> None:
        """While somebody steps by hand: only what is to run on this thread."""
        while True:
            with self.lock:
                if not self._paused or self._closing:
                    return
                self._since, calls = None, list(self._calls)
                self._calls.clear()
                if not calls:
                    self._changed.wait()
            for call in calls:
                call()

    @contextmanager
    def by_hand(self, *, ahead: bool = False) -> Iterator[Callable[[], None]]:
        """For tests: the worker rests, and each call of what this yields takes one step, if there is work.

        With `ahead` a flight may be on its way between two steps, as it is when the worker takes them.
        """

        def step() -> None:
            with self.lock:
                idle = not (self._has_work() or self._calls or self._flights.flying)
            if not idle:
                self._step()
            self._hand_out(now=True)

        with self.lock:
            self._paused, self._one_by_one = True, not ahead
        self.call(lambda: None)  # the worker is past whatever it was doing
        try:
            yield step
        finally:
            with self.lock:
                self._paused = self._one_by_one = False
                self._changed.notify_all()

    def _notify(self) -> None:
        while (box := self._notes.get()) is not None:
            resolve(box)
            wake_all([job for job, _ in box])

    def _step(self) -> bool:
        """One turn: wait for work, form a batch, tell the programs of the last one, run it. False when it is to end.

        The results of a step are handed out only when the next batch is formed: passes that were queued ahead keep the
        device busy while programs think.
        """
        self._since = time.monotonic()
        with self.lock:
            flying = self._flights.flying
            if flying is not None:
                self.drain()
            elif not self._ready():
                self._hand_out(now=True)
                self._wait()
            if self._closing and not self._calls and flying is None:
                self._hand_out(now=True)
                return False
            flight = None if self._calls or self._closing else self._flights.form(alone=self._one_by_one)
            if flight is not None:
                self._running = flight.jobs
            edits = () if flight is None else self._allocator.take_edits()
        if flight is not None or flying is not None:
            self._fly(flight, edits)
            return True
        with self.lock:
            calls = list(self._calls)
            self._calls.clear()
            self._fleet.forget()
            turn = self._turns.form()
            self._running = [job for job, _ in turn]
            edits, batch = self._allocator.take_edits(), self._pack([chunk for _, chunk in turn])
        if self._begin is None:
            self._hand_out()
        start = time.perf_counter()
        if edits:  # by themselves: a pass that fails must not take other contexts' pages with it
            damage = carry_out(edits, self._do)
            if damage:
                turn, batch = self._spared(turn, damage)
        results = self._execute(batch, turn) if turn else []
        self._hand_out()  # unless it was done beside the device
        for call in calls:
            call()
        seconds = time.perf_counter() - start
        with self.lock:
            self._turns.apply(turn, results, len(batch.write_rows))
            self._running = []
            self._window, self._gap = start + seconds + min(GATHER, seconds), min(GATHER, seconds * GATHER_SHARE)
            self._returning = sum(job.streak is None for job, _ in self._turns.outbox)
            if self.listeners and turn:
                self._heard(len(turn), len(batch.tokens), seconds)
        return True

    def _fly(self, flight: Flight | None, edits: tuple[Edit, ...]) -> None:
        """A step of streaks alone."""
        if self._begin is None:
            self._hand_out()
        landed = self._flights.fly(flight, edits, alone=self._one_by_one)
        with self.lock:
            flying = self._flights.flying
            self._running = [] if flying is None else flying.jobs
            self._returning = 0
            if self.listeners:
                for rows, seconds in landed:
                    self._heard(rows, rows, seconds)
        if self._begin is not None:
            self._hand_out()

    def _do(self, edits: tuple[Edit, ...]) -> None:
        self._runner.execute(self._pack([], edits))

    def _spared(self, turn: Turn, damage: Damage) -> tuple[Turn, Batch]:
        """What is left of a turn when pages of it are spoilt."""
        with self.lock:
            turn = self._turns.without(turn, damage)
            self._running = [job for job, _ in turn]
            return turn, self._pack([chunk for _, chunk in turn])

    def _pack(self, chunks: list[Chunk], edits: tuple[Edit, ...] = ()) -> Batch:
        return pack(chunks, edits, positions=self._positions)

    def _ready(self) -> bool:
        """Whether a batch can be formed without the programs that still have to hear of their results."""
        self.drain()
        queued = sum(job.after is None and not job.resting for job in self._queue)
        return bool(self._calls or self._closing) or (queued > 0 and queued >= self._returning)

    def _wait(self) -> None:
        """Wait for work, and a moment for programs that have just got a result to come back with their next pass.

        They are many and take turns, so the moment lasts while they keep coming; see GATHER.
        """
        while not (self._has_work() or self._calls or self._closing):
            self._asleep, self._since = True, None
            self._changed.wait(timeout=1.0)
            self.drain()
        self._asleep, self._since = False, time.monotonic()
        while len(self._queue) < self._returning and not (self._closing or self._calls):
            before = len(self._queue)
            if time.perf_counter() > self._window:
                break
            if not self._changed.wait(self._gap) and len(self._queue) == before:
                break
        self.drain()
        self._returning = 0

    def _has_work(self) -> bool:
        return any(not job.resting for job in self._queue)

    def _hand_out(self, *, now: bool = False) -> None:
        """Have the outbox delivered: now, or beside the step that is about to run."""
        box, self._turns.outbox = self._turns.outbox, []
        if now or self._paused:
            resolve(box)
        if box:
            self._notes.put(box)

    def _execute(self, batch: Batch, turn: Turn) -> list[SegmentResult | HeadwayError]:
        """The batch's results; when the device fails, each pass alone, so that only the guilty one fails."""
        try:
            if self._begin is None:
                return list(self._runner.execute(batch))
            # The programs wait until the device is at work: they would keep this thread from setting it to work.
            finish = self._begin(batch)
            self._hand_out()
            return list(finish())
        except Exception as e:
            error = step_error(e)
        if len(turn) == 1:
            return [error]
        return [self._alone(job, chunk, error) for job, chunk in turn]

    def _alone(self, job: Job, chunk: Chunk, error: HeadwayError) -> SegmentResult | HeadwayError:
        """One pass of a batch that failed, by itself."""
        with self.lock:
            if job.abandoned:  # its table may have changed meanwhile
                return error
            batch = self._pack([chunk])
        try:
            (result,) = self._runner.execute(batch)
            return result
        except Exception as e:
            return step_error(e)

    def _heard(self, passes: int, rows: int, seconds: float) -> None:
        """Tell the listeners of a step."""
        event = self._event(passes, rows, seconds)
        for listener in self.listeners:
            listener(event)

    def _event(self, passes: int, rows: int, seconds: float) -> StepEvent:
        return StepEvent(
            step=self.counters.steps,
            seconds=seconds,
            passes=passes,
            rows=rows,
            queued=self.waiting(),
            pages_free=self._allocator.free,
            pages_cached=self._allocator.cached,
            pages_held=self._allocator.held,
            cache_hits=self.supply.hits,
            pages_trimmed=self.counters.pages_trimmed,
            preemptions=self.supply.set_asides,
            tokens=self.counters.tokens,
        )

    def _die(self, error: BaseException) -> None:
        with self.lock:
            self._died = error
            waiting = {*self._running, *self._queue}
            for job in list(self._queue):
                self._queue.remove(job)
            calls = list(self._calls)
        stopped = Closed(f"the engine's worker stopped after an internal error: {error!r}")
        self._turns.outbox += [(job, stopped) for job in waiting]
        self._hand_out(now=True)
        for call in calls:
            call()
