"""`GET /`: links to what this server has."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from headway.server.openai.response_schema import COMMON, Index, ok

LINKS = {
    "models": "/v1/models",
    "api": "/openapi.json",
    "docs": "/docs",
    "health": "/health",
    "metrics": "/metrics",
    "lab": "/lab/",
}
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Headway</title>
<h1>Headway</h1>
<ul>{listed}</ul>
</html>
"""

router = APIRouter(responses=COMMON)


@router.get("/", summary="Links to what this server has", response_model=None, responses=ok(Index))
async def index(request: Request) -> Response:
    """The server's name and its links: as a page for browsers, as JSON for others."""
    paths = {getattr(route, "path", "") for route in request.app.state.routes}
    links = {name: path for name, path in LINKS.items() if path in paths or path.rstrip("/") in paths}
    links = {name: request.scope.get("root_path", "") + path for name, path in links.items()}
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"server": "headway", "links": links})
    listed = "".join(f'<li>{name}: <a href="{path}">{path}</a></li>' for name, path in links.items())
    return HTMLResponse(PAGE.format(listed=listed))
