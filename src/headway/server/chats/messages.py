"""Converts messages and tools of a chat for the model's template, and renders the tokens of the prompt.

Everything here is pure computation that runs in a thread, without a context or a lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.json_text import Budget, TooManyValues, loads
from headway.base.text import short_repr
from headway.program.chat.conversation import ChatWriter, Conversation
from headway.program.chat.messages import reply_format, tool_format
from headway.program.chat.tools import ToolSet
from headway.program.checks.ids import token_ids
from headway.program.engine import Engine
from headway.server.api.request_schema import ChatMessage, ContentPart, MessageToolCall, ToolDefinition
from headway.server.errors import bad_request
from headway.text.templates.chat_template import ChatTemplate
from headway.text.templates.messages import CallSyntax, as_text, call_syntax

PARTS = tuple(name for name in ContentPart.model_fields if name != "type")
REASONING_WORDS = ("reasoning", "think")  # words in a template that handles reasoning


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat, ready for its next message."""

    ids: tuple[int, ...]
    rendered: str  # ends with the generation prompt
    format: str | None  # how the model marks tool calls and reasoning
    tools: ToolSet
    form: CallSyntax | None  # how it writes calls, if there are tools
    continues: bool = False  # ends in a text that the model continues, not where a message begins


def read_chat_prompt(
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolDefinition],
    engine: Engine,
    *,
    cue: bool = True,
    continue_last: bool = False,
    template: ChatTemplate | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The prompt of a chat, with the tools the model may call.

    With `continue_last` it ends in the text of the last message, which the model continues. `template` replaces the
    model's own; `variables` are for it.
    """
    template = template or engine.chat_template
    if template is None:
        raise bad_request("this model has no chat template; use /v1/completions", "messages", "unsupported")
    box = toolbox(tools)
    requested = None
    if box and not _takes_tools(template):
        requested = "hermes"  # the template does not support tools: describe them in the system message
    format, described = tool_format(template, requested) if box else (reply_format(template), False)
    source = template.tool_source or template.source
    converted = _template_messages(messages, source)
    if not converted:
        raise bad_request("messages is empty; pass at least one", "messages")
    if not described and "tool_calls" not in source:  # the template would omit calls
        converted = tuple(as_text(message) for message in converted)
    new = Conversation(messages=converted, tools=box.schemas or None, described=described, variables=variables or {})
    writer = engine.chat_writer if template is engine.chat_template else ChatWriter(template, engine.tokenizer)
    if continue_last:
        _check_continued(messages[-1], len(messages) - 1)
        conversation, ids = writer.continued(new)
    else:
        conversation, _, ids = writer.follow(Conversation(), new, (), cue=cue)
    form = None if format is None or not box else call_syntax(format, source)
    return ChatPrompt(tuple(token_ids(ids, engine.vocab_size)), conversation.rendered, format, box, form, continue_last)


def template_reasons(engine: Engine) -> bool:
    """Whether the model's chat template handles reasoning."""
    template = engine.chat_template
    source = "" if template is None else template.source + (template.tool_source or "")
    return any(word in source for word in REASONING_WORDS)


def _check_continued(message: ChatMessage, number: int) -> None:
    """Raise unless a message can be continued."""
    if message.role != "assistant" or message.tool_calls or not _content(message, f"messages[{number}]").strip():
        raise bad_request(
            "continue_final_message requires that the last message is an assistant's and has text; add it, or remove "
            "continue_final_message",
            "continue_final_message",
        )


