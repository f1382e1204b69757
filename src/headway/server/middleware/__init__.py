"""ASGI middleware around every route. Each one checks one thing before the next one sees the request.

access_log    assigns a request id, logs and counts requests, turns every error into an OpenAI-style response
host_check    limits the size of the headers and checks Content-Length and Host (a web page must not reach a local
              server through a domain name of its own)
origin_check  which web pages may call this server (CORS); all others are rejected
key_check     API keys and request rates
body          reads the request body within a size and a time limit, before anything is parsed
lifetime      cancels the route when its client disconnects or its time is up

A middleware rejects a request by raising `ApiError`; only `AccessLog` writes the response. `connection` is below them:
uvicorn's HTTP connection with timeouts.
"""

from __future__ import annotations

from headway.server.middleware.access_log import AccessLog
from headway.server.middleware.body import BodyReader
from headway.server.middleware.host_check import HostCheck
from headway.server.middleware.key_check import KeyCheck
from headway.server.middleware.lifetime import RequestLifetime
from headway.server.middleware.origin_check import OriginCheck

MIDDLEWARE = (AccessLog, HostCheck, OriginCheck, KeyCheck, BodyReader, RequestLifetime)  # outermost first
