"""A program's source, run: its `main` with the engine and its arguments, its prints as messages, its value as JSON.

The same in the WebAssembly guest and in a confined process. Imports nothing that the guest does not have.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import linecache
import sys
import traceback
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.remote.program import ProgramEngine

FILE = "<program>"
ENTRIES = ("main", "program")  # what a program's function may be called
LINE = 8192  # characters of a line from which on it is sent before its end
LONGEST = 16_384  # characters of a traceback that are kept


class Raised(Exception):
    """The program raised; the text is its traceback."""


class Printed(io.TextIOBase):
    """Standard output and error of a program: lines become messages."""

    def __init__(self, engine: ProgramEngine) -> None:
        self._session, self._line = engine.session, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._line += text
        if "\n" in text or len(self._line) > LINE:
            end = len(self._line) if len(self._line) > LINE else self._line.rindex("\n") + 1
            whole, self._line = self._line[:end], self._line[end:]
            self._session._print(whole)
        return len(text)

    def flush(self) -> None:
        if self._line:
            line, self._line = self._line, ""
            self._session._print(line)


def run(source: str, args: str, engine: ProgramEngine, loop: asyncio.AbstractEventLoop) -> str:
    """Run it to its end; its value as JSON. Raises `Raised`, whatever went wrong."""
    sys.stdout = sys.stderr = printed = Printed(engine)
    try:
        main = _main(source)
        value = loop.run_until_complete(_awaited(main(engine, **json.loads(args))))
        return _json(value)
    except BaseException as error:
        raise Raised(_traceback(error)) from None
    finally:
        with suppress(Exception):
            printed.flush()
            engine.session._flush()


def check(source: str) -> str:
    """Whether it is Python at all, without running any of it: raises `Raised` with what is wrong."""
    try:
        compile(source, FILE, "exec")
    except Exception as error:
        raise Raised(str(error) or type(error).__name__) from None
    return "null"


def _main(source: str) -> Any:
    module = sys.modules["program"] = types.ModuleType("program")  # not __main__: that part is for running it by itself
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)
    exec(compile(source, FILE, "exec"), module.__dict__)
    for name in ENTRIES:
        if callable(function := module.__dict__.get(name)):
            return function
    raise TypeError("the program has no function to run; write async def main(engine, **args)")


async def _awaited(value: Any) -> Any:
    if not inspect.isawaitable(value):
        raise TypeError("main returned before it was awaited; write it with async def")
    return await value


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"what main returned cannot be sent as JSON: {error}") from None


def _traceback(error: BaseException) -> str:
    """The traceback from the program's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}\n…\n{text[-LONGEST // 2 :]}"
