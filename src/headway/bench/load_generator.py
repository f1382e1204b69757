"""Completion requests, sent with a concurrency limit or at a rate, and the times at which their tokens arrived.

Terms as in other serving benchmarks: time to first token (TTFT) runs from sending a request to its first event; time
per output token (TPOT) is the rest of a request divided by its other tokens; inter-token latency (ITL) is the time
between two consecutive events; end-to-end latency (E2EL) is the whole request.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from itertools import pairwise
from typing import Any

import h11

from headway.base.dataclass import dataclass
from headway.bench.http_client import HttpClient, HttpResponse

PATH = "/v1/completions"


@dataclass(frozen=True)
class LoadRequest:
    """A prompt of token ids, and how many tokens to generate."""

    prompt: tuple[int, ...]
    tokens: int
    stream: bool = True
    model: str | None = None
    temperature: float = 0.0

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": self.temperature}
        body |= {"ignore_eos": True} | ({} if self.model is None else {"model": self.model})
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})


@dataclass
class RequestResult:
    """One request's tokens, times (of `time.perf_counter`) and error."""

    began: float
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    events: list[float] = field(default_factory=list)  # when each event with text arrived
    status: int | None = None
    error: str | None = None

    @property
    def latency(self) -> float:
        return self.ended - self.began

    @property
    def first(self) -> float | None:
        """Seconds to the first token."""
        return self.events[0] - self.began if self.events else None

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first."""
        return (self.ended - self.events[0]) / (self.tokens - 1) if self.events and self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in pairwise(self.events)]


@dataclass(frozen=True)
class ArrivalPattern:
    """When requests are sent: at most `concurrency` at a time, at `rate` per second on average (Poisson)."""

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class LoadResult:
    """The results of all requests."""

    results: list[RequestResult]
    seconds: float
    peak: int  # most requests in flight at once


async def send(client: HttpClient, request: LoadRequest) -> RequestResult:
    """Send one request and read its response to the end."""
    result = RequestResult(time.perf_counter())
    try:
        async with client.request("POST", PATH, request.body()) as response:
            result.status = response.status
            if response.status != 200:
                result.error = error_message(response.status, await response.body())
            elif request.stream:
                await _read_stream(response, result)
            else:
                _count(json.loads(await response.body())["usage"], result)
    except (OSError, EOFError, ValueError, KeyError, h11.ProtocolError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.ended = time.perf_counter()
    return result


async def _read_stream(response: HttpResponse, result: RequestResult) -> None:
    done = False
    async for data in response.events():
        if data == "[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            result.error = str(event["error"].get("message"))
        if event.get("choices"):
            result.events.append(time.perf_counter())
        if event.get("usage"):
            _count(event["usage"], result)
    if not done and result.error is None:
        result.error = "the stream ended without [DONE]"


def _count(usage: dict[str, Any], result: RequestResult) -> None:
    result.prompt_tokens, result.tokens = usage["prompt_tokens"], usage["completion_tokens"]


def error_message(status: int, body: bytes) -> str:
    """The status and message of a server's error response."""
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"


async def run_load(
    client: HttpClient,
    requests: Sequence[LoadRequest],
    pattern: ArrivalPattern,
    tick: Callable[[RequestResult], None] = lambda _: None,
) -> LoadResult:
    """Send all requests in a pattern and wait for them; `tick` is called with each result."""
    slots = asyncio.Semaphore(pattern.concurrency or len(requests))
    rng = random.Random(pattern.seed)
    in_flight = peak = 0

    async def one(request: LoadRequest) -> RequestResult:
        nonlocal in_flight, peak
        async with slots:
            in_flight += 1
            peak = max(peak, in_flight)
            result = await send(client, request)
            in_flight -= 1
        tick(result)
        return result

    began, tasks, due = time.perf_counter(), [], 0.0
    for request in requests:
        tasks.append(asyncio.create_task(one(request)))
        if pattern.rate is not None:
            due += rng.expovariate(pattern.rate)
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
    results = await asyncio.gather(*tasks)
    return LoadResult(results, time.perf_counter() - began, peak)
