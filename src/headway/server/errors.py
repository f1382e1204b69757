"""Errors as clients know them: one exception, a body in the format of the API that was called, and no internals in it.

`as_api_error` is the only place that decides the status of an error. Messages about a caller's values are sent as they
are; those about a failure of the server are replaced by a generic sentence and logged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from headway.base.errors import (
    Closed,
    ContextLengthExceeded,
    DeadlineExceeded,
    GrammarTooSlow,
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
from headway.server.unknown_paths import not_found

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC, OLLAMA = "/v1/messages", "/api/"  # the paths of these APIs begin so
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
FAILED = "internal server error; the server's log has the cause under this request's id"
HINTS = {  # for fields of other servers or older clients
    "suffix": "infilling is for /v1/completions: remove it",
    "template": "the model's own is used: pass a prompt of your own with raw, or remove it",
    "context": "send the earlier messages to /api/chat, or remove it",
    "images": "the models here take text: remove it",
    "guided_json": "use structured_outputs.json instead",
    "guided_regex": "use structured_outputs.regex instead",
    "guided_choice": "use structured_outputs.choice instead",
    "guided_grammar": "use grammar instead",
    "json_schema": "use response_format or structured_outputs.json instead",
    "regex": "use structured_outputs.regex instead",
    "ebnf": "use grammar instead",
    "enable_thinking": "use chat_template_kwargs instead",
    "think": "use chat_template_kwargs or reasoning_effort instead",
    "thinking": "use chat_template_kwargs or reasoning_effort instead",
    "reasoning": "use reasoning_effort instead",
    "request_id": "send it as the header x-request-id",
    "audio": "only text is generated: remove it",
    "web_search_options": "there is no web search: remove it",
}
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class ApiError(Exception):
    """An error response: its status and the message for the client."""

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
    """A 400. The message gives the value, the limit and a way out; `param` names the field."""
    return ApiError(400, message, param=param, code=code)


def check_fields(given: BaseModel, known: Collection[str], where: str, what: str) -> None:
    """Raise for a field that is another type's: nothing would read it."""
    for name in type(given).model_fields:
        if name not in known and getattr(given, name):
            raise bad_request(f"{where}.{name} is not a field of {what}; remove it", f"{where}.{name}", "unknown_field")


def route_path(scope: Mapping[str, Any]) -> str:
    """The path of a request as routes have it: without the server's --root-path."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def error_body(error: ApiError, path: str = "") -> bytes:
    """The body of an error response, in the format of the API that the path belongs to."""
    if path.startswith(OLLAMA):
        return json.dumps({"error": error.message}).encode()
    if path.startswith(ANTHROPIC):
        type = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": type, "message": error.message}}).encode()
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json.dumps({"error": inner}).encode()


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails, in OpenAI's format."""
    return b"data: " + error_body(error) + b"\n\n"


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field name it as the API does that was called: `names` maps OpenAI's names to that API's."""
    try:
        yield
    except ApiError as error:
        message, param = _renamed(error.message, names), None if error.param is None else _renamed(error.param, names)
        raise ApiError(
            error.status, message, type=error.type, param=param, code=error.code, headers=error.headers
        ) from error


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A text with other names of fields. A name that is also a plain word must look like a field's."""
    for old, new in names.items():
        end = r"\b" if "_" in old else r"(?=\[|\.\w| is |$)"
        text = re.sub(rf"(?<![\w.'])\b{old}{end}", new, text)
    return text


