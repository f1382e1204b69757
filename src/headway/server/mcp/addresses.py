"""The address of a host, resolved once and checked: connecting to it cannot lead elsewhere, whatever DNS says later."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.server.mcp.messages import TRANSPORT, McpError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORTS = {"http": 80, "https": 443}
URL_CHARS = 2048
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
_TARGET = re.compile(r"[!-~]*")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class McpUrl:
    """An http(s) URL, taken apart."""

    scheme: str
    host: str  # a name or an address, without brackets
    port: int
    target: str  # path and query

    @classmethod
    def of(cls, text: str) -> McpUrl:
        """The URL in a text; `InvalidInput` says what is wrong with it."""
        if len(text) > URL_CHARS or not _TARGET.fullmatch(text):
            raise InvalidInput(f"the URL {text!r:.80} is not valid; it must be at most {URL_CHARS} ASCII characters")
        try:
            parts = urlsplit(text)
            scheme, host, port = parts.scheme, (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise InvalidInput(f"the URL {text!r:.80} is not valid: {error}") from None
        if scheme not in PORTS:
            raise InvalidInput(f"the URL {text!r:.80} has the scheme {scheme!r:.20}; it must be http or https")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise InvalidInput(f"the URL of the host {host!r:.80} has a user or a fragment; remove it")
        if literal(host) is None and not _NAME.fullmatch(host):
            raise InvalidInput(f"the URL {text!r:.80} has no valid host; it must be a name or an address")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(scheme, host, port or PORTS[scheme], target)

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"


class HostList:
    """The hosts that requests may name: names, addresses and networks."""

    def __init__(self, entries: Sequence[str]) -> None:
        names: list[str] = []
        networks: list[Network] = []
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry.strip("[]")))
            except ValueError:
                if not _NAME.fullmatch(entry.lower()) or re.fullmatch(r"[\d./:]*", entry):
                    raise InvalidInput(
                        f"the MCP host {entry!r:.80} is not valid; it must be a host name without a port, an address "
                        "or a network such as 10.1.0.0/16"
                    ) from None
                names.append(entry.lower())
        self._names, self._networks = frozenset(names), tuple(networks)

    def __bool__(self) -> bool:
        return bool(self._names or self._networks)

    def has_host(self, host: str) -> bool:
        """Whether a request may name this host."""
        address = literal(host)
        return host in self._names if address is None else self.has_address(address)

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self._networks if network.version == address.version)

    def may_connect(self, host: str, address: Address) -> bool:
        """Whether a host of the list may have this address: one that is not public must be on the list itself."""
        if self.has_address(address) or is_public(address):
            return True
        return host == "localhost" and address.is_loopback and host in self._names


def literal(host: str) -> Address | None:
    """The address that a host is, if it is not a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether an address, and any IPv4 address that it stands for, belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(one is not None and not is_public(one) for one in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


async def pinned_address(url: McpUrl, hosts: HostList | None) -> str:
    """The address to connect to, now and for as long as a session lasts. `hosts` is None for an operator's own URL."""
    if (address := literal(url.host)) is None:
        address = await _resolve(url)
    if hosts is not None and not hosts.may_connect(url.host, address):
        raise McpError(
            f"the host {url.host!r} has the address {address}, which is not public; the operator can allow it with "
            f"--mcp-host {address}",
            kind=TRANSPORT,
        )
    return str(address)


async def _resolve(url: McpUrl) -> Address:
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(str(addresses[0][4][0]).partition("%")[0])
    except (OSError, UnicodeError, ValueError, IndexError):
        raise McpError(f"the host {url.host!r} has no address", kind=TRANSPORT) from None
