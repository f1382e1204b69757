"""One local Ray cluster: replicas answer as one engine does, keep conversations together, and may be killed; so may
the workers of batch jobs. Everything that needs a cluster and is not slow is here, as a cluster takes long to start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
import headway.batch
from headway.base.specs.samplers import Argmax
from headway.cluster.prompts import owner
from support.plain_client import PlainSession, WebSocketFrames
from support.replicas import PATIENCE, RayCluster, ServerProcess, users

TEXT = "Once there was a lighthouse keeper who counted the ships that passed every night and wrote their names down. "


@pytest.fixture(scope="module")
def server(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--replicas", "2", "--limit", "drain_timeout=5", "--snapshots", str(tmp_path_factory.mktemp("snapshots")))
    made = ServerProcess(tmp_path_factory.mktemp("server"), *flags, ray=ray_cluster)
    try:
        made.wait()
        yield made
    finally:
        made.close()


def test_replicas_answer_as_one_engine_does(server: ServerProcess):
    questions = [f"{TEXT} What is {i} and {i}?" for i in range(4)]

    async def asked(engine: hw.Engine) -> list[str]:
        texts = []
        for question in questions:
            with engine.context() as ctx:
                ctx.user(question)
                texts.append(await ctx.generate(Argmax(), max_tokens=8).text())
        return texts

    with hw.Engine("smollm2", threads=1) as engine:
        alone = engine.run(asked)
    assert [server.chat(users(each))["choices"][0]["message"]["content"] for each in questions] == alone


def test_a_conversation_stays_where_its_pages_are(server: ServerProcess):
    deadline = time.monotonic() + PATIENCE
    while not server.call("/replicas")[1]["routing"]["prompt_pages"]:  # the front reads the tokenizer when it can
        server.chat(users(f"A first request. {TEXT}"), max_tokens=1)
        assert time.monotonic() < deadline
    for number in range(3):
        messages = [{"role": "system", "content": f"Conversation {number}. {TEXT}{TEXT}"}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}. {TEXT}"})
            response = server.chat(messages)
            usage = response["usage"]
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 2, (number, turn)
            messages.append({"role": "assistant", "content": response["choices"][0]["message"]["content"]})
    routing = server.call("/replicas")[1]["routing"]
    assert routing["held_pages"] > routing["prompt_pages"] // 3


def test_what_a_replica_keeps_is_found_there(server: ServerProcess):
    ids = set()
    for i in range(3):
        status, first = server.call("/v1/responses", {"input": f"{i} {TEXT}", "max_output_tokens": 16})
        assert status == 200, first
        ids.add(first["id"].partition("-")[0])
        status, second = server.call(
            "/v1/responses", {"input": "Go on.", "previous_response_id": first["id"], "max_output_tokens": 16}
        )
        assert status == 200, second
        assert server.call(f"/v1/responses/{first['id']}")[1]["id"] == first["id"]
    assert ids <= {f"resp_{one['replica']}" for one in server.replicas()}
    assert server.call("/v1/responses/resp_nowhere0-00")[0] == 404


def test_a_session_of_a_program_stays_on_its_replica(server: ServerProcess):
    engine = hw.connect(server.url)

    async def program(engine: Any) -> str:
        async with engine.context() as ctx:
            ctx.fill("The capital of France is")
            fork = ctx.fork()
            first = await ctx.generate(Argmax(), max_tokens=4).text()
            assert await fork.generate(Argmax(), max_tokens=4).text() == first
            return first

    try:
        assert engine.run(program)
    finally:
        engine.close()


def test_a_durable_snapshot_opens_on_another_replica(server: ServerProcess):
    async def save(engine: Any) -> str:
        async with engine.context() as ctx:
            ctx.fill(TEXT)
            await ctx.generate(Argmax(), max_tokens=4).text()
            ctx.save("kept", durable=True)
            return await ctx.generate(Argmax(), max_tokens=6).text()

    async def go_on(engine: Any) -> str:
        async with engine.open("kept") as ctx:
            return await ctx.generate(Argmax(), max_tokens=6).text()

    with hw.connect(server.url) as first, hw.connect(server.url) as second:
        assert [one["leases"] for one in server.replicas()] == [1, 1]
        assert first.run(save) == second.run(go_on)
        assert second.delete("kept")
        assert first.open("kept") is None


def test_a_session_that_was_cut_comes_back_to_its_replica(server: ServerProcess):
    """All are cut, then those of one replica come first: by load, every second one would be sent to the other."""
    host, port = server.url.removeprefix("http://").split(":")
    sessions = [PlainSession(lambda: WebSocketFrames(host, int(port))) for _ in range(4)]
    sessions.sort(key=lambda session: str(owner(session.welcome["session"])))
    assert {owner(one.welcome["session"]) for one in sessions} == {one["replica"] for one in server.replicas()}
    ctx, context = 1, {"seed": None, "priority": 0, "salt": "", "token_budget": None, "deadline": None}
    for session in sessions:
        session.ask("context.new", context=ctx, **context)
        session.ask("context.fill", context=ctx, text=[1, 2, 3], special=False)
    fills = [session.request("context.fill", context=ctx, text=[4], special=False) for session in sessions]
    for session in sessions:
        session.cut()
    for session, fill in zip(sessions, fills):
        session.come_back()
        session.value(fill)
        assert session.ask("context.tokens", context=ctx) == [1, 2, 3, 4]
    for session in sessions:
        assert session.bye() == "bye"


def test_metrics_say_which_replica_they_are_of(server: ServerProcess):
    names = {one["replica"] for one in server.replicas()}
    text = server.call("/metrics")[1].decode()
    assert all(f'replica="{name}"' in text for name in names)
    assert server.call("/health") == (200, {"status": "ready", "replicas": 2})


def test_a_killed_replica_hangs_nobody_and_comes_back(server: ServerProcess):
    before = server.replicas()
    results: list[tuple[bool, int, Any]] = []

    def ask(number: int, stream: bool) -> None:
        body = {"messages": users(f"{number} {TEXT}"), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        results.append((stream, *server.call("/v1/chat/completions", body | {"stream": stream})))

    threads = [threading.Thread(target=ask, args=(i, i % 2 == 0)) for i in range(8)]
    for thread in threads:
        thread.start()
    while sum(one["leases"] for one in server.call("/replicas")[1]["replicas"]) < 4 and not results:
        time.sleep(0.05)
    os.kill(before[0]["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == 8  # nobody hangs
    for stream, status, body in results:
        assert status == 200, body
        if stream:
            assert body.endswith(b"data: [DONE]\n\n") or b'"code": "replica_lost"' in body, body[-300:]
        else:
            assert body["usage"]["completion_tokens"] == 60
    after = server.replicas()
    assert before[0]["replica"] not in {one["replica"] for one in after}
    assert server.chat(users("hello"))["choices"]


# -- batch jobs --------------------------------------------------------------------------------------------------------

DRAWN = {"key": "id", "options": {"max_tokens": 4, "temperature": 1.0}, "seed": 3, "threads": 1, "pages": 512}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def by_line(path: Path | None) -> dict[int, Any]:
    assert path is not None
    return {entry["line"]: entry for entry in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def jobs(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two jobs that a process of their own has run: `drawn` with an engine, `deadly` without."""
    folder = tmp_path_factory.mktemp("jobs")
    prompts = [{"id": f"key{i}", "prompt": f"The number {i} is"} for i in range(12)]
    drawn = write_rows(folder / "drawn.jsonl", *prompts[:6])
    poison, twice = {"id": "bad", "prompt": "POISON"}, {"id": "key0", "prompt": "twice"}
    odd = '{"id": "odd", "prompt": "The", "more": [NaN, 1e999]}'
    place = {"id": "place", "prompt": "PLACE"}
    deadly = write_rows(folder / "deadly.jsonl", *prompts, "not JSON", poison, twice, odd, place)
    jobs = [
        {"input": str(drawn), "output": str(folder / "drawn"), "workers": 1, "concurrency": 8, **DRAWN},
        {"input": str(deadly), "output": str(folder / "deadly"), "workers": 1, "concurrency": 16, "key": "id",
         "stage": "deadly", "tensor_parallel": 2},
    ]  # fmt: skip
    script = Path(__file__).parents[1] / "support/ray_jobs.py"
    command = [sys.executable, str(script), ray_cluster.address, json.dumps(jobs)]
    done = subprocess.run(command, env=ray_cluster.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_a_job_on_ray_has_the_results_of_one_engine(jobs: Path, tmp_path: Path):
    alone = headway.batch.run(jobs / "drawn.jsonl", tmp_path / "alone", **DRAWN)
    assert (alone.rows, alone.failed) == (6, 0)
    assert (jobs / "drawn/results.jsonl").read_text() == alone.results.read_text()


def test_a_poison_row_fails_alone(jobs: Path):
    results, errors = (by_line(jobs / "deadly" / f"{name}.jsonl") for name in ("results", "errors"))
    assert {line: entry["result"]["text"] for line, entry in results.items()} == {
        **{i + 1: f"The number {i} is"[::-1] for i in range(12)},
        16: "ehT",
        17: "2",  # its workers have a CPU for each rank
    }
    assert {line: (entry.get("key"), entry["error"]) for line, entry in errors.items()} == {
        13: (None, "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        14: ("bad", "its worker died 2 times while it computed nothing else; it is left out"),
        15: ("key0", "the key 'key0' is also that of line 1; each must be unique"),
    }
