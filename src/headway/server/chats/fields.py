"""Fields of a chat that are other spellings of the same request: functions, allowed tools, and template variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headway.base.text import short_repr
from headway.program.engine import Engine
from headway.server.api.request_schema import (
    AllowedToolChoice,
    ChatMessage,
    ChatRequest,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    ToolDefinition,
)
from headway.server.errors import bad_request
from headway.server.settings import ServerSettings
from headway.text.templates.chat_template import ChatTemplate

TEMPLATE_CHARS = 1 << 15  # of a template that a request brings; it is compiled for that request alone
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


def modern_request(body: ChatRequest) -> ChatRequest:
    """The request with `functions` as tools, and with only the tools that may be called."""
    return _with_allowed_tools(_with_tools(body))


def _with_tools(body: ChatRequest) -> ChatRequest:
    """`functions` and `function_call`, OpenAI's older fields, as tools; in messages too."""
    changes: dict[str, Any] = {"messages": _modern_messages(body.messages)}
    if body.functions and (body.tools or body.tool_choice is not None):
        raise bad_request("functions cannot be combined with tools or tool_choice; use only tools", "functions")
    if body.functions:
        changes["tools"] = [ToolDefinition(type="function", function=one) for one in body.functions]
        changes["parallel_tool_calls"] = False  # a message has one function_call
    if isinstance(body.function_call, NamedFunction):
        if not body.functions:
            raise bad_request("function_call requires a call, and there are no functions; pass some", "function_call")
        changes["tool_choice"] = NamedTool(type="function", function=body.function_call)
    elif body.functions and body.function_call is not None:
        changes["tool_choice"] = body.function_call
    return body.model_copy(update=changes)


def _modern_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """`function_call` in messages as a tool call, and the message of a function as its tool's."""
    result: list[ChatMessage] = []
    ids: dict[str, str] = {}  # of the latest call of each function
    for i, message in enumerate(messages):
        call, update = message.function_call, {}
        if call is not None:
            if message.tool_calls:
                raise bad_request(
                    f"messages[{i}] has both tool_calls and function_call; pass one of them",
                    f"messages[{i}].function_call",
                )
            ids[call.name] = f"call{i:05d}"
            update = {"tool_calls": [MessageToolCall(id=ids[call.name], function=call)], "function_call": None}
        elif message.role == "function" and message.name in ids:
            update = {"role": "tool", "tool_call_id": ids[message.name]}
        result.append(message.model_copy(update=update) if update else message)
    return result


def _with_allowed_tools(body: ChatRequest) -> ChatRequest:
    """Only the tools of `tool_choice: allowed_tools`: what the model is not shown it does not call."""
    if not isinstance(body.tool_choice, AllowedToolChoice):
        return body
    choice = body.tool_choice.allowed_tools
    allowed = {tool.function.name for tool in choice.tools}
    names = [tool.function.name for tool in body.tools or ()]
    if missing := sorted(allowed - set(names)):
        raise bad_request(
            f"tool_choice allows {short_repr(missing[0])}; the tools are {', '.join(names)}", "tool_choice"
        )
    tools = [tool for tool in body.tools or () if tool.function.name in allowed]
    return body.model_copy(update={"tools": tools, "tool_choice": choice.mode})


def own_template(source: str | None, engine: Engine, settings: ServerSettings) -> ChatTemplate | None:
    """The template that a chat brings, or else the model's. It runs in the same sandbox, with the same budget."""
    if source is None:
        return engine.chat_template
    if not settings.allow_chat_template:
        raise bad_request(
            "chat_template is not allowed on this server, whose operator can allow it with --allow-chat-template; "
            "remove it",
            "chat_template",
            "unsupported",
        )
    if len(source) > TEMPLATE_CHARS:
        raise bad_request(
            f"chat_template has {len(source)} characters; at most {TEMPLATE_CHARS} are allowed",
            "chat_template",
            "too_large",
        )
    special = dict(engine.tokenizer.special_tokens)
    bos, eos = special.pop("bos_token", None), special.pop("eos_token", None)
    return ChatTemplate(source, bos_token=bos, eos_token=eos, special_tokens=special)


def template_reads(template: ChatTemplate | None, name: str) -> bool:
    """Whether a chat template reads a variable."""
    source = "" if template is None else template.source + (template.tool_source or "")
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def template_variables(
    kwargs: dict[str, Any] | None,
    template: ChatTemplate | None,
    *,
    effort: str | None = None,
    verbosity: str | None = None,
) -> dict[str, Any]:
    """What the chat template gets besides messages and tools.

    `effort` and `verbosity` are hints: they reach a template that reads them, and "none" turns reasoning off where the
    template can. A variable of `kwargs` that the template does not read is rejected unless its value means "off".
    """

    def reads(name: str) -> bool:
        return template_reads(template, name)

    result: dict[str, Any] = {}
    if effort is not None and reads("reasoning_effort"):
        result["reasoning_effort"] = effort
    elif effort == "none" and reads("enable_thinking"):
        result["enable_thinking"] = False
    if verbosity is not None and reads("verbosity"):
        result["verbosity"] = verbosity
    for name, value in (kwargs or {}).items():
        where = f"chat_template_kwargs.{name:.60}"
        if name in RESERVED_VARIABLES:
            raise bad_request(f"{where} is set by the server; remove it", where)
        if reads(name):
            result[name] = value
        elif value:
            raise bad_request(f"{where} is not read by the chat template; remove it", where, "unsupported")
    return result
