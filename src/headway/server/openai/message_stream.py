"""One message of an assistant: written part by part as its script says, and read as it comes.

The script is one part that the model writes as it likes, a form that the whole content has, or a call that it must
make (headway.program.chat.forced_calls). A call of a `strict` tool that the model begins by itself is taken over at its name: the
rest of it is written by the tool's schema, and the model goes on behind it.
"""  # noqa: E501

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headway.program.chat.forced_calls import Item, Script, forced_call, free
from headway.program.chat.reader import ReplyReader
from headway.program.constraints.grammar import Grammar
from headway.program.context import Context
from headway.server.openai.messages import Talk
from headway.server.openai.plan import Plan
from headway.server.openai.respond import REASONS
from headway.server.openai.tokens import Spelling, Token
from headway.text.replies.parts import BadToolCall, Content, Part, ToolCallArguments, ToolCallEnd, ToolCallStart
from headway.text.templates.messages import CallSyntax, end_of_reasoning

FINAL = "<|channel|>final<|message|>"  # where a reply in harmony's format has its content
ENOUGH = "enough"  # it ended because there may be one call only
PLAIN = ("hermes", "llama")  # formats that have nothing but calls beside the content


@dataclass(frozen=True)
class Manner:
    """How a message is to be made: with which calls, in which form, at which length."""

    must_call: str | None = None  # a tool, "" for any
    strict: frozenset[str] = frozenset()  # tools whose calls follow their schema
    one_call: bool = False
    max_tokens: int = 1


@dataclass(frozen=True)
class Said:
    """What has come: parts of the message, tokens whose text is certain, and how many tokens were added."""

    parts: Sequence[Part] = ()
    tokens: Sequence[Token] = ()
    new: int = 0
    finish: str | None = None


