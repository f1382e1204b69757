"""OpenAI's Responses API: `/v1/responses` and `/v1/conversations`.

request_schema   the fields of a request
items            input items as messages of a chat
output           a message as output items, and the events of a stream in OpenAI's order
response_schema  the fields of responses, for the OpenAPI document
store            the responses that are kept: whose they are, how long, how large, and their warm contexts
conversations    items that belong together, to which responses add theirs
mcp_tools        the tools of MCP servers that a request may use
tool_loop        calls them, and has the model go on with what they return
turn             one turn of a conversation, generated and stored
routes, conversation_routes   the routes
"""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.responses import conversation_routes, routes

router = APIRouter()
for part in (routes, conversation_routes):
    router.include_router(part.router)

__all__ = ["router"]
