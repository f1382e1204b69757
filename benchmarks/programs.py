"""What it costs to be elsewhere: one program in process, in the sandbox, over a socket, over a WebSocket, as HTTP.

    python benchmarks/programs.py [--model smollm2] [--tokens 128] [--calls 20] [--rounds 3] [--delay MS] [--out FOLDER]

- *start*: until the first context is there; in the sandbox, from the upload on; over HTTP, until the first reply.
- *pass*: one token in, one token out, awaited before the next; the median.
- *tokens/s*: one generation, step by step.
- *agent*: a prompt, then so many rounds of a tool's answer (8 ids) and 8 new tokens. In process and over a session the
  context stays; HTTP sends the whole conversation again each time, and finds most of it in the prefix cache.

With `--delay 40` the ways that may go over a network are measured once more, every message to the server taking so many
milliseconds longer: what a program saves that runs beside the model. Each way is measured on the same engine, one after
the other, in rounds; the figures are medians. The tokens must be the same everywhere. `--out` writes programs.json and
programs.txt, with a description of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import inspect
import json
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn

import headway as hw
from headway.base.system.machine import read_machine
from headway.server.app import create_app
from headway.server.run import configure
from headway.server.settings import ServerSettings

PROMPT, ANSWER, REPLY = list(range(5, 69)), list(range(40, 48)), 8
PASSES = 64


@contextmanager
def served(engine: hw.Engine, folder: Path) -> Iterator[tuple[str, str]]:
    """The engine's HTTP address and its Unix socket."""
    path = folder / "socket"
    settings = ServerSettings(port=0, model="model", session_socket=path, log_requests=False, programs="sandbox")
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
    began = time.perf_counter()
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("GET", "/v1/models")
    connection.getresponse().read()
    start = time.perf_counter() - began

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
    figures = {"start_ms": 1e3 * start, "pass_ms": 1e3 * statistics.median(seconds), "tokens_s": rate, "agent_s": agent}
    return {**figures, "said": said, "all": found}


def in_process(engine: hw.Engine, tokens: int, calls: int) -> dict[str, Any]:
    began = time.perf_counter()
    engine.context().release()
    engine.stats()
    start = time.perf_counter() - began
    return {"start_ms": 1e3 * start, **engine.run(lambda e: measured(e, tokens, calls))}


def connected(url: str, tokens: int, calls: int) -> dict[str, Any]:
    """Over a session."""
    began = time.perf_counter()
    with hw.connect(url) as engine:
        engine.context().release()
        engine.stats()
        opened = time.perf_counter() - began
        return {"start_ms": 1e3 * opened, **engine.run(lambda e: measured(e, tokens, calls))}


def sandboxed(url: str, tokens: int, calls: int) -> dict[str, Any]:
    """The same program, uploaded: one request, and its events."""
    constants = f"PROMPT, ANSWER, REPLY, PASSES = {PROMPT}, {ANSWER}, {REPLY}, {PASSES}"
    head = "from __future__ import annotations\nimport statistics, time\nimport headway as hw\nfrom typing import Any"
    source = f"{head}\n{constants}\n{inspect.getsource(measured)}\n{inspect.getsource(uploaded)}\nmain = uploaded\n"
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    began, opened = time.perf_counter(), 0.0
    args = {"tokens": tokens, "calls": calls}
    connection.request("POST", "/v1/programs", json.dumps({"source": source, "args": args, "stream": True}))
    for line in connection.getresponse():
        event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
        if event.get("type") == "message":
            opened = time.perf_counter() - began
        elif event.get("type") == "end":
            assert event["status"] == "returned", event
            return {"start_ms": 1e3 * opened, **event["value"]}
    raise AssertionError("the program did not end")


async def uploaded(engine: Any, tokens: int, calls: int) -> dict[str, Any]:
    """What runs in the sandbox, as `main`."""
    engine.context().release()
    engine.stats()
    engine.session.send("open")
    return await measured(engine, tokens, calls)


