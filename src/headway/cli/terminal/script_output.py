"""What a script writes to its terminal, printed above a live view instead of into it.

The script gets a pseudoterminal as standard output and error. Whatever writes there (print, another console, a
subprocess, C code) is read line by line, so that redrawing the view erases none of it.
"""

from __future__ import annotations

import codecs
import os
import pty
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

PARTIAL_SECONDS = 1.0  # until a line without an end, such as a question, is shown


@contextmanager
def terminal_behind_output() -> Iterator[tuple[TextIO, ScriptOutput]]:
    """The real terminal, and the output of this process, which goes to a pseudoterminal meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {1: os.dup(1)} | ({2: os.dup(2)} if sys.stderr.isatty() else {})
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    with suppress(termios.error):
        termios.tcsetwinsize(theirs, termios.tcgetwinsize(1))
    for number in saved:
        os.dup2(theirs, number)
    os.close(theirs)
    output = ScriptOutput(ours, saved)
    try:
        with os.fdopen(os.dup(saved[1]), "w", encoding="utf-8") as terminal:
            yield terminal, output
    finally:
        output.restore()
        for copy in saved.values():
            os.close(copy)
        os.close(ours)


class ScriptOutput:
    """The other side of the pseudoterminal."""

    def __init__(self, source: int, saved: dict[int, int]) -> None:
        self._source, self._saved, self._restored = source, saved, False

    @contextmanager
    def printed_by(self, show: Callable[[str], None]) -> Iterator[None]:
        """Pass complete lines to `show`, in a thread, until the end of the block, and then the rest."""
        thread = threading.Thread(target=self._read, args=(show,), name="headway-top-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.restore()
            thread.join()

    def restore(self) -> None:
        """Give the process its terminal back; the thread then reads what is left."""
        if not self._restored:
            self._restored = True
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            for number, copy in self._saved.items():
                os.dup2(copy, number)

    def _read(self, show: Callable[[str], None]) -> None:
        decode, held = codecs.getincrementaldecoder("utf-8")("replace").decode, ""
        while True:
            if not select.select([self._source], [], [], PARTIAL_SECONDS)[0]:
                if held:
                    show(held)
                held = ""
                if self._restored:  # a process that the script has left behind still holds the pseudoterminal
                    return
                continue
            try:
                piece = os.read(self._source, 1 << 16)
            except OSError:  # nobody has the other side open any more
                piece = b""
            lines, end, held = (held + decode(piece)).rpartition("\n")
            if end:
                show(lines)
            if not piece:
                if held:
                    show(held)
                return