class Speech:
    """The message of one choice, in a context that holds the prompt."""

    def __init__(self, how: Plan, talk: Talk, manner: Manner, context: Context, number: int) -> None:
        self._plan, self._talk, self._manner, self._context, self._number = how, talk, manner, context, number
        self._tokenizer = how.engine.tokenizer
        self._format = None if not talk.tools and talk.format in PLAIN else talk.format
        self._reader = self._new_reader()
        self._script = self._first_script()
        self._taken: Script | None = None  # what goes on in the script's place
        self.count = 0  # tokens of the message
        self._calls = 0
        self._announced: set[int] = set()  # calls that were shown to begin

    async def said(self) -> AsyncIterator[Said]:
        """The message, as it comes; the last one says why it ended."""
        item, end = next(self._script), "length"
        while True:
            async for one in self._written(item):
                end = one.finish or end
                yield Said(self._shown(one.parts), one.tokens, one.new)
            if end in ("length", ENOUGH):
                break
            try:
                item = self._following()
            except StopIteration:
                break
        rest = () if end == ENOUGH else self._shown(self._reader.finish())
        yield Said(rest, finish=REASONS[end] if end == "length" or not self._calls else "tool_calls")

    # -- what it is made of ----------------------------------------------------------------------------------------

    def _first_script(self) -> Script:
        lead = "" if self._format is None else end_of_reasoning(self._format, self._talk.rendered)
        if self._manner.must_call is not None:
            assert self._talk.form is not None
            return forced_call(self._talk.tools, self._talk.form, self._manner.must_call, lead)
        if self._plan.grammar is None:
            return free()
        return _shaped(self._plan.grammar, FINAL if self._format == "harmony" else lead)

    def _following(self) -> Item:
        """The script's next part; raises StopIteration behind its last."""
        if self._taken is None:
            return self._script.send(self._reader.text)
        self._script, self._taken = self._taken, None
        return next(self._script)

    async def _written(self, item: Item) -> AsyncIterator[Said]:
        """What one part of the script adds; the last one says why it ended."""
        left = self._manner.max_tokens - self.count
        if isinstance(item, str):
            ids = self._tokenizer.encode(item, special=True)
            if len(ids) > left:
                yield Said(finish="length")
                return
            self._context.fill(ids)
            self.count += len(ids)
            yield Said(self._reader.write(item), (), len(ids), "constraint")
        elif left < 1:
            yield Said(finish="length")
        else:
            async for one in self._drawn(item, left):
                yield one

    async def _drawn(self, item: Grammar | None, left: int) -> AsyncIterator[Said]:
        is_free = item is None or item is self._plan.grammar
        generation = self._plan.generation(self._context, self._number, item, left, free=is_free)
        self._reader.begin()
        spelling, before = Spelling(self._plan.engine), 0
        async for step in generation:
            kept = before + len(step.tokens) if step.finish is None else len(generation.generated)
            parts, tokens = self._reader.push(step), spelling.push(step, kept)
            self.count += kept - before
            new, before = max(0, kept - before), kept
            at = next((i + 1 for i, part in enumerate(parts) if self._ends_here(part, item)), None)
            if at is None:
                yield Said(parts, tokens, new, step.finish)
                continue
            cut = self._take_over(last) if isinstance(last := parts[at - 1], ToolCallStart) else 0
            why = "constraint" if self._taken is not None else ENOUGH
            yield Said(parts[:at], tokens[: max(0, len(tokens) - cut)], max(0, new - cut), why)
            return

    def _ends_here(self, part: Part, item: Item) -> bool:
        """Whether the model's own text ends with this: a call that its schema takes over, or the only call there is."""
        if isinstance(part, ToolCallStart):
            return item is None and part.name in self._manner.strict and part.index not in self._announced
        return self._manner.one_call and isinstance(part, ToolCallEnd)

    # -- calls of strict tools -------------------------------------------------------------------------------------

    def _take_over(self, started: ToolCallStart) -> int:
        """Cut the message behind the name of the call that has begun, to the token; how many tokens that were."""
        assert self._talk.form is not None
        behind = self._context.tokens[len(self._talk.ids) :]
        spelled = [self._tokenizer.token_bytes(id) if id < self._tokenizer.vocab_size else b"" for id in behind]
        whole, name = b"".join(spelled), started.name.encode()
        end, keep, size = whole.rindex(name) + len(name), 0, 0
        while keep < len(spelled) and size + len(spelled[keep]) <= end:
            size += len(spelled[keep])
            keep += 1
        cut = len(behind) - keep
        self._context.truncate(cut)
        self.count -= cut
        self._reader = self._new_reader()
        self._reader.write(whole[:size].decode("utf-8", "replace"))
        self._taken = self._rest_of_call(started.name, self._talk.form, whole[size:end].decode("utf-8", "replace"))
        return cut

    def _rest_of_call(self, name: str, form: CallSyntax, lead: str) -> Script:
        """The arguments by their schema, the end of the call, and what the model likes to say behind it."""
        yield lead + form.between
        yield self._talk.tools.get(name).arguments
        if form.closing:
            yield form.closing
        if not self._manner.one_call:
            yield None

    def _new_reader(self) -> ReplyReader:
        return ReplyReader(self._tokenizer, self._format, self._talk.rendered)

    # -- what is shown ---------------------------------------------------------------------------------------------

    def _shown(self, parts: Sequence[Part]) -> list[Part]:
        """Parts as a client sees them: where it has no tools, a call is text, and so is one that cannot be read."""
        shown: list[Part] = []
        for part in parts:
            match part:
                case BadToolCall(text=text, index=None):
                    shown.append(Content(text))
                case ToolCallStart() | ToolCallArguments() | ToolCallEnd() | BadToolCall() if not self._talk.tools:
                    shown += self._as_content(part)
                case ToolCallStart(index=index) if index in self._announced:
                    continue
                case ToolCallStart(index=index):
                    self._announced.add(index)
                    shown.append(part)
                case _:
                    self._calls += isinstance(part, ToolCallEnd)
                    shown.append(part)
        return shown

    def _as_content(self, part: Part) -> list[Part]:
        match part:
            case ToolCallStart(name=name):
                return [Content(f'{{"name": {json.dumps(name)}, "arguments": ')]
            case ToolCallArguments(delta=delta):
                return [Content(delta)]
            case ToolCallEnd():
                return [Content("}")]
        return []


def _shaped(grammar: Grammar, lead: str) -> Script:
    """A message whose content has a form; `lead` is what stands before content."""
    if lead:
        yield lead
    yield grammar


def call_id(format: str | None) -> str:
    """An id for a call; some templates take nine letters and digits and nothing else."""
    return secrets.token_hex(5)[:9] if format == "mistral" else f"call_{secrets.token_hex(12)}"
