"""Clients that mean harm or just misbehave: each is refused or cut off, and a bystander never notices.

Every test runs beside a bystander, whose tokens must be those it gets alone; afterwards nobody holds a page.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import Server, alone, parse, post, read_all

BYSTANDER, COUNT = list(range(40, 75)), 60


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    limits = {
        "header_timeout": 2,
        "body_timeout": 2,
        "write_timeout": 1,
        "keep_alive_timeout": 2,
        "max_header_bytes": 8192,
        "max_body_bytes": 100_000,
        "max_total_body_bytes": 150_000,
        "max_connections": 40,
    }
    return start(limits, step_seconds=0.005, pages=256).ready()


@pytest.fixture(scope="module")
def right() -> list[int]:
    return alone(BYSTANDER, COUNT)


@pytest.fixture(autouse=True)
def bystander(server: Server, right: list[int]) -> Iterator[None]:
    """Asks the same again and again on one connection, from before the attack until after it."""
    replies: list[list[int]] = []
    end, started = threading.Event(), threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body, answered = json.dumps({"prompt": BYSTANDER, "max_tokens": COUNT}), math.inf
        while not end.is_set() or not replies:
            if time.monotonic() - answered > 1:  # on a busy machine: soon nobody need keep the connection open
                connection.close()  # the next request opens another
            connection.request("POST", "/tokens", body)
            started.set()
            replies.append(json.loads(connection.getresponse().read())["tokens"])
            answered = time.monotonic()
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        assert started.wait(60)
        try:
            yield
        finally:
            end.set()
        asking.result()
    assert all(tokens == right for tokens in replies)
    server.until(server.is_quiet)
    assert server.get("/health").status == 200


# -- heads -------------------------------------------------------------------------------------------------------------


def test_a_large_head_is_refused_in_one_piece(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Large: " + b"a" * 20_000 + b"\r\n\r\n"
    reply = server.raw(head)
    assert reply.status == 431
    assert "8192" in reply.error["message"]


def test_a_long_path_counts_as_head(server: Server) -> None:
    reply = server.raw(b"GET /health?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert reply.status == 431


def test_a_head_that_never_ends_is_refused_when_it_is_too_large(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        try:
            for i in range(10_000):
                connection.sendall(b"X-%d: %s\r\n" % (i, b"a" * 100))
        except (BrokenPipeError, ConnectionResetError):
            return  # cut off while it was still sending
        assert parse(read_all(connection)).status == 431


def test_a_head_byte_by_byte_is_cut_off(server: Server) -> None:
    with server.connect() as connection:
        assert _drip(connection, b"GET /health HTTP/1.1\r\nX: " + b"a" * 1000)


def test_a_second_head_byte_by_byte_is_cut_off(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert _drip(connection, b"GET /health HTTP/1.1\r\nX: " + b"a" * 1000)


def test_a_connection_that_says_nothing_is_closed(server: Server) -> None:
    with server.connect() as connection:
        assert read_all(connection) == b""


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 50_000,
        b"G E T / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nA: b\x00c\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: Server, junk: bytes) -> None:
    with server.connect() as connection:
        try:
            connection.sendall(junk)
        except (BrokenPipeError, ConnectionResetError):
            return
        response = read_all(connection)
    if response:  # a flood of empty lines is no request yet: it is closed when its time is over
        reply = parse(response)
        assert 400 <= reply.status < 600
        assert reply.error["message"]
        id = reply.headers["x-request-id"]
        server.until(lambda: server.logged("rejected", request_id=id) or server.logged("request", request_id=id))


def test_a_request_of_two_lengths_is_refused_and_nothing_after_it_is_read(server: Server) -> None:
    hidden = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\n" + lengths + hidden)
        response = read_all(connection)
    assert response.count(b"HTTP/1.1 ") == 1
    reply = parse(response.split(b"\r\n\r\nHTTP/1.1")[0])
    assert reply.status == 400
    assert "Transfer-Encoding" in reply.error["message"]


def test_a_look_at_health_needs_no_body(server: Server) -> None:
    reply = server.ask("HEAD", "/health")
    assert (reply.status, reply.body) == (200, b"")


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_large_is_refused_unread(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10000000000\r\n\r\n")
        reply = parse(read_all(connection))
    assert reply.status == 413
    assert "100000" in reply.error["message"]


def test_a_client_that_sends_a_large_body_first_gets_to_read_the_refusal(server: Server) -> None:
    reply = server.ask("POST", "/tokens", b"x" * 5_000_000)
    assert reply.status == 413


def test_a_body_in_chunks_is_refused_when_it_gets_large(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(1000):
                connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return
        assert parse(read_all(connection)).status == 413


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/messages", "/api/chat", "/completion"])
def test_a_body_that_gets_large_is_refused_before_its_end(server: Server, path: str) -> None:
    """While it is read, in the words of the API: the end of this body never comes."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=line\r\n\r\n".encode())
        for _ in range(26):
            connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        reply = parse(read_all(connection))
    assert reply.status == 413
    error = json.loads(reply.body)["error"]
    match path:
        case "/v1/messages":
            assert error["type"] == "request_too_large"
        case "/api/chat":
            assert isinstance(error, str)
        case _:
            assert (error["type"], error["code"]) == ("invalid_request_error", "body_too_large")
    assert "larger than 100000 bytes; send less" in reply.body.decode()


