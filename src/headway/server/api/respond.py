"""Turns a request into a response: admits it, runs its job, and sends the result whole or as a stream.

A `ResponseJob` defines what to compute and the format of the response; admission and errors are handled here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from headway.base.dataclass import dataclass
from headway.program.context import Context
from headway.server import logs
from headway.server.api.request_schema import GenerationRequest
from headway.server.api.streaming import EventStreamResponse, Put, event, json_bytes, json_bytes_in_pieces, relay
from headway.server.errors import FAILED, ApiError, as_api_error, bad_request, error_event
from headway.server.models import ModelLease
from headway.server.serving import AdmittedRequest, Serving
from headway.server.threads import WorkerThreads

DONE = b"data: [DONE]\n\n"
INLINE_LOGPROBS = 2048  # at most this many are serialized on the event loop, in a few milliseconds
Shape = Callable[[dict[str, Any]], dict[str, Any]]
FINISH_REASONS = {"eos": "stop", "stop": "stop", "constraint": "stop", "one_call": "stop", "length": "length"}


@dataclass
class TokenUsage:
    """Tokens of a request: its prompts, how many of them were in the prefix cache, and its completions."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    queue_seconds: float | None = None  # that its first context waited for a step

    def add_context(self, context: Context) -> None:
        """Add what one of its contexts found in the prefix cache, and how long it waited."""
        self.cached += context.cached_tokens
        waited = [one for one in (self.queue_seconds, context._queue_seconds) if one is not None]
        self.queue_seconds = min(waited, default=None)

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class ResponseJob(Protocol):
    """What one request computes and the format of its response. Deltas are whatever `run` puts."""

    id_prefix: str  # of the response's id
    object: str  # the response's `object`
    chunk_object: str  # the `object` of a stream's chunks
    last_event: bytes  # of a stream
    usage: TokenUsage

    async def run(self, put: Put[Any]) -> None:
        """Compute, and put deltas as they come."""
        ...

    def add(self, delta: Any, admitted: AdmittedRequest) -> None:
        """Add a delta to the whole response, and count its tokens."""
        ...

    def response(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole response, without the fields that all responses have; a list is several of them."""
        ...

    def chunks(self, delta: Any) -> Iterable[dict[str, Any]]:
        """A stream's chunks for a delta."""
        ...

    @property
    def response_size(self) -> int:
        """How many log-probabilities `response` has."""
        ...

    def chunk_size(self, deltas: Iterable[Any]) -> int:
        """How many log-probabilities the chunks of these deltas have."""
        ...


async def respond(
    serving: Serving,
    request: Request,
    body: GenerationRequest,
    job: ResponseJob,
    *,
    tokens: int,
    lease: ModelLease,
    shape: Shape = dict,
) -> Response:
    """Respond to a request that computes at most `tokens`. An error before the first event sets the status.

    `shape` makes what is sent of each response and of each chunk.
    """
    async with AsyncExitStack() as stack:
        admitted = await stack.enter_async_context(serving.admit(serving.tenant(request), tokens=tokens, lease=lease))
        admitted.prompt(job.usage.prompt)
        head = {
            "id": f"{job.id_prefix}-{admitted.request_id}",
            "created": int(time.time()),
            "model": lease.name,
        }
        batches = await stack.enter_async_context(relay(job.run))
        if not body.stream:
            async for batch in batches:
                for delta in batch:
                    job.add(delta, admitted)
            admitted.computed(cached=job.usage.cached, queue_seconds=job.usage.queue_seconds)
            return Response(await _whole_body(job, head, serving.writers, shape), media_type="application/json")
        head["object"] = job.chunk_object
        if body.stream_options is not None and body.stream_options.include_usage:
            head["usage"] = None
        first = await anext(batches, [])
        return EventStreamResponse(
            _event_pieces(serving, job, admitted, head=head, first=first, rest=batches, shape=shape), stack.pop_all()
        )
    raise AssertionError("the stack suppresses no exception")


async def _whole_body(job: ResponseJob, head: dict[str, Any], threads: WorkerThreads, shape: Shape) -> bytes:
    """The body of a whole response; a large one is serialized in a thread."""

    def fields() -> dict[str, Any] | list[dict[str, Any]]:
        own, response = head | {"object": job.object}, job.response()
        if isinstance(response, list):
            return [shape(own | one) for one in response]
        return shape(own | response | {"usage": job.usage.fields()})

    if job.response_size <= INLINE_LOGPROBS:
        return json_bytes(fields())
    return await threads.run(lambda: json_bytes_in_pieces(fields()))


async def _event_pieces(
    serving: Serving,
    job: ResponseJob,
    admitted: AdmittedRequest,
    *,
    head: dict[str, Any],
    first: list[Any],
    rest: AsyncIterator[list[Any]],
    shape: Shape,
) -> AsyncIterator[bytes]:
    """The events of a stream, one piece for all that are ready. An error ends it, as the last event."""
    batch: list[Any] | None = first
    try:
        while batch is not None:
            for delta in batch:
                job.add(delta, admitted)
            if job.chunk_size(batch) <= INLINE_LOGPROBS:
                piece = _events(job, head, batch, shape)
            else:
                piece = await serving.writers.run(_events, job, head, batch, shape, json_bytes_in_pieces)
            if piece:
                yield piece
            batch = await anext(rest, None)
    except Exception as error:
        admitted.fail(error)
        yield error_event(client_error(error, log_text=serving.settings.log_prompts))
        return
    admitted.computed(cached=job.usage.cached, queue_seconds=job.usage.queue_seconds)
    if "usage" in head:
        yield event(head | {"choices": [], "usage": job.usage.fields()}, json_bytes)
    if job.last_event:
        yield job.last_event


def _events(
    job: ResponseJob,
    head: dict[str, Any],
    batch: list[Any],
    shape: Shape,
    pack: Callable[[Any], bytes] = json_bytes,
) -> bytes:
    return b"".join(event(shape(head | chunk), pack) for delta in batch for chunk in job.chunks(delta))


def client_error(error: Exception, *, log_text: bool) -> ApiError:
    """What a client is told about an error in the middle of a stream; one of ours is logged."""
    known = as_api_error(error)
    if known is None or known.status == 500:
        logs.failure("a stream failed", error, with_text=log_text)
    return known or ApiError(500, FAILED)


def check_stream_options(body: GenerationRequest) -> None:
    """Raise if stream_options are set without stream."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options require stream: true; set it, or remove them", "stream_options")
