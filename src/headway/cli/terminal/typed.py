"""Messages typed or pasted at a terminal: line editing, history across runs, completion of commands."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from headway.base.config import settings
from headway.cli.terminal.render import note, write_text

PROMPT = "> "
HISTORY_LINES = 1000
PASTE_SECONDS = 0.05  # lines that come closer together than this were pasted


def typed_messages(commands: Sequence[str]) -> Iterator[str]:
    """Messages until ctrl-D, or ctrl-C twice. A pasted block of several lines is one message."""
    history = _set_up_readline(commands)
    warned = False
    try:
        while True:
            try:
                message = _read_message()
            except EOFError:
                write_text("\n")
                return
            except KeyboardInterrupt:
                write_text("\n")
                if warned:
                    return
                warned = True
                note("ctrl-C again or ctrl-D leaves")
                continue
            warned = False
            yield message
    finally:
        _save(history)


def _read_message() -> str:
    """One line, and those that are pasted with it."""
    lines = [input(PROMPT)]
    while select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
        with suppress(EOFError):
            lines.append(input())
            continue
        break
    return "\n".join(lines)


def _set_up_readline(commands: Sequence[str]) -> Path | None:
    """Editing, completion and the history of earlier runs; returns where it is kept, None if it cannot be."""
    try:
        import readline
    except ImportError:  # a Python built without it: lines can still be typed
        return None

    def complete(text: str, number: int) -> str | None:
        matches = [command for command in commands if text.startswith("/") and command.startswith(text)]
        return matches[number] if number < len(matches) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    readline.set_history_length(HISTORY_LINES)
    path = settings().cache / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    return path


def _save(path: Path | None) -> None:
    """Keep the history for the next run, readable by its owner alone."""
    if path is None:
        return
    import readline

    with suppress(OSError):  # a cache that cannot be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.write_history_file(path)
