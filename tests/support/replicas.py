"""`headway serve --replicas` in a process of its own, and how the tests talk to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

START_SECONDS, PATIENCE = 400, 120


class RayCluster(NamedTuple):
    """A cluster that runs: its address, the environment of processes that may use it, which has its token, and the
    process that has started it: all processes of the cluster are its descendants."""

    address: str
    env: dict[str, str]
    pid: int


class ServerProcess:
    """`headway serve` in a process of its own, on a cluster that runs already or on one that it starts."""

    def __init__(self, folder: Path, *flags: str, ray: RayCluster | None = None) -> None:
        if ray is None:
            # A fresh installation has no compiled modules, and Ray waits for its parts for 15 seconds only.
            env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        else:
            env, flags = ray.env, (*flags, "--ray", ray.address)
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headway.cli.main", "serve", "--port", "0", "--threads", "1", *flags],
                stdout=log,
                stderr=log,
                env=env,
            )
        self.url, self.key = "", ""

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            text = self.log.read_text()
            if "listening url=" in text:
                self.url = text.partition("listening url=")[2].split()[0]
                return
            time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        finally:
            self.process.kill()

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        status, _, answer = self.answer(path, body)
        return status, answer

    def answer(self, path: str, body: Any = None) -> tuple[int, Message, Any]:
        """The status, the headers and the body of a response."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                status, headers, raw = response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            status, headers, raw = error.code, error.headers, error.read()
        return status, headers, raw if raw.startswith(b"data:") or raw.startswith(b"#") else json.loads(raw)

    def chat(self, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **more}
        status, response = self.call("/v1/chat/completions", body)
        assert status == 200, response
        return response

    def replicas(self, count: int | None = 2) -> list[dict[str, Any]]:
        """The replicas, once there are so many; those of now, for None."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            found = self.call("/replicas")[1]["replicas"]
            ready = all(one["state"] == "ready" for one in found)
            if count is None or (ready and len(found) == count):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.5)


def users(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
