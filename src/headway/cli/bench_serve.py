"""`headway bench serve`: how a server feels to its clients: first tokens, the time between them, throughput."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import h11
import typer

from headway.base.config import settings
from headway.base.errors import InvalidInput
from headway.base.machine import read_machine
from headway.bench.http_client import Address, Client
from headway.bench.traffic import Ask, Outcome, Pace, Traffic, drive, send
from headway.bench.traffic_report import Report
from headway.cli.options import NUMBER, WHOLE, Device, Dtype, EngineOptions, Json, MemoryFraction, Quantize, Threads
from headway.cli.render import emit_json, note
from headway.cli.server_process import Served
from headway.models.hub.registry import DEFAULT_MODEL

CONCURRENCY = 8  # where neither it nor a rate was given
LIMIT = 1 << 20  # of every count
LINE_SECONDS = 5.0  # between two lines of progress in a pipe
SHOWN = 5  # kinds of failures

Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="A running server; HEADWAY_API_KEY has its key. Left out, one is started."
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help=f"What to serve ({DEFAULT_MODEL}); with --url, the name to ask for."
    ),
]


@dataclass(frozen=True)
class Amounts:
    """How many requests of which lengths; a range of 0.5 draws each length from half to one and a half times that."""

    requests: int
    prompt: int
    tokens: int
    range: float = 0.0
    warmup: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("prompt", 1), ("tokens", 1), ("warmup", 0)):
            if not least <= getattr(self, name) <= LIMIT:
                raise InvalidInput(f"--{name} is {getattr(self, name)}; it takes a number from {least} to {LIMIT}")
        if not 0 <= self.range < 1:
            raise InvalidInput(f"--range is {self.range:g}; it takes a number from 0 to below 1")

    @property
    def most(self) -> int:
        """Tokens of the longest request there may be."""
        return round(self.prompt * (1 + self.range)) + round(self.tokens * (1 + self.range))

    def asks(self, vocab: int, *, stream: bool, model: str | None) -> list[Ask]:
        """Requests with prompts of random ids, those to warm up first; the same for the same seed."""
        dice = random.Random(self.seed)

        def length(usual: int) -> int:
            return max(1, dice.randint(round(usual * (1 - self.range)), round(usual * (1 + self.range))))

        def one() -> Ask:
            prompt = tuple(dice.choices(range(vocab), k=length(self.prompt)))
            return Ask(prompt, length(self.tokens), stream, model)

        return [one() for _ in range(self.warmup + self.requests)]


def serve(
    *,
    url: Url = None,
    model: ServedModel = None,
    requests: Annotated[int, typer.Option("--requests", "-r", **WHOLE, help="Requests in all.")] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", **WHOLE, help=f"Requests at a time; {CONCURRENCY} unless --rate is given."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", **NUMBER, help="Requests a second on average, at random (Poisson).")
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", "-p", **WHOLE, help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", "-n", **WHOLE, help="Tokens of each answer.")] = 64,
    spread: Annotated[float, typer.Option("--range", **NUMBER, help="Vary both lengths by this share, as 0.5.")] = 0.0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Answers as streams, or whole.")] = True,
    warmup: Annotated[int, typer.Option("--warmup", **WHOLE, help="Requests ahead, which do not count.")] = 1,
    seed: Annotated[int, typer.Option("--seed", **WHOLE, help="Draws prompts, lengths and arrivals.")] = 0,
    vocab: Annotated[
        int | None, typer.Option("--vocab", **WHOLE, help="Ids prompts are drawn from; by default all there are.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    quantize: Quantize = None,
    memory_fraction: MemoryFraction = None,
    json: Json = False,
) -> None:
    """Send requests to a server and time their tokens, as its clients see them.

    Prompts are random tokens, so the prefix cache helps nowhere; answers are greedy and run to their full length.

    The exit code is 1 when a request failed.
    """
    amounts = Amounts(requests, prompt, tokens, spread, warmup, seed)
    pace = _pace(concurrency, rate, seed)
    if url is None:
        options = EngineOptions(model or DEFAULT_MODEL, dtype, device, threads, quantize, memory_fraction)
        at_once = min(requests, pace.concurrency or requests)
        with Served(options, at_once, at_once * amounts.most) as server:
            address = Address.of(server.url)
            try:
                report = asyncio.run(_measure(address, amounts, pace, stream=stream, model=None, vocab=vocab))
            finally:
                for entry in server.failures:
                    note(f"the server's log: {entry}")
    else:
        given = {"dtype": dtype, "device": device, "threads": threads, "quantize": quantize}
        _check_alone(**given, memory_fraction=memory_fraction)
        address = Address.of(url, settings().api_key)
        report = asyncio.run(_measure(address, amounts, pace, stream=stream, model=model, vocab=vocab))
    if json:
        emit_json({"work": "serve", "machine": asdict(read_machine()), **asdict(amounts), **report.to_json()})
    else:
        print(report.text())
        _show_failures(report.errors)
    raise typer.Exit(1 if report.errors else 0)


def _pace(concurrency: int | None, rate: float | None, seed: int) -> Pace:
    if concurrency is not None and not 1 <= concurrency <= LIMIT:
        raise InvalidInput(f"--concurrency is {concurrency}; it takes a number from 1 to {LIMIT}")
    if rate is not None and rate <= 0:
        raise InvalidInput(f"--rate is {rate:g}; it takes a number above 0")
    return Pace(CONCURRENCY if concurrency is None and rate is None else concurrency, rate, seed)


def _check_alone(**given: Any) -> None:
    """Options of an engine belong to a server that is started here."""
    for name, value in given.items():
        if value not in (None, "auto"):
            raise InvalidInput(
                f"--{name.replace('_', '-')} was given with --url; the server there was started with its own, "
                "leave it out"
            )


async def _measure(
    address: Address, amounts: Amounts, pace: Pace, *, stream: bool, model: str | None, vocab: int | None
) -> Report:
    client = Client(address)
    try:
        name, ids = await _about(client, amounts, model, vocab)
        asks = amounts.asks(ids, stream=stream, model=name)
        for ask in asks[: amounts.warmup]:
            outcome = await send(client, ask)
            if outcome.error is not None:
                raise InvalidInput(f"the first request failed, and the others would: {outcome.error}")
        with _progress(amounts.requests) as tick:
            traffic: Traffic = await drive(client, asks[amounts.warmup :], pace, tick)
        return Report(traffic, pace, stream=stream, model=name)
    finally:
        client.close()


async def _about(client: Client, amounts: Amounts, model: str | None, vocab: int | None) -> tuple[str, int]:
    """The model's name and the ids prompts are drawn from, as the server tells them."""
    where = f"{client.address.host}:{client.address.port}"
    try:
        status, listed = await client.json("/v1/models")
        if status != 200:
            reason = (listed or {}).get("error", {}).get("message", f"HTTP {status}")
            raise InvalidInput(f"the server at {where} does not say what it serves: {reason}")
        found = {one["id"]: one for one in listed["data"]}
        if vocab is None:
            status, told = await client.json("/tokenizer_info")
            if status != 200:
                raise InvalidInput(f"the server at {where} does not say how many tokens it knows; give --vocab N")
            vocab = int(told["vocab_size"])
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InvalidInput(f"no server answers at {where}: {reason}; start one with `headway serve`") from None
    except (ValueError, KeyError, TypeError, AttributeError, h11.ProtocolError) as error:
        raise InvalidInput(f"what answers at {where} is no server of OpenAI's kind: {error}") from None
    if not 1 <= vocab <= LIMIT:
        raise InvalidInput(f"--vocab is {vocab}; it takes a number from 1 to {LIMIT}")
    name = model if model is not None else next(iter(found))
    limit = found.get(name, {}).get("max_model_len")
    if limit is not None and amounts.most > limit:
        raise InvalidInput(
            f"--prompt {amounts.prompt} and --tokens {amounts.tokens} make up to {amounts.most} positions; this model "
            f"has {limit}"
        )
    return name, vocab


def _show_failures(errors: list[str]) -> None:
    for message, count in Counter(errors).most_common(SHOWN):
        note(f"{count} failed: {message}")
    if (kinds := len(set(errors))) > SHOWN:
        note(f"and {kinds - SHOWN} more kinds of failures; --json has all")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A callback for requests that ended: a bar on a terminal, a line now and then in a pipe."""
    done = failed = 0

    def count(outcome: Outcome) -> None:
        nonlocal done, failed
        done += 1
        failed += outcome.error is not None

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task("requests", total=total)

            def bar(outcome: Outcome) -> None:
                count(outcome)
                bars.update(task, completed=done, description=f"requests, {failed} failed" if failed else "requests")

            yield bar
        return
    due = time.monotonic() + LINE_SECONDS

    def line(outcome: Outcome) -> None:
        nonlocal due
        count(outcome)
        if time.monotonic() >= due or done == total:
            due = time.monotonic() + LINE_SECONDS
            note(f"{done} of {total} requests" + (f", {failed} failed" if failed else ""))

    yield line