def as_api_error(error: BaseException) -> ApiError | None:
    """The error response for an exception; None for an unexpected one."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            return _invalid(error.errors())
        case ContextLengthExceeded():
            return bad_request(_message(error), code="context_length_exceeded")
        case OutOfPages():
            return bad_request(_message(error), code="out_of_pages")
        case TokenBudgetExceeded():
            return bad_request(_message(error), code="token_budget_exceeded")
        case InvalidToken():
            return bad_request(_message(error), code="invalid_token")
        case TemplateError():
            return bad_request(_message(error), param="messages", code="template_error")
        case GrammarTooSlow():
            return bad_request(_message(error), code="grammar_too_slow")
        case ModelError():
            return ApiError(500, FAILED, code="engine_error")
        case Unsupported():
            return bad_request(_message(error), code="unsupported")
        case InvalidInput() | WrongType() | OutOfRange():
            return bad_request(_message(error))
        case DeadlineExceeded():
            return ApiError(504, "the request timed out; ask for fewer tokens", code="request_timeout")
        case Closed():
            return ApiError(503, "the engine was closed while processing this request", code="closed")
        case HeadwayError():
            return ApiError(500, FAILED, code="engine_error")
    return None


def install_handlers(app: FastAPI) -> None:
    """Answer every known error in this format. Others propagate to the middleware, which logs them and responds 500."""

    async def respond(request: Request, error: Exception) -> Response:
        known = as_api_error(error)
        if isinstance(error, HTTPException) and error.status_code == 404:
            routes = {route.path for route in request.app.state.routes}
            known = ApiError(404, not_found(route_path(request.scope), routes), code="path_not_found")
        if isinstance(error, HTTPException) and error.status_code == 405:
            methods = ", ".join(_methods(request))
            known = ApiError(405, f"this path takes another method: {methods}", headers={"Allow": methods})
        if known is None or (known.status == 500 and not isinstance(error, ApiError | HTTPException)):
            raise error
        body = error_body(known, route_path(request.scope))
        return Response(body, known.status, known.headers, "application/json")

    for kind in (ApiError, HTTPException, RequestValidationError, HeadwayError):
        app.add_exception_handler(kind, respond)


def _methods(request: Request) -> list[str]:
    """The methods that the routes of a request's path have."""
    routes = (route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


def _message(error: BaseException) -> str:
    """An error's message without memory addresses."""
    return ADDRESS.sub("0x…", str(error))


def _invalid(problems: Sequence[Any]) -> ApiError:
    """The first problem of a body; for a field that takes several types, that of the type that matched deepest."""
    unknown = next((problem for problem in problems if problem["type"] == "unknown_field"), None)
    if unknown is None:
        first = max(problems, key=lambda problem: len(problem["loc"]))
    else:  # or what is wrong further inside the same field, where another of its types knows the name
        inside = [problem for problem in problems if problem["loc"][:2] == unknown["loc"][:2]]
        first = max(inside, key=lambda problem: len(_fields(problem["loc"])) + (problem["type"] == "unknown_field"))
    if first["type"] == "json_invalid":
        return bad_request(
            f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    where = _location(first["loc"])
    if first["type"] == "unknown_field":
        return _unknown(".".join(filter(None, [where, first["ctx"]["name"]])))
    if first["type"] == "missing":
        what = f"the field {short_repr(where)} is required" if where else "the body is missing; send JSON"
        return bad_request(what, where or None, "missing_field")
    message = str(first["msg"]).removeprefix("Value error, ")
    value = "" if isinstance(first.get("input"), dict | list) else f", got {short_repr(first.get('input'))}"
    return bad_request(f"{where or 'the body'}: {message}{value}", where or None, "invalid_value")


def _unknown(where: str) -> ApiError:
    short = shorten(where)
    hint = f"; {HINTS[where]}" if where in HINTS else "; remove it"
    return bad_request(f"the field {short!r} is unknown or not supported{hint}", short, "unknown_field")


def _location(parts: Sequence[Any]) -> str:
    """The path of a field in the body."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _fields(parts)).removeprefix(".")


def _fields(parts: Sequence[Any]) -> list[Any]:
    """The names and indices in the path of a problem, without the names of the union members that were tried."""
    kept = [part for part in parts[1:] if isinstance(part, int) or re.fullmatch(r"[a-z][a-z0-9_]*", str(part))]
    return [part for part in kept if part not in ("str", "int", "float", "bool", "dict")]
