"""Requests for text, sent at a concurrency or at a rate, and when each of their tokens came.

Words as other servers' benchmarks use them: the time to the first token (TTFT) runs from sending a request to its first
event; the time per output token (TPOT) is the rest of a request over its other tokens; inter-token latency (ITL) is the
time between two events that follow one another; end-to-end latency (E2EL) is the whole.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import h11

from headway.bench.http_client import Answer, Client

PATH = "/v1/completions"


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of token ids, and how many tokens shall follow."""

    prompt: tuple[int, ...]
    tokens: int
    stream: bool = True
    model: str | None = None
    temperature: float = 0.0

    def body(self) -> dict[str, Any]:
        made: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": self.temperature}
        made |= {"ignore_eos": True} | ({} if self.model is None else {"model": self.model})
        return made | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})


@dataclass
class Outcome:
    """What became of a request; times are those of `time.perf_counter`."""

    began: float
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    events: list[float] = field(default_factory=list)  # when each event with text came
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
        """Seconds a token after the first."""
        return (self.ended - self.events[0]) / (self.tokens - 1) if self.events and self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in pairwise(self.events)]


@dataclass(frozen=True)
class Pace:
    """How requests are sent: so many at a time at most, and so many a second on average, as a Poisson process."""

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Traffic:
    """What was sent and what came back."""

    outcomes: list[Outcome]
    seconds: float
    peak: int  # requests that were under way at a time


async def send(client: Client, ask: Ask) -> Outcome:
    """One request, read to its end."""
    outcome = Outcome(time.perf_counter())
    try:
        async with client.ask("POST", PATH, ask.body()) as answer:
            outcome.status = answer.status
            if answer.status != 200:
                outcome.error = refusal(answer.status, await answer.body())
            elif ask.stream:
                await _read_stream(answer, outcome)
            else:
                _count(json.loads(await answer.body())["usage"], outcome)
    except (OSError, EOFError, ValueError, KeyError, h11.ProtocolError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.ended = time.perf_counter()
    return outcome


async def _read_stream(answer: Answer, outcome: Outcome) -> None:
    done = False
    async for data in answer.events():
        if data == "[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            outcome.error = str(event["error"].get("message"))
        if event.get("choices"):
            outcome.events.append(time.perf_counter())
        if event.get("usage"):
            _count(event["usage"], outcome)
    if not done and outcome.error is None:
        outcome.error = "the stream ended before its end"


def _count(usage: dict[str, Any], outcome: Outcome) -> None:
    outcome.prompt_tokens, outcome.tokens = usage["prompt_tokens"], usage["completion_tokens"]


def refusal(status: int, body: bytes) -> str:
    """What a server said instead of answering."""
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"


async def drive(
    client: Client, asks: Sequence[Ask], pace: Pace, tick: Callable[[Outcome], None] = lambda _: None
) -> Traffic:
    """Send all requests at a pace and wait for all of them; `tick` is told of each that ended."""
    gate = asyncio.Semaphore(pace.concurrency or len(asks))
    dice = random.Random(pace.seed)
    under_way = peak = 0

    async def one(ask: Ask) -> Outcome:
        nonlocal under_way, peak
        async with gate:
            under_way += 1
            peak = max(peak, under_way)
            outcome = await send(client, ask)
            under_way -= 1
        tick(outcome)
        return outcome

    began, tasks, due = time.perf_counter(), [], 0.0
    for ask in asks:
        tasks.append(asyncio.create_task(one(ask)))
        if pace.rate is not None:
            due += dice.expovariate(pace.rate)
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
    outcomes = await asyncio.gather(*tasks)
    return Traffic(outcomes, time.perf_counter() - began, peak)
