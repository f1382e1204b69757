"""`headway bench serve`: time to first token, inter-token latency and throughput of a server, as its clients see it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

from headway.base.checks import check_integer
from headway.base.config import settings
from headway.base.errors import InvalidInput
from headway.base.system.machine import read_machine
from headway.bench.http_client import Address
from headway.bench.load_generator import ArrivalPattern, RequestResult
from headway.bench.load_report import LoadReport
from headway.bench.serve import LIMIT, Workload, measure_server
from headway.bench.server_process import ServerProcess
from headway.cli.flags.declare import Option
from headway.cli.flags.shared import (
    INTEGER,
    NUMBER,
    Device,
    Dtype,
    EngineOptions,
    Json,
    KvDtype,
    Memory,
    MemoryFraction,
    Quantize,
    TensorParallel,
    Threads,
)
from headway.cli.terminal.render import emit_json, note
from headway.models.hub.registry import DEFAULT_MODEL

CONCURRENCY = 8  # unless it or a rate is given
LINE_SECONDS = 5.0  # between two lines of progress in a pipe
SHOWN = 5  # kinds of failures

Url = Annotated[
    str | None,
    Option(
        "--url", metavar="URL", help="A running server, with its key in HEADWAY_API_KEY; without it, one is started."
    ),
]
ServedModel = Annotated[
    str | None,
    Option(
        "--model", "-m", metavar="MODEL", help=f"The model to serve ({DEFAULT_MODEL}); with --url, the name to request."
    ),
]


def serve(
    *,
    url: Url = None,
    model: ServedModel = None,
    requests: Annotated[int, Option("--requests", "-r", **INTEGER, help="Number of requests.")] = 64,
    concurrency: Annotated[
        int | None,
        Option(
            "--concurrency", "-c", **INTEGER, help=f"Requests in flight at most; {CONCURRENCY} unless --rate is given."
        ),
    ] = None,
    rate: Annotated[
        float | None, Option("--rate", **NUMBER, help="Mean requests per second, as a Poisson process.")
    ] = None,
    prompt: Annotated[int, Option("--prompt", "-p", **INTEGER, help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, Option("--tokens", "-n", **INTEGER, help="Tokens generated per request.")] = 64,
    spread: Annotated[float, Option("--range", **NUMBER, help="Vary both lengths by this fraction, e.g. 0.5.")] = 0.0,
    stream: Annotated[bool, Option("--stream/--no-stream", help="Stream the responses, or not.")] = True,
    warmup: Annotated[int, Option("--warmup", **INTEGER, help="Requests before the measurement.")] = 1,
    seed: Annotated[int, Option("--seed", **INTEGER, help="Seed for prompts, lengths and arrivals.")] = 0,
    vocab: Annotated[
        int | None, Option("--vocab", **INTEGER, help="Token ids to draw prompts from; all by default.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    quantize: Quantize = None,
    memory_fraction: MemoryFraction = None,
    kv_dtype: KvDtype = "auto",
    memory: Memory = None,
    tensor_parallel: TensorParallel = 1,
    json: Json = False,
) -> int:
    """Send requests to a server and time their tokens, as its clients see them.

    Prompts are random tokens, so the prefix cache never hits; decoding is greedy and runs to the full length.

    The exit code is 1 if a request failed.
    """
    workload = Workload(requests, prompt, tokens, spread, warmup, seed)
    pattern = _arrival_pattern(concurrency, rate, seed)

    def measure(address: Address, model: str | None) -> LoadReport:
        return asyncio.run(
            measure_server(
                address, workload, pattern, stream=stream, model=model, vocab=vocab, progress=_request_progress
            )
        )

    if url is None:
        options = EngineOptions(
            model or DEFAULT_MODEL,
            dtype,
            device,
            threads,
            quantize,
            memory_fraction,
            kv_dtype,
            memory,
            tensor_parallel,
        )
        at_once = min(requests, pattern.concurrency or requests)
        room = {"requests": at_once, "tokens": at_once * workload.max_request_tokens}
        note("starting a server")
        with ServerProcess(options.model, options.given(), **room) as server:
            try:
                report = measure(Address.of(server.url), None)
            finally:
                for entry in server.failures:
                    note(f"the server's log: {entry}")
    else:
        given = {"dtype": dtype, "device": device, "threads": threads, "quantize": quantize}
        given["tensor_parallel"] = None if tensor_parallel == 1 else tensor_parallel
        _check_no_engine_options(**given, memory_fraction=memory_fraction, kv_dtype=kv_dtype, memory=memory)
        report = measure(Address.of(url, settings().api_key), model)
    if json:
        emit_json({"work": "serve", "machine": asdict(read_machine()), **asdict(workload), **report.to_json()})
    else:
        print(report.text())
        _show_failures(report.errors)
    return 1 if report.errors else 0


def _arrival_pattern(concurrency: int | None, rate: float | None, seed: int) -> ArrivalPattern:
    if concurrency is not None:
        check_integer(concurrency, "--concurrency", 1, LIMIT)
    if rate is not None and rate <= 0:
        raise InvalidInput(f"--rate is {rate:g}; it must be above 0")
    return ArrivalPattern(CONCURRENCY if concurrency is None and rate is None else concurrency, rate, seed)


def _check_no_engine_options(**given: Any) -> None:
    """Engine options apply only to a server that is started here."""
    for name, value in given.items():
        if value not in (None, "auto"):
            flag = f"--{name.replace('_', '-')}"
            raise InvalidInput(f"{flag} was given with --url, and that server is already running; leave it out")


def _show_failures(errors: list[str]) -> None:
    for message, count in Counter(errors).most_common(SHOWN):
        note(f"{count} failed: {message}")
    if (kinds := len(set(errors))) > SHOWN:
        note(f"and {kinds - SHOWN} more kinds of failures; --json lists all")


@contextmanager
def _request_progress(total: int) -> Iterator[Callable[[RequestResult], None]]:
    """A callback for finished requests: a bar on a terminal, a line now and then in a pipe."""
    done = failed = 0

    def count(result: RequestResult) -> None:
        nonlocal done, failed
        done += 1
        failed += result.error is not None

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task("requests", total=total)

            def bar(result: RequestResult) -> None:
                count(result)
                bars.update(task, completed=done, description=f"requests, {failed} failed" if failed else "requests")

            yield bar
        return
    due = time.monotonic() + LINE_SECONDS

    def line(result: RequestResult) -> None:
        nonlocal due
        count(result)
        if time.monotonic() >= due or done == total:
            due = time.monotonic() + LINE_SECONDS
            note(f"{done} of {total} requests" + (f", {failed} failed" if failed else ""))

    yield line
