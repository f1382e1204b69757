"""The real command in a process of its own, as a user runs it."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.forked import forked

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def headway() -> Run:
    """Run `headway …` in a pipe: `headway("run", "hi", input=…, env={…})`."""

    def run(*arguments: str, input: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = forked("-m", "headway.cli.main", *arguments)
        environment = os.environ | (env or {})
        return subprocess.run(
            command, input=input, env=environment, text=True, capture_output=True, timeout=300, check=False
        )

    return run


@pytest.fixture
def on_terminal() -> Callable[..., tuple[int, str]]:
    """Run `headway …` on a terminal of its own; the exit code and everything it showed."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"} | (env or {})
        command = forked("-m", "headway.cli.main", *arguments)
        process = subprocess.Popen(
            command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := _read(ours):
                shown += piece
        finally:
            os.close(ours)
        return process.wait(timeout=60), shown.decode(errors="replace")

    return run


@pytest.fixture
def empty_cache(tmp_path: Path) -> dict[str, str]:
    """An environment whose cache is empty and that asks no network."""
    return {"HEADWAY_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # a terminal whose other side is closed
        return b""
