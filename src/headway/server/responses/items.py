"""Input items as messages of a chat, and a request to /v1/responses as a request for a chat.

A model's turn is several items here (reasoning, a message, calls) and one message of an assistant in a chat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.server.errors import ApiError, bad_request
from headway.server.openai.request_schema import (
    AllowedToolChoice,
    AllowedTools,
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
from headway.server.responses.request_schema import (
    AllowedFunctionTools,
    InputItem,
    ItemPart,
    NamedFunctionTool,
    PromptRequest,
    ResponseRequest,
    TextFormat,
)

TEXT_PARTS = {  # the types of parts that an item may have
    "message": ("input_text", "output_text", "refusal"),
    "function_call_output": ("input_text",),
    "reasoning": ("reasoning_text",),
}
FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of fields of a chat, as errors about a request here have them."""
SHARED = tuple(SamplingFields.model_fields)


def as_items(given: str | Sequence[InputItem]) -> tuple[InputItem, ...]:
    """The input as items; a text is a message of the user."""
    if isinstance(given, str):
        return (InputItem(type="message", role="user", content=given),)
    if not given:
        raise bad_request("input is empty; pass a text or at least one item", "input")
    return tuple(given)


def chat_request(body: PromptRequest, earlier: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> ChatRequest:
    """The request as one for a chat. The instructions come first; those of earlier responses are not in it."""
    first = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    fields: dict[str, Any] = {name: getattr(body, name) for name in SHARED}
    fields |= {"messages": [*first, *earlier, *new], "chat_template_kwargs": body.chat_template_kwargs}
    fields |= {"tools": None if body.tools is None else [_tool(tool) for tool in body.tools]}
    fields |= {"tool_choice": _tool_choice(body), "parallel_tool_calls": body.parallel_tool_calls}
    if body.text is not None:
        fields |= {"response_format": _format(body.text.format), "verbosity": body.text.verbosity}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if isinstance(body, ResponseRequest):
        fields |= _generation_fields(body)
    return ChatRequest(**{name: value for name, value in fields.items() if value is not None})


def _generation_fields(body: ResponseRequest) -> dict[str, Any]:
    ranked = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not ranked:
        raise bad_request('top_logprobs requires "include": ["message.output_text.logprobs"]', "top_logprobs")
    return {
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        "logprobs": ranked or None,
        "top_logprobs": (body.top_logprobs or 0) if ranked else None,
    }


def _tool(tool: Any) -> ToolDefinition:
    return ToolDefinition(
        type="function",
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict is not False
        ),
    )


def _tool_choice(body: PromptRequest) -> Any:
    match body.tool_choice:
        case NamedFunctionTool(name=name):
            return NamedTool(type="function", function=NamedFunction(name=name))
        case AllowedFunctionTools(mode=mode, tools=tools):
            named = [NamedTool(type="function", function=NamedFunction(name=tool.name)) for tool in tools]
            return AllowedToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=named))
    return body.tool_choice


