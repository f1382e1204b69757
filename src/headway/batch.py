"""Batch jobs: a file of rows in, a folder with one result for each row out.

    import headway.batch

    done = headway.batch.run("prompts.jsonl", "answers", model="smollm2", options={"max_tokens": 64})
    print(done.rows, done.failed)

`headway batch` is this function. A job that was interrupted, however, resumes when it is given again: rows that are in
its folder are not computed again, and the seeds of the others derive from their keys. Rows are computed by one engine
here, or, with `ray`, by engines of a cluster; the journal is the same, so a job may be continued either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.jobs.deaths import CarefulWorker
from headway.jobs.folder import JobFolder
from headway.jobs.job import AUTO, CONCURRENCY, OPENAI, BatchJob, RowWork, key_reader, rows_of, task_of
from headway.jobs.records import Record, watched
from headway.jobs.requests import left_out, unique
from headway.jobs.run import RowResult, Worker, run_records
from headway.server.in_process import open_worker

if TYPE_CHECKING:
    from headway.program.engine import Engine


@dataclass(frozen=True)
class BatchResult:
    """What a job came to: its rows, how many failed, how many were done before this run, and its files."""

    rows: int
    failed: int
    resumed: int
    seconds: float
    results: Path
    errors: Path | None


def run(
    input: str | Path,
    output: str | Path,
    *,
    task: str = AUTO,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
    columns: Iterable[str] = (),
    key: str | None = None,
    seed: int = 0,
    with_input: bool = False,
    format: str | None = None,
    pooling: Mapping[str, str] | None = None,
    concurrency: int = CONCURRENCY,
    restart: bool = False,
    ray: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, float | None], None] | None = None,
    **engine: Any,
) -> BatchResult:
    """Compute every row of a .jsonl, .csv, .parquet or .txt file into a folder, once each.

    `task` is openai (lines of OpenAI's batch format), generate, chat, score (log-probabilities of prompts) or any task
    of `headway.pipeline`; auto takes it from the first row. `options` are the same for all rows: fields of the server's
    request, or options of the pipeline. `columns` name the field that holds a row's item, `key` the one that names the
    row; without it a row's key is its line. `format` is that of the results: jsonl, csv or parquet, by default the
    input's. `pooling` maps embed, rerank and classify to models for such rows of OpenAI's format. `concurrency` is how
    many rows are in flight, and changes no result beyond rounding. `restart` discards what the folder has of a job.
    `ray` is the address of a Ray cluster, whose `workers` engines compute the rows; "local" starts one here.
    `progress(rows, fraction)` is called after each row. `engine` are options of `Engine`, or of the pipeline.
    """
    if isinstance(columns, str):
        raise WrongType(f"columns is {columns!r}; it must be a list of names")
    job = BatchJob(
        Path(input),
        Path(output),
        task,
        model,
        dict(options or {}),
        tuple(columns),
        key,
        seed,
        with_input,
        format,
        dict(pooling or {}),
        concurrency,
        engine,
    )
    count = 0

    def counted(record: Record) -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, record.reached)

    return run_job(job, restart=restart, ray=ray, workers=workers, progress=lambda: nullcontext(counted))


def run_job(
    job: BatchJob,
    *,
    restart: bool = False,
    find: Callable[[str], Any] = str,
    open_engine: Callable[[Any], Engine] | None = None,
    ray: str | None = None,
    workers: int | None = None,
    progress: Callable[[], AbstractContextManager[Callable[[Record], None]]] = lambda: nullcontext(lambda record: None),
    started: Callable[[JobFolder], None] = lambda folder: None,
) -> BatchResult:
    """Run a job, here or by `workers` of the Ray cluster at an address.

    `find` turns a model's name into what is loaded, `open_engine` loads it; `progress` is entered when rows begin, and
    what it gives is called after each.
    """
    begun, task = time.monotonic(), task_of(job)
    work = job.work(task)
    key_of, what = key_reader(work)  # raises for options that rows cannot have
    if workers is not None and ray is None:
        raise InvalidInput("workers are engines of a Ray cluster; give its address too")
    with JobFolder(job.output, job.identity(task), job.kind, restart=restart, whole_lines=task == OPENAI) as folder:
        resumed = folder.journal.before if folder.done is None else folder.done["rows"]
        started(folder)
        if folder.done is None:
            if ray is None:
                opened = open_worker(work, find=find, open_engine=open_engine)
            else:
                from headway.cluster.batch import ray_worker

                opened = ray_worker(str(job.input), work, ray, workers=workers, done=folder.journal.before)
            with opened as given, progress() as show:
                worker = careful(given, work, folder) if ray is None else given
                source = unique(watched(str(job.input)), key_of, what)
                run_records(worker, source, folder.journal, with_input=job.with_input, progress=show)
            folder.finish()
        assert folder.done is not None
        failed = folder.done["failed"]
        errors = folder.errors if failed else None
        return BatchResult(folder.done["rows"], failed, resumed, time.monotonic() - begun, folder.results, errors)


def careful(worker: Worker, work: RowWork, folder: JobFolder) -> CarefulWorker:
    """The worker of this process, which a row may end: that costs a few runs, and not the job."""
    key_of, _ = key_reader(work)

    def failed(record: Record, reason: str) -> RowResult:
        return left_out(rows_of(work), record, reason, key_of(record.value))

    return CarefulWorker(worker, folder.journal.note, folder.journal.job, failed)
