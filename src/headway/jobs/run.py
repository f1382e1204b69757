"""The loop of every job over a file: records through a worker into a sink, in order, each exactly once.

A worker computes; it knows nothing of files. A sink keeps results; what it has is not computed again. A record that
cannot be computed is a failure with its reason, and the job goes on, or ends there if it is told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, Protocol

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidInput
from headway.jobs.records import Record, item_of


@dataclass(frozen=True, slots=True)
class RowResult:
    """One computed record: its result, which may be an exception, its item, and its key if it has one."""

    record: Record
    result: Any
    item: Any = None
    key: str | None = None


class RowFailed(HeadwayError):
    """A row that has no result. `reason` is what the file of errors says of it: a sentence, or a whole line."""

    def __init__(self, reason: Any, sentence: str | None = None) -> None:
        super().__init__(sentence or str(reason))
        self.reason = reason


class Worker(Protocol):
    """What computes records."""

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        """The result of each record, in order."""
        ...


class Sink(Protocol):
    """What keeps results."""

    failed: list[int]  # lines

    def has(self, record: Record) -> bool: ...
    def add(self, record: Record, result: Any, item: Any = None, key: str | None = None) -> None: ...
    def add_failure(self, record: Record, error: Any, key: str | None = None) -> None: ...
    def check_complete(self) -> None: ...


def run_records(
    worker: Worker,
    source: Iterable[Record],
    sink: Sink,
    *,
    with_input: bool = False,
    failed: Callable[[Record, Exception], None] = lambda record, error: None,
    progress: Callable[[Record], None] = lambda record: None,
) -> None:
    """Run every record that is not done yet through the worker and into the sink.

    `failed` is told of each failure; what it raises ends the job.
    """
    todo = (record for record in source if not sink.has(record))
    with closing(worker.results(todo)) as results:
        for row in results:
            if (error := _added(row, sink, with_input=with_input)) is not None:
                failed(row.record, error)
                reason = error.reason if isinstance(error, RowFailed) else sentence(error)
                sink.add_failure(row.record, reason, row.key)
            progress(row.record)
    sink.check_complete()


def _added(row: RowResult, sink: Sink, *, with_input: bool) -> Exception | None:
    """Add a result to the sink; why it could not be, if so."""
    if isinstance(row.result, Exception):
        return row.result
    try:
        sink.add(row.record, plain(row.result), plain(row.item) if with_input else None, row.key)
    except (ValueError, TypeError, RecursionError) as problem:
        return InvalidInput(f"the result is not valid JSON: {problem}")
    return None


def sentence(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, HeadwayError) else f"{type(error).__name__}: {text}"


def plain(value: Any) -> Any:
    """A result as JSON values: arrays and tensors become lists."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


class PipelineWorker:
    """A pipeline over the items of records."""

    def __init__(
        self, pipeline: Any, columns: tuple[str, ...] = (), key_of: Callable[[Any], str | None] = lambda value: None
    ) -> None:
        self._pipeline, self._columns, self._key_of = pipeline, columns, key_of

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        waiting: deque[RowResult] = deque()  # of those that cannot be read, the result is the error

        def items() -> Iterator[Any]:
            for record in todo:
                key = self._key_of(record.value)
                try:
                    if record.error is not None:
                        raise InvalidInput(record.error)
                    item = item_of(record.value, self._columns)
                except HeadwayError as error:
                    waiting.append(RowResult(record, error, None, key))
                    continue
                waiting.append(RowResult(record, None, item, key))
                yield item

        def unreadable() -> Iterator[RowResult]:
            while waiting and waiting[0].result is not None:
                yield waiting.popleft()

        for result in self._pipeline(items(), on_error="return"):
            yield from unreadable()
            row = waiting.popleft()
            yield RowResult(row.record, result, row.item, row.key)
        yield from unreadable()
