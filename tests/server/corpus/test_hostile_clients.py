"""Clients that lie about where they are, are slow, or leave: at every byte of a request, anywhere in an answer."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.live import Live
from support.small import PROMPT
from support.sweeps import swept

C, M = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": (C, LONG),
    "stream": (C, LONG | {"stream": True}),
    "choices": (C, LONG | {"stream": True, "n": 4}),
    "best of": (C, LONG | {"best_of": 4}),
    "prompts": (C, LONG | {"stream": True, "prompt": [PROMPT + str(i) for i in range(20)]}),
    "scores": (C, LONG | {"prompt": "a" * 200, "max_tokens": 20, "echo": True, "logprobs": 20, "prompt_logprobs": 20}),
    "shaped": (C, LONG | {"stream": True, "structured_outputs": {"regex": "[a-z]{150}"}, "bad_words": ["abc"]}),
    "chat": (M, {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 180}),
    "call": (M, {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "required"}),
}


def written(path: str, body: dict[str, Any], *headers: str, host: str = "127.0.0.1") -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + data


@contextmanager
def connection(served: Live, *, buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as created:
        if buffer is not None:
            created.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        created.settimeout(60)
        created.connect(("127.0.0.1", served.port))
        yield created


def read_all(one: socket.socket) -> bytes:
    data = b""
    try:
        while piece := one.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def reset(one: socket.socket) -> None:
    """Leave without a word."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# -- Host --------------------------------------------------------------------------------------------------------------

HOSTS = [
    "evil.example.org",
    "127.0.0.1.evil.example.org",
    "localhost.evil.example.org",
    "127.0.0.1@evil.example.org",
    "evil.example.org@127.0.0.1",
    "127.0.0.1:80:80",
    "127.0.0.1:99999999",
    "localhost, evil.example.org",
    "127.0.0.1 evil.example.org",
    "127.0.0.1/../evil.example.org",
    "127.0.0.1#evil.example.org",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "0.0.0.0",
    "[::]",
    "[::ffff:10.0.0.1]",
    "169.254.169.254",
    "localhost.",
    "LOCALHOST\x00",
    "xn--lcalhost-9wa",
    "l\xf6calhost",
    "*",
    "",
]


def test_host_tricks(served: Live) -> None:
    """A web page that got its name to point here must not be answered, whatever it calls this server."""
    body = {"prompt": "a", "max_tokens": 1}
    for host in HOSTS:
        with connection(served) as one:
            one.sendall(written(C, body, "Connection: close", host=host))
            response = read_all(one)
        assert response.startswith(b"HTTP/1.1 400"), (host, response[:200])
        assert b'"error"' in response
        assert b"choices" not in response


def test_more_host_tricks(served: Live) -> None:
    """Two of them, none, in the request line, behind a proxy's headers."""
    data = b'{"prompt":"a","max_tokens":1}'
    end = b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    for head, status in (
        (b"POST /v1/completions HTTP/1.1\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example.org\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: evil.example.org\r\nHost: 127.0.0.1\r\n", 400),
        (b"POST /v1/completions HTTP/1.0\r\n", 400),
        (b"POST http://127.0.0.1/v1/completions HTTP/1.1\r\nHost: evil.example.org\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: evil.example.org\r\nX-Forwarded-Host: 127.0.0.1\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: evil.example.org\r\nForwarded: host=127.0.0.1\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost : evil.example.org\r\nHost: 127.0.0.1\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://evil.example.org\r\n", 403),
    ):
        with connection(served) as one:
            one.sendall(head + end)
            response = read_all(one)
        assert response.startswith(b"HTTP/1.1 %d" % status), (head, response[:200])


# -- slowness ----------------------------------------------------------------------------------------------------------


