"""`headway pipeline`: a task over a file, line by line; an interrupted job resumes where it stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.cli.flags.declare import Argument, Option, panel
from headway.cli.flags.shared import Device, Quiet, engine_flag
from headway.cli.terminal.job_progress import job_progress
from headway.cli.terminal.render import fetched, note
from headway.jobs.deaths import CarefulWorker
from headway.jobs.journal import Journal, dumped
from headway.jobs.records import PIPE, Record, check_input, kind_of, pyarrow_parquet, watched
from headway.jobs.requests import left_out
from headway.jobs.run import PipelineWorker, Worker, run_records, sentence

file_flag = panel("Files")
WORDS = {"True": True, "False": False, "None": None}

Model = Annotated[
    str | None, engine_flag("--model", "-m", metavar="MODEL", help="A known name, a folder or a hub id org/name.")
]
Dtype = Annotated[
    str, engine_flag("--dtype", metavar="TYPE", help="auto, float32, bfloat16, float16, autocast[:bfloat16|:float16].")
]
Quantize = Annotated[
    str | None, engine_flag("--quantize", metavar="FORMAT", help="int8: 8-bit linear layers on a CPU.")
]
BatchSize = Annotated[str, engine_flag("--batch-size", metavar="N", help="Rows per batch, or auto.")]
Input = Annotated[
    str,
    file_flag(
        "--input", "-i", metavar="FILE", help=".jsonl, .csv, .parquet, .txt with a text on each line; - reads a pipe."
    ),
]
Output = Annotated[
    str, file_flag("--output", "-o", metavar="FILE", help=".jsonl, .csv, .parquet; - is standard output.")
]
Columns = Annotated[
    list[str] | None,
    file_flag("--column", metavar="NAME", help="The field of a record that holds the item. May be repeated."),
]
WithInput = Annotated[bool, file_flag("--with-input", help="Write each item with its result.")]
Overwrite = Annotated[bool, file_flag("--overwrite", help="Replace an existing output.")]
Restart = Annotated[bool, file_flag("--restart", help="Discard the progress of an interrupted job.")]
OnError = Annotated[str, Option("--on-error", metavar="stop|skip", help="What to do about a bad line.")]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUE", help="An option of the task; values are JSON or text. May be repeated."),
]


@dataclass(frozen=True)
class PipelineJob:
    """The files of a job and how its lines are read."""

    input: str
    output: str
    columns: tuple[str, ...]
    skip: bool
    with_input: bool


def pipeline(
    task: Annotated[str, Argument(metavar="TASK", help="text-classification, sentence-embedding, …")],
    *,
    input: Input,
    output: Output,
    model: Model = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantize: Quantize = None,
    batch_size: BatchSize = "auto",
    set: Set = None,
    column: Columns = None,
    with_input: WithInput = False,
    on_error: OnError = "stop",
    overwrite: Overwrite = False,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Run TASK over every line of a file. An interrupted job resumes when the same command is given again.

    Each result carries its line number.

    A line that fails ends the job (--on-error stop), or is reported and left out (--on-error skip).
    """
    job = PipelineJob(input, output, tuple(column or ()), _skips(on_error), with_input)
    options = read_options(set or ())
    _check_files(job, overwrite)
    arguments = {"device": device, "dtype": dtype, "quantize": quantize, "batch_size": _batch_size(batch_size)}
    if output == PIPE:
        _run(lambda: _open(task, model, arguments, options), job, _StdoutSink())
        return
    identity = {"task": task, "model": model, "dtype": dtype, "quantize": quantize, "options": options}
    identity |= {"input": input if input == PIPE else str(Path(input).resolve()), "columns": list(job.columns)}
    identity |= {"with_input": with_input}
    with Journal(Path(output), identity, restart=restart) as journal:
        if journal.before:
            note(f"resuming after the {journal.before} lines in {journal.path}")
        try:
            _run(lambda: _open(task, model, arguments, options), job, journal)
        except KeyboardInterrupt:
            if journal.started:
                note(f"stopped; the same command resumes from {journal.path}")
            raise
        journal.finish()


def _run(open_pipeline: Callable[[], Any], job: PipelineJob, sink: Journal | _StdoutSink) -> None:
    """Run every record that is not done yet through the pipeline and into the sink."""

    def failed(record: Record, error: Exception) -> None:
        message = f"line {record.line}: {sentence(error)}"
        if not job.skip:
            raise InvalidInput(f"{message}; correct it, or skip such lines with --on-error skip") from error
        note(f"headway: {message}")

    with open_pipeline() as ready, job_progress() as progress:
        worker: Worker = PipelineWorker(ready, job.columns)
        if isinstance(sink, Journal):
            worker = CarefulWorker(
                worker, sink.note, sink.job, lambda record, reason: left_out(None, record, reason, None)
            )
        run_records(worker, watched(job.input), sink, with_input=job.with_input, failed=failed, progress=progress)
    if sink.failed:
        shown = ", ".join(map(str, sink.failed[:10])) + (" …" if len(sink.failed) > 10 else "")
        note(f"{len(sink.failed)} lines failed and were left out: {shown}")


class _StdoutSink:
    """Results on standard output, one JSON line each, without a journal."""

    def __init__(self) -> None:
        self.failed: list[int] = []

    def has(self, record: Record) -> bool:
        return False

    def check_complete(self) -> None:
        sys.stdout.flush()

    def add(self, record: Record, result: Any, item: Any = None, key: str | None = None) -> None:
        more = {} if item is None else {"input": item}
        sys.stdout.buffer.write(dumped({"line": record.line, **more, "result": result}) + b"\n")
        sys.stdout.buffer.flush()

    def add_failure(self, record: Record, error: Any, key: str | None = None) -> None:
        self.failed.append(record.line)


# -- arguments --------------------------------------------------------------------------------------------------------


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` for a task's options."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"--set is {text!r}; it must be NAME=VALUE, e.g. normalize=false")
        if name in options:
            raise InvalidInput(f"--set {name} was given twice")
        try:
            options[name] = WORDS[value] if value in WORDS else json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _skips(on_error: str) -> bool:
    if on_error not in ("stop", "skip"):
        raise InvalidInput(f"--on-error is {on_error!r}; it must be stop or skip")
    return on_error == "skip"


def _batch_size(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _check_files(job: PipelineJob, overwrite: bool) -> None:
    kinds = {kind_of(job.input, "--input"), kind_of(job.output, "--output")}
    if ".parquet" in kinds:
        pyarrow_parquet()
    check_input(job.input)
    if job.output == PIPE:
        return
    path = Path(job.output)
    if path.exists() and not overwrite and not path.with_name(path.name + ".partial").exists():
        raise InvalidInput(f"--output {job.output!r} exists; choose another, or give --overwrite")
    if job.input != PIPE and path.resolve() == Path(job.input).resolve():
        raise InvalidInput(f"--input and --output are both {job.input!r}; choose another output")


def _open(task: str, model: str | None, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    import headway as hw

    path = None if model is None else str(fetched(model))
    clash = options.keys() & {"model", "tokenizer", *arguments}
    if clash:
        raise InvalidInput(f"--set {min(clash)} is not a task option; use the flag")
    return hw.pipeline(task, path, **arguments, **options)
