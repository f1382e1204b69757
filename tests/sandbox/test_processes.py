"""Programs in processes: under bubblewrap, refused without it, and unconfined where that is asked for."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.base.errors import InvalidInput, Unsupported
from headway.sandbox.confinement import confinement
from headway.server.errors import ApiError
from headway.server.keys import ANYONE
from headway.server.logs import LOGGER
from headway.server.models import ModelSources
from headway.server.programs.programs import Programs, open_programs
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.testing import random_model
from support.programs import run_beside

HERE = str(Path(__file__))
PROGRAM = """
import json, os, socket, subprocess, sys, threading
import headway as hw

async def main(engine, file, port):
    print("in a process")
    async with engine.context() as ctx:
        tokens = await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=4).tokens()
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
        network = True
    except OSError:
        network = False
    thread = threading.Thread(target=print, args=("from a thread",))
    thread.start()
    thread.join()
    engine.session.send(await engine.session.receive())
    seen = os.listdir("/proc") if os.path.isdir("/proc") else []  # Linux has it, and bubblewrap is Linux's
    return {
        "tokens": [int(t) for t in tokens], "file": os.path.exists(file), "network": network,
        "key": "SECRET" in os.environ, "processes": len([n for n in seen if n.isdigit()]),
        "pid": os.getpid(),
    }
"""


def run(settings: ServerSettings, source: str, message: Any = None, **args: Any) -> tuple[str, list[dict[str, Any]]]:
    """Run a program beside a small engine; the confinement that was in force, and its events."""
    with hw.Engine(random_model(), pages=16, threads=1) as engine:
        return run_beside(engine, settings, source, message, **args)


@pytest.fixture
def bubblewrap() -> None:
    """Fails without a bubblewrap that works, which is part of the promise."""
    if sys.platform != "linux":
        pytest.skip("bubblewrap is for Linux")
    try:
        confinement("process")
    except Unsupported as error:
        if os.environ.get("HEADWAY_NO_BUBBLEWRAP") == "1":
            pytest.skip(f"HEADWAY_NO_BUBBLEWRAP=1, and {error}")
        pytest.fail(f"{error}. Mend that (apt-get install bubblewrap), or set HEADWAY_NO_BUBBLEWRAP=1")


def run_process(settings: ServerSettings) -> tuple[str, dict[str, Any]]:
    """Run a program that sees what it can reach, and talks to it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        name, (first, second, message, end) = run(settings, PROGRAM, "hello", file=HERE, port=port)
    assert [first["text"], second["text"], message["value"]] == ["in a process\n", "from a thread\n", "hello"]
    assert len(end["value"]["tokens"]) == 4
    return name, end["value"]


@pytest.mark.usefixtures("bubblewrap")
def test_a_process_has_threads_and_messages_and_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    name, value = run_process(ServerSettings(programs="process"))
    assert name == "bubblewrap"
    assert not value["key"]
    assert not value["file"]
    assert not value["network"]
    assert value["processes"] <= 3
    assert value["pid"] < 10


def test_an_unconfined_process_has_threads_and_messages_and_no_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("PATH", str(tmp_path))  # no bubblewrap
    name, value = run_process(ServerSettings(programs="process", unconfined=True))
    assert name == "none"
    assert not value["key"]


def test_a_source_is_read_in_a_process_before_it_is_kept() -> None:
    async def trial(engine: hw.Engine) -> None:
        settings = ServerSettings(programs="process", unconfined=True)
        programs = await Programs.prepared(await Serving.of_engine(settings, engine), print)
        try:
            await programs.install(ANYONE, "kept", "import os\nos._exit(3)")  # it is read, not run
            assert programs.installed.find(ANYONE, "kept").endswith("_exit(3)")
            with pytest.raises(ApiError, match="not valid Python: invalid syntax"):
                await programs.install(ANYONE, "broken", "def")
        finally:
            await programs.close()

    with hw.Engine(random_model(), pages=16, threads=1) as engine:
        asyncio.run(trial(engine))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("async def main(engine):\n    while True: pass", "CPU time"),
        ("async def main(engine):\n    kept = []\n    while True: kept.append(bytearray(1 << 20))", "MemoryError"),
        ("import time\nasync def main(engine): time.sleep(60)", "ran longer"),
        ("import os\nasync def main(engine): os._exit(3)", "status 3"),
        ("async def main(engine): 1 / 0", "ZeroDivisionError"),
    ],
)
@pytest.mark.slow
def test_a_process_is_stopped_and_told_why(source: str, told: str) -> None:
    limits: dict[str, Any] = {"max_program_cpu": 1.0, "max_program_memory": 512 << 20}
    if told == "ran longer":  # the others may take their time on a busy machine
        limits["max_program_seconds"] = 4.0
    settings = ServerSettings(programs="process", unconfined=True, **limits)
    _, events = run(settings, source)
    assert events[-1]["status"] in ("stopped", "raised")
    assert re.search(told, events[-1]["error"]), events[-1]


def test_without_bubblewrap_it_is_refused_unless_unconfined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match=r"bubblewrap is not installed.*--unconfined"):
        confinement("process")
    assert confinement("process", unconfined=True).name == "none"
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no permission >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(Unsupported, match=r"does not work here .no permission"):
        confinement("process")
    with pytest.raises(InvalidInput, match="--unconfined is for --allow-programs=process"):
        ServerSettings(programs="sandbox", unconfined=True)
    with pytest.raises(InvalidInput, match="sandbox or process"):
        ServerSettings(programs="docker")
    assert os.environ["PATH"] == str(tmp_path)


@pytest.mark.usefixtures("guest")
def test_the_server_says_which_confinement_is_in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no bubblewrap
    lines: list[logging.LogRecord] = []
    logger = logging.getLogger(LOGGER)
    monkeypatch.setattr(logger, "filters", [lambda line: bool(lines.append(line))])
    before = logger.level
    logger.setLevel(logging.INFO)

    async def told(settings: ServerSettings) -> list[tuple[str, Any]]:
        lines.clear()
        sources = ModelSources.single(settings, lambda: pytest.fail("not opened"), None)
        programs = await open_programs(Serving(settings, sources))
        assert programs is not None
        await programs.close()
        return [(line.levelname, {"": line.getMessage(), **getattr(line, "values", {})}) for line in lines]

    allowed = {"": "programs are allowed"}
    try:
        (sandboxed,) = asyncio.run(told(ServerSettings(programs="sandbox")))
        first, second = asyncio.run(told(ServerSettings(programs="process", unconfined=True)))
    finally:
        logger.setLevel(before)
    assert sandboxed == ("INFO", {**allowed, "confinement": "WebAssembly"})
    assert first == ("INFO", {**allowed, "confinement": "none"})
    assert second[0] == "WARNING"
    assert "not confined" in second[1][""]
