"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

request_schema   the fields of a request
blocks           content blocks as messages of a chat, and a request as one for a chat
output           a message as content blocks, and the events of a stream in Anthropic's order
response_schema  the fields of responses, for the OpenAPI document
routes           the routes
"""

from __future__ import annotations

from headway.server.anthropic.routes import router

__all__ = ["router"]
