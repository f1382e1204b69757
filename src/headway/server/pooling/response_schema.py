"""The shapes of answers with vectors, scores and labels, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from headway.server.openai.response_schema import Shape


class PoolingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Shape):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class RankedText(Shape):
    text: str


class RankedDocument(Shape):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Shape):
    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


class Label(Shape):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Labels(Shape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Label]
    usage: PoolingUsage


class PooledText(Shape):
    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PooledTexts(Shape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledText]
    usage: PoolingUsage
