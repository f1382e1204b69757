"""A tool call that a model must make, in parts: texts that are filled in, and grammars for what it may choose.

<tool_call>\\n{"name": "        filled in
get_weather"                   one of the names, when there are several
, "arguments":                 filled in
{"city": "Oslo"}               the arguments, by the tool's schema
}\\n</tool_call>                filled in
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from headway.base.dataclass import dataclass
from headway.program.chat.tools import ToolSet
from headway.program.constraints.grammar import Grammar
from headway.text.templates.messages import CallSyntax


@dataclass(frozen=True)
class QuotedText:
    """Arguments that are one text, whose grammar is about the text itself and not about its JSON."""

    grammar: Grammar


Arguments = Grammar | QuotedText
Item = str | Grammar | QuotedText | None  # a text to fill in, what to generate by, or None to generate freely
Script = Generator[Item, str, None]  # receives the message's text so far


def free() -> Script:
    """A message without constraints."""
    yield None


def forced_call(
    tools: ToolSet,
    form: CallSyntax,
    name: str,
    lead: str = "",
    *,
    begun: str = "",
    arguments: Callable[[str], Arguments] | None = None,
) -> Script:
    """A message that calls the tool with this name, or any tool for ""; `lead` comes before the call.

    `begun` is how much of the opening is there already; `arguments` are those of a tool instead of its own.
    """
    names = (name,) if name else tools.names
    if opening := lead + form.opening.removeprefix(begun):
        yield opening
    if len(names) == 1:
        name = names[0]
        yield name + form.between
    else:
        text = yield Grammar.choices(name + form.border for name in names)
        name = next(name for name in names if text.endswith(form.opening + name + form.border))
        yield form.between.removeprefix(form.border)
    yield from argument_items(tools.get(name).arguments if arguments is None else arguments(name))
    if form.closing:
        yield form.closing


def argument_items(arguments: Arguments) -> Iterator[Item]:
    """The items of a call's arguments."""
    if isinstance(arguments, QuotedText):
        yield '{"input": "'
        yield arguments
        yield '"}'
    else:
        yield arguments
