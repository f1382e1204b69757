"""The server's own tool loop: it makes the calls of MCP tools that a message has, and the model goes on with what they
return, within the limits of rounds, calls, seconds and bytes.

    message ──▶ calls ──▶ results ──▶ message … until one has no calls, or only calls that the client makes itself

All rounds are one response, in one context: what was computed stays. A call that fails is told to the model. A response
that wants more calls than are allowed ends as incomplete. One that wants a call which needs an approval ends as if the
client made that call; the response that continues it begins with the calls that were approved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.program.context import Context
from headway.server import logs
from headway.server.api.request_schema import ChatMessage
from headway.server.api.streaming import Put
from headway.server.chats.message_job import MessageEnd, MessageJob, refill
from headway.server.chats.message_stream import MessageDelta, MessageStream
from headway.server.chats.plan import ChatPlan, plan_chat
from headway.server.keys import Tenant
from headway.server.mcp.messages import McpError
from headway.server.models import ModelLease
from headway.server.responses.items import chat_messages, chat_request
from headway.server.responses.mcp_tools import OfferedTools, mcp_error
from headway.server.responses.output import TOOL_LIMIT, ApprovedCall, McpResult, RoundDelta, mcp_item_id
from headway.server.responses.request_schema import InputItem, PromptRequest, ResponseRequest
from headway.server.serving import AdmittedRequest, Serving
from headway.text.replies.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from headway.text.tool_arguments import check_arguments


@dataclass(eq=False)
class _Call:
    """A call that a message has."""

    name: str
    number: int | None  # among the MCP calls of the response; None: the client makes it, or must approve it
    pieces: list[str] = field(default_factory=list)
    arguments: Mapping[str, Any] | None = None  # once it is complete


@dataclass(eq=False)
class _Message:
    """One message: its texts and its calls, in order."""

    parts: list[Content | Reasoning | _Call] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)  # by their index
    finish: str = "stop"

    @property
    def is_for_client(self) -> bool:
        return any(call.number is None for call in self.calls.values())


class ToolLoop:
    """What the rounds of one response have in common: the tools, the conversation so far, and what is left."""

    def __init__(
        self,
        body: ResponseRequest,
        earlier: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        offered: OfferedTools,
        *,
        approved: Sequence[ApprovedCall] = (),
        serving: Serving,
        tenant: Tenant,
        lease: ModelLease,
    ) -> None:
        self._body, self._earlier, self._new, self.offered = body, tuple(earlier), tuple(new), offered
        self._serving, self._tenant, self._lease = serving, tenant, lease
        limits = serving.settings
        self._rounds, self._seconds, self._bytes = (
            limits.max_tool_rounds,
            limits.max_tool_seconds,
            limits.max_tool_output,
        )
        self._calls = min(limits.max_tool_calls, body.max_tool_calls or limits.max_tool_calls)
        self._items: list[InputItem] = []
        self.approved = tuple(approved)

    async def first_plan(self) -> ChatPlan:
        """The plan of the first message, as if approved calls had no output yet; the tools' sessions end if there is
        none."""
        try:
            for call in self.approved:
                self.offered.model_name(call)
            self._items = [approved_item(call, McpResult(0, "")) for call in self.approved]
            plan = await self._plan(self._body)
        except BaseException:
            self.offered.close()
            raise
        return replace(plan, later_tokens=self._serving.settings.max_tool_output)

    async def call_approved(self, call: ApprovedCall, number: int) -> McpResult:
        """Make a call that was approved, and add it to the conversation."""
        parsed = _Call(self.offered.model_name(call), number, [call.arguments], json.loads(call.arguments or "{}"))
        result = await self.call(parsed) if not self.is_spent else self.refusal(number)
        self._items[number] = approved_item(call, result)
        return result

    def refusal(self, number: int) -> McpResult:
        """The result of a call that is one too many."""
        limit = McpError("it was not called: the limit of rounds, calls or seconds of a response is reached")
        return McpResult(number, error=mcp_error(limit))

    async def approved_plan(self) -> ChatPlan:
        """The plan of the first message again, with the outputs of approved calls."""
        return await self._plan(self._body)

    async def next_plan(self, max_tokens: int | None) -> ChatPlan:
        """The plan of the next message, which may call tools and need not."""
        forced = self._body.tool_choice not in (None, "auto", "none")
        changes = {"max_output_tokens": max_tokens} | ({"tool_choice": "auto"} if forced else {})
        return await self._plan(self._body.model_copy(update=changes))

    async def _plan(self, body: PromptRequest) -> ChatPlan:
        before = (*self._earlier, *self._new)
        new = (*self._new, *chat_messages(self._items, before)) if self._items else self._new
        chat = chat_request(body, self._earlier, new, self.offered.definitions)
        return await plan_chat(chat, self._serving, self._tenant, self._lease)

    @property
    def max_output_tokens(self) -> int | None:
        return self._body.max_output_tokens

    @property
    def is_spent(self) -> bool:
        """Whether no more calls may be made."""
        return self._calls <= 0 or self._rounds <= 0 or self._seconds <= 0

    def end_round(self, message: _Message, results: Mapping[int, McpResult], response_id: str) -> None:
        """Add a message and the results of its calls to the conversation."""
        self._rounds -= 1
        for part in message.parts:
            match part:
                case Content(text):
                    self._items.append(InputItem(type="message", role="assistant", content=text))
                case Reasoning(text):
                    piece = {"type": "reasoning_text", "text": text}
                    self._items.append(InputItem.model_validate({"type": "reasoning", "content": [piece]}))
                case _Call(number=int(number)) if number in results:
                    self._items.append(self._item(part, results[number], mcp_item_id(response_id, number)))

    def _item(self, call: _Call, result: McpResult, id: str) -> InputItem:
        session, tool = self.offered.tools[call.name]
        return InputItem(
            type="mcp_call",
            id=id,
            server_label=session.label,
            name=tool.name,
            arguments="".join(call.pieces),
            output=result.output,
            error=None if result.error is None else dict(result.error),
        )

    async def call(self, call: _Call) -> McpResult:
        """Make a call; what goes wrong is its result."""
        assert call.number is not None
        assert call.arguments is not None
        session, tool = self.offered.tools[call.name]
        self._calls -= 1
        begun = time.monotonic()
        output, error = None, None
        try:
            await self._serving.readers.run(check_arguments, tool.schema, dict(call.arguments))
            output = await session.call(tool.name, call.arguments, self._seconds, self._bytes)
        except (McpError, InvalidInput) as failure:
            error = mcp_error(failure)
        seconds = time.monotonic() - begun
        self._seconds -= seconds
        if output is not None:
            self._bytes -= len(output.text.encode())
            if output.failed:
                error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": output.text}]}
        logs.info("mcp call", server=session.label, tool=tool.name, ms=round(seconds * 1e3), failed=error is not None)
        return McpResult(call.number, None if error is not None or output is None else output.text, error)


def approved_item(call: ApprovedCall, result: McpResult) -> InputItem:
    """An approved call and its result, as an item of the conversation."""
    return InputItem(
        type="mcp_call",
        id=call.request_id,
        server_label=call.label,
        name=call.name,
        arguments=call.arguments,
        output=result.output,
        error=None if result.error is None else dict(result.error),
        approval_request_id=call.request_id,
    )


class ToolLoopJob(MessageJob):
    """The generation of a response whose MCP calls the server makes."""

    def __init__(
        self,
        plan: ChatPlan,
        loop: ToolLoop,
        response_id: str,
        *,
        warm: Callable[[], Context | None],
        keeps: bool,
    ) -> None:
        super().__init__(plan, warm=warm, keeps=keeps)
        self._loop, self._response_id = loop, response_id
        self._made = len(loop.approved)  # MCP calls so far
        self._is_limited = False

    async def run(self, put: Put[MessageDelta]) -> None:
        plan, context = self._plan, self._context()
        try:
            if self._loop.approved:
                plan = await self._call_approved(context, put)
            while True:
                stream = MessageStream(plan.request, plan.prompt, plan.policy, context, 0)
                message = await self._write(stream, put)
                self.usage.completion += stream.count
                self._stop_string = stream.stop_string
                results = await self._call_all(message, put)
                if results and self._left == 0:
                    message.finish = "length"
                if not results or message.is_for_client or self._is_limited or message.finish == "length":
                    break
                self._loop.end_round(message, results, self._response_id)
                plan = await self._loop.next_plan(self._left)
                self.usage.cached += refill(context, plan.prompt.ids)
                self.usage.prompt += len(plan.prompt.ids)
                await put(RoundDelta(prompt=len(plan.prompt.ids)))
            await put(MessageDelta(finish=message.finish))
            self.usage.add_context(context)
            if self._keeps:
                self._kept, context = context, None
        finally:
            self._loop.offered.close()
            if context is not None:
                context.release()

    async def _call_approved(self, context: Context, put: Put[MessageDelta]) -> ChatPlan:
        """Make the calls that were approved; the plan of the message after them, whose prompt the context gets."""
        for number, call in enumerate(self._loop.approved):
            await put(RoundDelta(results=[await self._loop.call_approved(call, number)]))
        plan, before = await self._loop.approved_plan(), self.usage.prompt
        self.usage.prompt, self.usage.cached = len(plan.prompt.ids), refill(context, plan.prompt.ids)
        await put(RoundDelta(prompt=max(0, self.usage.prompt - before)))
        return plan

    def count(self, delta: MessageDelta, admitted: AdmittedRequest) -> None:
        super().count(delta, admitted)
        if isinstance(delta, RoundDelta) and delta.prompt:
            admitted.prompt(delta.prompt)

    @property
    def ended(self) -> MessageEnd:
        end = super().ended
        return replace(end, finish=TOOL_LIMIT) if self._is_limited else end

    @property
    def _left(self) -> int | None:
        """The tokens that are left for the next message; None: as many as there are positions."""
        limit = self._loop.max_output_tokens
        return None if limit is None else max(0, limit - self.usage.completion)

    async def _write(self, stream: MessageStream, put: Put[MessageDelta]) -> _Message:
        """Generate one message; its finish reason is kept for the last one."""
        message = _Message()
        async for delta in stream.deltas():
            for part in delta.parts:
                self._collect(part, message)
            message.finish = delta.finish or message.finish
            if delta.parts or delta.tokens or delta.new:
                await put(MessageDelta(delta.parts, delta.tokens, delta.new))
        return message

    def _collect(self, part: Part, message: _Message) -> None:
        last = message.parts[-1] if message.parts else None
        match part:
            case Content(text) if isinstance(last, Content):
                message.parts[-1] = Content(last.text + text)
            case Reasoning(text) if isinstance(last, Reasoning):
                message.parts[-1] = Reasoning(last.text + text)
            case Content() | Reasoning():
                message.parts.append(part)
            case ToolCallStart(index, name):
                is_mcp = name in self._loop.offered.tools and name not in self._loop.offered.asking
                message.calls[index] = _Call(name, self._made if is_mcp else None)
                self._made += is_mcp
                message.parts.append(message.calls[index])
            case ToolCallArguments(index, more):
                message.calls[index].pieces.append(more)
            case ToolCallEnd(index, arguments):
                message.calls[index].arguments = arguments

    async def _call_all(self, message: _Message, put: Put[MessageDelta]) -> dict[int, McpResult]:
        """Make the MCP calls of a message, one after the other."""
        results: dict[int, McpResult] = {}
        for call in message.calls.values():
            if call.number is None or call.arguments is None:
                continue
            if self._loop.is_spent:
                self._is_limited = True
                results[call.number] = self._loop.refusal(call.number)
            else:
                results[call.number] = await self._loop.call(call)
            await put(RoundDelta(results=[results[call.number]]))
        return results
