"""`headway serve` in a process of its own, on a free port, for the time of a `with`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from headway.base.errors import Unsupported

STOP_SECONDS = 60.0  # until it is killed
LOG_LINES = 20  # kept, for when it fails


class ServerProcess:
    """A server of `model` with room for this many requests and tokens at a time. `options` are flags of `serve`."""

    def __init__(self, model: str, options: Mapping[str, Any], *, requests: int, tokens: int) -> None:
        self.url = ""
        limits = {
            "max_queue_requests": max(256, requests),
            "max_queue_tokens": max(1 << 20, tokens),
            "max_connections": max(512, 2 * requests),
        }
        flags = ["--model", model]
        flags += [p for name, value in options.items() for p in (f"--{name.replace('_', '-')}", str(value))]
        flags += [part for name, value in limits.items() for part in ("--limit", f"{name}={value}")]
        self._command = [sys.executable, "-P", "-m", "headway.cli.main", "serve", "--port", "0", "--json"]
        self._command += flags
        self._lines: deque[dict[str, Any]] = deque(maxlen=LOG_LINES)
        self.failures: deque[dict[str, Any]] = deque(maxlen=LOG_LINES)  # errors in its log

    def __enter__(self) -> ServerProcess:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        try:
            ready.wait()
            if self.process.poll() is not None or not self.url:
                raise Unsupported(f"the server did not start: {self._reason()}")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _read(self, ready: threading.Event) -> None:
        """Read its log, so that the pipe never fills up; set `ready` when the server is, or when it has ended."""
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            try:
                entry = json.loads(text)
            except ValueError:
                continue  # an object may span several lines
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
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
