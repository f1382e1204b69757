"""The shapes of answers, for the OpenAPI document. Answers are made elsewhere, by hand; tests hold them against these.

Every field there can be is here and no other is allowed, so that a field nobody wrote down is found.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length", "tool_calls"]
Responses = dict[int | str, dict[str, Any]]


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Shape):
    """What went wrong: a sentence, its kind, the field it is about, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    """The body of every error."""

    error: ErrorDetail


class Health(Shape):
    """The server's state; with `stuck` also since when, in UTC."""

    status: Literal["ready", "loading", "draining", "stuck", "dead", "failed"]
    since: str | None = None


class ServedModel(Shape):
    name: str
    dtype: str
    device: str


class Steps(Shape):
    """The latest steps: seconds each, and the passes of the last one."""

    seconds: list[float]
    batch: int


class Stats(Shape):
    model: ServedModel
    stats: dict[str, int | float]
    steps: Steps


# -- completions -------------------------------------------------------------------------------------------------------


class CachedTokens(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptToken(Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(Shape):
    """Of every token: its text, log-probability, the likeliest in its place, and where its text begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs = []


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Shape):
    """An event of a stream; the last one has the usage and no choice, if it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


# -- chats -------------------------------------------------------------------------------------------------------------


class RankedToken(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(Shape):
    content: list[ChatToken]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []


class FunctionDelta(Shape):
    name: str = ""
    arguments: str = ""


class ToolCallDelta(Shape):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Shape):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Shape):
    """An event of a stream; the last one has the usage and no choice, if it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


# -- about the model ---------------------------------------------------------------------------------------------------


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Detokenized(Shape):
    prompt: str


class TokenizerInfo(BaseModel):
    """With the special tokens by their names, such as eos_token, where the model has them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None


# -- responses ---------------------------------------------------------------------------------------------------------

RETRY = {"Retry-After": {"description": "Seconds until another try makes sense", "schema": {"type": "integer"}}}
EVENT = {  # of a stream, one by one
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk of the answer as JSON, an error, or [DONE]"}},
    "required": ["data"],
}


def _error(description: str, **more: Any) -> dict[str, Any]:
    return {"model": ErrorAnswer, "description": description, **more}


COMMON: Responses = {
    400: _error("The request cannot be answered as it is; `param` names the field."),
    401: _error("There are keys, and none of them came with the request."),
    403: _error("A web page of an origin that may not call."),
    408: _error("The body did not come in time."),
    413: _error("The body is too large."),
    431: _error("The head is too large."),
    500: _error("The server failed; its log says why, under the request's id."),
    503: _error("Not now: the model loads, the server drains, or it is busy.", headers=RETRY),
    504: _error("The request took too long."),
}
ERRORS: Responses = {**COMMON, 404: _error("There is no such model.")}
GENERATES: Responses = {429: _error("The queue, or the key's share of it, is full.", headers=RETRY)}


def ok(model: type[BaseModel], description: str = "The answer") -> Responses:
    """A whole answer."""
    return {200: {"model": model, "description": description}}


def streams(model: type[BaseModel]) -> Responses:
    """An answer that comes whole or as a stream."""
    return GENERATES | {
        200: {
            "model": model,
            "description": "The answer; with `stream`, server-sent events that end with `data: [DONE]`.",
            "content": {"text/event-stream": {"schema": EVENT}},
        }
    }
