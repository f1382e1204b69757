"""`headway serve --replicas N`: deploys replicas on Ray Serve and runs the front in this process.

The application outlives a lost front, not the command's end: SIGTERM drains the front, then the replicas are removed.
An update (another model, other options, another number of replicas) is a rolling one: Ray starts new replicas, sends
new requests there, and stops the old ones when their requests have ended.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.base.checks import check_integer, check_number
from headway.base.dataclass import dataclass
from headway.base.errors import Closed, InvalidInput
from headway.cluster.connect import cluster, need_ray
from headway.cluster.replica import FAILED, Replica, ReplicaPlan
from headway.server import logs
from headway.server.run import Shutdown, check_certificate, check_exposure, serve_app
from headway.server.settings import ServerSettings

DEPLOYMENT = "replica"
POLL_SECONDS = 0.25
STATS_SECONDS = 2.0  # between two summaries of a replica's cache
HEALTH_SECONDS = 2.0
RULES = ("warm", "round_robin")
ALONE = {  # settings of what only one process can have
    "session_socket": "--session-socket",
    "programs": "--allow-programs",
    "program_dir": "--program-dir",
    "lora_dir": "--lora-dir",
}


@dataclass(frozen=True)
class ReplicaOptions:
    """How many replicas there are and what each needs. `max_replicas` above `replicas` lets Ray scale between them."""

    replicas: int
    max_replicas: int | None = None
    target_requests: int = 16  # under way on a replica, that scaling aims for
    scale_down_after: float = 600.0  # seconds with too little to do, after which a replica is stopped
    cpus: float = 1.0
    gpus: float | None = 0.0  # of one device; None: one if the cluster has any
    devices: int = 1  # of one replica: its tensor-parallel ranks, on one node
    app: str = "headway"
    rule: str = "warm"

    def __post_init__(self) -> None:
        check_integer(self.replicas, "replicas", 1, 100_000)
        check_integer(self.target_requests, "target_requests", 1)
        if check_number(self.scale_down_after, "scale_down_after") < 0:
            raise InvalidInput(f"scale_down_after is {self.scale_down_after}; it must be a number of seconds from 0 up")
        check_integer(self.devices, "tensor_parallel", 1, 64)
        if self.rule not in RULES:
            raise InvalidInput(f"routing is {self.rule!r}; it must be {' or '.join(RULES)}")
        if self.max_replicas is not None:
            check_integer(self.max_replicas, "max_replicas", self.replicas, 100_000)


def serve_replicas(
    plan: ReplicaPlan,
    options: ReplicaOptions,
    *,
    ray_address: str | None = None,
    find: Callable[[str], Path],
    on_listening: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve until stopped; returns the exit code. `find` turns a model's name into its path, for its tokenizer."""
    settings = plan.settings
    _check_alone(settings)
    check_exposure(settings)
    check_certificate(settings)
    need_ray()
    logs.set_up(as_json=settings.log_json)
    # What Ray puts before a replica's lines is not JSON.
    with cluster(ray_address, cpus=_cpus_here(options), quiet=settings.log_json) as ray:
        from ray import serve

        options = settled(options, ray.cluster_resources())
        if ray_address is None and (lacking := _lacking(options)):  # it does not grow
            raise InvalidInput(
                f"this machine has only {lacking['cluster_has_only']}; use fewer replicas, or --device cpu"
            )
        if _serves() and options.app in serve.status().applications:
            raise InvalidInput(
                f"the cluster already serves an application {options.app!r}; give --update to replace its replicas, or "
                "another --app"
            )
        try:
            return _deploy_and_front(plan, options, find, on_listening)
        finally:
            if ray_address is None:
                serve.shutdown()
            elif _serves():
                serve.delete(options.app, _blocking=False)


def update_replicas(plan: ReplicaPlan, options: ReplicaOptions, *, ray_address: str) -> None:
    """Replace the replicas of a running application, a few at a time; returns when the new ones serve."""
    _check_alone(plan.settings)
    with cluster(ray_address) as ray:
        from ray import serve

        options = settled(options, ray.cluster_resources())
        if not _serves() or options.app not in serve.status().applications:
            raise InvalidInput(
                f"the cluster at {ray_address} serves no application {options.app!r}; start it without --update"
            )
        deploy(plan, options)
        _wait(options)


