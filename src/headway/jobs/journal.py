"""The progress of a job on disk, so that the same command resumes where it stopped, however it stopped.

The journal is `NAME.partial` next to the output: a line that identifies the job, then one JSON line for each record, in
order. Lines are only appended; an incomplete last line is removed on resume. The output itself appears complete, in one
rename, when every record is done; failures go to a file of their own if there is one. A record in the journal is never
computed again. A job that ends before its first record is done leaves no journal.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

from headway.base.errors import InvalidInput
from headway.jobs.records import Record, kind_of, pyarrow_parquet

SYNC_SECONDS = 2.0  # between two fsyncs
BATCH = 1024  # rows written to a parquet file together


class Journal:
    """The finished records of a job. `with Journal(output, job) as journal:`

    `errors` is the file for failures. With `whole_lines`, results and failures are lines of the files as they are.
    """

    def __init__(
        self,
        output: Path,
        job: dict[str, Any],
        *,
        restart: bool = False,
        errors: Path | None = None,
        whole_lines: bool = False,
    ) -> None:
        self.output, self.job, self._restart = output, json.loads(json.dumps(job)), restart
        self._errors, self._whole_lines = errors, whole_lines
        self.path = output.with_name(output.name + ".partial")
        self.note = output.with_name(f".{output.name}.note")  # of processes that died: see `deaths`
        self._done: Iterator[dict[str, Any]] = iter(())
        self.before = 0  # records that were done when the journal was opened
        self._synced = time.monotonic()
        self._added = 0
        self.failed: list[int] = []

    def __enter__(self) -> Self:
        self._file = self._locked()
        try:
            if self._restart:
                self.note.unlink(missing_ok=True)
            end = 0 if self._restart else self._read()
            self._file.truncate(end)
            if end == 0:
                self._write_line(dumped({"job": self.job}))
                self._file.flush()
            self._done = self._entries(self.before)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self.started:
            self.path.unlink(missing_ok=True)
        self._file.close()  # flushes the buffer and releases the lock

    @property
    def started(self) -> bool:
        """Whether any record is done."""
        return self.count > 0

    @property
    def count(self) -> int:
        """How many records are done."""
        return self.before + self._added

    # -- records -------------------------------------------------------------------------------------------------------

    def has(self, record: Record) -> bool:
        """Whether a record is done; records come in order. A record that has changed is an error."""
        known = next(self._done, None)
        if known is None:
            return False
        if (known["line"], known["crc"]) != (record.line, record.crc):
            raise InvalidInput(
                f"line {record.line} of the input has changed since {self.path} was started; restore it, "
                "or start over with --restart"
            )
        return True

    def check_complete(self) -> None:
        """Raise InvalidInput if the input is shorter than the journal."""
        known = next(self._done, None)
        if known is not None:
            raise InvalidInput(
                f"{self.path} has line {known['line']}, which the input no longer has; restore it, or start over "
                "with --restart"
            )

    def add(self, record: Record, result: Any, item: Any = None, key: str | None = None) -> None:
        """Append a finished record; raises ValueError for a result that JSON cannot hold."""
        more = ({} if key is None else {"key": key}) | ({} if item is None else {"input": item})
        self._append({"line": record.line, "crc": record.crc, **more, "result": result})

    def add_failure(self, record: Record, error: Any, key: str | None = None) -> None:
        """Append a record that failed."""
        more = {} if key is None else {"key": key}
        self._append({"line": record.line, "crc": record.crc, **more, "error": error})
        self.failed.append(record.line)

    def _append(self, entry: dict[str, Any]) -> None:
        line = dumped(entry)
        self._added += 1  # before the write: an interrupt in it must not remove what was written
        self._write_line(line)

    def _write_line(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()  # a killed process loses nothing; a machine without power at most SYNC_SECONDS
        if (now := time.monotonic()) - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = now

    def _locked(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InvalidInput(
                f"another process is writing {self.path}; wait for it, or choose another --output"
            ) from None
        return file

    def _read(self) -> int:
        """Read the existing journal; the end of its last complete line."""
        self._file.seek(0)
        end, previous = 0, dict[str, Any]()
        for raw in self._file:
            entry = _parsed(raw)
            if entry is None:
                break
            if end == 0:
                previous = self._job_of(entry)
            else:
                self.before += 1
                if "error" in entry:
                    self.failed.append(entry["line"])
            end += len(raw)
        if self.before == 0:
            return 0  # no record was done: start over, whatever that job was
        self._check_job(previous)
        return end

    def _job_of(self, first: dict[str, Any]) -> dict[str, Any]:
        job = first.get("job")
        if not isinstance(job, dict):
            raise InvalidInput(f"{self.path} is not the journal of a job; move it away, or start over with --restart")
        return job

    def _check_job(self, previous: dict[str, Any]) -> None:
        for name, value in self.job.items():
            if previous.get(name) != value:
                raise InvalidInput(
                    f"{self.path} was started with {name} {previous.get(name)!r}, and this is {value!r}; use the same, "
                    "choose another --output, or start over with --restart"
                )

    # -- output --------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the output, rename it into place, and remove the journal."""
        self.write_files()
        self.remove()

    def write_files(self) -> None:
        """Write the failures and the results, each renamed into place when it is complete."""
        self._file.flush()
        if self._errors is not None and self.failed:
            _replace(self._errors, self._failures)
        _replace(self.output, self._results)

    def remove(self) -> None:
        """Remove the journal of a job whose files are written."""
        self.path.unlink()

    def _results(self) -> Iterator[dict[str, Any]]:
        for entry in self._entries():
            if "error" not in entry:
                yield self._row(entry, "result")

    def _failures(self) -> Iterator[dict[str, Any]]:
        for entry in self._entries():
            if "error" in entry:
                yield self._row(entry, "error")

    def _row(self, entry: dict[str, Any], value: str) -> dict[str, Any]:
        del entry["crc"]
        return entry[value] if self._whole_lines else entry

    def _entries(self, count: int | None = None) -> Iterator[dict[str, Any]]:
        """The first `count` entries of the journal, or all."""
        with self.path.open("rb") as file:
            next(file)  # the job
            for raw in islice(file, count):
                yield json.loads(raw)


