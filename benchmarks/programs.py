"""What it costs to be elsewhere: one program in process, over a Unix socket, over a WebSocket, and as HTTP requests.

    python benchmarks/programs.py [--model smollm2] [--tokens 128] [--calls 20] [--out FILE]

- *connect*: until the first context is there.
- *pass*: one token in, one token out, awaited before the next; the median.
- *tokens/s*: one generation, step by step.
- *agent*: a prompt, then so many rounds of a tool's answer (8 ids) and 8 new tokens. In process and over a session the
  context stays; HTTP sends the whole conversation again each time, and finds most of it in the prefix cache.

Each is measured on the same engine, one after the other; the tokens must be the same everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

import headway as hw
from headway.server.app import create_app
from headway.server.run import configure
from headway.server.settings import ServerSettings

PROMPT, ANSWER, REPLY = list(range(5, 69)), list(range(40, 48)), 8
PASSES = 64


@contextmanager
def served(engine: hw.Engine, folder: Path) -> Iterator[tuple[str, str]]:
    """The engine's HTTP address and its Unix socket."""
    path = folder / "socket"
    settings = ServerSettings(port=0, model="model", session_socket=path, log_requests=False)
    server = uvicorn.Server(configure(settings, create_app(settings, lambda: engine)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not (server.started and path.exists()):
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    while _get(port, "/health") != 200:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}", f"unix:{path}"
    finally:
        server.should_exit = True
        thread.join()


def _get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    return connection.getresponse().status


async def measured(engine: Any, tokens: int, calls: int) -> dict[str, Any]:
    """The program, on an engine of any kind."""
    async with engine.context() as ctx:
        ctx.fill(PROMPT)
        await ctx.flush()
        seconds, token = [], 7
        for _ in range(PASSES):
            began = time.perf_counter()
            forward = ctx.forward().input([token])
            handle = forward.sample([-1], hw.Argmax())
            token = (await forward.execute()).token(handle)
            seconds.append(time.perf_counter() - began)
    async with engine.context() as ctx:
        ctx.fill(PROMPT)
        began, found = time.perf_counter(), []
        async for step in ctx.generate(hw.Argmax(), max_tokens=tokens, stop_only=True):
            found += step.tokens
        rate = len(found) / (time.perf_counter() - began)
    async with engine.context() as ctx:
        began, said = time.perf_counter(), []
        ctx.fill(PROMPT)
        for _ in range(calls):
            said += await ctx.generate(hw.Argmax(), max_tokens=REPLY, stop_only=True).tokens()
            ctx.fill(ANSWER)
        agent = time.perf_counter() - began
    return {"pass_ms": 1e3 * statistics.median(seconds), "tokens_s": rate, "agent_s": agent, "said": said, "all": found}


def over_http(url: str, tokens: int, calls: int) -> dict[str, Any]:
    """The same with /v1/completions, which has no passes."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def complete(prompt: list[int], count: int) -> list[int]:
        body = {"model": "model", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body | {"return_token_ids": True}))
        reply = json.loads(connection.getresponse().read())
        return reply["choices"][0]["token_ids"]

    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        complete([*PROMPT, 7], 1)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    found = complete(PROMPT, tokens)
    rate = len(found) / (time.perf_counter() - began)
    began, said, prompt = time.perf_counter(), [], list(PROMPT)
    for _ in range(calls):
        new = complete(prompt, REPLY)
        said += new
        prompt += [*new, *ANSWER]
    agent = time.perf_counter() - began
    return {"pass_ms": 1e3 * statistics.median(seconds), "tokens_s": rate, "agent_s": agent, "said": said, "all": found}


def connected(url: str, tokens: int, calls: int) -> dict[str, Any]:
    """Over a session."""
    began = time.perf_counter()
    with hw.connect(url) as engine:
        engine.context().release()
        engine.stats()
        opened = time.perf_counter() - began
        return {"connect_ms": 1e3 * opened, **engine.run(lambda e: measured(e, tokens, calls))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    engine = hw.Engine(given.model, threads=given.threads, pages=1024)
    work = given.tokens, given.calls
    engine.run(lambda e: measured(e, *work))  # what the first run of anything costs
    with tempfile.TemporaryDirectory() as folder, served(engine, Path(folder)) as (url, socket):
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "in process": lambda: engine.run(lambda e: measured(e, *work)),
            "Unix socket": lambda: connected(socket, *work),
            "WebSocket": lambda: connected(url, *work),
            "HTTP": lambda: over_http(url, *work),
        }
        results = {name: way() for name, way in ways.items()}
    tokens = {name: (result.pop("all"), result.pop("said")) for name, result in results.items()}
    others = [name for name, found in tokens.items() if found != tokens["in process"]]
    assert not others, f"other tokens: {others}"
    print(f"{'':12} {'connect ms':>11} {'pass ms':>9} {'tokens/s':>9} {'agent s':>8}")
    for name, result in results.items():
        shown = f"{result['connect_ms']:.1f}" if "connect_ms" in result else ""
        print(f"{name:12} {shown:>11} {result['pass_ms']:9.2f} {result['tokens_s']:9.1f} {result['agent_s']:8.2f}")
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
