"""One generated message as a response, in the format of any API: what Responses, Messages and Ollama share.

    ChatPlan ──▶ MessageJob.run ──▶ MessageDelta … ──▶ MessageFormat ──▶ bytes

The job computes and counts; a `MessageFormat` only writes. Whole responses and streams take the same way: a format
adds up what it writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, closing
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from headway.base.dataclass import dataclass
from headway.program.context import Context
from headway.server.api.respond import TokenUsage, client_error
from headway.server.api.streaming import EventStreamResponse, Put, json_bytes, json_bytes_in_pieces, relay
from headway.server.chats.message_stream import MessageDelta, MessageStream
from headway.server.chats.plan import ChatPlan
from headway.server.errors import ApiError
from headway.server.models import ModelLease
from headway.server.serving import AdmittedRequest, Serving
from headway.text.replies.parts import Reasoning


@dataclass
class MessageUsage(TokenUsage):
    """The tokens of one message; `reasoning` are those before its text or its first call."""

    reasoning: int = 0


@dataclass(frozen=True)
class MessageEnd:
    """Why a message ended: stop, length or tool_calls; and the stop string that ended it."""

    finish: str
    stop_string: str | None
    usage: MessageUsage


class MessageFormat(Protocol):
    """How an API writes a message. Called in order: `begin`, `add` for every delta, and `end` or `failed`.

    `end` may run in a thread, so it only writes.
    """

    media_type: str  # of a stream

    def begin(self) -> bytes:
        """The events before the first token."""
        ...

    def add(self, delta: MessageDelta) -> bytes:
        """The events of a delta, which is kept for the whole message too."""
        ...

    def end(self, end: MessageEnd) -> bytes:
        """The last events."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        ...

    def whole(self) -> dict[str, Any]:
        """The whole response, after `end`."""
        ...


class MessageJob:
    """The generation of one message, in a new context or in one that already holds a part of its prompt."""

    def __init__(
        self,
        plan: ChatPlan,
        *,
        warm: Callable[[], Context | None] = lambda: None,
        keeps: bool = False,
    ) -> None:
        """`warm` opens a context whose first tokens may be those of the prompt. A job that `keeps` its context has it
        until somebody takes it or the response ends."""
        self._plan, self._warm, self._keeps = plan, warm, keeps
        self._kept: Context | None = None
        self.on_end: Callable[[], None] = lambda: None  # called when the message is complete, before its last event
        self.usage = MessageUsage(prompt=len(plan.prompt.ids))
        self._finish: str = "stop"
        self._stop_string: str | None = None
        self._reasons, self._reasoned, self._before = True, False, 0  # no text yet; there is reasoning; its tokens

    async def run(self, put: Put[MessageDelta]) -> None:
        plan, context = self._plan, self._context()
        try:
            stream = MessageStream(plan.request, plan.prompt, plan.policy, context, 0)
            async for delta in stream.deltas():
                if delta.parts or delta.tokens or delta.new or delta.finish:
                    await put(delta)
            self.usage.completion = stream.count
            self.usage.add_context(context)
            self._stop_string = stream.stop_string
            if self._keeps:
                self._kept, context = context, None
        finally:
            if context is not None:
                context.release()

    @property
    def ranks(self) -> bool:
        """Whether the message has log-probabilities, so that writing all of it takes long."""
        return self._plan.request.top_logprobs is not None

    def take_context(self) -> Context | None:
        """The context, which holds the prompt and the message, for the caller to release; None if it was not kept."""
        kept, self._kept = self._kept, None
        return kept

    def close(self) -> None:
        """Release what was kept and not taken."""
        if (context := self.take_context()) is not None:
            context.release()

    def _context(self) -> Context:
        """A context with the prompt: of a warm one, the tokens that it shares with the prompt stay as they are."""
        ids, warm = self._plan.prompt.ids, self._warm()
        if warm is None:
            return self._plan.request.context().fill(ids)
        warm.set_bid(self._plan.request.priority)
        self.usage.cached = refill(warm, ids)
        return warm

    def count(self, delta: MessageDelta, admitted: AdmittedRequest) -> None:
        """Report a delta to the metrics and the log."""
        if delta.new > 0:
            admitted.tokens(delta.new)
        self._reasons = self._reasons and all(isinstance(part, Reasoning) for part in delta.parts)
        if self._reasons:
            self._before += delta.new
            self._reasoned = self._reasoned or bool(delta.parts)
        if delta.finish is not None:
            admitted.finish(delta.finish)
            self._finish = delta.finish

    @property
    def ended(self) -> MessageEnd:
        self.usage.reasoning = self._before if self._reasoned else 0
        return MessageEnd(self._finish, self._stop_string, self.usage)


