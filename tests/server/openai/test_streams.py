"""Streams that end early: clients that leave at any point, errors in the middle, and neighbors who notice nothing."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

PROMPT = "Kubernetes pods are scheduled by the"


def sent(served, path, **body):
    """A connection on which a request was sent and nothing was read."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read", [0, 1, 2000])
def test_a_client_that_leaves_takes_its_pages_along(served, stream, read):
    with sent(served, "/v1/completions", prompt=PROMPT, max_tokens=4000, n=2, stream=stream, ignore_eos=True) as client:
        served.until(lambda: served.engine.stats().pages_held)
        if stream and read:
            assert client.recv(read)
    served.until(served.is_quiet)


def test_a_client_that_leaves_a_chat_or_a_scoring(served):
    messages = [{"role": "user", "content": "Tell me a long story. " * 20}]
    forms = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 3000, "stream": True, "ignore_eos": True}),
        ("/v1/completions", {"prompt": "word " * 6000, "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": ["a b c " * 500] * 40, "max_tokens": 50, "temperature": 0}),
    ]
    for path, body in forms:
        with sent(served, path, **body):
            served.until(lambda: served.engine.stats().pages_held)
        served.until(served.is_quiet)


def test_neighbors_of_those_who_leave_get_their_tokens(served):
    request_body = {"prompt": PROMPT, "max_tokens": 24, "seed": 12}
    expected = served.complete(**request_body)["choices"]

    def leave(number):
        with sent(served, "/v1/completions", prompt=PROMPT + str(number), max_tokens=2000, stream=True) as client:
            client.recv(1)

    with ThreadPoolExecutor(6) as pool:
        leaving = [pool.submit(leave, number) for number in range(12)]
        found = [pool.submit(served.complete, **request_body) for _ in range(4)]
        assert [one.result()["choices"] for one in found] == [expected] * 4
        for one in leaving:
            one.result()
    served.until(served.is_quiet)


def test_an_error_in_the_middle_is_an_event(served):
    """A form whose only end is forbidden: its first word comes, then nothing can."""
    request_body = {
        "prompt": "x",
        "max_tokens": 8,
        "structured_outputs": {"regex": "(yes|no) qqq"},
        "bad_words": ["qqq"],
    }
    response = served.post("/v1/completions", stream=True, **request_body)
    assert response.status == 200
    *chunks, last, empty = response.body.decode().split("\n\n")
    assert empty == ""
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "bad_words" in error["message"]
    assert chunks
    assert b"[DONE]" not in response.body
    assert "bad_words" in served.refused("/v1/completions", **request_body)["message"]
    served.until(served.is_quiet)


def test_an_error_before_the_first_event_is_a_status(served):
    response = served.post("/v1/completions", prompt="x", stream=True, structured_outputs={"regex": "(a"})
    assert response.status == 400
    assert response.headers["content-type"] == "application/json"
