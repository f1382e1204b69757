"""Generates one message of an assistant, item by item as its script says, and parses it as it comes.

The script is free text, a grammar for the whole content, or a forced tool call (program.chat.forced_calls). When the
model itself begins a call of a `strict` tool, the call is constrained from the tool's name on: its arguments follow
the tool's schema, and the model continues after it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import field

from headway.base.dataclass import dataclass
from headway.program.chat.forced_calls import Arguments, Item, QuotedText, Script, argument_items, forced_call, free
from headway.program.chat.reader import ReplyReader
from headway.program.constraints.constraint import Constraint
from headway.program.constraints.grammar import Grammar
from headway.program.context import Context
from headway.server.api.beams import FoundSequence
from headway.server.api.plan import RequestPlan
from headway.server.api.respond import FINISH_REASONS
from headway.server.api.tokens import ScoredToken, TokenStream
from headway.server.chats.format_or_call import FormatOrCall, call_marker
from headway.server.chats.messages import ChatPrompt
from headway.server.chats.until_quote import UntilQuote, quote_token
from headway.text.replies.parts import BadToolCall, Content, Part, ToolCallArguments, ToolCallEnd, ToolCallStart
from headway.text.stream import TextStream
from headway.text.templates.messages import CallSyntax, end_of_open_reasoning, end_of_reasoning

FINAL = "<|channel|>final<|message|>"  # introduces the content in the harmony format
ONE_CALL = "one_call"  # finish reason: the only call that is allowed is complete
CALLS_ONLY = ("hermes", "llama")  # formats that mark tool calls and nothing else


@dataclass(frozen=True)
class ToolPolicy:
    """Which tool calls a message must or may have, and its length."""

    must_call: str | None = None  # the name of a tool, "" for any
    strict: frozenset[str] = frozenset()  # tools whose calls must follow their schema
    one_call: bool = False
    max_tokens: int = 1
    custom: Mapping[str, Grammar | None] = field(default_factory=dict)  # custom tools, and the grammars of their texts
    reasoning_tokens: int | None = None  # after so many of the message its reasoning is closed


@dataclass(frozen=True)
class MessageDelta:
    """New parts of the message, tokens whose text is final, and the number of tokens added."""

    parts: Sequence[Part] = ()
    tokens: Sequence[ScoredToken] = ()
    new: int = 0
    finish: str | None = None


class MessageStream:
    """The message of one choice, generated in a context that holds the prompt."""

    def __init__(
        self, plan: RequestPlan, prompt: ChatPrompt, policy: ToolPolicy, context: Context, number: int
    ) -> None:
        self._plan, self._prompt, self._policy, self._context, self.number = plan, prompt, policy, context, number
        self._tokenizer = plan.engine.tokenizer
        self._format = None if not prompt.tools and prompt.format in CALLS_ONLY else prompt.format
        self._reader = self._new_reader()
        self._script = self._first_script()
        self._next_script: Script | None = None  # replaces the script
        self._choice: FormatOrCall | None = None  # until the message has begun one of the two
        self.count = 0  # tokens of the message so far
        self.stop_string: str | None = None  # the one that ended the message
        self._may_close = policy.reasoning_tokens is not None  # the reasoning, once
        self._calls = 0
        self._announced: set[int] = set()  # calls whose start was sent

    def first_items(self) -> tuple[str, Grammar | None]:
        """The text that the message begins with, and what its rest must follow; of messages without calls."""
        items = list(self._script)
        return "".join(item for item in items if isinstance(item, str)), self._plan.grammar

    async def found(self, lead: str, sequence: FoundSequence, before: Sequence[int]) -> MessageDelta:
        """The whole message of a beam search: its lead, and a sequence that was found after that."""
        filled = self._tokenizer.encode(lead, special=True) if lead else []
        parts = list(self._reader.write(lead)) if lead else []
        self._reader.begin(before)
        stream = TokenStream(self._plan.engine, before)
        tokens = [ScoredToken(id, 0) for id in filled]
        self.count = len(filled) + len(sequence.generated)
        end = "length"
        async for step in sequence:
            parts += self._reader.push(step)
            tokens += stream.push(step, len(sequence.generated))
            end = step.finish or end
        visible = self._visible([*parts, *self._reader.finish()])
        return MessageDelta(visible, tokens, self.count, FINISH_REASONS[end])

    async def deltas(self) -> AsyncIterator[MessageDelta]:
        """The message as it is generated; the last delta has the finish reason."""
        item, end = next(self._script), "length"
        while True:
            async for delta in self._write_item(item):
                end = delta.finish or end
                yield MessageDelta(self._visible(delta.parts), delta.tokens, delta.new)
            if end in ("length", ONE_CALL):
                break
            try:
                item = self._next_item()
            except StopIteration:
                break
        rest = () if end == ONE_CALL else self._visible(self._reader.finish())
        yield MessageDelta(rest, finish=FINISH_REASONS[end] if end == "length" or not self._calls else "tool_calls")

    # -- the script ------------------------------------------------------------------------------------------------

    def _first_script(self) -> Script:
        lead = "" if self._format is None else end_of_reasoning(self._format, self._prompt.rendered)
        if self._policy.must_call is not None:
            assert self._prompt.form is not None
            return forced_call(
                self._prompt.tools, self._prompt.form, self._policy.must_call, lead, arguments=self._arguments
            )
        if self._plan.grammar is None:
            return free()
        if self._may_call:  # the final channel is one of the two ways to go on
            return _constrained(self._plan.grammar, lead)
        return _constrained(self._plan.grammar, FINAL if self._format == "harmony" else lead)

    @property
    def _may_call(self) -> bool:
        """Whether the model may call a tool instead of following the requested format."""
        return bool(self._prompt.tools) and self._prompt.form is not None and self._policy.must_call is None

    def _format_or_call(self, format: Constraint) -> Constraint:
        """A constraint that also lets the model begin a call."""
        assert self._prompt.form is not None
        lead = self._tokenizer.encode(FINAL, special=True) if self._format == "harmony" else ()
        self._choice = FormatOrCall(self._plan.engine.vocab_size, format, self._marker, lead)
        return self._choice

    @property
    def _marker(self) -> list[int]:
        """The tokens that a call begins with."""
        assert self._prompt.form is not None
        return self._tokenizer.encode(call_marker(self._prompt.form), special=True)

    async def _may_begin_call(self) -> bool:
        """Whether the model, left to itself, would begin as calls do: one that would rather talk gets the format."""
        return await self._plan.first_token(self._context, self.number) == self._marker[0]

    def _begun_call(self) -> Script:
        """The rest of a call that the model has begun instead of the format: nothing else may be in the message."""
        form, tools = self._prompt.form, self._prompt.tools
        assert form is not None
        return forced_call(tools, form, "", begun=call_marker(form), arguments=self._free_arguments)

    def _arguments(self, name: str) -> Arguments:
        """What the arguments of a call must follow: the grammar of a custom tool's text, or the tool's schema."""
        grammar = self._policy.custom.get(name)
        return self._prompt.tools.get(name).arguments if grammar is None else QuotedText(grammar)

    def _free_arguments(self, name: str) -> Arguments:
        """The same for calls that a message need not make: any object, unless the tool is strict."""
        return self._arguments(name) if name in self._policy.strict else Grammar.json_object()

    def _next_item(self) -> Item:
        """The script's next item; raises StopIteration after the last."""
        if self._next_script is None:
            return self._script.send(self._reader.text)
        self._script, self._next_script = self._next_script, None
        return next(self._script)

    async def _write_item(self, item: Item) -> AsyncIterator[MessageDelta]:
        """The deltas of one item of the script; the last one has the reason why it ended."""
        left = self._policy.max_tokens - self.count
        if isinstance(item, str):
            ids = self._tokenizer.encode(item, special=True)
            if len(ids) > left:
                yield MessageDelta(finish="length")
                return
            self._context.fill(ids)
            self.count += len(ids)
            filled = [ScoredToken(id, 0) for id in ids]  # nothing was drawn, so they have no rank
            yield MessageDelta(self._reader.write(item), filled, len(ids), "constraint")
        elif left < 1:
            yield MessageDelta(finish="length")
        elif isinstance(item, QuotedText):
            async for delta in self._generate_text(item.grammar, left):
                yield delta
        else:
            async for delta in self._generate(item, left):
                yield delta

    async def _generate_text(self, grammar: Grammar, left: int) -> AsyncIterator[MessageDelta]:
        """The text of a custom tool by its grammar, up to the quotation mark after it.

        It is generated as it is and read as JSON: in the context, too, it is replaced by its JSON at the end.
        """
        ends: list[UntilQuote] = []

        def wrap(format: Constraint) -> Constraint:
            ends.append(UntilQuote(self._plan.engine.vocab_size, format, quote_token(self._tokenizer)))
            return ends[0]

        start, before_text = len(self._context.tokens), self._context.text_before
        generation = self._plan.generation(
            self._context, self.number, grammar, left, free=False, wrap=wrap, drafts=False
        )
        text, ranked = TextStream(self._tokenizer, after=before_text), TokenStream(self._plan.engine, before_text)
        written, before, end = "", 0, "length"
        async for step in generation:
            kept = before + len(step.tokens) if step.finish is None else len(generation.generated)
            ids = list(generation.generated[before:kept])
            ids = ids[:-1] if ends[0].is_closed else ids
            piece = text.push(ids) + (text.flush() if step.finish is not None else "")
            written += piece
            self.count += kept - before
            new, before, end = max(0, kept - before), kept, step.finish or end
            yield MessageDelta(self._reader.write(_quoted(piece)), ranked.push(step, kept), new)
        if end != "length":
            end = self._rewrite(start, _quoted(written))
        yield MessageDelta(finish=end)

    def _rewrite(self, start: int, text: str) -> str:
        """Replace the context's tokens from `start` on by those of a text; returns why the item ended."""
        drawn, ids = list(self._context.tokens[start:]), self._tokenizer.encode(text, special=False)
        if drawn == ids:
            return "constraint"
        if self.count - len(drawn) + len(ids) > self._policy.max_tokens:
            return "length"
        self._context.truncate(len(drawn))
        self._context.fill(ids)
        self.count += len(ids) - len(drawn)
        return "constraint"

    async def _generate(self, item: Grammar | None, left: int) -> AsyncIterator[MessageDelta]:
        is_format = item is not None and item is self._plan.grammar
        either = is_format and self._may_call and await self._may_begin_call()
        generation = self._plan.generation(
            self._context,
            self.number,
            item,
            left,
            free=item is None or is_format,
            wrap=self._format_or_call if either else None,
            drafts=not (self._ends_early or either),  # what ends an item must end a step
        )
        before_text = self._context.text_before
        self._reader.begin(before_text)
        token_stream, before = TokenStream(self._plan.engine, before_text), 0
        async for step in generation:
            kept = before + len(step.tokens) if step.finish is None else len(generation.generated)
            parts, tokens = self._reader.push(step), token_stream.push(step, kept)
            if step.finish == "stop":
                self.stop_string = generation.stop_string
            if self._plan.show_stop and step.finish == "stop":
                parts = [*parts, *self._reader.write(generation.stop_string or "")]
            self.count += kept - before
            new, before = max(0, kept - before), kept
            if self._choice is not None and self._choice.is_call:
                self._choice, self._next_script = None, self._begun_call()
                yield MessageDelta(parts, tokens, new, "constraint")
                return
            if item is None and step.finish is None and (closing := self._closing()):
                self._may_close, self._next_script = False, _closed(closing)
                yield MessageDelta(parts, tokens, new, "constraint")
                return
            at = next((i + 1 for i, part in enumerate(parts) if self._ends_item(part, item)), None)
            if at is None:
                yield MessageDelta(parts, tokens, new, step.finish)
                continue
            cut = self._constrain_call(last) if isinstance(last := parts[at - 1], ToolCallStart) else 0
            why = "constraint" if self._next_script is not None else ONE_CALL
            yield MessageDelta(parts[:at], tokens[: max(0, len(tokens) - cut)], max(0, new - cut), why)
            return

    @property
    def _ends_early(self) -> bool:
        """Whether free text may end before the model ends it."""
        return bool(self._policy.strict) or self._policy.one_call or self._may_close

    def _closing(self) -> str:
        """The text that closes the reasoning where it has used up its tokens; "" elsewhere."""
        most = self._policy.reasoning_tokens
        if not self._may_close or most is None or self.count < most or self._format is None:
            return ""
        return end_of_open_reasoning(self._format, self._prompt.rendered, self._reader.text)

    def _ends_item(self, part: Part, item: Item) -> bool:
        """Whether free text ends with this part: a call to constrain by its schema, or the only call allowed."""
        if isinstance(part, ToolCallStart):
            is_free = item is None or item is self._plan.grammar
            return is_free and part.name in self._policy.strict and part.index not in self._announced
        return self._policy.one_call and isinstance(part, ToolCallEnd)

    # -- calls of strict tools -------------------------------------------------------------------------------------

    def _constrain_call(self, started: ToolCallStart) -> int:
        """Truncate the message after the name of the call that has begun; returns the number of tokens removed."""
        assert self._prompt.form is not None
        generated = self._context.tokens[len(self._prompt.ids) :]
        spelled = [self._tokenizer.token_bytes(id) if id < self._tokenizer.vocab_size else b"" for id in generated]
        whole, name = b"".join(spelled), started.name.encode()
        end, keep, size = whole.rindex(name) + len(name), 0, 0
        while keep < len(spelled) and size + len(spelled[keep]) <= end:
            size += len(spelled[keep])
            keep += 1
        cut = len(generated) - keep
        self._context.truncate(cut)
        self.count -= cut
        self._reader = self._new_reader()
        self._reader.write(whole[:size].decode("utf-8", "replace"))
        self._next_script = self._rest_of_call(
            started.name, self._prompt.form, whole[size:end].decode("utf-8", "replace")
        )
        return cut

    def _rest_of_call(self, name: str, form: CallSyntax, lead: str) -> Script:
        """The arguments by their schema, the end of the call, and free text after it."""
        yield lead + form.between
        yield from argument_items(self._arguments(name))
        if form.closing:
            yield form.closing
        if not self._policy.one_call:
            yield None

    def _new_reader(self) -> ReplyReader:
        prompt = self._prompt
        return ReplyReader(
            self._tokenizer,
            self._format,
            prompt.rendered,
            special=self._plan.show_special,
            continues=prompt.continues,
        )

    # -- what the client gets --------------------------------------------------------------------------------------

    def _visible(self, parts: Sequence[Part]) -> list[Part]:
        """Parts as the client gets them. A call is text if the client passed no tools or it cannot be parsed."""
        visible: list[Part] = []
        for part in parts:
            match part:
                case BadToolCall(text=text, index=None):
                    visible.append(Content(text))
                case ToolCallStart() | ToolCallArguments() | ToolCallEnd() | BadToolCall() if not self._prompt.tools:
                    visible += self._as_content(part)
                case ToolCallStart(index=index) if index in self._announced:
                    continue
                case ToolCallStart(index=index):
                    self._announced.add(index)
                    visible.append(part)
                case _:
                    self._calls += isinstance(part, ToolCallEnd)
                    visible.append(part)
        return visible

    def _as_content(self, part: Part) -> list[Part]:
        match part:
            case ToolCallStart(name=name):
                return [Content(f'{{"name": {json.dumps(name)}, "arguments": ')]
            case ToolCallArguments(delta=delta):
                return [Content(delta)]
            case ToolCallEnd():
                return [Content("}")]
        return []


def _quoted(text: str) -> str:
    """A text as it is inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _closed(closing: str) -> Script:
    """The end of the reasoning, and free text after it."""
    yield closing
    yield None


def _constrained(grammar: Grammar, lead: str) -> Script:
    """A message whose content follows a grammar; `lead` introduces the content."""
    if lead:
        yield lead
    yield grammar


def call_id(format: str | None) -> str:
    """A new id for a tool call; some templates require exactly nine letters and digits."""
    return secrets.token_hex(5)[:9] if format == "mistral" else f"call_{secrets.token_hex(12)}"
