"""The router of Ray Serve without a cluster: requests that come at once, replicas that are slow to tell their load."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from headway.cluster.leases import BOOK
from headway.cluster.routing import CacheSummary, RouteRequest

ray_router = pytest.importorskip("headway.cluster.ray_router", reason="Ray is not installed", exc_type=ImportError)
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata  # noqa: E402
from ray.serve.request_router import PendingRequest  # noqa: E402

PROMPT = tuple(range(1000, 1024))
DEPLOYMENT = DeploymentID("replica", "test")


class SlowReplica:
    """What Ray tells of a replica that is too busy to say how many requests it has."""

    max_ongoing_requests, multiplexed_model_ids, node_id, availability_zone = 64, frozenset[str](), "node", None

    def __init__(self, name: str) -> None:
        self.replica_id, self.actor_id = ReplicaID(name, DEPLOYMENT), name
        self.routing_stats: dict[str, Any] = {"cache": CacheSummary().packed()}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(60)
        raise AssertionError


class Routing:
    """A router of three such replicas, and the requests that it has given to them."""

    def __init__(self) -> None:
        self.replicas = [SlowReplica(name) for name in "abc"]
        self.router = ray_router.WarmRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.router.initialize_state()
        self.numbers: list[int] = []
        self.loop = asyncio.Runner()

    def run(self, *prompts: tuple[int, ...]) -> list[str]:
        """Where requests go that come at once, after a message of every replica."""
        return self.loop.run(self._run(prompts))

    async def _run(self, prompts: tuple[tuple[int, ...], ...]) -> list[str]:
        self.router.update_replicas(self.replicas)  # Ray asks new ones for their load meanwhile
        async with asyncio.timeout(30):
            return await self._sent(prompts)

    async def _sent(self, prompts: tuple[tuple[int, ...], ...]) -> list[str]:
        numbers = [BOOK.write(RouteRequest(keys)) for keys in prompts]
        self.numbers += numbers
        pending = [PendingRequest([number], {}, RequestMetadata(str(number), str(number))) for number in numbers]
        chosen = await asyncio.gather(*(self.router._choose_replica_for_request(one) for one in pending))
        for one, replica in zip(pending, chosen):
            self.router.on_request_routed(one, replica.replica_id, None)
        return [replica.replica_id.unique_id for replica in chosen]

    def end(self) -> None:
        for number in self.numbers:
            BOOK.end(number)
        self.numbers.clear()


@pytest.fixture
def routing() -> Iterator[Routing]:
    made = Routing()
    yield made
    made.end()
    made.loop.close()
    assert not BOOK.leases


def test_requests_that_come_at_once_see_each_other(routing: Routing):
    """One conversation's forks stay together; prompts that nobody has go around."""
    chosen = routing.run(*([PROMPT] * 3))
    assert len(set(chosen)) == 1
    assert BOOK.leases == {chosen[0]: 3}
    routing.end()
    assert sorted(routing.run(*((i,) for i in range(9)))) == [*"aaabbbccc"]


def test_a_replica_that_is_slow_to_say_its_load_keeps_its_conversation(routing: Routing):
    routing.replicas[1].routing_stats = {"cache": CacheSummary.of(PROMPT).packed()}
    assert routing.run(PROMPT) == ["b"]


def test_a_pile_of_requests_spreads_however_warm_its_replica_is(routing: Routing):
    routing.replicas[0].routing_stats = {"cache": CacheSummary.of(PROMPT).packed()}
    counts = Counter(routing.run(*([PROMPT] * 48)))
    assert set(counts) == {*"abc"}
    assert max(counts.values()) < 24


def test_leases_of_other_fronts_count_as_load(routing: Routing):
    routing.replicas[0].routing_stats |= {"leases": {"another": 5, BOOK.front: 9}}
    routing.replicas[1].routing_stats |= {"leases": {"another": 5}}
    assert routing.run((1,)) == ["c"]