def _format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None or format.type != "json_schema":
        return None if format is None else ResponseFormat(type=format.type)
    if format.schema_ is None:
        raise bad_request("text.format of type json_schema has no schema; pass one", "text.format.schema")
    schema = JsonSchema(name=format.name or "", schema=format.schema_, strict=format.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


# -- items as messages -------------------------------------------------------------------------------------------------


def chat_messages(items: Sequence[InputItem], earlier: Sequence[ChatMessage] = ()) -> tuple[ChatMessage, ...]:
    """The items as messages that follow `earlier` ones."""
    calls = {call.id for message in earlier for call in message.tool_calls or ()}
    turns: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        _add(item, f"input[{i}]", turns, calls)
    for turn in turns:
        if turn["role"] == "assistant" and "tool_calls" not in turn:
            turn.setdefault("content", "")  # it was cut off while it reasoned
    return tuple(ChatMessage(**turn) for turn in turns)


def _add(item: InputItem, where: str, turns: list[dict[str, Any]], calls: set[str]) -> None:
    match item.type or "message":
        case "message":
            _add_message(item, where, turns)
        case "function_call":
            call = _call(item, where)
            calls.add(call.id)
            turn = _assistant_turn(turns)
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        case "function_call_output":
            turns.append(_call_output(item, where, calls))
        case "reasoning":
            if item.encrypted_content and not item.content:
                raise bad_request(
                    f"{where} has encrypted_content, which only the server that made it can read; pass its content, "
                    "or remove the item",
                    f"{where}.encrypted_content",
                    "unsupported",
                )
            if text := _text(item.content, "reasoning", f"{where}.content"):
                turn = _assistant_turn(turns, begins=True)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        case _:
            raise bad_request(
                f"{where} is an item_reference; pass the item itself, or previous_response_id", where, "unsupported"
            )


def _add_message(item: InputItem, where: str, turns: list[dict[str, Any]]) -> None:
    if item.role is None:
        raise _missing(f"{where}.role", "a message")
    if item.content is None:
        raise _missing(f"{where}.content", "a message")
    text = _text(item.content, "message", f"{where}.content")
    if item.role != "assistant":
        turns.append({"role": item.role, "content": text})
        return
    _assistant_turn(turns, begins=True)["content"] = text


def _assistant_turn(turns: list[dict[str, Any]], *, begins: bool = False) -> dict[str, Any]:
    """The turn of the assistant that an item continues; what `begins` a turn does not follow its text or its calls."""
    last = turns[-1] if turns else {}
    if last.get("role") == "assistant" and not (begins and ("content" in last or "tool_calls" in last)):
        return last
    turns.append({"role": "assistant"})
    return turns[-1]


def _call(item: InputItem, where: str) -> MessageToolCall:
    for field in ("call_id", "name", "arguments"):
        if getattr(item, field) is None:
            raise _missing(f"{where}.{field}", "a function_call")
    call_id, name, arguments = str(item.call_id), str(item.name), str(item.arguments)
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise bad_request(
            f"{where}.arguments is {arguments!r:.60}; it must be the text of a JSON object", f"{where}.arguments"
        )
    return MessageToolCall(id=call_id, function=MessageFunctionCall(name=name, arguments=arguments))


def _call_output(item: InputItem, where: str, calls: set[str]) -> dict[str, Any]:
    if item.call_id is None:
        raise _missing(f"{where}.call_id", "a function_call_output")
    if item.output is None:
        raise _missing(f"{where}.output", "a function_call_output")
    if item.call_id not in calls:
        raise bad_request(
            f"{where}.call_id is {item.call_id!r:.60}; no earlier function_call has that id", f"{where}.call_id"
        )
    content = _text(item.output, "function_call_output", f"{where}.output")
    return {"role": "tool", "tool_call_id": item.call_id, "content": content}


def _text(content: str | Sequence[ItemPart] | None, kind: str, where: str) -> str:
    """A content's text; parts are concatenated."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS[kind]:
            raise bad_request(
                f"{where}[{i}] is of type {part.type!r}; here this model takes only {', '.join(TEXT_PARTS[kind])}",
                f"{where}[{i}].type",
                "unsupported",
            )
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise _missing(f"{where}[{i}].{'refusal' if part.type == 'refusal' else 'text'}", f"a part {part.type}")
        texts.append(text)
    return "".join(texts)


def _missing(where: str, what: str) -> ApiError:
    return bad_request(f"{where} is missing; {what} must have it", where, "missing_field")


# -- items as clients get them -----------------------------------------------------------------------------------------


def listed_item(item: InputItem, number: int, response_id: str) -> dict[str, Any]:
    """An input item as `input_items` lists it: with an id, and parts instead of a text."""
    fields = item.model_dump(exclude_none=True, exclude={"parsed_arguments", "phase"})
    kind = fields.setdefault("type", "message")
    fields.setdefault("id", f"{PREFIXES[kind]}_{response_id.partition('_')[2][:32]}{number:08d}")
    if kind == "message" and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        extra: Mapping[str, Any] = {"annotations": []} if part == "output_text" else {}
        fields["content"] = [{"type": part, "text": item.content, **extra}]
    return fields | ({"status": "completed"} if kind != "reasoning" else {})


PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
