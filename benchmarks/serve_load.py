"""A crowd of streaming clients, many of whom leave early, against `headway serve` and a real model: does it hold?

    python benchmarks/serve_load.py                              # 200 clients for three minutes, the default model
    python benchmarks/serve_load.py --clients 20 --seconds 20    # does it run?

Every client asks again and again: completions and chats, whole and streamed, and leaves a share of them at random:
before the head, after the head, after some events. Four prompts were asked before, alone; whoever reads their answer to
its end must have the same text. The script ends with code 1 unless

- every answer is whole or a documented refusal (429, 503), and no log line is an error;
- answers to the prompts known before are those given alone;
- the server's memory is flat: once every page was in use, its resident size grows by no more than --allowance;
- in the end no page is held, nothing is queued, and SIGTERM ends it with 0.

Results go to benchmarks/results/, with the machine and its load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h11

from headway.base.system.machine import read_machine
from headway.bench.http_client import Address, HttpClient, HttpResponse
from headway.bench.load_generator import RequestResult
from headway.bench.load_report import LatencyStats
from headway.bench.server_process import ServerProcess

RESULTS = Path(__file__).parent / "results"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
REFUSALS = frozenset({429, 503})
KNOWN = ("The capital of France is", "Kubernetes pods are scheduled by the", "Once upon a time", "def fibonacci(n):")
KNOWN_TOKENS = 24
REST_SECONDS = 60.0  # until everything is released after the load
SETTLED = 0.02  # of the pages may still be untouched when memory is first looked at
MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """How large a crowd, for how long, against what."""

    model: str
    clients: int
    seconds: float
    pages: int
    threads: int | None
    seed: int
    allowance: int  # MiB
    leave: float  # the share of requests that are left early
    out: Path


@dataclass
class Tally:
    """What happened to the crowd."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # what must not happen
    outcomes: list[RequestResult] = field(default_factory=list)  # of streams that were read to their end
    known: int = 0  # answers that were held against those given alone

    def fault(self, what: str) -> None:
        self.ends["fault"] += 1
        if len(self.wrong) < 50:
            self.wrong.append(what)


@dataclass(frozen=True)
class Sample:
    """One look at the server."""

    second: float
    rss: int
    pages_free: int
    pages_held: int
    queued: int
    health_ms: float


class Crowd:
    """Clients that ask until the end, each over connections of its own."""

    def __init__(self, url: str, options: Options, right: dict[str, str], tally: Tally) -> None:
        self._address, self._options, self._right, self._tally = Address.of(url), options, right, tally
        self.end = 0.0

    async def run(self) -> None:
        self.end = time.perf_counter() + self._options.seconds
        await asyncio.gather(*(self._client(number) for number in range(self._options.clients)))

    async def _client(self, number: int) -> None:
        dice, client = random.Random(self._options.seed * 100_003 + number), HttpClient(self._address)
        await asyncio.sleep(dice.random())
        while time.perf_counter() < self.end:
            try:
                await self._request(client, dice)
            except (OSError, ValueError, KeyError, h11.ProtocolError) as error:
                self._tally.fault(f"{type(error).__name__}: {error}")
        client.close()

    async def _request(self, client: HttpClient, dice: random.Random) -> None:
        known = dice.choice(KNOWN) if dice.random() < 0.2 else None
        path, body = _body(dice, known)
        leaves, began = dice.random() < self._options.leave, time.perf_counter()
        if leaves and dice.random() < 0.4:  # at any moment, also before anything came
            try:
                async with asyncio.timeout(dice.expovariate(2.0)), client.request("POST", path, body) as answer:
                    await self._whole(answer, body, known, began)
            except TimeoutError:
                self._tally.ends["left at some moment"] += 1
            return
        async with client.request("POST", path, body) as answer:
            if leaves and body.get("stream") and answer.status == 200:
                await _some(answer, dice.randrange(12))
                self._tally.ends["left after some events"] += 1
                return
            await self._whole(answer, body, known, began)

    async def _whole(self, answer: HttpResponse, body: dict[str, Any], known: str | None, began: float) -> None:
        """Read an answer to its end, and look at it."""
        if answer.status != 200:
            await self._refused(answer)
            return
        text, done = "", not body.get("stream")
        if done:
            text = _text(json.loads(await answer.body()), "text", "message")
        else:
            outcome = RequestResult(began)
            async for data in answer.events():
                if data == "[DONE]":
                    done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    return self._tally.fault(f"an error in a stream: {event['error']}")
                outcome.events.append(time.perf_counter())
                text += _text(event, "text", "delta")
            self._tally.outcomes.append(outcome)
        if not done:
            return self._tally.fault("a stream ended before its end")
        self._tally.ends["answered"] += 1
        if known is not None:
            self._tally.known += 1
            if text != self._right[known]:
                self._tally.fault(f"{known!r} was answered {text!r} and alone {self._right[known]!r}")

    async def _refused(self, answer: HttpResponse) -> None:
        error = json.loads(await answer.body())["error"]
        if answer.status not in REFUSALS:
            return self._tally.fault(f"HTTP {answer.status}: {error}")
        self._tally.ends[f"refused {answer.status}"] += 1
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))


