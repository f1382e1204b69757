"""The routes: tokenize texts, admit the request, compute its rows in shared batches, and respond."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.pipelines.task import Row
from headway.server.api.checks import unknown_token
from headway.server.api.parsing import JsonRoute
from headway.server.api.response_schema import ERRORS, QUEUE_ERRORS, ok
from headway.server.api.streaming import json_bytes_in_pieces
from headway.server.errors import bad_request
from headway.server.pooling.models import PoolingModel, PoolingModels
from headway.server.pooling.request_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    PooledRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from headway.server.pooling.response_schema import (
    ClassifyResponse,
    EmbeddingsResponse,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from headway.server.serving import Serving

router = APIRouter(route_class=JsonRoute, responses={**ERRORS, **QUEUE_ERRORS})


@dataclass(frozen=True)
class PoolingResult:
    """The arrays of a request's rows, its id, and its number of tokens."""

    arrays: list[np.ndarray]
    id: str
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}


@router.post("/v1/embeddings", summary="Embed texts", response_model=None, responses=ok(EmbeddingsResponse))
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """One vector for each text, in OpenAI's format."""
    pool, result = await embed(body, request)

    def write() -> bytes:
        data = [
            {"object": "embedding", "index": i, "embedding": _encode_vector(array, body.encoding_format)}
            for i, array in enumerate(result.arrays)
        ]
        return json_bytes_in_pieces({"object": "list", "model": pool.name, "data": data, "usage": result.usage})

    return await _response(request.app.state.serving, write)


async def embed(body: EmbeddingRequest, request: Request) -> tuple[PoolingModel, PoolingResult]:
    """The vectors of a request, and the model they are from."""
    serving, pool = _pool(request, "embed", model=body.model)
    options = _dimension_options(pool, body.dimensions)
    inputs = await serving.readers.run(_inputs, body.input, pool, serving)
    return pool, await _compute(
        serving, request, pool, await _tokenize(serving, request, pool, inputs, body), **options
    )


@router.post("/reranking", summary="Rank documents for a query", response_model=None, responses=ok(RerankResponse))
@router.post("/v1/reranking", summary="Rank documents for a query", response_model=None, responses=ok(RerankResponse))
@router.post("/rerank", summary="Rank documents for a query", response_model=None, responses=ok(RerankResponse))
@router.post("/v1/rerank", summary="Rank documents for a query", response_model=None, responses=ok(RerankResponse))
@router.post("/v2/rerank", summary="Rank documents for a query", response_model=None, responses=ok(RerankResponse))
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Documents by their relevance to the query, best first: a reranker's score, or the cosine of embeddings."""
    serving, pool = _pool(request, "rerank", "embed", model=body.model)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    if not documents:
        raise bad_request("documents is empty; pass at least one", "documents")
    _check_count("documents", len(documents), serving)
    if body.top_n is not None and body.top_n < 0:
        raise bad_request(f"top_n is {body.top_n}; it must be an integer of at least 0, where 0 returns all", "top_n")
    pairs = [(body.query, one) for one in documents] if pool.role == "rerank" else [body.query, *documents]
    rows = await _tokenize(serving, request, pool, pairs, body, param="documents")
    result = await _compute(serving, request, pool, rows)
    scores = _scores(result.arrays, pool)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if body.return_documents is not False:
        results = [one | {"document": {"text": documents[one["index"]]}} for one in results]
    return await _response(
        serving,
        lambda: json_bytes_in_pieces(
            {"id": f"rerank-{result.id}", "model": pool.name, "results": results, "usage": result.usage}
        ),
    )


@router.post("/score", summary="Score pairs of texts", response_model=None, responses=ok(ScoreResponse))
@router.post("/v1/score", summary="Score pairs of texts", response_model=None, responses=ok(ScoreResponse))
async def score(body: ScoreRequest, request: Request) -> Response:
    """A score for each pair: a reranker's, or the cosine of embeddings. One text is paired with each of the others."""
    serving, pool = _pool(request, "rerank", "embed", model=body.model)
    pairs = _pairs(body, serving)
    if pool.role == "rerank":
        result = await _compute(
            serving, request, pool, await _tokenize(serving, request, pool, pairs, body, param="text_2")
        )
        scores = [float(array[0]) for array in result.arrays]
    else:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each is embedded once
        result = await _compute(
            serving, request, pool, await _tokenize(serving, request, pool, texts, body, param="text_2")
        )
        places = {text: i for i, text in enumerate(texts)}
        table = _unit_rows(result.arrays)
        scores = [float(table[places[one]] @ table[places[other]]) for one, other in pairs]
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    return await _response(
        serving,
        lambda: json_bytes_in_pieces(_common_fields("score", result, pool) | {"data": data, "usage": result.usage}),
    )


