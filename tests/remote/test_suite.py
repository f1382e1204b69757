"""The tests of the program API, and examples of the gallery, once more over a connection."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from support.examples import EVERYWHERE, FOLDER, fixed, load
from support.live import Live, live
from support.programs import ProgramServer

# --- the suite of programs


def left_out() -> tuple[set[str], list[str]]:
    """Files and single tests of tests/program that do not run through a connection; in_process_only.txt says why."""
    lines = (Path(__file__).with_name("in_process_only.txt")).read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    return {name for name in named if "::" not in name}, [name for name in named if "::" in name]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_program_api_suite_gives_the_same_through_a_connection() -> None:
    """The tests of the program API, each engine behind a connection; left out is what looks inside the process."""
    files, tests = left_out()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "support.through", "-o", "timeout=600", "-n0", "tests/program"]
        + [f"--ignore=tests/program/{name}" for name in sorted(files)]
        + [f"--deselect=tests/program/{each}" for each in tests],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]


def test_what_is_left_out_of_the_suite_is_still_there() -> None:
    files, tests = left_out()
    assert all((Path(__file__).parents[1] / "program" / name).exists() for name in files)
    for each in tests:
        file, _, test = each.partition("::")
        text = (Path(__file__).parents[1] / "program" / file).read_text()
        assert f"def {test.partition('[')[0]}(" in text, each


# --- examples

EXAMPLES = (
    *EVERYWHERE,
    *("next_token", "parallel_forks", "scored_choice", "regex_form", "attention_sink", "windowed_attention"),
    *("logit_lens", "agent"),
)


def printed(engine: Any, name: str) -> list[Any]:
    """What an example prints; some print how many tokens were computed, so nothing may be cached."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine.run(load(name).program)
    assert out.getvalue().strip()
    return fixed(name, out.getvalue().splitlines())


def uploaded(server: Live, name: str) -> list[Any]:
    """What it prints in the sandbox, sent as it is in one HTTP request; its events come back in another."""
    ended = ProgramServer(server).run((FOLDER / f"{name}.py").read_text())
    if ended["status"] != "returned":  # what some return is not JSON, and only that may be wrong
        assert "cannot be sent as JSON" in ended["error"], ended
    return fixed(name, ended["printed"].splitlines())


def same_example(server: Live, socket: Path, name: str, *, in_sandbox: bool) -> None:
    """An example prints the same in process, over a WebSocket, over a Unix socket and in the sandbox."""
    engine = server.engine
    engine.cache.clear()
    expected = printed(engine, name)
    for url in (server.url, f"unix:{socket}"):
        engine.cache.clear()
        with hw.connect(url) as remote:
            assert printed(remote, name) == expected, url
    if in_sandbox:
        engine.cache.clear()
        assert uploaded(server, name) == expected


@pytest.mark.usefixtures("guest")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("names", [("hello",), pytest.param(EXAMPLES, marks=pytest.mark.slow)], ids=["one", "all"])
def test_examples_of_the_gallery_run_unchanged_everywhere(names: Sequence[str], tmp_path: Path) -> None:
    assert len(EVERYWHERE) >= 10
    engine = hw.Engine("smollm2", pages=1024, threads=1)
    with live(engine, session_socket=tmp_path / "socket", programs="sandbox") as server:
        for name in names:
            same_example(server, tmp_path / "socket", name, in_sandbox=name in EVERYWHERE)
        gc.collect()
        server.until(server.is_quiet)
