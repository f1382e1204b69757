"""The output folder of a job: which job it is, its journal while it runs, its results and failures at the end.

    job.json             the job, and how many rows it had once it is complete
    results.jsonl        a result for each row that has one, in order (or .csv, .parquet)
    errors.jsonl         the other rows, each with its reason; absent if there are none
    results.jsonl.partial    the journal, until the job is complete

A folder holds one job. One that holds another job, or anything else, is refused and left as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headway.base.errors import InvalidInput
from headway.jobs.journal import Journal
from headway.jobs.records import KINDS

JOB, ERRORS = "job.json", "errors.jsonl"
OWN = frozenset({JOB, ERRORS, *(f"results{kind}{end}" for kind in KINDS for end in ("", ".partial"))})


class JobFolder:
    """A job's folder, locked while it is open. `with JobFolder(path, job, ".jsonl") as folder:`"""

    def __init__(
        self, path: Path, job: dict[str, Any], kind: str, *, restart: bool = False, whole_lines: bool = False
    ) -> None:
        self.path, self._job, self._restart = path, json.loads(json.dumps(job)), restart
        self.results, self.errors = path / f"results{kind}", path / ERRORS
        self.journal = Journal(self.results, job, errors=self.errors, whole_lines=whole_lines)
        self.done: dict[str, int] | None = None  # rows and failures of a complete job

    def __enter__(self) -> Self:
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"the output folder {str(self.path)!r} cannot be made: {error.strerror}") from None
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock()
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.done is None:
            self.journal.__exit__()
            if not self.journal.started:
                (self.path / JOB).unlink(missing_ok=True)
        self._close()

    def finish(self) -> None:
        """Write results and failures into place; the job is complete."""
        rows, failed = self.journal.count, len(self.journal.failed)
        self.journal.write_files()
        self._write_job({"rows": rows, "failed": failed})
        self.journal.remove()
        self.journal.__exit__()
        self.done = {"rows": rows, "failed": failed}

    # -- opening -------------------------------------------------------------------------------------------------------

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput(
                f"another process is writing {str(self.path)!r}; wait for it, or choose another output folder"
            ) from None

    def _open(self) -> None:
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".results.")}
        before = self._read_job() if JOB in names else None
        if before is None and names:
            raise InvalidInput(
                f"the output folder {str(self.path)!r} holds {min(names)!r}, which is not a batch job's; choose another"
            )
        if before is not None and (self._restart or not (before.get("done") or self._has_rows())):
            for name in names & OWN:
                (self.path / name).unlink()
            if self._restart:
                self.journal.note.unlink(missing_ok=True)
        elif before is not None:
            self._check(before["job"])
            others = [path for path in self.path.glob("results.*.partial") if path != self.journal.path]
            for path in others:  # the same rows, for results in another format
                path.rename(self.journal.path)
            if before.get("done") and not self.journal.path.exists():
                if not self.results.exists():
                    raise InvalidInput(
                        f"the job in {str(self.path)!r} is complete, in another format than {self.results.name}; "
                        "convert it, or choose another output folder"
                    )
                self.done = before["done"]
                return
        self._write_job(None)
        self.journal.__enter__()

    def _has_rows(self) -> bool:
        """Whether a journal has more than the line that names its job."""
        for path in self.path.glob("results.*.partial"):
            with path.open("rb") as file:
                if file.readline() and file.readline():
                    return True
        return False

    def _read_job(self) -> dict[str, Any]:
        try:
            value = json.loads((self.path / JOB).read_bytes())
        except ValueError:
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("job"), dict):
            raise InvalidInput(f"{str(self.path / JOB)!r} is not a batch job's; choose another output folder")
        return value

    def _check(self, before: dict[str, Any]) -> None:
        ends = "choose another output folder, or start over with --restart"
        for name, value in self._job.items():
            if before.get(name) == value:
                continue
            if name == "input":
                raise InvalidInput(
                    f"the job in {str(self.path)!r} was started with another input, or its input has changed since; "
                    f"restore it, {ends}"
                )
            raise InvalidInput(
                f"the job in {str(self.path)!r} was started with {name} {before.get(name)!r}, and this is {value!r}; "
                f"use the same, {ends}"
            )

    def _write_job(self, done: dict[str, int] | None) -> None:
        unfinished = self.path / f".results.{os.getpid()}"
        unfinished.write_text(json.dumps({"job": self._job, "done": done}, indent=2) + "\n")
        os.replace(unfinished, self.path / JOB)

    def _close(self) -> None:
        os.close(self._handle)  # releases the lock
        if self._made:
            with suppress(OSError):  # it holds something
                self.path.rmdir()
