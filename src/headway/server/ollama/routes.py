"""Ollama's routes: chats and texts, embeddings, and what there is to know about the models."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.version import VERSION
from headway.server.errors import bad_request, fields_named
from headway.server.message_job import MessageJob, respond_message
from headway.server.ollama.output import LineWriter, loaded
from headway.server.ollama.request_schema import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from headway.server.ollama.requests import FIELDS, plan_ollama
from headway.server.ollama.response_schema import (
    ERRORS,
    OllamaChat,
    OllamaEmbeddings,
    OllamaModels,
    OllamaRunningModels,
    OllamaShown,
    OllamaText,
    OllamaVersion,
    lines,
)
from headway.server.openai.messages import template_reasons
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.respond import requested_adapter
from headway.server.openai.response_schema import ok
from headway.server.openai.streaming import json_bytes
from headway.server.pooling.request_schema import EmbeddingRequest
from headway.server.pooling.routes import embed
from headway.server.serving import Serving

LATEST = ":latest"  # the tag that Ollama's clients may add to a name
NEVER = "0001-01-01T00:00:00Z"  # when a model that stays expires, as Ollama writes it

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/api/chat", summary="Generate the next message", response_model=None, responses=lines(OllamaChat))
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """The assistant's next message, as JSON lines unless `stream` is false."""
    return await _generate(body, request, empty=not body.messages)


@router.post("/api/generate", summary="Continue a prompt", response_model=None, responses=lines(OllamaText))
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """The response to a prompt in the model's template, or with `raw` its continuation; JSON lines by default."""
    return await _generate(body, request, empty=not body.prompt)


async def _generate(body: OllamaChatRequest | OllamaGenerateRequest, request: Request, *, empty: bool) -> Response:
    serving: Serving = request.app.state.serving
    tenant, name = serving.tenant(request), known_name(serving, body.model)
    adapter, is_chat, streams = (
        requested_adapter(serving, name),
        isinstance(body, OllamaChatRequest),
        body.stream is not False,
    )
    if empty:
        _ = serving.engine  # raises while it loads
        return Response(json_bytes(loaded(body.model, chat=is_chat)), media_type="application/json")
    with serving.queue_slot(tenant), fields_named(FIELDS):
        plan = await plan_ollama(body, serving, tenant, adapter)
    writer = LineWriter(serving.engine, model=body.model, chat=is_chat, ranked=bool(body.logprobs), stream=streams)
    model = None if adapter is None else adapter.name
    return await respond_message(serving, request, plan, MessageJob(plan), writer, stream=streams, model=model)


def known_name(serving: Serving, name: str) -> str:
    """The name of a model without the tag that Ollama's clients may add."""
    short = name.removesuffix(LATEST)
    names = (*serving.model_names(), *serving.adapters.names, serving.settings.model)
    return short if short in names else name


@router.post("/api/embed", summary="Embed texts", response_model=None, responses=ok(OllamaEmbeddings))
async def embed_texts(body: OllamaEmbedRequest, request: Request) -> Response:
    """One vector for each text."""
    start = time.perf_counter_ns()
    serving: Serving = request.app.state.serving
    name = body.model.removesuffix(LATEST)
    names = request.app.state.pooling_models.names()
    _, result = await embed(
        EmbeddingRequest(
            model=name if name in names else body.model,
            input=body.input,
            dimensions=body.dimensions,
            truncate_prompt_tokens=None if body.truncate is False else -1,
        ),
        request,
    )

    def write() -> bytes:
        vectors = [array.tolist() for array in result.arrays]
        times = {"total_duration": time.perf_counter_ns() - start, "load_duration": 0}
        return json_bytes({"model": body.model, "embeddings": vectors, **times, "prompt_eval_count": result.tokens})

    return Response(await serving.writers.run(write), media_type="application/json")


# -- about the models --------------------------------------------------------------------------------------------------


@router.get("/api/tags", summary="List the models", response_model=None, responses=ok(OllamaModels))
async def tags(request: Request) -> dict[str, Any]:
    """The model under each of its names, and its adapters."""
    serving: Serving = request.app.state.serving
    return {"models": [_card(serving, name) for name in (*serving.model_names(), *serving.adapters.names)]}


@router.get("/api/ps", summary="List the loaded models", response_model=None, responses=ok(OllamaRunningModels))
async def running(request: Request) -> dict[str, Any]:
    """The same models: they stay loaded."""
    serving: Serving = request.app.state.serving
    on_device = serving.engine.info.weight_bytes if serving.engine.info.device != "cpu" else 0
    more = {"expires_at": NEVER, "size_vram": on_device, "context_length": serving.engine.config.max_positions}
    names = (*serving.model_names(), *serving.adapters.names)
    return {"models": [_card(serving, name) | more for name in names]}


@router.post("/api/show", summary="One model", response_model=None, responses=ok(OllamaShown))
async def show(body: OllamaShowRequest, request: Request) -> dict[str, Any]:
    """A model's template, sizes and capabilities."""
    serving: Serving = request.app.state.serving
    given = body.model or body.name
    if given is None:
        raise bad_request("the field 'model' is required", "model", "missing_field")
    requested_adapter(serving, known_name(serving, given))
    engine, family = serving.engine, serving.engine.config.family
    return {
        "modelfile": f"FROM {given}",
        "parameters": "",
        "template": "" if engine.chat_template is None else engine.chat_template.source,
        "details": _details(serving),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": engine.info.parameters,
            f"{family}.context_length": engine.config.max_positions,
            f"{family}.embedding_length": engine.config.hidden_size,
            f"{family}.block_count": engine.config.layers,
        },
        "capabilities": _capabilities(serving),
        "modified_at": _loaded_at(serving),
    }


@router.get("/api/version", summary="The server's version", response_model=None, responses=ok(OllamaVersion))
async def version() -> dict[str, str]:
    """The version of this server, which is not Ollama."""
    return {"version": VERSION}


def _card(serving: Serving, name: str) -> dict[str, Any]:
    info = serving.engine.info
    digest = hashlib.sha256(f"{name} {info.parameters} {info.format} {info.dtype}".encode()).hexdigest()
    same = {"modified_at": _loaded_at(serving), "size": info.weight_bytes, "digest": digest}
    return {"name": name, "model": name, **same, "details": _details(serving)}


def _details(serving: Serving) -> dict[str, Any]:
    info, family = serving.engine.info, serving.engine.config.family
    return {
        "parent_model": "",
        "format": "gguf" if (info.path or "").endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(info.parameters),
        "quantization_level": info.format or info.dtype,
    }


def _capabilities(serving: Serving) -> list[str]:
    engine = serving.engine
    if engine.chat_template is None:
        return ["completion"]
    return ["completion", "tools", *(["thinking"] if template_reasons(engine) else [])]


def _rounded(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _loaded_at(serving: Serving) -> str:
    return datetime.fromtimestamp(serving.loaded_at or 0, UTC).isoformat().replace("+00:00", "Z")