def test_a_body_byte_by_byte_is_given_up(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")
        connection.settimeout(0.05)
        response = b""
        for _ in range(400):
            try:
                connection.sendall(b"x")
                response += (piece := connection.recv(1 << 16))
                if not piece:
                    break
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
    assert parse(response).status == 408
    assert parse(response).error["code"] == "body_timeout"


def test_a_body_that_never_comes_is_given_up(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")
        assert parse(read_all(connection)).status == 408


def test_a_client_that_waits_for_leave_to_send_is_refused_before_it_sends(server: Server) -> None:
    head = b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    assert server.raw(head).status == 413


def test_bodies_together_are_bounded(server: Server) -> None:
    head = b"POST /tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n"
    with server.connect() as first, server.connect() as second:
        first.sendall(head + b"x" * 90_000)
        second.sendall(head + b"x" * 90_000)
        refused = {parse(read_all(connection)).status for connection in (first, second)}
    assert 503 in refused
    assert refused <= {408, 503}


# -- readers and leavers -----------------------------------------------------------------------------------------------


def test_a_reader_that_never_reads_is_cut_off(server: Server) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = {"prompt": [1] * 20, "max_tokens": 2000, "stream": True, "pad": 60_000}
        connection.sendall(post("/tokens", body, "X-Request-Id: never-reads"))
        (line,) = server.until(lambda: server.logged("request", request_id="never-reads"))
        assert line["complete"] is False
        assert line["bytes_out"] < 2000 * 60_000


def test_a_reader_that_reads_a_little_is_cut_off(server: Server) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = {"prompt": [1] * 20, "max_tokens": 2000, "stream": True, "pad": 60_000}
        connection.sendall(post("/tokens", body, "X-Request-Id: reads-little"))
        while not server.logged("request", request_id="reads-little"):
            try:
                connection.recv(1)
            except ConnectionResetError:
                break
            time.sleep(0.05)
        (line,) = server.until(lambda: server.logged("request", request_id="reads-little"))
        assert line["complete"] is False


def test_an_answer_nobody_takes_does_not_keep_its_connection(server: Server) -> None:
    """The server is done with it and wants to close; what is left to send must not keep it open."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = {"prompt": [1] * 20, "max_tokens": 2, "pad": 20_000_000}
        connection.sendall(post("/tokens", body, "X-Request-Id: leaves-it", "Connection: close"))
        (line,) = server.until(lambda: server.logged("request", request_id="leaves-it"))
        assert line["complete"] is True
        server.until(lambda: _is_cut(connection))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(server: Server, stream: bool) -> None:
    id = f"leaves-{stream}"
    with server.connect() as connection:
        body = {"prompt": [2] * 20, "max_tokens": 3000, "stream": stream}
        connection.sendall(post("/tokens", body, f"X-Request-Id: {id}"))
        server.until(lambda: server.stats()["pages_held"] > 8)
    (line,) = server.until(lambda: server.logged("request", request_id=id))
    assert line["complete"] is False
    assert line["bytes_out"] < 3000 * 6


def test_a_client_that_sends_ahead_and_leaves_stops_its_generation(server: Server) -> None:
    """A server that stops reading while it answers would never see it leave."""
    with server.connect() as connection:
        body = {"prompt": [3] * 20, "max_tokens": 3000}
        health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        connection.sendall(post("/tokens", body, "X-Request-Id: ahead") + health)
        server.until(lambda: server.stats()["pages_held"] > 8)
        connection.sendall(health * 3000)
    (line,) = server.until(lambda: server.logged("request", request_id="ahead"))
    assert line["complete"] is False


def test_a_client_may_leave_at_every_point(server: Server) -> None:
    whole = post("/tokens", {"prompt": [4] * 20, "max_tokens": 400, "stream": True}, "X-Request-Id: somewhere")
    for sent in range(0, len(whole) + 1, 13):
        with server.connect() as connection:
            connection.sendall(whole[:sent])
    for pieces in range(6):
        with server.connect() as connection:
            connection.sendall(whole)
            for _ in range(pieces):
                connection.recv(40)
            if pieces % 2:  # with a reset instead of an end
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def test_too_many_connections_are_refused_and_the_others_stay(server: Server) -> None:
    held: list[socket.socket] = []
    try:
        while len(held) < 60:
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
        reply = parse(read_all(held[-1]))
    finally:
        for connection in held:
            connection.close()
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    server.until(lambda: _answers(server))


@pytest.mark.slow
def test_a_crowd_that_does_everything_wrong_at_once(start: Callable[..., Server]) -> None:
    """Random clients for half a minute: nobody gets a wrong token, nothing fails inside, everything is given back."""
    limits = {"body_timeout": 1, "write_timeout": 1, "header_timeout": 1, "max_queue_requests": 24}
    server = start(limits | {"max_connections": 100}, step_seconds=0.002, pages=512).ready()
    prompts = [[a] * 20 + [b] for a in range(3) for b in range(3)]
    right = {tuple(prompt): alone(prompt, 30) for prompt in prompts}
    end = time.monotonic() + 30

    def client(number: int) -> int:
        dice, served = random.Random(number), 0
        while time.monotonic() < end:
            prompt = dice.choice(prompts)
            body = {"prompt": prompt, "max_tokens": 30, "stream": dice.random() < 0.5, "pad": dice.choice([0, 30_000])}
            whole = post("/tokens", body, "Connection: close")
            try:
                with server.connect() as connection:
                    connection.sendall(whole[: dice.choice([len(whole), len(whole), dice.randrange(len(whole))])])
                    match dice.randrange(4):
                        case 0:
                            time.sleep(dice.random() / 10)  # and leave
                        case 1:
                            connection.recv(dice.randrange(1, 5000))
                        case _:
                            served += _right_or_refused(read_all(connection), right[tuple(prompt)])
            except OSError:  # refused or cut off
                continue
        return served

    with ThreadPoolExecutor(60) as threads:
        served = sum(threads.map(client, range(60)))
    assert served > 60
    server.until(server.is_quiet)
    assert not server.logged("a request failed")
    assert not [line for line in server.lines if line["level"] in ("error", "critical")]


def _right_or_refused(response: bytes, right: list[int]) -> bool:
    """Whether it is a whole answer; then its tokens must be right. Else it must be a refusal, or nothing."""
    if not response.startswith(b"HTTP/1.1 200"):
        assert response == b"" or parse(response).status in (408, 429, 503), response[:200]
        return False
    head, _, body = response.partition(b"\r\n\r\n")
    if b"chunked" in head:
        if not body.endswith(b"0\r\n\r\n"):
            return False
        tokens = [int(token) for token in re.findall(rb"data: (\d+)", body)]
    else:
        tokens = json.loads(body)["tokens"]
    assert tokens == right
    return True


def _answers(server: Server) -> bool:
    try:
        return server.get("/health").status == 200
    except (OSError, ValueError):
        return False


def _drip(connection: socket.socket, data: bytes) -> bool:
    """Send a byte at a time; whether the server closed before the end."""
    connection.settimeout(0.02)
    for i in range(len(data)):
        try:
            connection.sendall(data[i : i + 1])
            if connection.recv(1 << 16) == b"":
                return True
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return True
    return False


def _is_cut(connection: socket.socket) -> bool:
    """Whether the other side has reset the connection; what it sent before does not matter."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
