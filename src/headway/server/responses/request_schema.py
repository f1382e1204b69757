"""The fields of a request to /v1/responses and their types. Items are one class of all fields, as messages are."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from headway.server.api.request_schema import (
    OFF_VALUES,
    Count,
    CustomDefinition,
    CustomFormat,
    CustomGrammar,
    FailAtFirst,
    NonNegative,
    RequestSchema,
    SamplingFields,
    Text,
    Texts,
    described,
)

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ItemPart(RequestSchema):
    """One part of an item's content."""

    type: Literal[
        "input_text",
        "output_text",
        "refusal",
        "reasoning_text",
        "summary_text",
        "input_image",
        "input_file",
        "input_audio",
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Any = None  # sent back by clients; ignored
    parsed: Any = None  # added by client libraries; ignored
    image_url: Any = None
    file_id: Any = None
    detail: Any = None
    input_audio: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None


Parts = Annotated[list[ItemPart], FailAtFirst()]


ItemType = Literal[
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "reasoning",
    "item_reference",
]


class InputItem(RequestSchema):
    """One item of the input, of any type. Clients may send back items with all fields that responses have."""

    type: ItemType | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None
    phase: str | None = None  # sent back by clients; ignored
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    parsed_arguments: Any = None  # added by client libraries; ignored
    input: str | None = None  # of a custom tool
    output: str | Parts | None = None
    server_label: str | None = None
    tools: Annotated[list[Any], FailAtFirst()] | None = None  # of an MCP server's list
    error: str | dict[str, Any] | None = None  # of an MCP call or list
    approval_request_id: str | None = None
    approve: bool | None = None  # of an approval
    reason: str | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None


class FunctionTool(RequestSchema):
    """A function that the model may call; `strict` unless it says otherwise, as OpenAI has it."""

    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomToolFormat(RequestSchema):
    """What a custom tool takes: any text, or one that follows a grammar."""

    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None


class CustomTool(RequestSchema):
    """A tool that takes one text."""

    type: Literal["custom"]
    name: Text
    description: str | None = None
    format: CustomToolFormat | None = None

    @property
    def definition(self) -> CustomDefinition:
        """The tool as chats have it."""
        format, grammar = self.format, None
        if format is not None and format.definition is not None and format.syntax is not None:
            grammar = CustomGrammar(definition=format.definition, syntax=format.syntax)
        whole = None if format is None else CustomFormat(type=format.type, grammar=grammar)
        return CustomDefinition(name=self.name, description=self.description, format=whole)


class McpToolFilter(RequestSchema):
    tool_names: Annotated[list[str], FailAtFirst()] | None = None
    read_only: bool | None = None


class McpApprovals(RequestSchema):
    """Which tools need an approval, and which do not. One that neither names needs it."""

    always: McpToolFilter | None = None
    never: McpToolFilter | None = None


class McpServerTool(RequestSchema):
    """The tools of an MCP server: one of the operator's by its name, or one at a URL that the operator allows."""

    type: Literal["mcp"]
    server_label: Text
    server_url: str | None = None
    server_description: str | None = None
    allowed_tools: Annotated[list[str], FailAtFirst()] | McpToolFilter | None = None
    require_approval: Literal["never", "always"] | McpApprovals | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None


def _kind(value: Any) -> str | None:
    type = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return KINDS.get(type) if isinstance(type, str) else None


KINDS = {"function": "FunctionTool", "custom": "CustomTool", "mcp": "McpServerTool"}
AnyResponseTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[McpServerTool, Tag("McpServerTool")],
    Discriminator(
        _kind,
        custom_error_type="unknown_tool",
        custom_error_message="the type of a tool must be function, custom or mcp; there are no built-in tools",
    ),
]


class NamedFunctionTool(RequestSchema):
    type: Literal["function", "custom"]
    name: str


class NamedMcpTool(RequestSchema):
    """A tool of an MCP server, or any of them."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class AllowedFunctionTools(RequestSchema):
    """Only these tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool | NamedMcpTool], FailAtFirst(), Field(min_length=1)]


class TextFormat(RequestSchema):
    """The format of the text: any, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseTextOptions(RequestSchema):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(RequestSchema):
    """How much a model reasons. There are no summaries: a reasoning item has the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(RequestSchema):
    include_obfuscation: bool | None = None  # padding against eavesdroppers; ignored


Input = Text | Annotated[list[InputItem], FailAtFirst(), described(minItems=1)]
Tools = Annotated[list[AnyResponseTool], FailAtFirst()]
ToolChoice = Literal["none", "auto", "required"] | NamedFunctionTool | NamedMcpTool | AllowedFunctionTools


class ConversationName(RequestSchema):
    id: str


class PromptRequest(SamplingFields):
    """What a prompt is made of: the whole of a request to count its tokens."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES | {"truncation": "disabled", "context_management": []}

    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseRequest(PromptRequest):
    """`POST /v1/responses`."""

    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], FailAtFirst()] | None
    ) = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    top_logprobs: NonNegative | None = None
    stop: Text | Texts | None = None
    metadata: Metadata | None = None

    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


def conversation_id(body: PromptRequest) -> str | None:
    """The id of the conversation that a request is for."""
    return body.conversation.id if isinstance(body.conversation, ConversationName) else body.conversation
