"""Starts servers as processes of their own, with clients that may misbehave."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import headway as hw
from headway.testing import scripted_engine
from support.forked import forked

SCRIPT = Path(__file__).with_name("scripted_server.py")
PATIENCE = 60.0  # seconds until a test gives up; no test asserts times
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


class Reply:
    """A complete HTTP response."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.body = status, body
        self.headers = {name.lower(): value for name, value in headers.items()}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have OpenAI's format."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        return error


class Server:
    """A server's process, its log, and requests to it."""

    def __init__(self, command: list[str], env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | QUIET | (env or {}),
        )
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self._take), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, take: Callable[[str], None]) -> None:
        for line in stream:
            take(line)

    def _take(self, line: str) -> None:
        self.lines.append(json.loads(line))

    def logged(self, message: str, **values: Any) -> list[dict[str, Any]]:
        """Lines with this message and these values."""
        wanted = {"message": message, **values}
        return [line for line in list(self.lines) if wanted.items() <= line.items()]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition holds; returns its value."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if result := condition():
                return result
            time.sleep(0.02)
        raise AssertionError(f"the condition never held; the log: {self.lines[-20:]} {self.errors[-20:]}")

    def listening(self) -> Server:
        self.until(lambda: self.logged("listening") or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors
        self.port = int(self.logged("listening")[0]["url"].rsplit(":", 1)[1])
        return self

    def ready(self) -> Server:
        self.listening()
        self.until(lambda: self.logged("ready") or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors
        return self

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """One request on its own connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return self.ask("GET", path, headers=headers)

    def tokens(self, prompt: list[int], max_tokens: int, key: str | None = None, **options: Any) -> Reply:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.ask("POST", "/tokens", {"prompt": prompt, "max_tokens": max_tokens, **options}, headers)

    def stats(self) -> dict[str, Any]:
        return self.get("/stats").json["stats"]

    def is_quiet(self) -> bool:
        """Whether no page is held and nothing is queued."""
        stats = self.stats()
        return stats["pages_held"] == 0 and stats["queued"] == 0

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            yield connection

    def raw(self, data: bytes) -> Reply:
        """Send raw bytes; returns what comes back until the server closes."""
        with self.connect() as connection:
            connection.sendall(data)
            return parse(read_all(connection))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the process to exit; returns the exit code once all its output has been read."""
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes or resets the connection."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def parse(data: bytes) -> Reply:
    """One response, whose body is the rest of the data."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in rest)
    return Reply(int(first.split(" ")[1]), headers, body)


def post(path: str, body: Any, *headers: str, host: str = "127.0.0.1") -> bytes:
    """A POST as bytes."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


def alone(prompt: list[int], count: int) -> list[int]:
    """The tokens that a server generates for a prompt without other requests."""

    async def generate(engine: hw.Engine) -> list[int]:
        async with engine.context() as ctx:
            ctx.fill(prompt)
            return await ctx.generate(hw.Argmax(), max_tokens=count).tokens()

    with scripted_engine(pages=256) as engine:
        return list(engine.run(generate))


def command(settings: Mapping[str, Any] | None = None, **engine: Any) -> list[str]:
    return forked(str(SCRIPT), json.dumps({"settings": dict(settings or {}), "engine": engine}))
