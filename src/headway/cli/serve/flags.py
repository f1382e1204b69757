"""The flags of `headway serve`; those that it shares with other commands are in `flags/shared.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headway.cli.flags.declare import Option, panel
from headway.cli.flags.shared import INTEGER, NUMBER, engine_flag

access_flag = panel("Access")
limit_flag = panel("Limits")
pooling_flag = panel("Pooling models")
several_flag = panel("Several models")
program_flag = panel("Programs")
mcp_flag = panel("Tools of MCP servers")
replica_flag = panel("Replicas, on Ray")

Models = Annotated[
    list[str] | None,
    engine_flag(
        "--model",
        "-m",
        metavar="[NAME=]MODEL",
        help="A known name, a folder, a .gguf file or a hub id, and its name for clients. May be repeated.",
    ),
]
ModelsDir = Annotated[
    Path | None,
    several_flag(
        "--models-dir",
        metavar="FOLDER",
        help="Serve every model of this folder: subfolders with a config.json, and .gguf files.",
    ),
]
Keep = Annotated[
    list[str] | None,
    several_flag("--keep", metavar="NAME", help="Load this model at the start and never unload it. May be repeated."),
]
OnLoad = Annotated[
    str | None,
    several_flag(
        "--on-load",
        metavar="HOW",
        help="A request for a model that is not loaded: wait (by default), or refuse with a 503 and Retry-After.",
    ),
]
IdleTimeout = Annotated[
    float | None,
    several_flag(
        "--idle-timeout", **NUMBER, help="Seconds without requests, after which a model is unloaded; 300 by default."
    ),
]
Pages = Annotated[
    int | None,
    engine_flag("--pages", **INTEGER, help="KV cache pages of 16 tokens; by default what free memory allows."),
]
BatchTokens = Annotated[int | None, engine_flag("--max-batch-tokens", **INTEGER, help="Maximum rows per step.")]
StepMs = Annotated[
    float | None,
    engine_flag(
        "--step-ms",
        **NUMBER,
        help="Milliseconds of a step while sequences decode and prompts join; on a CPU by default 3 times one without.",
    ),
]
Names = Annotated[
    list[str] | None,
    engine_flag("--served-model-name", metavar="NAME", help="The model name that clients use. May be repeated."),
]
Embed = Annotated[
    str | None,
    pooling_flag(
        "--embed", metavar="[NAME=]MODEL", help="A model for /v1/embeddings and /pooling, and its name for clients."
    ),
]
Rerank = Annotated[str | None, pooling_flag("--rerank", metavar="[NAME=]MODEL", help="A reranker for /rerank.")]
Classify = Annotated[str | None, pooling_flag("--classify", metavar="[NAME=]MODEL", help="A classifier for /classify.")]
Audio = Annotated[
    str | None,
    pooling_flag(
        "--audio", metavar="[NAME=]MODEL", help="A speech model for /v1/audio/transcriptions and translations."
    ),
]
KeyFile = Annotated[
    Path | None, access_flag("--keys", metavar="FILE", help="A file of API keys; requests without one are rejected.")
]
NewKey = Annotated[
    str | None, access_flag("--new-key", metavar="NAME", help="Add a key to --keys FILE, print it once, and exit.")
]
Admin = Annotated[bool, access_flag("--admin", help="With --new-key: the key may load and unload adapters.")]
LoraDir = Annotated[
    Path | None,
    engine_flag(
        "--lora-dir",
        metavar="FOLDER",
        help="Let admin keys load adapters from below this folder (/v1/load_lora_adapter).",
    ),
]
SessionSocket = Annotated[
    Path | None,
    access_flag(
        "--session-socket",
        metavar="FILE",
        help="Also serve sessions (hw.connect) on this socket, for processes of this user.",
    ),
]
AllowPrograms = Annotated[
    str | None,
    program_flag(
        "--allow-programs",
        metavar="HOW",
        help="Let clients run programs here: in a WebAssembly sandbox, or, with =process, under bubblewrap.",
    ),
]
Unconfined = Annotated[
    bool, program_flag("--unconfined", help="With --allow-programs=process: also without bubblewrap.")
]
ProgramDir = Annotated[
    Path | None,
    program_flag(
        "--program-dir",
        metavar="FOLDER",
        help="Keep installed programs there; otherwise they are gone with the server.",
    ),
]
McpFile = Annotated[
    Path | None,
    mcp_flag(
        "--mcp", metavar="CONFIG", help="A JSON file of MCP servers, whose tools models may call in /v1/responses."
    ),
]
McpHosts = Annotated[
    list[str] | None,
    mcp_flag(
        "--mcp-host",
        metavar="HOST",
        help="A host, address or network whose MCP servers requests may name. May be repeated.",
    ),
]
CorsOrigins = Annotated[
    list[str] | None, access_flag("--cors-origin", metavar="ORIGIN", help="An allowed CORS origin. May be repeated.")
]
AllowedHosts = Annotated[
    list[str] | None,
    access_flag(
        "--allowed-host",
        metavar="NAME",
        help="An accepted Host header besides this machine's own; * is any. May be repeated.",
    ),
]
CertFile = Annotated[Path | None, access_flag("--ssl-certfile", metavar="FILE", help="A TLS certificate (PEM).")]
CertKey = Annotated[Path | None, access_flag("--ssl-keyfile", metavar="FILE", help="The certificate's key (PEM).")]
UnixSocket = Annotated[
    Path | None, access_flag("--unix-socket", metavar="PATH", help="Listen on a Unix socket, not on a port.")
]
RootPath = Annotated[
    str, access_flag("--root-path", metavar="PREFIX", help="The prefix that a proxy removes from paths.")
]
Replicas = Annotated[
    int | None,
    replica_flag(
        "--replicas",
        **INTEGER,
        help="Serve with N engines, each in a process of its own, on Ray; requests go where their prompt is cached.",
    ),
]
MaxReplicas = Annotated[
    int | None, replica_flag("--max-replicas", **INTEGER, help="Let Ray scale up to this many, by requests.")
]
TargetRequests = Annotated[
    int, replica_flag("--target-requests", **INTEGER, help="Requests under way on each replica that scaling aims for.")
]
ScaleDownAfter = Annotated[
    float,
    replica_flag("--scale-down-after", **NUMBER, help="Seconds with too little to do, after which a replica goes."),
]
RayAddress = Annotated[
    str | None,
    replica_flag(
        "--ray",
        metavar="ADDRESS",
        help="A Ray cluster: HOST:PORT, or auto; without it, one is started on this machine.",
    ),
]
AppName = Annotated[str, replica_flag("--app", metavar="NAME", help="The name of the replicas in the cluster.")]
Update = Annotated[
    bool, replica_flag("--update", help="Replace the replicas that run under this name, one after the other, and exit.")
]
Routing = Annotated[
    str,
    replica_flag(
        "--routing",
        metavar="RULE",
        help="warm: to the replica that has the prompt's prefix in its cache; round_robin: one after the other.",
    ),
]
RequestTimeout = Annotated[float | None, limit_flag("--request-timeout", **NUMBER, help="Seconds per request.")]
DrainTimeout = Annotated[float | None, limit_flag("--drain-timeout", **NUMBER, help="Seconds to drain after SIGTERM.")]
Limit = Annotated[
    list[str] | None,
    limit_flag(
        "--limit",
        metavar="NAME=N",
        help="Any limit, e.g. max_queue_requests=64; with --new-key, a limit of the key. May be repeated.",
    ),
]

Host = Annotated[str, Option("--host", metavar="ADDRESS", help="The address to listen on.")]
Port = Annotated[int, Option("--port", **INTEGER, help="The port; 0 takes a free one.")]
Snapshots = Annotated[
    str | None,
    engine_flag(
        "--snapshots",
        metavar="FOLDER|URL",
        help="Keep durable snapshots there: a folder, or an fsspec URL, that replicas share.",
    ),
]
MetricsStyle = Annotated[
    str, Option("--metrics-style", metavar="STYLE", help="Metric names: headway, or vllm for vLLM dashboards.")
]
Otel = Annotated[
    str | None, Option("--otel", metavar="URL", help="Send OpenTelemetry traces to this collector, by OTLP over HTTP.")
]
OtelBodies = Annotated[
    bool, Option("--otel-bodies", help="With --otel: traces have the bodies of requests and responses.")
]
LogPrompts = Annotated[bool, Option("--log-prompts", help="Log prompts.")]
AllowChatTemplate = Annotated[bool, Option("--allow-chat-template", help="Let chats bring a template of their own.")]