def dumped(value: Any) -> bytes:
    """`value` as one line of JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can hold
        return json.dumps(value, allow_nan=False, separators=(", ", ": ")).encode()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """A line of the journal; None if it is incomplete."""
    if not raw.endswith(b"\n"):
        return None
    try:
        entry = json.loads(raw)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _replace(path: Path, rows: Any) -> None:
    """Write a file of the rows, complete or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_output(unfinished, kind_of(path.name, "--output"), rows)
        _sync(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# -- output formats ----------------------------------------------------------------------------------------------------


def write_output(path: Path, kind: str, rows: Any) -> None:
    """Write the rows of `rows()` as a file of this format."""
    match kind:
        case ".jsonl":
            with path.open("wb") as file:
                for row in rows():
                    file.write(dumped(row) + b"\n")
        case ".csv":
            _write_csv(path, rows())
        case ".parquet":
            _write_parquet(path, rows)


def _write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer, header = csv.writer(file), None
        for row in rows:
            flat = _flat(row)
            if header is None:
                header = list(flat)
                writer.writerow(header)
            if list(flat) != header:
                raise InvalidInput(
                    f"line {row['line']} has the columns {', '.join(flat)}, and the first had {', '.join(header)}; "
                    "only .jsonl can hold results that differ"
                )
            writer.writerow(flat.values())


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """One level of columns: the fields of a result that is a dict, and JSON for nested values."""
    result = row.pop("result")
    columns = {**row, **(result if isinstance(result, dict) else {"result": result})}
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value
        for name, value in columns.items()
    }


def _write_parquet(path: Path, rows: Any) -> None:
    parquet = pyarrow_parquet()
    import pyarrow

    schema = None
    for batch in _batches(rows()):
        own = pyarrow.RecordBatch.from_pylist(batch).schema
        schema = own if schema is None else pyarrow.unify_schemas([schema, own], promote_options="permissive")
    with parquet.ParquetWriter(path, schema or pyarrow.schema([("line", pyarrow.int64())])) as writer:
        for batch in _batches(rows()):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
