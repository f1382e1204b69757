"""The batcher: one thread that owns the device and computes the rows of all callers together.

Jobs come from any thread, already preprocessed; their rows wait in a `RowQueue`. A batch that runs out of memory is
halved and retried; a batch that fails otherwise is halved too, so that only the offending row fails. Results go to the
job's sink, which decides who postprocesses. The batcher knows nothing of callers or their order.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from headway.base.dataclass import dataclass
from headway.base.errors import Closed, HeadwayError, PassFailed
from headway.pipelines.backends.torch import HostCopy, PendingResults
from headway.pipelines.row_queue import BatchLimits, RowQueue, WaitingRow
from headway.pipelines.task import PreparedItem, Task
from headway.pipelines.token_budget import TokenBudget
from headway.runtime.memory import is_out_of_memory

LINGER = 0.001  # seconds to wait for more rows when the last batch was larger than what has arrived


class ResultSink(Protocol):
    """Receives finished jobs, once per batch, on the batcher's thread."""

    def finished(self, jobs: list[ItemJob]) -> None: ...


class ItemJob:
    """One item in progress. Once `done`, `results` has a dict of arrays for each row, or `error` is set.

    `tag` is the sink's own.
    """

    __slots__ = ("done", "error", "item", "left", "options", "prepared", "results", "sink", "tag")

    def __init__(self, item: Any, options: Any, sink: ResultSink, tag: Any = None) -> None:
        self.item, self.options, self.sink, self.tag = item, options, sink, tag
        self.prepared: PreparedItem | None = None
        self.results: list[Any] = []
        self.left = 0
        self.error: BaseException | None = None
        self.done = False

    def ready(self, prepared: PreparedItem) -> None:
        """Set what preprocessing produced."""
        self.prepared = prepared
        self.left = len(prepared.rows)
        self.results = [None] * self.left

    def fail(self, error: BaseException) -> None:
        self.error, self.done = error, True


@dataclass(frozen=True, eq=False, slots=True)
class InFlightBatch:
    """A batch on the device: its rows, its results on their way to the host, and what the token budget records."""

    rows: list[WaitingRow]
    results: PendingResults
    tokens: int
    budget: int  # the token budget when it was launched
    started: float


