"""Replicas, routing and batch jobs on Ray: what each costs and gains.

    python benchmarks/scale.py simulate              the router at 4 to 1,000 replicas, simulated engines
    python benchmarks/scale.py routing               4 real replicas, multi-turn chats: warm, round-robin, Ray's own
    python benchmarks/scale.py throughput            chats on 1 and 2 replicas
    python benchmarks/scale.py rows                  what a row of a batch job costs: engine, files, Ray
    python benchmarks/scale.py front                 what reading a prompt and choosing a replica cost the front

`simulate` compares with the rule of Ray's own prefix-aware router, over Ray's own prefix tree; `routing` with the
router itself. `simulate` and `front` need no cluster, the others start Ray on this machine. Each writes
`scale-NAME.json` into `--out`, and then `scale.txt`, which is made of all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.base.system.machine import read_machine
from headway.cluster.routing import RouteChoice, RouteRequest
from headway.cluster.simulation import Chooser, SimulationSettings, simulate
from headway.jobs.requests import RowRequest, RowResponse

RESULTS = Path(__file__).parent / "results"
RAY_RULE = "ray_prefix_aware"
TEXT = "The keeper of the lighthouse counted the ships that passed by every night and wrote down their names. "


# -- simulation --------------------------------------------------------------------------------------------------------


def ray_prefix_aware(names: list[str]) -> Chooser:
    """The rule of Ray's PrefixCacheAffinityRouter over its prefix tree: the longest match, or, below a match of a
    tenth, the replica with the smallest tree. Each page stands for 8 characters of the prompt."""
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    tree = PrefixTree()
    tree.add_tenants(names, 0)

    def choose(request: RouteRequest, loads: dict[str, int], now: float) -> RouteChoice:
        text = "".join(f"{key & 0xFFFFFFFF:08x}" for key in request.keys)
        matched, tenants = tree.prefix_match(text, names)
        if len(matched) / len(text) < 0.1:
            tenants = tree.get_smallest_tenants()
        name = min(tenants or names, key=lambda name: loads[name])
        tree.insert(text, name, now)
        return RouteChoice(name)

    return choose


def run_simulation(sizes: list[int]) -> list[dict[str, Any]]:
    """Usual loads; and at 100 replicas one that is heavy, with five system prompts for everybody."""
    loads = [(f"{size:,} replicas", _usual(size)) for size in sizes]
    loads.append(("100, heavy", SimulationSettings(replicas=100, conversations=1000, systems=5, use=1.5)))
    rows = []
    for load, settings in loads:
        rules = {"warm": "warm", "round_robin": "round_robin", "least_loaded": "least_loaded"}
        for name, rule in {**rules, RAY_RULE: ray_prefix_aware}.items():
            result = simulate(settings, rule=rule)
            rows.append({"load": load, "rule": name, "hit_rate": round(result.hit_rate, 3), **_rounded(result)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _usual(size: int) -> SimulationSettings:
    return SimulationSettings(replicas=size, conversations=max(200, 5 * size), systems=max(8, size // 10))


def _rounded(result: Any) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(result).items()}


# -- real replicas -----------------------------------------------------------------------------------------------------


class Server:
    """`headway serve --replicas N` in a process of its own."""

    def __init__(self, replicas: int, *flags: str, rule: str = "warm") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        start = ["-m", "headway.cli.main"] if rule != RAY_RULE else [__file__, "with-ray-router"]
        command = [sys.executable, *start, "serve", "--port", "0", "--threads", "1"]
        flags = flags if rule == RAY_RULE else (*flags, "--routing", rule)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--replicas", str(replicas), *flags], stdout=log, stderr=log, env=env
            )
        while "listening url=" not in (text := self._log.read_text()):
            if self._process.poll() is not None:
                raise SystemExit(text[-2000:])
            time.sleep(0.2)
        self.url = text.partition("listening url=")[2].split()[0]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)
        self._folder.cleanup()

    def chat(self, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.loads(response.read())


def serve_with_ray_router(arguments: list[str]) -> None:
    """`headway serve --replicas` with Ray's PrefixCacheAffinityRouter in place of ours. The prompt that it matches is
    that of the request's page keys, 8 characters a page: what our front has read."""
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

    import headway.cluster.ray_router
    from headway.cli.main import main as headway_command

    class RayRouter(PrefixCacheAffinityRouter):
        def initialize_state(self, *args: Any, rule: str = "", **options: Any) -> None:
            super().initialize_state(*args, **options)

        def _extract_text_from_request(self, pending_request: Any) -> str:
            from headway.cluster.leases import BOOK

            keys = BOOK.request(pending_request.args[0]).keys
            return "".join(f"{key & 0xFFFFFFFF:08x}" for key in keys) or "-"

    globals()["RayRouter"] = RayRouter  # Ray finds it by its name
    headway.cluster.ray_router.WarmRouter = RayRouter  # type: ignore[misc]
    headway_command(arguments)


