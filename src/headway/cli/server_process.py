"""A server that a command starts for itself: `headway serve` in a process of its own, on a free port."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from headway.base.errors import Unsupported
from headway.cli.options import EngineOptions
from headway.cli.render import note

END_SECONDS = 60.0  # for it to end by itself
KEPT = 20  # lines of its log, for when it fails


class Served:
    """`with Served(options, requests, tokens) as server:` a server that takes so many requests and tokens at a time."""

    def __init__(self, options: EngineOptions, requests: int, tokens: int, *more: str) -> None:
        self.url = ""
        limits = {
            "max_queue_requests": max(256, requests),
            "max_queue_tokens": max(1 << 20, tokens),
            "max_connections": max(512, 2 * requests),
        }
        given = ["--model", options.model]
        given += [p for name, value in options.given().items() for p in (f"--{name.replace('_', '-')}", str(value))]
        given += [part for name, value in limits.items() for part in ("--limit", f"{name}={value}")]
        self._command = [sys.executable, "-P", "-m", "headway.cli.main", "serve", "--port", "0", "--json"]
        self._command += [*given, *more]
        self._lines: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.failures: deque[dict[str, Any]] = deque(maxlen=KEPT)  # what its log has of errors

    def __enter__(self) -> Served:
        note("starting a server")
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        try:
            ready.wait()
            if self.process.poll() is not None or not self.url:
                raise Unsupported(f"the server did not come up: {self._reason()}")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _read(self, ready: threading.Event) -> None:
        """Take its log, so that it never waits for a reader; `ready` is set when it is, or has ended."""
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            try:
                entry = json.loads(text)
            except ValueError:
                continue  # an object over several lines
            text = ""
            self._lines.append(entry)
            if entry.get("level") in ("error", "critical"):
                self.failures.append(entry)
            if entry.get("message") == "listening":
                self.url = entry["url"]
            if entry.get("message") == "ready":
                ready.set()
        self.process.wait()
        ready.set()

    def _reason(self) -> str:
        last = self._lines[-1] if self._lines else {}
        return str(last.get("error", {}).get("message") if isinstance(last.get("error"), dict) else last)

    def _stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
