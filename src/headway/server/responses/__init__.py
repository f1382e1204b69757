"""OpenAI's Responses API: `/v1/responses`.

request_schema   the fields of a request
items            input items as messages of a chat
output           a message as output items, and the events of a stream in OpenAI's order
response_schema  the fields of responses, for the OpenAPI document
store            the responses that are kept: whose they are, how long, how large, and their warm contexts
turn             one turn of a conversation, generated and stored
routes           the routes
"""

from __future__ import annotations

from headway.server.responses.routes import router

__all__ = ["router"]