def _together(count: int, work: Any) -> float:
    """Seconds until this many threads have done their work."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def run_routing(conversations: int, turns: int, rules: list[str]) -> list[dict[str, Any]]:
    """Conversations at once, every two of them with one system prompt."""
    rows, shared = [], max(1, conversations // 2)
    for rule in rules:
        with Server(4, "--pages", "2048", rule=rule) as server:
            server.chat([{"role": "user", "content": "hello"}], 1)
            time.sleep(2)  # the front reads the tokenizer
            totals, lock = {"prompt": 0, "cached": 0}, threading.Lock()

            def converse(number: int, server: Server = server, totals: dict[str, int] = totals, lock: Any = lock):
                messages = [{"role": "system", "content": f"You are assistant {number % shared}. {TEXT * 6}"}]
                for turn in range(turns):
                    messages.append({"role": "user", "content": f"{number}.{turn}: {TEXT * 2}"})
                    response = server.chat(messages, 8)
                    usage = response["usage"]
                    with lock:
                        totals["prompt"] += usage["prompt_tokens"]
                        totals["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
                    text = response["choices"][0]["message"]["content"]
                    messages.append({"role": "assistant", "content": text})

            seconds = _together(conversations, converse)
        computed = totals["prompt"] - totals["cached"]
        rows.append(
            {"rule": rule, "prompt_tokens": totals["prompt"], "computed": computed,
             "hit_rate": round(totals["cached"] / totals["prompt"], 3), "seconds": round(seconds, 2)}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def run_throughput(requests: int, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for replicas in (1, 2):
        with Server(replicas) as server:
            server.chat([{"role": "user", "content": "hello"}], 1)

            def ask(number: int, server: Server = server) -> None:
                server.chat([{"role": "user", "content": f"{number}: {TEXT}"}], tokens)

            seconds = _together(requests, ask)
            alone = min(_together(1, ask) for _ in range(3))
        rate = requests * tokens / seconds
        rows.append({"replicas": replicas, "tokens_per_second": round(rate, 1), "seconds_alone": round(alone, 3)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


# -- batch jobs --------------------------------------------------------------------------------------------------------


def run_rows(count: int) -> list[dict[str, Any]]:
    """A job of almost nothing, so that what is left is the layer around the engine; and that layer alone.

    Rows are timed from the first result to the last: the start of an engine or of Ray is no part of a row. CPU time is
    that of this process: with Ray the driver's, which all workers share.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.jsonl"
        source.write_text("".join(json.dumps({"prompt": [i % 1000, 7]}) + "\n" for i in range(count)))
        ways: dict[str, Any] = {
            "the engine alone": lambda: engine_alone(count),
            "files and journal alone": lambda: _rows_without_engine(source, Path(folder) / "files"),
            "files, journal and Ray alone": lambda: _rows_of_job(source, Path(folder) / "empty", _Without, **ON_RAY),
            "a job here": lambda: _rows_of_job(source, Path(folder) / "here", None),
            "a job on Ray, one worker": lambda: _rows_of_job(source, Path(folder) / "ray", None, **ON_RAY),
        }
        for name, work in ways.items():
            took = work()
            each = {"ms_per_row": took.seconds, "cpu_ms_per_row": took.cpu_seconds}
            rows.append({"what": name, "rows": count, **{k: round(1e3 * v / count, 3) for k, v in each.items()}})
            print(json.dumps(rows[-1]), flush=True)
    return rows


