"""kill -9 at random moments, again and again: no request hangs, and every row of a job is there exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.replicas import PATIENCE, RayCluster, ServerProcess, users

SCRIPT = Path(__file__).parents[1] / "support/ray_jobs.py"
ROWS = 600


def actors(ray: RayCluster, name: str) -> list[int]:
    """The processes of a cluster's actors of this class."""
    found = []
    for process in psutil.Process(ray.pid).children(recursive=True):
        try:
            if name in "".join(process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_every_row_is_there_once_whoever_is_killed(ray_cluster: RayCluster, tmp_path: Path, seed: int):
    draw, kills, deadline = random.Random(seed), {"worker": 0, "source": 0, "driver": 0}, time.monotonic() + 1500
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"id": f"key{i}", "prompt": f"prompt {i}"}) + "\n" for i in range(ROWS)))
    job = {"input": str(source), "output": str(out), "key": "id", "concurrency": 8, "workers": 2, "seconds": 0.1}
    command = [sys.executable, str(SCRIPT), ray_cluster.address, json.dumps([job | {"stage": "deadly"}])]
    journal, code = out / "results.jsonl.partial", -9
    while code == -9:
        assert time.monotonic() < deadline, kills
        before = journal.stat().st_size if journal.exists() else 0
        driver = subprocess.Popen(command, env=ray_cluster.env, stderr=subprocess.DEVNULL)
        more = draw.randrange(2000, 12_000)
        next_kill = time.monotonic() + draw.uniform(0, 6)
        while driver.poll() is None:
            time.sleep(0.05)
            if kills["driver"] < 4 and journal.exists() and journal.stat().st_size > before + more:
                driver.kill()
                kills["driver"] += 1
                break
            if time.monotonic() > next_kill and kills["worker"] + kills["source"] < 12:
                kind = draw.choice(("worker", "worker", "source"))
                if found := actors(ray_cluster, "DeadlyStage" if kind == "worker" else "RowSource"):
                    kill(draw.choice(found))
                    kills[kind] += 1
                next_kill = time.monotonic() + draw.uniform(0, 6)
        code = driver.wait()
    assert code == 0
    assert min(kills.values()) >= 1, kills
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [entry["key"] for entry in results] == [f"key{i}" for i in range(ROWS)]
    assert [entry["result"]["text"] for entry in results] == [f"prompt {i}"[::-1] for i in range(ROWS)]
    assert not (out / "errors.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_requests_end_whoever_is_killed(ray_cluster: RayCluster, tmp_path: Path):
    """A response is whole and right, or says that it may be sent again; in the end everything is as it was."""
    draw, asked = random.Random(5), [f"What is {i} and {i}?" for i in range(6)]
    server = ServerProcess(tmp_path, "--replicas", "2", "--app", "kills", "--limit", "drain_timeout=5", ray=ray_cluster)
    try:
        server.wait()
        right = [text_of(server.chat(users(question), max_tokens=24)) for question in asked]
        done: list[tuple[int, bool, int, Any]] = []
        stop = threading.Event()

        def client(number: int) -> None:
            stream = number % 2 == 0
            while not stop.is_set():
                body = {"messages": users(asked[number]), "max_tokens": 24, "temperature": 0, "stream": stream}
                done.append((number, stream, *server.call("/v1/chat/completions", body)))

        clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for thread in clients:
            thread.start()
        for round in range(8):
            time.sleep(draw.uniform(0.5, 8))
            alive = server.call("/replicas")[1]["replicas"]
            for one in draw.sample(alive, min(len(alive), 2 if round % 4 == 3 else 1)):  # sometimes both
                kill(one["pid"])
        stop.set()
        for thread in clients:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()
        server.replicas(2)
        whole = sum(is_whole(number, stream, status, body, right) for number, stream, status, body in done)
        assert whole >= 6
        assert [text_of(server.chat(users(question), max_tokens=24)) for question in asked] == right
        assert all(one["leases"] == 0 for one in server.call("/replicas")[1]["replicas"])
    finally:
        server.close()


def text_of(response: dict[str, Any]) -> str:
    return response["choices"][0]["message"]["content"]


def is_whole(number: int, stream: bool, status: int, body: Any, right: list[str]) -> bool:
    """Whether a response is whole; what it has must be right, and what it lacks it must say."""
    if status == 503:
        assert body["error"]["code"] in ("replica_lost", "busy"), body
        return False
    assert status == 200, body
    if not stream:
        assert text_of(body) == right[number]
        return True
    events = [event for event in body.decode().split("\n\n") if event]
    lost = '"code": "replica_lost"' in events[-1]
    values = [json.loads(event.removeprefix("data: ")) for event in (events[:-1])]
    text = "".join(choice["delta"].get("content") or "" for value in values for choice in value["choices"])
    assert (right[number].startswith(text) and lost) or (text == right[number] and events[-1] == "data: [DONE]"), body
    return not lost
