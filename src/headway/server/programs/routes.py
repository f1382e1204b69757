"""The routes of uploaded programs. A server has them only with --allow-programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import PlainTextResponse, Response

from headway.server.api.parsing import JsonRoute
from headway.server.api.request_schema import RequestSchema
from headway.server.api.response_schema import (
    COMMON,
    EVENT,
    QUEUE_ERRORS,
    ErrorResponse,
    Responses,
    ResponseSchema,
    ok,
)
from headway.server.api.streaming import EventStreamResponse, event, json_bytes
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.programs.programs import Programs
from headway.server.programs.run import Run
from headway.server.serving import Serving

NOT_FOUND: Responses = {404: {"model": ErrorResponse, "description": "The key has no such program."}}
router = APIRouter(route_class=JsonRoute, responses={**COMMON, **NOT_FOUND})
EVENTS: Responses = {200: {"description": "Server-sent events", "content": {"text/event-stream": {"schema": EVENT}}}}
Id = Annotated[str, Path(max_length=128)]


class ProgramRequest(RequestSchema):
    """`POST /v1/programs`: a source, or the name of an installed one."""

    source: str | None = None
    name: str | None = None
    model: str | None = None  # beside which it runs; the server's first
    args: dict[str, Any] | None = None  # the keyword arguments of its main
    stream: bool | None = None  # answer with its events; it then ends with the connection


class MessageRequest(RequestSchema):
    """`POST /v1/programs/{id}/messages`."""

    value: Any = None


class InstallRequest(RequestSchema):
    """`PUT /v1/installed_programs/{name}`."""

    source: str


class ProgramObject(ResponseSchema):
    """A program that runs, or has run: what it returned, or why it ended."""

    id: str
    object: Literal["program"]
    name: str | None
    model: str | None
    status: Literal["running", "returned", "raised", "stopped"]
    created_at: int
    seconds: float
    cpu_seconds: float
    value: Any
    error: str | None


class ProgramList(ResponseSchema):
    object: Literal["list"]
    confinement: str
    data: list[ProgramObject]


class InstalledProgram(ResponseSchema):
    name: str
    object: Literal["installed_program"]
    bytes: int


class InstalledList(ResponseSchema):
    object: Literal["list"]
    data: list[InstalledProgram]


class Done(ResponseSchema):
    """It was done."""


def _programs(request: Request) -> tuple[Programs, Tenant]:
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    if serving.programs is None:
        raise ApiError(503, "programs are being prepared; try again soon", code="loading")
    return serving.programs, tenant


@router.post(
    "/v1/programs",
    summary="Run a program",
    response_model=None,
    responses=QUEUE_ERRORS | {200: {**ok(ProgramObject)[200], "content": {"text/event-stream": {"schema": EVENT}}}},
)
async def run_program(body: ProgramRequest, request: Request) -> Response:
    """Run `async def main(engine, **args)` of a source, or of an installed program, beside the engine."""
    programs, tenant = _programs(request)
    if (body.source is None) == (body.name is None):
        raise bad_request("give either source or name: the program itself, or that of an installed one", "source")
    source = body.source if body.source is not None else programs.installed.find(tenant, body.name or "")
    await programs.check_model(body.model)
    run = programs.start(tenant, source, body.args or {}, body.name, body.model)
    if not body.stream:
        return _json(run.about())
    held = AsyncExitStack()
    held.callback(run.stop, "its client has gone away")
    return EventStreamResponse(_events(run, 0), held)


@router.get("/v1/programs", summary="List programs", response_model=None, responses=ok(ProgramList))
async def list_programs(request: Request) -> Response:
    """The programs of this key that run, and the latest that have ended, oldest first."""
    programs, tenant = _programs(request)
    data = [run.about() for run in programs.runs(tenant)]
    return _json({"object": "list", "confinement": programs.confinement, "data": data})


@router.get("/v1/programs/{id}", summary="Retrieve a program", response_model=None, responses=ok(ProgramObject))
async def retrieve_program(id: Id, request: Request) -> Response:
    """A program's state, and what it returned."""
    programs, tenant = _programs(request)
    return _json(programs.find(tenant, id).about())


@router.delete("/v1/programs/{id}", summary="Kill a program", response_model=None, responses=ok(ProgramObject))
async def kill_program(id: Id, request: Request) -> Response:
    """End a program now; everything that it held is released."""
    programs, tenant = _programs(request)
    run = programs.find(tenant, id)
    run.stop("it was killed")
    if run.task is not None:
        await asyncio.shield(run.task)  # whoever asked may leave
    return _json(run.about())


@router.get("/v1/programs/{id}/events", summary="Follow a program", response_model=None, responses=EVENTS)
async def follow_program(
    id: Id, request: Request, after: Annotated[int, Query(ge=0, le=1 << 53)] = 0
) -> EventStreamResponse:
    """What it prints and sends from event number `after` on, as it comes, and its end."""
    programs, tenant = _programs(request)
    return EventStreamResponse(_events(programs.find(tenant, id), after), AsyncExitStack())


@router.get("/v1/programs/{id}/logs", summary="What a program printed", response_class=PlainTextResponse)
async def program_logs(id: Id, request: Request) -> PlainTextResponse:
    """What it printed so far, as far as it is kept."""
    programs, tenant = _programs(request)
    text = programs.find(tenant, id).output.printed()
    return PlainTextResponse(text.encode(errors="replace").decode())


@router.post(
    "/v1/programs/{id}/messages",
    summary="Send a program a message",
    response_model=None,
    responses=QUEUE_ERRORS | ok(Done),
)
async def send_message(id: Id, body: MessageRequest, request: Request) -> dict[str, Any]:
    """What its `session.receive` then returns."""
    programs, tenant = _programs(request)
    run = programs.find(tenant, id)
    if not run.is_running:
        raise bad_request(f"the program has ended ({run.status}); it takes no messages", "id")
    if not run.inbox.offer(body.value):
        raise ApiError(429, "messages that it has not taken wait for this program; try again later", code="queue_full")
    return {}


@router.get(
    "/v1/installed_programs", summary="List installed programs", response_model=None, responses=ok(InstalledList)
)
async def list_installed(request: Request) -> dict[str, Any]:
    """The programs that this key can run by name."""
    programs, tenant = _programs(request)
    data = [_installed(name, source) for name, source in sorted(programs.installed.of(tenant).items())]
    return {"object": "list", "data": data}


@router.put(
    "/v1/installed_programs/{name}", summary="Install a program", response_model=None, responses=ok(InstalledProgram)
)
async def install_program(name: Id, body: InstallRequest, request: Request) -> dict[str, Any]:
    """Keep a source under a name, instead of the one before."""
    programs, tenant = _programs(request)
    await programs.install(tenant, name, body.source)
    return _installed(name, body.source)


@router.delete(
    "/v1/installed_programs/{name}", summary="Remove an installed program", response_model=None, responses=ok(Done)
)
async def remove_installed(name: Id, request: Request) -> dict[str, Any]:
    """Forget an installed program; those that run go on."""
    programs, tenant = _programs(request)
    programs.installed.remove(tenant, name)
    return {}


def _installed(name: str, source: str) -> dict[str, Any]:
    return {"name": name, "object": "installed_program", "bytes": len(source.encode())}


async def _events(run: Run, after: int) -> AsyncIterator[bytes]:
    yield event({"type": "started", "id": run.id}, json_bytes)
    async for one in run.output.follow(after):
        yield b"data: " + one.encode() + b"\n\n"


def _json(value: Any) -> Response:
    """JSON in ASCII: what a program returns may hold half a surrogate pair."""
    return Response(json.dumps(value), media_type="application/json")
