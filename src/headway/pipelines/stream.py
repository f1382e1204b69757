"""A stream of items through the batcher: read lazily, prepared ahead, delivered in order, in constant memory.

The source is read on the caller's own thread, a bounded number of items ahead. A slow source is not read ahead at all;
any source other than a list is read ahead only once its first items have results, so that no finished result waits for
an item that has not arrived.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError, ItemFailed

if TYPE_CHECKING:
    from headway.pipelines.batcher import ItemJob

FIRST_CHUNK = 32  # items in a list's first chunk; other sources are read ahead from this size on; chunks double
LARGEST_CHUNK = 256  # items, or a sixteenth of what may be prepared ahead if that is more
SLOW = 0.005  # seconds for one item from which a source counts as slow
PATIENCE = 0.02  # seconds after which an incomplete chunk is sent
GC_THRESHOLD = 100_000  # net allocations between two young collections while a stream feeds a GPU


class Stream:
    """Items in progress, in the caller's order. A sink of the batcher."""

    def __init__(self, source: Iterable[Any], start: Callable[[list[ItemJob]], None], ahead: int, options: Any) -> None:
        """`start` prepares jobs on other threads for the batcher; at most `ahead` items are in progress."""
        self._source, self._start, self._ahead, self._options = iter(source), start, max(ahead, 1), options
        self._jobs: deque[ItemJob] = deque()
        self._changed = threading.Event()
        self._chunk = max(1, min(FIRST_CHUNK, ahead)) if isinstance(source, (list, tuple)) else 1
        self._largest = min(max(LARGEST_CHUNK, ahead // 16), max(ahead // 2, 1))
        self._slow = self._exhausted = False
        self._read = 0
        self._source_error: BaseException | None = None

    def finished(self, jobs: list[ItemJob]) -> None:
        """Wake the reader: jobs are done."""
        self._changed.set()

    def jobs(self) -> Iterator[tuple[int, ItemJob]]:
        """Finished jobs in order, with their index; then raises the error that ended the source, if any."""
        index = 0
        while True:
            self._fill()
            if not self._jobs:
                break
            job = self._jobs.popleft()
            self._wait(job)
            yield index, job
            index += 1
        if self._source_error is not None:
            raise item_failed(self._source_error, self._read) from self._source_error

    def _fill(self) -> None:
        while not self._exhausted and len(self._jobs) + self._chunk <= self._ahead:
            waits = self._slow or self._chunk < min(FIRST_CHUNK, self._largest)
            if self._jobs and (waits or (self._jobs[0].done and len(self._jobs) >= self._ahead // 2)):
                return
            self._slow = False
            self._read_chunk()

    def _read_chunk(self) -> None:
        from headway.pipelines.batcher import ItemJob

        chunk: list[ItemJob] = []
        started = before = time.perf_counter()
        while len(chunk) < self._chunk:
            try:
                item = next(self._source)
            except StopIteration:
                self._exhausted = True
                break
            except Exception as error:  # raised after the results that come before it
                self._exhausted, self._source_error = True, error
                break
            self._read += 1
            chunk.append(ItemJob(item, self._options, self))
            now = time.perf_counter()
            self._slow = now - before > SLOW
            if self._slow or now - started > PATIENCE:
                break
            before = now
        else:
            self._chunk = min(2 * self._chunk, self._largest)
        if chunk:
            self._jobs.extend(chunk)
            self._start(chunk)

    def _wait(self, job: ItemJob) -> None:
        while not job.done:
            self._changed.clear()
            if not job.done:
                self._changed.wait()


def item_failed(error: BaseException, index: int) -> HeadwayError:
    """`error` with the index of its item: of the same class if it is a HeadwayError."""
    if isinstance(error, HeadwayError):
        failed = type(error)(f"item {index}: {error}")
    else:
        failed = ItemFailed(f"item {index} could not be read: {type(error).__name__}: {error}")
    failed.index = index  # type: ignore[attr-defined]
    return failed


# -- garbage collection ------------------------------------------------------------------------------------------------

_gc_lock = threading.Lock()
_gc_streams = 0
_gc_before: tuple[int, int, int] = (0, 0, 0)


@contextmanager
def gc_relaxed() -> Iterator[None]:
    """Collect garbage less often, in all threads, until the last stream in here ends.

    An item in progress is ten small objects that live for thousands of items and are freed without the collector. So
    many survivors make Python scan everything that is loaded several times a second, which costs more than the work.
    A collector that is off or set to run less often already is left alone.
    """
    global _gc_streams, _gc_before  # noqa: PLW0603  (the collector belongs to the process)
    with _gc_lock:
        if _gc_streams == 0:
            _gc_before = gc.get_threshold()
            if 0 < _gc_before[0] < GC_THRESHOLD:
                gc.set_threshold(GC_THRESHOLD, *_gc_before[1:])
        _gc_streams += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_streams -= 1
            if _gc_streams == 0 and gc.get_threshold()[0] == GC_THRESHOLD and 0 < _gc_before[0] < GC_THRESHOLD:
                gc.set_threshold(*_gc_before)
