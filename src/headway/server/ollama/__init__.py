"""Ollama's API: `/api/chat`, `/api/generate` and `/api/embed`, and what is told about models. Streams are JSON lines.

request_schema   the fields of requests
requests         a request as one for a chat
output           a message as lines
response_schema  the fields of responses, for the OpenAPI document
routes           the routes
"""

from __future__ import annotations

from headway.server.ollama.routes import router

__all__ = ["router"]
