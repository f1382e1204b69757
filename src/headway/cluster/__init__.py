"""Past one machine, on Ray: replicas of a server behind a front that routes, and workers of batch jobs.

    routing       which replica a request goes to: pure code, used by the front and by the simulation
    prompts       what a request begins with, as keys of the prefix cache; which replica it must go to
    simulation    the same routing over simulated engines
    connect       a Ray cluster, given or started here
    replica       one engine behind the HTTP app, as a deployment of Ray Serve
    ray_router    the routing rule as a request router of Ray Serve
    leases        a place on a replica for as long as a request takes
    front         the HTTP server that clients see: it forwards, retries and streams
    serve         `headway serve --replicas N`
    stage         `HeadwayStage`: an engine for `Dataset.map_batches`
    batch         `headway batch --ray ADDRESS`: a job through Ray Data

Ray places, restarts and scales. Nothing that a client sends is pickled: its bytes go over HTTP as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.cluster.stage import HeadwayStage

__all__ = ["HeadwayStage"]


def __getattr__(name: str) -> Any:
    if name == "HeadwayStage":
        from headway.cluster.stage import HeadwayStage

        return HeadwayStage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