def deploy(plan: ReplicaPlan, options: ReplicaOptions) -> None:
    """Tell Ray Serve what to run; it begins, and this returns."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.schema import LoggingConfig

    from headway.cluster.ray_router import WarmRouter

    settings = plan.settings
    if settings.key_file is not None:
        plan = replace(plan, keys=settings.key_file.read_text())
    plan = replace(plan, settings=replace(settings, key_file=None))
    most = options.max_replicas or options.replicas
    scaled: dict[str, Any] = {"num_replicas": options.replicas}
    if most > options.replicas:
        bounds = AutoscalingConfig(
            min_replicas=options.replicas,
            max_replicas=most,
            target_ongoing_requests=options.target_requests,
            downscale_delay_s=options.scale_down_after,
        )
        scaled = {"num_replicas": "auto", "autoscaling_config": bounds}
    router: Any = RequestRouterConfig  # its fields, which pyright does not see
    deployment: Any = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        **scaled,
        **_resources(options),
        max_ongoing_requests=settings.max_queue_requests + settings.max_sessions,
        max_queued_requests=settings.max_queue_requests,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=max(settings.step_timeout, 30.0),
        max_constructor_retry_count=2,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        request_router_config=router(
            request_router_class=WarmRouter,
            request_router_kwargs={"rule": options.rule},
            request_routing_stats_period_s=STATS_SECONDS,
        ),
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location="Disabled", logging_config=LoggingConfig(log_level="WARNING")
    )  # the front is the only one that clients talk to
    target = serve.RunTarget(deployment.bind(plan), name=options.app, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


def handle_of(options: ReplicaOptions) -> Any:
    """What calls the replicas of an application."""
    from ray import serve

    return serve.get_deployment_handle(DEPLOYMENT, options.app)


def settled(options: ReplicaOptions, has: Mapping[str, float]) -> ReplicaOptions:
    """The options with a number of GPUs: where nobody has chosen a device, a GPU for each if the cluster has any."""
    return replace(options, gpus=float(has.get("GPU", 0) > 0)) if options.gpus is None else options


def _resources(options: ReplicaOptions) -> dict[str, Any]:
    """What a replica takes of its node; several devices are a placement group, whose one bundle is on one node."""
    cpus, gpus = options.cpus * options.devices, (options.gpus or 0.0) * options.devices
    taken: dict[str, Any] = {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    if options.devices > 1:
        taken["placement_group_bundles"] = [{"CPU": cpus} | ({"GPU": gpus} if gpus else {})]
        taken["placement_group_strategy"] = "STRICT_PACK"
    return taken


def _deploy_and_front(
    plan: ReplicaPlan, options: ReplicaOptions, find: Callable[[str], Path], on_listening: Callable[[str], None]
) -> int:
    from headway.cluster.front import Front
    from headway.cluster.prompts import PromptReader

    deploy(plan, options)
    _wait(options)
    handle, shutdown = handle_of(options), Shutdown()
    front = Front(plan.settings, lambda: handle, lambda model, size: PromptReader(model, find(model), size))
    serve_app(front.app(), shutdown, on_listening)
    return shutdown.code


def _wait(options: ReplicaOptions) -> None:
    """Wait until the application runs; raises with the replicas' own words if they cannot start."""
    from ray import serve

    told = time.monotonic()
    while True:
        app = serve.status().applications[options.app]
        state = str(getattr(app.status, "value", app.status))
        if state == "RUNNING":
            logs.info("ready", app=options.app, replicas=options.replicas)
            return
        deployment = app.deployments.get(DEPLOYMENT)
        message = f"{app.message} {deployment.message if deployment else ''}"
        if state in ("DEPLOY_FAILED", "UNHEALTHY") or FAILED in message:
            raise Closed(_sentence(message))
        if time.monotonic() - told > 10:
            told = time.monotonic()
            logs.info("starting replicas", app=options.app, state=state, **_lacking(options))
        time.sleep(POLL_SECONDS)


def _cpus_here(options: ReplicaOptions) -> int | None:
    """The CPUs of a cluster that is started here: as many as all replicas ask for, if this machine has fewer."""
    all_of_them = replace(options, replicas=options.max_replicas or options.replicas)
    needed = math.ceil(_needed(all_of_them)["CPU"])
    return needed if needed > (os.cpu_count() or 1) else None


def _needed(options: ReplicaOptions) -> dict[str, float]:
    """What the replicas that are started at once ask of the cluster."""
    each = options.replicas * options.devices
    return {"CPU": each * options.cpus, "GPU": each * (options.gpus or 0.0)}


def _lacking(options: ReplicaOptions) -> dict[str, str]:
    """What the cluster has too little of, in words: replicas wait until it has more."""
    import ray

    has = ray.cluster_resources()
    short = [
        f"{has.get(name, 0):g} of {count:g} {name}s"
        for name, count in _needed(options).items()
        if has.get(name, 0) < count
    ]
    return {"cluster_has_only": ", ".join(short)} if short else {}


def _sentence(message: str) -> str:
    """What a replica said, without what Ray put around it."""
    if FAILED in message:
        return message.partition(FAILED)[2].partition("\n")[0].strip()
    return "the replicas cannot be started: " + " ".join(message.split())[-400:]


def _serves() -> bool:
    """Whether Ray Serve runs in the cluster."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _check_alone(settings: ServerSettings) -> None:
    for name, flag in ALONE.items():
        if getattr(settings, name) is not None:
            raise InvalidInput(f"{flag} is for one process, and --replicas starts several; leave one of them out")
