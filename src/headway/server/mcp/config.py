"""The operator's MCP servers: a JSON file, read and checked when the server starts.

{"servers": {"weather": {"command": "weather-mcp", "args": ["--metric"], "env": {"TOKEN": "…"}},
             "docs": {"url": "https://mcp.example.org/mcp", "headers": {"Authorization": "Bearer …"},
                      "timeout": 10, "allowed_tools": ["search"], "keys": ["ada"],
                      "credentials": {"ada": {"headers": {"Authorization": "Bearer …"}}}}},
 "hosts": ["mcp.example.com", "10.1.0.0/16"]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.server.mcp.addresses import HostList, McpUrl

LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
HEADER_VALUE = re.compile(r"[!-~]([ -~]{0,8190}[!-~])?|")
OWN_HEADERS = frozenset(
    (
        *("accept", "connection", "content-length", "content-type", "expect", "host", "te", "trailer"),
        *("transfer-encoding", "upgrade", "mcp-protocol-version", "mcp-session-id"),
    )
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
FIELDS = ("command", "args", "env", "url", "headers", "timeout", "allowed_tools", "keys", "credentials", "always")
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Credentials:
    """What a server gets in addition for one key."""

    headers: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class McpServerEntry:
    """One server of the file: a command, or a URL."""

    label: str
    command: tuple[str, ...] = ()
    url: McpUrl | None = None
    common: Credentials = Credentials()  # for every key
    credentials: Mapping[str, Credentials] = field(default_factory=dict)  # by the key's name
    timeout: float | None = None  # seconds for one message; None: the server's limit
    allowed_tools: frozenset[str] | None = None
    keys: frozenset[str] | None = None  # that may use it; None: all
    always: bool = False  # offered to every request

    def may_use(self, key: str) -> bool:
        return self.keys is None or key in self.keys

    def env(self, key: str) -> dict[str, str]:
        return {**self.common.env, **self.credentials.get(key, Credentials()).env}

    def headers(self, key: str) -> dict[str, str]:
        return {**self.common.headers, **self.credentials.get(key, Credentials()).headers}


@dataclass(frozen=True, eq=False)
class McpConfig:
    """The servers of the operator, and the hosts that requests may name."""

    servers: Mapping[str, McpServerEntry] = field(default_factory=dict)
    hosts: HostList = field(default_factory=lambda: HostList(()))

    @classmethod
    def read(cls, path: Path | None, hosts: Sequence[str] = ()) -> McpConfig:
        """The configuration of a file and of `--mcp-host`; a file with any error is rejected."""
        if path is None:
            return cls(hosts=HostList(hosts))
        where = f"the MCP file {str(path)!r}"
        try:
            info = path.stat()
            if info.st_size > MAX_FILE_BYTES:
                raise InvalidInput(f"{where} has {info.st_size} bytes; at most {MAX_FILE_BYTES} are read")
            value = json.loads(path.read_text())
        except OSError as error:
            raise InvalidInput(f"{where} cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"{where} is not valid JSON: {error}") from None
        if info.st_mode & 0o002:
            raise InvalidInput(f"{where} is world-writable, and its commands are run; run chmod o-w on it first")
        _check_fields(value, ("servers", "hosts"), where)
        servers = _table(value.get("servers", {}), f"{where}: servers")
        listed = _texts(value.get("hosts", []), f"{where}: hosts")
        return cls({label: _entry(label, one, where) for label, one in servers.items()}, HostList([*hosts, *listed]))


def check_headers(headers: Mapping[str, str], where: str) -> dict[str, str]:
    """Headers that may be sent to a server; `InvalidInput` names the first that may not."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name) or name.lower() in OWN_HEADERS:
            raise InvalidInput(f"{where} has {name!r:.60}, which is not a header that can be set; remove it")
        if not HEADER_VALUE.fullmatch(value):
            raise InvalidInput(f"{where}: the value of {name} must be at most 8192 printable ASCII characters")
    return dict(headers)


def _entry(label: str, value: Any, file: str) -> McpServerEntry:
    where = f"{file}: server {label!r:.80}"
    if not LABEL.fullmatch(label):
        raise InvalidInput(f"{where}: a name has 1 to 64 of A-Z a-z 0-9 _ - and begins with a letter")
    _check_fields(value, FIELDS, where)
    if ("command" in value) == ("url" in value):
        raise InvalidInput(f"{where} must have either a command or a url")
    if "url" in value and ("args" in value or "env" in value):
        raise InvalidInput(f"{where} has a url, and args or env, which are for a command; remove them")
    if "command" in value and "headers" in value:
        raise InvalidInput(f"{where} has a command, and headers, which are for a url; remove them")
    timeout = value.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise InvalidInput(f"{where}: timeout is {timeout!r:.40}; it must be a number of seconds greater than 0")
    if not isinstance(always := value.get("always", False), bool):
        raise InvalidInput(f"{where}: always is {always!r:.40}; it must be true or false")
    credentials = _table(value.get("credentials", {}), f"{where}: credentials")
    is_url = "url" in value
    return McpServerEntry(
        label,
        () if is_url else (_text(value["command"], f"{where}: command"), *_texts(value.get("args", []), where)),
        _url(_text(value["url"], f"{where}: url"), where) if is_url else None,
        _credentials(value, is_url, where),
        {
            key: _credentials(_one_key(one, is_url, f"{where}: {key}"), is_url, f"{where}: {key}")
            for key, one in credentials.items()
        },
        timeout,
        frozenset(_texts(value["allowed_tools"], f"{where}: allowed_tools")) if "allowed_tools" in value else None,
        frozenset(_texts(value["keys"], f"{where}: keys")) if "keys" in value else None,
        always,
    )


def _url(text: str, where: str) -> McpUrl:
    try:
        return McpUrl.of(text)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def _one_key(value: Any, is_url: bool, where: str) -> Any:
    _check_fields(value, ("headers",) if is_url else ("env",), where)
    return value


def _credentials(value: Mapping[str, Any], is_url: bool, where: str) -> Credentials:
    given = _table(value.get("headers" if is_url else "env", {}), where)
    texts = {name: _text(one, f"{where}: {name}", empty=True) for name, one in given.items()}
    if is_url:
        return Credentials(headers=check_headers(texts, where))
    for name, one in texts.items():
        if not _VARIABLE.fullmatch(name) or "\0" in one:
            raise InvalidInput(f"{where}: env has {name!r:.60}, which is not a variable with a text")
    return Credentials(env=texts)


def _check_fields(value: Any, known: Sequence[str], where: str) -> None:
    if unknown := sorted(set(_table(value, where)) - set(known)):
        raise InvalidInput(f"{where} has the unknown field {unknown[0]!r:.60}; the fields are {', '.join(known)}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is not a JSON object")
    return value


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list):
        raise InvalidInput(f"{where} must be a list of texts")
    return [_text(one, where) for one in value]


def _text(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or (not value and not empty) or "\0" in value:
        raise InvalidInput(f"{where} has {value!r:.40}, which is not a text")
    return value
