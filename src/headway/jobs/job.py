"""One batch job: its input, its output folder, its task, and everything that changes its results.

Plain values, which any worker can be told: who computes the rows is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.jobs.folder import OWN
from headway.jobs.records import KINDS, file_digest, kind_of, pyarrow_parquet, records
from headway.jobs.requests import PLAIN_TASKS, OpenAIRows, PlainRows, RowFormat, is_openai_line, key_in_column

AUTO, OPENAI = "auto", "openai"
DEFAULT_MODEL = "smollm2"
CONCURRENCY = 128
ROLES = ("embed", "rerank", "classify")
# Options that change results, and their values that need no record.
RESULT_OPTIONS = {
    "dtype": ("auto", None),
    "quantize": ("auto", None),
    "kv_dtype": ("auto", None),
    "deterministic": (False, None),
    "tensor_parallel": (1, None),
}


@dataclass(frozen=True)
class RowWork:
    """What is done with each row, wherever: the part of a job that a worker needs."""

    task: str
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    key: str | None = None
    seed: int = 0
    pooling: Mapping[str, str] = field(default_factory=dict)
    concurrency: int = CONCURRENCY
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchJob:
    """One job. `run` has the meaning of each field."""

    input: Path
    output: Path
    task: str = AUTO
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    key: str | None = None
    seed: int = 0
    with_input: bool = False
    format: str | None = None
    pooling: Mapping[str, str] = field(default_factory=dict)
    concurrency: int = CONCURRENCY
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer(self.seed, "seed", 0)
        check_integer(self.concurrency, "concurrency", 1, 65_536)
        if not self.input.is_file():
            raise InvalidInput(f"the input is {str(self.input)!r}, which is not a file")
        kinds = {kind_of(self.input.name, "the input")}
        if self.format is not None and f".{self.format}" not in KINDS:
            raise InvalidInput(f"format is {self.format!r}; it must be {', '.join(kind[1:] for kind in KINDS)}")
        if ".parquet" in kinds | {f".{self.format}"}:
            pyarrow_parquet()
        if self.input.parent.resolve() == self.output.resolve() and self.input.name in OWN:
            raise InvalidInput(f"the input {str(self.input)!r} is a file of the output folder; choose another output")
        if unknown := sorted(set(self.pooling) - set(ROLES)):
            raise InvalidInput(f"{unknown[0]!r} is not a role of a model; the roles are {', '.join(ROLES)}")

    @property
    def kind(self) -> str:
        """The format of the results."""
        own = self.input.suffix.lower()
        return f".{self.format}" if self.format is not None else own if own in KINDS else ".jsonl"

    def work(self, task: str) -> RowWork:
        """What is done with its rows."""
        return RowWork(
            task,
            self.model,
            self.options,
            self.columns,
            self.key,
            self.seed,
            self.pooling,
            self.concurrency,
            self.engine,
        )

    def identity(self, task: str) -> dict[str, Any]:
        """What makes it the same job."""
        model = self.model or (DEFAULT_MODEL if task in (OPENAI, *PLAIN_TASKS) else None)
        same = {"task": task, "model": model, "options": dict(self.options), "columns": list(self.columns)}
        same |= {"key": self.key, "seed": self.seed, "with_input": self.with_input}
        same |= {"pooling": dict(self.pooling)}
        given = {name: self.engine.get(name) for name in RESULT_OPTIONS}
        same |= {name: value for name, value in given.items() if value not in RESULT_OPTIONS[name]}
        return same | {"input": file_digest(str(self.input))}


def task_of(job: BatchJob) -> str:
    """The job's task; auto is what the first readable row looks like."""
    task = job.task
    if task == AUTO:
        first = next((record.value for record in records(str(job.input)) if record.error is None), {"prompt": ""})
        task = _likely(first, str(job.input))
    if task == OPENAI and (job.kind != ".jsonl" or job.with_input or job.options or job.columns or job.key):
        raise InvalidInput(
            "rows of OpenAI's batch format are whole requests with keys of their own, and their results are .jsonl; "
            "leave out options, columns, the key, the input and the format"
        )
    if task not in (OPENAI, *PLAIN_TASKS) and job.pooling:
        raise InvalidInput(f"{min(job.pooling)} is a model for rows of OpenAI's format; {task} takes model")
    return task


def _likely(value: Any, name: str) -> str:
    if is_openai_line(value):
        return OPENAI
    for column, task in (("messages", "chat"), ("prompt", "generate")):
        if isinstance(value, dict) and column in value:
            return task
    seen = f"the columns {', '.join(map(str, value))}" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise InvalidInput(
        f"the first row of {name} has {seen}, neither messages nor prompt; name the task: {', '.join(PLAIN_TASKS)}, "
        "or a task of pipelines such as sentence-embedding"
    )


def rows_of(work: RowWork) -> RowFormat | None:
    """How rows become requests; None for the tasks of pipelines."""
    if work.task == OPENAI:
        return OpenAIRows(work.seed)
    if work.task in PLAIN_TASKS:
        return PlainRows(work.task, work.options, columns=work.columns, key_column=work.key, seed=work.seed)
    return None


def key_reader(work: RowWork) -> tuple[Callable[[Any], str | None], str]:
    """What reads the key of a row, and what that is called."""
    rows = rows_of(work)
    if rows is not None:
        return rows.key_of, "custom_id" if isinstance(rows, OpenAIRows) else "the key"
    return lambda value: key_in_column(value, work.key), "the key"
