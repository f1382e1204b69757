"""Frameworks as they are, from their packages, each in an environment of its own.

Their requirements are not those of the tests, and not each other's: each needs another version of the official client.
A script says what it needs, as inline script metadata does, and its environment is made once, below build/.
HEADWAY_CLIENTS_PYTHON is a Python that has all of them already.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway as hw
from support.live import Live, live

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "frameworks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def forgetful(smollm2_path: Path) -> Iterator[Live]:
    """A server that soon forgets the responses that frameworks have it store and never delete."""
    with live(hw.Engine("smollm2", pages=512, threads=1), stored_seconds=30.0) as server:
        yield server


def requirements(script: Path) -> list[str]:
    """What a script needs, from its inline metadata."""
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", script.read_text(), re.MULTILINE)
    assert block is not None, f"{script.name} does not say what it needs"
    return tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))["dependencies"]


def python_for(script: Path) -> str:
    """A Python that has what a script needs; installed where it is not yet."""
    if (given := os.environ.get("HEADWAY_CLIENTS_PYTHON")) is not None:
        return given
    names = requirements(script)
    folder = ROOT / "build" / f"{script.stem}-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:12]}"
    ready = folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        command = [str(folder / "bin/python"), "-m", "pip", "install", "-q", *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{', '.join(names)} cannot be installed here: {done.stderr[-400:]}")
        ready.touch()
    return str(folder / "bin/python")


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_a_framework_works_as_it_is(forgetful: Live, name: str) -> None:
    script = SCRIPTS / f"{name}.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python_for(script), str(script), forgetful.url],
        capture_output=True, text=True, timeout=1200, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    forgetful.until(forgetful.is_quiet)
