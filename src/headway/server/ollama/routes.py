"""Ollama's routes: chats and texts, embeddings, and what there is to know about the models."""

from __future__ import annotations

import hashlib
import math
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.version import VERSION
from headway.program.engine import Engine
from headway.server.api.parsing import JsonRoute
from headway.server.api.prompts import find_infill_ids
from headway.server.api.response_schema import ok
from headway.server.api.streaming import json_bytes
from headway.server.api.tokens import text_of
from headway.server.chats.message_job import MessageJob, respond_message
from headway.server.chats.messages import template_reasons
from headway.server.errors import bad_request, fields_named
from headway.server.models import ModelLease, ServedModel, requested_model
from headway.server.ollama.keep_alive import keep_for, stay_seconds
from headway.server.ollama.output import LineWriter, loaded
from headway.server.ollama.request_schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from headway.server.ollama.requests import FIELDS, OPTIONS, plan_ollama
from headway.server.ollama.response_schema import (
    ERRORS,
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaModels,
    OllamaRunningModels,
    OllamaShown,
    OllamaText,
    OllamaVersion,
    lines,
)
from headway.server.openai.about import listed_models
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
    return await _generate(body, request, empty=not body.prompt and not body.suffix)


async def _generate(body: OllamaChatRequest | OllamaGenerateRequest, request: Request, *, empty: bool) -> Response:
    serving: Serving = request.app.state.serving
    start = time.perf_counter_ns()
    tenant, name = serving.tenant(request), await known_name(serving, body.model)
    is_chat, streams = isinstance(body, OllamaChatRequest), body.stream is not False
    seconds = stay_seconds(body.keep_alive)
    if empty and seconds == 0:
        await keep_for(serving, tenant, name, seconds)
        return Response(json_bytes(loaded(body.model, chat=is_chat, reason="unload")), media_type="application/json")
    lease, ready = await requested_model(request, name), time.perf_counter_ns()
    await keep_for(serving, tenant, name, seconds)
    if empty:
        return Response(json_bytes(loaded(body.model, chat=is_chat)), media_type="application/json")
    with serving.queue_slot(tenant), fields_named(FIELDS):
        plan = await plan_ollama(body, serving, tenant, lease)
    about: dict[str, Any] = {"model": body.model, "chat": is_chat, "ranked": bool(body.logprobs), "stream": streams}
    writer = LineWriter(lease.engine, **about, start=start, ready=ready)
    return await respond_message(serving, request, plan, MessageJob(plan), writer, stream=streams, lease=lease)


async def known_name(serving: Serving, name: str) -> str:
    """The name of a model without the tag that Ollama's clients may add."""
    short = name.removesuffix(LATEST)
    return short if short != name and await serving.models.has(short) else name


@router.post("/api/embeddings", summary="Embed a text", response_model=None, responses=ok(OllamaEmbedding))
async def embed_one(body: OllamaEmbeddingsRequest, request: Request) -> Response:
    """The vector of one text, as Ollama's older clients ask for it."""
    stay_seconds(body.keep_alive)
    _, result = await embed(_embedding_request(body.model, body.prompt, None, True, request), request)
    serving: Serving = request.app.state.serving
    vector = result.arrays[0]
    return Response(
        await serving.writers.run(lambda: json_bytes({"embedding": vector.tolist()})), media_type="application/json"
    )


def _embedding_request(
    model: str, given: str | list[str], dimensions: int | None, truncate: bool | None, request: Request
) -> EmbeddingRequest:
    """The request as OpenAI's clients send it."""
    name, names = model.removesuffix(LATEST), request.app.state.pooling_models.names()
    return EmbeddingRequest(
        model=name if name in names else model,
        input=given,
        dimensions=dimensions,
        truncate_prompt_tokens=None if truncate is False else -1,
    )


@router.post("/api/embed", summary="Embed texts", response_model=None, responses=ok(OllamaEmbeddings))
async def embed_texts(body: OllamaEmbedRequest, request: Request) -> Response:
    """One vector for each text."""
    start = time.perf_counter_ns()
    serving: Serving = request.app.state.serving
    stay_seconds(body.keep_alive)
    asked = _embedding_request(body.model, body.input, body.dimensions, body.truncate, request)
    _, result = await embed(asked, request)

    def write() -> bytes:
        vectors = [array.tolist() for array in result.arrays]
        times = {"total_duration": time.perf_counter_ns() - start, "load_duration": 0}
        return json_bytes({"model": body.model, "embeddings": vectors, **times, "prompt_eval_count": result.tokens})

    return Response(await serving.writers.run(write), media_type="application/json")


# -- about the models --------------------------------------------------------------------------------------------------