async def _some(answer: HttpResponse, count: int) -> None:
    if count == 0:
        return
    async for _ in answer.events():
        count -= 1
        if count == 0:
            return


def _body(dice: random.Random, known: str | None) -> tuple[str, dict[str, Any]]:
    if known is not None:
        body = {"prompt": known, "max_tokens": KNOWN_TOKENS, "temperature": 0, "stream": dice.random() < 0.7}
        return COMPLETIONS, body
    fields = {"max_tokens": dice.randrange(1, 40), "stream": dice.random() < 0.9, "temperature": dice.random()}
    if dice.random() < 0.3:
        words = " ".join(dice.choice(("sun", "moon", "tree", "river", "stone")) for _ in range(dice.randrange(1, 30)))
        return CHATS, fields | {"messages": [{"role": "user", "content": words}]}
    more: dict[str, Any] = dice.choice(({}, {}, {}, {"logprobs": 5}, {"n": 2}, {"stop": [" the"]}))
    return COMPLETIONS, fields | more | {"prompt": dice.choices(range(1000, 40_000), k=dice.randrange(4, 96))}


def _text(answer: dict[str, Any], plain: str, inner: str) -> str:
    parts = []
    for choice in answer["choices"]:
        parts.append(choice[plain] if plain in choice else choice[inner].get("content") or "")
    return "".join(parts)


# -- watching ----------------------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes of memory that a process has in use."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"there is no process {pid}")


async def look(client: HttpClient, pid: int, began: float) -> Sample:
    asked = time.perf_counter()
    status, _ = await client.json("/health")
    took = 1e3 * (time.perf_counter() - asked)
    if status != 200:
        raise ConnectionError(f"health is {status}")
    _, told = await client.json("/stats")
    stats = told["stats"]
    return Sample(
        round(asked - began, 1), resident(pid), stats["pages_free"], stats["pages_held"], stats["queued"], took
    )


async def watch(url: str, pid: int, samples: list[Sample], tally: Tally) -> None:
    """Look once a second until cancelled."""
    client, began = HttpClient(Address.of(url)), time.perf_counter()
    while True:
        try:
            samples.append(await look(client, pid, began))
        except (OSError, ValueError, KeyError, h11.ProtocolError) as error:
            tally.fault(f"the server could not be looked at: {error}")
        await asyncio.sleep(1.0)


