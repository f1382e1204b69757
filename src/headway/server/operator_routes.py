"""Routes that operators and clients of other servers ask: /ping, /load, /version, /props, /slots, /docs."""

from __future__ import annotations

import html
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

from headway.base.version import VERSION
from headway.program.engine import Engine
from headway.server.api.response_schema import COMMON, ERRORS, ErrorResponse, Responses, ResponseSchema, ok
from headway.server.errors import ApiError
from headway.server.models import requested_model
from headway.server.serving import Serving

router = APIRouter(responses=COMMON)


class Ping(ResponseSchema):
    """Nothing: the status says it."""


class ServerLoad(ResponseSchema):
    server_load: int


class Version(ResponseSchema):
    version: str


class DefaultGenerationSettings(ResponseSchema):
    """The context length, and the sampling parameters of a request that sets none."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(ResponseSchema):
    vision: bool
    audio: bool


class Props(ResponseSchema):
    """What llama-server tells about its model; `total_slots` is the most requests that may be in flight."""

    default_generation_settings: DefaultGenerationSettings
    total_slots: int
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
    is_sleeping: bool


class Slot(ResponseSchema):
    """A request in flight of the key that asks."""

    id: int
    n_ctx: int | None
    request_id: str
    model: str
    is_processing: bool
    prompt_tokens: int
    generated_tokens: int
    seconds: float


SLOTS: Responses = {200: {"model": list[Slot], "description": "The requests"}}


@router.post(
    "/ping",
    summary="Whether the server is ready",
    response_model=None,
    responses=ok(Ping) | {503: {"model": Ping | ErrorResponse, "description": "Not ready"}},
)
@router.get(
    "/ping",
    summary="Whether the server is ready",
    response_model=None,
    responses=ok(Ping) | {503: {"model": Ping | ErrorResponse, "description": "Not ready"}},
)
async def ping(request: Request) -> JSONResponse:
    """200 when the server is ready, otherwise 503; `/health` says why."""
    serving: Serving = request.app.state.serving
    return JSONResponse({}, 200 if serving.state == "ready" else 503)


@router.get("/load", summary="Requests in flight", response_model=None, responses=ok(ServerLoad))
async def load(request: Request) -> dict[str, int]:
    """How many requests are admitted and not finished, as vLLM tells its routers."""
    serving: Serving = request.app.state.serving
    return {"server_load": serving.in_flight}


@router.get("/version", summary="The server's version", response_model=None, responses=ok(Version))
async def version() -> dict[str, str]:
    """The version of Headway."""
    return {"version": VERSION}


@router.get("/props", summary="The model's properties", response_model=None, responses=ERRORS | ok(Props))
async def props(request: Request, model: str | None = None) -> dict[str, Any]:
    """The context length, the chat template and the special tokens, as clients of llama-server ask for them."""
    serving: Serving = request.app.state.serving
    lease = await requested_model(request, model)
    engine = lease.engine
    names = engine.tokenizer.special_tokens if engine.has_tokenizer else {}
    return {
        "default_generation_settings": {"n_ctx": engine.config.max_positions, "params": _defaults(engine)},
        "total_slots": serving.settings.max_queue_requests,
        "model_alias": lease.model.name,
        "chat_template": "" if engine.chat_template is None else engine.chat_template.source,
        "bos_token": names.get("bos_token", ""),
        "eos_token": names.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"headway {VERSION}",
        "is_sleeping": False,
    }


def _defaults(engine: Engine) -> dict[str, Any]:
    """The sampling parameters that the model's file has, and those that are the server's, by llama-server's names."""
    names = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    given = engine.generation_defaults.given
    values = {name: given.get(name, off) for name, off in names.items()}
    return {"n_predict": -1, **values, "repeat_penalty": values.pop("repetition_penalty")}


@router.get(
    "/slots",
    summary="Requests in flight",
    response_model=None,
    responses={200: {"model": list[Slot], "description": "The requests"}},
)
async def slots(request: Request, model: str | None = None, fail_on_no_slot: int = 0) -> list[dict[str, Any]]:
    """The requests of this key that are in flight, to one model or to all, oldest first, and how far they are. With
    `fail_on_no_slot` a 503 where no more would be admitted."""
    serving: Serving = request.app.state.serving
    most = serving.settings.max_queue_requests
    if fail_on_no_slot and serving.in_flight >= most:
        raise ApiError(503, f"all {most} places for requests are taken; try again", headers={"Retry-After": "1"})
    own = serving.admitted(serving.tenant(request))
    return [{"id": i, **one.progress()} for i, one in enumerate(own) if model in (None, one.model)]


# -- the API's description, for people ---------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Headway's API</title>
<style>body{{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}}code{{font-size:.9em}}
td{{padding:.1em 1em .1em 0;vertical-align:top}}summary{{cursor:pointer}}details{{margin:.5em 0}}</style>
<h1>Headway's API</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a></p>
{operations}
</html>
"""
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


@router.get("/docs", summary="The API's description as a page", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """Every route with its fields, on one page without scripts."""
    document = request.app.openapi()
    operations = "\n".join(
        _operation(method, path, about, document["components"]["schemas"])
        for path, methods in document["paths"].items()
        for method, about in methods.items()
    )
    return HTMLResponse(PAGE.format(operations=operations), headers=POLICY)


def _operation(method: str, path: str, about: dict[str, Any], schemas: dict[str, Any]) -> str:
    content = about.get("requestBody", {}).get("content", {}).get("application/json", {})
    fields = _resolved(content.get("schema", {}), schemas)
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_type(schema))}</td>"
        f"<td>{'required' if name in fields.get('required', ()) else ''}</td></tr>"
        for name, schema in fields.get("properties", {}).items()
    )
    head = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(about.get('summary', ''))}"
    text = html.escape(about.get("description", ""))
    return f"<details><summary>{head}</summary><p>{text}</p><table>{rows}</table></details>"


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return schemas.get(name, schema)


def _type(schema: dict[str, Any]) -> str:
    """A short name of a field's type."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("const", schema.get("type", "any")))
