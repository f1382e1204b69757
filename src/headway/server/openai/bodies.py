"""Bodies are JSON, whatever a client calls them: `curl -d` says that it sends a form.

What has too many parts is refused by counting them, before each of them is looked at; what is no Unicode (half of a
character, as an escape) before anything meets it that cannot encode it.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders

from headway.server.errors import bad_request
from headway.server.settings import Settings

HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape of half a character; two of them make a whole one
OTHERS = ("", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream")


class JsonRequest(Request):
    """A request whose body is parsed without pause for collecting garbage: of a body's many parts none is."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body, collects = await self.body(), gc.isenabled()
            gc.disable()
            try:
                self._json = json.loads(body.decode())
            finally:
                if collects:
                    gc.enable()
        return self._json


class JsonRoute(APIRoute):
    """A route that reads a body as JSON also when it is called something else, or nothing.

    Web pages can send such bodies without asking first; the walls refuse those of other origins by their Origin.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            headers = MutableHeaders(scope=request.scope)
            if headers.get("content-type", "").partition(";")[0].strip().lower() in OTHERS:
                headers["content-type"] = "application/json"
            asked = JsonRequest(request.scope, request.receive, request._send)
            body = await asked.body()
            with suppress(ValueError, RecursionError):  # what is no JSON is said where it is read
                value = await asked.json()
                check_counts(value, request.app.state.serving.settings)
                if HALF.search(body):
                    check_unicode(value)
            return await handle(asked)

        return handle_json


def check_unicode(body: Any) -> None:
    """Raise where a text of a body has half of a character: no token can spell it, and nothing can be written of it."""
    text = json.dumps(body, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise bad_request(f"the body has a lone surrogate {half}, which is no Unicode; leave it out") from None


def check_counts(body: Any, settings: Settings) -> None:
    """Raise where a list of a body is longer than the server takes."""
    limits = {
        "messages": settings.max_messages,
        "tools": settings.max_tools,
        "stop": settings.max_stops,
        "stop_token_ids": settings.max_ids,
        "allowed_token_ids": settings.max_ids,
        "bad_words": settings.max_bias,
        "logit_bias": settings.max_bias,
    }
    for name, limit in limits.items() if isinstance(body, dict) else ():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise bad_request(f"{name} has {len(value)} entries; at most {limit} are allowed", name, "too_many")
