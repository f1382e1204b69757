"""The server's log: one line per event, as text or JSON, never with a prompt in it.

A line has a time, a level, a message and named values. Values that a client chose are written as JSON strings, so that
no line can be forged. `request_id` is the id of the request whose task writes the line.

Logging never blocks its caller: lines wait in a bounded queue for a thread that writes them. A line that does not fit
or that cannot be written (nobody reads the pipe, the disk is full) is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TextIO

from headway.base.system import log as base_log

LOGGER = "headway.server"
CRITICAL = logging.CRITICAL
FRAMES = 12  # innermost frames of a traceback
MAX_QUEUED_LINES = 4096
MAX_QUEUED_CHARACTERS = 16 << 20  # with log_prompts a single line may have megabytes
FLUSH_SECONDS = 1.0  # for the lines in the queue to be written, when the server ends
request_id: ContextVar[str] = ContextVar("headway_request_id", default="")
request_values: ContextVar[dict[str, Any] | None] = ContextVar("headway_request_values", default=None)
"""What the access log adds to the request's line; a route changes the dictionary."""
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def log(level: int, message: str, **values: Any) -> None:
    """Write one line. Values are plain data; never pass a prompt, a response or a key."""
    logging.getLogger(LOGGER).log(level, message, extra={"values": values})


def info(message: str, **values: Any) -> None:
    log(logging.INFO, message, **values)


def warn(message: str, **values: Any) -> None:
    log(logging.WARNING, message, **values)


def failure(message: str, error: BaseException, *, with_text: bool, **values: Any) -> None:
    """Log a bug of ours: its type and frames; its text, which may hold a prompt, only `with_text`."""
    frames = _frames(error.__traceback__)
    text = {"text": str(error)} if with_text else {}
    log(logging.ERROR, message, error=type(error).__name__, **text, frames=frames, **values)


def new_request_id(given: str | None = None) -> str:
    """The client's own id if it is well-formed, or a new one."""
    if given is not None and _WELL_FORMED.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"


def set_up(*, as_json: bool, stream: TextIO | None = None) -> None:
    """Configure logging of the server and its libraries. Default streams: stdout for JSON, stderr for text."""
    if (before := _current()) is not None:
        before.close()
    handler = _QueuedHandler(stream or (sys.stdout if as_json else sys.stderr))
    handler.setFormatter(_JsonFormatter() if as_json else _PlainFormatter())
    levels = {LOGGER: logging.INFO, base_log.LOGGER: logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.ERROR}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def flush() -> None:
    """Wait until the lines so far are written, for at most `FLUSH_SECONDS`."""
    if (handler := _current()) is not None:
        handler.flush()


def dropped_lines() -> int:
    """How many lines were dropped because nobody read the log or it could not be written."""
    return 0 if (handler := _current()) is None else handler.dropped


class _QueuedHandler(logging.Handler):
    """Formats records where they are logged, and writes the lines in a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0  # lines that were not written
        self._write, self._end = _writer(stream)
        self._queue: deque[str] = deque()
        self._characters = 0  # in the queue
        self._writing = self._closed = False
        self._reported = 0  # dropped lines that the log mentions
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="headway-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            full = len(self._queue) >= MAX_QUEUED_LINES or self._characters + len(line) > MAX_QUEUED_CHARACTERS
            if self._closed or full:
                self.dropped += 1
                return
            self._queue.append(line)
            self._characters += len(line)
            self._changed.notify_all()

    def handleError(self, record: logging.LogRecord) -> None:
        """Count the line. Python's own handler would print a traceback, to a stream that may be the broken one."""
        with self._changed:
            self.dropped += 1

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._writing, FLUSH_SECONDS)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while (line := self._next()) is not None:
            written = self._try_write(line)
            missing = self.dropped - self._reported
            if written and missing and self._try_write(self._report(missing)):
                self._reported += missing
            with self._changed:
                self.dropped += not written
                self._writing = False
                self._changed.notify_all()
        self._end()

    def _next(self) -> str | None:
        """The next line to write; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            line = self._queue.popleft()
            self._characters -= len(line)
            self._writing = True
            return line

    def _try_write(self, line: str) -> bool:
        try:
            self._write(line)
        except (OSError, ValueError):  # a full disk or a reader that is gone; a stream that was closed
            return False
        return True

    def _report(self, lines: int) -> str:
        values = {"levelno": logging.WARNING, "levelname": "WARNING", "msg": "log lines were dropped"}
        return self.format(logging.makeLogRecord(values | {"values": {"lines": lines}})) + "\n"


def _current() -> _QueuedHandler | None:
    """The handler that `set_up` has installed."""
    return next((one for one in logging.getLogger(LOGGER).handlers if isinstance(one, _QueuedHandler)), None)


def _writer(stream: TextIO) -> tuple[Callable[[str], None], Callable[[], None]]:
    """A function that writes a line to a stream, and one that ends it.

    It writes to the file descriptor: a thread that is blocked inside Python's buffer would hold a lock that the
    interpreter needs to exit. The descriptor is a copy: the number of one that was closed may mean another file.
    """
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):  # a stream in memory
        return lambda line: _write_stream(stream, line), lambda: None
    stream.flush()
    unfinished = False  # whether the last line was cut, by a disk that got full

    def write(line: str) -> None:
        nonlocal unfinished
        data = memoryview(("\n" + line if unfinished else line).encode("utf-8", "backslashreplace"))
        while data:
            count = os.write(descriptor, data)
            unfinished, data = True, data[count:]
        unfinished = False

    return write, lambda: os.close(descriptor)


def _write_stream(stream: TextIO, line: str) -> None:
    stream.write(line)
    stream.flush()


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), ensure_ascii=True, default=str)


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        head = f"{fields.pop('time')} {fields.pop('level'):7} {fields.pop('message')}"
        return " ".join([head, *(f"{name}={_plain(value)}" for name, value in fields.items())])


def timestamp(seconds: float) -> str:
    """A `time.time()` value as ISO 8601 in UTC."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "time": timestamp(record.created),
        "level": record.levelname.lower(),
        "message": _one_line(record.getMessage()),
    }
    if request_id.get():
        fields["request_id"] = request_id.get()
    if record.exc_info and record.exc_info[1] is not None:  # from a library; ours goes through `failure`
        fields["error"] = type(record.exc_info[1]).__name__
        fields["frames"] = _frames(record.exc_info[2])
    return fields | getattr(record, "values", {})


def _frames(trace: TracebackType | None) -> list[str]:
    return [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(trace)[-FRAMES:]]


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _plain(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[!#-<>-\[\]-~]+", value):  # no space, quote, backslash or =
        return value
    return json.dumps(value, ensure_ascii=True, default=str)
