"""The fields of a request to /v1/responses and their types. Items are one class of all fields, as messages are."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headway.server.openai.request_schema import (
    OFF_VALUES,
    Count,
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


class InputItem(RequestSchema):
    """One item of the input, of any type. Clients may send back items with all fields that responses have."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None  # sent back by clients; ignored
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    parsed_arguments: Any = None  # added by client libraries; ignored
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None


class FunctionTool(RequestSchema):
    """A function that the model may call; `strict` unless it says otherwise, as OpenAI has it."""

    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(RequestSchema):
    type: Literal["function"]
    name: str


class AllowedFunctionTools(RequestSchema):
    """Only these tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], FailAtFirst(), Field(min_length=1)]


class TextFormat(RequestSchema):
    """The format of the text: any, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestSchema):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(RequestSchema):
    """How much a model reasons. There are no summaries: a reasoning item has the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(RequestSchema):
    include_obfuscation: bool | None = None  # padding against eavesdroppers; ignored


Input = Text | Annotated[list[InputItem], FailAtFirst(), described(minItems=1)]
Tools = Annotated[list[FunctionTool], FailAtFirst()]
ToolChoice = Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools


class PromptRequest(SamplingFields):
    """What a prompt is made of: the whole of a request to count its tokens."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES | {"truncation": "disabled", "context_management": []}

    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
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
    top_logprobs: NonNegative | None = None
    stop: Text | Texts | None = None
    metadata: Metadata | None = None

    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
