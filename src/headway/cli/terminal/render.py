"""Output of commands: streamed text, progress bars, tables and JSON; rich on a terminal, plain lines in a pipe."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.base.system.log import LOGGER
from headway.base.text import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from headway.models.hub.fetch import FetchProgress

PLAIN_SECONDS = 5.0  # between two progress lines in a pipe
LOADING_SECONDS = 20.0  # until the first line about loading in a pipe, and between two of them
QUICK_SECONDS = 0.5  # a load shorter than this shows no bar


def emit_json(value: Any, *, indent: int | None = 2) -> None:
    """One JSON value on standard output."""
    print(json.dumps(value, ensure_ascii=False, indent=indent), flush=True)


class _Verbosity:
    """Whether notes and progress are shown; a command line has one."""

    quiet = False


def be_quiet(quiet: bool) -> None:
    """Show no notes and no progress from now on; errors are still shown."""
    _Verbosity.quiet = quiet


def is_quiet() -> bool:
    return _Verbosity.quiet


def note(text: str) -> None:
    """Print one line on standard error, unless the command is to be quiet."""
    if _Verbosity.quiet:
        return
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)
    else:
        print(text, file=sys.stderr, flush=True)


def report(text: str) -> None:
    """Print an error on standard error, also when the command is to be quiet."""
    print(text, file=sys.stderr, flush=True)


class WordWrapper:
    """Breaks streamed text between words at the terminal's width; without a terminal it leaves the text as it is.

    The last word is held back until it ends.
    """

    def __init__(self, terminal: bool, width: int | None = None) -> None:
        self._width = (width or shutil.get_terminal_size().columns) if terminal else None
        self._column, self._word = 0, ""

    def push(self, text: str) -> str:
        """What can be shown of the text so far."""
        if self._width is None:
            return text
        pieces = re.split(r"(\s)", self._word + text)
        self._word = pieces.pop()
        return "".join(map(self._place, pieces))

    def flush(self) -> str:
        """The rest, at the end."""
        word, self._word = self._word, ""
        return self._place(word)

    def _place(self, piece: str) -> str:
        assert self._width is not None or not piece
        if piece == "\n":
            self._column = 0
            return piece
        size = cell_len(piece)
        if self._width is not None and self._column and self._column + size > self._width:
            self._column = 0
            piece = "\n" + piece.lstrip()
            size = cell_len(piece.lstrip())
        self._column += size
        return piece


def cell_len(text: str) -> int:
    """How many columns a text takes on a terminal; a wide character takes two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def write_text(text: str) -> None:
    """Write model text to standard output; on a terminal, control characters are made visible."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_aside(text: str) -> None:
    """Write reasoning text: dimmed on a terminal, to standard error in a pipe."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\x1b[2m{visible(text)}\x1b[22m")
        sys.stdout.flush()
    else:
        print(text, end="", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """`text` with control characters as symbols (ESC as ␛), except newlines and tabs."""
    return "".join(_picture(char) for char in text)


def quoted(text: str) -> str:
    """A token's text in quotes, with visible whitespace."""
    return visible(json.dumps(text, ensure_ascii=False))


def show_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", numbers: Iterable[int] = ()
) -> None:
    """A table on standard output: drawn on a terminal, tab-separated in a pipe. `numbers` are right-aligned columns."""
    if not sys.stdout.isatty():
        lines = ([title] if title else []) + ["\t".join(cells) for cells in (headers, *rows)]
        print("\n".join(lines), flush=True)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    right = set(numbers)
    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in right else "left", overflow="fold")
    for cells in rows:
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)


def show_pairs(pairs: Iterable[tuple[str, str]], *, title: str = "") -> None:
    """Names and values, one per line."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    if title:
        print(title)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def counted(count: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(count: float) -> str:
    """Bytes in powers of 1000: 98.4 MB, 1.6 GB."""
    return format_bytes(count, 1000)


def fetched(model: str) -> Path:
    """A model's path on disk; it is fetched first if necessary, with progress on standard error."""
    from headway.models.hub import store

    with fetching() as progress:
        return store.resolve(model, progress=progress)


@contextmanager
def fetching() -> Iterator[FetchProgress]:
    """A progress callback on standard error: a bar on a terminal, a line now and then in a pipe."""
    if not sys.stderr.isatty() or _Verbosity.quiet:
        yield PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bars, tasks = Bars(*columns, console=Console(stderr=True), transient=True), dict[str, Any]()

    def progress(received: int, total: int | None, label: str) -> None:
        if not tasks:
            bars.start()
        if label not in tasks:
            for other in tasks.values():
                bars.update(other, visible=False)
            tasks[label] = bars.add_task(label, total=total)
        bars.update(tasks[label], completed=received, total=total)

    try:
        yield progress
    finally:
        if tasks:
            bars.stop()


@contextmanager
def loading() -> Iterator[Callable[[int, int], None] | None]:
    """A callback for (layers loaded, total layers), if loading takes a while: a bar on a terminal, lines in a pipe."""
    if not sys.stderr.isatty() or _Verbosity.quiet:
        yield PlainLoading()
        return
    began, bars = time.monotonic(), list[Any]()

    def progress(done: int, total: int) -> None:
        if not bars and time.monotonic() - began < QUICK_SECONDS:
            return
        if not bars:
            from rich.console import Console
            from rich.progress import Progress as Bars

            bars.append(Bars(console=Console(stderr=True), transient=True))
            bars[0].start()
            bars[0].add_task("loading", total=total)
        bars[0].update(bars[0].task_ids[0], completed=done)

    try:
        yield progress
    finally:
        if bars:
            bars[0].stop()


class EngineLog(logging.Handler):
    """Prints the engines' log events, one per line, for the time of a `with`."""

    def emit(self, record: logging.LogRecord) -> None:
        values = getattr(record, "values", {})
        note(" · ".join([record.getMessage(), *(f"{name} {value}" for name, value in values.items())]))

    def __enter__(self) -> EngineLog:
        logger = logging.getLogger(LOGGER)
        self._before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(LOGGER)
        logger.removeHandler(self)
        logger.setLevel(self._before)


class PlainLoading:
    """Loading as lines, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LOADING_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + LOADING_SECONDS
            note(f"loading: {done} of {total} layers")


class PlainProgress:
    """Progress as lines: for every new label, every few seconds, and at the end."""

    def __init__(self) -> None:
        self._label = ""
        self._next = 0.0

    def __call__(self, received: int, total: int | None, label: str) -> None:
        now, done = time.monotonic(), total is not None and received >= total
        if label == self._label and now < self._next and not done:
            return
        self._label, self._next = label, now + PLAIN_SECONDS
        part = f" {size(received)}" if received else ""
        note(f"{label}{part}{f' of {size(total)}' if total and received else ''}")


def _picture(char: str) -> str:
    code = ord(char)
    if code < 0x20 and char not in "\n\t":
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "�" if 0x80 <= code < 0xA0 else char
