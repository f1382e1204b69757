"""A log that nobody reads, or that cannot be written, never stops the server."""

from __future__ import annotations

import fcntl
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest
from server_process import PATIENCE, QUIET, command

from headway.server import logs
from support.eventually import eventually

SMALL_PIPE = 4096  # bytes, the smallest there is


@contextmanager
def served(settings: dict[str, Any], stdout: int | IO[Any]) -> Iterator[subprocess.Popen[str]]:
    """A server's process, whose standard error can be read at its end."""
    process = subprocess.Popen(
        command(settings), stdout=stdout, stderr=subprocess.PIPE, text=True, env=os.environ | QUIET
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def address() -> Iterator[str]:
    """Of the server: a Unix socket, for the log that would tell its port is not read."""
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        yield f"{folder}/socket"


def status(address: str, path: str = "/health") -> int:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(PATIENCE)
        connection.sock.connect(address)
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def until_ready(address: str, process: subprocess.Popen[str]) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, "the server ended"
        try:
            return status(address) == 200
        except OSError:
            return False

    eventually(is_ready)


def test_a_pipe_that_nobody_reads_stops_neither_requests_nor_the_end(address: str) -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, SMALL_PIPE)
    with served({"unix_socket": address}, write) as process:
        os.close(write)
        until_ready(address, process)
        for _ in range(40):  # lines of more than a hundred bytes each
            assert status(address, "/nothing") == 404
        assert status(address) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    os.close(read)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk without space")
def test_a_full_disk_prints_no_tracebacks(address: str) -> None:
    with open("/dev/full", "w") as full, served({"unix_socket": address}, full) as process:
        until_ready(address, process)
        assert status(address, "/nothing") == 404
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")


def test_dropped_lines_are_counted_and_reported_once_there_is_a_reader() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, SMALL_PIPE)
    count = logs.MAX_QUEUED_LINES + 200
    with os.fdopen(write, "w") as stream, os.fdopen(read) as reader:
        logs.set_up(as_json=True, stream=stream)
        for number in range(count):
            logs.info("line", number=number)
        dropped = logs.dropped_lines()
        assert 0 < dropped < 200
        lines: list[dict[str, Any]] = []
        while not lines or lines[-1]["message"] != "log lines were dropped":
            lines.append(json.loads(reader.readline()))
        assert lines[-1]["lines"] == dropped
        logs.set_up(as_json=True, stream=sys.stderr)


def test_a_line_that_could_not_be_written_is_counted() -> None:
    class Full(io.StringIO):
        def write(self, s: str, /) -> int:
            raise OSError(28, "No space left on device")

    logs.set_up(as_json=False, stream=Full())
    logs.info("line")
    logs.flush()
    assert logs.dropped_lines() == 1
    logs.set_up(as_json=True, stream=sys.stderr)
