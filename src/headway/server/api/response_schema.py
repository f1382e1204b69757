"""The fields of responses, for the OpenAPI document. Responses are built elsewhere; tests validate them against these.

Every possible field is here and no other is allowed, so that tests find undocumented fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length", "tool_calls", "function_call"]
Responses = dict[int | str, dict[str, Any]]


class ResponseSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(ResponseSchema):
    """A message for people, the type of the error, the field it is about, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseSchema):
    """The body of every error."""

    error: ErrorDetail


class Health(ResponseSchema):
    """The server's state; with `stuck` also since when (UTC)."""

    status: Literal["ready", "loading", "draining", "stuck", "dead", "failed"]
    since: str | None = None


class Index(ResponseSchema):
    """Links by what they lead to."""

    server: Literal["headway"]
    links: dict[str, str]


class StatsModel(ResponseSchema):
    name: str
    dtype: str
    device: str


class Steps(ResponseSchema):
    """The seconds of each of the latest steps, and the number of passes in the last one."""

    seconds: list[float]
    batch: int


class ServerStats(ResponseSchema):
    model: StatsModel
    stats: dict[str, int | float]
    steps: Steps


# -- completions -------------------------------------------------------------------------------------------------------


class CachedTokens(ResponseSchema):
    cached_tokens: int


class Usage(ResponseSchema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptToken(ResponseSchema):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(ResponseSchema):
    """For each token: its text, its log-probability, the likeliest tokens at its position, and its text's offset."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseSchema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs = []
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class Completion(ResponseSchema):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(ResponseSchema):
    """An event of a stream; with include_usage, the last one has the usage and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


# -- chats -------------------------------------------------------------------------------------------------------------


class RankedToken(ResponseSchema):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(ResponseSchema):
    content: list[ChatToken]
    refusal: None


class ChatFunctionCall(ResponseSchema):
    name: str
    arguments: str


class ChatToolCall(ResponseSchema):
    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatCustomCall(ResponseSchema):
    name: str
    input: str


class ChatCustomToolCall(ResponseSchema):
    id: str
    type: Literal["custom"]
    custom: ChatCustomCall


class AssistantMessage(ResponseSchema):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ChatToolCall | ChatCustomToolCall] = []
    function_call: ChatFunctionCall | None = None


class ChatChoice(ResponseSchema):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] = []


class ChatCompletion(ResponseSchema):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[int] = []


class FunctionDelta(ResponseSchema):
    name: str = ""
    arguments: str = ""


class CustomDelta(ResponseSchema):
    name: str = ""
    input: str = ""


class ToolCallDelta(ResponseSchema):
    """More of a call, of a function or of a custom tool."""

    index: int
    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class ChatDelta(ResponseSchema):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []
    function_call: FunctionDelta | None = None


class ChatChunkChoice(ResponseSchema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] = []


class ChatChunk(ResponseSchema):
    """An event of a stream; with include_usage, the last one has the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


# -- about the model ---------------------------------------------------------------------------------------------------


class ModelMeta(ResponseSchema):
    """What llama-server tells about a model that is loaded."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class ModelCard(ResponseSchema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    state: Literal["absent", "loading", "ready", "draining", "failed"]
    size: int | None  # bytes of its own weights: in memory, or on disk before they are loaded
    progress: float | None  # of loading, from 0 to 1
    meta: ModelMeta | None
    role: Literal["generate", "embed", "rerank", "classify", "audio"]


class ModelList(ResponseSchema):
    object: Literal["list"]
    data: list[ModelCard]


class TokenPiece(ResponseSchema):
    id: int
    piece: str | list[int]


class Tokenized(ResponseSchema):
    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] = []


class Detokenized(ResponseSchema):
    """The text, under vLLM's name and under llama-server's."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """Also has the model's special tokens by name, such as eos_token."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None


# -- responses ---------------------------------------------------------------------------------------------------------

RETRY = {"Retry-After": {"description": "Seconds until a retry makes sense", "schema": {"type": "integer"}}}
EVENT = {  # of a stream
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk of the response as JSON, an error, or [DONE]"}},
    "required": ["data"],
}


def _error(description: str, **more: Any) -> dict[str, Any]:
    return {"model": ErrorResponse, "description": description, **more}


COMMON: Responses = {
    400: _error("The request is not valid; `param` names the field."),
    401: _error("The server requires a key, and the request has none or an invalid one."),
    403: _error("The web page's origin is not allowed."),
    408: _error("The body did not arrive in time."),
    413: _error("The body is too large."),
    431: _error("The headers are too large."),
    500: _error("Internal error; the server's log has the cause under the request's id."),
    503: _error("The model is loading, or the server is draining or busy.", headers=RETRY),
    504: _error("The request took too long."),
}
ERRORS: Responses = {**COMMON, 404: _error("The model does not exist.")}
QUEUE_ERRORS: Responses = {429: _error("The queue, or the key's share of it, is full.", headers=RETRY)}


def ok(model: type[BaseModel], description: str = "The response") -> Responses:
    """A whole response."""
    return {200: {"model": model, "description": description}}


def whole_or_stream(model: type[BaseModel]) -> Responses:
    """A response that is sent whole or as a stream."""
    return QUEUE_ERRORS | {
        200: {
            "model": model,
            "description": "The response; with `stream`, server-sent events that end with `data: [DONE]`.",
            "content": {"text/event-stream": {"schema": EVENT}},
        }
    }
