"""Sessions with MCP servers: the operator's, whose processes are kept, and those of URLs that a request names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.base.errors import InvalidInput
from headway.server.mcp import messages
from headway.server.mcp.addresses import McpUrl, pinned_address
from headway.server.mcp.config import McpConfig, McpServerEntry
from headway.server.mcp.http import HttpTransport
from headway.server.mcp.messages import VERSIONS, McpError, McpOutput, McpTool
from headway.server.mcp.stdio import StdioTransport
from headway.server.settings import ServerSettings

PAGES = 32  # of a list of tools
CLIENT = {"name": "headway", "version": "1"}


class McpTransport(Protocol):
    """How messages get to a server and back."""

    async def request(self, method: str, params: Mapping[str, Any], seconds: float) -> Mapping[str, Any]: ...

    async def notify(self, method: str, params: Mapping[str, Any], seconds: float) -> None: ...


class McpSession:
    """A server, ready to be asked."""

    def __init__(
        self, label: str, transport: McpTransport, seconds: float, limits: ServerSettings, tools: frozenset[str] | None
    ) -> None:
        """`seconds` are for one message, `tools` the ones that its operator allows."""
        self.label, self._transport, self._seconds, self._limits, self._allowed = (
            label,
            transport,
            seconds,
            limits,
            tools,
        )

    async def tools(self) -> list[McpTool]:
        """The server's tools, within the limits."""
        tools: list[McpTool] = []
        params: dict[str, Any] = {}
        for _ in range(PAGES):
            result = await self._transport.request("tools/list", params, self._seconds)
            tools += messages.read_tools(result)
            if len(tools) > self._limits.max_tools:
                raise McpError(f"it has more than {self._limits.max_tools} tools")
            cursor = result.get("nextCursor")
            if cursor is None:
                break
            if not isinstance(cursor, str):
                raise McpError("its list of tools has a cursor that is not a text")
            params = {"cursor": cursor}
        else:
            raise McpError(f"its list of tools has more than {PAGES} pages")
        if len({tool.name for tool in tools}) < len(tools):
            raise McpError("its list of tools has a name twice")
        return [tool for tool in tools if self._allowed is None or tool.name in self._allowed]

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float, limit: int) -> McpOutput:
        """The output of a tool, of at most `limit` bytes, within `seconds` or the server's own time."""
        params = {"name": name, "arguments": arguments}
        return messages.read_output(
            await self._transport.request("tools/call", params, min(seconds, self._seconds)), limit
        )

    async def close(self) -> None:
        """End the session. The process of a command goes on."""
        if isinstance(self._transport, HttpTransport):
            await self._transport.close()


class McpServers:
    """The operator's servers, and what requests may use besides."""

    def __init__(self, settings: ServerSettings, config: McpConfig) -> None:
        self.config, self.settings = config, settings
        self._processes: dict[tuple[str, str], StdioTransport] = {}  # by label, and by the key that has its own
        self._starting: dict[tuple[str, str], asyncio.Lock] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, settings: ServerSettings) -> McpServers:
        """Those of the server's settings; a file with any error is rejected."""
        return cls(settings, McpConfig.read(settings.mcp_file, settings.mcp_hosts))

    def entry(self, label: str, key: str) -> McpServerEntry | None:
        """The operator's server of this name, if the key may use it."""
        entry = self.config.servers.get(label)
        return entry if entry is not None and entry.may_use(key) else None

    def always(self, key: str) -> list[McpServerEntry]:
        """The operator's servers that every request gets."""
        return [entry for entry in self.config.servers.values() if entry.always and entry.may_use(key)]

    async def open(self, entry: McpServerEntry, key: str) -> McpSession:
        """A session with a server of the operator, with the credentials of a key."""
        seconds = entry.timeout or self.settings.mcp_timeout
        if entry.url is None:
            transport: McpTransport = await self._process(entry, key, seconds)
        else:
            transport = await self._http(entry.url, entry.headers(key), seconds, own=True)
        return McpSession(entry.label, transport, seconds, self.settings, entry.allowed_tools)

    async def open_url(self, label: str, url: McpUrl, headers: Mapping[str, str]) -> McpSession:
        """A session with a URL of a request, whose host is on the operator's list."""
        if not self.config.hosts.has_host(url.host):
            raise InvalidInput(
                f"the host {url.host!r:.80} is not on this server's list of MCP hosts, which its operator can extend "
                "with --mcp-host"
            )
        seconds = self.settings.mcp_timeout
        transport = await self._http(url, headers, seconds, own=False)
        return McpSession(label, transport, seconds, self.settings, None)

    def end(self, session: McpSession) -> None:
        """End a session, without waiting for its server."""
        task = asyncio.create_task(session.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all sessions and processes."""
        if self._ending:
            await asyncio.wait(self._ending)
        processes, self._processes = list(self._processes.values()), {}
        await asyncio.gather(*(process.close() for process in processes))

    async def _http(self, url: McpUrl, headers: Mapping[str, str], seconds: float, *, own: bool) -> HttpTransport:
        try:
            async with asyncio.timeout(seconds):
                address = await pinned_address(url, None if own else self.config.hosts)
        except TimeoutError:
            raise McpError(f"the address of {url.host!r:.80} was not found within {seconds:g} s") from None
        transport = HttpTransport(url, address, headers, max_bytes=self.settings.max_mcp_bytes)
        try:
            transport.version = await _handshake(transport, seconds)
        except BaseException:
            await transport.close()
            raise
        return transport

    async def _process(self, entry: McpServerEntry, key: str, seconds: float) -> StdioTransport:
        """The process of a command, started if there is none; a key with credentials has its own."""
        place = (entry.label, key if key in entry.credentials else "")
        lock = self._starting.setdefault(place, asyncio.Lock())
        try:
            await asyncio.wait_for(lock.acquire(), seconds)
        except TimeoutError:
            raise McpError(f"it did not start within {seconds:g} s", code=408) from None
        try:
            running = self._processes.get(place)
            if running is not None and running.is_alive:
                return running
            if running is not None:
                await running.close()
            started = await StdioTransport.start(
                entry.label, entry.command, entry.env(key), max_bytes=self.settings.max_mcp_bytes
            )
            self._processes[place] = started
            try:
                await _handshake(started, seconds)
            except BaseException:
                del self._processes[place]
                await asyncio.shield(started.close())
                raise
            return started
        finally:
            lock.release()


async def _handshake(transport: McpTransport, seconds: float) -> str:
    """Begin a session; returns the revision of the protocol that it has."""
    params = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": CLIENT}
    version = messages.read_version(await transport.request("initialize", params, seconds))
    if isinstance(transport, HttpTransport):
        transport.version = version
    await transport.notify("notifications/initialized", {}, seconds)
    return version


def allowed_names(tools: Sequence[McpTool], names: Sequence[str] | None, *, read_only: bool) -> list[McpTool]:
    """The tools of a request's filter."""
    kept = tools if names is None else [tool for tool in tools if tool.name in names]
    return [tool for tool in kept if tool.is_read_only or not read_only]
