"""What a job has done so far, on disk, so that the same command goes on where it was stopped, however it was stopped.

The journal stands beside the output as `NAME.partial`: a line that says which job it belongs to, then one JSON line
for each record, in order. Lines are only added; one that was cut in the middle is cut off when the job goes on. The
output itself appears whole, in one rename, when every record is done. A record that is in the journal is never computed
again, and one that is not is computed: nothing is repeated and nothing is lost. A job that ends before its first record
is done leaves no journal, and so binds nobody to its mistake.
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

SYNC_SECONDS = 2.0  # between two times that the disk is waited for
BATCH = 1024  # rows written to a parquet file together


class Journal:
    """The records of a job that are done. `with Journal(output, job) as journal:`"""

    def __init__(self, output: Path, job: dict[str, Any], *, restart: bool = False) -> None:
        self.output, self._job, self._restart = output, json.loads(json.dumps(job)), restart
        self.path = output.with_name(output.name + ".partial")
        self._done: Iterator[dict[str, Any]] = iter(())
        self.before = 0  # records that were done when it was opened
        self._synced = time.monotonic()
        self._added = False
        self.failed: list[int] = []

    def __enter__(self) -> Self:
        self._file = self._locked()
        try:
            end = 0 if self._restart else self._read()
            self._file.truncate(end)
            if end == 0:
                self._write({"job": self._job})
                self._file.flush()
            self._done = self._entries(self.before)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self.begun:
            self.path.unlink(missing_ok=True)
        self._file.close()  # what is buffered goes out, and the lock is given back

    @property
    def begun(self) -> bool:
        """Whether any record is done."""
        return self.before > 0 or self._added

    # -- going on ------------------------------------------------------------------------------------------------------

    def has(self, record: Record) -> bool:
        """Whether a record is done; records come in order. One that has changed since is refused."""
        known = next(self._done, None)
        if known is None:
            return False
        if (known["line"], known["crc"]) != (record.line, record.crc):
            raise InvalidInput(
                f"line {record.line} of the input is not what it was when {self.path} was begun; put the input back, "
                "or begin anew with --restart"
            )
        return True

    def check_complete(self) -> None:
        """Refuse an input that is shorter than what was done of it."""
        known = next(self._done, None)
        if known is not None:
            raise InvalidInput(
                f"{self.path} has line {known['line']}, which the input has no more; put the input back, or begin anew "
                "with --restart"
            )

    def add(self, record: Record, result: Any, item: Any = None) -> None:
        """One more record is done."""
        more = {} if item is None else {"input": item}
        self._write({"line": record.line, "crc": record.crc, **more, "result": result})
        self._added = True

    def add_failure(self, record: Record, error: str) -> None:
        """One more record cannot be done."""
        self.failed.append(record.line)
        self._write({"line": record.line, "crc": record.crc, "error": error})
        self._added = True

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(dumped(value) + b"\n")
        if (now := time.monotonic()) - self._synced > SYNC_SECONDS:
            self._file.flush()
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
        """Take up what is there; where the last whole line ends."""
        self._file.seek(0)
        end, theirs = 0, dict[str, Any]()
        for raw in self._file:
            found = _parsed(raw)
            if found is None:
                break
            if end == 0:
                theirs = self._job_of(found)
            else:
                self.before += 1
                if "error" in found:
                    self.failed.append(found["line"])
            end += len(raw)
        if self.before == 0:
            return 0  # nothing was done yet: whatever that job was, this one begins
        self._check_job(theirs)
        return end

    def _job_of(self, first: dict[str, Any]) -> dict[str, Any]:
        job = first.get("job")
        if not isinstance(job, dict):
            raise InvalidInput(f"{self.path} is no journal of a pipeline; move it away, or begin anew with --restart")
        return job

    def _check_job(self, theirs: dict[str, Any]) -> None:
        for name, mine in self._job.items():
            if theirs.get(name) != mine:
                raise InvalidInput(
                    f"{self.path} was begun with {name} {theirs.get(name)!r}, and this is {mine!r}; ask for the same, "
                    "choose another --output, or begin anew with --restart"
                )

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the output, put it in its place at once, and remove the journal."""
        self._file.flush()
        unfinished = self.output.with_name(f".{self.output.name}.{os.getpid()}")
        try:
            write_output(unfinished, kind_of(self.output.name, "--output"), self._results)
            _sync(unfinished)
            os.replace(unfinished, self.output)
        finally:
            unfinished.unlink(missing_ok=True)
        self.path.unlink()

    def _results(self) -> Iterator[dict[str, Any]]:
        for found in self._entries():
            if "error" not in found:
                del found["crc"]
                yield found

    def _entries(self, count: int | None = None) -> Iterator[dict[str, Any]]:
        """What the journal has, the first `count` of it."""
        with self.path.open("rb") as file:
            next(file)  # the job
            for raw in islice(file, count):
                yield json.loads(raw)


def dumped(value: Any) -> bytes:
    """JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """A line of the journal; None if it was cut."""
    if not raw.endswith(b"\n"):
        return None
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# -- kinds of output ---------------------------------------------------------------------------------------------------


def write_output(path: Path, kind: str, rows: Any) -> None:
    """Write the rows that `rows()` gives as a file of this kind."""
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
                    "results that differ fit into .jsonl only"
                )
            writer.writerow(flat.values())


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """One level of columns: a result's own fields where it has names, JSON text where a value has parts."""
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
