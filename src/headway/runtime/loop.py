"""The loop: programs submit passes from any thread, one worker thread steps the device, futures come back.

One lock guards all bookkeeping (tables, allocator, queue) and is held only for pure work. The worker owns the device
and sees frozen batches.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from headway.base.errors import Closed, DeadlineExceeded, HeadwayError, OutOfPages, PassFailed, TokenBudgetExceeded
from headway.base.events import StepEvent
from headway.base.samplers import Sampling
from headway.kv.allocator import Allocator, Edit
from headway.kv.table import Log, PageTable
from headway.runtime.batch import Batch, Chunk, needed_pages, pack
from headway.runtime.passes import Pass, PassResult, PassStats
from headway.runtime.readout import failure
from headway.runtime.runner import Runner, SegmentResult
from headway.runtime.scheduler import Job, ordered
from headway.runtime.supply import Start, Supply

GATHER = 0.02  # seconds at most to wait for programs to come back after a step, and never longer than the step took
GATHER_SHARE = 0.1  # of the step's own time: when nobody comes back for so long, the rest are busy with something else


@dataclass
class Counters:
    """What the loop has done so far."""

    steps: int = 0
    passes: int = 0
    tokens: int = 0
    batch_passes: int = 0
    pages_trimmed: int = 0


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
        self.counters = Counters()
        self.supply = Supply(allocator)
        self.listeners: list[Callable[[StepEvent], None]] = []
        self._changed = threading.Condition(self.lock)
        self._runner, self._allocator, self._budget, self._trim = runner, allocator, budget, trim
        self._positions = positions  # whether the runner looks at the position ids of slots
        self._queue: list[Job] = []
        self._orders = itertools.count()
        self._released: deque[PageTable] = deque()  # a finalizer only appends here
        self._calls: deque[Callable[[], None]] = deque()  # work for the device that is no pass
        self._outbox: list[tuple[Job, PassResult | HeadwayError]] = []  # the worker's own
        self._turn: list[Job] = []  # what the running step computes
        self._window, self._gap, self._returning = 0.0, 0.0, 0
        self._closing = self._paused = False
        self._died: BaseException | None = None
        self._on_start = on_start
        # Waking an event loop hands the interpreter over to it, so a second thread does it while the device computes.
        self._notes: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
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
            self._queue.append(job)
            self._changed.notify_all()
        job.future.add_done_callback(lambda future: self.abandon(job) if future.cancelled() else None)
        return job

    def _check_size(self, table: PageTable, base: int, tokens: int) -> None:
        gone = sum(p is None for p in table.pages)
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
            raise _late()

    def abandon(self, job: Job, error: HeadwayError | None = None) -> None:
        """Nobody wants this pass any more: it leaves the queue now, and what it did is undone.

        Whoever still waits for it gets the error; without one it counts as cancelled.
        """
        with self.lock:
            if job.then is not None and (job in self._queue or job.before is not None):
                self.abandon(job.then, error)
            if job in self._queue:
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
            job.future.cancel()
        else:
            with suppress(InvalidStateError):  # it has an answer already
                job.future.set_exception(error)
        _wake_all([job])

    def last_job(self, table: PageTable) -> Job | None:
        """The latest pass of this table that is queued or running."""
        return next((job for job in reversed(self._queue) if job.table is table), None)

    def busy(self, table: PageTable) -> bool:
        """Whether a pass of this table is queued or running."""
        return self.last_job(table) is not None

    def jobs(self) -> list[Job]:
        """Passes that are queued or running. The caller holds the lock."""
        return list(self._queue)

    def release_later(self, table: PageTable) -> None:
        """Give a table's pages back soon; safe in a finalizer."""
        self._released.append(table)

    def drain(self) -> None:
        """Give back what finalizers left. The caller holds the lock."""
        while self._released:
            table = self._released.popleft()
            for job in [j for j in self._queue if j.table is table]:
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

    def check_open(self) -> None:
        if self._died is not None:
            raise Closed(f"the engine's worker stopped after an internal error: {self._died!r}") from self._died
        if self._closing:
            raise Closed("the engine is closed; create a new one")

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
            self._notes.put(None)

    def _rest(self) -> None:
        with self.lock:
            while self._paused and not self._closing:
                self._changed.wait()

    @contextmanager
    def by_hand(self) -> Iterator[Callable[[], None]]:
        """For tests: the worker rests, and each call of what this yields takes one step, if there is work."""

        def step() -> None:
            with self.lock:
                idle = not (self._queue or self._calls)
            if not idle:
                self._step()
            self._hand_out()

        with self.lock:
            self._paused = True
        self.call(lambda: None)  # the worker is past whatever it was doing
        try:
            yield step
        finally:
            with self.lock:
                self._paused = False
                self._changed.notify_all()

    def _notify(self) -> None:
        while (jobs := self._notes.get()) is not None:
            _wake_all(jobs)

    def _step(self) -> bool:
        """One turn: wait for work, form a batch, tell the programs of the last one, run it. False when it is to end.

        The results of a step are handed out only when the next batch is formed: passes that were queued ahead keep the
        device busy while programs think.
        """
        with self.lock:
            if not self._ready():
                self._hand_out()
                self._wait()
            if self._closing and not self._calls:
                self._hand_out()
                return False
            calls = list(self._calls)
            self._calls.clear()
            turn = self._form()
            self._turn = [job for job, _ in turn]
            edits, batch = self._allocator.take_edits(), self._pack([chunk for _, chunk in turn])
        self._hand_out()
        start = time.perf_counter()
        if edits:  # by themselves: a pass that fails must not take other contexts' pages with it
            self._runner.execute(self._pack([], edits))
        results = self._execute(batch, turn) if turn else []
        for call in calls:
            call()
        seconds = time.perf_counter() - start
        with self.lock:
            self._apply(turn, results, batch)
            self._window, self._gap = start + seconds + min(GATHER, seconds), min(GATHER, seconds * GATHER_SHARE)
            self._returning = len(self._outbox)
            if self.listeners and turn:
                event = self._event(turn, batch, seconds)
                for listener in self.listeners:
                    listener(event)
        return True

    def _pack(self, chunks: list[Chunk], edits: tuple[Edit, ...] = ()) -> Batch:
        return pack(chunks, edits, positions=self._positions)

    def _ready(self) -> bool:
        """Whether a batch can be formed without the programs that still have to hear of their results."""
        self.drain()
        queued = sum(job.after is None for job in self._queue)
        return bool(self._calls or self._closing) or (queued > 0 and queued >= self._returning)

    def _wait(self) -> None:
        """Wait for work, and a moment for programs that have just got a result to come back with their next pass.

        They are many and take turns, so the moment lasts while they keep coming; see GATHER.
        """
        while not (self._queue or self._calls or self._closing):
            self._changed.wait(timeout=1.0)
            self.drain()
        while len(self._queue) < self._returning and not (self._closing or self._calls):
            if time.perf_counter() > self._window or not self._changed.wait(self._gap):
                break
        self.drain()
        self._returning = 0

    def _hand_out(self) -> None:
        """Resolve what waits in the outbox."""
        box, self._outbox = self._outbox, []
        for job, answer in box:
            with suppress(InvalidStateError):  # cancelled meanwhile
                if isinstance(answer, BaseException):
                    job.future.set_exception(answer)
                else:
                    job.future.set_result(answer)
        if box:
            self._notes.put([job for job, _ in box])

    def _form(self) -> list[tuple[Job, Chunk]]:
        """Chunks for the next step, under the token budget, with pages for every pass that starts.

        Passes that are too late, or blocked with nobody left to make room, are refused.
        """
        self._expire()
        turn: list[tuple[Job, Chunk]] = []
        blocked: list[Job] = []
        left = self._budget
        for job in ordered(self._queue):
            if left <= 0 and job.remaining > 0:
                job.waited += 1
                continue
            outcome = Start.READY if job.started else self.supply.start(job, self._queue)
            if outcome is Start.BLOCKED:
                blocked.append(job)
            tokens = self._share(job, left, alone=not turn) if outcome is Start.READY else None
            if tokens is None:
                job.waited += 1
                continue
            job.chosen()
            left -= tokens
            turn.append((job, self._chunk(job, tokens)))
        if not turn and blocked:
            first = max(blocked, key=lambda job: job.claim)
            if self.supply.start(first, self._queue, force=True) is Start.READY:
                return self._form_alone(first)
            self._failed(first, self._no_room(first))
        return turn

    def _form_alone(self, job: Job) -> list[tuple[Job, Chunk]]:
        tokens = self._share(job, self._budget, alone=True)
        assert tokens is not None
        job.chosen()
        return [(job, self._chunk(job, tokens))]

    def _share(self, job: Job, left: int, *, alone: bool) -> int | None:
        """How many tokens of a job fit; a pass that is not causal runs whole, alone if it must."""
        if job.replay is not None:
            return min(len(job.replay.tokens) - job.replayed, left)
        rest = len(job.work.tokens) - job.done
        if not job.work.causal:
            return rest if rest <= left or alone else None
        return min(rest, left)

    def _chunk(self, job: Job, tokens: int) -> Chunk:
        table = job.table
        if job.replay is not None:
            back = iter(job.back)
            pages = [p if p is None or p > 0 else next(back) for p in table.pages]
            return Chunk(job.replay, table, pages, 0, job.replayed, job.replayed + tokens, None)
        assert job.base == table.length
        return Chunk(job.work, table, [*table.pages, *job.pages], job.base, job.done, job.done + tokens, job.kept_pages)

    def _expire(self) -> None:
        """Refuse passes whose context's time is over."""
        now = time.monotonic()
        for job in [j for j in self._queue if j.table.deadline < now]:
            if job in self._queue:
                self._failed(job, _late())

    def _no_room(self, job: Job) -> OutOfPages:
        table, pool = job.table, self._allocator
        need = -(-(job.base + len(job.work.tokens)) // table.page_size)
        return OutOfPages(
            f"this pass needs {need} pages for its context; of {pool.total} pages {pool.available} are free and "
            f"{pool.held} are held, by pinned prefixes or by the context itself; "
            "unpin some, or create the engine with a larger pages="
        )

    def _execute(self, batch: Batch, turn: list[tuple[Job, Chunk]]) -> list[SegmentResult | HeadwayError]:
        """The batch's results; when the device fails, each pass alone, so that only the guilty one fails."""
        try:
            return list(self._runner.execute(batch))
        except Exception as e:
            error = _as_error(e)
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
            return _as_error(e)

    def _apply(self, turn: list[tuple[Job, Chunk]], results: list[SegmentResult | HeadwayError], batch: Batch) -> None:
        """Fold results into jobs and tables; answers go to the outbox."""
        if turn:
            self.counters.steps += 1
            self.counters.batch_passes += len(turn)
            self.counters.tokens += len(batch.write_rows)
        for (job, chunk), result in zip(turn, results, strict=True):
            job.running = False
            if job.abandoned:
                self.supply.give_back(job)
                continue
            error = result if isinstance(result, HeadwayError) else failure(list(result.values.values()))
            if error is not None:
                self._failed(job, error)
                continue
            assert isinstance(result, SegmentResult)
            job.steps, job.batch_size = job.steps + 1, max(job.batch_size, len(turn))
            if chunk.work is job.replay:
                self._replayed(job, chunk, result)
                continue
            job.values.update(result.values)
            job.done = chunk.stop
            self.supply.computed(job)
            if job.done == len(job.work.tokens):
                self._queue.remove(job)
                self._finish(job, result)

    def _replayed(self, job: Job, chunk: Chunk, result: SegmentResult) -> None:
        """Old slots are back; when all are, the job's own tokens are next."""
        job.replayed = chunk.stop
        if job.replayed == len(chunk.work.tokens):
            if job.table.state is None:
                job.table.state = result.state
            self.supply.brought_back(job)

    def _failed(self, job: Job, error: HeadwayError) -> None:
        """A pass failed: it is undone, and with it the passes that wait for its tokens."""
        self._queue.remove(job)
        job.abandoned = True
        if not job.running:  # else what it holds is given back when its step ends
            self.supply.give_back(job)
        self._outbox.append((job, error))
        for later in [j for j in self._queue if j.after is job]:
            self._failed(later, PassFailed(f"the pass whose token this one takes failed: {error}"))

    def _finish(self, job: Job, result: SegmentResult) -> None:
        """The pass succeeded: the table advances."""
        work, table = job.work, job.table
        job.before = table.mark()
        stats = self._stats(job)
        log = Log(
            work.tokens,
            work.positions,
            work.masks or [None] * len(work.tokens),
            ahead=0 if work.causal else work.rows,
        )
        table.advance(log, job.pages, commit=work.commit)
        if work.tokens:
            table.state = result.state
        if table.token_budget is not None:
            table.token_budget -= len(work.tokens)
        self.supply.finished(job)
        job.pages, job.left = [], table.stamp
        job.on_success()
        later = job.then
        if later is not None and later.after is job:
            later.after, later.work = None, later.work.fed(job.values, table.tokens)
        self.counters.passes += 1
        self.counters.pages_trimmed += stats.pages_trimmed
        self._outbox.append((job, PassResult(tuple(job.values[i] for i in range(len(work.readouts))), stats)))

    def _stats(self, job: Job) -> PassStats:
        work, table = job.work, job.table
        pages = -(-(table.length + len(work.tokens)) // table.page_size)
        if job.kept_pages is None:
            used = pages - table.pages.count(None)
        else:
            used = sum(table.pages[n : n + 1] != [None] for n in job.kept_pages if n < pages)
        return PassStats(
            rows=work.rows,
            pages=used,
            pages_trimmed=pages - used,
            cache_hits=job.hits,
            batch_size=job.batch_size,
            steps=job.steps,
            seconds=time.perf_counter() - job.arrived,
            seeds=tuple(r.seed for r in work.readouts if isinstance(r.what, Sampling)),
        )

    def _event(self, turn: list[tuple[Job, Chunk]], batch: Batch, seconds: float) -> StepEvent:
        return StepEvent(
            step=self.counters.steps,
            seconds=seconds,
            passes=len(turn),
            rows=len(batch.tokens),
            queued=len(self._queue),
            pages_free=self._allocator.free,
            pages_cached=self._allocator.cached,
            pages_held=self._allocator.held,
            cache_hits=self.supply.hits,
            pages_trimmed=self.counters.pages_trimmed,
            set_asides=self.supply.set_asides,
            tokens=self.counters.tokens,
        )

    def _die(self, error: BaseException) -> None:
        with self.lock:
            self._died = error
            waiting, self._queue = [*self._turn, *self._queue], []
            calls = list(self._calls)
        stopped = Closed(f"the engine's worker stopped after an internal error: {error!r}")
        self._outbox += [(job, stopped) for job in waiting]
        self._hand_out()
        for call in calls:
            call()


def _wake_all(jobs: list[Job]) -> None:
    """Everyone who awaits one of these jobs goes on, with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        for loop in {loop for loop, _ in job.waiters}:
            by_loop.setdefault(loop, []).append(job)
    for loop, there in by_loop.items():
        with suppress(RuntimeError):  # that loop was closed, and nobody waits there any more
            loop.call_soon_threadsafe(_wake, loop, there)


def _wake(loop: asyncio.AbstractEventLoop, jobs: list[Job]) -> None:
    """In the loop's own thread: everyone who waits there for these jobs goes on."""
    for job in jobs:
        for owner, waiter in job.waiters:
            if owner is loop and not waiter.done():
                waiter.set_result(None)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the context's deadline has passed; give it more time with deadline=, or create a new one")


def _as_error(error: Exception) -> HeadwayError:
    return (
        error if isinstance(error, HeadwayError) else PassFailed(f"the device failed while computing a pass: {error}")
    )
