"""Turns a request into a response: admits it, runs its job, and sends the result whole or as a stream.

A `ResponseJob` defines what to compute and the format of the response; admission and errors are handled here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from headway.server import logs
from headway.server.adapters import ServedAdapter
from headway.server.errors import FAILED, ApiError, as_api_error, bad_request, error_event
from headway.server.openai.request_schema import GenerationRequest
from headway.server.openai.streaming import (
    EventStreamResponse,
    Put,
    event,
    json_bytes,
    json_bytes_in_pieces,
    relay,
)
from headway.server.serving import AdmittedRequest, Serving
from headway.server.threads import WorkerThreads

DONE = b"data: [DONE]\n\n"
INLINE_LOGPROBS = 2048  # at most this many are serialized on the event loop, in a few milliseconds
FINISH_REASONS = {"eos": "stop", "stop": "stop", "constraint": "stop", "one_call": "stop", "length": "length"}


@dataclass
class TokenUsage:
    """Tokens of a request: its prompts, how many of them were in the prefix cache, and its completions."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

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
    usage: TokenUsage

    async def run(self, put: Put[Any]) -> None:
        """Compute, and put deltas as they come."""
        ...

    def add(self, delta: Any, admitted: AdmittedRequest) -> None:
        """Add a delta to the whole response, and count its tokens."""
        ...

    def response(self) -> dict[str, Any]:
        """The whole response, without the fields that all responses have."""
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
    model: str | None = None,
) -> Response:
    """Respond to a request that computes at most `tokens`. An error before the first event sets the status.

    `model` is the name of the adapter it was for, if any.
    """
    async with AsyncExitStack() as stack:
        admitted = await stack.enter_async_context(serving.admit(serving.tenant(request), tokens=tokens, model=model))
        admitted.prompt(job.usage.prompt)
        head = {
            "id": f"{job.id_prefix}-{admitted.request_id}",
            "created": int(time.time()),
            "model": model or serving.model_name,
        }
        batches = await stack.enter_async_context(relay(job.run))
        if not body.stream:
            async for batch in batches:
                for delta in batch:
                    job.add(delta, admitted)
            admitted.cached(job.usage.cached)
            return Response(await _whole_body(job, head, serving.writers), media_type="application/json")
        head["object"] = job.chunk_object
        if body.stream_options is not None and body.stream_options.include_usage:
            head["usage"] = None
        first = await anext(batches, [])
        return EventStreamResponse(
            _event_pieces(serving, job, admitted, head=head, first=first, rest=batches), stack.pop_all()
        )
    raise AssertionError("the stack suppresses no exception")


async def _whole_body(job: ResponseJob, head: dict[str, Any], threads: WorkerThreads) -> bytes:
    """The body of a whole response; a large one is serialized in a thread."""

    def fields() -> dict[str, Any]:
        return head | {"object": job.object} | job.response() | {"usage": job.usage.fields()}

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
) -> AsyncIterator[bytes]:
    """The events of a stream, one piece for all that are ready. An error ends it, as the last event."""
    batch: list[Any] | None = first
    try:
        while batch is not None:
            for delta in batch:
                job.add(delta, admitted)
            if job.chunk_size(batch) <= INLINE_LOGPROBS:
                piece = _events(job, head, batch)
            else:
                piece = await serving.writers.run(_events, job, head, batch, json_bytes_in_pieces)
            if piece:
                yield piece
            batch = await anext(rest, None)
    except Exception as error:
        admitted.finish("error")
        yield error_event(client_error(error, log_text=serving.settings.log_prompts))
        return
    admitted.cached(job.usage.cached)
    if "usage" in head:
        yield event(head | {"choices": [], "usage": job.usage.fields()}, json_bytes)
    yield DONE


def _events(
    job: ResponseJob, head: dict[str, Any], batch: list[Any], pack: Callable[[Any], bytes] = json_bytes
) -> bytes:
    return b"".join(event(head | chunk, pack) for delta in batch for chunk in job.chunks(delta))


def client_error(error: Exception, *, log_text: bool) -> ApiError:
    """What a client is told about an error in the middle of a stream; one of ours is logged."""
    known = as_api_error(error)
    if known is None or known.status == 500:
        logs.failure("a stream failed", error, with_text=log_text)
    return known or ApiError(500, FAILED)


def requested_adapter(serving: Serving, name: str | None) -> ServedAdapter | None:
    """The adapter with this name; None for the model itself. Raises a 404 for any other name."""
    if name is not None and (adapter := serving.adapters.names.get(name)) is not None:
        return adapter
    check_model(serving, name)
    return None


def check_model(serving: Serving, name: str | None) -> None:
    """Raise a 404 unless the name is one of the served model's, or None."""
    names = serving.model_names()
    if name is None or name in names or name == serving.settings.model:
        return
    names += tuple(serving.adapters.names)
    raise ApiError(
        404,
        f"model {name!r:.80} does not exist; this server has {', '.join(map(repr, names))}",
        param="model",
        code="model_not_found",
    )


def check_stream_options(body: GenerationRequest) -> None:
    """Raise if stream_options are set without stream."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options require stream: true; set it, or remove them", "stream_options")
