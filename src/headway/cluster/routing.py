"""Which replica a request goes to: pure code, without Ray and without a clock of its own.

A request brings the keys of its prompt's pages, chained from the first page on, as the prefix cache has them. Each
replica tells now and then which keys it holds (a `CacheSummary`); what was sent to it since is assumed to be there
too. A request costs a replica the pages that it lacks, and what its load is worth in pages (`load_pages`): the
cheapest replica is taken. So a conversation and its forks stay together until their replica has so much more to do
than another that computing the prompt again is cheaper.

Requests that belong to one replica (a session, a stored response) name it; requests of one key that share state go to
that key's home, by rendezvous hashing, so that few keys move when replicas come and go.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from hashlib import blake2b

from headway.base.dataclass import dataclass

MAX_SUMMARY = 4096  # keys of a summary: 32 KiB
MAX_RECENT = 8192  # keys of what was sent to a replica and is not in its summary yet
RECENT_SECONDS = 30.0  # after which a key that no summary has confirmed is forgotten
MAX_CHOICES = 4  # replicas that are tried for a request before all others
KEY_BYTES = 8  # of a page's key that are kept; two pages rarely share them, and then only a guess is wrong


def load_pages(more: int) -> float:
    """Pages of prompt worth computing again to avoid a replica with so many more requests under way than another.

    A few more cost little, as one batch carries them; each one waits for all others, so that many cost more than any
    prompt: the price is quadratic.
    """
    return more * more / 2


def short_key(key: bytes) -> int:
    """A page's key as summaries have it."""
    return int.from_bytes(key[:KEY_BYTES], "little")


@dataclass(frozen=True)
class CacheSummary:
    """The keys of pages that a replica holds: all of them, or those that are a multiple of `every`."""

    keys: frozenset[int] = frozenset()
    every: int = 1

    @classmethod
    def of(cls, keys: Iterable[int], limit: int = MAX_SUMMARY) -> CacheSummary:
        """A summary of at most `limit` keys: every second, every fourth … key, chosen by the keys themselves."""
        kept, every = frozenset(keys), 1
        while len(kept) > limit:
            every *= 2
            kept = frozenset(key for key in kept if key % every == 0)
        return cls(kept, every)

    def packed(self) -> bytes:
        return struct.pack(f"<{len(self.keys) + 1}Q", self.every, *sorted(self.keys))

    @classmethod
    def unpacked(cls, data: bytes) -> CacheSummary:
        every, *keys = struct.unpack(f"<{len(data) // 8}Q", data)
        return cls(frozenset(keys), every)


@dataclass(frozen=True)
class RouteRequest:
    """What is known of a request before it is routed.

    `keys` are those of its prompt's whole pages. `replica` names the only replica that has what it asks for; `home` is
    the name whose requests go to one replica. `avoid` are replicas that failed it already.
    """

    keys: tuple[int, ...] = ()
    replica: str | None = None
    home: str | None = None
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RouteChoice:
    """A replica, and how many of the prompt's pages it is thought to hold."""

    replica: str
    pages: int = 0


@dataclass(eq=False)
class _Known:
    summary: CacheSummary = CacheSummary()
    recent: OrderedDict[int, float] = field(default_factory=OrderedDict)  # when each was sent, oldest first
    chosen: int = 0  # the number of the last request that went there


class RoutingTable:
    """What is known of every replica. Not thread-safe: whoever routes owns it."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._holders: dict[int, set[str]] = {}  # of each key
        self._count = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._known)

    def set_replicas(self, names: Iterable[str]) -> None:
        """These replicas exist now; what was known of others is forgotten."""
        names = dict.fromkeys(names)  # in order
        for name in self._known.keys() - names.keys():
            known = self._known.pop(name)
            for key in {*known.summary.keys, *known.recent}:
                self._drop(name, key)
        for name in names:
            self._known.setdefault(name, _Known())

    def refresh(self, name: str, summary: CacheSummary, now: float) -> None:
        """A replica's new summary. It ends what was only assumed, except for what was sent just now."""
        known = self._known.get(name)
        if known is None or summary is known.summary:
            return
        before, known.summary = known.summary, summary
        for key in before.keys - summary.keys:
            if key not in known.recent:
                self._drop(name, key)
        for key in summary.keys - before.keys:
            self._holders.setdefault(key, set()).add(name)
        self._forget_recent(name, known, now - RECENT_SECONDS)

    def sent(self, name: str, keys: Sequence[int], now: float) -> None:
        """A request with these keys went to a replica: it will hold them."""
        known = self._known.get(name)
        if known is None:
            return
        self._count += 1
        known.chosen = self._count
        for key in keys:
            known.recent[key] = now
            known.recent.move_to_end(key)
            self._holders.setdefault(key, set()).add(name)
        self._forget_recent(name, known, now - RECENT_SECONDS)

    def rank(self, request: RouteRequest, loads: Mapping[str, int]) -> list[RouteChoice]:
        """The replicas for a request, best first: at most a few, and the least loaded one among them.

        `loads` has the requests under way on each replica that may be chosen.
        """
        names = [name for name in self._known if name in loads and name not in request.avoid]
        if request.replica in names:  # nobody else has it
            return [RouteChoice(request.replica)]
        if not names:
            return []
        if request.home is not None:
            return [RouteChoice(name) for name in rendezvous(request.home, names)[:3]]

        def busy(name: str) -> tuple[int, int]:
            return loads[name], self._known[name].chosen

        idle, allowed = min(names, key=busy), set(names)
        held = {min(group, key=busy): pages for group, pages in self._held(request.keys, allowed)}
        held.setdefault(idle, 0)

        def cost(name: str) -> tuple[float, int, int]:
            lacking = len(request.keys) - held[name]
            return lacking + load_pages(loads[name] - loads[idle]), *busy(name)

        return [RouteChoice(name, held[name]) for name in sorted(held, key=cost)[:MAX_CHOICES]]

    def _held(self, keys: Sequence[int], allowed: set[str]) -> Iterator[tuple[set[str], int]]:
        """The replicas that hold the same number of these pages, counted up to the last one they hold: most first."""
        left = allowed
        for i in range(len(keys) - 1, -1, -1):
            if (group := left.intersection(self._holders.get(keys[i], ()))) and left:
                yield group, i + 1
                left = left - group

    def _forget_recent(self, name: str, known: _Known, before: float) -> None:
        recent = known.recent
        while recent and (len(recent) > MAX_RECENT or next(iter(recent.values())) < before):
            key, _ = recent.popitem(last=False)
            if key not in known.summary.keys:
                self._drop(name, key)

    def _drop(self, name: str, key: int) -> None:
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(name)
            if not holders:
                del self._holders[key]


def others_leases(by_front: Mapping[str, int], front: str) -> int:
    """The leases that other fronts hold, as a replica last told. Its own a front knows better: they may have ended."""
    return sum(count for name, count in by_front.items() if name != front)


def rendezvous(value: str, names: Iterable[str]) -> list[str]:
    """The names in an order that depends on the value; without one of them, the others keep their order."""

    def weight(name: str) -> bytes:
        return blake2b(f"{value}\0{name}".encode(), digest_size=8).digest()

    return sorted(names, key=weight)
