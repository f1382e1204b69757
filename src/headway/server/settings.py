"""What a server is told: where it listens, whom it lets in, and every limit. Plain values, checked once."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

from headway.base.errors import InvalidInput

MIB = 1 << 20
METRICS_STYLES = ("headway", "vllm")
ANY_HOST = "*"
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # addresses that stand for all of a machine's
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]|\*", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]{1,260}|\*", re.IGNORECASE)
_NAME = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True)
class Settings:
    """One server. Sizes are bytes, times are seconds; every limit binds before the work it limits is done."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    model: str = ""  # what was asked for; clients may name it
    served_names: tuple[str, ...] = ()  # names clients use instead; the first is the one answers carry
    key_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # beside this machine's own names; "*" allows any
    log_prompts: bool = False
    log_json: bool = False
    metrics_style: str = "headway"

    max_connections: int = 512
    max_header_bytes: int = 32 << 10
    max_body_bytes: int = 8 * MIB
    max_bodies_bytes: int = 256 * MIB  # of all requests that are being read or answered
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0  # for a reader who takes nothing
    keep_alive_timeout: float = 15.0
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    step_timeout: float = 60.0  # for one step of the engine; behind it the server says that it is stuck

    max_queue_requests: int = 256  # admitted and not answered yet
    max_queue_tokens: int = 1 << 20  # prompt and answer of these, as asked for

    max_n: int = 64
    max_best_of: int = 64
    max_logprobs: int = 64
    max_stops: int = 64
    max_stop_length: int = 1024  # characters
    max_bias: int = 4096
    max_ids: int = 65_536  # of a list of allowed, stop or bad-word ids
    max_schema_bytes: int = 256 << 10
    max_grammar_seconds: float = 10.0
    max_messages: int = 4096
    max_parts: int = 16_384  # of the contents of all messages, and calls in them
    max_tools: int = 256
    max_tools_bytes: int = MIB  # of all tools together
    max_prompts: int = 256  # of one completions request
    max_prompt_scores: int = 1 << 20  # log-probabilities of prompts in an answer: tokens × (likeliest + 1) × choices
    max_answer_scores: int = 1 << 22  # the same of what is generated, when it is not streamed
    max_detokenize: int = 1 << 18  # ids of a request to /detokenize
    max_inputs: int = 2048  # texts of one request for vectors, labels or a ranking
    max_numbers: int = 1 << 22  # of the vectors in one answer

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port is {self.port}; it takes a number from 0 (any free one) to 65535")
        if self.metrics_style not in METRICS_STYLES:
            raise InvalidInput(f"metrics_style is {self.metrics_style!r}; it takes one of {', '.join(METRICS_STYLES)}")
        _each("allowed host", self.allowed_hosts, _HOST, "a host name without port, an address ([::1] for IPv6), or *")
        _each("CORS origin", self.cors_origins, _ORIGIN, "what a browser sends, such as https://app.example.org, or *")
        _each("served name", self.served_names, _NAME, "printable characters without blanks")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and field.name != "port":
                _positive(field.name, value, whole=field.type == "int")

    @property
    def public_name(self) -> str:
        """What clients see of the model that was asked for."""
        return public_name(self.model)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host == "localhost" or _is_loopback(self.host)


def public_name(model: str) -> str:
    """What clients see of a model: never the folder it lies in."""
    path = Path(model)
    if path.is_absolute() or model.startswith((".", "~")) or path.suffix == ".gguf" or path.exists():
        return path.resolve().name.removesuffix(".gguf") or "default"
    return model or "default"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _positive(name: str, value: float, *, whole: bool) -> None:
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
        raise InvalidInput(f"{name} is {value!r}; it takes a {'whole ' if whole else ''}number above 0")


def _each(what: str, values: tuple[str, ...], pattern: re.Pattern[str], takes: str) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise InvalidInput(f"{what} {value!r} cannot be used; it takes {takes}")