def _pairs(body: ScoreRequest, serving: Serving) -> list[tuple[str, str]]:
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    for name, texts in (("text_1", first), ("text_2", second)):
        _check_count(name, len(texts), serving)
        if not texts:
            raise bad_request(f"{name} is empty; pass at least one text", name)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise bad_request(
            f"text_1 has {len(first)} texts and text_2 has {len(second)}; pass one in text_1, or as many as in text_2",
            "text_1",
        )
    return list(zip(first, second, strict=True))


@router.post("/classify", summary="Classify texts", response_model=None, responses=ok(ClassifyResponse))
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """The likeliest label of each text, and the probabilities of all labels."""
    serving, pool = _pool(request, "classify", model=body.model)
    inputs = await serving.readers.run(_inputs, body.input, pool, serving)
    result = await _compute(serving, request, pool, await _tokenize(serving, request, pool, inputs, body))
    labels = pool.task.labels
    data = [
        {"index": i, "label": labels[int(array.argmax())], "probs": array.tolist(), "num_classes": len(labels)}
        for i, array in enumerate(result.arrays)
    ]
    return await _response(
        serving,
        lambda: json_bytes_in_pieces(_common_fields("classify", result, pool) | {"data": data, "usage": result.usage}),
    )


@router.post("/pooling", summary="Pool hidden states of texts", response_model=None, responses=ok(PoolingResponse))
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """Hidden states of all tokens (token_embed, the default), one vector (embed), or scores (classify)."""
    roles = {"classify": ("classify",), None: ("embed", "classify")}.get(body.task, ("embed",))
    serving, pool = _pool(request, *roles, model=body.model)
    if body.dimensions is not None and body.task != "embed":
        raise bad_request('dimensions requires "task": "embed"; remove it', "dimensions")
    options = _dimension_options(pool, body.dimensions)
    if pool.role == "embed" and body.task != "embed":
        options["level"] = "token"
    inputs = await serving.readers.run(_inputs, body.input, pool, serving)
    result = await _compute(serving, request, pool, await _tokenize(serving, request, pool, inputs, body), **options)

    def write() -> bytes:
        data = [
            {"index": i, "object": "pooling", "data": _encode_vector(array, body.encoding_format)}
            for i, array in enumerate(result.arrays)
        ]
        return json_bytes_in_pieces(_common_fields("pool", result, pool) | {"data": data, "usage": result.usage})

    return await _response(serving, write)


# -- processing a request ----------------------------------------------------------------------------------------------


def _pool(request: Request, *roles: str, model: str | None) -> tuple[Serving, PoolingModel]:
    serving, pooling_models = request.app.state.serving, request.app.state.pooling_models
    assert isinstance(serving, Serving)
    assert isinstance(pooling_models, PoolingModels)
    serving.check_started()
    return serving, pooling_models.get(*roles, model=model)


def _dimension_options(pool: PoolingModel, dimensions: int | None) -> dict[str, Any]:
    """The option that truncates vectors, if the model was trained for it."""
    if dimensions is None:
        return {}
    if dimensions < 1 or not pool.task.shortens(dimensions):
        raise bad_request(
            f"dimensions is {dimensions}; {pool.name} has vectors of {pool.task.width} dimensions, which cannot be "
            "shortened to that: remove it",
            "dimensions",
            "unsupported",
        )
    return {"dimensions": dimensions}