def test_a_client_that_writes_slowly_is_given_up(served: Live) -> None:
    """A byte at a time: the head has its time, and then the body."""
    whole = written(C, LONG | {"user": "a" * 400}, "X-Filler: " + "a" * 400)
    for start in (0, whole.index(b"\r\n\r\n") + 4):
        with connection(served) as one:
            one.sendall(whole[:start])
            one.settimeout(0.05)
            response, ended = b"", False
            for i in range(start, len(whole)):
                try:
                    one.sendall(whole[i : i + 1])
                    piece = one.recv(1 << 16)
                    response += piece
                    ended = ended or not piece
                except TimeoutError:
                    continue
                except (BrokenPipeError, ConnectionResetError):
                    ended = True
                if ended:
                    break
        assert ended
        assert b"HTTP/1.1 200" not in response


@pytest.mark.parametrize("form", ["stream", "chat"])
def test_a_client_that_never_reads_is_cut_off(served: Live, form: str) -> None:
    """A small buffer, and an answer of many megabytes: it never gets it, and its pages are back."""
    path, body = FORMS[form]
    body = body | {"n": 48, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 64} if path == M else {"logprobs": 64}
    with connection(served, buffer=2048) as one:
        one.sendall(written(path, body))
        served.until(lambda: served.engine.stats().pages_held > 20)
        served.until(lambda: served.engine.stats().pages_held < 20)  # but for the bystander's
        assert b"[DONE]" not in read_all(one)


def test_a_client_that_reads_slowly_gets_its_answer_or_is_cut_off(served: Live) -> None:
    """What it gets is what anybody gets, as far as it gets it."""
    body = LONG | {"stream": True, "temperature": 0, "max_tokens": 60}
    right = served.post(C, **body).body.decode().split("data: ")
    with connection(served, buffer=2048) as one:
        one.sendall(written(C, body, "Connection: close"))
        data = b""
        try:
            while piece := one.recv(200):
                data += piece
                time.sleep(0.002)
        except ConnectionResetError:
            pass
    texts = [_text(event) for event in data.decode(errors="replace").split("data: ")[1:-1]]
    assert texts
    assert texts == [_text(event) for event in right[1:]][: len(texts)]


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_leaving_at_every_byte_of_a_request(served: Live) -> None:
    whole = written(M, FORMS["chat"][1])
    for sent in range(0, len(whole) + 1, 7):
        with connection(served) as one:
            one.sendall(whole[:sent])
            if sent % 2:
                reset(one)


@pytest.mark.parametrize("form", swept(FORMS, 3))
def test_leaving_at_every_point_of_an_answer(served: Live, form: str) -> None:
    """Before anything is computed, in the middle of the prompt, after so many bytes, with an end or without a word."""
    path, body = FORMS[form]
    whole = written(path, body, "Connection: close")
    for count in (0, 1, 150, 400, 1001, 10_000):
        with connection(served) as one:
            one.sendall(whole)
            read = 0
            while read < count and (piece := one.recv(min(count - read, 4096))):
                read += len(piece)
                if b"\r\n\r\n" in piece and not body.get("stream"):
                    break
            if count % 100:
                reset(one)
    for wait in (0.0, 0.01, 0.1):
        with connection(served) as one:
            one.sendall(whole)
            time.sleep(wait)
            reset(one)


def test_half_a_goodbye(served: Live) -> None:
    """A client that stops sending but still reads: it gets its answer, or the connection ends; nothing stays."""
    for form in ("whole", "stream"):
        path, body = FORMS[form]
        with connection(served) as one:
            one.sendall(written(path, body, "Connection: close"))
            one.shutdown(socket.SHUT_WR)
            response = read_all(one)
        assert response == b"" or response.startswith(b"HTTP/1.1 200")


def test_a_second_request_in_the_middle_of_an_answer(served: Live) -> None:
    whole = written(C, FORMS["stream"][1])
    with connection(served) as one:
        one.sendall(whole)
        assert one.recv(1)
        one.sendall(whole * 20)
    with connection(served) as one:
        one.sendall(whole * 20)
        assert one.recv(1)


def _text(event: str) -> str:
    if "[DONE]" in event:
        return "[DONE]"
    start = event.index("{")
    return json.JSONDecoder().raw_decode(event, start)[0]["choices"][0]["text"]
