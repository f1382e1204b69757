"""What a parsed reply is made of: the parts a `StreamParser` gives, the reply they add up to, and the limits.

Every `ToolCallStart` is followed by exactly one `ToolCallEnd` or `BadToolCall` with its index; the
`ToolCallArguments` between them, put together, are the JSON text of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call has begun; `index` counts the calls of the message from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    delta: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call is complete. `id` is the one the model wrote, in formats that have one."""

    index: int
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class BadToolCall:
    """A call or message that cannot be read: its raw text (at most `ParseLimits.call_chars`) and a sentence.

    `index` is that of the `ToolCallStart` this takes back; None when none was given.
    """

    text: str
    why: str
    index: int | None = None


Part = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | BadToolCall


@dataclass(frozen=True)
class ParseLimits:
    """What one message may hold; what goes past a limit is a `BadToolCall`."""

    call_chars: int = 1 << 20  # of one call, arguments and all
    depth: int = 64  # objects and lists inside each other
    calls: int = 128  # in one message, good or bad
    name_chars: int = 256


@dataclass(frozen=True)
class ToolCall:
    """One complete call."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Reply:
    """A whole message, put together from its parts."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    bad: tuple[BadToolCall, ...] = ()


def collect(parts: Iterable[Part]) -> Reply:
    """The message that `parts` add up to."""
    content, reasoning, bad = [], [], []
    names: dict[int, str] = {}
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index, name):
                names[index] = name
            case ToolCallEnd(index, arguments, id):
                calls.append(ToolCall(names[index], arguments, id))
            case BadToolCall():
                bad.append(part)
    return Reply("".join(content), "".join(reasoning), tuple(calls), tuple(bad))
