"""Large requests: others are served while one is parsed, validated, rendered and tokenized."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import websockets.sync.client

from support.live import Live
from support.sweeps import swept

USER = {"role": "user", "content": "hi"}
PROSE = "word " * 200_000
LONG = USER | {"content": PROSE * 5}
TOOL = {"type": "function", "function": {"name": "f", "description": PROSE, "parameters": {"type": "object"}}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TRIES = 3
LONGEST = 0.15  # seconds that others wait; each of these took longer in one call that nobody could interrupt


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


LARGE: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "tool": (CHAT, lambda: text({"messages": [USER], "tools": [TOOL]}), 400, "8192 tokens"),
    "tokens": (TEXT, lambda: text({"prompt": PROSE, "truncate_prompt_tokens": 9, "max_tokens": 1}), 200, "choices"),
    "lists": (CHAT, lambda: b'{"messages":[' + b"[]," * 2_300_000 + b"[]]}", 400, "more than 131072 lists"),
    "messages": (CHAT, lambda: text({"messages": [USER] * 4096}), 400, "8192 tokens"),
    "names": (CHAT, lambda: text({"metadata": dict.fromkeys(map(str, range(600_000)), 1)}), 400, "more than 131072"),
    "ids": (TEXT, lambda: text({"prompt": [5] * 2_300_000}), 400, "more than 1048576 numbers"),
    "texts": (CHAT, lambda: text({"messages": [LONG], "truncate_prompt_tokens": 9}), 400, "4,194,304 characters"),
}


@contextmanager
def waits(served: Live) -> Iterator[list[float]]:
    """How long somebody else waits for the simplest answer, each time.

    Where others have the machine's cores, it is the time that this process computes meanwhile: what keeps the GIL or
    the event loop computes here.
    """
    found: list[float] = []
    ended, asked = threading.Event(), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            began, computed = time.perf_counter(), time.process_time()
            assert served.get("/health").status == 200
            found.append(min(time.perf_counter() - began, time.process_time() - computed))
            asked.set()
            time.sleep(0.002)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(60)
    found.clear()
    try:
        yield found
    finally:
        time.sleep(0.02)
        ended.set()
        thread.join()


@pytest.mark.parametrize("name", swept(LARGE, 4))
def test_others_are_served_beside_a_large_request(served: Live, name: str) -> None:
    path, make, status, found = LARGE[name]
    body, longest = make(), []
    for _ in range(TRIES):
        with waits(served) as seconds:
            answer = served.ask("POST", path, body)
        assert (answer.status, found.encode() in answer.body) == (status, True), answer.body[:300]
        longest.append(max(seconds))
        if longest[-1] < LONGEST:
            return
    pytest.fail(f"others waited {longest} seconds")


@pytest.mark.slow  # the client masks what it sends in this process
def test_others_are_served_beside_a_large_message_of_a_session(served: Live) -> None:
    lists = '{"type":"hello","x":[' + "[]," * 2_300_000 + "[]]}"
    longest = []
    for _ in range(TRIES):
        url = f"ws://127.0.0.1:{served.port}/v1/session"
        with websockets.sync.client.connect(url, max_size=None) as socket, waits(served) as seconds:
            socket.send(lists)
            assert b"more than 131072 lists" in bytes(socket.recv())
        longest.append(max(seconds))
        if longest[-1] < LONGEST:
            return
    pytest.fail(f"others waited {longest} seconds")
