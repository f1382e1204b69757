"""What the server writes about itself: one line an event, for people or as JSON, never with a prompt in it.

A line has a time, a level, a sentence and named values. Values that a client chose are written as JSON strings, so that
no line can be forged. `request_id` is that of the request whose task logs.
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

from headway.base import log as notes

LOGGER = "headway.server"
CRITICAL = logging.CRITICAL
FRAMES = 12  # of a traceback, the innermost
request_id: ContextVar[str] = ContextVar("headway_request_id", default="")
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def log(level: int, message: str, **values: Any) -> None:
    """One line. Values are plain data; never give it a prompt, an answer or a key."""
    logging.getLogger(LOGGER).log(level, message, extra={"values": values})


def info(message: str, **values: Any) -> None:
    log(logging.INFO, message, **values)


def warn(message: str, **values: Any) -> None:
    log(logging.WARNING, message, **values)


def failure(message: str, error: BaseException, *, with_text: bool, **values: Any) -> None:
    """An error that is ours: its type and where it was raised. Its text may hold what a client sent: only if asked."""
    frames = _frames(error.__traceback__)
    text = {"text": str(error)} if with_text else {}
    log(logging.ERROR, message, error=type(error).__name__, **text, frames=frames, **values)


def new_request_id(given: str | None = None) -> str:
    """The client's own id if it is well-formed, else a new one."""
    if given is not None and _WELL_FORMED.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"


def set_up(*, as_json: bool, stream: TextIO | None = None) -> None:
    """Send the server's lines, and warnings of what it runs on, to a stream: JSON to standard output unless told."""
    handler = logging.StreamHandler(stream or (sys.stdout if as_json else sys.stderr))
    handler.setFormatter(_Json() if as_json else _Plain())
    levels = {LOGGER: logging.INFO, notes.LOGGER: logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.ERROR}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), ensure_ascii=True, default=str)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        head = f"{fields.pop('time')} {fields.pop('level'):7} {fields.pop('message')}"
        return " ".join([head, *(f"{name}={_plain(value)}" for name, value in fields.items())])


def moment(seconds: float) -> str:
    """A time of time.time's clock as it is written, in UTC."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "time": moment(record.created),
        "level": record.levelname.lower(),
        "message": _one_line(record.getMessage()),
    }
    if request_id.get():
        fields["request_id"] = request_id.get()
    if record.exc_info and record.exc_info[1] is not None:  # of a library; ours goes through `failure`
        fields["error"] = type(record.exc_info[1]).__name__
        fields["frames"] = _frames(record.exc_info[2])
    return fields | getattr(record, "values", {})


def _frames(trace: TracebackType | None) -> list[str]:
    return [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(trace)[-FRAMES:]]


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _plain(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[!#-<>-\[\]-~]+", value):  # no blank, quote, backslash or =
        return value
    return json.dumps(value, ensure_ascii=True, default=str)
