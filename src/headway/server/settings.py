"""The server's settings: where it listens, who may call it, and every limit. Plain values, checked once."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

from headway.base.errors import InvalidInput
from headway.models.adapters.source import AdapterSource

MIB = 1 << 20
METRICS_STYLES = ("headway", "vllm")
ANY_HOST = "*"
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # wildcard addresses: every interface of the machine
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]|\*", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]{1,260}|\*", re.IGNORECASE)
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+){1,16}")
_NAME = re.compile(r"[!-~]{1,256}")


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
    log_requests: bool = True  # also those that succeed
    metrics_style: str = "headway"
    adapters: tuple[AdapterSource, ...] = ()  # each is a model name for clients
    session_socket: Path | None = None  # also serve sessions on this file
    lora_dir: Path | None = None  # admin keys may load adapters from below it; None: nobody may
    ssl_certfile: Path | None = None  # TLS, with the key file
    ssl_keyfile: Path | None = None
    unix_socket: Path | None = None  # listen there, not on host and port
    root_path: str = ""  # the prefix that a proxy removes from paths

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

    max_queue_requests: int = 256  # admitted and not finished
    max_queue_tokens: int = 1 << 20  # their prompts plus max_tokens

    max_sessions: int = 256
    max_contexts: int = 1024  # of one session; and generations
    max_session_bytes: int = 256 * MIB  # sent to a client and not acknowledged
    max_snapshots: int = 256  # of one key
    session_grace: float = 30.0  # for a client whose connection was lost to come back

    max_n: int = 64
    max_best_of: int = 64
    max_logprobs: int = 64
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
    max_prompts: int = 256  # per completions request
    max_prompt_logprobs: int = 1 << 20  # prompt log-probabilities per response: tokens × (top + 1) × choices
    max_response_logprobs: int = 1 << 22  # the same for generated tokens, when not streaming
    max_detokenize: int = 1 << 18  # ids per request to /detokenize
    max_inputs: int = 2048  # texts per request to a pooling route
    max_vector_elements: int = 1 << 22  # vector elements per response
    max_loras: int = 64  # adapters loaded at once
    max_lora_rank: int = 256
    max_lora_bytes: int = 2 << 30  # of one adapter's files
    max_stored_responses: int = 1024  # of one key
    max_stored_bytes: int = 64 * MIB  # of one key's stored responses
    stored_seconds: float = 86_400.0  # that a response is kept

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port is {self.port}; it must be an integer in [0, 65535], where 0 picks a free port")
        if self.metrics_style not in METRICS_STYLES:
            raise InvalidInput(f"metrics_style is {self.metrics_style!r}; it must be {' or '.join(METRICS_STYLES)}")
        _check_each("allowed host", self.allowed_hosts, _HOST, "a host name without a port, an IP address, or *")
        _check_each("CORS origin", self.cors_origins, _ORIGIN, "an origin such as https://app.example.org, or *")
        _check_each("served name", self.served_names, _NAME, "printable characters without spaces")
        if self.lora_dir is not None and not self.lora_dir.is_dir():
            raise InvalidInput(f"lora_dir is {str(self.lora_dir)!r}; it must be a folder")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidInput("TLS needs both ssl_certfile and ssl_keyfile; pass the other one too")
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


def named_model(text: str) -> tuple[str, str]:
    """The name that clients use for a model, and the model, from NAME=MODEL or MODEL."""
    name, equals, model = text.partition("=")
    if not equals or Path(text).exists():
        return public_name(text), text
    _check_each("model name", (name,), _NAME, "printable characters without spaces, as in NAME=MODEL")
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
