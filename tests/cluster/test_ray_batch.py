"""Batch jobs on Ray clusters of their own: one result for each row, whoever dies. Quick ones are in test_on_ray."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

import headway.batch
from headway.cluster.batch import AHEAD, ChunkStage, RayWorker, RowSource, ray_worker
from headway.cluster.stage import HeadwayStage
from headway.jobs.job import RowWork, key_reader
from headway.jobs.records import Record, records
from headway.jobs.requests import unique
from headway.jobs.run import RowResult

OPTIONS = {"max_tokens": 4}
ENGINE = {"threads": 1, "pages": 512}


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # Ray waits for its parts for 15 seconds only


def rows(path: Path, count: int) -> Path:
    lines = [json.dumps({"id": f"key{i}", "prompt": f"The number {i} is"}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_a_stage_adds_results_to_a_dataset():
    from headway.cluster.connect import cluster

    with cluster("local", cpus=3, quiet=True) as ray:
        items = [{"id": f"key{i}", "prompt": f"The number {i} is"} for i in range(8)] + [{"id": "x", "prompt": ""}]
        made = ray.data.from_items(items).map_batches(
            HeadwayStage,
            fn_constructor_kwargs={"task": "generate", "options": OPTIONS, "key": "id", **ENGINE},
            batch_size=4,
            concurrency=1,
        )
        found = {row["id"]: row for row in made.iter_rows()}
    assert set(found) == {item["id"] for item in items}
    assert all(json.loads(row["result"])["completion_tokens"] <= 4 for name, row in found.items() if name != "x")


def command(source: Path, out: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "headway.cli.main", "batch", str(source), "--output", str(out), "--ray", "local"),
        *("--workers", "2", "--threads", "1", "--key", "id", "--set", "max_tokens=16", "--concurrency", "16"),
    ]


def journal_rows(out: Path) -> int:
    path = out / "results.jsonl.partial"
    return max(len(path.read_bytes().splitlines()) - 1, 0) if path.exists() else 0


def workers_of(driver: int) -> list[int]:
    """Processes of actors with an engine, of the cluster that a process has started."""
    found = psutil.Process(driver).children(recursive=True)
    return [process.pid for process in found if "ChunkStage" in "".join(process.cmdline())]


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_driver_lose_no_row(tmp_path: Path):
    source, out = rows(tmp_path / "rows.jsonl", 200), tmp_path / "out"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    driver = subprocess.Popen(command(source, out), env=env)
    while journal_rows(out) < 10:
        assert driver.poll() is None
        time.sleep(0.1)
    os.kill(workers_of(driver.pid)[0], signal.SIGKILL)
    before = journal_rows(out)
    while journal_rows(out) < before + 20:
        assert driver.poll() is None
        time.sleep(0.1)
    driver.kill()
    driver.wait()
    written = journal_rows(out)
    assert 0 < written < 200
    subprocess.run(command(source, out), env=env, check=True, timeout=600)
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [entry["key"] for entry in results] == [f"key{i}" for i in range(200)]
    alone = headway.batch.run(source, tmp_path / "alone", key="id", options={"max_tokens": 16}, threads=1)
    assert (out / "results.jsonl").read_text() == alone.results.read_text()


class CountingStage(ChunkStage):
    """Leaves a file for each chunk that it has computed."""

    def __call__(self, batch: Any) -> Any:
        computed = super().__call__(batch)
        (Path(os.environ["COUNTED"]) / str(time.monotonic_ns())).touch()
        return computed


class CountingWorker(RayWorker):
    _stage = CountingStage

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
        yield from super().results(todo)


@pytest.mark.slow
def test_a_slow_reader_holds_the_workers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chunks are computed a bounded number ahead of what has been read, and the reader does not grow."""
    monkeypatch.setattr("headway.cluster.batch.RayWorker", CountingWorker)
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    (tmp_path / "counted").mkdir()
    source = rows(tmp_path / "rows.jsonl", 4000)
    work = RowWork("score", key="id", concurrency=8, engine=ENGINE)
    key_of, what = key_reader(work)

    def settled() -> int:
        """Chunks that have been computed when no more come."""
        before, count = -1, 0
        while count != before or count == 0:
            time.sleep(5)
            before, count = count, len(list((tmp_path / "counted").iterdir()))
        return count

    with ray_worker(str(source), work, "local", workers=1, done=0) as worker:
        todo = unique(records(str(source)), key_of, what)
        with closing(worker.results(todo)) as results:
            first = [next(results) for _ in range(4)]
            assert [row.record.line for row in first] == [1, 2, 3, 4]
            ahead = settled()
            size = psutil.Process().memory_info().rss
            rest = sum(1 for _ in results)
            grown = psutil.Process().memory_info().rss - size
    assert rest == 3996
    assert ahead <= AHEAD + 2  # one is being read, and one that was let through has just been computed
    assert grown < 64 << 20


@pytest.mark.slow
def test_the_number_of_workers_changes_no_bit(tmp_path: Path):
    source = rows(tmp_path / "rows.jsonl", 40)
    same: dict[str, Any] = {"key": "id", "seed": 3, "deterministic": True, **ENGINE}
    for task, options in (("score", {}), ("generate", {"max_tokens": 12, "temperature": 1.0})):
        how = {**same, "task": task, "options": options}
        alone = headway.batch.run(source, tmp_path / task / "alone", concurrency=3, **how)
        pair = headway.batch.run(source, tmp_path / task / "ray", concurrency=16, ray="local", workers=2, **how)
        assert alone.failed == pair.failed == 0
        assert pair.results.read_bytes() == alone.results.read_bytes()


@pytest.mark.slow
def test_a_node_with_another_version_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.cluster.batch.VERSION", "0.0.1")  # of this process; workers have theirs
    with pytest.raises(
        headway.HeadwayError, match=r"on the node .* and the job was started with 0\.0\.1; install the same"
    ):
        headway.batch.run(rows(tmp_path / "r.jsonl", 3), tmp_path / "out", ray="local")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_node_without_the_model_is_one_sentence(tmp_path: Path):
    with pytest.raises(headway.HeadwayError, match=r"on the node .*no-such-model"):
        headway.batch.run(rows(tmp_path / "r.jsonl", 3), tmp_path / "out", model="./no-such-model", ray="local")


def test_rows_travel_as_they_are(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    raw = [bytes(range(256)), None]
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "raw": raw}), tmp_path / "in.parquet")
    source = RowSource(str(tmp_path / "in.parquet"), RowWork("generate"), 0, size=8, ahead=1)
    (first, second), _ = source.chunk(0)
    assert [first.record().value, second.record().value] == [
        {"prompt": "a", "raw": raw[0]},
        {"prompt": "b", "raw": None},
    ]
    assert all(isinstance(part, str | int | None) for part in dataclasses.astuple(first))
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "x": {"\\u0000bytes": 3}}\n')
    (row,), _ = RowSource(str(tmp_path / "in.jsonl"), RowWork("generate"), 0, size=8, ahead=1).chunk(0)
    assert row.record().value == {"prompt": "a", "x": {"\0bytes": 3}}