ON_RAY = {"ray": "local", "workers": 1}


def _at_once(request: RowRequest) -> Future[RowResponse]:
    """What an engine would give for a row, without one."""
    body = {
        "choices": [{"text": "x", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    }
    future: Future[RowResponse] = Future()
    future.set_result(RowResponse(200, body))
    return future


class Timed:
    """The time between the first result and the last, and this process's CPU time meanwhile."""

    seconds = cpu_seconds = 0.0
    _begun: tuple[float, float] | None = None

    def __call__(self, *_: object) -> None:
        now = time.perf_counter(), time.process_time()
        self._begun = self._begun or now
        self.seconds, self.cpu_seconds = now[0] - self._begun[0], now[1] - self._begun[1]


def _rows_without_engine(source: Path, output: Path) -> Timed:
    from headway.jobs.folder import JobFolder
    from headway.jobs.job import BatchJob
    from headway.jobs.records import watched
    from headway.jobs.requests import PlainRows, RequestWorker
    from headway.jobs.run import run_records

    timed = Timed()
    with JobFolder(output, BatchJob(source, output).identity("generate"), ".jsonl") as folder:
        worker = RequestWorker(_at_once, PlainRows("generate", {"max_tokens": 1}), 128)
        run_records(worker, watched(str(source)), folder.journal, progress=timed)
        folder.finish()
    return timed


def _rows_of_job(source: Path, output: Path, without: Any, **cluster: Any) -> Timed:
    import headway.batch
    import headway.cluster.batch

    timed, usual = Timed(), headway.cluster.batch.RayWorker
    if without is not None:
        headway.cluster.batch.RayWorker = without()
    try:
        headway.batch.run(source, output, options={"max_tokens": 1}, threads=1, progress=timed, **cluster)
    finally:
        headway.cluster.batch.RayWorker = usual
    return timed


def _Without() -> Any:
    """The workers of a job on Ray, without engines."""
    from headway.cluster.batch import ChunkStage, RayWorker
    from headway.jobs.job import rows_of
    from headway.jobs.requests import RequestWorker

    class Stage(ChunkStage):
        def __init__(self, work: Any, source: Any, version: str) -> None:
            self._source, rows = source, rows_of(work)
            assert rows is not None
            self._worker: Any = RequestWorker(_at_once, rows, work.concurrency)

    class Worker(RayWorker):
        _stage = Stage

    return Worker


def engine_alone(count: int) -> Timed:
    """The engine with the same rows in the program API, 128 at a time."""
    import headway as hw

    async def work(engine: hw.Engine) -> Timed:
        numbers, timed = iter(range(count)), Timed()

        async def some() -> None:
            for i in numbers:
                async with engine.context() as ctx:
                    await ctx.fill([i % 1000, 7]).generate(hw.Argmax(), max_tokens=1).tokens()
                timed()

        await asyncio.gather(*(some() for _ in range(128)))
        return timed

    with hw.Engine("smollm2", threads=1) as engine:
        return engine.run(work)


# -- the front ---------------------------------------------------------------------------------------------------------


def run_front(repeats: int) -> list[dict[str, Any]]:
    """CPU milliseconds to read a chat and hash its pages, and to choose among 4 replicas that hold parts of it."""
    from headway.cluster.prompts import PromptReader
    from headway.cluster.routing import RoutingTable
    from headway.models.hub import store

    reader, rows = PromptReader("smollm2", store.resolve("smollm2"), 16), []
    for length in (1, 8, 64):
        body = json.dumps({"messages": [{"role": "user", "content": TEXT * length}], "max_tokens": 8}).encode()
        table = RoutingTable()
        table.set_replicas(["a", "b", "c", "d"])
        read, chosen = [], []
        for i in range(repeats):
            begun = time.thread_time()
            request = reader.route("/v1/chat/completions", body, salt="", tenant="")
            middle = time.thread_time()
            name = table.rank(request, dict.fromkeys(table.replicas, i % 3))[0].replica
            table.sent(name, request.keys, float(i))
            read.append(middle - begun)
            chosen.append(time.thread_time() - middle)
        middle_of = {"read_ms": statistics.median(read), "choose_ms": statistics.median(chosen)}
        pages = len(reader.route("/v1/chat/completions", body, salt="", tenant="").keys)
        rows.append({"pages": pages, **{name: round(1e3 * value, 3) for name, value in middle_of.items()}})
        print(json.dumps(rows[-1]), flush=True)
    return rows


# -- results -----------------------------------------------------------------------------------------------------------

TITLES = {
    "routing": "routing: {replicas} replicas, {count} chats at once of {turns} turns, one system prompt for every two",
    "throughput": "throughput: {count} chats at once, {tokens} tokens each, 1 thread a replica",
    "rows": "rows: a job of {count} thousand rows, 2 tokens in and 1 out; time from the first result to the last",
    "front": "front: CPU time of reading a chat, and of choosing among 4 replicas that hold parts of it",
    "simulate": "simulate: the router over simulated engines; waits are simulated seconds, decisions CPU time",
}


TIMES = ("ms_per_row", "seconds", "tokens_per_second", "seconds_alone")  # which others' work disturbs
BUSY = 1.0  # the load average from which on these are not written


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned columns."""
    cells = [["-" if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()] for row in rows]
    lines = [list(rows[0]), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def report(folder: Path) -> str:
    """All results of a folder as text."""
    parts = []
    for name, title in TITLES.items():
        path = folder / f"scale-{name}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        about = data["about"]
        machine, load = about["machine"], about.get("load_average", 0.0)
        where = f"smollm2 · {machine['cpu']}, {machine['cores']} cores, which everything here shares"
        busy = f" · load average {load} before the run: only counts and CPU times are kept" if load > BUSY else ""
        parts.append(f"{title.format(**about['options'])}\n{where}{busy}\n{table(data[name])}\n")
    return "\n".join(parts)


def write(name: str, rows: list[dict[str, Any]], options: dict[str, Any], load: float, folder: Path) -> None:
    if load > BUSY:
        rows = [{key: None if key in TIMES else value for key, value in row.items()} for row in rows]
    about = {"machine": asdict(read_machine()), "load_average": round(load, 1), "options": options}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"scale-{name}.json").write_text(json.dumps({"about": about, name: rows}, indent=2) + "\n")
    (folder / "scale.txt").write_text(report(folder))


def main() -> None:
    if sys.argv[1:2] == ["with-ray-router"]:
        serve_with_ray_router(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TITLES])
    parser.add_argument("--sizes", default="4,16,100,1000", help="numbers of replicas to simulate")
    parser.add_argument("--count", type=int, default=16, help="conversations, requests, or thousands of rows")
    parser.add_argument("--rules", default=f"warm,round_robin,{RAY_RULE}", help="of `routing`")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given, load = parser.parse_args(), os.getloadavg()[0]
    options: dict[str, Any] = {}
    match given.what:
        case "simulate":
            rows = run_simulation([int(size) for size in given.sizes.split(",")])
        case "routing":
            options = {"replicas": 4, "count": given.count, "turns": given.turns}
            rows = run_routing(given.count, given.turns, given.rules.split(","))
        case "throughput":
            options = {"count": given.count, "tokens": given.tokens}
            rows = run_throughput(given.count, given.tokens)
        case "front":
            rows = run_front(200)
        case _:
            options = {"count": given.count}
            rows = run_rows(given.count * 1000)
    write(given.what, rows, options, load, given.out)


if __name__ == "__main__":
    main()
