"""The server's log: one line per event, as text or JSON, never with a prompt in it.

A line has a time, a level, a message and named values. Values that a client chose are written as JSON strings, so that
no line can be forged. `request_id` is the id of the request whose task writes the line.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
import traceback
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TextIO

from headway.base import log as base_log

LOGGER = "headway.server"
CRITICAL = logging.CRITICAL
FRAMES = 12  # innermost frames of a traceback
request_id: ContextVar[str] = ContextVar("headway_request_id", default="")
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
    handler = logging.StreamHandler(stream or (sys.stdout if as_json else sys.stderr))
    handler.setFormatter(_JsonFormatter() if as_json else _PlainFormatter())
    levels = {LOGGER: logging.INFO, base_log.LOGGER: logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.ERROR}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


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
