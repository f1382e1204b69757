"""The server's settings: where it listens, who may call it, and every limit. Plain values, checked once."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import fields
from pathlib import Path

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.models.adapters.source import AdapterSource

MIB = 1 << 20
METRICS_STYLES = ("headway", "vllm")
PROGRAMS = ("sandbox", "process")
ON_LOAD = ("wait", "refuse")
ANY_HOST = "*"
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # wildcard addresses: every interface of the machine
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]|\*", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]{1,260}|\*", re.IGNORECASE)
_COLLECTOR = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]{1,260}(/[A-Za-z0-9._~/-]{0,1024})?")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+){1,16}")
NAME = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one server. Sizes are bytes, times are seconds; limits are checked before the work they limit."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 picks a free one
    model: str = ""  # as given on the command line; clients may use this name
    served_names: tuple[str, ...] = ()  # names for clients; responses carry the first
    key_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # in addition to this machine's own names; "*" allows any
    log_prompts: bool = False
    log_json: bool = False
    allow_chat_template: bool = False  # chats may bring a template of their own
    log_requests: bool = True  # also those that succeed
    metrics_style: str = "headway"
    otel: str | None = None  # a collector's address, which gets traces by OTLP over HTTP
    otel_bodies: bool = False  # bodies of requests and responses are in the traces
    adapters: tuple[AdapterSource, ...] = ()  # each is a model name for clients
    session_socket: Path | None = None  # also serve sessions on this file
    programs: str | None = None  # uploaded programs run in a sandbox, or in a process; None: nobody may upload one
    unconfined: bool = False  # processes of programs may run without bubblewrap
    program_dir: Path | None = None  # where installed programs are kept
    lora_dir: Path | None = None  # admin keys may load adapters from below it; None: nobody may
    ssl_certfile: Path | None = None  # TLS, with the key file
    ssl_keyfile: Path | None = None
    unix_socket: Path | None = None  # listen there, not on host and port
    root_path: str = ""  # the prefix that a proxy removes from paths
    on_load: str = "wait"  # a request for a model that is not loaded: wait, or refuse with a 503 and Retry-After
    mcp_file: Path | None = None  # the operator's MCP servers
    mcp_hosts: tuple[str, ...] = ()  # whose MCP servers requests may use, in addition to those of the file
    replica: str = ""  # which of several replicas this is; ids of what it keeps begin with it

    max_connections: int = 512
    max_header_bytes: int = 32 << 10
    max_body_bytes: int = 8 * MIB
    max_total_body_bytes: int = 256 * MIB  # of all requests in flight
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0  # for a client that does not read
    keep_alive_timeout: float = 15.0
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    step_timeout: float = 60.0  # for one step of the engine; after it /health reports "stuck"

    idle_timeout: float = 300.0  # without requests, after which one of several models is unloaded
    load_timeout: float = 600.0  # for a request to wait for its model
    max_models: int = 256  # of --models-dir
    max_loads: int = 2  # models that load at the same time

    max_queue_requests: int = 256  # admitted and not finished
    max_queue_tokens: int = 1 << 20  # their prompts plus max_tokens

    max_sessions: int = 256
    max_contexts: int = 1024  # of one session; and generations
    max_session_bytes: int = 256 * MIB  # sent to a client and not acknowledged
    max_snapshots: int = 256  # of one key
    session_grace: float = 30.0  # for a client whose connection was lost to come back

    max_programs: int = 16  # of one key, running
    max_program_bytes: int = 256 << 10  # of a program's source
    max_program_memory: int = 256 * MIB  # of one program
    max_program_cpu: float = 60.0  # seconds of CPU time of one program
    max_key_cpu: float = 960.0  # the same of all programs of one key within an hour, and of those that run
    max_program_seconds: float = 3600.0  # from a program's start to its end
    max_program_output: int = MIB  # bytes kept of what one program prints and sends
    max_kept_programs: int = 64  # programs of one key that have ended, with their output
    max_kept_bytes: int = 16 * MIB  # of their output
    max_installed_programs: int = 64  # of one key
    max_topics: int = 16  # of one program

    max_n: int = 64
    max_best_of: int = 64
    max_logprobs: int = 1 << 20  # likeliest tokens per token; more than any vocabulary has
    max_stops: int = 64
    max_stop_length: int = 1024  # characters
    max_bias: int = 4096
    max_ids: int = 65_536  # in allowed_token_ids, stop_token_ids or a bad word
    max_schema_bytes: int = 256 << 10
    max_grammar_seconds: float = 10.0
    max_messages: int = 4096
    max_parts: int = 16_384  # content parts and tool calls of all messages
    max_tools: int = 256
    max_tools_bytes: int = MIB  # of all tools
    max_mcp_servers: int = 16  # per request
    mcp_timeout: float = 30.0  # for one message of an MCP server
    max_mcp_bytes: int = MIB  # of one
    max_tool_rounds: int = 16  # of calls that the server makes for one response
    max_tool_calls: int = 64  # that it makes for one response
    max_tool_seconds: float = 120.0  # of all of them
    max_tool_output: int = 64 << 10  # bytes of all their outputs
    max_prompts: int = 256  # per completions request
    max_prompt_logprobs: int = 1 << 20  # prompt log-probabilities per response: tokens × (top + 1) × choices
    max_response_logprobs: int = 1 << 22  # the same for generated tokens, when not streaming
    max_detokenize: int = 1 << 18  # ids per request to /detokenize
    max_inputs: int = 2048  # texts per request to a pooling route
    max_audio_seconds: float = 1800.0  # of a recording
    max_audio_bytes: int = 256 * MIB  # of its decoded samples
    audio_timeout: float = 30.0  # to decode it
    max_vector_elements: int = 1 << 22  # vector elements per response
    max_loras: int = 64  # adapters loaded at once
    max_lora_rank: int = 256
    max_lora_bytes: int = 2 << 30  # of one adapter's files
    max_stored_responses: int = 1024  # of one key
    max_stored_bytes: int = 64 * MIB  # of one key's stored responses
    stored_seconds: float = 86_400.0  # that a response is kept
    max_files: int = 128  # of one key
    max_file_bytes: int = 256 * MIB  # of one key's files
    file_seconds: float = 604_800.0  # that a file is kept
    max_batches: int = 4  # of one key, under way
    max_total_batches: int = 32  # of all keys
    max_batch_requests: int = 50_000  # lines of a batch's file
    max_batch_concurrency: int = 32  # rows of all batches in flight

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port is {self.port}; it must be an integer in [0, 65535], where 0 picks a free port")
        if self.metrics_style not in METRICS_STYLES:
            raise InvalidInput(f"metrics_style is {self.metrics_style!r}; it must be {' or '.join(METRICS_STYLES)}")
        if self.on_load not in ON_LOAD:
            raise InvalidInput(f"on_load is {self.on_load!r}; it must be {' or '.join(ON_LOAD)}")
        if self.programs not in (None, *PROGRAMS):
            raise InvalidInput(f"allow_programs is {self.programs!r}; it must be {' or '.join(PROGRAMS)}")
        if self.unconfined and self.programs != "process":
            raise InvalidInput("--unconfined is for --allow-programs=process; give that too, or leave it out")
        _check_each("allowed host", self.allowed_hosts, _HOST, "a host name without a port, an IP address, or *")
        _check_each("CORS origin", self.cors_origins, _ORIGIN, "an origin such as https://app.example.org, or *")
        _check_each("served name", self.served_names, NAME, "printable characters without spaces")
        if self.lora_dir is not None and not self.lora_dir.is_dir():
            raise InvalidInput(f"lora_dir is {str(self.lora_dir)!r}; it must be a folder")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidInput("TLS needs both ssl_certfile and ssl_keyfile; pass the other one too")
        if self.otel is not None and not _COLLECTOR.fullmatch(self.otel):
            raise InvalidInput(
                f"otel is {self.otel!r:.200}; it must be a collector's URL such as http://localhost:4318"
            )
        if self.otel_bodies and self.otel is None:
            raise InvalidInput("--otel-bodies adds bodies to traces; give --otel URL too, or leave it out")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise InvalidInput(
                f"root_path is {self.root_path!r}; it must be a path such as /llm, without a slash at its end"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and field.name != "port":
                _positive(field.name, value, whole=field.type == "int")

    @property
    def public_name(self) -> str:
        """The name that clients see for the model."""
        return public_name(self.model)

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    @property
    def on_loopback(self) -> bool:
        """Whether the server is reachable only from this machine."""
        return self.unix_socket is not None or self.host == "localhost" or _is_loopback(self.host)


def public_name(model: str) -> str:
    """The name that clients see for a model: never the folder it is in."""
    path = Path(model)
    if path.is_absolute() or model.startswith((".", "~")) or path.suffix == ".gguf" or path.exists():
        return Path(os.path.abspath(path)).name.removesuffix(".gguf") or "default"  # a link keeps its own name
    return model or "default"


def owned_by(replica: str, id: str) -> str:
    """An id that says which replica has what it names; without replicas, the id."""
    return f"{replica}-{id}" if replica else id


def named_model(text: str) -> tuple[str, str]:
    """The name that clients use for a model, and the model, from NAME=MODEL or MODEL."""
    name, equals, model = text.partition("=")
    if not equals or Path(text).exists():
        return public_name(text), text
    _check_each("model name", (name,), NAME, "printable characters without spaces, as in NAME=MODEL")
    if not model:
        raise InvalidInput(f"{text!r} has no model after '='; it must be MODEL or NAME=MODEL")
    return name, model


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _positive(name: str, value: float, *, whole: bool) -> None:
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
        raise InvalidInput(f"{name} is {value!r}; it must be {'an integer' if whole else 'a number'} greater than 0")


def _check_each(what: str, values: tuple[str, ...], pattern: re.Pattern[str], expected: str) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise InvalidInput(f"{what} {value!r} is not valid; it must be {expected}")
