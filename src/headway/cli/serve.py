"""`headway serve`: a model over HTTP for OpenAI clients, and its API keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.base.errors import HeadwayError, InvalidInput
from headway.base.log import log_event
from headway.cli.flags import with_flags
from headway.cli.options import (
    ENGINE,
    INTEGER,
    NUMBER,
    EngineOptions,
    Json,
    Lora,
    Speculate,
    integer,
    named_drafter,
    number,
)
from headway.cli.render import PLAIN_SECONDS, emit_json, fetched, note
from headway.models.adapters.source import AdapterSource

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter
    from headway.server.pooling import PoolingModels

ACCESS = "Access"
LIMITS = "Limits"
POOLING = "Pooling models"

Pages = Annotated[
    int | None,
    typer.Option(
        "--pages",
        **INTEGER,
        help="KV cache pages of 16 tokens; by default what free memory allows.",
        rich_help_panel=ENGINE,
    ),
]
BatchTokens = Annotated[
    int | None, typer.Option("--max-batch-tokens", **INTEGER, help="Maximum rows per step.", rich_help_panel=ENGINE)
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME",
        help="The model name that clients use. May be repeated.",
        rich_help_panel=ENGINE,
    ),
]
Embed = Annotated[
    str | None,
    typer.Option(
        "--embed",
        metavar="[NAME=]MODEL",
        help="A model for /v1/embeddings and /pooling, and its name for clients.",
        rich_help_panel=POOLING,
    ),
]
Rerank = Annotated[
    str | None,
    typer.Option("--rerank", metavar="[NAME=]MODEL", help="A reranker for /rerank.", rich_help_panel=POOLING),
]
Classify = Annotated[
    str | None,
    typer.Option("--classify", metavar="[NAME=]MODEL", help="A classifier for /classify.", rich_help_panel=POOLING),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="FILE", help="A file of API keys; requests without one are rejected.", rich_help_panel=ACCESS
    ),
]
NewKey = Annotated[
    str | None,
    typer.Option(
        "--new-key", metavar="NAME", help="Add a key to --keys FILE, print it once, and exit.", rich_help_panel=ACCESS
    ),
]
Admin = Annotated[
    bool,
    typer.Option("--admin", help="With --new-key: the key may load and unload adapters.", rich_help_panel=ACCESS),
]
LoraDir = Annotated[
    Path | None,
    typer.Option(
        "--lora-dir",
        metavar="FOLDER",
        help="Let admin keys load adapters from below this folder (/v1/load_lora_adapter).",
        rich_help_panel=ENGINE,
    ),
]
SessionSocket = Annotated[
    Path | None,
    typer.Option(
        "--session-socket",
        metavar="FILE",
        help="Also serve sessions (hw.connect) on this socket, for processes of this user.",
        rich_help_panel=ACCESS,
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        help="An allowed CORS origin. May be repeated.",
        rich_help_panel=ACCESS,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="An accepted Host header besides this machine's own; * is any. May be repeated.",
        rich_help_panel=ACCESS,
    ),
]
CertFile = Annotated[
    Path | None,
    typer.Option("--ssl-certfile", metavar="FILE", help="A TLS certificate (PEM).", rich_help_panel=ACCESS),
]
CertKey = Annotated[
    Path | None,
    typer.Option("--ssl-keyfile", metavar="FILE", help="The certificate's key (PEM).", rich_help_panel=ACCESS),
]
UnixSocket = Annotated[
    Path | None,
    typer.Option(
        "--unix-socket", metavar="PATH", help="Listen on a Unix socket, not on a port.", rich_help_panel=ACCESS
    ),
]
RootPath = Annotated[
    str,
    typer.Option(
        "--root-path", metavar="PREFIX", help="The prefix that a proxy removes from paths.", rich_help_panel=ACCESS
    ),
]
RequestTimeout = Annotated[
    float | None, typer.Option("--request-timeout", **NUMBER, help="Seconds per request.", rich_help_panel=LIMITS)
]
DrainTimeout = Annotated[
    float | None,
    typer.Option("--drain-timeout", **NUMBER, help="Seconds to drain after SIGTERM.", rich_help_panel=LIMITS),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N",
        help="Any limit, e.g. max_queue_requests=64; with --new-key, a limit of the key. May be repeated.",
        rich_help_panel=LIMITS,
    ),
]


@with_flags
def serve(
    *,
    options: EngineOptions,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", **INTEGER, help="The port; 0 takes a free one.")] = 8000,
    pages: Pages = None,
    max_batch_tokens: BatchTokens = None,
    speculate: Speculate = None,
    served_model_name: Names = None,
    lora: Lora = None,
    lora_dir: LoraDir = None,
    embed: Embed = None,
    rerank: Rerank = None,
    classify: Classify = None,
    keys: KeyFile = None,
    new_key: NewKey = None,
    admin: Admin = False,
    session_socket: SessionSocket = None,
    cors_origin: CorsOrigins = None,
    allowed_host: AllowedHosts = None,
    ssl_certfile: CertFile = None,
    ssl_keyfile: CertKey = None,
    unix_socket: UnixSocket = None,
    root_path: RootPath = "",
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = None,
    limit: Limit = None,
    metrics_style: Annotated[
        str,
        typer.Option("--metrics-style", metavar="STYLE", help="Metric names: headway, or vllm for vLLM dashboards."),
    ] = "headway",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log prompts.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a model over HTTP to OpenAI clients, and the Lab at /lab. By default only this machine can reach it.

    SIGTERM or ctrl-C drains requests in flight and exits with 0; a second one does not wait.
    """
    if new_key is not None:
        return _make_key(keys, new_key, limit or (), admin=admin, as_json=as_json)
    if admin:
        raise InvalidInput("--admin marks a new key; give --new-key NAME too")
    from headway.server import lab
    from headway.server.run import serve as run
    from headway.server.settings import ServerSettings

    given = _limits(ServerSettings, limit or ())
    for name, value in (("request_timeout", request_timeout), ("drain_timeout", drain_timeout)):
        if value is not None:
            given[name] = value
    settings = ServerSettings(
        host=host,
        port=port,
        model=options.model,
        served_names=tuple(served_model_name or ()),
        key_file=keys,
        session_socket=session_socket,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        log_prompts=log_prompts,
        log_json=as_json,
        metrics_style=metrics_style,
        adapters=tuple(AdapterSource.of(text) for text in lora or ()),
        lora_dir=lora_dir,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        unix_socket=unix_socket,
        root_path=root_path,
        **given,
    )
    try:
        code = run(
            settings,
            lambda: open_served(options, pages, max_batch_tokens),
            [lab.router],
            pooling_models=_pools({"embed": embed, "rerank": rerank, "classify": classify}, options.device),
            open_drafter=None if speculate is None else lambda: served_drafter(speculate, options),
        )
    except HeadwayError as error:
        if not as_json:
            raise
        emit_json(
            {"error": {"type": type(error).__name__, "message": str(error)}}, indent=None
        )  # one line, as in the log
        code = 2
    raise typer.Exit(code)


