"""Input items as messages of a chat, and a request to /v1/responses as a request for a chat.

A model's turn is several items here (reasoning, a message, calls) and one message of an assistant in a chat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from headway.base.json_text import TooManyValues, loads
from headway.base.text import short_repr
from headway.server.api.request_schema import (
    AllowedToolChoice,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    CustomFunction,
    FunctionDefinition,
    JsonSchema,
    MessageFunctionCall,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SamplingFields,
    ToolDefinition,
    custom_arguments,
)
from headway.server.errors import ApiError, bad_request, check_fields
from headway.server.responses.request_schema import (
    AllowedFunctionTools,
    CustomTool,
    FunctionTool,
    InputItem,
    ItemPart,
    NamedFunctionTool,
    NamedMcpTool,
    PromptRequest,
    ResponseRequest,
    TextFormat,
)

TEXT_PARTS = {  # the types of parts that an item may have
    "message": ("input_text", "output_text", "refusal"),
    "function_call_output": ("input_text",),
    "custom_tool_call_output": ("input_text",),
    "reasoning": ("reasoning_text",),
}
WITHOUT_STATUS = ("reasoning", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of fields of a chat, as errors about a request here have them."""
SHARED = tuple(SamplingFields.model_fields)
Offered = Mapping[str, Mapping[str, FunctionDefinition]]  # tools of MCP servers, by label and by their own names


def as_items(given: str | Sequence[InputItem]) -> tuple[InputItem, ...]:
    """The input as items; a text is a message of the user."""
    if isinstance(given, str):
        return (InputItem(type="message", role="user", content=given),)
    if not given:
        raise bad_request("input is empty; pass a text or at least one item", "input")
    return tuple(given)


def chat_request(
    body: PromptRequest,
    earlier: Sequence[ChatMessage],
    new: Sequence[ChatMessage],
    offered: Offered | None = None,
) -> ChatRequest:
    """The request as one for a chat. The instructions come first; those of earlier responses are not in it.

    `offered` are tools of MCP servers, as the model knows them.
    """
    offered = offered or {}
    first = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    fields: dict[str, Any] = {name: getattr(body, name) for name in SHARED}
    fields |= {"messages": [*first, *earlier, *new], "chat_template_kwargs": body.chat_template_kwargs}
    tools = [_tool(tool) for tool in body.tools or () if isinstance(tool, FunctionTool | CustomTool)]
    tools += [ToolDefinition(type="function", function=one) for own in offered.values() for one in own.values()]
    fields |= {"tools": tools if tools or body.tools is not None else None}
    fields |= {"tool_choice": _tool_choice(body, offered), "parallel_tool_calls": body.parallel_tool_calls}
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


def _tool(tool: FunctionTool | CustomTool) -> ToolDefinition:
    if isinstance(tool, FunctionTool):
        function = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict is not False
        )
        return ToolDefinition(type="function", function=function)
    format = tool.format
    given = () if format is None else tuple(one is not None for one in (format.definition, format.syntax))
    if format is not None and set(given) != {format.type == "grammar"}:
        raise bad_request(
            f"the custom tool {short_repr(tool.name)} needs a definition and a syntax in a format of type grammar, and "
            "neither in one of type text",
            "tools",
        )
    return ToolDefinition(type="function", function=CustomFunction.of(tool.definition))


def _tool_choice(body: PromptRequest, offered: Offered) -> Any:
    match body.tool_choice:
        case NamedFunctionTool(name=name):
            return _named(name)
        case NamedMcpTool(name=str()) as choice:
            return _named(_chosen(choice, offered)[0])
        case NamedMcpTool() as choice:
            named = [_named(name) for name in _chosen(choice, offered)]
            return AllowedToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode="required", tools=named))
        case AllowedFunctionTools(mode=mode, tools=tools):
            names = [name for tool in tools for name in _chosen(tool, offered)]
            allowed = AllowedTools(mode=mode, tools=[_named(name) for name in names])
            return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return body.tool_choice


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=name))


def _chosen(choice: NamedFunctionTool | NamedMcpTool, offered: Offered) -> list[str]:
    """The names, for the model, of the tools that a choice names."""
    if isinstance(choice, NamedFunctionTool):
        return [choice.name]
    own = offered.get(choice.server_label, {})
    names = [tool.name for name, tool in own.items() if choice.name in (None, name)]
    if not names:
        what = f"no tool {short_repr(choice.name)}" if choice.name else "no tools"
        raise bad_request(
            f"tool_choice names the MCP server {short_repr(choice.server_label)}, which has {what} in this request",
            "tool_choice",
        )
    return names


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
    answered = {message.tool_call_id for message in earlier if message.tool_call_id is not None}
    turns: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.type or "message"
        check_fields(item, (*EVERY_ITEM, *ITEM_FIELDS[kind]), f"input[{i}]", f"an item {kind}")
        _add(item, f"input[{i}]", turns, calls, answered)
    for turn in turns:
        if turn["role"] == "assistant" and "tool_calls" not in turn:
            turn.setdefault("content", "")  # it was cut off while it reasoned
    return tuple(ChatMessage(**turn) for turn in turns)