class Batcher:
    """Starts its thread with the first job; `close` ends it."""

    def __init__(self, task: Task, budget: TokenBudget, *, padded: bool, depth: int) -> None:
        """`padded`: rows are padded to one length; `depth`: batches that may be queued after the running one."""
        self._task, self.budget, self._padded, self._depth = task, budget, padded, depth
        self._wake = threading.Condition()
        self._arrived: deque[Sequence[ItemJob]] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._queues: dict[Hashable, RowQueue] = {}
        self._options: dict[Hashable, Any] = {}
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._last_rows = 0
        self._last_finish = 0.0
        self.batches = self.rows = self.tokens = self.real_tokens = self.halvings = 0

    # -- from any thread -----------------------------------------------------------------------------------------------

    def add(self, jobs: Sequence[ItemJob]) -> None:
        """Compute these prepared jobs; their sinks receive them."""
        with self._wake:
            self._check_open()
            self._arrived.append(jobs)
            self._wake.notify()

    def call(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, called while no batch uses the device."""
        future: Future[Any] = Future()
        with self._wake:
            self._check_open()
            self._calls.append((function, future))
            self._wake.notify()
        return future.result()

    def close(self) -> None:
        """End the thread after its running batch; waiting jobs fail with Closed."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this pipeline is closed; create a new one")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headway-batcher", daemon=True)
            self._thread.start()

    # -- on the batcher's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        in_flight: deque[InFlightBatch] = deque()
        while self._receive(block=not in_flight):
            self._step(in_flight)
        while in_flight:
            self._finish(in_flight.popleft())
        self._fail_waiting()

    def _step(self, in_flight: deque[InFlightBatch]) -> None:
        """Launch one batch and finish those that are due. No reference to a batch outlives this call."""
        rows, options = self._next()
        if rows:
            in_flight.extend(self._launch(rows, options))
        while in_flight and (len(in_flight) > self._depth or not rows):
            self._finish(in_flight.popleft())

    def _receive(self, *, block: bool) -> bool:
        """Queue arrived jobs and run calls; False when closed. With `block`, wait for something to do."""
        with self._wake:
            while block and not (self._arrived or self._calls or self._closed or any(self._queues.values())):
                self._wake.wait()
                if self._arrived and sum(map(len, self._arrived)) < self._last_rows:
                    self._wake.wait_for(self._enough_arrived, LINGER)
            arrived, calls = list(self._arrived), list(self._calls)
            self._arrived.clear()
            self._calls.clear()
            closed = self._closed
        for jobs in arrived:
            self._enqueue(jobs)
        for function, future in calls:
            _resolve(future, function)
        return not closed

    def _enough_arrived(self) -> bool:
        return self._closed or sum(map(len, self._arrived)) >= self._last_rows

    def _enqueue(self, jobs: Sequence[ItemJob]) -> None:
        by_key: dict[Hashable, list[WaitingRow]] = {}
        options: Any = by_key  # no job has these options
        rows: list[WaitingRow] = []
        for job in jobs:
            assert job.prepared is not None
            if not job.left:
                job.done = True
                job.sink.finished([job])
                continue
            if job.options is not options:  # those of a stream are the same object
                options = job.options
                key = self._task.batch_key(options)
                self._options.setdefault(key, options)
                rows = by_key.setdefault(key, [])
            for index, row in enumerate(job.prepared.rows):
                rows.append(WaitingRow(row, job, index, next(self._serial)))
        for key, rows in by_key.items():
            self._queues.setdefault(key, RowQueue()).add(rows)

    def _next(self) -> tuple[list[WaitingRow], Any]:
        """The next batch and its options: from the queue with the oldest row."""
        while busy := [key for key, queue in self._queues.items() if len(queue)]:
            key = min(busy, key=lambda k: self._queues[k].oldest)
            limits = BatchLimits(self.budget.tokens, self.budget.rows, self._padded)
            if rows := [row for row in self._queues[key].take(limits) if row.job.error is None]:
                return rows, self._options[key]
        self._queues.clear()  # or the keys of finished calls would pile up
        self._options.clear()
        return [], None

    def _launch(self, rows: list[WaitingRow], options: Any) -> list[InFlightBatch]:
        """Start the batch on the device; in halves where it is too large or fails."""
        started = time.perf_counter()
        real = sum(row.length for row in rows)
        tokens = max(row.length for row in rows) * len(rows) if self._padded else real
        try:
            batch = self._task.assemble([row.row for row in rows])
            with self._task.loaded.backend.context():
                output = self._task.forward(batch, options)
                results = output if isinstance(output, PendingResults) else HostCopy(output)
        except Exception as error:  # whatever a model raises concerns its rows, not this thread
            return self._halve(rows, options, tokens, error)
        self.batches += 1
        self.rows += len(rows)
        self.tokens += tokens
        self.real_tokens += real
        self._last_rows = len(rows)
        return [InFlightBatch(rows, results, tokens, self.budget.tokens, started)]

    def _halve(self, rows: list[WaitingRow], options: Any, tokens: int, error: Exception) -> list[InFlightBatch]:
        """Retry a batch that failed in two halves; a single row fails its job."""
        no_memory = is_out_of_memory(error)
        if no_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(rows) == 1:
            job = rows[0].job
            if no_memory:
                reason = f"a row of length {rows[0].length} does not fit into memory by itself ({_one_line(error)})"
                job.fail(PassFailed(reason))
            else:
                job.fail(error if isinstance(error, HeadwayError) else _model_failed(error))
            job.sink.finished([job])
            return []
        if no_memory:
            self.halvings += 1
            self.budget.shrink(tokens)
        middle = len(rows) // 2
        return [batch for half in (rows[:middle], rows[middle:]) for batch in self._launch(half, options)]

    def _finish(self, batch: InFlightBatch) -> None:
        """Wait for a batch's results and hand them to the sinks."""
        try:
            arrays = batch.results.wait()
        except Exception as error:  # the device failed while computing
            self._fail(batch.rows, _model_failed(error))
            return
        now = time.perf_counter()
        # of two batches on the device, the second effectively started when the first finished
        self.budget.record(batch.tokens, now - max(batch.started, self._last_finish), batch.budget)
        self._last_finish = now
        sinks: dict[ResultSink, list[ItemJob]] = {}
        columns = list(arrays.items())
        for i, row in enumerate(batch.rows):
            job = row.job
            job.results[row.index] = {name: array[i] for name, array in columns}
            job.left -= 1
            if job.left == 0 and not job.done:
                job.done = True
                sinks.setdefault(job.sink, []).append(job)
        for sink, jobs in sinks.items():
            sink.finished(jobs)

    def _fail(self, rows: Sequence[WaitingRow], error: BaseException) -> None:
        sinks: dict[ResultSink, list[ItemJob]] = {}
        for row in rows:
            if not row.job.done:
                row.job.fail(error)
                sinks.setdefault(row.job.sink, []).append(row.job)
        for sink, jobs in sinks.items():
            sink.finished(jobs)

    def _fail_waiting(self) -> None:
        closed = Closed("the pipeline was closed while this item waited")
        for queue in self._queues.values():
            while len(queue):
                self._fail(queue.take(BatchLimits(1 << 62, 1 << 62, False)), closed)
        self._queues.clear()


def _resolve(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # raised where the caller waits
        future.set_exception(error)


def _model_failed(error: BaseException) -> PassFailed:
    failed = PassFailed(f"the model failed on this item: {_one_line(error)}")
    failed.__cause__ = error
    return failed


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
