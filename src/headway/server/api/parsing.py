"""Parses request bodies as JSON, also those sent as a form or as text, as `curl -d` does.

Large bodies are parsed and validated in a reader thread, piece by piece. Lists that are too long are rejected before
their entries are validated, and text that is not valid Unicode (a lone surrogate, written as an escape) before it
reaches code that cannot encode it.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders

from headway.base.json_text import PIECE, TooManyValues, loads
from headway.base.text import find_all, short_repr
from headway.server.errors import ApiError, bad_request
from headway.server.settings import ServerSettings

JSON_TYPE = re.compile(r"application/(json|[\w.-]+\+json)")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of a surrogate; a pair of them is one character
SURROGATE_CHARS = 4
LONE = re.compile("[\ud800-\udfff]")
ACCEPTED_TYPES = ("", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream")


class JsonRequest(Request):
    """A request whose body has been parsed, and if it is large validated."""

    value: Any

    async def json(self) -> Any:
        return self.value


class JsonRoute(APIRoute):
    """A route that parses a body as JSON also when its Content-Type is missing or another accepted one.

    Web pages can send such bodies without a preflight; the origin check rejects those of other origins.
    """

    messages = "messages"  # the field that has the messages of a chat

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive, request._send)
            if self.body_field is not None and (body := await json_request.body()):
                check_content_type(MutableHeaders(scope=request.scope))
                serving = request.app.state.serving
                if len(body) <= PIECE:
                    json_request.value = _parse(body, serving.settings, self.messages)
                else:
                    json_request.value = await serving.readers.run(self._validated, body, serving.settings)
            return await handle(json_request)

        return handle_json

    def _validated(self, body: bytes, settings: ServerSettings) -> Any:
        """A body as an instance of its schema, which FastAPI takes as it is; in a thread, since it takes a while."""
        assert self.body_field is not None
        value, errors = self.body_field.validate(_parse(body, settings, self.messages), {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return value


def check_content_type(headers: MutableHeaders) -> None:
    """Raise for a Content-Type that is not accepted; replace an accepted one by application/json."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ACCEPTED_TYPES:
        headers["content-type"] = "application/json"
    elif not JSON_TYPE.fullmatch(kind):
        raise bad_request(f"the Content-Type is {short_repr(kind)}; send JSON as application/json", code="invalid_json")


def _parse(body: bytes, settings: ServerSettings, messages: str) -> Any:
    """A body as a value within the server's limits."""
    try:
        text = _decoded(body)
        value = loads(text, bounded=True)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {error.msg} at character {error.pos}", code="invalid_json"
        ) from None
    except TooManyValues as error:
        where = f", with those of {short_repr(error.where)}" if error.where else ""
        raise bad_request(f"the body has{where}, {error}", error.where[:80] or None, "too_many") from None
    except ValueError:  # the only other one: int() limits the number of digits
        raise bad_request(
            f"the body has a number with more than {sys.get_int_max_str_digits()} digits", code="invalid_json"
        ) from None
    check_counts(value, settings, messages)
    if next(find_all(SURROGATE, text, SURROGATE_CHARS), None):
        check_unicode(value)
    return value


def _too_deep() -> ApiError:
    return bad_request("the body is nested too deeply; make it flatter", code="invalid_json")


def _decoded(body: bytes) -> str:
    """The text of a body, in short calls; raises a UnicodeDecodeError with the place of what is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        pieces = [decoder.decode(body[at : at + PIECE]) for at in range(0, len(body), PIECE)]
        return "".join([*pieces, decoder.decode(b"", final=True)])
    except UnicodeDecodeError:
        return body.decode()  # whose error counts from the beginning


def check_unicode(body: Any) -> None:
    """Raise if a body has a lone surrogate, which has no UTF-8 encoding and no token."""
    rest = [body]
    while rest:
        match one := rest.pop():
            case str() if not one.isascii() and (found := next(find_all(LONE, one, 1), None)):
                surrogate = f"U+{ord(found[0]):04X}"
                raise bad_request(f"the body has a lone surrogate {surrogate}, which is not valid Unicode; remove it")
            case dict():
                rest += [*one.keys(), *one.values()]
            case list():
                rest += one


class ItemsRoute(JsonRoute):
    """The same for chats whose messages are items of `input`."""

    messages = "input"


class ConversationRoute(JsonRoute):
    """The same for those of `items`."""

    messages = "items"


def check_counts(body: Any, settings: ServerSettings, field: str = "messages") -> None:
    """Raise if a list of a body is longer than the server's limit. `field` has the messages."""
    limits = {
        field: settings.max_messages,
        "tools": settings.max_tools,
        "functions": settings.max_tools,
        "tokens": settings.max_detokenize,
        "stop": settings.max_stops,
        "stop_sequences": settings.max_stops,
        "system": settings.max_parts,
        "stop_token_ids": settings.max_ids,
        "allowed_token_ids": settings.max_ids,
        "bad_words": settings.max_bias,
        "logit_bias": settings.max_bias,
    }
    for name, limit in limits.items() if isinstance(body, dict) else ():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise bad_request(f"{name} has {len(value)} entries; at most {limit} are allowed", name, "too_many")
    messages = body.get(field) if isinstance(body, dict) else None
    parts = sum(map(_parts, messages)) if isinstance(messages, list) else 0
    if parts > settings.max_parts:
        raise bad_request(
            f"{field} has {parts} content parts and tool calls; at most {settings.max_parts} are allowed",
            field,
            "too_many",
        )


def _parts(message: Any) -> int:
    names = ("content", "tool_calls", "output", "summary")
    values = map(message.get, names) if isinstance(message, dict) else ()
    return sum(len(value) for value in values if isinstance(value, list))