def _add(item: InputItem, where: str, turns: list[dict[str, Any]], calls: set[str], answered: set[str]) -> None:
    """Add an item to the turns. `calls` are ids of calls so far, `answered` those with an output or an approval."""
    match item.type or "message":
        case "message":
            _add_message(item, where, turns)
        case "function_call":
            call = _call(item, where)
            calls.add(call.id)
            turn = _assistant_turn(turns)
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        case "custom_tool_call":
            for field in ("call_id", "name", "input"):
                if getattr(item, field) is None:
                    raise _missing(f"{where}.{field}", "a custom_tool_call")
            arguments = custom_arguments(str(item.input))
            _add(
                item.model_copy(update={"type": "function_call", "arguments": arguments}), where, turns, calls, answered
            )
        case "function_call_output" | "custom_tool_call_output":
            turns.append(_call_output(item, where, calls))
        case "mcp_call":
            turns += _mcp_call(item, where, turns, calls)
        case "mcp_approval_request":
            call = _mcp_tool_call(item, where)
            calls.add(call.id)
            turn = _assistant_turn(turns)
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        case "mcp_approval_response":
            turns += _approval(item, where, calls, answered)
        case "mcp_list_tools":
            pass  # each request lists the tools that it has
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
        parsed = loads(arguments or "{}", bounded=True)
    except TooManyValues as error:
        raise bad_request(f"{where}.arguments has {error}", f"{where}.arguments", "too_many") from None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise bad_request(
            f"{where}.arguments is {short_repr(arguments)}; it must be the text of a JSON object",
            f"{where}.arguments",
        )
    return MessageToolCall(id=call_id, function=MessageFunctionCall(name=name, arguments=arguments))


def _mcp_call(item: InputItem, where: str, turns: list[dict[str, Any]], calls: set[str]) -> list[dict[str, Any]]:
    """A call that the server made, added to the assistant's turn, and the message of the tool after it.

    One that was approved is in an earlier turn already.
    """
    id = _short_id(item.approval_request_id or "")
    if id not in calls:
        call = _mcp_tool_call(item, where)
        turn, id = _assistant_turn(turns), call.id
        turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
    output = item.output if item.error is None else mcp_error_text(item.error)
    return [{"role": "tool", "tool_call_id": id, "content": _text(output or "", "function_call_output", where)}]


def _mcp_tool_call(item: InputItem, where: str) -> MessageToolCall:
    """A call of an MCP tool, made or wanted, as chats have it."""
    if item.id is None:
        raise _missing(f"{where}.id", f"an {item.type}")
    return _call(item.model_copy(update={"call_id": _short_id(item.id)}), where)


def _short_id(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:9]  # nine letters and digits, as some templates require


def _approval(item: InputItem, where: str, calls: set[str], answered: set[str]) -> list[dict[str, Any]]:
    """What the model is told of an approval: that there was none. A call that is approved has its output instead."""
    for field in ("approval_request_id", "approve"):
        if getattr(item, field) is None:
            raise _missing(f"{where}.{field}", "an mcp_approval_response")
    id, where = _short_id(str(item.approval_request_id)), f"{where}.approval_request_id"
    if id not in calls:
        raise bad_request(
            f"{where} is {short_repr(item.approval_request_id)}; no earlier mcp_approval_request has that id", where
        )
    if id in answered:
        raise bad_request(f"{where} is {short_repr(item.approval_request_id)}, which was answered before", where)
    answered.add(id)
    if item.approve:
        return []
    why = f": {item.reason}" if item.reason else ""
    return [{"role": "tool", "tool_call_id": id, "content": f"error: the user did not approve this call{why}"}]


def mcp_error_text(error: Any) -> str:
    """The error of an MCP call as the model reads it."""
    match error:
        case {"message": str(message)} | str(message):
            return f"error: {message}"
        case {"content": [*parts]}:
            return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return "error"


def _call_output(item: InputItem, where: str, calls: set[str]) -> dict[str, Any]:
    if item.call_id is None:
        raise _missing(f"{where}.call_id", f"a {item.type}")
    if item.output is None:
        raise _missing(f"{where}.output", f"a {item.type}")
    if item.call_id not in calls:
        kind = (item.type or "").removesuffix("_output")
        raise bad_request(
            f"{where}.call_id is {short_repr(item.call_id)}; no earlier {kind} has that id", f"{where}.call_id"
        )
    content = _text(item.output, item.type or "", f"{where}.output")
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
        check_fields(part, (*EVERY_ITEM, *PART_FIELDS[part.type]), f"{where}[{i}]", f"a part {part.type}")
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
    return fields | ({"status": "completed"} if kind not in WITHOUT_STATUS else {})


ItemOrder = Literal["asc", "desc"]


def item_page(items: Sequence[Mapping[str, Any]], limit: int, order: ItemOrder, after: str | None) -> dict[str, Any]:
    """A page of items, given oldest first, after the one with the id `after`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0 if after is None else [item["id"] for item in ordered].index(after) + 1
    page = ordered[start : start + limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": start + limit < len(ordered)}


EVERY_ITEM = ("type", "id", "status")
ITEM_FIELDS: Mapping[str, Collection[str]] = {  # besides those
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "parsed_arguments"),
    "function_call_output": ("call_id", "output", "name"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "mcp_list_tools": ("server_label", "tools", "error"),
    "mcp_call": ("server_label", "name", "arguments", "output", "error", "approval_request_id"),
    "mcp_approval_request": ("server_label", "name", "arguments"),
    "mcp_approval_response": ("approval_request_id", "approve", "reason"),
    "reasoning": ("summary", "content", "encrypted_content"),
    "item_reference": (),
}
PART_FIELDS: Mapping[str, Collection[str]] = {
    "input_text": ("text",),
    "output_text": ("text", "annotations", "logprobs", "parsed"),
    "refusal": ("refusal",),
    "reasoning_text": ("text",),
    "summary_text": ("text",),
}
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcprr",
    "reasoning": "rs",
}
