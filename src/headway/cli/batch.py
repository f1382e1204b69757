"""`headway batch`: every row of a file through a model, into a folder; an interrupted job resumes where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headway.base.errors import InvalidInput
from headway.cli.flags.declare import Argument, Option, panel, with_flags
from headway.cli.flags.shared import INTEGER, NO_TIERS, EngineOptions, Json, Quiet
from headway.cli.pipeline import Columns, Restart, Set, WithInput, file_flag, read_options
from headway.cli.serve.flags import Classify, Embed, Rerank
from headway.cli.terminal.job_progress import job_progress
from headway.cli.terminal.render import emit_json, fetched, loading, note

cluster_flag = panel("On a cluster")

if TYPE_CHECKING:
    from headway.batch import BatchResult
    from headway.jobs.folder import JobFolder
    from headway.program.engine import Engine


@with_flags
def batch(
    input: Annotated[Path, Argument(metavar="INPUT", help="A .jsonl, .csv, .parquet or .txt file.")],
    *,
    options: EngineOptions = EngineOptions(),
    output: Annotated[
        Path,
        file_flag("--output", "-o", metavar="FOLDER", help="The folder for results and errors."),
    ],
    task: Annotated[
        str,
        Option(
            "--task",
            metavar="TASK",
            help="openai, generate, chat, score, or a task of pipelines; auto is what the first row looks like.",
        ),
    ] = "auto",
    set: Set = None,
    column: Columns = None,
    key: Annotated[
        str | None,
        file_flag("--key", metavar="NAME", help="The field that names a row; by default its line does."),
    ] = None,
    format: Annotated[
        str | None,
        file_flag("--format", metavar="FORMAT", help="Results as jsonl, csv or parquet; by default as the input."),
    ] = None,
    with_input: WithInput = False,
    restart: Restart = False,
    seed: Annotated[int, Option("--seed", **INTEGER, help="Rows draw from this seed and their keys.")] = 0,
    concurrency: Annotated[int, Option("--concurrency", **INTEGER, help="Rows in flight.")] = 128,
    ray: Annotated[
        str | None,
        cluster_flag(
            "--ray",
            metavar="ADDRESS",
            help="Compute on a Ray cluster: HOST:PORT, auto, or local, which starts one here.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        cluster_flag(
            "--workers",
            **INTEGER,
            help="Engines of the cluster; by default one for each GPU, or for each node without.",
        ),
    ] = None,
    embed: Embed = None,
    rerank: Rerank = None,
    classify: Classify = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compute every row of a file, once each. An interrupted job resumes when the same command is given again.

    A row that fails is in errors.jsonl with its reason; all others are in results, in order.

    --set gives fields of every request, such as max_tokens=64, or options of a pipeline.
    """
    from headway.batch import run_job
    from headway.jobs.job import PLAIN_TASKS, BatchJob

    plain = task in ("auto", "openai", *PLAIN_TASKS)
    job = BatchJob(
        input,
        output,
        task,
        options.model if plain or options.model != EngineOptions().model else None,
        read_options(set or ()),
        tuple(column or ()),
        key,
        seed,
        with_input,
        format,
        {role: name for role, name in (("embed", embed), ("rerank", rerank), ("classify", classify)) if name},
        concurrency,
        options.given() if plain else _pipeline_options(options),
    )

    def started(folder: JobFolder) -> None:
        if folder.done is not None:
            note(f"{folder.path} is complete already; nothing is computed")
        elif folder.journal.before:
            note(f"resuming after the {folder.journal.before} rows in {folder.journal.path}")

    def open_engine(path: Any) -> Engine:
        import headway as hw

        with loading() as layers:
            return hw.Engine(path, **options.given(), progress=layers)

    try:
        done = run_job(
            job,
            restart=restart,
            find=fetched,
            open_engine=open_engine,
            ray=ray,
            workers=workers,
            progress=job_progress,
            started=started,
        )
    except KeyboardInterrupt:
        if output.exists():
            note(f"stopped; the same command resumes from {output}")
        raise
    _show(done, as_json=as_json)


def _pipeline_options(options: EngineOptions) -> dict[str, Any]:
    """The options of a pipeline among those of engines; others are refused."""
    given, changed = options.given(), options.changed()
    others = ("threads", "memory", "memory_fraction", "kv_dtype", "tensor_parallel", *NO_TIERS)
    for name in others:
        if name in changed:
            raise InvalidInput(f"--{name.replace('_', '-')} is an option of engines, and this task is a pipeline's")
    return {name: given[name] for name in ("dtype", "device", "quantize") if name in given}


def _show(done: BatchResult, *, as_json: bool) -> None:
    if as_json:
        emit_json(
            {
                "rows": done.rows,
                "failed": done.failed,
                "resumed": done.resumed,
                "seconds": round(done.seconds, 3),
                "results": str(done.results),
                "errors": None if done.errors is None else str(done.errors),
            }
        )
        return
    note(f"{done.rows - done.failed} of {done.rows} rows are in {done.results}")
    if done.errors is not None:
        note(f"{done.failed} rows failed; {done.errors} has the reasons")