def refill(context: Context, ids: Sequence[int]) -> int:
    """Make a context hold these tokens; returns how many of them it keeps."""
    held = context.tokens
    shared = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
    shared = min(shared, len(ids) - 1)
    context.truncate(len(held) - shared)
    kept = context.seq_len
    context.fill(ids[shared:])
    return kept


async def respond_message(
    serving: Serving,
    request: Request,
    plan: ChatPlan,
    job: MessageJob,
    format: MessageFormat,
    *,
    stream: bool,
    lease: ModelLease,
) -> Response:
    """The response to a request that was planned. An error before the first token sets the status."""
    tenant = serving.tenant(request)
    if not stream:
        async with serving.admit(tenant, tokens=plan.tokens, lease=lease) as admitted:
            await write_message(admitted, job, format)
        if not job.ranks:
            return Response(json_bytes(format.whole()), media_type="application/json")
        body = await serving.writers.run(lambda: json_bytes_in_pieces(format.whole()))
        return Response(body, media_type="application/json")
    async with AsyncExitStack() as stack:
        admitted = await stack.enter_async_context(serving.admit(tenant, tokens=plan.tokens, lease=lease))
        admitted.prompt(job.usage.prompt)
        stack.callback(job.close)
        batches = await stack.enter_async_context(relay(job.run))
        first = await anext(batches, [])
        pieces = _pieces(serving, job, format, admitted, first=first, rest=batches)
        return EventStreamResponse(pieces, stack.pop_all(), failed=format.failed, media_type=format.media_type)
    raise AssertionError("the stack suppresses no exception")


async def write_message(admitted: AdmittedRequest, job: MessageJob, format: MessageFormat) -> None:
    """Have the format write the whole message of a request that was admitted."""
    admitted.prompt(job.usage.prompt)
    format.begin()
    with closing(job):
        async with relay(job.run) as batches:
            async for batch in batches:
                for delta in batch:
                    job.count(delta, admitted)
                    format.add(delta)
        admitted.computed(cached=job.usage.cached, queue_seconds=job.usage.queue_seconds)
        format.end(job.ended)
        job.on_end()


async def _pieces(
    serving: Serving,
    job: MessageJob,
    format: MessageFormat,
    admitted: AdmittedRequest,
    *,
    first: list[MessageDelta],
    rest: AsyncIterator[list[MessageDelta]],
) -> AsyncIterator[bytes]:
    """The events of a stream, one piece for all that are ready. An error ends it, as the last event."""
    batch: list[MessageDelta] | None = first
    piece = format.begin()
    try:
        while batch is not None:
            for delta in batch:
                job.count(delta, admitted)
                piece += format.add(delta)
            if piece:
                yield piece
            batch, piece = await anext(rest, None), b""
    except Exception as error:
        admitted.fail(error)
        yield format.failed(client_error(error, log_text=serving.settings.log_prompts))
        return
    admitted.computed(cached=job.usage.cached, queue_seconds=job.usage.queue_seconds)
    last = await serving.writers.run(format.end, job.ended) if job.ranks else format.end(job.ended)
    job.on_end()
    yield last
