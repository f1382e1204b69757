"""The access log has the figures of every request that computes, whichever API it came by."""

from __future__ import annotations

import json
import socket

import pytest

from support.faces import CALLS, SECRET, Call, Faces


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.path} {'stream' in (call.body or {})}")
def test_every_line_has_the_model_tokens_reason_and_times(faces: Faces, call: Call) -> None:
    id, answer = faces.send(call)
    assert answer.status == 200, answer.body
    line = faces.line(id)
    assert (line["path"], line["status"], line["complete"]) == (call.path, 200, True)
    assert line["model"]
    assert line["prompt_tokens"] > 0
    assert line["cached_tokens"] >= 0
    assert 0 < line["compute_ms"] <= line["ms"]
    assert SECRET not in json.dumps(line)
    if call.is_text:
        assert line["finish"] in ("stop", "length")
        assert line["tokens"] > 0
        assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["compute_ms"]
    else:
        assert (line["finish"], line["tokens"] > 0) == ("stop", call.body is None)  # a recording becomes tokens


def test_infill_has_them_too(faces: Faces) -> None:
    """Where the model has no such tokens, the request is refused, and the line has what there is."""
    id, answer = faces.send(Call("/infill", "text_completion", {"input_prefix": "a", "input_suffix": "b"}))
    assert answer.status == 400
    assert "model" not in faces.line(id)


def test_cached_tokens_are_those_of_the_prefix(faces: Faces) -> None:
    call = Call("/v1/completions", "text_completion", {"prompt": "fox " * 40, "max_tokens": 2})
    first, second = (faces.line(faces.send(call)[0]) for _ in range(2))
    assert (first["cached_tokens"], second["cached_tokens"] > 0) == (0, True)


def test_a_response_in_the_background_has_a_line_of_its_own(faces: Faces) -> None:
    body = {"input": "hi", "max_output_tokens": 16, "background": True}
    id, answer = faces.send(Call("/v1/responses", "chat", body))
    assert answer.json["status"] in ("queued", "in_progress")
    line = faces.line(id, "background response")
    assert line["status"] in ("completed", "incomplete")
    assert line["model"]
    assert {"prompt_tokens", "cached_tokens", "tokens", "finish", "queue_ms", "first_token_ms"} <= line.keys()


def test_a_client_that_leaves_is_an_abort(faces: Faces) -> None:
    data = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: left\r\nContent-Length: {len(data)}"
    with socket.create_connection(("127.0.0.1", faces.server.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + data)
        connection.recv(500)
    line = faces.line("left")
    assert (line["complete"], line["finish"]) in {(False, "abort"), (True, "length")}
