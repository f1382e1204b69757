"""Content blocks as messages of a chat, and a request to /v1/messages as a request for a chat."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headway.base.json_text import write
from headway.base.text import short_repr
from headway.program.engine import Engine
from headway.server.anthropic.request_schema import ContentBlock, CountRequest, InputMessage, MessagesRequest, Tool
from headway.server.api.request_schema import (
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    JsonSchema,
    MessageFunctionCall,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SamplingFields,
    ToolDefinition,
)
from headway.server.chats.fields import template_reads
from headway.server.errors import ApiError, bad_request, check_fields

FIELDS = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
}
"""Names of fields of a chat, as errors about a request here have them."""
SHARED = tuple(SamplingFields.model_fields)
BLOCK_FIELDS: Mapping[str, Collection[str]] = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
EVERY_BLOCK = ("type", "cache_control")


def chat_request(body: CountRequest, engine: Engine) -> ChatRequest:
    """The request as one for a chat."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in SHARED}
    fields |= {"messages": [*_system(body), *_messages(body.messages)], **_tools(body)}
    fields |= {"chat_template_kwargs": _thinking(body, engine)}
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = JsonSchema(name="output", schema=config.format.schema_)
            fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesRequest):
        fields["thinking_token_budget"] = _budget(body)
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.messages and body.messages[-1].role == "assistant":  # the model continues it
        last = fields["messages"][-1]
        if last.tool_calls or not (last.content or "").strip():
            raise bad_request(
                "the last message is an assistant's, which the model continues; it must have text and no tool_use",
                f"messages[{len(body.messages) - 1}]",
            )
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return ChatRequest(**{name: value for name, value in fields.items() if value is not None})


def _thinking(body: CountRequest, engine: Engine) -> dict[str, Any] | None:
    """Turn reasoning on or off where the template can; a model that cannot reason does not."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return None
    reads = template_reads(engine.chat_template, "enable_thinking")
    return {"enable_thinking": body.thinking.type == "enabled"} if reads else None


def _budget(body: MessagesRequest) -> int | None:
    """How many tokens the reasoning may have; raises where that would leave none for the text."""
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget >= body.max_tokens:
        raise bad_request(
            f"thinking.budget_tokens is {budget} and max_tokens is {body.max_tokens}, which counts the reasoning too; "
            "pass a smaller budget, or more max_tokens",
            "thinking.budget_tokens",
        )
    return budget


def _system(body: CountRequest) -> list[ChatMessage]:
    if body.system is None:
        return []
    text = body.system if isinstance(body.system, str) else _texts(body.system, "system")
    return [ChatMessage(role="system", content=text)]


def _tools(body: CountRequest) -> dict[str, Any]:
    choice, tools = body.tool_choice, None if body.tools is None else [_tool(tool) for tool in body.tools]
    result: dict[str, Any] = {"tools": tools}
    if choice is None:
        return result
    if choice.name is not None and choice.type != "tool":
        raise bad_request(
            f"tool_choice of type {choice.type} has the name {short_repr(choice.name)}; a name is for type tool",
            "tool_choice.name",
        )
    if choice.disable_parallel_tool_use:
        result["parallel_tool_calls"] = False
    match choice.type:
        case "tool":
            if choice.name is None:
                raise bad_request("tool_choice of type tool has no name; pass one", "tool_choice.name")
            return result | {"tool_choice": NamedTool(type="function", function=NamedFunction(name=choice.name))}
        case "any":
            return result | {"tool_choice": "required"}
    return result | {"tool_choice": choice.type}


def _tool(tool: Tool) -> ToolDefinition:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _messages(messages: Sequence[InputMessage]) -> list[ChatMessage]:
    calls: set[str] = set()
    result: list[ChatMessage] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        if isinstance(message.content, str):
            result.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "assistant":
            result.append(_assistant(message.content, where, calls))
        else:
            result += _user(message.content, where, calls)
    return result


def _assistant(blocks: Sequence[ContentBlock], where: str, calls: set[str]) -> ChatMessage:
    """Text, thinking and calls of the assistant, as one message."""
    texts, thoughts, tool_calls = [], [], []
    for i, block in enumerate(blocks):
        _check_fields(block, f"{where}[{i}]")
        match block.type:
            case "text":
                texts.append(_required(block, "text", f"{where}[{i}]"))
            case "thinking":
                thoughts.append(_required(block, "thinking", f"{where}[{i}]"))
            case "tool_use":
                id, name = _required(block, "id", f"{where}[{i}]"), _required(block, "name", f"{where}[{i}]")
                calls.add(id)
                arguments = write(_required(block, "input", f"{where}[{i}]"))
                tool_calls.append(MessageToolCall(id=id, function=MessageFunctionCall(name=name, arguments=arguments)))
            case _:
                raise _refused(block, f"{where}[{i}]", "text, thinking and tool_use")
    content = "".join(texts) if texts or not tool_calls else None
    return ChatMessage(
        role="assistant", content=content, reasoning_content="".join(thoughts) or None, tool_calls=tool_calls or None
    )


def _user(blocks: Sequence[ContentBlock], where: str, calls: set[str]) -> list[ChatMessage]:
    """Results of tools, each a message of its own, and the user's text."""
    result: list[ChatMessage] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        _check_fields(block, f"{where}[{i}]")
        match block.type:
            case "text":
                texts.append(_required(block, "text", f"{where}[{i}]"))
            case "tool_result":
                if texts:
                    raise bad_request(
                        f"{where}[{i}] is a tool_result after text; results come before a message's text", where
                    )
                result.append(_tool_result(block, f"{where}[{i}]", calls))
            case _:
                raise _refused(block, f"{where}[{i}]", "text and tool_result")
    if texts or not result:
        result.append(ChatMessage(role="user", content="".join(texts)))
    return result


def _tool_result(block: ContentBlock, where: str, calls: set[str]) -> ChatMessage:
    id = _required(block, "tool_use_id", where)
    if id not in calls:
        raise bad_request(
            f"{where}.tool_use_id is {short_repr(id)}; no earlier tool_use has that id", f"{where}.tool_use_id"
        )
    content = block.content if isinstance(block.content, str) else _texts(block.content or (), f"{where}.content")
    return ChatMessage(role="tool", tool_call_id=id, content=f"Error: {content}" if block.is_error else content)


def _texts(blocks: Sequence[ContentBlock], where: str) -> str:
    for i, block in enumerate(blocks):
        _check_fields(block, f"{where}[{i}]")
        if block.type != "text":
            raise _refused(block, f"{where}[{i}]", "text")
    return "".join(_required(block, "text", f"{where}[{i}]") for i, block in enumerate(blocks))


def _check_fields(block: ContentBlock, where: str) -> None:
    """Raise for a field that is another block's: nothing would read it."""
    if (known := BLOCK_FIELDS.get(block.type)) is not None:
        check_fields(block, (*EVERY_BLOCK, *known), where, f"a block {block.type}")


def _required(block: ContentBlock, field: str, where: str) -> Any:
    value = getattr(block, field)
    if value is None:
        raise bad_request(f"{where}.{field} is missing; a block {block.type} must have it", f"{where}.{field}")
    return value


def _refused(block: ContentBlock, where: str, expected: str) -> ApiError:
    return bad_request(
        f"{where} is of type {block.type!r}; here this model takes only {expected}", f"{where}.type", "unsupported"
    )
