"""The fields of a request to /v1/messages and their types. Content blocks are one class of all fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from headway.base.text import short_repr
from headway.server.api.request_schema import (
    OFF_VALUES,
    Count,
    FailAtFirst,
    JsonObject,
    RequestSchema,
    SamplingFields,
    Text,
    Texts,
    described,
)


class CacheControl(RequestSchema):
    """Where a prompt is cached up to; ignored, since every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class ContentBlock(RequestSchema):
    """One block of a message's content. Clients may send back blocks with all fields that responses have."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document"]
    text: str | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None
    thinking: str | None = None
    signature: str | None = None  # of thinking; not checked
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    caller: Any = None  # sent back by clients; ignored
    tool_use_id: str | None = None
    content: str | Annotated[list[ContentBlock], FailAtFirst()] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    source: Any = None
    data: Any = None
    title: Any = None
    context: Any = None


Blocks = Annotated[list[ContentBlock], FailAtFirst()]


class InputMessage(RequestSchema):
    role: Literal["user", "assistant"]
    content: str | Blocks


class Tool(RequestSchema):
    """A tool that the model may call."""

    name: Text
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients(cls, value: Any) -> Any:
        """Name the tools that Anthropic runs, whatever other fields they have."""
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = "the type of a tool must be custom, got {kind}; there are no built-in tools"
            raise PydanticCustomError("unknown_tool", message, {"kind": short_repr(kind)})
        return value


class ToolChoice(RequestSchema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestSchema):
    """Whether the model reasons, if its template lets one say so, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(RequestSchema):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestSchema):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh"] | None = None


class Metadata(RequestSchema):
    user_id: str | None = None


class CountRequest(SamplingFields):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES | {"mcp_servers": [], "betas": []}

    model: str | None = None
    messages: Annotated[list[InputMessage], FailAtFirst(), described(minItems=1)]
    system: str | Blocks | None = None
    tools: Annotated[list[Tool], FailAtFirst()] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Texts | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
