"""The fields of responses of /v1/files and /v1/batches, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from headway.server.api.response_schema import ResponseSchema

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip


class FileObject(ResponseSchema):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(ResponseSchema):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(ResponseSchema):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(ResponseSchema):
    """What is wrong with a line of the file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(ResponseSchema):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(ResponseSchema):
    total: int
    completed: int
    failed: int


class BatchObject(ResponseSchema):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(ResponseSchema):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
