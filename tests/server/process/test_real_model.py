"""`headway serve` as a user runs it, with the default model: leavers, non-readers and SIGTERM change no token."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import Reply, Server, post

from support.forked import forked

ASKED: dict[str, Any] = {"prompt": "Kubernetes pods are scheduled by the", "max_tokens": 24, "temperature": 0}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def server(smollm2_path: Path) -> Iterator[Server]:
    command = forked("-m", "headway.cli.main", "serve", "--model", "smollm2", "--port", "0", "--json")
    server = Server([*command, "--pages", "512", "--threads", "1", "--limit", "write_timeout=1"]).ready()
    yield server
    server.stop()


def complete(server: Server, **more: Any) -> Reply:
    return server.ask("POST", "/v1/completions", ASKED | more, JSON)


def streamed_text(reply: Reply) -> str:
    """The text of a stream that ended as it should."""
    *events, last = [event.removeprefix("data: ") for event in reply.body.decode().split("\n\n") if event]
    assert last == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_bad_company_and_sigterm_change_no_token(server: Server) -> None:
    right = complete(server).json["choices"][0]["text"]
    assert right
    with ThreadPoolExecutor(4) as threads:
        bystanders = [threads.submit(complete, server) for _ in range(2)]
        for stream in (True, False):
            with server.connect() as leaver:
                body = ASKED | {"max_tokens": 4000, "stream": stream}
                leaver.sendall(post("/v1/completions", body, "Content-Type: application/json"))
                server.until(lambda: server.stats()["pages_held"] > 4)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            body = ASKED | {"max_tokens": 16, "logprobs": 5, "n": 8, "stream": True}
            deaf.sendall(post("/v1/completions", body, "Content-Type: application/json"))
            assert all(one.result().json["choices"][0]["text"] == right for one in bystanders)
            assert complete(server).json["choices"][0]["text"] == right
        server.until(server.is_quiet)
        last = threads.submit(complete, server, stream=True, max_tokens=200)
        server.until(lambda: server.stats()["pages_held"] > 1)
        server.signal(signal.SIGTERM)
        assert streamed_text(last.result()).startswith(right)
    assert server.end() == 0
    assert not server.errors
