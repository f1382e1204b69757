"""A crowd of clients while models load and idle out, adapters come and go, and streams are cut: all is given back.

The server is `headway serve` in a process of its own, with four models in the memory of three. Clients of all APIs ask,
read or leave; a part of the models is asked for at a time, so that others idle out. At the end pages, threads,
descriptors and memory are what they were before, every answer that was compared is what the model says alone, and no
line of the log is an error. `HEADWAY_LOAD_SECONDS` sets another length for the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.bench.http_client import Address, HttpClient, HttpResponse
from headway.server.keys import add_key
from headway.server.models.memory import allowance
from headway.server.models.sources import read_sizes
from support.adapter_files import saved_adapter
from support.collector import collector
from support.many_models import ASKED, model_folders

NAMES = ("ada", "bob", "cleo", "dora")
ADAPTERS = ("red", "blue", "green")
PAGES = 512
IDLE_SECONDS = 1.0
SEASON_SECONDS = 3.0  # for which the same models are asked for
MIB = 1 << 20
ALLOWED_MIB = 64  # that memory may grow by: what an allocator keeps, never what leaks for minutes
PATIENCE = 120.0
REFUSALS = (429, 503)
ERROR = re.compile(r'"error": ?[{"]|^event: error', re.MULTILINE)  # in a stream of any API
POOL_THREADS = 9  # of thread pools, which start one when it is first needed: readers, writers, asyncio's own
USER = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    threads: int
    descriptors: int
    rss: int

    @staticmethod
    def of(pid: int) -> Footprint:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        values = {
            name: value.split()[0] for name, _, value in (line.partition(":") for line in status) if value.split()
        }
        return Footprint(int(values["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(values["VmRSS"]) * 1024)


@dataclass
class Tally:
    """What happened to the crowd, and what must not."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Served:
    """The server's process, and how it is asked."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, key: str) -> None:
        self.process, self._log, self._key = process, log, key
        self.address = Address.of(self._line("listening")["url"], key)

    def _line(self, message: str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := [line for line in self.lines() if line["message"] == message]:
                return found[0]
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            time.sleep(0.05)
        raise AssertionError(self._log.read_text()[-2000:])

    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{") and line[-1] == "}"
        ]

    async def rest(self, most: int | None = None) -> Footprint:
        """What it holds once nothing is under way and only the kept model is loaded, and at most so many descriptors
        are open: a connection is gone on this side a moment before it is on the other."""
        client, end = HttpClient(self.address), time.monotonic() + PATIENCE
        while True:
            _, listed = await client.json("/v1/models")
            loaded = [card["id"] for card in listed["data"] if card["state"] in ("ready", "loading", "draining")]
            _, told = await client.json("/stats?model=ada")
            held = told["stats"]["pages_held"], told["stats"]["queued"], set(loaded) - {"ada", *ADAPTERS}
            if held == (0, 0, set()):
                break
            assert time.monotonic() < end, f"still there: {held}"
            await asyncio.sleep(0.1)
        client.close()
        await asyncio.sleep(0.5)
        while (now := Footprint.of(self.process.pid)).descriptors > (
            most or now.descriptors
        ) and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return now


@contextmanager
def serving(root: Path) -> Iterator[Served]:
    folders = model_folders(root / "models", *NAMES)
    with hw.Engine(folders["ada"], threads=1, pages=PAGES) as engine:
        for seed, name in enumerate(ADAPTERS, 1):
            saved_adapter(root / "loras" / name, engine.config, seed=seed)
    one = allowance(read_sizes(folders["ada"]), 1 << 40, PAGES)
    assert one is not None
    key, log = add_key(root / "keys.json", "crowd", admin=True), root / "server.log"
    with collector() as spans, log.open("wb") as out:
        flags = ["--models-dir", root / "models", "--keep", "ada", "--idle-timeout", IDLE_SECONDS, "--pages", PAGES]
        flags += ["--memory", f"{round(3.5 * one) // 1024}K", "--threads", 1, "--port", 0, "--json"]
        flags += ["--keys", root / "keys.json", "--lora-dir", root / "loras", "--otel", spans.url]
        command = [sys.executable, "-m", "headway.cli.main", "serve", *map(str, flags)]
        quiet = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=quiet)
        try:
            served = Served(process, log, key)
            served._line("ready")
            yield served
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, log.read_text()[-2000:]
            assert spans.spans
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


class Crowd:
    """Clients that ask again and again until the time is over."""

    def __init__(self, served: Served, right: dict[str, str], tally: Tally, seed: int) -> None:
        self._served, self._right, self._tally, self._seed = served, right, tally, seed
        self._asked: tuple[str, ...] = NAMES

    async def run(self, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        work = [self._client(random.Random(self._seed + i), end) for i in range(clients)]
        await asyncio.gather(self._seasons(end), self._adapters(end), *work)

    async def _seasons(self, end: float) -> None:
        """Ask for other models from time to time, so that the rest idles out."""
        dice = random.Random(self._seed)
        while time.monotonic() < end:
            self._asked = ("ada", *dice.sample(NAMES[1:], dice.randrange(3)))
            await asyncio.sleep(SEASON_SECONDS)

    async def _adapters(self, end: float) -> None:
        """Load and unload adapters, of any model."""
        dice, client = random.Random(self._seed + 1), HttpClient(self._served.address)
        while time.monotonic() < end:
            name, base = dice.choice(ADAPTERS), dice.choice(self._asked)
            whole = {"lora_name": name, "lora_path": name, "base_model_name": base}
            verb, body = dice.choice((("load", whole), ("unload", {"lora_name": name})))
            async with client.request("POST", f"/v1/{verb}_lora_adapter", body) as answer:
                text = await answer.body()
            self._tally.ends[f"{verb} an adapter: {answer.status}"] += 1
            if answer.status not in (200, 400, 404, *REFUSALS):
                self._tally.wrong.append(f"{verb} {name}: {answer.status} {text!r:.200}")
            await asyncio.sleep(dice.random() * 0.3)
        client.close()

    async def _client(self, dice: random.Random, end: float) -> None:
        client = HttpClient(self._served.address)
        while time.monotonic() < end:
            try:
                await self._request(client, dice)
            except ConnectionError as error:  # the server closes a kept connection when it has been idle for long
                self._tally.ends["connection lost"] += 1
                if self._served.process.poll() is not None:
                    self._tally.wrong.append(f"the server is gone: {error}")
                    return
        client.close()

    async def _request(self, client: HttpClient, dice: random.Random) -> None:
        model = dice.choice(ADAPTERS) if dice.random() < 0.15 else dice.choice(self._asked)
        if dice.random() < 0.3 and model in self._right:
            return await self._compare(client, model)
        path, body = _body(dice, model)
        if dice.random() < 0.3:  # leaves at any moment
            try:
                async with asyncio.timeout(dice.expovariate(4.0)), client.request("POST", path, body) as answer:
                    await answer.body()
            except TimeoutError:
                self._tally.ends["left"] += 1
            return
        async with self._answered(client, path, body, model) as answer:
            if answer is None:
                return
            if dice.random() < 0.3:  # leaves in the middle of a stream
                self._tally.ends["cut"] += 1
                return
            text = (await answer.body()).decode()
            self._tally.ends[f"{path} read"] += 1
            if ERROR.search(text):
                self._tally.wrong.append(f"{path} of {model}: {text[-300:]}")

    async def _compare(self, client: HttpClient, model: str) -> None:
        async with self._answered(client, "/v1/completions", ASKED | {"model": model}, model) as answer:
            if answer is not None:
                text = json.loads(await answer.body())["choices"][0]["text"]
                self._tally.ends["compared"] += 1
                if text != self._right[model]:
                    self._tally.wrong.append(f"{model} said {text!r}, and alone {self._right[model]!r}")

    @asynccontextmanager
    async def _answered(
        self, client: HttpClient, path: str, body: Any, model: str
    ) -> AsyncIterator[HttpResponse | None]:
        """A response that is one; None for a refusal that is documented."""
        async with client.request("POST", path, body) as answer:
            if answer.status == 200:
                yield answer
                return
            text = await answer.body()
            self._tally.ends[f"refused {answer.status}"] += 1
            allowed = (*REFUSALS, 404) if model in ADAPTERS else REFUSALS
            if answer.status not in allowed:
                self._tally.wrong.append(f"{path} of {model}: {answer.status} {text!r:.300}")
            await asyncio.sleep(0.1)
            yield None


def _body(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A request of any API."""
    tokens, stream = dice.randrange(1, 40), dice.random() < 0.7
    common = {"model": model, "stream": stream}
    match dice.randrange(6):
        case 0:
            return "/v1/chat/completions", common | {"messages": USER, "max_tokens": tokens}
        case 1:
            return "/v1/responses", common | {"input": "hi", "max_output_tokens": 16 + tokens, "store": False}
        case 2:
            return "/v1/messages", common | {"messages": USER, "max_tokens": tokens}
        case 3:
            return "/api/chat", common | {"messages": USER, "options": {"num_predict": tokens}}
    words = " ".join(dice.choice(("sun", "moon", "tree", "river")) for _ in range(dice.randrange(1, 60)))
    more: dict[str, Any] = dice.choice(({}, {"n": 2}, {"logprobs": 3}, {"ignore_eos": True}))
    return "/v1/completions", common | {"prompt": words, "max_tokens": tokens} | more


