"""The batches of each key: each is a job over an uploaded file, in a thread, its rows computed on the event loop.

validating → in_progress → finalizing → completed; failed if the file is not valid or the engine stops. A batch that is
cancelled or whose time is over keeps the results it has, and its other rows are failures that say so: every row is in
one of the two files. The store is used on the event loop; a batch's thread reports to it through the loop.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.text import short_repr
from headway.jobs.folder import JobFolder
from headway.jobs.records import Record, file_digest, records
from headway.jobs.requests import OpenAIRows, RequestWorker, RowRequest, RowResponse, unique
from headway.jobs.run import RowFailed, RowResult, Worker, run_records
from headway.server import logs
from headway.server.batches.files import FileStore, StoredFile
from headway.server.errors import ApiError
from headway.server.keys import Tenant
from headway.server.route_calls import call_route, routes_of
from headway.server.serving import Serving

WINDOW_SECONDS = 86_400.0  # completion_window
SHOWN_ERRORS = 100  # of a file that is not valid
PRIORITY = -1.0  # clients that wait come first
ENDED = ("failed", "completed", "expired", "cancelled")
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(eq=False)
class StoredBatch:
    """One batch: what clients get of it, and what is under way."""

    id: str
    tenant: Tenant
    endpoint: str
    file: StoredFile
    metadata: Mapping[str, str] | None
    created_at: int
    expires_at: int
    model: str | None = None  # that the first row names
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    output: StoredFile | None = None
    error_file: StoredFile | None = None
    stopped: str | None = None  # cancelled or expired: how it is to end
    calls: set[Future[RowResponse]] = field(default_factory=set, repr=False)
    thread: threading.Thread | None = field(default=None, repr=False)
    timers: list[asyncio.TimerHandle] = field(default_factory=list, repr=False)

    def fields(self, default: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or default,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.file.id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": None if self.output is None else self.output.id,
            "error_file_id": None if self.error_file is None else self.error_file.id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class _Stopped(Exception):
    """The batch was cancelled, or its time is over."""


class BatchStore:
    """The batches of one server, by key."""

    def __init__(self, app: FastAPI, files: FileStore) -> None:
        self._app, self.files = app, files
        self._serving: Serving = app.state.serving
        self._kept: dict[str, dict[str, StoredBatch]] = {}  # by the key's name, oldest first
        self._loop: asyncio.AbstractEventLoop | None = None

    @cached_property
    def _routes(self) -> ASGIApp:
        return routes_of(self._app)

    @cached_property
    def _free(self) -> asyncio.Semaphore:
        """Rows of all batches that may be in flight."""
        return asyncio.Semaphore(self._serving.settings.max_batch_concurrency)

    def all(self, tenant: Tenant) -> list[StoredBatch]:
        return list(self._kept.get(tenant.name, {}).values())

    def get(self, tenant: Tenant, id: str) -> StoredBatch:
        """A batch of this key; raises a 404 for any other id, and does not say whether it is somebody else's."""
        batch = self._kept.get(tenant.name, {}).get(id)
        if batch is None:
            raise ApiError(
                404,
                f"there is no batch {short_repr(id)}; it never was, or its time is over",
                param="batch_id",
                code="batch_not_found",
            )
        return batch

    def start(self, tenant: Tenant, file: StoredFile, endpoint: str, metadata: Mapping[str, str] | None) -> StoredBatch:
        """Begin a batch; raises a 429 when this key, or the server, has too many under way."""
        self._check_room(tenant)
        loop = self._loop = asyncio.get_running_loop()
        now, keep = time.time(), self._serving.settings.file_seconds
        batch = StoredBatch(
            f"batch_{secrets.token_hex(12)}", tenant, endpoint, file, metadata, int(now), int(now + WINDOW_SECONDS)
        )
        self._kept.setdefault(tenant.name, {})[batch.id] = batch
        batch.timers = [
            loop.call_later(WINDOW_SECONDS, self._stop, batch, "expired"),
            loop.call_later(max(keep, WINDOW_SECONDS), self._drop, batch),
        ]
        # The rows stay readable if the file is deleted meanwhile.
        folder = self.files.folder / batch.id
        folder.mkdir()
        source = folder / "input.jsonl"
        source.hardlink_to(file.path)
        batch.thread = threading.Thread(target=self._work, args=(batch, source), name=batch.id, daemon=True)
        batch.thread.start()
        logs.info("batch", batch=batch.id, status="validating", tenant=tenant.name)
        return batch

    def cancel(self, batch: StoredBatch) -> None:
        """Stop a batch that is under way; one that has ended stays as it is."""
        if batch.status in ("validating", "in_progress"):
            self._set(batch, "cancelling")
            self._stop(batch, "cancelled")

    async def close(self) -> None:
        """Stop everything and remove all files."""
        batches = [batch for own in self._kept.values() for batch in own.values()]
        for batch in batches:
            self._stop(batch, "cancelled")
            for timer in batch.timers:
                timer.cancel()
        for batch in batches:
            while batch.thread is not None and batch.thread.is_alive():
                await asyncio.sleep(0.01)
        self._kept.clear()
        self.files.close()

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _check_room(self, tenant: Tenant) -> None:
        settings = self._serving.settings
        for whose, batches, limit in (
            ("this key", self.all(tenant), settings.max_batches),
            ("this server", [one for own in self._kept.values() for one in own.values()], settings.max_total_batches),
        ):
            running = sum(batch.status not in ENDED for batch in batches)
            if running >= limit:
                raise ApiError(
                    429,
                    f"{whose} has {running} batches under way, and may have {limit}; wait until one has ended",
                    code="too_many_batches",
                    headers={"Retry-After": "60"},
                )

    def _set(self, batch: StoredBatch, status: str) -> None:
        batch.status = status
        batch.times[status] = int(time.time())
        if status in ENDED:
            counts = {"total": batch.total, "completed": batch.completed, "failed": batch.failed}
            logs.info("batch", batch=batch.id, status=status, tenant=batch.tenant.name, **counts)

    def _stop(self, batch: StoredBatch, how: str) -> None:
        if batch.status not in ENDED and batch.stopped is None:
            batch.stopped = how
            for call in list(batch.calls):
                call.cancel()

    def _drop(self, batch: StoredBatch) -> None:
        own = self._kept.get(batch.tenant.name, {})
        own.pop(batch.id, None)
        if not own:
            self._kept.pop(batch.tenant.name, None)

    def _finish(self, batch: StoredBatch, folder: Path, status: str) -> None:
        """Take the files of a batch that has ended."""
        for name, place in (("results", "output"), ("errors", "error_file")):
            path = folder / f"out/{name}.jsonl"
            if path.exists() and path.stat().st_size:
                kept = self.files.add(batch.tenant, f"{batch.id}_{name}.jsonl", "batch_output", path=path)
                setattr(batch, place, kept)
        shutil.rmtree(folder, ignore_errors=True)
        self._set(batch, status)

    # -- in the batch's thread -----------------------------------------------------------------------------------------

    def _tell(self, report: Callable[..., None], *values: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(report, *values)

    def _work(self, batch: StoredBatch, source: Path) -> None:
        status = "failed"
        try:
            limits = batch.tenant.limits.max_priority
            rows = OpenAIRows(endpoint=batch.endpoint, priority=PRIORITY if limits is None else min(PRIORITY, limits))
            if self._is_valid(batch, source, rows):
                status = self._compute(batch, source, rows)
        except HeadwayError as error:
            batch.errors = [{"code": "server_error", "message": str(error), "param": None, "line": None}]
        except Exception as error:
            logs.failure("a batch failed", error, with_text=self._serving.settings.log_prompts)
            message = "internal server error; the server's log has the cause"
            batch.errors = [{"code": "server_error", "message": message, "param": None, "line": None}]
        self._tell(self._finish, batch, source.parent, status)

    def _is_valid(self, batch: StoredBatch, source: Path, rows: OpenAIRows) -> bool:
        """Whether every line is a request; the batch has the first errors if not."""
        limit = self._serving.settings.max_batch_requests
        for record in unique(records(str(source)), rows.key_of, "custom_id"):
            batch.total += 1
            try:
                if record.error is not None:
                    raise RowFailed(record.error)
                request = rows.request(record)
                batch.model = batch.model or _named_model(request.body)
            except HeadwayError as error:
                batch.errors.append(_error("invalid_line", str(error), record.line))
            if batch.total > limit:
                batch.errors.append(_error("too_many_requests", f"the file has more than {limit} requests", None))
            if len(batch.errors) >= SHOWN_ERRORS or batch.total > limit:
                return False
        if not batch.total:
            batch.errors.append(_error("empty_file", "the file has no requests", None))
        return not batch.errors

    def _compute(self, batch: StoredBatch, source: Path, rows: OpenAIRows) -> str:
        """Run the job; how it ended."""
        if batch.stopped is None:
            self._tell(self._begun, batch)
        job, path = {"input": file_digest(str(source)), "endpoint": batch.endpoint}, source.parent / "out"
        worker = RequestWorker(
            lambda request: self._send(batch, request), rows, self._serving.settings.max_batch_concurrency
        )
        try:
            with JobFolder(path, job, ".jsonl", whole_lines=True) as folder:
                self._run(batch, worker, source, folder)
                return "completed"
        except (_Stopped, CancelledError):
            if batch.stopped is None:  # the server is ending
                raise
        # What was in flight is not in the journal: it is a failure like the rows after it.
        with JobFolder(path, job, ".jsonl", whole_lines=True) as folder:
            self._run(batch, _Unfinished(batch.stopped), source, folder)
        return batch.stopped

    def _run(self, batch: StoredBatch, worker: Worker, source: Path, folder: JobFolder) -> None:
        def count(record: Record) -> None:
            batch.failed = len(folder.journal.failed)
            batch.completed = folder.journal.count - batch.failed

        run_records(worker, records(str(source)), folder.journal, progress=count)
        if batch.stopped is None:
            self._tell(self._set, batch, "finalizing")
        folder.finish()

    def _begun(self, batch: StoredBatch) -> None:
        if batch.status == "validating":
            self._set(batch, "in_progress")

    def _send(self, batch: StoredBatch, request: RowRequest) -> Future[RowResponse]:
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(self._call(batch, request), self._loop)
        batch.calls.add(future)
        future.add_done_callback(batch.calls.discard)
        if batch.stopped is not None:  # after the call is in the set, so that a stop cannot miss it
            future.cancel()
            raise _Stopped
        return future

    async def _call(self, batch: StoredBatch, request: RowRequest) -> RowResponse:
        async with self._free:
            return await call_route(self._routes, self._app, request, batch.tenant)


class _Unfinished:
    """Rows that a batch ended before."""

    def __init__(self, how: str) -> None:
        self._how = how

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        for record in todo:
            reason = {"code": f"batch_{self._how}", "message": f"the batch was {self._how} before this request ended"}
            key = record.value["custom_id"]
            yield RowResult(record, RowFailed({"id": None, "custom_id": key, "response": None, "error": reason}))


def _named_model(body: Mapping[str, Any]) -> str | None:
    name = body.get("model")
    return name[:256] if isinstance(name, str) else None


def _error(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
