"""Places on replicas: a request holds one from the moment it is routed until its response has ended.

A lease is a streaming call of the replica's `lease` method through a handle of Ray Serve. So Ray counts it as a
request under way: it waits for a place where all are taken, autoscaling sees it, and a replica that is replaced waits
for it. The bytes of the request itself go to the replica's own HTTP server.

The book is shared by the front and by `WarmRouter`, which Ray creates in the same process: the front writes what is
known of a request into it and sends only the number of its page.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import ConnectionFailed
from headway.cluster.routing import RouteChoice, RouteRequest

ROUTE_SECONDS = 30.0  # for a replica to have a place
CALL_SECONDS = 10.0  # for what is asked of all replicas at once


class NoPlace(ConnectionFailed):
    """No replica has a place for a request, or there is none."""


class ReplicaLost(ConnectionFailed):
    """The replica of a lease has died."""


@dataclass(frozen=True)
class Lease:
    """A place on a replica: its name, its HTTP server, and the secret that it wants to see."""

    replica: str
    url: str
    secret: str
    model: str
    page_size: int
    pages: int  # of the prompt that the replica was thought to hold


class LeaseBook:
    """What is known of requests that are being routed, and how many requests each replica has.

    A request counts from the moment that its replica is chosen: those that come at once see each other.
    """

    def __init__(self) -> None:
        self.front = secrets.token_hex(8)  # names this process to replicas
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._requests: dict[int, RouteRequest] = {}
        self._choices: dict[int, RouteChoice] = {}
        self.leases: Counter[str] = Counter()  # of this front, by replica
        self.replicas: frozenset[str] | None = None  # that exist, as the router was last told; None until it is

    def write(self, request: RouteRequest) -> int:
        with self._lock:
            number = next(self._numbers)
            self._requests[number] = request
        return number

    def request(self, number: int) -> RouteRequest:
        return self._requests.get(number, RouteRequest())

    def choose(self, number: int, choice: RouteChoice | None) -> None:
        """The replica that a request goes to, in place of one that was chosen before; None while it has none."""
        with self._lock:
            if number not in self._requests:  # it has ended
                return
            before = self._choices.pop(number, None)
            if choice is not None:
                self._choices[number] = choice
                self.leases[choice.replica] += 1
            self._leave(before)

    def place(self, number: int, replica: str) -> RouteChoice:
        """The choice for a request that a replica has taken: the one that was made, or this replica without pages."""
        choice = self._choices.get(number)
        if choice is None or choice.replica != replica:
            choice = RouteChoice(replica)
            self.choose(number, choice)
        return choice

    def end(self, number: int) -> None:
        with self._lock:
            self._requests.pop(number, None)
            self._leave(self._choices.pop(number, None))

    def _leave(self, choice: RouteChoice | None) -> None:
        if choice is not None:
            self.leases[choice.replica] -= 1
            if not self.leases[choice.replica]:
                del self.leases[choice.replica]


BOOK = LeaseBook()  # of this process


@asynccontextmanager
async def leased(handle: Any, request: RouteRequest, *, seconds: float = ROUTE_SECONDS) -> AsyncIterator[HeldLease]:
    """A place on the best replica for a request. Raises `NoPlace` if there is none in time."""
    number = BOOK.write(request)
    stream = handle.options(stream=True).lease.remote(number, BOOK.front)
    try:
        try:
            async with asyncio.timeout(seconds):
                given = await anext(aiter(stream))
        except TimeoutError:
            raise NoPlace(f"no replica had a place within {seconds:g} s; try again later") from None
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise _as_known(error) from error
        choice = BOOK.place(number, given["replica"])
        yield HeldLease(Lease(**given, pages=choice.pages), stream)
    finally:
        BOOK.end(number)
        with suppress(Exception):  # of a request that was refused, Ray raises the refusal again
            stream.cancel()


@dataclass(eq=False)
class HeldLease:
    """A lease while it is held."""

    lease: Lease
    _stream: Any

    async def lost(self) -> None:
        """Return when the replica has ended the lease: it has died, or is being stopped."""
        with suppress(Exception):
            await anext(aiter(self._stream))


def _as_known(error: Exception) -> Exception:
    from ray.exceptions import RayError
    from ray.serve.exceptions import BackPressureError, RayServeException

    if isinstance(error, BackPressureError):
        return NoPlace("too many requests wait for a replica; try again later")
    if isinstance(error, (RayError, RayServeException)):
        return ReplicaLost("the replica that was to compute this request was lost; send it again")
    return error


async def ask_all(handle: Any, method: str, ready: Callable[[Any], None]) -> None:
    """Call a method of every replica; those that do not respond are left out."""
    for value in await handle.broadcast(method).results_async(timeout_s=CALL_SECONDS):
        ready(value)
