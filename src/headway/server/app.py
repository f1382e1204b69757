"""The ASGI application: its routes, the middleware around them, and the engine that loads in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware import Middleware

from headway.base.samplers import Argmax
from headway.base.text import format_bytes
from headway.server import anthropic, index, logs, ollama, openai, operator_routes, pooling, responses
from headway.server.errors import install_handlers
from headway.server.metrics import CONTENT_TYPE
from headway.server.middleware import MIDDLEWARE
from headway.server.openai import adapter_routes
from headway.server.openai.response_schema import COMMON, ErrorResponse, Health, ServerStats, ok
from headway.server.pooling import PoolingModels
from headway.server.responses.store import ResponseStore
from headway.server.serving import Serving
from headway.server.sessions.sockets import UnixListener, session_route
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter

POLL_SECONDS = 0.2  # between checks that the engine's worker is alive


def create_app(
    settings: ServerSettings,
    open_engine: Callable[[], Engine],
    *,
    routers: Sequence[APIRouter] = (),
    pooling_models: PoolingModels | None = None,
    open_drafter: Callable[[], Drafter] | None = None,
    on_engine_end: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An ASGI application that serves one engine.

    `open_engine` is called in a thread when the application starts; until it returns, /health responds 503. The engine
    is closed when the application ends. `pooling_models`, for embeddings, scores and labels, are opened and closed with
    it. `open_drafter` opens what drafts tokens for every request. `routers` are additional routes, inside the same
    middleware. `on_engine_end` is called when a model could not be loaded (`serving.failure`) or the engine's worker
    died. Clients must use a Host that `AllowedHosts` allows, such as 127.0.0.1.
    """
    serving, extra_models = Serving(settings), pooling_models or PoolingModels()

    def open_all() -> Engine:
        extra_models.open()
        engine = open_engine()
        try:
            serving.adapters.open(engine)
            if open_drafter is not None:
                serving.drafter = open_drafter()
                with engine.context() as context:  # raises if it cannot draft for this model
                    context.fill([0]).generate(Argmax(), speculate=serving.drafter)
        except BaseException:
            engine.close()
            raise
        return engine

    app = Api(
        title="Headway",
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lambda _: _lifespan(serving, open_all, extra_models, on_engine_end),
        middleware=[Middleware(each, serving=serving) for each in MIDDLEWARE],
    )
    app.state.serving, app.state.pooling_models = serving, extra_models
    app.state.responses = ResponseStore(settings)
    install_handlers(app)
    loading = () if settings.lora_dir is None else (adapter_routes.router,)
    apis = (openai.router, responses.router, anthropic.router, ollama.router, pooling.router)
    for routes in (index.router, router, operator_routes.router, *apis, *loading, *routers):
        app.include_router(routes)
    app.router.routes.append(session_route())
    app.state.routes = tuple(_all_routes(app.routes))
    return app


def _all_routes(routes: Iterable[Any]) -> Iterator[Any]:
    """The routes themselves: newer FastAPIs keep those of included routers together."""
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from [route] if included is None else _all_routes(included.routes)


class Api(FastAPI):
    """FastAPI without the 422 response in its OpenAPI document: this server never sends it."""

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
    serving: Serving,
    open_engine: Callable[[], Engine],
    pooling_models: PoolingModels,
    on_engine_end: Callable[[], None],
) -> AsyncIterator[None]:
    watch = asyncio.create_task(_load_and_watch(serving, open_engine, on_engine_end))
    socket = serving.settings.session_socket
    try:
        async with nullcontext() if socket is None else UnixListener(serving, socket):
            yield
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await serving.sessions.close()
        if serving.is_loaded:
            await asyncio.to_thread(serving.close)
        await asyncio.to_thread(pooling_models.close)


async def _load_and_watch(
    serving: Serving, open_engine: Callable[[], Engine], on_engine_end: Callable[[], None]
) -> None:
    """Load the engine, then watch its worker until it dies."""
    logs.info("loading", model=serving.settings.model)
    try:
        engine = await _open_in_thread(serving, open_engine)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        serving.failure = error
        return on_engine_end()
    serving.set_engine(engine)
    logs.info("ready", model=serving.model_name, **_facts(engine))
    state = serving.state
    while engine.alive:
        await asyncio.sleep(POLL_SECONDS)
        before, state = state, serving.state
        if "stuck" in (before, state) and before != state:
            _log_stuck(serving, state)
    logs.log(logs.CRITICAL, "the engine's worker has died")
    on_engine_end()


def _open_in_thread(serving: Serving, open_engine: Callable[[], Engine]) -> asyncio.Future[Engine]:
    """The engine, opened in a thread. The server does not wait for the thread if it exits first."""
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
        with suppress(RuntimeError):  # the loop is closed, and the process is about to exit
            loop.call_soon_threadsafe(settle, engine, error)

    serving.loader = threading.Thread(target=work, name="headway-load", daemon=True)
    serving.loader.start()
    return future


def _log_stuck(serving: Serving, state: str) -> None:
    """Log that the engine got stuck, or that its step finished after all."""
    if state == "stuck":
        logs.warn("the engine is stuck in a step", seconds=round(serving.step_seconds, 1), requests=serving.in_flight)
    else:
        logs.info("the engine's step has finished", state=state)


def _facts(engine: Engine) -> dict[str, Any]:
    facts, pages = engine.info, engine.stats().pages_total
    stored = {"stored": facts.stored} if facts.stored else {}
    cache = f"at most {format_bytes(facts.kv_bytes)}: {facts.kv_reason}; --memory sets another amount"
    return {
        "dtype": facts.dtype,
        **stored,
        "device": facts.device,
        "threads": facts.threads,
        "pages": pages,
        "kv_cache": cache,
    }


router = APIRouter(responses=COMMON)


@router.get(
    "/health",
    summary="Whether the server is ready",
    responses=ok(Health) | {503: {"model": Health | ErrorResponse, "description": "Not ready"}},
)
async def health(request: Request) -> JSONResponse:
    """200 when the server is ready; 503 while the model loads, while the engine is stuck in a step (with `since`),
    while the server drains, and after the engine has died."""
    serving: Serving = request.app.state.serving
    seconds, state = serving.step_seconds, serving.state
    since = {"since": logs.timestamp(time.time() - seconds)} if state == "stuck" else {}
    return JSONResponse({"status": state, **since}, 200 if state == "ready" else 503)


@router.head("/health", include_in_schema=False)
async def health_alone(request: Request) -> JSONResponse:
    """The same without a body."""
    return await health(request)


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(request.app.state.serving.metrics.text(), headers={"content-type": CONTENT_TYPE})


@router.get("/stats", summary="Engine statistics", response_model=None, responses=ok(ServerStats))
async def stats(request: Request) -> dict[str, Any]:
    """The figures of `engine.stats()` and its latest steps; `headway top --url` shows them."""
    serving: Serving = request.app.state.serving
    engine, facts = serving.engine, serving.engine.info
    about = {"name": serving.model_name, "dtype": facts.dtype, "device": facts.device}
    return {"model": about, "stats": asdict(engine.stats()), "steps": serving.steps()}
