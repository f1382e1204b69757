"""The page itself: the plain files under static/, never built from what a client sends."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from headway.server.errors import ApiError
from headway.server.home.page_files import PAGE_HEADERS, TYPES

STATIC = Path(__file__).with_name("static")

router = APIRouter(include_in_schema=False)


@router.api_route("/lab", methods=["GET", "HEAD"])
async def home() -> Response:
    """Redirects to the URL with a slash, so that relative file names work."""
    return RedirectResponse("/lab/", 308, PAGE_HEADERS)


@router.api_route("/lab/", methods=["GET", "HEAD"])
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.api_route("/lab/{name}", methods=["GET", "HEAD"])
async def file(name: str) -> Response:
    """One of the page's files."""
    return _file(name)


@router.api_route("/lab/client/{name}", methods=["GET", "HEAD"])
async def client_file(name: str) -> Response:
    """One of the files of the client, which is clients/js, compiled."""
    return _file(f"client/{name}")


def _file(name: str) -> Response:
    content = files().get(name)
    if content is None:
        raise ApiError(404, f"there is no file {name!r:.80}", code="not_found")
    return Response(content, headers=PAGE_HEADERS, media_type=TYPES[Path(name).suffix])


@cache
def files() -> dict[str, bytes]:
    """Every file of the page, by its name."""
    paths = [path for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES]
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
