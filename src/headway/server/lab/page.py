"""The page itself: the plain files under static/, never built from what a client sends.

It has a strict Content-Security-Policy: scripts, styles and requests only from and to this server, nothing inline, and
no other page may frame it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from headway.server.errors import ApiError

STATIC = Path(__file__).with_name("static")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".bin": "application/octet-stream",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.api_route("/lab", methods=["GET", "HEAD"])
async def home() -> Response:
    """Redirects to the URL with a slash, so that relative file names work."""
    return RedirectResponse("/lab/", 308, HEADERS)


@router.api_route("/lab/", methods=["GET", "HEAD"])
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.api_route("/lab/{name}", methods=["GET", "HEAD"])
async def file(name: str) -> Response:
    """One of the page's files."""
    return _file(name)


def _file(name: str) -> Response:
    content = files().get(name)
    if content is None:
        raise ApiError(404, f"there is no file {name!r:.80}", code="not_found")
    return Response(content, headers=HEADERS, media_type=TYPES[Path(name).suffix])


@cache
def files() -> dict[str, bytes]:
    """Every file of the page, by its name."""
    return {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.suffix in TYPES}
