"""The routes of /v1/files and /v1/batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import FileResponse, Response

from headway.base.text import short_repr
from headway.jobs.requests import ENDPOINTS
from headway.server.api.form import FormPart, parse_form
from headway.server.api.parsing import JsonRoute
from headway.server.api.request_schema import RequestSchema
from headway.server.api.response_schema import ERRORS, ok
from headway.server.batches.files import MAX_NAME, FileStore, StoredFile
from headway.server.batches.jobs import BatchStore, StoredBatch
from headway.server.batches.response_schema import BatchList, BatchObject, DeletedFile, FileList, FileObject
from headway.server.errors import bad_request
from headway.server.keys import Tenant
from headway.server.serving import Serving

router = APIRouter(responses=ERRORS)
json_router = APIRouter(route_class=JsonRoute)
MIN_FILE_SECONDS = 3600
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512
Item = TypeVar("Item", StoredFile, StoredBatch)
Limit = Annotated[int, Query(ge=1, le=10_000)]
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_FILE_SECONDS},
                    },
                }
            }
        },
    }
}


class BatchRequest(RequestSchema):
    """A batch: the file of its requests, and the one path that all of them are for."""

    input_file_id: str
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(ENDPOINTS)})]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


def _state(request: Request) -> tuple[Tenant, BatchStore, FileStore]:
    serving: Serving = request.app.state.serving
    batches: BatchStore = request.app.state.batches
    return serving.tenant(request), batches, batches.files


# -- files -------------------------------------------------------------------------------------------------------------


@router.post("/v1/files", summary="Upload a file", response_model=None, responses=ok(FileObject), openapi_extra=UPLOAD)
async def create_file(request: Request) -> dict[str, Any]:
    """Keep a file of requests for a batch."""
    tenant, _, files = _state(request)
    threads = request.app.state.serving.readers
    form = await threads.run(parse_form, request.headers.get("content-type", ""), await request.body())
    parts = {name: part for name, [part] in form.items()}
    known = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
    if unknown := next((name for name in parts if name not in known), None):
        raise bad_request(f"the field {short_repr(unknown)} is unknown or not supported; remove it", unknown[:80])
    for name in ("file", "purpose"):
        if name not in parts:
            raise bad_request(f"the field {name!r} is required", name, "missing_field")
    if parts["purpose"].text != "batch":
        raise bad_request(f"purpose is {short_repr(parts['purpose'].text)}; it must be 'batch'", "purpose")
    file = parts["file"]
    if not file.filename or len(file.filename) > MAX_NAME:
        raise bad_request(f"the file needs a name of 1 to {MAX_NAME} characters", "file")
    files.check_room(tenant, len(file.value))
    seconds = _seconds(parts, request.app.state.serving.settings.file_seconds)
    path = files.new_path()
    try:
        await threads.run(path.write_bytes, file.value)
        files.check_room(tenant, len(file.value))  # others may have been added meanwhile
        return files.add(tenant, file.filename, "batch", path=path, seconds=seconds).fields()
    finally:
        path.unlink(missing_ok=True)


def _seconds(parts: dict[str, FormPart], limit: float) -> float | None:
    anchor, seconds = (parts.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor is None or anchor.text != "created_at":
        raise bad_request("expires_after.anchor must be 'created_at'", "expires_after.anchor")
    text = "" if seconds is None else seconds.text
    if not re.fullmatch(r"[0-9]{1,9}", text) or not MIN_FILE_SECONDS <= int(text) <= limit:
        raise bad_request(
            f"expires_after.seconds is {short_repr(text)}; it must be an integer in [{MIN_FILE_SECONDS}, {limit:g}]",
            "expires_after.seconds",
        )
    return float(text)


@router.get("/v1/files", summary="List files", response_model=None, responses=ok(FileList))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Limit = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """The files of this key."""
    tenant, _, files = _state(request)
    own = [file for file in files.all(tenant) if purpose is None or file.purpose == purpose]
    page, more = _page(own if order == "asc" else own[::-1], limit, after)
    return _listed([file.fields() for file in page], more)


@router.get("/v1/files/{file_id}", summary="A file's facts", response_model=None, responses=ok(FileObject))
async def retrieve_file(file_id: str, request: Request) -> dict[str, Any]:
    """A file without its contents."""
    tenant, _, files = _state(request)
    return files.get(tenant, file_id).fields()


@router.get("/v1/files/{file_id}/content", summary="A file's contents", response_class=Response)
async def file_content(file_id: str, request: Request) -> Response:
    """The bytes of a file."""
    tenant, _, files = _state(request)
    return FileResponse(files.get(tenant, file_id).path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", summary="Delete a file", response_model=None, responses=ok(DeletedFile))
async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
    """Remove a file; batches that are under way keep its requests."""
    tenant, _, files = _state(request)
    files.delete(tenant, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


# -- batches -----------------------------------------------------------------------------------------------------------


@json_router.post("/v1/batches", summary="Start a batch", response_model=None, responses=ok(BatchObject))
async def create_batch(body: BatchRequest, request: Request) -> dict[str, Any]:
    """Compute the requests of a file in the background."""
    tenant, batches, files = _state(request)
    if body.endpoint not in ENDPOINTS:
        raise bad_request(f"endpoint is {short_repr(body.endpoint)}; it must be {', '.join(ENDPOINTS)}", "endpoint")
    _check_metadata(body.metadata or {})
    file = files.get(tenant, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise bad_request(f"{file.id} is the output of a batch; upload a file of requests", "input_file_id")
    files.check_room(tenant, 0)
    return _fields(request, batches.start(tenant, file, body.endpoint, body.metadata))


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA or any(
        len(name) > MAX_METADATA_NAME or len(value) > MAX_METADATA_VALUE for name, value in metadata.items()
    ):
        raise bad_request(
            f"metadata has {len(metadata)} entries; at most {MAX_METADATA} are allowed, with names of at most "
            f"{MAX_METADATA_NAME} and values of at most {MAX_METADATA_VALUE} characters",
            "metadata",
        )


@router.get("/v1/batches", summary="List batches", response_model=None, responses=ok(BatchList))
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    """The batches of this key, newest first."""
    tenant, batches, _ = _state(request)
    page, more = _page(batches.all(tenant)[::-1], limit, after)
    return _listed([_fields(request, batch) for batch in page], more)


@router.get("/v1/batches/{batch_id}", summary="A batch", response_model=None, responses=ok(BatchObject))
async def retrieve_batch(batch_id: str, request: Request) -> dict[str, Any]:
    """How far a batch is, and its files once it has ended."""
    tenant, batches, _ = _state(request)
    return _fields(request, batches.get(tenant, batch_id))


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", response_model=None, responses=ok(BatchObject))
async def cancel_batch(batch_id: str, request: Request) -> dict[str, Any]:
    """Stop a batch; what it has computed is in its files."""
    tenant, batches, _ = _state(request)
    batch = batches.get(tenant, batch_id)
    batches.cancel(batch)
    return _fields(request, batch)


def _fields(request: Request, batch: StoredBatch) -> dict[str, Any]:
    return batch.fields(request.app.state.serving.model_name)


def _page(items: Sequence[Item], limit: int, after: str | None) -> tuple[Sequence[Item], bool]:
    """A page of a list, and whether more follow."""
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after is {short_repr(after)}; it must be the id of an entry of this list", "after")
    start = 0 if after is None else ids.index(after) + 1
    return items[start : start + limit], start + limit < len(items)


def _listed(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": more}


router.include_router(json_router)