async def attack(served: Served, clients: int, seconds: float, seed: int) -> tuple[Tally, Footprint, Footprint]:
    right = {}
    client = HttpClient(served.address)
    for name in NAMES:
        async with client.request("POST", "/v1/completions", ASKED | {"model": name}) as answer:
            right[name] = json.loads(await answer.body())["choices"][0]["text"]
    client.close()
    tally = Tally()
    await Crowd(served, right, tally, seed).run(clients, max(2.0, seconds / 5))  # all that grows once has grown
    before = await served.rest()
    await Crowd(served, right, tally, seed + 1000).run(clients, seconds)
    return tally, before, await served.rest(before.descriptors)


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [
        (12, 3.0),
        pytest.param(
            200,
            float(os.environ.get("HEADWAY_LOAD_SECONDS", "600")),
            marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
        ),
    ],
)
def test_a_crowd_while_models_and_adapters_change(tmp_path: Path, clients: int, seconds: float) -> None:
    with serving(tmp_path) as served:
        tally, before, after = asyncio.run(attack(served, clients, seconds, seed=clients))
        events = Counter(line["message"] for line in served.lines())
        bad = [line for line in served.lines() if line["level"] in ("error", "critical")]
    print(dict(tally.ends), before, after, dict(events))
    assert tally.wrong == []
    assert bad == []
    assert after.threads <= before.threads + POOL_THREADS
    assert after.descriptors <= before.descriptors
    assert (after.rss - before.rss) / MIB < ALLOWED_MIB, (before, after)
    assert tally.ends["compared"] > clients
    assert tally.ends["cut"] + tally.ends["left"] > clients
    assert min(tally.ends[f"{verb} an adapter: 200"] for verb in ("load", "unload")) > 0
    assert events["loading"] > len(NAMES), events  # models came again
