"""The fields of requests for vectors, scores and labels: as OpenAI, Jina, Cohere and vLLM have them."""

from __future__ import annotations

from typing import Annotated, Literal

from headway.server.openai.request_schema import Count, First, Ids, Some, Wire, shown

Texts = Annotated[list[str], First(), shown(minItems=1)]
Rows = Annotated[list[Some], First(), shown(minItems=1)]
Input = str | Texts | Some | Rows
"""A text, several, the token ids of one, or of several."""

Encoding = Literal["float", "base64"]


class Pooled(Wire):
    """What they have in common."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, shown(enum=[-1])] | None = None  # -1: cut at the model's own length
    user: str | None = None  # whose request it is, which changes nothing


class EmbeddingRequest(Pooled):
    """Vectors of texts."""

    input: Input
    encoding_format: Encoding | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None


class Document(Wire):
    """A document as an object."""

    text: str


class RerankRequest(Pooled):
    """Documents by how well they answer a query."""

    query: str
    documents: Annotated[list[str | Document], First(), shown(minItems=1)]
    top_n: Annotated[int, shown(minimum=0)] | None = None  # 0: all of them
    return_documents: bool | None = None


class ClassifyRequest(Pooled):
    """Labels of texts."""

    input: Input
    add_special_tokens: bool | None = None


class PoolingRequest(Pooled):
    """What a model makes of texts: states of all tokens, one vector, or probabilities of labels."""

    input: Input
    encoding_format: Encoding | None = None
    task: Literal["embed", "token_embed", "classify"] | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None


__all__ = ["ClassifyRequest", "Document", "EmbeddingRequest", "Ids", "Input", "PoolingRequest", "RerankRequest"]
