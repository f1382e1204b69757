"""`headway serve`: a model over HTTP for OpenAI clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError, InvalidInput
from headway.cli.flags.declare import with_flags
from headway.cli.flags.shared import ComputeOptions, EngineOptions, Json, Lora, Speculate
from headway.cli.serve.engines import open_engine_at, open_served, served_drafter
from headway.cli.serve.flags import (
    Admin,
    AllowChatTemplate,
    AllowedHosts,
    AllowPrograms,
    AppName,
    Audio,
    BatchTokens,
    CertFile,
    CertKey,
    Classify,
    CorsOrigins,
    DrainTimeout,
    Embed,
    Host,
    IdleTimeout,
    Keep,
    KeyFile,
    Limit,
    LogPrompts,
    LoraDir,
    MaxReplicas,
    McpFile,
    McpHosts,
    MetricsStyle,
    Models,
    ModelsDir,
    Names,
    NewKey,
    OnLoad,
    Otel,
    OtelBodies,
    Pages,
    Port,
    ProgramDir,
    RayAddress,
    Replicas,
    RequestTimeout,
    Rerank,
    RootPath,
    Routing,
    ScaleDownAfter,
    SessionSocket,
    Snapshots,
    StepMs,
    TargetRequests,
    Unconfined,
    UnixSocket,
    Update,
)
from headway.cli.serve.keys import make_key, named_limits
from headway.cli.terminal.render import emit_json, fetched
from headway.models.adapters.source import AdapterSource
from headway.models.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from headway.cli.serve.models import SeveralModels
    from headway.cluster.replica import ReplicaPlan
    from headway.cluster.serve import ReplicaOptions
    from headway.server.pooling import PoolingModels


@with_flags
def serve(
    *,
    model: Models = None,
    options: ComputeOptions,
    models_dir: ModelsDir = None,
    keep: Keep = None,
    on_load: OnLoad = None,
    idle_timeout: IdleTimeout = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    pages: Pages = None,
    max_batch_tokens: BatchTokens = None,
    step_ms: StepMs = None,
    snapshots: Snapshots = None,
    speculate: Speculate = None,
    served_model_name: Names = None,
    lora: Lora = None,
    lora_dir: LoraDir = None,
    embed: Embed = None,
    rerank: Rerank = None,
    classify: Classify = None,
    audio: Audio = None,
    keys: KeyFile = None,
    new_key: NewKey = None,
    admin: Admin = False,
    session_socket: SessionSocket = None,
    allow_programs: AllowPrograms = None,
    unconfined: Unconfined = False,
    program_dir: ProgramDir = None,
    mcp: McpFile = None,
    mcp_host: McpHosts = None,
    cors_origin: CorsOrigins = None,
    allowed_host: AllowedHosts = None,
    ssl_certfile: CertFile = None,
    ssl_keyfile: CertKey = None,
    unix_socket: UnixSocket = None,
    root_path: RootPath = "",
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = None,
    limit: Limit = None,
    replicas: Replicas = None,
    max_replicas: MaxReplicas = None,
    target_requests: TargetRequests = 16,
    scale_down_after: ScaleDownAfter = 600.0,
    ray: RayAddress = None,
    app: AppName = "headway",
    update: Update = False,
    routing: Routing = "warm",
    metrics_style: MetricsStyle = "headway",
    otel: Otel = None,
    otel_bodies: OtelBodies = False,
    log_prompts: LogPrompts = False,
    allow_chat_template: AllowChatTemplate = False,
    as_json: Json = False,
) -> int:
    """Serve a model over HTTP to OpenAI clients, and the Lab at /lab. By default only this machine can reach it.

    SIGTERM or ctrl-C drains requests in flight and exits with 0; a second one does not wait.
    """
    if new_key is not None:
        make_key(keys, new_key, limit or (), admin=admin, as_json=as_json)
        return 0
    if admin:
        raise InvalidInput("--admin marks a new key; give --new-key NAME too")
    from headway.cluster.replica import ReplicaPlan
    from headway.cluster.serve import ReplicaOptions
    from headway.server import lab
    from headway.server.run import serve as run
    from headway.server.settings import ServerSettings
    from headway.server.telemetry import need_opentelemetry

    given = named_limits(ServerSettings, limit or ())
    several, served_names = _several(model, models_dir, keep, lora, speculate), tuple(served_model_name or ())
    if several is None:
        served_names, only = _only_model(model, served_names)
        if on_load is not None or idle_timeout is not None:
            raise InvalidInput("--on-load and --idle-timeout are for several models; pass --models-dir or more --model")
    else:
        only = ""
        if served_names:
            raise InvalidInput("--served-model-name is for one model; with several, pass --model NAME=MODEL")
    _check_listening(unix_socket, host, port)
    timeouts = {"request_timeout": request_timeout, "drain_timeout": drain_timeout, "idle_timeout": idle_timeout}
    for name, value in timeouts.items():
        if value is not None:
            given[name] = value
    settings = ServerSettings(
        host=host,
        port=port,
        model=only,
        served_names=served_names,
        on_load=on_load or "wait",
        key_file=keys,
        session_socket=session_socket,
        programs=allow_programs,
        unconfined=unconfined,
        program_dir=program_dir,
        mcp_file=mcp,
        mcp_hosts=tuple(mcp_host or ()),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        log_prompts=log_prompts,
        allow_chat_template=allow_chat_template,
        log_json=as_json,
        metrics_style=metrics_style,
        otel=otel,
        otel_bodies=otel_bodies,
        adapters=() if several is not None else tuple(AdapterSource.of(text) for text in lora or ()),
        lora_dir=_with_keys(lora_dir, keys),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        unix_socket=unix_socket,
        root_path=root_path,
        **given,
    )
    if otel is not None:
        need_opentelemetry()
    scaled: dict[str, Any] = {"target_requests": target_requests, "scale_down_after": scale_down_after}
    _check_replica_flags(
        replicas, scaled, {"app": app, "rule": routing}, max_replicas=max_replicas, others=bool(ray) or update
    )
    if replicas is not None and several is not None:
        raise InvalidInput("--replicas serves one model; start a server of its own for each of the others")
    sizes = {"pages": pages, "max_batch_tokens": max_batch_tokens, "step_ms": step_ms, "snapshots": snapshots}
    one = EngineOptions(only, **options.given())
    open_engine = partial(open_served, one, **sizes)
    pools = {"embed": embed, "rerank": rerank, "classify": classify, "audio": audio}
    open_pooling = partial(_pools, pools, options.device)
    drafts = several is None and speculate is not None
    open_drafter = partial(served_drafter, str(speculate), one) if drafts else None
    try:
        if replicas is not None:
            code = _serve_replicas(
                ReplicaPlan(only, settings, open_engine, open_pooling, open_drafter, _lab),
                ReplicaOptions(replicas, max_replicas, **scaled, **_resources(one), app=app, rule=routing),
                ray,
                update=update,
            )
        else:
            models = open_engine if several is None else several.sources(settings, options, sizes, open_engine_at)
            code = run(settings, models, [lab.router], pooling_models=open_pooling(), open_drafter=open_drafter)
    except HeadwayError as error:
        if not as_json:
            raise
        emit_json(
            {"error": {"type": type(error).__name__, "message": str(error)}}, indent=None
        )  # one line, as in the log
        code = 2
    return code


def _serve_replicas(plan: ReplicaPlan, options: ReplicaOptions, address: str | None, *, update: bool) -> int:
    from headway.cluster.serve import serve_replicas, update_replicas

    if not update:
        return serve_replicas(plan, options, ray_address=address, find=fetched)
    if address is None:
        raise InvalidInput("--update is for a cluster that runs already; give its address with --ray")
    update_replicas(plan, options, ray_address=address)
    return 0


def _lab() -> Sequence[Any]:
    """The Lab's routes, in the process of a replica."""
    from headway.server import lab

    return [lab.router]


