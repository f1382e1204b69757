"""The loop: programs submit passes from any thread, one worker thread steps the device, futures come back.

One lock guards all bookkeeping (tables, allocator, queue) and is held only for pure work. The worker owns the device
and sees frozen batches.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from headway.base.errors import Closed, HeadwayError, OutOfPages, PassFailed
from headway.base.samplers import Sampling
from headway.kv.allocator import Allocator
from headway.kv.table import Log, PageTable
from headway.runtime.batch import Batch, Chunk, needed_pages, pack
from headway.runtime.passes import Pass, PassResult, PassStats
from headway.runtime.readout import failure
from headway.runtime.runner import Runner, SegmentResult
from headway.runtime.scheduler import Job, choose


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
        on_start: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        self.counters = Counters()
        self._changed = threading.Condition(self.lock)
        self._runner, self._allocator, self._budget, self._trim = runner, allocator, budget, trim
        self._queue: list[Job] = []
        self._released: deque[PageTable] = deque()  # a finalizer only appends here
        self._calls: deque[Callable[[], None]] = deque()  # work for the device that is no pass
        self._closing = False
        self._died: BaseException | None = None
        self._on_start = on_start
        self._thread = threading.Thread(target=self._work, name="headway-worker", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------------------------

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
            need = -(-(base + len(work.tokens)) // table.page_size) - sum(p is None for p in table.pages)
            if need > self._allocator.total:
                raise OutOfPages(
                    f"this pass needs {need} pages of {table.page_size} slots; the pool has {self._allocator.total}; "
                    "shorten it, or create the engine with a larger pages="
                )
            job = Job(work, table, base, time.perf_counter(), after, on_success=on_success, on_undo=on_undo)
            if self._trim:
                job.kept_pages = needed_pages(work, base, table.page_size)
            self._queue.append(job)
            self._changed.notify_all()
        job.future.add_done_callback(lambda future: self.abandon(job) if future.cancelled() else None)
        return job

    def abandon(self, job: Job) -> None:
        """Nobody wants this pass any more: it leaves the queue now, and what it did is undone."""
        with self.lock:
            for later in [j for j in self._queue if j.after is job]:
                self.abandon(later)
            if job in self._queue:
                self._queue.remove(job)
                job.abandoned = True
                if not job.running:
                    self._give_back(job)
            elif job.before is not None and not self.busy(job.table) and not job.table.closed:
                # It succeeded a moment before it was cancelled, and nobody has built on it.
                job.table.rewind(job.before)
                job.before = None
                job.on_undo()
        job.future.cancel()

    def last_job(self, table: PageTable) -> Job | None:
        """The latest pass of this table that is queued or running."""
        return next((job for job in reversed(self._queue) if job.table is table), None)

    def busy(self, table: PageTable) -> bool:
        """Whether a pass of this table is queued or running."""
        return self.last_job(table) is not None

    def release_later(self, table: PageTable) -> None:
        """Give a table's pages back soon; safe in a finalizer."""
        self._released.append(table)

    def drain(self) -> None:
        """Give back what finalizers left. The caller holds the lock."""
        while self._released:
            table = self._released.popleft()
            for job in [j for j in self._queue if j.table is table]:
                self.abandon(job)
            table.close()

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
            raise Closed(f"the engine's worker stopped after an internal error: {self._died!r}")
        if self._closing:
            raise Closed("the engine is closed; create a new one")

    def close(self) -> None:
        """Cancel what waits, let the running step end, stop the worker."""
        with self.lock:
            self._closing = True
            for job in list(self._queue):
                self.abandon(job)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the worker ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._on_start()
            while self._step():
                pass
        except BaseException as e:  # a fault of ours: nobody may be left waiting
            self._die(e)

    def _step(self) -> bool:
        """One turn: wait for work, form a batch, run it, apply the results. False when the loop is to end."""
        with self.lock:
            while not (self._queue or self._calls or self._closing):
                self._changed.wait(timeout=1.0)
                self.drain()
            self.drain()
            if self._closing and not self._calls:
                return False
            calls = list(self._calls)
            self._calls.clear()
            turn = self._form()
            batch = pack([chunk for _, chunk in turn], self._allocator.take_edits())
        start = time.perf_counter()
        results = self._execute(batch, turn) if turn or batch.edits else []
        for call in calls:
            call()
        seconds = time.perf_counter() - start
        with self.lock:
            resolutions = self._apply(turn, results, batch, seconds)
        for resolve in resolutions:
            resolve()
        return True

    def _form(self) -> list[tuple[Job, Chunk]]:
        """Chunks for the next step, with pages for every pass that starts. A pass that finds no pages fails."""
        turn = []
        for job, tokens in choose(self._queue, self._budget):
            if not job.started:
                try:
                    job.pages = self._allocator.take(job.table.pages_for(len(job.work.tokens)))
                except OutOfPages as e:
                    for resolve in self._failed(job, e):
                        resolve()
                    continue
                job.started = True
            job.running = True
            pages = [*job.table.pages, *job.pages]
            assert job.base == job.table.length
            chunk = Chunk(job.work, job.table, pages, job.base, job.done, job.done + tokens, job.kept_pages)
            turn.append((job, chunk))
        return turn

    def _execute(self, batch: Batch, turn: list[tuple[Job, Chunk]]) -> list[SegmentResult | HeadwayError]:
        """The batch's results; when the device fails, each pass alone, so that only the guilty one fails."""
        try:
            return list(self._runner.execute(batch))
        except Exception as e:
            if len(turn) <= 1:
                return [_as_error(e) for _ in turn]
        results: list[SegmentResult | HeadwayError] = []
        for _, chunk in turn:
            with self.lock:
                alone = pack([chunk], ())
            try:
                results += self._runner.execute(alone)
            except Exception as e:
                results.append(_as_error(e))
        return results

    def _apply(
        self,
        turn: list[tuple[Job, Chunk]],
        results: list[SegmentResult | HeadwayError],
        batch: Batch,
        seconds: float,
    ) -> list[Callable[[], None]]:
        """Fold results into jobs and tables; returns what resolves the futures, to be called without the lock."""
        if turn:
            self.counters.steps += 1
            self.counters.batch_passes += len(turn)
            self.counters.tokens += len(batch.write_rows)
        resolutions = []
        for (job, chunk), result in zip(turn, results, strict=True):
            job.running = False
            if job.abandoned:
                self._give_back(job)
                continue
            error = result if isinstance(result, HeadwayError) else failure(list(result.values.values()))
            if error is not None:
                resolutions += self._failed(job, error)
                continue
            assert isinstance(result, SegmentResult)
            job.values.update(result.values)
            job.done, job.steps = chunk.stop, job.steps + 1
            job.batch_size = max(job.batch_size, len(turn))
            if job.remaining == 0:
                self._queue.remove(job)
                resolutions.append(self._finish(job, result))
        return resolutions

    def _failed(self, job: Job, error: HeadwayError) -> list[Callable[[], None]]:
        """A pass failed: it is undone, and with it the passes that wait for its tokens."""
        self._queue.remove(job)
        self._give_back(job)
        resolutions = [_failing(job, error)]
        for later in [j for j in self._queue if j.after is job]:
            resolutions += self._failed(later, PassFailed(f"the pass whose token this one takes failed: {error}"))
        return resolutions

    def _finish(self, job: Job, result: SegmentResult) -> Callable[[], None]:
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
        if result.state is not None:
            table.state = result.state
        job.pages = []
        job.on_success()
        for later in self._queue:
            if later.after is job:
                later.after, later.work = None, later.work.fed(job.values)
        self.counters.passes += 1
        self.counters.pages_trimmed += stats.pages_trimmed
        answer = PassResult(tuple(job.values[i] for i in range(len(work.readouts))), stats)

        def resolve() -> None:
            with suppress(InvalidStateError):  # cancelled meanwhile
                job.future.set_result(answer)

        return resolve

    def _stats(self, job: Job) -> PassStats:
        work, table = job.work, job.table
        pages = [*table.pages, *job.pages][: -(-(table.length + len(work.tokens)) // table.page_size)]
        live = [n for n, page in enumerate(pages) if page is not None]
        used = live if job.kept_pages is None else [n for n in live if n in job.kept_pages]
        return PassStats(
            rows=work.rows,
            pages=len(used),
            pages_trimmed=len(pages) - len(used),
            cache_hits=0,
            batch_size=job.batch_size,
            steps=job.steps,
            seconds=time.perf_counter() - job.arrived,
            seeds=tuple(r.seed for r in work.readouts if isinstance(r.what, Sampling)),
        )

    def _give_back(self, job: Job) -> None:
        self._allocator.drop(job.pages)
        job.pages = []

    def _die(self, error: BaseException) -> None:
        with self.lock:
            self._died = error
            waiting, self._queue = self._queue, []
            calls = list(self._calls)
        for job in waiting:
            _fail(job, Closed(f"the engine's worker stopped after an internal error: {error!r}"))
        for call in calls:
            call()


def _as_error(error: Exception) -> HeadwayError:
    return (
        error if isinstance(error, HeadwayError) else PassFailed(f"the device failed while computing a pass: {error}")
    )


def _failing(job: Job, error: BaseException) -> Callable[[], None]:
    return lambda: _fail(job, error)


def _fail(job: Job, error: BaseException) -> None:
    with suppress(InvalidStateError):  # cancelled meanwhile
        job.future.set_exception(error)
