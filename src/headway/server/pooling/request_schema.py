"""The fields of requests for embeddings, scores and labels, as OpenAI, Jina, Cohere and vLLM have them."""

from __future__ import annotations

from typing import Annotated, Literal

from headway.server.api.request_schema import Count, FailAtFirst, Ids, NonEmptyIds, RequestSchema, described

Texts = Annotated[list[str], FailAtFirst(), described(minItems=1)]
Rows = Annotated[list[NonEmptyIds], FailAtFirst(), described(minItems=1)]
Input = str | Texts | NonEmptyIds | Rows
"""A text, a list of texts, a list of token ids, or a list of such lists."""

Encoding = Literal["float", "base64"]


class PooledRequest(RequestSchema):
    """The fields that all of them have."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, described(enum=[-1])] | None = None  # -1: truncate to the model's length
    user: str | None = None  # ignored


class EmbeddingRequest(PooledRequest):
    """`POST /v1/embeddings`."""

    input: Input
    encoding_format: Encoding | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None


class Document(RequestSchema):
    """A document as an object."""

    text: str


class RerankRequest(PooledRequest):
    """`POST /rerank`: documents ranked by their relevance to a query."""

    query: str
    documents: Annotated[list[str | Document], FailAtFirst(), described(minItems=1)]
    top_n: Annotated[int, described(minimum=0)] | None = None  # 0: all
    return_documents: bool | None = None


class ScoreRequest(PooledRequest):
    """`POST /score`: how well texts fit each other, one with many or pair by pair."""

    text_1: str | Texts
    text_2: str | Texts


class ClassifyRequest(PooledRequest):
    """`POST /classify`."""

    input: Input
    add_special_tokens: bool | None = None


class PoolingRequest(PooledRequest):
    """`POST /pooling`: hidden states of all tokens, one vector, or probabilities of labels."""

    input: Input
    encoding_format: Encoding | None = None
    task: Literal["embed", "token_embed", "classify"] | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None


__all__ = [
    "ClassifyRequest",
    "Document",
    "EmbeddingRequest",
    "Ids",
    "Input",
    "PoolingRequest",
    "RerankRequest",
    "ScoreRequest",
]