def _check_replica_flags(
    replicas: int | None,
    scaled: dict[str, Any],
    placed: dict[str, Any],
    *,
    max_replicas: int | None,
    others: bool,
) -> None:
    """Refuse flags that would do nothing."""
    if replicas is None and (max_replicas or others or _changed({**scaled, **placed})):
        raise InvalidInput(
            "--max-replicas, --target-requests, --scale-down-after, --ray, --app, --update and --routing are about "
            "replicas; give --replicas N too"
        )
    if max_replicas is None and _changed(scaled):
        raise InvalidInput("--target-requests and --scale-down-after are about scaling; give --max-replicas N too")


def _changed(given: dict[str, Any]) -> bool:
    """Whether any of these is not as replicas have it without a flag."""
    from headway.cluster.serve import ReplicaOptions

    return any(getattr(ReplicaOptions, name) != value for name, value in given.items())


def _resources(options: EngineOptions) -> dict[str, Any]:
    """What one replica takes of its node, for Ray to place it."""
    if options.device.startswith("cuda"):
        return {"cpus": 1.0, "gpus": 1.0, "devices": options.tensor_parallel}
    ranks = options.tensor_parallel  # which share the engine's threads
    gpus = None if options.device == "auto" else 0.0
    return {"cpus": float(max(1, (options.threads or 1) // ranks)), "gpus": gpus, "devices": ranks}


def _pools(models: dict[str, str | None], device: str) -> PoolingModels:
    """The pooling models, to be fetched and loaded together with the engine's."""
    from headway.server.pooling import PoolingModels

    return PoolingModels(
        {role: model for role, model in models.items() if model is not None}, device=device, find=fetched
    )


def _with_keys(lora_dir: Path | None, keys: Path | None) -> Path | None:
    """The folder of adapters; raises where nobody could load one."""
    if lora_dir is not None and keys is None:
        raise InvalidInput("--lora-dir lets admin keys load adapters, and there are no keys; give --keys FILE too")
    return lora_dir


def _check_listening(unix_socket: Path | None, host: str, port: int) -> None:
    """Raise where a server would have to listen at two places."""
    from headway.server.settings import ServerSettings

    if unix_socket is not None and (host, port) != (ServerSettings.host, ServerSettings.port):
        raise InvalidInput(f"--unix-socket listens at a path, not at {host}:{port}; leave out --host and --port")


def _several(
    models: list[str] | None,
    folder: Path | None,
    keep: list[str] | None,
    lora: list[str] | None,
    speculate: str | None,
) -> SeveralModels | None:
    """What was asked for, if it is more than one model."""
    if len(models or ()) <= 1 and folder is None:
        if keep:
            raise InvalidInput("--keep is for several models, and the only one always stays; leave it out")
        return None
    from headway.cli.serve.models import SeveralModels

    adapters = [AdapterSource.of(text) for text in lora or ()]
    return SeveralModels.of(models or (), folder, keep or (), adapters, speculate)


def _only_model(models: list[str] | None, names: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The names of the only model, and the model."""
    from headway.server.settings import named_model, public_name

    given = (models or [DEFAULT_MODEL])[0]
    name, model = named_model(given)
    if names and name != public_name(model):
        raise InvalidInput(f"--model {given!r} and --served-model-name both name the model; give one of them")
    return names or (() if name == public_name(model) else (name,)), model
