"""The application: the engine loads beside it, the walls stand around it, the routes are in it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware import Middleware

from headway.server import access_log as logs
from headway.server import openai, pooling
from headway.server.errors import install
from headway.server.metrics import CONTENT_TYPE
from headway.server.middleware.body import Body
from headway.server.middleware.checks import Door, KeyCheck, Origins, Trail
from headway.server.middleware.lifetime import Life
from headway.server.openai.response_schema import COMMON, ErrorAnswer, Health, Stats, ok
from headway.server.pooling import Pools
from headway.server.serving import Serving
from headway.server.settings import Settings

if TYPE_CHECKING:
    from headway.program.engine import Engine

LOOK = 0.2  # seconds between looks at whether the engine's worker is alive
WALLS = (Trail, Door, Origins, KeyCheck, Body, Life)  # from the outside in


def create_app(
    settings: Settings,
    open_engine: Callable[[], Engine],
    *,
    routers: Sequence[APIRouter] = (),
    pools: Pools | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An ASGI application that serves one engine.

    `open_engine` is called in a thread when the application starts; until it returns, /health says 503. The engine is
    closed when the application ends. `pools` are models for vectors, scores and labels, opened and closed with it.
    `routers` are routes beside its own, behind the same walls. `on_end` is called when there is nothing left to serve:
    a model could not be loaded (`serving.failure`), or the engine's worker died.
    Clients must use a Host that `HostCheck` allows, such as 127.0.0.1.
    """
    serving, beside = Serving(settings), pools or Pools()

    def open_all() -> Engine:
        beside.open()
        return open_engine()

    app = Api(
        title="Headway",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lambda _: _lifespan(serving, open_all, beside, on_end),
        middleware=[Middleware(wall, serving=serving) for wall in WALLS],
    )
    app.state.serving, app.state.pools = serving, beside
    install(app)
    for routes in (router, openai.router, pooling.router, *routers):
        app.include_router(routes)
    return app


class Api(FastAPI):
    """FastAPI, whose description of itself has its own answer to a wrong body (422), which is never given here."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


@asynccontextmanager
async def _lifespan(
    serving: Serving, open_engine: Callable[[], Engine], pools: Pools, on_end: Callable[[], None]
) -> AsyncIterator[None]:
    watch = asyncio.create_task(_load_and_watch(serving, open_engine, on_end))
    try:
        yield
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        if serving.is_loaded:
            await asyncio.to_thread(serving.close)
        await asyncio.to_thread(pools.close)


async def _load_and_watch(serving: Serving, open_engine: Callable[[], Engine], on_end: Callable[[], None]) -> None:
    """Load the engine, then look after its worker until it dies."""
    logs.info("loading", model=serving.settings.model)
    try:
        engine = await _opened(serving, open_engine)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        serving.failure = error
        return on_end()
    serving.loaded(engine)
    logs.info("ready", model=serving.model_name, **_facts(engine))
    state = serving.state
    while engine.alive:
        await asyncio.sleep(LOOK)
        before, state = state, serving.state
        if "stuck" in (before, state) and before != state:
            _tell(serving, state)
    logs.log(logs.CRITICAL, "the engine's worker has died; nothing can be computed any more")
    on_end()


def _opened(serving: Serving, open_engine: Callable[[], Engine]) -> asyncio.Future[Engine]:
    """The engine, once a thread has opened it. Nobody waits for the thread when the server ends before it does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(cast("Engine", engine))
        elif engine is not None:
            engine.close()

    def work() -> None:
        engine = error = None
        try:
            engine = open_engine()
        except BaseException as e:
            error = e
        with suppress(RuntimeError):  # the loop is closed, and the process about to end
            loop.call_soon_threadsafe(settle, engine, error)

    serving.loader = threading.Thread(target=work, name="headway-load", daemon=True)
    serving.loader.start()
    return future


def _tell(serving: Serving, state: str) -> None:
    """The engine's step does not end, or has ended after all."""
    if state == "stuck":
        logs.warn("the engine's step does not end", seconds=round(serving.step_seconds, 1), requests=serving.under_way)
    else:
        logs.info("the engine's step has ended", state=state)


def _facts(engine: Engine) -> dict[str, Any]:
    facts, pages = engine.info, engine.stats().pages_total
    return {"dtype": facts.dtype, "device": facts.device, "threads": facts.threads, "pages": pages}


router = APIRouter(responses=COMMON)


@router.get(
    "/health",
    summary="Whether the server can answer",
    responses=ok(Health) | {503: {"model": Health | ErrorAnswer, "description": "Not now"}},
)
async def health(request: Request) -> JSONResponse:
    """200 when requests can be answered; 503 while the model loads, while a step of the engine does not end (with
    `since`), while the server drains, and once it is dead."""
    serving: Serving = request.app.state.serving
    seconds, state = serving.step_seconds, serving.state
    since = {"since": logs.moment(time.time() - seconds)} if state == "stuck" else {}
    return JSONResponse({"status": state, **since}, 200 if state == "ready" else 503)


@router.head("/health", include_in_schema=False)
async def health_alone(request: Request) -> JSONResponse:
    """The same without a body, for those who only look at the status."""
    return await health(request)


@router.get("/metrics", summary="Counts and times for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counts and times, in Prometheus' text format."""
    return Response(request.app.state.serving.metrics.text(), headers={"content-type": CONTENT_TYPE})


@router.get("/stats", summary="What the engine holds and has done", response_model=None, responses=ok(Stats))
async def stats(request: Request) -> dict[str, Any]:
    """The figures of `engine.stats()`, and of its latest steps; `headway top --url` shows them."""
    serving: Serving = request.app.state.serving
    engine, facts = serving.engine, serving.engine.info
    about = {"name": serving.model_name, "dtype": facts.dtype, "device": facts.device}
    return {"model": about, "stats": asdict(engine.stats()), "steps": serving.steps()}
