"""The fields of responses of /v1/responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from headway.server.api.response_schema import ChatToken, Responses, ResponseSchema

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseSchema):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatToken]


class ReasoningText(ResponseSchema):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ResponseSchema):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(ResponseSchema):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[None]
    content: list[ReasoningText]


class OutputFunctionCall(ResponseSchema):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputCustomToolCall(ResponseSchema):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


class ListedTool(ResponseSchema):
    name: str
    description: str
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None


class OutputMcpListTools(ResponseSchema):
    id: str
    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[ListedTool]
    error: None


class OutputMcpCall(ResponseSchema):
    id: str
    type: Literal["mcp_call"]
    status: Literal["in_progress", "calling", "completed", "incomplete", "failed"]
    server_label: str
    name: str
    arguments: str
    output: str | None
    error: dict[str, Any] | None
    approval_request_id: str | None


class OutputMcpApprovalRequest(ResponseSchema):
    id: str
    type: Literal["mcp_approval_request"]
    server_label: str
    name: str
    arguments: str


class ResponseFailure(ResponseSchema):
    code: str
    message: str


class IncompleteDetails(ResponseSchema):
    reason: Literal["max_output_tokens", "max_tool_calls"]


class ReasoningEcho(ResponseSchema):
    effort: str | None
    summary: None


class TextEcho(ResponseSchema):
    format: dict[str, Any]


class InputTokensDetails(ResponseSchema):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(ResponseSchema):
    reasoning_tokens: int


class ResponseUsage(ResponseSchema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ConversationEcho(ResponseSchema):
    id: str


class ResponseObject(ResponseSchema):
    """A response, under way or complete."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[
        OutputMessage
        | OutputReasoning
        | OutputFunctionCall
        | OutputCustomToolCall
        | OutputMcpListTools
        | OutputMcpCall
        | OutputMcpApprovalRequest
    ]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationEcho | None
    reasoning: ReasoningEcho
    store: bool
    temperature: float | None
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    safety_identifier: str | None
    service_tier: Literal["default"]
    access_programs: None
    image: None
    input_transformations: None
    moderation: None
    prompt: None
    prompt_cache_diagnostics: None
    prompt_cache_options: None
    tool_usage: None


class DeletedResponse(ResponseSchema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(ResponseSchema):
    """Input items, newest first unless the request says otherwise."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(ResponseSchema):
    object: Literal["response.input_tokens"]
    input_tokens: int


EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "The event's type"},
        "data": {"type": "string", "description": "The event as JSON, with its type and sequence_number"},
    },
    "required": ["event", "data"],
}
WHOLE_OR_EVENTS: Responses = {
    200: {
        "model": ResponseObject,
        "description": "The response; with `stream`, server-sent events that end with response.completed, "
        "response.incomplete or response.failed.",
        "content": {"text/event-stream": {"schema": EVENT}},
    }
}
