"""The tools of MCP servers that a request may use: the operator's servers by name, and URLs on the operator's list."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.program.chat.tools import NAME
from headway.server.api.request_schema import FunctionDefinition
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.mcp.addresses import McpUrl
from headway.server.mcp.config import LABEL, McpServerEntry, check_headers
from headway.server.mcp.messages import McpError, McpTool
from headway.server.mcp.servers import McpServers, McpSession, allowed_names
from headway.server.responses.output import ApprovedCall, ResponseTools
from headway.server.responses.request_schema import McpApprovals, McpServerTool, McpToolFilter, PromptRequest
from headway.server.settings import ServerSettings

NAME_CHARS = 64


@dataclass(frozen=True, eq=False)
class OfferedServer:
    """A server of a request, and those of its tools that the model may call."""

    session: McpSession
    tools: Sequence[McpTool]
    asking: Collection[str] = ()  # tools, by their own names, whose calls need an approval
    description: str = ""  # of the server, for the model


class OfferedTools:
    """Sessions with MCP servers, and their tools under the names that the model knows."""

    def __init__(self, servers: McpServers, offered: Sequence[OfferedServer], taken: set[str]) -> None:
        """`taken` are names of tools that the client has itself."""
        self._servers, self._offered = servers, offered
        self.tools: dict[str, tuple[McpSession, McpTool]] = {}  # by the name for the model
        self.asking: set[str] = set()  # of these, the ones whose calls need an approval
        self.definitions: dict[str, dict[str, FunctionDefinition]] = {}  # by label, and by the tool's own name
        for one in offered:
            own = self.definitions[one.session.label] = {}
            for tool in one.tools:
                name = _model_name(one.session.label, tool.name, taken | set(self.tools))
                self.tools[name] = one.session, tool
                self.asking |= {name} if tool.name in one.asking else set()
                about = "\n\n".join(text for text in (tool.description, one.description) if text)
                own[tool.name] = FunctionDefinition(
                    name=name, description=about or None, parameters=dict(tool.schema), strict=False
                )

    def model_name(self, call: ApprovedCall) -> str:
        """The name for the model of the tool that was approved; a 400 if this request does not have it."""
        own = self.definitions.get(call.label, {}).get(call.name)
        if own is None:
            raise not_offered(call)
        return own.name

    def response_tools(self, custom: Collection[str], approved: Sequence[ApprovedCall] = ()) -> ResponseTools:
        """What writes a response must know."""
        mcp = {name: (session.label, tool.name) for name, (session, tool) in self.tools.items()}
        lists = [(one.session.label, one.tools) for one in self._offered]
        return ResponseTools(custom, mcp, self.asking, approved, lists)

    def close(self) -> None:
        """End the sessions."""
        for one in self._offered:
            self._servers.end(one.session)


def not_offered(call: ApprovedCall) -> ApiError:
    """A call was approved whose tool the request does not have."""
    return bad_request(
        f"input approves a call of {short_repr(call.name)} of the MCP server {short_repr(call.label)}, which this "
        "request does not have; pass that server in tools, as the request before did",
        "tools",
    )


def _model_name(label: str, name: str, taken: Collection[str]) -> str:
    """A tool's name for the model: its own, unless another tool has it or models cannot have it."""
    if NAME.fullmatch(name) and name not in taken:
        return name
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{label}_{name}")[:NAME_CHARS]
    numbered = (plain[: NAME_CHARS - 4] + f"_{i}" for i in range(2, 1000))
    return plain if plain not in taken else next(one for one in numbered if one not in taken)


async def offered_tools(
    body: PromptRequest, servers: McpServers, settings: ServerSettings, tenant: Tenant
) -> OfferedTools | None:
    """The tools of the MCP servers of a request, listed; None if it has no such servers."""
    requested = [(i, tool) for i, tool in enumerate(body.tools or ()) if isinstance(tool, McpServerTool)]
    labels = [tool.server_label for _, tool in requested]
    always = [entry for entry in servers.always(tenant.name) if entry.label not in labels]
    if body.tool_choice == "none" or not (requested or always):
        return None
    if len(labels) > settings.max_mcp_servers:
        raise bad_request(
            f"tools has {len(labels)} MCP servers; at most {settings.max_mcp_servers} are allowed", "tools", "too_many"
        )
    if len(set(labels)) < len(labels):
        raise bad_request("two MCP servers have the same server_label; rename one", "tools")
    work = [_open(tool, f"tools[{i}]", servers, tenant) for i, tool in requested]
    opened = [asyncio.ensure_future(one) for one in (*work, *(_open_own(entry, servers, tenant) for entry in always))]
    try:
        lists = await asyncio.gather(*opened)
    except BaseException:
        for task in opened:
            task.cancel()
        await asyncio.gather(*opened, return_exceptions=True)
        for task in opened:
            if not task.cancelled() and task.exception() is None:
                servers.end(task.result().session)
        raise
    taken = {tool.name for tool in body.tools or () if not isinstance(tool, McpServerTool)}
    return OfferedTools(servers, lists, taken)


