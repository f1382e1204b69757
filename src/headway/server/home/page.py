"""`GET /`: what this server has, as a page for browsers and as JSON for others; and the page's plain files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from headway.base.text import short_repr
from headway.server.api.response_schema import COMMON, Index, ok
from headway.server.errors import ApiError
from headway.server.home.page_files import PAGE_HEADERS, TYPES, read_files

STATIC = Path(__file__).with_name("static")
LINKS = {
    "models": "/v1/models",
    "api": "/openapi.json",
    "docs": "/docs",
    "health": "/health",
    "metrics": "/metrics",
    "lab": "/lab/",
}

router = APIRouter(responses=COMMON)
files = cache(lambda: read_files(STATIC))


@router.get("/", summary="Links to what this server has", response_model=None, responses=ok(Index))
async def index(request: Request) -> Response:
    """The server's name and its links as JSON; for browsers a page with a chat."""
    paths = {getattr(route, "path", "") for route in request.app.state.routes}
    links = {name: path for name, path in LINKS.items() if path in paths or path.rstrip("/") in paths}
    root = request.scope.get("root_path", "")
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"server": "headway", "links": {name: root + path for name, path in links.items()}})
    if not request.scope["path"].endswith("/"):  # relative names of files need it
        return RedirectResponse(f"{root}/", 308, PAGE_HEADERS)
    return Response(files()["index.html"], headers=PAGE_HEADERS | {"Vary": "Accept"}, media_type=TYPES[".html"])


router.add_api_route("/", index, methods=["HEAD"], include_in_schema=False)  # Ollama's clients look for a server so


@router.api_route("/home/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def file(name: str) -> Response:
    """One of the page's files."""
    if name not in files():
        raise ApiError(404, f"there is no file {short_repr(name)}", code="not_found")
    return Response(files()[name], headers=PAGE_HEADERS, media_type=TYPES[Path(name).suffix])
