"""Bodies are JSON, also where a client calls them a form or text, as `curl -d` does; what it calls a page is refused.

What has too many parts is refused by counting them, before each of them is looked at; what is no Unicode (half of a
character, as an escape) before anything meets it that cannot encode it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders

from headway.base.gc_paused import gc_paused
from headway.server.errors import ApiError, bad_request
from headway.server.settings import Settings

JSON = re.compile(r"application/(json|[\w.-]+\+json)")
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape of half a character; two of them make a whole one
OTHERS = ("", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream")


class JsonRequest(Request):
    """A request whose body is parsed without pause for collecting garbage: of a body's many parts none is."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            with gc_paused():
                self._json = json.loads(body.decode())
        return self._json


class JsonRoute(APIRoute):
    """A route that reads a body as JSON also when it is called something else, or nothing.

    Web pages can send such bodies without asking first; the walls refuse those of other origins by their Origin.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            asked = JsonRequest(request.scope, request.receive, request._send)
            if self.body_field is not None and (body := await asked.body()):
                check_kind(MutableHeaders(scope=request.scope))
                value = await _parsed(asked)
                check_counts(value, request.app.state.serving.settings)
                if HALF.search(body):
                    check_unicode(value)
            return await handle(asked)

        return handle_json


def check_kind(headers: MutableHeaders) -> None:
    """Raise where a client says that it sends something else; what may be JSON is called so from here on."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in OTHERS:
        headers["content-type"] = "application/json"
    elif not JSON.fullmatch(kind):
        raise bad_request(f"the body is of type {kind!r:.60}; send JSON, as application/json", code="invalid_json")


async def _parsed(asked: JsonRequest) -> Any:
    try:
        return await asked.json()
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8, from byte {error.start} on", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error.msg} at character {error.pos}", code="invalid_json") from None
    except ValueError:  # the only other one: int() reads so many digits and no more
        raise bad_request(
            f"the body has a number of more than {sys.get_int_max_str_digits()} digits", code="invalid_json"
        ) from None


def _too_deep() -> ApiError:
    return bad_request("the body is nested too deeply to be read; make it flatter", code="invalid_json")


def check_unicode(body: Any) -> None:
    """Raise where a text of a body has half of a character: no token can spell it, and nothing can be written of it."""
    try:
        text = json.dumps(body, ensure_ascii=False)
    except RecursionError:
        raise _too_deep() from None
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
        "tokens": settings.max_detokenize,
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
    messages = body.get("messages") if isinstance(body, dict) else None
    parts = sum(map(_parts, messages)) if isinstance(messages, list) else 0
    if parts > settings.max_parts:
        raise bad_request(
            f"messages have {parts} parts and tool_calls; at most {settings.max_parts} are allowed",
            "messages",
            "too_many",
        )


def _parts(message: Any) -> int:
    values = (message.get("content"), message.get("tool_calls")) if isinstance(message, dict) else ()
    return sum(len(value) for value in values if isinstance(value, list))
