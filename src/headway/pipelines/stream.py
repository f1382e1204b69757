"""A stream of items through the batcher: read lazily, prepared ahead, delivered in order, in constant memory.

The source is read on the caller's own thread, a bounded number of items ahead. A source that is slow is not read ahead
at all, and one that may be, anything but a list, is read ahead only once its first items have their results: no
finished result of theirs waits for an item that has not come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError, ItemFailed

if TYPE_CHECKING:
    from headway.pipelines.batcher import Ticket

FIRST = 32  # items of a list's first chunk, and of chunks from which on others are read ahead; chunks double
MOST = 256  # items of the largest chunk, or a sixteenth of what may be prepared ahead
SLOW = 0.005  # seconds that an item may take to come before its source counts as slow
PATIENCE = 0.02  # seconds after which a chunk is sent as it is


class Stream:
    """Items on their way, in the caller's order. A sink of the batcher."""

    def __init__(self, source: Iterable[Any], start: Callable[[list[Ticket]], None], ahead: int, options: Any) -> None:
        """`start` prepares tickets and hands them to the batcher, on other threads; at most `ahead` items are out."""
        self._source, self._start, self._ahead, self._options = iter(source), start, max(ahead, 1), options
        self._line: deque[Ticket] = deque()
        self._news = threading.Event()
        self._chunk = max(1, min(FIRST, ahead)) if isinstance(source, (list, tuple)) else 1
        self._most = min(max(MOST, ahead // 16), max(ahead // 2, 1))
        self._slow = self._over = False
        self._read = 0
        self._broken: BaseException | None = None

    def finished(self, tickets: list[Ticket]) -> None:
        """Tickets are done: the reader may look."""
        self._news.set()

    def tickets(self) -> Iterator[tuple[int, Ticket]]:
        """Finished tickets in order, with their index; then the error that ended the source, if one did."""
        index = 0
        while True:
            self._fill()
            if not self._line:
                break
            ticket = self._line.popleft()
            self._wait(ticket)
            yield index, ticket
            index += 1
        if self._broken is not None:
            raise item_failed(self._broken, self._read) from self._broken

    def _fill(self) -> None:
        while not self._over and len(self._line) + self._chunk <= self._ahead:
            waits = self._slow or self._chunk < min(FIRST, self._most)
            if self._line and (waits or (self._line[0].done and len(self._line) >= self._ahead // 2)):
                return
            self._slow = False
            self._take_chunk()

    def _take_chunk(self) -> None:
        from headway.pipelines.batcher import Ticket

        chunk: list[Ticket] = []
        began = before = time.perf_counter()
        while len(chunk) < self._chunk:
            try:
                item = next(self._source)
            except StopIteration:
                self._over = True
                break
            except Exception as error:  # the source's own: told after the results before it
                self._over, self._broken = True, error
                break
            self._read += 1
            chunk.append(Ticket(item, self._options, self))
            now = time.perf_counter()
            self._slow = now - before > SLOW
            if self._slow or now - began > PATIENCE:
                break
            before = now
        else:
            self._chunk = min(2 * self._chunk, self._most)
        if chunk:
            self._line.extend(chunk)
            self._start(chunk)

    def _wait(self, ticket: Ticket) -> None:
        while not ticket.done:
            self._news.clear()
            if not ticket.done:
                self._news.wait()


def item_failed(error: BaseException, index: int) -> HeadwayError:
    """`error` with the number of the item it belongs to: of the same class if it is one of ours."""
    if isinstance(error, HeadwayError):
        told = type(error)(f"item {index}: {error}")
    else:
        told = ItemFailed(f"item {index} could not be read: {type(error).__name__}: {error}")
    told.index = index  # type: ignore[attr-defined]
    return told
