"""`headway pipeline`: a task over a file, line by line; an interrupted job resumes where it stopped."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.base.errors import HeadwayError, InvalidInput
from headway.cli.options import ENGINE, Device, Quiet
from headway.cli.render import PLAIN_SECONDS, fetched, is_quiet, note
from headway.jobs.journal import Journal, dumped
from headway.jobs.records import PIPE, Record, check_input, item_of, kind_of, pyarrow_parquet, records

FILES = "Files"
WORDS = {"True": True, "False": False, "None": None}

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="A known name, a folder or a hub id org/name.", rich_help_panel=ENGINE
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="auto, float32, bfloat16, float16, autocast[:bfloat16|:float16].",
        rich_help_panel=ENGINE,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", metavar="FORMAT", help="int8: 8-bit linear layers on a CPU.", rich_help_panel=ENGINE),
]
BatchSize = Annotated[
    str, typer.Option("--batch-size", metavar="N", help="Rows per batch, or auto.", rich_help_panel=ENGINE)
]
Input = Annotated[
    str,
    typer.Option(
        "--input",
        "-i",
        metavar="FILE",
        help=".jsonl, .csv, .parquet, .txt with a text on each line; - reads a pipe.",
        rich_help_panel=FILES,
    ),
]
Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", help=".jsonl, .csv, .parquet; - is standard output.", rich_help_panel=FILES
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME",
        help="The field of a record that holds the item. May be repeated.",
        rich_help_panel=FILES,
    ),
]
WithInput = Annotated[
    bool, typer.Option("--with-input", help="Write each item with its result.", rich_help_panel=FILES)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.", rich_help_panel=FILES)]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard the progress of an interrupted job.", rich_help_panel=FILES)
]
OnError = Annotated[str, typer.Option("--on-error", metavar="stop|skip", help="What to do about a bad line.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="An option of the task; values are JSON or text. May be repeated."
    ),
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
    task: Annotated[str, typer.Argument(metavar="TASK", help="text-classification, sentence-embedding, …")],
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
    todo = (record for record in records(job.input) if not sink.has(record))
    with open_pipeline() as ready, _progress() as progress:
        for record, item, result in _results(ready, todo, job.columns):
            if isinstance(result, Exception):
                _failed(record, result, job, sink)
            else:
                _put(record, item if job.with_input else None, result, job, sink)
            progress(record)
    sink.check_complete()
    if sink.failed:
        shown = ", ".join(map(str, sink.failed[:10])) + (" …" if len(sink.failed) > 10 else "")
        note(f"{len(sink.failed)} lines failed and were left out: {shown}")


def _results(ready: Any, todo: Iterable[Record], columns: tuple[str, ...]) -> Iterator[tuple[Record, Any, Any]]:
    """Records in order, each with its item and its result or error."""
    waiting: deque[tuple[Record, Any, Exception | None]] = deque()

    def items() -> Iterator[Any]:
        for record in todo:
            try:
                if record.error is not None:
                    raise InvalidInput(record.error)
                item = item_of(record.value, columns)
            except HeadwayError as error:
                waiting.append((record, None, error))
                continue
            waiting.append((record, item, None))
            yield item

    def unreadable() -> Iterator[tuple[Record, Any, Any]]:
        while waiting and waiting[0][2] is not None:
            yield waiting.popleft()

    for result in ready(items(), on_error="return"):
        yield from unreadable()
        record, item, _ = waiting.popleft()
        yield record, item, result
    yield from unreadable()


def _put(record: Record, item: Any, result: Any, job: PipelineJob, sink: Journal | _StdoutSink) -> None:
    try:
        sink.add(record, plain(result), item)
    except ValueError as error:
        _failed(record, InvalidInput(f"the result is not valid JSON: {error}"), job, sink)


def _failed(record: Record, error: Exception, job: PipelineJob, sink: Journal | _StdoutSink) -> None:
    message = f"line {record.line}: {_sentence(error)}"
    if not job.skip:
        raise InvalidInput(f"{message}; correct it, or skip such lines with --on-error skip") from error
    note(f"headway: {message}")
    sink.add_failure(record, _sentence(error))


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, HeadwayError) else f"{type(error).__name__}: {text}"


def plain(value: Any) -> Any:
    """A result as JSON values: arrays and tensors become lists."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


class _StdoutSink:
    """Results on standard output, one JSON line each, without a journal."""

    def __init__(self) -> None:
        self.failed: list[int] = []

    def has(self, record: Record) -> bool:
        return False

    def check_complete(self) -> None:
        sys.stdout.flush()

    def add(self, record: Record, result: Any, item: Any = None) -> None:
        more = {} if item is None else {"input": item}
        sys.stdout.buffer.write(dumped({"line": record.line, **more, "result": result}) + b"\n")
        sys.stdout.buffer.flush()

    def add_failure(self, record: Record, error: str) -> None:
        self.failed.append(record.line)


# -- arguments --------------------------------------------------------------------------------------------------------


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` for a task's options."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"--set is {text!r}; it must be NAME=VALUE, e.g. normalize=false")
        if name in found:
            raise InvalidInput(f"--set {name} was given twice")
        try:
            found[name] = WORDS[value] if value in WORDS else json.loads(value)
        except ValueError:
            found[name] = value
    return found


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


# -- progress ----------------------------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Callable[[Record], None]]:
    """A callback for finished records: a bar on a terminal, a line now and then in a pipe."""
    if not sys.stderr.isatty() or is_quiet():
        plain = _PlainLines()
        try:
            yield plain
        finally:
            plain.end()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[lines]} lines"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}/s"),
        TimeRemainingColumn(),
    )
    done = _LineCount()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("", total=None, lines=0, rate="0")

        def show(record: Record) -> None:
            done.count += 1
            share = record.reached
            total = None if share is None else 1.0
            bars.update(bar, completed=share or 0, total=total, lines=done.count, rate=done.rate_text())

        yield show
    note(done.summary())


class _LineCount:
    """How many lines are done, and at what rate."""

    def __init__(self) -> None:
        self.began, self.count = time.monotonic(), 0
        self.first: float | None = None  # the fraction of the file that was done before this run

    def rate_text(self) -> str:
        return f"{self.count / max(time.monotonic() - self.began, 1e-9):.3g}"

    def summary(self) -> str:
        return f"{self.count} lines in {time.monotonic() - self.began:.1f} s, {self.rate_text()}/s"


class _PlainLines(_LineCount):
    """Progress as plain lines."""

    def __init__(self) -> None:
        super().__init__()
        self._next = self.began + PLAIN_SECONDS

    def __call__(self, record: Record) -> None:
        self.count += 1
        if self.first is None:
            self.first = record.reached
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + PLAIN_SECONDS
        note(f"{self.count} lines{self._share(record.reached, now)}, {self.rate_text()}/s")

    def _share(self, reached: float | None, now: float) -> str:
        if reached is None or self.first is None:
            return ""
        gone = reached - self.first
        left = f", {(now - self.began) * (1 - reached) / gone:.0f} s left" if gone > 0 else ""
        return f" ({reached:.0%}{left})"

    def end(self) -> None:
        note(self.summary())
