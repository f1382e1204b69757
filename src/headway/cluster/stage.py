"""`HeadwayStage`: an engine in each actor of a Ray Data pipeline.

    import ray
    from headway.cluster import HeadwayStage

    rows = ray.data.read_json("prompts.jsonl")
    rows = rows.map_batches(
        HeadwayStage,
        fn_constructor_kwargs={"task": "generate", "model": "smollm2", "options": {"max_tokens": 64}},
        batch_size=128,
        concurrency=4,
        num_gpus=1,
    )

With `tensor_parallel=N` among the arguments, Ray must be told `num_gpus=N`, or as many CPUs.

Each row keeps its columns and gets two more: `result`, as JSON text, and `error`, the reason of a row that has none.
The seed of a row derives from its key, or from its contents where no column is the key: the same for any number of
actors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from headway.base.errors import HeadwayError
from headway.jobs.job import CONCURRENCY, RowWork
from headway.jobs.journal import dumped
from headway.jobs.records import Record
from headway.jobs.run import RowFailed, RowResult, plain, sentence
from headway.server.in_process import open_worker


class HeadwayStage:
    """A callable for `Dataset.map_batches`. Its arguments are those of `headway.batch.run`."""

    def __init__(
        self,
        task: str = "generate",
        *,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        columns: Iterable[str] = (),
        key: str | None = None,
        seed: int = 0,
        pooling: Mapping[str, str] | None = None,
        concurrency: int = CONCURRENCY,
        **engine: Any,
    ) -> None:
        work = RowWork(
            task, model, dict(options or {}), tuple(columns), key, seed, dict(pooling or {}), concurrency, engine
        )
        self._opened = open_worker(work)
        self._worker = self._opened.__enter__()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        names = list(batch)
        values = [dict(zip(names, row)) for row in zip(*(_listed(batch[name]) for name in names))]
        records = [Record(_number(value), value, 0) for value in values]
        rows = [outcome(row) for row in self._worker.results(records)]
        columns = {"result": [one[0] for one in rows], "error": [one[1] for one in rows]}
        return {**batch, **{name: np.array(column, dtype=object) for name, column in columns.items()}}

    def __del__(self) -> None:
        opened, self._opened = getattr(self, "_opened", None), None
        if opened is not None:
            opened.__exit__(None, None, None)


def outcome(row: RowResult) -> tuple[str | None, str | None]:
    """A row's result as JSON text, or why there is none, as JSON text too."""
    error = row.result if isinstance(row.result, Exception) else None
    if error is None:
        try:
            return dumped(plain(row.result)).decode(), None
        except (ValueError, TypeError, RecursionError) as problem:
            error = HeadwayError(f"the result is not valid JSON: {problem}")
    reason = error.reason if isinstance(error, RowFailed) else sentence(error)
    return None, dumped(reason).decode()


def _listed(column: Any) -> list[Any]:
    """A column's values as Python's own."""
    values = column.tolist() if hasattr(column, "tolist") else list(column)
    return [plain(value) for value in values]


def _number(value: Mapping[str, Any]) -> int:
    """A number that stands for a row's contents, in place of its line."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7], "little")
