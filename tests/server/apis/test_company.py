"""The APIs side by side: a bystander's tokens while others misbehave, and streams that are ended by the server."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.live import Live, live
from support.small import at_rest, small_engine, tokens_of
from support.speaker import TEMPLATES, Stage, speaking_folder

USER = [{"role": "user", "content": "x"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "x", "stream": True, "ignore_eos": True, "max_output_tokens": 100},
    "/v1/messages": {"messages": USER, "stream": True, "ignore_eos": True, "max_tokens": 100},
    "/api/chat": {"model": "smollm2", "messages": USER, "options": {"num_predict": 100}},
}


def cut(served: Live, path: str, body: dict[str, Any], read: int) -> None:
    """Send a request, read some bytes of its response, and leave."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        if read:
            connection.recv(read)


def misbehave(served: Live, number: int, rounds: int) -> None:
    dice, last = random.Random(number), None
    for _ in range(rounds):
        path = dice.choice(list(STREAMS))
        match dice.randrange(5):
            case 0 | 1:
                cut(served, path, STREAMS[path], dice.choice([0, 1, 500, 3000]))
            case 2:
                answer = served.post(
                    "/v1/responses", input="y", max_output_tokens=4, previous_response_id=last, temperature=0
                )
                last = answer.json["id"] if answer.status == 200 else None
            case 3:
                assert served.post("/v1/responses", input="y", previous_response_id=f"resp_{number}").status == 404
                assert served.post("/v1/messages", messages=USER, max_tokens=1 << 30).status == 400
                assert served.post("/api/chat", model="smollm2", messages=[{"role": "tool"}]).status == 400
            case _ if last is not None:
                served.ask("DELETE", f"/v1/responses/{last}")
                last = None
            case _:
                cut(served, "/v1/responses", STREAMS["/v1/responses"] | {"background": True, "stream": False}, 0)


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_bad_company_changes_no_token_of_a_bystander(tmp_path: Path, rounds: int) -> None:
    with live(small_engine(tmp_path / "model", pages=128), stored_seconds=1.0) as served:
        right = tokens_of(served)
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(misbehave, served, number, rounds) for number in range(4)]
            while not all(one.done() for one in others):
                assert tokens_of(served) == right
            for one in others:
                one.result()
        assert tokens_of(served) == right
        at_rest(served)


def test_a_stream_whose_time_is_over_says_so_as_its_api_does(tmp_path: Path) -> None:
    folder = speaking_folder(tmp_path / "speaker")
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen.jinja").read_text())
    stage = Stage(folder)
    with live(stage.engine, request_timeout=0.7) as served:
        ends = {}
        for path, body in STREAMS.items():
            long = dict.fromkeys({"max_output_tokens", "max_tokens"} & set(body), 30000)

            def begun(path: str = path, body: dict[str, Any] = body | long | {"options": None}) -> Any:
                stage.say("y" * 30_000)
                return (found := served.post(path, **body)).status == 200 and found

            answer = served.until(begun)  # a busy machine may not have begun the stream in time
            ends[path] = answer.body.decode().strip().splitlines()
        *_, error, _, _, failed = ends["/v1/responses"][-5:]
        assert "took longer than 0.7 s" in json.loads(error.removeprefix("data: "))["message"]
        assert json.loads(failed.removeprefix("data: "))["response"]["status"] == "failed"
        assert ends["/v1/messages"][-2] == "event: error"
        assert json.loads(ends["/v1/messages"][-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert "took longer than 0.7 s" in json.loads(ends["/api/chat"][-1])["error"]
        at_rest(served)
