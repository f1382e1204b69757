"""Messages as chat templates read them, and tool calls as reply formats write them.

`CallSyntax` is the text around a constrained call; `assistant_message` and `tool_message` are what templates read;
`describe_tools` adds tools to the messages as plain text, in the Hermes format, for templates that do not take tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.base.dataclass import dataclass
from headway.text.replies.parts import Reply

Message = Mapping[str, Any]

TOOLS_TEXT = """You may call one or more functions to answer the user. Their signatures stand inside <tools></tools>:
<tools>
{tools}
</tools>

For each call write a JSON object with the function's name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


@dataclass(frozen=True)
class CallSyntax:
    """The text around a call: before its name, between name and arguments, and after them.

    `border` is the text that ends a name, unless it is a special token; it tells a name from a longer one.
    """

    opening: str
    between: str
    closing: str
    border: str = ""


_TAGGED = CallSyntax('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", '"')
_FORMS = {
    "qwen": _TAGGED,
    "hermes": _TAGGED,
    "llama": CallSyntax('{"name": "', '", "parameters": ', "}", '"'),
    "mistral": CallSyntax('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]", '"'),
    "harmony": CallSyntax("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", " "),
}
_MISTRAL_ARGS = CallSyntax("[TOOL_CALLS]", "[ARGS]", "")


def call_syntax(format: str, template_source: str) -> CallSyntax:
    """The call syntax of a reply format; Mistral has two, and the template tells which."""
    return _MISTRAL_ARGS if format == "mistral" and "[ARGS]" in template_source else _FORMS[format]


def end_of_reasoning(format: str, prompt: str) -> str:
    """The text that closes the reasoning opened by the prompt; "" if it opened none."""
    if format == "mistral":
        return "[/THINK]" if prompt.endswith("[THINK]") else ""
    if format in ("qwen", "hermes") and prompt.rstrip("\n").endswith("<think>"):
        return "</think>\n\n" if prompt.endswith("\n") else "\n</think>\n\n"
    return ""


def end_of_open_reasoning(format: str, prompt: str, text: str) -> str:
    """The text that closes the reasoning which is open after a prompt and a part of its reply; "" if none is."""
    if format == "harmony":
        channel = text.rpartition("<|channel|>")[2]
        is_open = channel.startswith("analysis<|message|>") and "<|end|>" not in channel
        return "<|end|><|start|>assistant" if is_open else ""
    begin, end = ("[THINK]", "[/THINK]") if format == "mistral" else ("<think>", "</think>")
    if format not in ("mistral", "qwen", "hermes") or end in text:
        return ""
    is_open = prompt.rstrip("\n").endswith(begin) or text.lstrip().startswith(begin)
    return "" if not is_open else end if format == "mistral" else f"\n{end}\n\n"


def assistant_message(reply: Reply, ids: Sequence[str] = ()) -> dict[str, Any]:
    """A reply as a template reads it. `ids` are for calls to which the model gave none."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
        if not (reply.calls and reply.content):  # templates that read `thinking` take only one of the two
            message["thinking"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id or id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call, id in zip(reply.calls, ids, strict=True)
        ]
    return message


def tool_message(name: str, id: str, content: str) -> dict[str, Any]:
    """A tool's result, as a template reads it."""
    return {"role": "tool", "name": name, "tool_call_id": id, "content": content}


def describe_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with `tools`, calls and results as plain text, in roles that every template knows."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    system = TOOLS_TEXT.format(tools=listed)
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    rest = messages if first is None else messages[1:]
    if first is not None:
        system = f"{first['content']}\n\n{system}"
    return [{"role": "system", "content": system}, *map(as_text, rest)]


def as_text(message: Message) -> Message:
    """A message with its calls or result as plain text, in a role that every template knows."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [json.dumps(_plain(call), ensure_ascii=False) for call in message["tool_calls"]]
    texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return {"role": "assistant", "content": "\n".join(filter(None, texts))}


def _plain(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
