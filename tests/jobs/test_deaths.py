"""A row that ends its process: the job resumes past it after a few runs, and no other row is blamed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

import headway.batch
from headway.base.errors import InvalidInput
from headway.jobs.deaths import MAX_DEATHS, TRIES, CarefulWorker
from headway.jobs.folder import JobFolder
from headway.jobs.job import BatchJob
from headway.jobs.records import Record, watched
from headway.jobs.run import RowResult, run_records

REASON = "the process has ended 2 times while it computed nothing else; it is left out"


class Deadly:
    """Reads eight rows ahead, as an engine does, and ends its process when it reads POISON."""

    def __init__(self, *, killed_after: int | None = None, raises: bool = False) -> None:
        self._left, self._raises = killed_after, raises

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        waiting: list[Record] = []
        for record in todo:
            waiting.append(record)
            if record.value["prompt"] == "POISON":
                if self._raises:
                    raise InvalidInput("in good order")
                os.kill(os.getpid(), signal.SIGKILL)
            if len(waiting) == 8:
                yield self._computed(waiting.pop(0))
        while waiting:
            yield self._computed(waiting.pop(0))

    def _computed(self, record: Record) -> RowResult:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return RowResult(record, record.value["prompt"][::-1])


def job_of(folder: Path, prompts: list[str], **more: Any) -> BatchJob:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"key{i}", "prompt": text}) + "\n" for i, text in enumerate(prompts)))
    return BatchJob(path, folder / "out", "generate", key="id", **more)


def run(job: BatchJob, worker: Deadly) -> None:
    with JobFolder(job.output, job.identity("generate"), ".jsonl") as folder:
        made = headway.batch.careful(worker, job.work("generate"), folder)
        run_records(made, watched(str(job.input)), folder.journal)
        folder.finish()


def ended(job: BatchJob, worker: Deadly) -> int:
    """How a process ends that runs the job."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            run(job, worker)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("at", [[0], [20], [39], [5, 7], [3, 30]])
def test_a_row_that_ends_its_process_is_left_out_after_a_few_runs(tmp_path: Path, at: list[int]) -> None:
    job = job_of(tmp_path, ["POISON" if i in at else f"row {i}" for i in range(40)])
    ends = []
    while not ends or ends[-1] != 0:
        ends.append(ended(job, Deadly()))
        assert len(ends) <= len(at) * (TRIES + MAX_DEATHS) + 1
    assert ends[:-1] == [-signal.SIGKILL] * (len(ends) - 1)
    found = {one["line"]: one["result"] for one in lines(job.output / "results.jsonl")}
    assert found == {i + 1: f"row {i}"[::-1] for i in range(40) if i not in at}
    errors = {(one["line"], one["key"]): one["error"] for one in lines(job.output / "errors.jsonl")}
    assert errors == {(i + 1, f"key{i}"): REASON for i in at}
    assert {path.name for path in job.output.iterdir()} == {"job.json", "results.jsonl", "errors.jsonl"}


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_costs_no_row(tmp_path: Path, seed: int) -> None:
    """A kill falls on one row alone at times, but never twice on the same, as every run gets further."""
    job, draw = job_of(tmp_path, [f"row {i}" for i in range(60)]), random.Random(seed)
    ends = []
    while not ends or ends[-1] != 0:
        ends.append(ended(job, Deadly(killed_after=draw.randrange(1, 12))))
    assert ends.count(-signal.SIGKILL) >= 4
    assert [one["result"] for one in lines(job.output / "results.jsonl")] == [f"row {i}"[::-1] for i in range(60)]
    assert not (job.output / "errors.jsonl").exists()


def test_a_process_that_ends_in_good_order_is_no_death(tmp_path: Path) -> None:
    job = job_of(tmp_path, [*(f"row {i}" for i in range(20)), "POISON"])
    for _ in range(2 * (TRIES + MAX_DEATHS)):
        with pytest.raises(InvalidInput, match="in good order"):
            run(job, Deadly(raises=True))
        assert not list(job.output.glob(".*"))
    assert ended(job, Deadly()) == -signal.SIGKILL  # nothing was left out


def test_a_note_of_another_job_is_of_no_account(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["POISON", "one"])
    for _ in range(TRIES + MAX_DEATHS):
        assert ended(job, Deadly()) == -signal.SIGKILL
    other = job_of(tmp_path, ["POISON", "two"])  # no row of the first was computed: the folder is free
    assert ended(other, Deadly()) == -signal.SIGKILL


def test_whole_lines_of_openais_format_say_it_in_theirs(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    job = BatchJob(tmp_path / "in.jsonl", tmp_path / "out", "openai")
    with JobFolder(job.output, job.identity("openai"), ".jsonl", whole_lines=True) as folder:
        worker = headway.batch.careful(Deadly(), job.work("openai"), folder)
        assert isinstance(worker, CarefulWorker)
        failed = worker._left_out(next(watched(str(job.input))), REASON)
        folder.journal.add_failure(failed.record, failed.result.reason, failed.key)
        folder.finish()
    (error,) = lines(job.output / "errors.jsonl")
    assert error["custom_id"] == "a"
    assert REASON in json.dumps(error)
