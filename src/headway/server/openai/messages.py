"""Messages and tools of a chat, as the model's template reads them, and the tokens of the prompt they make.

Everything here is pure work on values: it runs in a thread, with no context and no lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.base.errors import InvalidInput, WrongType
from headway.program.chat.conversation import Conversation
from headway.program.chat.messages import reply_format, tool_format
from headway.program.chat.tools import ToolSet
from headway.program.engine import Engine
from headway.program.ids import token_ids
from headway.server.errors import bad_request
from headway.server.openai.request_schema import Call, Message, Part, Tool
from headway.text.templates.messages import CallSyntax, as_text, call_syntax

PARTS = tuple(name for name in Part.model_fields if name != "type")
REASONS = ("reasoning", "think")  # words of a template that has, or takes away, what a model wrote for itself


@dataclass(frozen=True)
class Talk:
    """A chat that is ready for its next message."""

    ids: tuple[int, ...]
    rendered: str  # ends with the generation prompt
    format: str | None  # how the model writes what is no content
    tools: ToolSet
    form: CallSyntax | None  # how it writes calls, when it has tools


def read_talk(messages: Sequence[Message], tools: Sequence[Tool], engine: Engine, *, cue: bool = True) -> Talk:
    """The prompt of a chat; with tools, those that the model is shown."""
    template = engine.chat_template
    if template is None:
        raise bad_request("this model has no chat template; use /v1/completions", "messages", "unsupported")
    box = toolbox(tools)
    asked = None
    if box and not _takes_tools(engine):
        asked = "hermes"  # its template has no place for them: they are described in the system message
    format, described = tool_format(template, asked) if box else (reply_format(template), False)
    source = template.tool_source or template.source
    listed = _listed(messages, source)
    if not listed:
        raise bad_request("messages is empty; give at least one", "messages")
    if not described and "tool_calls" not in source:  # it would leave them out
        listed = tuple(as_text(message) for message in listed)
    new = Conversation(messages=listed, tools=box.schemas or None, described=described)
    talk, _, ids = engine.chat.follow(Conversation(), new, (), cue=cue)
    _check_names(messages, new, talk.rendered, engine, cue=cue)
    form = None if format is None or not box else call_syntax(format, source)
    return Talk(tuple(token_ids(ids, engine.vocab_size)), talk.rendered, format, box, form)


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    """All texts of messages that a prompt has; templates leave out reasoning of long ago."""
    for message in messages:
        match message.content:
            case str(text):
                yield text
            case list(parts):
                yield from (part.text or part.refusal or "" for part in parts)
        yield message.refusal or ""
        for call in message.tool_calls or ():
            yield call.function.name
            yield call.function.arguments


def _listed(messages: Sequence[Message], source: str) -> tuple[dict[str, Any], ...]:
    calls: dict[str, str] = {}  # names by the ids of calls so far
    found = []
    for i, message in enumerate(messages):
        found.append(as_message(message, calls, source, f"messages[{i}]"))
        calls |= {call.id: call.function.name for call in message.tool_calls or ()}
    return tuple(found)


def _check_names(messages: Sequence[Message], new: Conversation, rendered: str, engine: Engine, *, cue: bool) -> None:
    """Raise where the template leaves out who a message is from: the prompt is the same without."""
    named = {
        message.role: i for i, message in reversed(list(enumerate(messages))) if message.name and message.role != "tool"
    }
    for role, i in named.items():
        bare = tuple(
            {key: value for key, value in made.items() if key != "name"} if message.role == role else made
            for message, made in zip(messages, new.messages, strict=True)
        )
        talk, _, _ = engine.chat.follow(Conversation(), replace(new, messages=bare), (), cue=cue)
        if talk.rendered == rendered:
            raise bad_request(
                f"messages[{i}].name has no place in this model's template; write the name into the content",
                f"messages[{i}].name",
                "unsupported",
            )


def _takes_tools(engine: Engine) -> bool:
    """Whether the model's template has a place for tools, and writes calls in a form that is known."""
    try:
        tool_format(engine.chat_template)
    except Exception:
        return False
    return True


def toolbox(tools: Sequence[Tool]) -> ToolSet:
    """The tools of a request, by name."""
    try:
        return ToolSet([tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools])
    except (InvalidInput, WrongType) as error:
        raise bad_request(str(error), "tools") from error


def as_message(message: Message, calls: Mapping[str, str], source: str, where: str) -> dict[str, Any]:
    """One message as templates know it: a developer is a system, unless the template knows both; calls are values.

    `calls` has the names of those before it, by their ids.
    """
    role = message.role
    if role == "developer" and "developer" not in source:
        role = "system"
    if role == "function":
        role = "tool"
    made: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        made["name"] = message.name
    if message.role == "assistant":
        return made | _said(message, source, where)
    for field in ("tool_calls", "reasoning_content", "refusal"):
        if getattr(message, field) is not None:
            raise bad_request(f"{where}.{field} belongs to messages of an assistant", f"{where}.{field}")
    if message.role == "tool":
        return made | _result(message, calls, where)
    if message.tool_call_id is not None:
        raise bad_request(f"{where}.tool_call_id belongs to messages of a tool", f"{where}.tool_call_id")
    return made


def _said(message: Message, source: str, where: str) -> dict[str, Any]:
    """What only an assistant's message has."""
    made: dict[str, Any] = {}
    if message.refusal and message.content:
        raise bad_request(f"{where} has content and a refusal; give one of them", f"{where}.refusal")
    if message.reasoning_content and not any(word in source for word in REASONS):
        raise bad_request(
            f"{where}.reasoning_content has no place in this model's template; leave it out",
            f"{where}.reasoning_content",
            "unsupported",
        )
    if message.reasoning_content is not None:
        made["reasoning_content"] = made["thinking"] = message.reasoning_content
    if message.tool_calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    elif message.content is None and message.refusal is None:
        raise bad_request(f"{where} of an assistant has neither content nor tool_calls", f"{where}.content")
    return made


def _call(call: Call, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(
            f"{where}.function.arguments is {call.function.arguments!r:.60}; it takes the text of a JSON object",
            f"{where}.function.arguments",
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _result(message: Message, calls: Mapping[str, str], where: str) -> dict[str, Any]:
    """What only a tool's message has: the call it answers, by its id and name."""
    if message.tool_call_id is None:
        raise bad_request(f"{where} of a tool has no tool_call_id; say which call it answers", f"{where}.tool_call_id")
    name = calls.get(message.tool_call_id)
    if name is None:
        raise bad_request(
            f"{where}.tool_call_id is {message.tool_call_id!r:.60}; no call before it has that id",
            f"{where}.tool_call_id",
        )
    if message.name is not None and message.name != name:
        raise bad_request(
            f"{where}.name is {message.name!r:.60}; the call it answers is of {name!r:.60}", f"{where}.name"
        )
    return {"tool_call_id": message.tool_call_id, "name": name}


def _content(message: Message, where: str) -> str:
    """A message's text; parts are put together."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise bad_request(f"{where} has no content", f"{where}.content", "missing_field")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise bad_request(
                f"{where}.content[{i}] is of type {part.type!r}; this model takes text only",
                f"{where}.content[{i}].type",
                "unsupported",
            )
        for field in PARTS:
            if field != part.type and getattr(part, field) is not None:
                raise bad_request(
                    f"{where}.content[{i}] is of type {part.type!r} and has {field}; put it into a part of its own",
                    f"{where}.content[{i}].{field}",
                )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_request(f"{where}.content[{i}] has no {part.type}", f"{where}.content[{i}].{part.type}")
        texts.append(text)
    return "".join(texts)
