"""Errors as OpenAI's clients know them: one exception, one body, and nothing of the inside in it.

`as_api_error` is the only place that decides which status an error has. A message that a caller's values led to is
told as it is; one that only the server's owner can do something about is replaced by a sentence, and the log has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from headway.base.errors import (
    Closed,
    ContextLengthExceeded,
    DeadlineExceeded,
    HeadwayError,
    InvalidInput,
    InvalidToken,
    ModelError,
    OutOfPages,
    OutOfRange,
    TemplateError,
    TokenBudgetExceeded,
    Unsupported,
    WrongType,
)
from headway.base.text import short_repr, shorten

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
FAILED = "the server failed to answer; its log says why, under this request's id"
HINTS = {  # fields that other servers or older clients have
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "suffix": "text between a prompt and a suffix cannot be filled in: leave it out",
    "guided_json": "give structured_outputs.json instead",
    "guided_regex": "give structured_outputs.regex instead",
    "guided_choice": "give structured_outputs.choice instead",
    "guided_grammar": "give structured_outputs.grammar instead",
    "audio": "only text is generated: leave it out",
    "web_search_options": "nothing is searched: leave it out",
}
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class ApiError(Exception):
    """An answer that is an error: its status, and what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the message names the value, the limit and the way out; `param` the field."""
    return ApiError(400, message, param=param, code=code)


def error_body(error: ApiError) -> bytes:
    """The body of an error's answer."""
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json.dumps({"error": inner}).encode()


def as_api_error(error: BaseException) -> ApiError | None:
    """What a client is told about an error; None for one that nobody expected."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            return _invalid(error.errors())
        case ContextLengthExceeded():
            return bad_request(_told(error), code="context_length_exceeded")
        case OutOfPages():
            return bad_request(_told(error), code="out_of_pages")
        case TokenBudgetExceeded():
            return bad_request(_told(error), code="token_budget_exceeded")
        case InvalidToken():
            return bad_request(_told(error), code="invalid_token")
        case TemplateError():
            return bad_request(_told(error), param="messages", code="template_error")
        case ModelError():
            return ApiError(500, FAILED, code="engine_error")
        case Unsupported():
            return bad_request(_told(error), code="unsupported")
        case InvalidInput() | WrongType() | OutOfRange():
            return bad_request(_told(error))
        case DeadlineExceeded():
            return ApiError(504, "this request took too long; ask for fewer tokens", code="request_timeout")
        case Closed():
            return ApiError(503, "the engine was closed while it worked on this request", code="closed")
        case HeadwayError():
            return ApiError(500, FAILED, code="engine_error")
    return None


def install(app: FastAPI) -> None:
    """Have every known error answered in this shape. What is not goes up to the walls, which log it and say 500."""

    async def answer(request: Request, error: Exception) -> Response:
        known = as_api_error(error)
        if known is None or (known.status == 500 and not isinstance(error, ApiError | HTTPException)):
            raise error
        return Response(error_body(known), known.status, known.headers, "application/json")

    for kind in (ApiError, HTTPException, RequestValidationError, HeadwayError):
        app.add_exception_handler(kind, answer)


def _told(error: BaseException) -> str:
    """An error's message, without addresses."""
    return ADDRESS.sub("0x…", str(error))


def _invalid(found: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a body; of a field that takes several forms, the form that came furthest."""
    unknown = next((one for one in found if one["type"] == "unknown_field"), None)
    first = unknown or max(found, key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return bad_request(
            f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    where = _place(first["loc"])
    if unknown is not None:
        return _unknown(".".join(filter(None, [where, unknown["ctx"]["name"]])))
    if first["type"] == "missing":
        what = f"the field {where!r:.80} is missing" if where else "the body is missing; send JSON"
        return bad_request(what, where or None, "missing_field")
    message = str(first["msg"]).removeprefix("Value error, ")
    value = "" if isinstance(first.get("input"), dict | list) else f" and not {short_repr(first.get('input'))}"
    return bad_request(f"{where or 'the body'}: {message}{value}", where or None, "invalid_value")


def _unknown(where: str) -> ApiError:
    short = shorten(where)
    hint = f"; {HINTS[where]}" if where in HINTS else "; leave it out"
    return bad_request(f"the field {short!r} is not known or not supported here{hint}", short, "unknown_field")


def _place(parts: Sequence[Any]) -> str:
    """Where in the body: names and numbers, without the names of the forms that were tried."""
    kept = [part for part in parts[1:] if isinstance(part, int) or re.fullmatch(r"[a-z][a-z0-9_]*", str(part))]
    kept = [part for part in kept if part not in ("str", "int", "float", "bool", "dict")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in kept).removeprefix(".")
