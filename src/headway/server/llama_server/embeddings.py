"""`POST /embedding` and `/embeddings`: vectors as llama-server has them, a list of one vector for each text."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.server.api.parsing import JsonRoute
from headway.server.api.request_schema import described
from headway.server.api.response_schema import Responses, ResponseSchema
from headway.server.api.streaming import json_bytes_in_pieces
from headway.server.errors import bad_request, fields_named
from headway.server.pooling.request_schema import EmbeddingRequest, Input, PooledRequest
from headway.server.pooling.routes import embed

LARGEST = 32760.0  # of a vector with `embd_normalize: 0`, whose numbers fit into 16 bits
EUCLIDEAN = 2
LIMIT = 64  # of a norm's exponent: powers beyond it are beyond a float

router = APIRouter(route_class=JsonRoute)


class NativeEmbeddingRequest(PooledRequest):
    """`POST /embedding`: `content`, or `input` as OpenAI names it."""

    content: Input | None = None
    input: Input | None = None
    embd_normalize: Annotated[int, described(minimum=0, maximum=LIMIT)] | None = None


class NativeEmbedding(ResponseSchema):
    """The vector of one text, in a list of its own: all tokens are pooled."""

    index: int
    embedding: list[list[float]]


VECTORS: Responses = {200: {"model": list[NativeEmbedding], "description": "The vectors"}}


@router.post("/embedding", summary="Embed texts", response_model=None, responses=VECTORS)
@router.post("/embeddings", summary="Embed texts", response_model=None, responses=VECTORS)
async def embeddings(body: NativeEmbeddingRequest, request: Request) -> Response:
    """One vector for each text, of Euclidean length 1 unless `embd_normalize` says another norm."""
    given = body.input if body.content is None else body.content
    if given is None or (body.content is not None and body.input is not None):
        raise bad_request("pass either content or input", "content", "missing_field")
    kind = EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
    if not 0 <= kind <= LIMIT:
        raise bad_request(
            f"embd_normalize is {kind}; it must be an integer in [0, {LIMIT}]: vectors are normalized here",
            "embd_normalize",
            "out_of_range",
        )
    asked = EmbeddingRequest(model=body.model, input=given, truncate_prompt_tokens=body.truncate_prompt_tokens)
    with fields_named({} if body.content is None else {"input": "content"}):
        _, result = await embed(asked, request)

    def write() -> bytes:
        vectors = [normalized(array, kind) for array in result.arrays]
        listed: list[dict[str, Any]] = [{"index": i, "embedding": [one.tolist()]} for i, one in enumerate(vectors)]
        return json_bytes_in_pieces(listed)

    serving = request.app.state.serving
    return Response(await serving.writers.run(write), media_type="application/json")


def normalized(vector: np.ndarray, kind: int) -> np.ndarray:
    """A vector with a norm of 1: the sum of this power of its numbers, or with 0 the largest of 32760."""
    sizes = np.abs(vector.astype(np.float64))
    largest = float(sizes.max(initial=0.0))
    if not largest:
        return vector
    if kind == 0:
        return vector / (largest / LARGEST)
    return vector / (largest * float(((sizes / largest) ** kind).sum()) ** (1 / kind))
