"""A remote chat reply: the server writes the messages, and the program's tools run here, where it awaits the reply.

Each part costs a round trip; `await reply.text()` is one, and one more for each call of a tool.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from headway.base.errors import DeadlineExceeded, ToolFailed, WrongType
from headway.base.specs.samplers import Sampler
from headway.base.text import short_repr
from headway.program.chat.limits import ChatLimits
from headway.program.chat.tools import ToolResult, ToolSet
from headway.program.generation.stops import read_stops
from headway.remote.connection.asking import Asking
from headway.remote.forward import adapter_list
from headway.remote.protocol.values import spec_json
from headway.text.replies import parts as kinds
from headway.text.replies.parts import BadToolCall, Part, ToolCall

if TYPE_CHECKING:
    from headway.remote.context import RemoteContext

PARTS = {
    kind.__name__: kind
    for kind in (
        kinds.Content,
        kinds.Reasoning,
        kinds.ToolCallStart,
        kinds.ToolCallArguments,
        kinds.ToolCallEnd,
        kinds.BadToolCall,
    )
}


class RemoteChatReply:
    """A reply as it arrives: an async iterator of parts. `await reply.text()` runs it to its end. See `ChatReply`."""

    def __init__(
        self, context: RemoteContext, messages: Any, sampler: Sampler | None, limits: ChatLimits, **options: Any
    ) -> None:
        engine, self._context, self.limits = context.engine, context, limits
        if sampler is not None and not isinstance(sampler, Sampler):
            raise WrongType(f"{short_repr(sampler)} is not a sampler; use one of Argmax(), TopP(0.9), Sampling(...)")
        tools = options.pop("tools")
        self._tools = ToolSet(() if tools is None else tools)
        self._failures: dict[int, BaseException] = {}  # what tools raised, by the number of the call
        self._parts: deque[Part | ToolResult] = deque()
        self._deadline: float | None = None
        number = engine._new_number()
        self._asking = Asking(engine, number, "chat")
        strings, ids = read_stops(options["stop"], engine, only=True)
        options |= {"stop": [*strings, *sorted(ids)], "adapter": adapter_list(options["adapter"])}
        context._settle()
        self._note(
            self._asking.now(
                self,
                "new",
                context=context._number,
                messages=_plain(messages),
                sampler=None if sampler is None else spec_json(sampler),
                tools=None
                if tools is None
                else [[self._tools.get(n).schema, self._runs(n)] for n in self._tools.names],
                max_tokens=limits.max_tokens,
                max_rounds=limits.max_rounds,
                **options,
            )
        )
        weakref.finalize(self, engine._connection.tell_later, "chat.drop", chat=number)

    def __repr__(self) -> str:
        shown = len(self.content), len(self.calls), self.rounds
        state = "running" if self.finish is None else f"finish={self.finish!r}"
        return "<ChatReply: {} characters, {} calls in {} rounds, {}>".format(*shown, state)

    # -- reading -----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Part | ToolResult]:
        return self

    async def __anext__(self) -> Part | ToolResult:
        while not self._parts:
            if self.finish is not None:
                raise StopAsyncIteration
            await self._bounded("next")
        return self._parts.popleft()

    async def text(self) -> str:
        """Run to the end; the content of the last message."""
        self._parts.clear()
        if self.finish is None:
            await self._bounded("text")
        return self.content

    @property
    def content(self) -> str:
        """The content of the message being written, or of the last one."""
        return self._asking.now(self, "state")["content"]

    @property
    def reasoning(self) -> str:
        """The reasoning so far, of all rounds."""
        return self._asking.now(self, "state")["reasoning"]

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _bounded(self, verb: str) -> None:
        """Ask within the time limit; an error takes the whole reply back."""
        if self._deadline is None and self.limits.timeout is not None:
            self._deadline = asyncio.get_running_loop().time() + self.limits.timeout
        scope = asyncio.timeout_at(self._deadline)
        try:
            async with scope:
                self._note(await self._asking.wait(self, verb))
        except BaseException as error:
            self.finish = "failed"
            if isinstance(error, TimeoutError) and scope.expired():
                raise DeadlineExceeded(
                    f"the reply took longer than timeout={self.limits.timeout:g} seconds; the context is as it was"
                ) from error
            if isinstance(error, ToolFailed) and self._failures:
                raise error from self._failures[max(self._failures)]
            raise

    def _note(self, state: Mapping[str, Any]) -> None:
        self.finish: str | None = state["finish"]
        self.rounds: int = state["rounds"]
        self.bad = tuple(BadToolCall(**bad) for bad in state["bad"])
        self.calls: list[ToolResult | ToolCall] = [self._call_of(call) for call in state["calls"]]
        self._parts += [self._part_of(part) for part in state["parts"]]

    def _part_of(self, part: Mapping[str, Any]) -> Part | ToolResult:
        values = {name: value for name, value in part.items() if name != "kind"}
        return PARTS[part["kind"]](**values) if part["kind"] in PARTS else self._result_of(part)

    def _call_of(self, call: Mapping[str, Any]) -> ToolResult | ToolCall:
        return self._result_of(call) if "call" in call else ToolCall(**call)

    def _result_of(self, result: Mapping[str, Any]) -> ToolResult:
        failed = result["failed"]
        return ToolResult(
            ToolCall(**result["call"]), result["text"], None if failed is None else self._failures[failed]
        )

    # -- tools -------------------------------------------------------------------------------------------------------

    def _runs(self, name: str) -> bool:
        return self._tools.get(name).function is not None

    async def _run(self, number: int, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Make a call for the server: the text for the model, whether it failed, whether the call itself was wrong."""
        outcome = await self._tools.run(ToolCall(name, arguments), self.limits.tool_timeout)
        if outcome.error is not None:
            self._failures[number] = outcome.error
        return [outcome.text, outcome.error is not None, outcome.misused]


def _plain(messages: Any) -> Any:
    """Messages as lists and dicts."""
    if isinstance(messages, Mapping):
        return dict(messages)
    return [_plain(one) for one in messages] if isinstance(messages, list | tuple) else messages