def _inputs(given: Any, pool: PoolingModel, serving: Serving) -> list[Any]:
    """A list of texts or of lists of token ids."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("input is empty; pass at least one text", "input")
    listed = [given] if isinstance(given[0], int) else list(given)
    _check_count("input", len(listed), serving)
    for i, ids in enumerate(listed):
        if not isinstance(ids, str):
            _check_ids(ids, f"input[{i}]" if isinstance(given[0], list) else "input", pool, serving)
    return listed


def _check_count(name: str, count: int, serving: Serving) -> None:
    if count > serving.settings.max_inputs:
        raise bad_request(
            f"{name} has {count} entries; at most {serving.settings.max_inputs} are allowed", name, "too_many"
        )


def _check_ids(ids: Sequence[int], where: str, pool: PoolingModel, serving: Serving) -> None:
    limit = pool.task.limit
    if not ids:
        raise bad_request(f"{where} is empty; pass at least one token", "input")
    if limit is not None and len(ids) > limit:
        raise bad_request(
            f"{where} has {len(ids)} tokens and {pool.name} takes at most {limit}; shorten it",
            "input",
            "context_length_exceeded",
        )
    for i, id in enumerate(ids):
        if not 0 <= id < pool.task.vocab:
            raise unknown_token(f"{where}[{i}]", id, pool.task.vocab, "input")


async def _tokenize(
    serving: Serving,
    request: Request,
    pool: PoolingModel,
    inputs: list[Any],
    body: PooledRequest,
    *,
    param: str = "input",
) -> list[Row]:
    """Inputs as rows of tokens, made in a reader thread."""
    if body.truncate_prompt_tokens not in (None, -1):
        raise bad_request(
            f"truncate_prompt_tokens is {body.truncate_prompt_tokens}; it must be -1, for at most {pool.task.limit}",
            "truncate_prompt_tokens",
        )
    special = getattr(body, "add_special_tokens", None) is not False
    read = partial(pool.task.rows, inputs, truncate=body.truncate_prompt_tokens is not None, special=special)
    try:
        with serving.queue_slot(serving.tenant(request)):
            rows = await serving.readers.run(read)
    except InvalidInput as error:
        raise bad_request(_http_advice(str(error)), param, "context_length_exceeded") from error
    if empty := [i for i, row in enumerate(rows) if row.length == 0]:
        raise bad_request(f"{param}[{empty[0]}] has no tokens; pass some text", param)
    for i, row in enumerate(rows):
        if (id := max(row.inputs["input_ids"])) >= pool.task.vocab:  # the folder's tokenizer is another model's
            raise unknown_token(f"a token of {param}[{i}]", id, pool.task.vocab, param)
    return rows


def _http_advice(message: str) -> str:
    """A pipeline's error message with the fix in terms of request fields."""
    return message.partition("; pass truncation")[0] + '; shorten it, or pass "truncate_prompt_tokens": -1 to cut it'


async def _compute(
    serving: Serving, request: Request, pool: PoolingModel, rows: list[Row], **options: Any
) -> PoolingResult:
    """The rows' arrays from the shared batcher, once the request is admitted. Rows are dropped if it is cancelled."""
    tokens = sum(row.length for row in rows)
    _check_size(serving, pool, len(rows) if options.get("level") != "token" else tokens)
    async with serving.admit(serving.tenant(request), tokens=tokens, model=pool.name) as admitted:
        admitted.prompt(tokens)
        arrays = await asyncio.gather(*(pool.pipeline.submit(row, **options) for row in rows))
        return PoolingResult(arrays, admitted.request_id, tokens)


def _check_size(serving: Serving, pool: PoolingModel, vectors: int) -> None:
    """Raise if a response would be too large, before it is computed."""
    numbers, most = vectors * getattr(pool.task, "width", 1), serving.settings.max_vector_elements
    if numbers > most:
        raise bad_request(
            f"the response would have {numbers} numbers; at most {most} are allowed: pass fewer or shorter texts",
            "input",
            "too_many",
        )


def _scores(arrays: Sequence[np.ndarray], pool: PoolingModel) -> list[float]:
    if pool.role == "rerank":
        return [float(array[0]) for array in arrays]
    table = _unit_rows(arrays)
    return [float(score) for score in table[1:] @ table[0]]


def _unit_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    table = np.stack(arrays)
    return table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)


def _encode_vector(array: np.ndarray, encoding: str | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode()
    return array.tolist()


def _common_fields(prefix: str, result: PoolingResult, pool: PoolingModel) -> dict[str, Any]:
    return {"id": f"{prefix}-{result.id}", "object": "list", "created": int(time.time()), "model": pool.name}


async def _response(serving: Serving, write: Callable[[], bytes]) -> Response:
    """A response, serialized in a thread since it may have millions of numbers."""
    return Response(await serving.writers.run(write), media_type="application/json")