def growth(samples: Sequence[Sample], pages: int) -> tuple[float, float]:
    """From which second on memory was looked at, and by how much it grew from then to the end, in bytes.

    Pages are memory only once they were written; until nearly all were, the server grows as it should. The beginning
    and the end are medians of a tenth of the samples.
    """
    settled = next((i for i, one in enumerate(samples) if one.pages_free <= SETTLED * pages), len(samples) // 3)
    kept = [one.rss for one in samples[settled:]]
    tenth = max(1, len(kept) // 10)
    return samples[settled].second, statistics.median(kept[-tenth:]) - statistics.median(kept[:tenth])


async def alone(url: str) -> dict[str, str]:
    """The responses to the known prompts without other load."""
    client, right = HttpClient(Address.of(url)), {}
    for prompt in KNOWN:
        body = {"prompt": prompt, "max_tokens": KNOWN_TOKENS, "temperature": 0}
        async with client.request("POST", COMPLETIONS, body) as answer:
            right[prompt] = _text(json.loads(await answer.body()), "text", "message")
    client.close()
    return right


async def rest(url: str, pid: int) -> Sample:
    """The first look at which nothing is held or queued; the last one if that never came."""
    client, end = HttpClient(Address.of(url)), time.perf_counter() + REST_SECONDS
    while True:
        seen = await look(client, pid, time.perf_counter())
        if (seen.pages_held == 0 and seen.queued == 0) or time.perf_counter() > end:
            client.close()
            return seen
        await asyncio.sleep(0.1)


async def attack(url: str, pid: int, options: Options) -> tuple[Tally, list[Sample], Sample]:
    tally, samples = Tally(), list[Sample]()
    right = await alone(url)
    watching = asyncio.create_task(watch(url, pid, samples, tally))
    await Crowd(url, options, right, tally).run()
    watching.cancel()
    return tally, samples, await rest(url, pid)


# -- telling -----------------------------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    load_before, began = os.getloadavg(), time.time()
    flags = {"threads": options.threads, "pages": options.pages}
    flags = {name: value for name, value in flags.items() if value is not None}
    with ServerProcess(options.model, flags, requests=options.clients, tokens=1 << 20) as server:
        tally, samples, last = asyncio.run(attack(server.url, server.process.pid, options))
        tally.wrong += [f"the log says {entry}" for entry in server.failures]
    found = results(options, tally, samples, last) | {"exit_code": server.process.returncode}
    if server.process.returncode != 0:
        tally.wrong.append(f"SIGTERM ended it with {server.process.returncode}")
    found["wrong"] = tally.wrong
    found["about"] = {
        "machine": asdict(read_machine()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
    }
    text = report(found)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "serve_load.txt").write_text(text)
    (options.out / "serve_load.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    print(text)
    return 1 if tally.wrong else 0


def results(options: Options, tally: Tally, samples: list[Sample], last: Sample) -> dict[str, Any]:
    since, grew = growth(samples, options.pages)
    if grew > options.allowance * MIB:
        tally.wrong.append(f"memory grew by {grew / MIB:.1f} MiB after second {since}; {options.allowance} are allowed")
    if last.pages_held or last.queued:
        tally.wrong.append(f"in the end {last.pages_held} pages were held and {last.queued} passes queued")
    firsts = [one.first for one in tally.outcomes if one.first is not None]
    gaps = [gap for one in tally.outcomes for gap in one.gaps]
    spreads = {"first event": LatencyStats.of(firsts), "between events": LatencyStats.of(gaps)}
    return {
        "options": asdict(options) | {"out": None},
        "ends": dict(tally.ends),
        "compared_with_alone": tally.known,
        "streams_read": len(tally.outcomes),
        "events_read": sum(len(one.events) for one in tally.outcomes),
        "ms": {name: None if spread is None else asdict(spread) for name, spread in spreads.items()},
        "health_ms": {
            "median": statistics.median(s.health_ms for s in samples),
            "max": max(s.health_ms for s in samples),
        },
        "memory": {
            "first_mib": samples[0].rss / MIB,
            "most_mib": max(one.rss for one in samples) / MIB,
            "flat_since_second": since,
            "growth_mib": grew / MIB,
            "allowance_mib": options.allowance,
        },
        "pages": {
            "total": options.pages,
            "most_held": max(s.pages_held for s in samples),
            "held_at_the_end": last.pages_held,
        },
        "samples": [asdict(one) for one in samples],
    }


def report(found: dict[str, Any]) -> str:
    options, about, memory, pages = found["options"], found["about"], found["memory"], found["pages"]
    machine = about["machine"]
    loads = " → ".join(f"{one[0]:.1f}" for one in (about["load_before"], about["load_after"]))
    lines = [
        f"{options['clients']} clients for {options['seconds']:g} s against {options['model']} · {machine['cpu']} · "
        f"{machine['usable_cores']} cores · load {loads} · {about['started']}",
        "",
        *(f"{name:<26} {count}" for name, count in sorted(found["ends"].items())),
        f"{'held against alone':<26} {found['compared_with_alone']}",
        f"{'events read':<26} {found['events_read']}",
        "",
        "ms                               mean     median        p99",
    ]
    for name, spread in found["ms"].items():
        if spread is not None:
            lines.append(f"{name:<26} {spread['mean']:>10.1f} {spread['median']:>10.1f} {spread['p99']:>10.1f}")
    health = found["health_ms"]
    lines += [
        f"{'health':<26} {'':>10} {health['median']:>10.1f} {health['max']:>10.1f} (most)",
        "",
        f"memory: {memory['first_mib']:.0f} MiB at first, {memory['most_mib']:.0f} at most; from second "
        f"{memory['flat_since_second']:g} to the end it grew by {memory['growth_mib']:.1f} MiB "
        f"(allowed: {memory['allowance_mib']})",
        f"pages: {pages['total']}, {pages['most_held']} held at most, {pages['held_at_the_end']} in the end; "
        f"exit code {found['exit_code']}",
        "",
        *(["nothing went wrong"] if not found["wrong"] else ["wrong:", *found["wrong"]]),
        "",
    ]
    return "\n".join(lines)


def _options() -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allowance", type=int, default=32, help="MiB by which memory may grow")
    parser.add_argument("--leave", type=float, default=0.4, help="the share of requests that are left early")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.clients < 1 or given.seconds <= 0 or not 0 <= given.leave <= 1:
        parser.error("--clients and --seconds take numbers above 0, --leave a share from 0 to 1")
    return Options(**vars(given))


if __name__ == "__main__":
    sys.exit(main())
