"""The routing rule as a request router of Ray Serve: it runs in the process of each front.

Ray tells it which replicas there are and what each has to say of itself (`record_routing_stats`: the summary of its
cache); it ranks them by `RoutingTable`, and Ray sees to it that none gets more requests than it has places: a full
replica rejects a request, which is then routed again. So nobody need be asked for its load first: Ray would ask, and
take the next best replica where the answer is not there in a tenth of a second, which a replica at work may well need.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headway.cluster import leases  # the module: Ray copies this class, and the book must stay one
from headway.cluster.routing import CacheSummary, RouteChoice, RouteRequest, RoutingTable, others_leases


class WarmRouter(RequestRouter):
    """Sends each request to the replica for which it is the least work. `rule` is warm or round_robin."""

    def initialize_state(self, rule: str = "warm", **kwargs: Any) -> None:
        self._rule = rule
        self._table = RoutingTable()
        self._packed: dict[str, bytes] = {}
        self._unavailable: set[str] = set()  # Ray asks these whether they are back
        self._others: dict[str, int] = {}  # requests of other fronts
        self._turn = 0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        now, names = time.monotonic(), [_name(replica) for replica in replicas]
        self._set_replicas(names)
        self._packed = {name: data for name, data in self._packed.items() if name in set(names)}
        self._others, self._unavailable = {}, set()
        for replica in replicas:
            name, packed = _name(replica), replica.routing_stats.get("cache")
            self._others[name] = others_leases(replica.routing_stats.get("leases", {}), leases.BOOK.front)
            if isinstance(packed, bytes) and packed != self._packed.get(name):
                self._packed[name] = packed
                self._table.refresh(name, CacheSummary.unpacked(packed), now)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._set_replicas([_name(replica) for replica in self.curr_replicas.values()])

    def _set_replicas(self, names: list[str]) -> None:
        self._table.set_replicas(names)
        leases.BOOK.replicas = frozenset(names)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._unavailable.add(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {_name(replica): replica for replica in candidate_replicas}
        number = _number(pending_request)
        request = leases.BOOK.request(number)
        leases.BOOK.choose(number, None)  # it may be asked for again, and is no load for itself
        loads = {name: self._load(name) for name in by_name}
        ranked = [choice for choice in self._ranked(request, loads) if choice.replica in by_name]
        if ranked:
            leases.BOOK.choose(number, ranked[0])
            self._table.sent(ranked[0].replica, request.keys, time.monotonic())
        for choice in ranked:
            self._tell_load(by_name[choice.replica], loads[choice.replica])
        best = [[by_name[choice.replica]] for choice in ranked]
        if request.replica in by_name:
            return best
        taken = {choice.replica for choice in ranked} | request.avoid
        return [*best, [replica for name, replica in by_name.items() if name not in taken]]

    def _tell_load(self, replica: RunningReplica, load: int) -> None:
        """Ray's own count of a replica's requests, where it has none, so that it does not ask for it."""
        known = self.replica_queue_len_cache.get(replica.replica_id)
        if known is None and _name(replica) not in self._unavailable:
            self.on_new_queue_len_info(replica.replica_id, load)

    def _ranked(self, request: RouteRequest, loads: dict[str, int]) -> list[RouteChoice]:
        if self._rule == "round_robin" and request.replica is None and request.home is None:
            names = sorted(loads.keys() - request.avoid)
            self._turn += 1
            return [RouteChoice(names[self._turn % len(names)])] if names else []
        return self._table.rank(request, loads)

    def _load(self, name: str) -> int:
        """Requests under way: this front's, which it knows, and those of others as the replica last told."""
        return leases.BOOK.leases[name] + self._others.get(name, 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        number, name = _number(pending_request), replica_id.unique_id
        leases.BOOK.place(number, name)
        self._table.sent(name, leases.BOOK.request(number).keys, time.monotonic())


def _name(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id


def _number(request: PendingRequest | None) -> int:
    args = () if request is None else request.args
    return args[0] if args and isinstance(args[0], int) else 0
