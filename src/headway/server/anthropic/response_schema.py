"""The fields of responses of /v1/messages, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from headway.server.api.response_schema import RETRY, Responses, ResponseSchema

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(ResponseSchema):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(ResponseSchema):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(ResponseSchema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsageCounts(ResponseSchema):
    """`input_tokens` are those that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class Message(ResponseSchema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsageCounts


class TokenCount(ResponseSchema):
    input_tokens: int


class MessageErrorDetail(ResponseSchema):
    type: str
    message: str


class MessageError(ResponseSchema):
    """The body of every error."""

    type: Literal["error"]
    error: MessageErrorDetail


EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "The event's type"},
        "data": {"type": "string", "description": "The event as JSON, with its type"},
    },
    "required": ["event", "data"],
}
WHOLE_OR_EVENTS: Responses = {
    200: {
        "model": Message,
        "description": "The message; with `stream`, server-sent events that end with message_stop or error.",
        "content": {"text/event-stream": {"schema": EVENT}},
    }
}
DESCRIPTIONS = {
    400: "The request is not valid.",
    401: "The server requires a key, and the request has none or an invalid one.",
    403: "The web page's origin is not allowed.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The queue, or the key's share of it, is full.",
    431: "The headers are too large.",
    500: "Internal error; the server's log has the cause under the request's id.",
    503: "The model is loading, or the server is draining or busy.",
    504: "The request took too long.",
}
ERRORS: Responses = {
    status: {"model": MessageError, "description": text, **({"headers": RETRY} if status in (429, 503) else {})}
    for status, text in DESCRIPTIONS.items()
}