def _pools(models: dict[str, str | None], device: str) -> PoolingModels:
    """The pooling models, to be fetched and loaded together with the engine's."""
    from headway.server.pooling import PoolingModels

    return PoolingModels(
        {role: model for role, model in models.items() if model is not None}, device=device, find=fetched
    )


def open_served(options: EngineOptions, pages: int | None = None, max_batch_tokens: int | None = None) -> Engine:
    """A server's engine, with everything loaded that the first request would otherwise wait for."""
    import headway as hw

    path = fetched(options.model)
    engine = hw.Engine(path, **options.given(), pages=pages, max_batch_tokens=max_batch_tokens, progress=LoadingLog())
    _ = engine.chat_template, engine.generation_defaults
    return engine


def served_drafter(name: str, options: EngineOptions) -> Drafter:
    """What drafts for every request; a draft model stays loaded as long as the server runs."""
    import headway as hw

    if (own := named_drafter(name)) is not None:
        return own
    return hw.DraftModel(open_served(replace(options, model=name, quantize=None, memory_fraction=None, memory=None)))


class LoadingLog:
    """Logs how much of a model is loaded, every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PLAIN_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + PLAIN_SECONDS
            log_event("loading layers", done=done, total=total)


def _make_key(path: Path | None, name: str, limits: Sequence[str], *, admin: bool, as_json: bool) -> None:
    from headway.server.keys import TenantLimits, add_key

    if path is None:
        raise InvalidInput("--new-key needs --keys FILE, where the key's hash is stored")
    secret = add_key(path, name, TenantLimits(**_limits(TenantLimits, limits)), admin=admin)
    if as_json:
        emit_json({"name": name, "key": secret, "file": str(path)})
    else:
        print(secret)
        note(f"this key is shown only once; {path} has its hash under the name {name}")


def _limits(of: type[Any], given: Sequence[str]) -> dict[str, Any]:
    """Parsed `NAME=N` values for the numeric fields of a dataclass."""
    known = {f.name: f.type for f in fields(of) if f.name != "port" and str(f.type).split(" ")[0] in ("int", "float")}
    values: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            raise InvalidInput(
                f"--limit {text!r} is not known; it must be NAME=N with NAME one of {', '.join(sorted(known))}"
            )
        values[name] = _limit(text, value, integral=str(known[name]).startswith("int"))
    return values


def _limit(text: str, value: str, *, integral: bool) -> float:
    try:
        return integer(value) if integral else number(value)
    except typer.BadParameter:
        kind = "an integer" if integral else "a number"
        raise InvalidInput(f"--limit {text!r} has {value!r}; it must be NAME=N, where N is {kind}") from None
