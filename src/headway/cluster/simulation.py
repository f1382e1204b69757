"""The router at any size: the real routing rule over simulated engines and a simulated clock.

A simulated engine has a prefix cache of so many pages, least recently used first out, and computes prompts and tokens
at a fixed rate. Conversations begin at random times, share one of a few system prompts, and come back after a pause
with everything said so far. What is real: `RoutingTable`, its summaries and when they are refreshed. What is
measured: the share of prompt pages found in caches, how evenly the work is spread, and what a decision costs.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from headway.base.dataclass import dataclass
from headway.cluster.routing import CacheSummary, RouteChoice, RouteRequest, RoutingTable


@dataclass(frozen=True)
class SimulationSettings:
    """One simulated load. Lengths are pages of 16 tokens, times are seconds."""

    replicas: int = 4
    conversations: int = 400
    turns: int = 6
    systems: int = 8  # system prompts, each shared by many conversations
    system_pages: int = 32
    turn_pages: int = 12  # of a user's message and its answer
    cache_pages: int = 4096  # of one replica
    pages_per_second: float = 60.0  # of prompts that one replica computes
    decode_seconds: float = 2.0  # of an answer, whatever else the replica does
    pause_seconds: float = 20.0  # between an answer and the next message, on average
    refresh_seconds: float = 10.0
    use: float = 0.6  # the share of the replicas' time that prompts would take without any cache
    seed: int = 0


@dataclass(frozen=True)
class SimulationResult:
    """What came of it."""

    requests: int
    prompt_pages: int
    computed_pages: int
    busiest: float  # the most that one replica computed, over the mean
    wait_mean: float  # seconds from a request's arrival to the end of its prompt
    wait_p99: float
    decision_us: float  # mean CPU time of a decision, measured
    decision_p99_us: float

    @property
    def hit_rate(self) -> float:
        """The share of prompt pages that were in a cache."""
        return 1 - self.computed_pages / self.prompt_pages


class _Engine:
    """Pages in a cache, and when the replica has computed what was sent to it."""

    def __init__(self, pages: int, rate: float) -> None:
        self._pages, self._rate = pages, rate
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.free_at, self.computed, self.load = 0.0, 0, 0

    def compute(self, keys: tuple[int, ...], now: float) -> tuple[int, float]:
        """The pages of a prompt that had to be computed, and when that is done."""
        held = 0
        while held < len(keys) and keys[held] in self.cache:
            held += 1
        missing = len(keys) - held
        for key in reversed(keys):  # the first page of a prefix is evicted last
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self._pages:
            self.cache.popitem(last=False)
        self.computed += missing
        self.free_at = max(self.free_at, now) + missing / self._rate
        return missing, self.free_at


Chooser = Callable[[RouteRequest, dict[str, int], float], RouteChoice]


def simulate(settings: SimulationSettings, *, rule: str | Callable[[list[str]], Chooser] = "warm") -> SimulationResult:
    """Run a load through the routing rule (`warm`), through `round_robin` or `least_loaded`, or through another rule:
    a function that is given the names of the replicas and makes the one that chooses."""
    names = [f"r{i}" for i in range(settings.replicas)]
    engines = {name: _Engine(settings.cache_pages, settings.pages_per_second) for name in names}
    table, times = RoutingTable(), list[float]()
    table.set_replicas(names)
    choose = _chooser(rule, table, names) if isinstance(rule, str) else rule(names)
    events, order, chance = list[tuple[float, int, str, tuple[int, ...]]](), count(), random.Random(settings.seed)

    def post(at: float, kind: str, value: tuple[int, ...] = ()) -> None:
        heapq.heappush(events, (at, next(order), kind, value))

    for i in range(settings.conversations):
        post(chance.uniform(0, _seconds(settings)), "ask", (i, 0))
    if rule == "warm":
        post(settings.refresh_seconds, "refresh")
    waits, pages, computed = list[float](), 0, 0
    while events:
        now, _, kind, value = heapq.heappop(events)
        if kind == "refresh":
            for name in names:
                table.refresh(name, CacheSummary.of(engines[name].cache), now)
            if events:
                post(now + settings.refresh_seconds, "refresh")
        elif kind == "done":
            engines[names[value[0]]].load -= 1
        else:
            conversation, turn = value
            keys = _keys(settings, conversation, turn)
            loads = {name: engine.load for name, engine in engines.items()}
            begun = time.thread_time()
            name = choose(RouteRequest(keys), loads, now).replica
            if rule == "warm":
                table.sent(name, keys, now)
            times.append(time.thread_time() - begun)
            engine = engines[name]
            missing, ready = engine.compute(keys, now)
            engine.load += 1
            pages, computed = pages + len(keys), computed + missing
            waits.append(ready - now)
            post(ready + settings.decode_seconds, "done", (names.index(name),))
            if turn + 1 < settings.turns:
                pause = chance.expovariate(1 / settings.pause_seconds)
                post(ready + settings.decode_seconds + pause, "ask", (conversation, turn + 1))
    work = [engine.computed for engine in engines.values()]
    waits.sort()
    times.sort()
    return SimulationResult(
        requests=len(waits),
        prompt_pages=pages,
        computed_pages=computed,
        busiest=max(work) / max(sum(work) / len(work), 1e-9),
        wait_mean=sum(waits) / len(waits),
        wait_p99=waits[int(0.99 * (len(waits) - 1))],
        decision_us=1e6 * sum(times) / len(times),
        decision_p99_us=1e6 * times[int(0.99 * (len(times) - 1))],
    )


def _seconds(settings: SimulationSettings) -> float:
    """How long conversations keep beginning, so that prompts alone would use the given share of all replicas."""
    pages = sum(len(_keys(settings, 0, turn)) for turn in range(settings.turns))
    return settings.conversations * pages / (settings.pages_per_second * settings.replicas * settings.use)


def _keys(settings: SimulationSettings, conversation: int, turn: int) -> tuple[int, ...]:
    """The keys of a conversation's prompt: its system prompt's, then its own."""
    system, length = conversation % settings.systems, settings.system_pages + (turn + 1) * settings.turn_pages
    own = ((conversation + settings.systems) << 20) + (1 << 19)
    return tuple(
        _mixed((system << 20) + i if i < settings.system_pages else own + i)
        for i in range(length)
    )  # fmt: skip


def _mixed(value: int) -> int:
    """A number that looks like a hash."""
    return (value * 0x9E3779B97F4A7C15) % (1 << 64)


def _chooser(rule: str, table: RoutingTable, names: list[str]) -> Chooser:
    turn = count()
    match rule:
        case "warm":
            return lambda request, loads, now: table.rank(request, loads)[0]
        case "round_robin":
            return lambda request, loads, now: RouteChoice(names[next(turn) % len(names)])
        case _:
            return lambda request, loads, now: RouteChoice(min(names, key=lambda name: loads[name]))
