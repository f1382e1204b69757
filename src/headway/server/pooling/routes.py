"""The routes: texts are tokenized, counted and let in, computed with everybody else's, and answered whole."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.errors import InvalidInput
from headway.pipelines.task import Row
from headway.server.errors import bad_request
from headway.server.openai.checks import outside
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.response_schema import ERRORS, GENERATES, ok
from headway.server.openai.streaming import packed
from headway.server.pooling.pools import Pool, Pools
from headway.server.pooling.request_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
)
from headway.server.pooling.response_schema import Embeddings, Labels, PooledTexts, Ranking
from headway.server.serving import Serving

router = APIRouter(route_class=JsonRoute, responses={**ERRORS, **GENERATES})


@dataclass(frozen=True)
class Computed:
    """The arrays of a request's rows, its id, and how many tokens they had."""

    arrays: list[np.ndarray]
    id: str
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}


@router.post("/v1/embeddings", summary="Vectors of texts", response_model=None, responses=ok(Embeddings))
async def embeddings(asked: EmbeddingRequest, request: Request) -> Response:
    """One vector for each text, as OpenAI's clients ask for them."""
    serving, pool = _pool(request, "embed", model=asked.model)
    options = _shortened(pool, asked.dimensions)
    inputs = _inputs(asked.input, pool, serving)
    done = await _computed(serving, request, pool, await _rows(serving, request, pool, inputs, asked), **options)

    def answer() -> bytes:
        data = [
            {"object": "embedding", "index": i, "embedding": _numbers(array, asked.encoding_format)}
            for i, array in enumerate(done.arrays)
        ]
        return packed({"object": "list", "model": pool.name, "data": data, "usage": done.usage})

    return await _response(serving, answer)


@router.post("/rerank", summary="Documents by how well they answer", response_model=None, responses=ok(Ranking))
@router.post("/v1/rerank", summary="The same", response_model=None, responses=ok(Ranking))
@router.post("/v2/rerank", summary="The same", response_model=None, responses=ok(Ranking))
async def rerank(asked: RerankRequest, request: Request) -> Response:
    """Documents by their score for the query, best first: a reranker's, or else the cosine of an embedding model."""
    serving, pool = _pool(request, "rerank", "embed", model=asked.model)
    documents = [one if isinstance(one, str) else one.text for one in asked.documents]
    if not documents:
        raise bad_request("documents is empty; give at least one", "documents")
    _count("documents", len(documents), serving)
    if asked.top_n is not None and asked.top_n < 0:
        raise bad_request(f"top_n is {asked.top_n}; it takes a whole number from 0, which is all", "top_n")
    pairs = [(asked.query, one) for one in documents] if pool.role == "rerank" else [asked.query, *documents]
    rows = await _rows(serving, request, pool, pairs, asked, param="documents")
    done = await _computed(serving, request, pool, rows)
    scores = _scores(done.arrays, pool)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: asked.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if asked.return_documents is not False:
        results = [one | {"document": {"text": documents[one["index"]]}} for one in results]
    return await _response(
        serving,
        lambda: packed({"id": f"rerank-{done.id}", "model": pool.name, "results": results, "usage": done.usage}),
    )


@router.post("/classify", summary="Labels of texts", response_model=None, responses=ok(Labels))
async def classify(asked: ClassifyRequest, request: Request) -> Response:
    """The likeliest label of each text, and the probabilities of all."""
    serving, pool = _pool(request, "classify", model=asked.model)
    inputs = _inputs(asked.input, pool, serving)
    done = await _computed(serving, request, pool, await _rows(serving, request, pool, inputs, asked))
    labels = pool.task.labels
    data = [
        {"index": i, "label": labels[int(array.argmax())], "probs": array.tolist(), "num_classes": len(labels)}
        for i, array in enumerate(done.arrays)
    ]
    return await _response(serving, lambda: packed(_head("classify", done, pool) | {"data": data, "usage": done.usage}))


@router.post("/pooling", summary="What a model makes of texts", response_model=None, responses=ok(PooledTexts))
async def pooling(asked: PoolingRequest, request: Request) -> Response:
    """The states of all tokens (token_embed, as long as nothing is said), one vector (embed), or scores (classify)."""
    roles = {"classify": ("classify",), None: ("embed", "classify")}.get(asked.task, ("embed",))
    serving, pool = _pool(request, *roles, model=asked.model)
    if asked.dimensions is not None and asked.task != "embed":
        raise bad_request('dimensions was given, which belongs to "task": "embed"; leave it out', "dimensions")
    options = _shortened(pool, asked.dimensions)
    if pool.role == "embed" and asked.task != "embed":
        options["level"] = "token"
    inputs = _inputs(asked.input, pool, serving)
    done = await _computed(serving, request, pool, await _rows(serving, request, pool, inputs, asked), **options)

    def answer() -> bytes:
        data = [
            {"index": i, "object": "pooling", "data": _numbers(array, asked.encoding_format)}
            for i, array in enumerate(done.arrays)
        ]
        return packed(_head("pool", done, pool) | {"data": data, "usage": done.usage})

    return await _response(serving, answer)


# -- the way of a request ----------------------------------------------------------------------------------------------


