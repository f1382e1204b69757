"""An MCP server of the official package: over its standard streams as a script, or over HTTP in a thread."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("tools", log_level="ERROR")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@server.tool()
def fail(why: str) -> str:
    """Always fails."""
    raise ToolError(why)


@server.tool()
def secret() -> str:
    """What this process was told."""
    return os.environ.get("SECRET", "nothing")


@server.tool()
async def who(ctx: Context) -> str:
    """Who asks, by its header."""
    request = ctx.request_context.request
    return "nobody" if request is None else request.headers.get("authorization", "nobody")


@server.tool()
def long(count: int) -> str:
    """A long text."""
    return "x" * count


@contextmanager
def over_http() -> Iterator[str]:
    """Serve over streamable HTTP in a thread; gives the URL."""
    app = server.streamable_http_app()
    web = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(web.serve()), name="mcp", daemon=True)
    thread.start()
    try:
        while not web.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        web.should_exit = True
        thread.join(30)


if __name__ == "__main__":
    server.run("stdio")
