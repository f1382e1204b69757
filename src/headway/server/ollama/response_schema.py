"""The fields of responses of Ollama's routes, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from headway.server.anthropic.response_schema import DESCRIPTIONS
from headway.server.api.response_schema import RETRY, ChatToken, Responses, ResponseSchema

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaFunction(ResponseSchema):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(ResponseSchema):
    id: str
    function: OllamaFunction


class OllamaReply(ResponseSchema):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaToolCall] | None = None


class OllamaCounts(ResponseSchema):
    """What every line has, and the last one's counts and times, in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[ChatToken] | None = None


class OllamaChat(OllamaCounts):
    message: OllamaReply


class OllamaText(OllamaCounts):
    response: str
    thinking: str = ""


class OllamaEmbeddings(ResponseSchema):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaDetails(ResponseSchema):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(ResponseSchema):
    """A model under one of its names; `digest` identifies it on this server."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(ResponseSchema):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(ResponseSchema):
    models: list[OllamaRunningModel]


class OllamaShown(ResponseSchema):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbedding(ResponseSchema):
    """One vector, of the older route."""

    embedding: list[float]


class OllamaVersion(ResponseSchema):
    version: str


class OllamaError(ResponseSchema):
    """The body of every error."""

    error: str


ERRORS: Responses = {
    status: {"model": OllamaError, "description": text, **({"headers": RETRY} if status in (429, 503) else {})}
    for status, text in DESCRIPTIONS.items()
}


def lines(model: type[ResponseSchema]) -> Responses:
    """A response as JSON lines of this form, or whole."""
    return {
        200: {
            "model": model,
            "description": "Lines, or with `stream: false` one object. A stream that fails ends with an error.",
            "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
        }
    }
