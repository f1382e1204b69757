"""A request becomes an answer: admitted, worked on, and given whole or as a stream. The same for every route.

A `Job` knows what to compute and how its answer looks; who may when, and who is told what, is decided here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from headway.server import access_log as logs
from headway.server.errors import FAILED, ApiError, as_api_error, bad_request, error_body
from headway.server.openai.request_schema import Knobs
from headway.server.openai.streaming import EventStream, Put, event, packed, packed_in_pieces, relayed
from headway.server.serving import Serving, Ticket
from headway.server.threads import Threads

DONE = b"data: [DONE]\n\n"
LIGHT = 2048  # log-probabilities that the event loop writes itself, in some milliseconds
REASONS = {"eos": "stop", "stop": "stop", "constraint": "stop", "enough": "stop", "length": "length"}


@dataclass
class Usage:
    """Tokens of a request: its prompts, those of them that the prefix cache had, and its answers."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def wire(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Job(Protocol):
    """One request's work and the shapes of its answer. Deltas are whatever `work` puts."""

    prefix: str  # of its id
    kind: str  # what its answer is called
    chunk_kind: str  # the same of a chunk of a stream
    usage: Usage

    async def work(self, put: Put[Any]) -> None:
        """Compute, and put what comes."""
        ...

    def take(self, delta: Any, ticket: Ticket) -> None:
        """Keep a delta for the whole answer, and count it."""
        ...

    def answer(self) -> dict[str, Any]:
        """The whole answer, without the fields that every answer has."""
        ...

    def chunks(self, delta: Any) -> Iterable[dict[str, Any]]:
        """What a stream says about a delta."""
        ...

    @property
    def whole_weight(self) -> int:
        """How many log-probabilities `answer` has."""
        ...

    def weight(self, deltas: Iterable[Any]) -> int:
        """How many log-probabilities the chunks of these have."""
        ...


async def respond(serving: Serving, request: Request, asked: Knobs, job: Job, *, tokens: int) -> Response:
    """Answer a request that may compute so many tokens. What fails before the first event has its own status."""
    async with AsyncExitStack() as stack:
        ticket = await stack.enter_async_context(serving.admit(serving.tenant(request), tokens=tokens))
        ticket.prompt(job.usage.prompt)
        head = {"id": f"{job.prefix}-{ticket.request_id}", "created": int(time.time()), "model": serving.model_name}
        batches = await stack.enter_async_context(relayed(job.work))
        if not asked.stream:
            async for batch in batches:
                for delta in batch:
                    job.take(delta, ticket)
            return Response(await _whole(job, head, serving.writing), media_type="application/json")
        head["object"] = job.chunk_kind
        if asked.stream_options is not None and asked.stream_options.include_usage:
            head["usage"] = None
        first = await anext(batches, [])
        return EventStream(_pieces(serving, job, ticket, head=head, first=first, rest=batches), stack.pop_all())
    raise AssertionError("the stack swallows nothing")


async def _whole(job: Job, head: dict[str, Any], threads: Threads) -> bytes:
    """The whole answer; a large one is put together beside the event loop."""

    def made() -> dict[str, Any]:
        return head | {"object": job.kind} | job.answer() | {"usage": job.usage.wire()}

    if job.whole_weight <= LIGHT:
        return packed(made())
    return await threads.run(lambda: packed_in_pieces(made()))


async def _pieces(
    serving: Serving,
    job: Job,
    ticket: Ticket,
    *,
    head: dict[str, Any],
    first: list[Any],
    rest: AsyncIterator[list[Any]],
) -> AsyncIterator[bytes]:
    """The events of a stream, in one piece for all that is there. An error ends it, as an event of its own."""
    batch: list[Any] | None = first
    try:
        while batch is not None:
            for delta in batch:
                job.take(delta, ticket)
            if job.weight(batch) <= LIGHT:
                piece = _events(job, head, batch)
            else:
                piece = await serving.writing.run(_events, job, head, batch, packed_in_pieces)
            if piece:
                yield piece
            batch = await anext(rest, None)
    except Exception as error:
        ticket.finish("error")
        yield b"data: " + error_body(_known(error, log_text=serving.settings.log_prompts)) + b"\n\n"
        return
    if "usage" in head:
        yield event(head | {"choices": [], "usage": job.usage.wire()}, packed)
    yield DONE


def _events(job: Job, head: dict[str, Any], batch: list[Any], pack: Callable[[Any], bytes] = packed) -> bytes:
    return b"".join(event(head | chunk, pack) for delta in batch for chunk in job.chunks(delta))


def _known(error: Exception, *, log_text: bool) -> ApiError:
    known = as_api_error(error)
    if known is None or known.status == 500:
        logs.failure("a stream failed", error, with_text=log_text)
    return known or ApiError(500, FAILED)


def check_model(serving: Serving, name: str | None) -> None:
    """Raise a 404 unless a request means the model that is served; one that names none does."""
    names = serving.model_names()
    if name is None or name in names or name == serving.settings.model:
        return
    raise ApiError(
        404,
        f"there is no model {name!r:.80} here; this server has {', '.join(map(repr, names))}",
        param="model",
        code="model_not_found",
    )


def check_stream(asked: Knobs) -> None:
    """Raise where stream_options stand beside no stream."""
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("stream_options were given without stream; leave them out, or stream", "stream_options")