@router.get("/api/tags", summary="List the models", response_model=None, responses=ok(OllamaModels))
async def tags(request: Request) -> dict[str, Any]:
    """Every model under each of its names, and its adapters."""
    serving: Serving = request.app.state.serving
    await listed_models(serving)
    return {"models": [_card(one, name) for one in serving.models.all() for name in _names(one)]}


@router.get("/api/ps", summary="List the loaded models", response_model=None, responses=ok(OllamaRunningModels))
async def running(request: Request) -> dict[str, Any]:
    """The models that are loaded, and when each is unloaded if nobody asks for it."""
    serving: Serving = request.app.state.serving
    if serving.models.is_single:
        await serving.models.peek(None)
    loaded = [one for one in serving.models.all() if one.engine is not None]
    return {"models": [_card(one, name) | _running(one) for one in loaded for name in _names(one)]}


def _names(model: ServedModel) -> tuple[str, ...]:
    return (*model.source.names, *model.adapters.known)


def _running(model: ServedModel) -> dict[str, Any]:
    assert model.loaded is not None
    info, idle = model.loaded.engine.info, time.monotonic() - model.used_at
    left = model.idle_timeout - (0.0 if model.loaded.users else idle)
    return {
        "expires_at": NEVER
        if model.is_kept or model.idle_timeout == math.inf
        else _as_utc(time.time() + max(0.0, left)),
        "size_vram": info.weight_bytes if info.device != "cpu" else 0,
        "context_length": model.context_length,
    }


@router.post("/api/show", summary="One model", response_model=None, responses=ok(OllamaShown))
async def show(body: OllamaShowRequest, request: Request) -> dict[str, Any]:
    """A model's template, sizes and capabilities."""
    serving: Serving = request.app.state.serving
    given = body.model or body.name
    if given is None:
        raise bad_request("the field 'model' is required", "model", "missing_field")
    lease = await requested_model(request, await known_name(serving, given))
    engine, family = lease.engine, lease.engine.config.family
    words = await serving.readers.run(_words, engine) if body.verbose else {}
    return {
        "modelfile": f"FROM {given}",
        "parameters": _parameters(engine),
        "template": "" if engine.chat_template is None else engine.chat_template.source,
        "details": _details(lease.model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": engine.info.parameters,
            f"{family}.context_length": engine.config.max_positions,
            f"{family}.embedding_length": engine.config.hidden_size,
            f"{family}.block_count": engine.config.layers,
            **words,
        },
        "capabilities": _capabilities(lease),
        "modified_at": _as_utc(lease.model.loaded_at or 0),
    }


@router.get("/api/version", summary="The server's version", response_model=None, responses=ok(OllamaVersion))
async def version() -> dict[str, str]:
    """The version of this server, which is not Ollama."""
    return {"version": VERSION}


def _words(engine: Engine) -> dict[str, Any]:
    """The vocabulary. In a thread."""
    if not engine.has_tokenizer:
        return {}
    tokenizer = engine.tokenizer
    return {
        "tokenizer.ggml.tokens": [text_of(id, engine) for id in range(tokenizer.vocab_size)],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_ids": list(tokenizer.eos_ids),
    }


def _parameters(engine: Engine) -> str:
    """The model's own sampling parameters, a line each."""
    given = engine.generation_defaults.given
    names = {one.name: one.name_on("ollama") for one in OPTIONS}
    return "\n".join(f"{names[name]} {value}" for name, value in given.items() if name in names)


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    info, size = None if model.engine is None else model.engine.info, model.weight_bytes or 0
    kind = "" if info is None else f"{info.parameters} {info.format} {info.dtype}"
    digest = hashlib.sha256(f"{name} {kind or size}".encode()).hexdigest()
    same = {"modified_at": _as_utc(model.loaded_at or 0), "size": size, "digest": digest}
    return {"name": name, "model": name, **same, "details": _details(model)}


def _details(model: ServedModel) -> dict[str, Any]:
    """What the model is; of one that is not loaded, what its headers say."""
    engine, sizes = model.engine, model.source.sizes
    if engine is not None:
        info, family = engine.info, engine.config.family
        path, parameters, level = info.path or "", info.parameters, info.format or info.dtype
    else:
        path, level = str(model.source.path or ""), "unknown"
        family, parameters = ("unknown", 0) if sizes is None else (sizes.family, sizes.parameters)
    return {
        "parent_model": "",
        "format": "gguf" if path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(parameters),
        "quantization_level": level,
    }


def _capabilities(lease: ModelLease) -> list[str]:
    engine = lease.engine
    inserts = ["insert"] if engine.has_tokenizer and find_infill_ids(engine) is not None else []
    if engine.chat_template is None:
        return ["completion", *inserts]
    return ["completion", *inserts, "tools", *(["thinking"] if template_reasons(engine) else [])]


def _rounded(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _as_utc(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")
