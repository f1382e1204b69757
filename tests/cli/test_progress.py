"""What people see while a model loads and graphs are captured: a bar on a terminal, lines in a pipe."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess

import pytest

from headway.base.system import log as notes
from headway.base.system.log import log_event
from headway.cli.terminal.render import EngineLog, loading
from headway.server import logs
from support.forked import forked

ON_A_TERMINAL = """
import time
from headway.cli.terminal import render

render.QUICK_SECONDS = {quick}
with render.loading() as progress:
    for layer in range(1, 4):
        progress(layer, 3)
        time.sleep(0.02)
"""


def on_a_terminal(program: str) -> str:
    """What a program writes to standard error when that is a terminal."""
    ours, theirs = pty.openpty()
    command = forked("-c", program)
    done = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    assert done.wait() == 0, text
    return text.decode()


def test_a_load_that_takes_a_while_has_a_bar_on_a_terminal() -> None:
    shown = on_a_terminal(ON_A_TERMINAL.format(quick=0))
    assert "loading" in shown
    assert "%" in shown


def test_a_quick_load_has_none() -> None:
    assert on_a_terminal(ON_A_TERMINAL.format(quick=60)) == ""


def test_a_quick_load_says_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with loading() as progress:
        assert progress is not None
        progress(1, 2)
    assert capsys.readouterr().err == ""


def test_a_command_shows_what_an_engine_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headway"), "handlers", [])  # of servers that other tests ran
    logging.getLogger(notes.LOGGER).setLevel(logging.NOTSET)
    logging.getLogger("headway").setLevel(logging.NOTSET)
    with EngineLog():
        log_event("capturing a graph of 64 rows (step)", graphs=3)
    log_event("nobody hears this")
    assert capsys.readouterr().err == "capturing a graph of 64 rows (step) · graphs 3\n"
    assert not logging.getLogger(notes.LOGGER).isEnabledFor(logging.INFO)


def test_a_server_logs_it_with_its_values() -> None:
    stream, before = io.StringIO(), {}
    for name in (logs.LOGGER, notes.LOGGER, "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        before[logger] = (logger.handlers, logger.propagate, logger.level)
    try:
        logs.set_up(as_json=True, stream=stream)
        log_event("capturing a graph of 64 rows (step)", graphs=3)
        logs.flush()
    finally:
        for logger, (handlers, propagate, level) in before.items():
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    entry = json.loads(stream.getvalue())
    assert (entry["message"], entry["graphs"], entry["level"]) == ("capturing a graph of 64 rows (step)", 3, "info")
