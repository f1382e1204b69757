"""The fields of responses with embeddings, scores and labels, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from headway.server.api.response_schema import ResponseSchema


class PoolingUsage(ResponseSchema):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(ResponseSchema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(ResponseSchema):
    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage


class DocumentText(ResponseSchema):
    text: str


class RankedDocument(ResponseSchema):
    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankResponse(ResponseSchema):
    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


class PairScore(ResponseSchema):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ResponseSchema):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PoolingUsage


class LabelScores(ResponseSchema):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(ResponseSchema):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[LabelScores]
    usage: PoolingUsage


class PoolingData(ResponseSchema):
    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PoolingResponse(ResponseSchema):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage
