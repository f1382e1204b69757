"""A chat reply: generations parsed into content, reasoning and tool calls, and tools run until there is an answer.

In one round the model writes a message; its calls are run one after the other and their results go back through the
model's own template. A reply that fails or is cancelled leaves the context as it was before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from headway.base.errors import DeadlineExceeded, InvalidInput, ToolFailed
from headway.base.specs.adapters import AdapterMix
from headway.base.specs.samplers import Sampler
from headway.base.text import short_repr
from headway.program.chat.forced_calls import Item, QuotedText, Script, forced_call, free
from headway.program.chat.limits import ChatLimits, Choice
from headway.program.chat.messages import (
    Checkpoint,
    Messages,
    append_messages,
    close_message,
    reply_format,
    tool_format,
)
from headway.program.chat.reader import ReplyReader
from headway.program.chat.tools import Function, ToolResult, ToolSet
from headway.program.generation.generator import Generation, Step
from headway.program.generation.stops import listed_stops
from headway.text.replies import BadToolCall, Part, ToolCall
from headway.text.templates.messages import CallSyntax, call_syntax, end_of_reasoning, tool_message

if TYPE_CHECKING:
    from headway.program.context import Context


class ChatReply:
    """A reply as it arrives: an async iterator of parts. `await reply.text()` runs it to its end.

    Parts are `Content`, `Reasoning`, `ToolCallStart`, `ToolCallArguments`, `ToolCallEnd`, `BadToolCall` and, for every
    call that was made, `ToolResult`. When it has ended, `finish` says why:

    - `eos`, `stop`: the model answered; the message is closed and the next can follow
    - `length`: `max_tokens` cut the message; it is left open
    - `calls`: it ended in calls that nobody here runs: tools given as schemas, or `tool_choice="none"`
    - `bad_call`: it ended in a call that cannot be read; `bad` has it
    """

    def __init__(
        self,
        context: Context,
        messages: Messages = None,
        sampler: Sampler | None = None,
        *,
        tools: ToolSet | Iterable[Function | Mapping[str, Any]] | None = None,
        tool_choice: Choice = "auto",
        tool_format: str | None = None,
        on_error: Literal["tell", "raise"] = "tell",
        stop: str | Iterable[str | int] = (),
        limits: ChatLimits | None = None,
        adapter: AdapterMix | None = None,
    ) -> None:
        self.limits = limits or ChatLimits()
        self._adapter = adapter
        if not isinstance(on_error, str) or on_error not in ("tell", "raise"):
            raise InvalidInput(f"on_error is {short_repr(on_error)}; it must be 'tell' (the model) or 'raise'")
        self._context, self._sampler = context, sampler
        self._stop = listed_stops(stop)
        self._raises = on_error == "raise"
        given = (context._conversation.tools or ()) if tools is None else tools
        self._tools = given if isinstance(given, ToolSet) else ToolSet(given)
        chosen = _chosen_tool(tool_choice, self._tools)
        self._runs = tool_choice != "none"
        self._before = Checkpoint.of(context)
        self._parts: deque[Part | ToolResult] = deque()
        self._script: Script = free()  # what the message is made of
        self._item: Item | Literal[False] = False  # the part of it that comes next; False when there is none
        self._generation: Generation | None = None
        self._waiting: deque[tuple[ToolCall, str]] = deque()  # calls to make, with their ids
        self._answers: list[Mapping[str, Any]] = []
        self._deadline: float | None = None
        self._reasoning: list[str] = []
        self.calls: list[ToolResult | ToolCall] = []
        self.bad: tuple[BadToolCall, ...] = ()
        self.rounds = 0  # of calls
        self.finish: str | None = None
        try:
            self._format = self._open(messages, tools is not None, tool_format)
            self._begin_message(chosen)
            while self._generation is None and self._item is not False:  # a grammar that cannot be used is refused here
                self._play(self._item)
        except BaseException:
            self._before.restore(context)
            raise

    def __repr__(self) -> str:
        shown = len(self.content), len(self.calls), self.rounds
        state = "running" if self.finish is None else f"finish={self.finish!r}"
        return "<ChatReply: {} characters, {} calls in {} rounds, {}>".format(*shown, state)

    # -- reading ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Part | ToolResult]:
        return self

    async def __anext__(self) -> Part | ToolResult:
        while not self._parts:
            if self.finish is not None:
                raise StopAsyncIteration
            await self._bounded()
        return self._parts.popleft()

    async def text(self) -> str:
        """Run to the end; the content of the last message."""
        async for _ in self:
            pass
        return self.content

    @property
    def content(self) -> str:
        """The content of the message being written, or of the last one."""
        return self._reader.reply.content

    @property
    def reasoning(self) -> str:
        """The reasoning so far, of all rounds."""
        now = self._reader.reply.reasoning
        return "\n".join(filter(None, [*self._reasoning, now]))

    @property
    def context(self) -> Context:
        """The context it writes to."""
        return self._context

    # -- one step --------------------------------------------------------------------------------------------------

    async def _bounded(self) -> None:
        """Advance by one step within the time limit; an error takes the whole reply back."""
        loop = asyncio.get_running_loop()
        if self._deadline is None and self.limits.timeout is not None:
            self._deadline = loop.time() + self.limits.timeout
        scope = asyncio.timeout_at(self._deadline)
        try:
            async with scope:
                await self._advance()
        except BaseException as error:
            self.finish = "failed"
            self._before.restore(self._context)
            if isinstance(error, TimeoutError) and scope.expired():
                raise DeadlineExceeded(
                    f"the reply took longer than timeout={self.limits.timeout:g} seconds; the context is as it was"
                ) from error
            raise

    async def _advance(self) -> None:
        if self._generation is not None:
            self._take(await anext(self._generation))
        elif self._item is not False:
            self._play(self._item)
        elif self._waiting:
            await self._call(*self._waiting.popleft())
        else:
            self._go_on()

    def _play(self, item: Item) -> None:
        """Start the next part of the message: a text to fill in, or a generation."""
        if isinstance(item, str):
            self._context.fill(self._context.engine.tokenizer.encode(item, special=True))
            self._parts.extend(self._reader.write(item))
            self._next_part("constraint")
            return
        left = self.limits.max_tokens - self._drawn
        if left < 1:
            self._end_message("length")
            return
        self._item = False
        self._reader.begin(self._context.text_before)
        stop = self._stop if item is None else ()
        assert not isinstance(item, QuotedText), "tools here have schemas"
        self._generation = self._context.generate(
            self._sampler, max_tokens=left, stop=stop, constrain=item, adapter=self._adapter
        )

    def _take(self, step: Step) -> None:
        self._drawn += len(step.tokens)
        self._parts.extend(self._reader.push(step))
        if step.finish is None:
            return
        self._generation = None
        if step.finish == "length":
            self._end_message("length")
        else:
            self._next_part(step.finish)

    def _next_part(self, finish: str) -> None:
        """Go to the next part of the message, or end it after the last."""
        try:
            self._item = self._script.send(self._reader.text)
        except StopIteration:
            self._end_message(finish)

    # -- messages --------------------------------------------------------------------------------------------------

    def _open(self, messages: Messages, new_tools: bool, requested: str | None) -> str | None:
        """Append the messages; returns the format of the reply."""
        template = self._context.engine.chat_template
        if not self._tools:
            append_messages(self._context, messages, tools=() if new_tools else None)
            return reply_format(template, requested)
        if not new_tools and self._context._conversation.described:
            requested = "hermes"
        format, described = tool_format(template, requested)
        append_messages(self._context, messages, tools=self._tools.schemas if new_tools else None, described=described)
        return format

    def _begin_message(self, choice: str | None) -> None:
        """Prepare for one message of the model. `choice` is a tool it must call, "" for any, None for no constraint."""
        prompt = self._context._conversation.rendered
        self._reader = ReplyReader(self._context.engine.tokenizer, self._format, prompt)
        self._drawn = 0
        following = self._context.tokens[self._context._written :]
        self._parts.extend(self._reader.write(self._context.engine.tokenizer.decode(following)))
        self._script = free()
        if choice is not None:
            assert self._format is not None
            self._script = forced_call(self._tools, self._form(), choice, end_of_reasoning(self._format, prompt))
        self._item = next(self._script)

    def _form(self) -> CallSyntax:
        template = self._context.engine.chat_template
        assert self._format is not None
        assert template is not None
        return call_syntax(self._format, template.tool_source or template.source)

    def _end_message(self, finish: str) -> None:
        """The model has ended a message, whose calls decide what comes next."""
        self._item = False
        self._parts.extend(self._reader.finish())
        reply = self._reader.reply
        self.bad = reply.bad
        if finish == "length":
            self.finish = finish
            return
        ids = close_message(self._context, self._reader)
        if reply.bad:
            self.finish = "bad_call"
        elif not reply.calls:
            self.finish = finish
        elif not self._runs or not self._tools or not self._tools.can_run(reply.calls):
            self.calls += reply.calls
            self.finish = "calls"
        else:
            self._check_rounds(reply.calls)
            self._waiting.extend(zip(reply.calls, ids, strict=True))

    def _check_rounds(self, calls: tuple[ToolCall, ...]) -> None:
        if self.rounds == self.limits.max_rounds:
            raise ToolFailed(
                f"the model has called tools in max_rounds={self.rounds} rounds and wants to call "
                f"{', '.join(call.name for call in calls)}; allow more rounds, or ask for less"
            )
        self.rounds += 1

    # -- calls -----------------------------------------------------------------------------------------------------

    async def _call(self, call: ToolCall, id: str) -> None:
        outcome = await self._tools.run(call, self.limits.tool_timeout)
        if outcome.error is not None and self._raises and not outcome.misused:
            raise ToolFailed(
                f"the tool {call.name!r} failed: {outcome.text.removeprefix('error: ')}"
            ) from outcome.error
        result = ToolResult(call, outcome.text, outcome.error)
        self.calls.append(result)
        self._parts.append(result)
        self._answers.append(tool_message(call.name, id, outcome.text))

    def _go_on(self) -> None:
        """All calls of the message were made: append the results and begin the next message."""
        answers, self._answers = self._answers, []
        if thought := self._reader.reply.reasoning:
            self._reasoning.append(thought)
        append_messages(self._context, answers)
        self._begin_message(None)


def _chosen_tool(choice: Choice, tools: ToolSet) -> str | None:
    """The tool that must be called, "" for any of them; None when none must."""
    match choice:
        case str("auto" | "none"):
            return None
        case str("required"):
            name = ""
        case {"name": str(name)} | {"function": {"name": str(name)}}:
            pass
        case _:
            raise InvalidInput(
                f"tool_choice is {short_repr(choice)}; it must be 'auto', 'required', 'none' or {{'name': …}} of a tool"
            )
    if not tools:
        raise InvalidInput(f"tool_choice is {short_repr(choice)}, and there are no tools; give some in tools=")
    if name and name not in tools.names:
        raise InvalidInput(
            f"tool_choice names {short_repr(name)}, and there is no such tool; there are {', '.join(tools.names)}"
        )
    return name