async def _open_own(entry: McpServerEntry, servers: McpServers, tenant: Tenant) -> OfferedServer:
    """An operator's server that every request gets. Nobody is asked for an approval of its calls."""
    try:
        session = await servers.open(entry, tenant.name)
        return OfferedServer(session, await _listed(session, servers))
    except McpError as error:
        raise mcp_failure(entry.label, error) from error


async def _open(tool: McpServerTool, where: str, servers: McpServers, tenant: Tenant) -> OfferedServer:
    """The server that a request names, and its tools."""
    _check(tool, where, servers.settings)
    names, read_only, about = tool.allowed_tools, False, tool.server_description or ""
    if isinstance(names, McpToolFilter):
        names, read_only = names.tool_names, bool(names.read_only)
    try:
        session = await _session(tool, where, servers, tenant)
        tools = await _listed(session, servers, names, read_only=read_only, description=about)
        asking = {one.name for one in tools if _needs_approval(tool.require_approval, one)}
        return OfferedServer(session, tools, asking, about)
    except McpError as error:
        raise mcp_failure(tool.server_label, error) from error


async def _session(tool: McpServerTool, where: str, servers: McpServers, tenant: Tenant) -> McpSession:
    if tool.server_url is None:
        entry = servers.entry(tool.server_label, tenant.name)
        if entry is None:
            raise bad_request(
                f"{where}.server_label is {short_repr(tool.server_label)}; this server has no MCP server of that "
                "name for this key: pass a server_url, or ask its operator, who names them with --mcp",
                f"{where}.server_label",
                "mcp_server_not_found",
            )
        if tool.headers or tool.authorization:
            raise bad_request(
                f"{where} has headers or an authorization, which the operator sets for this server; remove them", where
            )
        return await servers.open(entry, tenant.name)
    try:
        url = McpUrl.of(tool.server_url)
        headers = check_headers(tool.headers or {}, f"{where}.headers")
        if tool.authorization is not None:
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            token = {"Authorization": f"Bearer {tool.authorization}"}
            headers |= check_headers(token, f"{where}.authorization")
    except InvalidInput as error:
        raise bad_request(str(error), f"{where}.server_url") from error
    try:
        return await servers.open_url(tool.server_label, url, headers)
    except InvalidInput as error:
        raise bad_request(str(error), f"{where}.server_url", "mcp_host_not_allowed") from error


def _needs_approval(given: McpApprovals | str | None, tool: McpTool) -> bool:
    """Whether a call of a tool needs an approval: it does, unless the request says that it does not."""
    if not isinstance(given, McpApprovals):
        return given != "never"
    return _matches(given.always, tool) or not _matches(given.never, tool)


def _matches(given: McpToolFilter | None, tool: McpTool) -> bool:
    """Whether a filter names a tool; one without a condition names none."""
    if given is None or (given.tool_names is None and given.read_only is None):
        return False
    return (given.tool_names is None or tool.name in given.tool_names) and (
        given.read_only is None or given.read_only == tool.is_read_only
    )


async def _listed(
    session: McpSession,
    servers: McpServers,
    names: Sequence[str] | None = None,
    *,
    read_only: bool = False,
    description: str = "",
) -> list[McpTool]:
    """A server's tools, as the request filters them, if they and the server's description are not too large."""
    try:
        tools = allowed_names(await session.tools(), names, read_only=read_only)
        _check_sizes(tools, servers.settings, len(description))
    except BaseException:
        servers.end(session)
        raise
    return tools


def _check_sizes(tools: Sequence[McpTool], settings: ServerSettings, more: int) -> None:
    """Raise if the tools are too large, each with so many more characters."""
    sizes = {tool.name: len(json.dumps(tool.schema)) for tool in tools}
    for name, size in sizes.items():
        if size > settings.max_schema_bytes:
            raise McpError(
                f"the schema of its tool {short_repr(name)} has {size} bytes; at most "
                f"{settings.max_schema_bytes} are allowed"
            )
    total = sum(sizes.values()) + sum(len(tool.name) + len(tool.description) + more for tool in tools)
    if total > settings.max_tools_bytes:
        raise McpError(f"its tools have {total} bytes; at most {settings.max_tools_bytes} are allowed")


def _check(tool: McpServerTool, where: str, settings: ServerSettings) -> None:
    if not LABEL.fullmatch(tool.server_label):
        raise bad_request(
            f"{where}.server_label is {short_repr(tool.server_label)}; it must be 1 to 64 of A-Z a-z 0-9 _ - and "
            "begin with a letter",
            f"{where}.server_label",
        )
    if (size := len(tool.server_description or "")) > settings.max_tools_bytes:
        raise bad_request(
            f"{where}.server_description has {size} characters; at most {settings.max_tools_bytes} are allowed",
            f"{where}.server_description",
            "too_large",
        )


def mcp_failure(label: str, error: McpError) -> ApiError:
    """An MCP server that fails, as a client sees it."""
    return ApiError(
        424,
        f"the MCP server {label!r} failed: {error.message}",
        type="external_connector_error",
        param="tools",
        code="mcp_server_failed",
    )


def mcp_error(error: McpError | InvalidInput) -> Mapping[str, object]:
    """An error of a call, in OpenAI's format."""
    if isinstance(error, McpError):
        return {"type": error.kind, "code": error.code, "message": error.message}
    return {"type": "mcp_protocol_error", "code": -32602, "message": str(error)}
