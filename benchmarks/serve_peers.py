"""`headway serve` against llama.cpp's server on the same file, as streaming clients see them, in alternating rounds.

    python benchmarks/serve_peers.py model.gguf --llama-python llama/bin/python      # llama-cpp-python's server
    python benchmarks/serve_peers.py model.gguf --llama-server /opt/llama-server     # llama.cpp's own
    python benchmarks/serve_peers.py model.gguf --requests 2 --clients 1,2 --tokens 4 --rounds 1    # does it run?

Both servers are up all the time; only one is asked at a time. Every request has a text of its own that no cache holds,
is greedy, and runs to its full length: the end token has a bias of -100. Time to first token is that of the first event
with text; time between tokens is the rest of a request's time over the rest of its tokens, however a server puts tokens
into events. Results go to benchmarks/results/, with the machine and its load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from headway.base.system.machine import read_machine
from headway.bench.server_process import ServerProcess
from headway.models.files.gguf import GgufFile

RESULTS = Path(__file__).parent / "results"
START_SECONDS = 600.0
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
]


@dataclass(frozen=True)
class Timed:
    """One request: seconds to its first text, between its tokens, and in all."""

    first: float
    between: float
    whole: float


def prompt(number: int, words: int) -> str:
    dice = random.Random(number)
    return f"{number}: " + " ".join(dice.choices(WORDS, k=words))


async def ask(client: httpx.AsyncClient, text: str, tokens: int, end: int) -> Timed:
    """Send one request and read its stream to the end."""
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": {str(end): -100}}
    begun, first, finish = time.perf_counter(), None, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if choice["text"] and first is None:
                    first = time.perf_counter()
                finish = choice["finish_reason"] or finish
    ended = time.perf_counter()
    if finish != "length":
        raise SystemExit(f"a request ended with {finish!r} before its {tokens} tokens; the servers cannot be compared")
    first = ended if first is None else first
    return Timed(first - begun, (ended - first) / max(1, tokens - 1), ended - begun)


async def crowd(
    url: str, clients: int, requests: int, *, tokens: int, words: int, end: int, seed: int
) -> dict[str, Any]:
    """So many clients that ask one request after the other."""
    numbers = iter(range(seed, seed + requests))
    own = httpx.Limits(max_keepalive_connections=0)  # llama.cpp's server ends a connection after a stream
    async with httpx.AsyncClient(base_url=url, timeout=START_SECONDS, limits=own) as client:

        async def work() -> list[Timed]:
            return [await ask(client, prompt(number, words), tokens, end) for number in numbers]

        begun = time.perf_counter()
        timed = [one for some in await asyncio.gather(*(work() for _ in range(clients))) for one in some]
        seconds = time.perf_counter() - begun
    return {
        "tokens/s": len(timed) * tokens / seconds,
        "first token ms": 1e3 * statistics.median(one.first for one in timed),
        "between tokens ms": 1e3 * statistics.median(one.between for one in timed),
    }


@contextmanager
def llama(command: list[str], port: int) -> Iterator[str]:
    """llama.cpp's server, until the `with` ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} did not start; run it alone: {' '.join(command)}")
            try:
                if httpx.get(f"{url}/v1/models").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def llama_command(options: argparse.Namespace, port: int, most: int) -> list[str] | None:
    """The command of the rival that was named."""
    context = most * (options.tokens + 4 * options.words + 64)
    threads = str(options.threads or os.cpu_count())
    if options.llama_server:
        own = ["-m", options.file, "--port", str(port), "-np", str(most), "-c", str(context), "-t", threads, "-cb"]
        return [options.llama_server, *own]
    if options.llama_python:
        own = ["--model", options.file, "--port", str(port), "--n_ctx", str(context), "--n_threads", threads]
        own += ["--interrupt_requests", "false"]  # by default a new request ends the one before it
        return [options.llama_python, "-m", "llama_cpp.server", *own]
    return None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each server and number of clients."""
    crowds = [int(text) for text in options.clients.split(",")]
    most, end = max(crowds), int(GgufFile.open(Path(options.file)).metadata["tokenizer.ggml.eos_token_id"])
    port = free_port()
    command = llama_command(options, port, most)
    engine = {} if options.threads is None else {"threads": options.threads}
    seed, found = 0, {}
    with ExitStack() as stack:
        own = stack.enter_context(ServerProcess(options.file, engine, requests=most, tokens=most * 4096))
        urls = {"headway": own.url}
        if command is not None:
            urls["llama.cpp"] = stack.enter_context(llama(command, port))
        for _ in range(options.rounds + 1):  # the first warms up
            for clients in crowds:
                for name, url in urls.items():
                    requests = max(clients, options.requests)
                    work = crowd(url, clients, requests, tokens=options.tokens, words=options.words, end=end, seed=seed)
                    found.setdefault((name, clients), []).append(asyncio.run(work))
                    seed += requests
                    print(f"{name}, {clients} clients: {found[name, clients][-1]['tokens/s']:.0f} tokens/s", flush=True)
    return [{"server": name, "clients": clients, **medians(some[1:])} for (name, clients), some in found.items()]


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("file", help="a GGUF file")
    parse.add_argument("--llama-python", help="a Python with llama-cpp-python[server]")
    parse.add_argument("--llama-server", help="llama.cpp's own server")
    parse.add_argument("--clients", default="1,8,32")
    parse.add_argument("--requests", type=int, default=64, help="of each measurement, or one for each client")
    parse.add_argument("--tokens", type=int, default=64)
    parse.add_argument("--words", type=int, default=64, help="of a prompt")
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--threads", type=int)
    parse.add_argument("--out", type=Path, default=RESULTS)
    options = parse.parse_args()
    load = os.getloadavg()[0]
    rows = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"machine": asdict(read_machine()), "load before": load, "file": Path(options.file).name}
    about |= {name: getattr(options, name) for name in ("tokens", "words", "requests", "rounds", "threads")}
    (options.out / "serve_peers.json").write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")
    for row in rows:
        print(f"{row['server']:10} {row['clients']:3} clients", *(f"{row[name]:9.1f} {name}" for name in list(row)[2:]))


if __name__ == "__main__":
    main()
