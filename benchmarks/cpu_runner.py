"""One engine in a process of its own: started, loaded once, asked again and again, and frozen while others run.

A worker that waits is stopped by a signal: threads that stay awake for the next call would take time from the one that
is measured.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "peers"
PATIENCE = 1800.0  # seconds to wait for an answer
END = 20.0  # seconds to wait for a process to end by itself


class PeerFailed(RuntimeError):
    """A worker could not be started, or did not answer, or answered with an error."""


@dataclass(frozen=True)
class Command:
    """Which worker, in which interpreter, on how many threads."""

    name: str
    python: str
    threads: int

    def line(self, *arguments: str) -> list[str]:
        return [self.python, str(WORKERS / f"{self.name}_worker.py"), *arguments]

    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}


class Runner:
    """A worker that is loaded. Everything it is asked, it is asked alone."""

    def __init__(self, command: Command, load: dict[str, Any]) -> None:
        self.name = command.name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command.line(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=command.environment(),
            start_new_session=True,
        )
        self._frozen = False
        try:
            self.facts = self.ask("load", **load)
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        """Its answer; it runs only while it is at it."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **options}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"{self.name} ended: {self._last_words()}") from None
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise PeerFailed(f"{self.name} gave no answer in {PATIENCE:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self.name} ended: {self._last_words()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process: by the end of its input, or by force."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._errors.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"code {self._process.returncode}"


def start_to_first_token(command: Command, load: dict[str, Any]) -> float:
    """Seconds from the start of a process until it has loaded a model and has a first token."""
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        with subprocess.Popen(
            command.line("startup", json.dumps(load)),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=command.environment(),
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            took = time.perf_counter() - began
        if not line:
            errors.seek(0)
            raise PeerFailed(f"{command.name} did not start: {errors.read().strip()[-200:]}")
    return took