@contextmanager
def delayed(address: tuple[str, int], seconds: float) -> Iterator[str]:
    """A server's address, farther away: a proxy that hands everything on so many seconds later, to the server."""
    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait: float) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(wait, writer.write, data)
        loop.call_later(wait, writer.close)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(*address)
        with suppress(asyncio.CancelledError):  # the benchmark is over
            await asyncio.gather(pump(reader, ours, seconds), pump(theirs, writer, 0.0), return_exceptions=True)

    async def listen() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    loop.create_task(listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        loop.call_soon_threadsafe(loop.call_later, 0.1, loop.stop)
        thread.join()


def in_rounds(ways: dict[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, dict[str, float]]:
    """Every way once a round; the medians. All must give the same tokens."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            runs[name].append(way())
    tokens = {name: (run.pop("all"), run.pop("said")) for name, found in runs.items() for run in found}
    others = [name for name, found in tokens.items() if found != next(iter(tokens.values()))]
    assert not others, f"other tokens: {others}"
    return {
        name: {figure: statistics.median(run[figure] for run in found) for figure in found[0]}
        for name, found in runs.items()
    }


def table(title: str, results: dict[str, dict[str, float]]) -> str:
    lines = [title, f"{'':12} {'start ms':>9} {'pass ms':>9} {'tokens/s':>9} {'agent s':>8}"]
    for name, found in results.items():
        start, each, rate, agent = (found[figure] for figure in ("start_ms", "pass_ms", "tokens_s", "agent_s"))
        lines.append(f"{name:12} {start:9.1f} {each:9.2f} {rate:9.1f} {agent:8.2f}")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=read_machine().fair_threads)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds that a message to the server takes")
    parser.add_argument("--out", type=Path, help="the folder of programs.json and programs.txt")
    given = parser.parse_args()
    began = time.time()
    engine = hw.Engine(given.model, threads=given.threads, pages=1024)
    work = given.tokens, given.calls
    engine.run(lambda e: measured(e, *work))  # what the first run of anything costs
    results = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, socket = stack.enter_context(served(engine, Path(folder)))
        near: dict[str, Callable[[], dict[str, Any]]] = {
            "in process": lambda: in_process(engine, *work),
            "sandbox": lambda: sandboxed(url, *work),
            "Unix socket": lambda: connected(socket, *work),
            "WebSocket": lambda: connected(url, *work),
            "HTTP": lambda: over_http(url, *work),
        }
        results["on this machine"] = in_rounds(near, given.rounds)
        if given.delay:
            host, _, port = url.removeprefix("http://").rpartition(":")
            distant = stack.enter_context(delayed((host, int(port)), given.delay / 1e3))
            far: dict[str, Callable[[], dict[str, Any]]] = {
                "sandbox": lambda: sandboxed(distant, *work),
                "WebSocket": lambda: connected(distant, *work),
                "HTTP": lambda: over_http(distant, *work),
            }
            results[f"{given.delay:g} ms away"] = in_rounds(far, given.rounds)
    machine = read_machine()
    head = f"{given.model} · {given.threads} threads of {machine.usable_cores} cores · {machine.cpu}"
    head += f" · an agent of {given.calls} tool calls · medians of {given.rounds} rounds"
    text = "\n".join([head, "", *(table(title, found) for title, found in results.items())])
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        about = {
            "machine": asdict(machine),
            "system": platform.platform(),
            "python": platform.python_version(),
            "engine": asdict(engine.info) | {"path": None},
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        }
        plan = {"tokens": given.tokens, "calls": given.calls, "rounds": given.rounds, "delay_ms": given.delay}
        written = json.dumps({"about": about, "plan": plan, "results": results}, indent=2) + "\n"
        (given.out / "programs.json").write_text(written)
        (given.out / "programs.txt").write_text(text)


if __name__ == "__main__":
    main()
