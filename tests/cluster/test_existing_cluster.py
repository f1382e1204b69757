"""A cluster that runs already: replicas join it, are replaced under load, grow with it, and split over ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.cluster.leases import ROUTE_SECONDS
from headway.server.keys import add_key
from support.many_models import model_folders
from support.replicas import RayCluster, ServerProcess, users
from support.small import small_folder

PATIENCE = 300
VERSIONS = """
import sys, ray
ray.__version__ = "1.0.0"
from headway.base.errors import InvalidInput
from headway.cluster.connect import cluster
try:
    with cluster(sys.argv[1]):
        pass
except InvalidInput as error:
    print(error)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model_folders(tmp_path_factory.mktemp("models"), "one", "two")


@pytest.fixture
def started(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[Any]:
    servers: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        (tmp_path / str(len(servers))).mkdir()
        servers.append(ServerProcess(tmp_path / str(len(servers)), *flags, ray=ray_cluster))
        servers[-1].wait()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def python(ray: RayCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python program that may use the cluster, run to its end."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=ray.env, capture_output=True, text=True, check=False, timeout=PATIENCE)


def text(server: ServerProcess) -> str:
    return server.chat(users("Say a word."))["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_a_model_is_replaced_under_load(started: Any, ray_cluster: RayCluster, models: dict[str, Path], tmp_path: Path):
    """Every request of the meantime is answered, by the old model or the new one."""
    common = ("--app", "rolling", "--served-model-name", "it", "--limit", "drain_timeout=20", "--replicas", "2")
    server = started("--model", str(models["one"]), *common)
    first, seen, stop = text(server), [], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            seen.append(text(server))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    told = ("-m", "headway.cli.main", "serve", "--threads", "1", "--model", str(models["two"]), *common)
    done = python(ray_cluster, *told, "--ray", ray_cluster.address, "--update")
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + PATIENCE
    while seen[-20:].count(first) and time.monotonic() < deadline:
        time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    second = text(server)
    assert second != first
    assert set(seen) == {first, second}


@pytest.mark.slow
def test_replicas_come_with_requests_and_go_without(started: Any, models: dict[str, Path], tmp_path: Path):
    """With keys, of which nothing stays behind."""
    left, limits = set(key_files()), ("--replicas", "1", "--max-replicas", "2", "--target-requests", "1")
    key = add_key(tmp_path / "keys.json", "ann")
    one = ("--model", str(models["one"]), "--app", "scaling", "--keys", str(tmp_path / "keys.json"))
    server = started(*one, *limits, "--scale-down-after", "1")
    assert server.call("/v1/models")[0] == 401
    server.key = key
    assert len(server.replicas(1)) == 1
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            server.chat(users("Say many words."), max_tokens=200, ignore_eos=True)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        assert len(server.replicas(2)) == 2
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert text(server)
    assert len(server.replicas(1)) == 1
    assert text(server)
    assert set(key_files()) <= left


def key_files() -> Iterator[Path]:
    return Path(tempfile.gettempdir()).glob("headway-keys-*")


@pytest.mark.slow
def test_a_full_queue_is_said_at_once(started: Any, models: dict[str, Path]):
    few = ("--limit", "max_queue_requests=2", "--limit", "max_sessions=1")
    server = started("--model", str(models["one"]), "--app", "full", "--replicas", "1", *few)
    expected, found = text(server), []
    body = {"messages": users("Say many words."), "max_tokens": 2000, "ignore_eos": True}

    def ask() -> None:
        begun = time.monotonic()
        found.append((*server.answer("/v1/chat/completions", body), time.monotonic() - begun))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 12
    refused = [one for one in found if one[0] != 200]
    assert len(refused) >= 6
    for status, headers, answer, seconds in refused:
        # What the front cannot queue, and what it has sent to a replica that was as full.
        assert (status, answer["error"]["code"]) in ((503, "busy"), (429, "queue_full")), answer
        assert int(headers["retry-after"]) >= 1
        assert seconds < ROUTE_SECONDS / 2, answer  # nobody waits for a replica that there is not
    assert text(server) == expected


@pytest.mark.slow
def test_a_replica_on_two_ranks_answers_as_one_on_one(started: Any, tmp_path: Path):
    """If one of its ranks dies, its engine is dead: the replica says so, and another takes its place."""
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 4096,
    }
    dense = ("--model", str(small_folder(tmp_path, **heads)), "--dtype", "float32", "--replicas", "1")
    alone = started(*dense, "--app", "whole")
    split = started(*dense, "--app", "split", "--tensor-parallel", "2")
    expected = text(alone)
    assert text(split) == expected
    (before,) = split.replicas(1)
    (rank,) = psutil.Process(before["pid"]).children()
    rank.kill()
    deadline = time.monotonic() + PATIENCE
    while before["replica"] in {one["replica"] for one in split.replicas(None)}:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    (after,) = split.replicas(1)
    assert after["pid"] != before["pid"]
    assert text(split) == expected


@pytest.mark.slow
def test_an_application_that_runs_already_is_not_replaced_unasked(
    started: Any, ray_cluster: RayCluster, models: dict[str, Path], tmp_path: Path
):
    started("--model", str(models["one"]), "--app", "taken", "--replicas", "1")
    again = ("-m", "headway.cli.main", "serve", "--ray", ray_cluster.address, "--replicas", "1", "--port", "0", "--app")
    done = python(ray_cluster, *again, "taken")
    assert "already serves an application 'taken'; give --update" in done.stderr
    missing = python(ray_cluster, *again, "absent", "--update")
    assert "serves no application 'absent'; start it without --update" in missing.stderr


@pytest.mark.slow
def test_an_input_that_changes_ends_a_job_that_resumes_when_it_is_restored(ray_cluster: RayCluster, tmp_path: Path):
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    whole = "".join(json.dumps({"id": f"key{i}", "prompt": f"prompt {i}"}) + "\n" for i in range(120))
    source.write_text(whole)
    job = {"input": str(source), "output": str(out), "key": "id", "concurrency": 4, "workers": 1, "stage": "deadly"}
    script = str(Path(__file__).parents[1] / "support/ray_jobs.py")
    command = [script, ray_cluster.address, json.dumps([job | {"seconds": 0.05}])]
    driver = subprocess.Popen([sys.executable, *command], env=ray_cluster.env, stderr=subprocess.PIPE, text=True)
    journal, deadline = out / "results.jsonl.partial", time.monotonic() + PATIENCE
    while not journal.exists() or journal.read_text().count("\n") < 10:
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    source.write_text(whole.replace("prompt 119", "PROMPT 119"))
    _, said = driver.communicate(timeout=PATIENCE)
    assert driver.returncode != 0
    assert "has changed while the job reads it; restore it, and the same command resumes" in said
    assert "with another input, or its input has changed since; restore it" in python(ray_cluster, *command).stderr
    assert 9 <= journal.read_text().count("\n") - 1 < 120
    source.write_text(whole)
    assert python(ray_cluster, *command).returncode == 0
    found = [json.loads(line)["result"]["text"] for line in (out / "results.jsonl").read_text().splitlines()]
    assert found == [f"prompt {i}"[::-1] for i in range(120)]


@pytest.mark.slow
def test_another_version_is_one_sentence(ray_cluster: RayCluster):
    done = python(ray_cluster, "-c", VERSIONS, ray_cluster.address)
    assert "has another version of Ray or Python than this process (Ray 1.0.0" in done.stdout, done.stderr
