"""A server to attack: the real middleware, loop and signals around an engine without weights, run as a script.

    python scripted_server.py '{"settings": {…}, "step_seconds": 0.01, "pages": 64, "load_until": "a file"}'

It has one route of its own, POST /tokens, which generates with the engine as any route does, and one that fails.
A prompt of many 13s kills the engine's worker, as a bug would.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import headway as hw
from headway.runtime.batch import Batch
from headway.runtime.runners.base import SegmentResult
from headway.server.keys import Tenant
from headway.server.run import serve
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.testing import ScriptedRunner, random_model

V, DEADLY, MANY = 97, 13, 30
router = APIRouter()


class SlowRunner(ScriptedRunner):
    """Takes `step_seconds` for every step, which ends once the file `held_by` is gone; and dies of one prompt."""

    def __init__(self, step_seconds: float, held_by: Path | None) -> None:
        super().__init__(V, 16)
        self.step_seconds, self.held_by = step_seconds, held_by

    def execute(self, batch: Batch) -> list[SegmentResult]:
        if (batch.tokens == DEADLY).sum() >= MANY:
            raise SystemExit("the device is gone")
        if len(batch.tokens):
            time.sleep(self.step_seconds)
            while self.held_by is not None and self.held_by.exists():
                time.sleep(0.01)
        return super().execute(batch)


def open_engine(step_seconds: float, pages: int, load_until: str | None, held_by: str | None) -> hw.Engine:
    while load_until is not None and not Path(load_until).exists():
        time.sleep(0.02)
    size: dict[str, Any] = {"layers": 1, "hidden_size": 2, "heads": 1, "kv_heads": 1, "head_dim": 2}
    model = random_model(vocab_size=V, max_positions=1 << 20, intermediate_size=1, **size)
    runner = SlowRunner(step_seconds, None if held_by is None else Path(held_by))
    return hw.Engine(model, runner=runner, pages=pages, threads=1)


@router.post("/tokens", response_model=None)
async def tokens(request: Request) -> Response:
    """{"prompt": ids, "max_tokens": n, "stream": bool, "pad": additional bytes} → the tokens."""
    serving: Serving = request.app.state.serving
    body = await request.json()
    tenant = serving.tenant(request)
    if body.get("stream"):
        events = _events(serving, tenant, body)
        first = await anext(events)  # an error has its own response, and is not an event
        return StreamingResponse(_after(first, events), media_type="text/event-stream")
    result = [token async for token in _generate(serving, tenant, body)]
    return JSONResponse({"tokens": result, "pad": " " * body.get("pad", 0)})


@router.get("/fail")
async def fail() -> None:
    raise RuntimeError("the secret /etc/passwd at 0x7f0000001234")


async def _generate(serving: Serving, tenant: Tenant, body: dict[str, Any]) -> AsyncIterator[int]:
    prompt, limit = body["prompt"], body["max_tokens"]
    async with serving.admit(tenant, tokens=len(prompt) + limit) as admitted:
        admitted.prompt(len(prompt))
        async with serving.engine.context(salt=tenant.salt) as ctx:
            ctx.fill(prompt)
            async for step in ctx.generate(hw.Argmax(), max_tokens=limit):
                admitted.tokens(len(step.tokens))
                for token in step.tokens:
                    yield token
            admitted.finish("length")


async def _events(serving: Serving, tenant: Tenant, body: dict[str, Any]) -> AsyncIterator[str]:
    async for token in _generate(serving, tenant, body):
        yield f"data: {token}{' ' * body.get('pad', 0)}\n\n"
    yield "data: [DONE]\n\n"


async def _after(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


def main() -> int:
    given = json.loads(sys.argv[1])
    options = given["settings"]
    for name in ("allowed_hosts", "cors_origins", "served_names"):
        options[name] = tuple(options.get(name, ()))
    for name in {"key_file", "ssl_certfile", "ssl_keyfile", "unix_socket", "session_socket"} & set(options):
        options[name] = Path(options[name])
    settings = ServerSettings(**{"port": 0, "log_json": True, "model": "scripted", **options})
    how = {"step_seconds": 0.0, "pages": 64, "load_until": None, "held_by": None} | given.get("engine", {})
    return serve(settings, lambda: open_engine(**how), [router])


if __name__ == "__main__":
    sys.exit(main())