def texts_of(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """All texts of messages that are in the prompt; templates omit earlier reasoning."""
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


def _template_messages(messages: Sequence[ChatMessage], source: str) -> tuple[dict[str, Any], ...]:
    calls: dict[str, str] = {}  # tool names by the ids of calls so far
    budget, result = Budget(), []
    for i, message in enumerate(messages):
        result.append(as_message(message, calls, source, f"messages[{i}]", budget))
        calls |= {call.id: call.function.name for call in message.tool_calls or ()}
    return tuple(result)


def _takes_tools(template: ChatTemplate) -> bool:
    """Whether a template supports tools and writes calls in a known format."""
    try:
        tool_format(template)
    except Exception:
        return False
    return True


def toolbox(tools: Sequence[ToolDefinition]) -> ToolSet:
    """The tools of a request, by name."""
    try:
        return ToolSet([tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools])
    except (InvalidInput, WrongType) as error:
        raise bad_request(str(error), "tools") from error


def as_message(
    message: ChatMessage, calls: Mapping[str, str], source: str, where: str, budget: Budget
) -> dict[str, Any]:
    """One message as templates take it: developer becomes system unless the template knows both; arguments are parsed.

    `calls` has the tool names of earlier calls by their ids. `budget` is what all arguments may have together.
    """
    role = message.role
    if role == "developer" and "developer" not in source:
        role = "system"
    if role == "function":
        role = "tool"
    result: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        result["name"] = message.name
    if message.role == "assistant":
        return result | _assistant_fields(message, source, where, budget)
    for field in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
        if getattr(message, field) is not None:
            raise bad_request(
                f"{where}.{field} is only allowed in messages of an assistant; remove it", f"{where}.{field}"
            )
    if message.role == "tool":
        return result | _tool_fields(message, calls, where)
    if message.tool_call_id is not None:
        raise bad_request(
            f"{where}.tool_call_id is only allowed in messages of a tool; remove it", f"{where}.tool_call_id"
        )
    return result


def _assistant_fields(message: ChatMessage, source: str, where: str, budget: Budget) -> dict[str, Any]:
    """The fields that only an assistant's message has."""
    result: dict[str, Any] = {}
    if message.refusal and message.content:
        raise bad_request(f"{where} has both content and a refusal; pass one of them", f"{where}.refusal")
    field = "reasoning" if message.reasoning_content is None else "reasoning_content"
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning and not any(word in source for word in REASONING_WORDS):
        raise bad_request(
            f"{where}.{field} is not supported by this model's chat template; remove it",
            f"{where}.{field}",
            "unsupported",
        )
    if reasoning is not None:
        result["reasoning_content"] = result["thinking"] = reasoning
    if message.tool_calls:
        named = [(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
        result["tool_calls"] = [_call(call, name, budget) for call, name in named]
    elif message.content is None and message.refusal is None:
        raise bad_request(
            f"{where} of an assistant has neither content nor tool_calls; pass one of them", f"{where}.content"
        )
    return result


def _call(call: MessageToolCall, where: str, budget: Budget) -> dict[str, Any]:
    field = f"{where}.function.arguments"
    try:
        arguments = loads(call.function.arguments or "{}", budget=budget)
    except TooManyValues as error:
        raise bad_request(f"{field} has, with those before it, {error}", field, "too_many") from None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(
            f"{field} is {short_repr(call.function.arguments)}; it must be the text of a JSON object", field
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _tool_fields(message: ChatMessage, calls: Mapping[str, str], where: str) -> dict[str, Any]:
    """The fields that only a tool's message has: the id and the name of the call it answers."""
    if message.tool_call_id is None:
        raise bad_request(
            f"{where} of a tool has no tool_call_id; pass the id of the call it answers", f"{where}.tool_call_id"
        )
    name = calls.get(message.tool_call_id)
    if name is None:
        raise bad_request(
            f"{where}.tool_call_id is {short_repr(message.tool_call_id)}; no earlier call has that id",
            f"{where}.tool_call_id",
        )
    if message.name is not None and message.name != name:
        raise bad_request(
            f"{where}.name is {short_repr(message.name)}; the call it answers is to {short_repr(name)}", f"{where}.name"
        )
    return {"tool_call_id": message.tool_call_id, "name": name}


def _content(message: ChatMessage, where: str) -> str:
    """A message's text; parts are concatenated."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise bad_request(f"{where} has no content; pass some", f"{where}.content", "missing_field")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise bad_request(
                f"{where}.content[{i}] is of type {part.type!r}; this model takes only text",
                f"{where}.content[{i}].type",
                "unsupported",
            )
        for field in PARTS:
            if field != part.type and getattr(part, field) is not None:
                raise bad_request(
                    f"{where}.content[{i}] is of type {part.type!r} and has {field}; put it into a separate part",
                    f"{where}.content[{i}].{field}",
                )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_request(f"{where}.content[{i}] has no {part.type}", f"{where}.content[{i}].{part.type}")
        texts.append(text)
    return "".join(texts)
