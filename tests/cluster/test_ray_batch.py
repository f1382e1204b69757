"""Batch jobs on Ray clusters of their own: one result for each row, whoever dies. Quick ones are in test_on_ray."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

import headway.batch
import support.ray_jobs
from headway.cluster.batch import AHEAD, RayWorker, RowSource
from headway.cluster.stage import HeadwayStage
from headway.jobs.job import RowWork
from headway.jobs.journal import Journal
from headway.jobs.records import Record
from headway.jobs.run import RowResult
from support.ray_jobs import DeadlyStage

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


class CountingStage(DeadlyStage):
    """Leaves a file for each chunk that it has computed."""

    def __call__(self, batch: Any) -> Any:
        computed = super().__call__(batch)
        (Path(os.environ["COUNTED"]) / str(time.monotonic_ns())).touch()
        return computed


class CountingWorker(RayWorker):
    _stage = CountingStage

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        import ray.cloudpickle

        for module in (sys.modules[__name__], support.ray_jobs):
            ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import tests
        yield from super().results(todo)


class SlowJournal(Journal):
    """Waits after its fourth row until the workers have nothing more to do; notes what every process has by then, and
    before its last rows."""

    folder: Path
    ahead = 0
    sizes: list[dict[str, int]]

    def add(self, record: Record, result: Any, item: Any = None, key: str | None = None) -> None:
        super().add(record, result, item, key)
        if self.count == 4:
            before = -1
            while self.ahead != before or self.ahead == 0:
                time.sleep(2)
                before, type(self).ahead = self.ahead, len(list(self.folder.iterdir()))
        if self.count in (4, LARGE_ROWS - 50):
            gc.collect()
            self.sizes.append(own_bytes())


def own_bytes() -> dict[str, int]:
    """The memory of this process and of the source's, without what they share with others."""
    me = psutil.Process()
    (source,) = [one for one in me.children(recursive=True) if "RowSource" in "".join(one.cmdline())]
    return {name: one.memory_full_info().uss for name, one in (("driver", me), ("source", source))}


LARGE_ROWS, LARGE = 3000, 64 << 10  # rows, and bytes in each: 188 MiB, and as much in results


@pytest.mark.slow
def test_a_slow_reader_holds_the_workers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chunks are computed a bounded number ahead of what is written, and nobody keeps the rows of a whole job."""
    monkeypatch.setattr("headway.cluster.batch.RayWorker", CountingWorker)
    monkeypatch.setattr("headway.jobs.folder.Journal", SlowJournal)
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    SlowJournal.folder, SlowJournal.ahead, SlowJournal.sizes = tmp_path / "counted", 0, []
    SlowJournal.folder.mkdir()
    source = tmp_path / "rows.jsonl"
    with source.open("w") as file:
        for i in range(LARGE_ROWS):
            file.write(json.dumps({"id": f"key{i}", "prompt": f"{i:5} " * (LARGE // 6)}) + "\n")
    done = headway.batch.run(source, tmp_path / "out", key="id", concurrency=8, ray="local", workers=1, task="generate")
    assert (done.rows, done.failed) == (LARGE_ROWS, 0)
    assert 0 < SlowJournal.ahead <= AHEAD + 2  # one is being read, and one that was let through is just computed
    early, late = SlowJournal.sizes
    grown = {name: (late[name] - early[name]) >> 20 for name in late}
    assert max(grown.values()) < 64, grown


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
