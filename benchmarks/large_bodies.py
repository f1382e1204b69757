"""Large bodies beside a stream: how long do others wait for their tokens while 7 MB are received, parsed and checked?

    python benchmarks/large_bodies.py                                           # 7 MB bodies, the default model
    python benchmarks/large_bodies.py --bytes 200000 --posts 2 --tokens 60      # does it run?

One client streams a completion and notes when each event comes. Another process posts bodies of one kind, one after the
other: a prompt of one long text, a list of token ids, a chat of many messages, a text to tokenize, JSON that is broken
at its end, and a request with a field that does not exist. Most of them are refused (a prompt of 7 MB fits no context),
after they were read and parsed. After each kind, a window of the same length is without posts.

A stall is by how much the longest time between two events exceeds the longest one without posts. The script ends with
code 1 if one is longer than --limit, 20 ms. Run it on an idle machine with at least four cores: one for the engine, one
for the server's event loop, two for the clients. Results go to benchmarks/results/, with the machine and its load.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from headway.base.system.machine import read_machine
from headway.bench.http_client import Address, HttpClient
from headway.bench.server_process import ServerProcess

RESULTS = Path(__file__).parent / "results"
WORDS = "The quick brown fox jumps over the lazy dog. "
PAUSE = 0.05  # between two posts


def _text(size: int) -> str:
    return WORDS * (size // len(WORDS))


def _messages(size: int) -> list[dict[str, str]]:
    count = min(4096, max(1, size // 200))
    return [{"role": ("user", "assistant")[i % 2], "content": _text(size // count)} for i in range(count)]


KINDS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "one long prompt": ("/v1/completions", lambda size: _json({"prompt": _text(size), "max_tokens": 1})),
    "a list of ids": (
        "/v1/completions",
        lambda size: _json({"prompt": [20_000 + i % 20_000 for i in range(min(size // 7, 1 << 20))], "max_tokens": 1}),
    ),
    "a long chat": ("/v1/chat/completions", lambda size: _json({"messages": _messages(size), "max_tokens": 1})),
    "text to tokenize": ("/tokenize", lambda size: _json({"prompt": _text(size)})),
    "broken JSON": ("/v1/completions", lambda size: _json({"prompt": _text(size)})[:-1]),
    "an unknown field": ("/v1/completions", lambda size: _json({"prompt": "a", "no_such_field": _text(size)})),
}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True)
class Options:
    """How large, how many, and what is measured."""

    model: str
    bytes: int
    posts: int
    tokens: int
    threads: int
    limit: float  # ms
    out: Path


@dataclass(frozen=True)
class Gaps:
    """Times between two events of a stream, in milliseconds."""

    count: int
    median: float
    p99: float
    longest: float

    @staticmethod
    def of(times: list[float]) -> Gaps:
        """`times` has NaN where one completion ends and the next begins: what is there does not count."""
        between = (1e3 * (after - before) for before, after in pairwise(times))
        gaps = sorted(gap for gap in between if not math.isnan(gap))
        return Gaps(len(gaps), statistics.median(gaps), gaps[int(0.99 * (len(gaps) - 1))], gaps[-1])


def post(host: str, port: int, kind: str, size: int, posts: int) -> dict[str, Any]:
    """Post bodies of a kind, one after the other, in a process of its own."""
    path, make = KINDS[kind]
    body, statuses, seconds = make(size), set(), []
    for _ in range(posts):
        connection = http.client.HTTPConnection(host, port, timeout=120)
        began = time.perf_counter()
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        seconds.append(time.perf_counter() - began)
        statuses.add(answer.status)
        time.sleep(PAUSE)
    return {"bytes": len(body), "statuses": sorted(statuses), "seconds": statistics.median(seconds)}


async def stream(address: Address, tokens: int, times: list[float], until: asyncio.Event) -> None:
    """Stream completions, and note when their events come, until it is enough."""
    client = HttpClient(address)
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    while not until.is_set():
        times.append(float("nan"))
        async with client.request("POST", "/v1/completions", body) as answer:
            if answer.status != 200:
                raise ConnectionError(f"the stream got {answer.status}: {await answer.body()!r:.300}")
            async for _ in answer.events():
                times.append(time.perf_counter())
                if until.is_set():
                    break
    client.close()


async def window(address: Address, options: Options, work: Callable[[], Any]) -> tuple[Gaps, Any]:
    """The gaps of a stream while something else is done."""
    times: list[float] = []
    until = asyncio.Event()
    streaming = asyncio.create_task(stream(address, options.tokens, times, until))
    try:
        while len(times) < min(20, options.tokens // 2) and not streaming.done():
            await asyncio.sleep(0.01)  # the prompt is computed
        first = len(times)
        result = await work()
        while len(times) < first + 20 and not streaming.done():
            await asyncio.sleep(0.01)
    finally:
        until.set()
        await streaming
    return Gaps.of(times[first - 1 :]), result


async def measure(url: str, options: Options) -> list[dict[str, Any]]:
    address, loop, rows = Address.of(url), asyncio.get_running_loop(), []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for kind in KINDS:
            call = (post, address.host, address.port, kind, options.bytes)
            await loop.run_in_executor(pool, *call, 1)  # what is compiled or imported once
            gaps, told = await window(
                address, options, lambda call=call: loop.run_in_executor(pool, *call, options.posts)
            )
            length = options.posts * (told["seconds"] + PAUSE)
            alone, _ = await window(address, options, partial(asyncio.sleep, length))
            stall = max(0.0, gaps.longest - alone.longest)
            rows.append({"kind": kind, **told, "alone": asdict(alone), "beside": asdict(gaps), "stall_ms": stall})
    return rows


def report(found: dict[str, Any]) -> str:
    options, machine = found["options"], found["about"]["machine"]
    loads = " → ".join(f"{one[0]:.1f}" for one in (found["about"]["load_before"], found["about"]["load_after"]))
    lines = [
        f"{options['posts']} bodies of {options['bytes']} bytes beside a stream of {options['model']} · "
        f"{machine['cpu']} · {machine['usable_cores']} cores · load {loads}",
        "",
        f"{'ms between events':<20} {'alone':>26} {'beside them':>26}",
        f"{'':<20} {'median':>8} {'p99':>8} {'most':>8} {'median':>8} {'p99':>8} {'most':>8} {'stall':>8}  status",
    ]
    for row in found["rows"]:
        figures = [row[side][name] for side in ("alone", "beside") for name in ("median", "p99", "longest")]
        numbers = " ".join(f"{value:>8.1f}" for value in (*figures, row["stall_ms"]))
        lines.append(f"{row['kind']:<20} {numbers}  {' '.join(map(str, row['statuses']))}")
    verdict = "no stall is longer" if found["passed"] else "a stall is longer"
    return "\n".join([*lines, "", f"{verdict} than {options['limit']:g} ms", ""])


def main() -> int:
    options = _options()
    before = os.getloadavg()
    with ServerProcess(options.model, {"threads": options.threads}, requests=8, tokens=1 << 20) as server:
        rows = asyncio.run(measure(server.url, options))
    found = {
        "options": asdict(options) | {"out": None},
        "rows": rows,
        "passed": all(row["stall_ms"] <= options.limit for row in rows),
        "about": {
            "machine": asdict(read_machine()),
            "system": platform.platform(),
            "load_before": before,
            "load_after": os.getloadavg(),
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "large_bodies.txt").write_text(report(found))
    (options.out / "large_bodies.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    print(report(found))
    return 0 if found["passed"] else 1


def _options() -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--bytes", type=int, default=7_000_000)
    parser.add_argument("--posts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1500, help="of each completion of the stream")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=20.0, help="ms that a stall may take")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.bytes < 1000 or given.posts < 1 or given.tokens < 40:
        parser.error("--bytes takes 1000 or more, --posts 1 or more, --tokens 40 or more")
    return Options(**vars(given))


if __name__ == "__main__":
    sys.exit(main())
