"""The parts that a `StreamParser` emits, the reply they add up to, and the limits.

Every `ToolCallStart` is followed by exactly one `ToolCallEnd` or `BadToolCall` with its index; the concatenated
`ToolCallArguments` between them are the JSON text of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headway.base.dataclass import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """The model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The start of a call; `index` counts the calls of the message from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    delta: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The end of a call. `id` is the one the model wrote, in formats that have one."""

    index: int
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class BadToolCall:
    """A malformed call or message: its raw text (at most `ParseLimits.call_chars`) and the reason, a sentence.

    `index` is that of the `ToolCallStart` it invalidates; None if there was none.
    """

    text: str
    why: str
    index: int | None = None


Part = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | BadToolCall


@dataclass(frozen=True)
class ParseLimits:
    """Limits of one message; a call beyond them is a `BadToolCall`."""

    call_chars: int = 1 << 20  # of one call, with its arguments
    depth: int = 64  # of nested objects and lists
    calls: int = 128  # in one message, valid or not
    name_chars: int = 256


@dataclass(frozen=True)
class ToolCall:
    """One complete call."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Reply:
    """A complete message."""

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
