"""A tool call that a model must make, in parts: texts that are filled in, and grammars for what it may choose.

<tool_call>\\n{"name": "        filled in
get_weather"                   one of the names, when there are several
, "arguments":                 filled in
{"city": "Oslo"}               the arguments, by the tool's schema
}\\n</tool_call>                filled in
"""

from __future__ import annotations

from collections.abc import Generator

from headway.program.chat.tools import ToolSet
from headway.program.constraints.grammar import Grammar
from headway.text.templates.messages import CallSyntax

Item = str | Grammar | None  # a text to fill in, a grammar to generate by, or None to generate freely
Script = Generator[Item, str, None]  # receives the message's text so far


def free() -> Script:
    """A message without constraints."""
    yield None


def forced_call(tools: ToolSet, form: CallSyntax, name: str, lead: str = "") -> Script:
    """A message that calls the tool with this name, or any tool for ""; `lead` comes before the call."""
    names = (name,) if name else tools.names
    text = yield lead + form.opening
    if len(names) == 1:
        name = names[0]
        yield name + form.between
    else:
        text = yield Grammar.choices(name + form.border for name in names)
        name = next(name for name in names if text.endswith(form.opening + name + form.border))
        yield form.between.removeprefix(form.border)
    yield tools.get(name).arguments
    if form.closing:
        yield form.closing