def _pool(request: Request, *roles: str, model: str | None) -> tuple[Serving, Pool]:
    serving, pools = request.app.state.serving, request.app.state.pools
    assert isinstance(serving, Serving)
    assert isinstance(pools, Pools)
    _ = serving.engine  # says so while models are loading
    return serving, pools.get(*roles, model=model)


def _shortened(pool: Pool, dimensions: int | None) -> dict[str, Any]:
    """The option that keeps the first of a vector's numbers, where the model was made for that."""
    if dimensions is None:
        return {}
    if dimensions < 1 or not pool.task.shortens(dimensions):
        raise bad_request(
            f"dimensions is {dimensions}; {pool.name} gives vectors of {pool.task.width} numbers, which cannot be cut "
            "so: leave it out",
            "dimensions",
            "unsupported",
        )
    return {"dimensions": dimensions}


def _inputs(given: Any, pool: Pool, serving: Serving) -> list[Any]:
    """A list of texts or of lists of token ids."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("input is empty; give at least one text", "input")
    listed = [given] if isinstance(given[0], int) else list(given)
    _count("input", len(listed), serving)
    for i, ids in enumerate(listed):
        if not isinstance(ids, str):
            _check_ids(ids, f"input[{i}]" if isinstance(given[0], list) else "input", pool, serving)
    return listed


def _count(name: str, count: int, serving: Serving) -> None:
    if count > serving.settings.max_inputs:
        raise bad_request(
            f"{name} has {count} entries; at most {serving.settings.max_inputs} are allowed", name, "too_many"
        )


def _check_ids(ids: Sequence[int], where: str, pool: Pool, serving: Serving) -> None:
    limit = pool.task.limit
    if not ids:
        raise bad_request(f"{where} is empty; give at least one token", "input")
    if limit is not None and len(ids) > limit:
        raise bad_request(
            f"{where} has {len(ids)} tokens and {pool.name} takes at most {limit}; shorten it",
            "input",
            "context_length_exceeded",
        )
    for i, id in enumerate(ids):
        if not 0 <= id < pool.task.vocab:
            raise outside(f"{where}[{i}]", id, pool.task.vocab, "input")


async def _rows(
    serving: Serving, request: Request, pool: Pool, inputs: list[Any], asked: Pooled, *, param: str = "input"
) -> list[Row]:
    """Inputs as rows of tokens, made in a thread that reads what clients send."""
    if asked.truncate_prompt_tokens not in (None, -1):
        raise bad_request(
            f"truncate_prompt_tokens is {asked.truncate_prompt_tokens}; it takes -1, which cuts at {pool.task.limit}",
            "truncate_prompt_tokens",
        )
    special = getattr(asked, "add_special_tokens", None) is not False
    read = partial(pool.task.rows, inputs, truncate=asked.truncate_prompt_tokens is not None, special=special)
    try:
        with serving.counted(serving.tenant(request)):
            rows = await serving.reading.run(read)
    except InvalidInput as error:
        raise bad_request(_in_fields(str(error)), param, "context_length_exceeded") from error
    if empty := [i for i, row in enumerate(rows) if row.length == 0]:
        raise bad_request(f"{param}[{empty[0]}] has no tokens; give it text", param)
    return rows


def _in_fields(message: str) -> str:
    """A pipeline's advice in the words of a request."""
    return message.partition("; pass truncation")[0] + '; shorten it, or pass "truncate_prompt_tokens": -1 to cut it'


async def _computed(serving: Serving, request: Request, pool: Pool, rows: list[Row], **options: Any) -> Computed:
    """Rows through the batcher, once the request is let in; they are given up when it ends before its end."""
    tokens = sum(row.length for row in rows)
    _check_size(serving, pool, len(rows) if options.get("level") != "token" else tokens)
    async with serving.admit(serving.tenant(request), tokens=tokens) as ticket:
        ticket.prompt(tokens)
        arrays = await asyncio.gather(*(pool.pipeline.submit(row, **options) for row in rows))
        return Computed(arrays, ticket.request_id, tokens)


def _check_size(serving: Serving, pool: Pool, vectors: int) -> None:
    """Refuse answers that would be too long, before they are computed."""
    numbers, most = vectors * getattr(pool.task, "width", 1), serving.settings.max_numbers
    if numbers > most:
        raise bad_request(
            f"this answer would have {numbers} numbers; at most {most} are allowed: give fewer or shorter texts",
            "input",
            "too_many",
        )


def _scores(arrays: Sequence[np.ndarray], pool: Pool) -> list[float]:
    if pool.role == "rerank":
        return [float(array[0]) for array in arrays]
    table = np.stack(arrays)
    table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    return [float(score) for score in table[1:] @ table[0]]


def _numbers(array: np.ndarray, encoding: str | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode()
    return array.tolist()


def _head(prefix: str, done: Computed, pool: Pool) -> dict[str, Any]:
    return {"id": f"{prefix}-{done.id}", "object": "list", "created": int(time.time()), "model": pool.name}


async def _response(serving: Serving, answer: Callable[[], bytes]) -> Response:
    """An answer, written in a thread: it may be millions of numbers."""
    return Response(await serving.writing.run(answer), media_type="application/json")
