"""The ASGI application: its routes, the middleware around them, and the engine that loads in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware import Middleware

from headway.base.system.collector import FullCollections
from headway.base.system.switch_interval import WHILE_SERVING, SwitchInterval
from headway.server import (
    anthropic,
    audio,
    batches,
    home,
    llama_server,
    logs,
    ollama,
    openai,
    operator_routes,
    pooling,
    responses,
)
from headway.server.api.response_schema import COMMON, ERRORS, ErrorResponse, Health, ServerStats, ok
from headway.server.audio.decoder import AudioDecoder
from headway.server.batches.files import FileStore
from headway.server.batches.jobs import BatchStore
from headway.server.errors import install_handlers
from headway.server.housekeeping import Housekeeping
from headway.server.mcp.servers import McpServers
from headway.server.metrics import CONTENT_TYPE
from headway.server.middleware import MIDDLEWARE
from headway.server.models import ModelSources, ServedModel
from headway.server.openai import adapter_routes
from headway.server.pooling import PoolingModels
from headway.server.programs import routes as program_routes
from headway.server.programs.programs import open_programs
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
    models: Callable[[], Engine] | ModelSources,
    *,
    routers: Sequence[APIRouter] = (),
    pooling_models: PoolingModels | None = None,
    open_drafter: Callable[[], Drafter] | None = None,
    on_engine_end: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An ASGI application that serves one engine, or several models.

    A callable is the one engine: it is called in a thread when the application starts; until it returns, /health
    responds 503. Several models load when they are asked for, or at the start if they are kept. Engines are closed when
    the application ends. `pooling_models`, for embeddings, scores and labels, are opened and closed with
    it. `open_drafter` opens what drafts tokens for every request to the one engine. `routers` are additional routes,
    inside the same middleware. `on_engine_end` is called when the one model could not be loaded (`serving.failure`) or
    its engine's worker died. Clients must use a Host that `AllowedHosts` allows, such as 127.0.0.1.
    """
    extra_models = pooling_models or PoolingModels()
    if not isinstance(models, ModelSources):
        models = ModelSources.single(settings, models, open_drafter)
    serving = Serving(settings, models)
    app = Api(
        title="Headway",
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lambda app: _lifespan(app, serving, extra_models, on_engine_end),
        middleware=[Middleware(each, serving=serving) for each in MIDDLEWARE],
    )
    app.state.serving, app.state.pooling_models = serving, extra_models
    app.state.audio_decoder = AudioDecoder(settings)
    app.state.session_listener = None  # set where it listens before the app starts
    app.state.responses = ResponseStore(settings)
    app.state.mcp = McpServers.of(settings)
    serving.models.on_unload = app.state.responses.cool_engine
    app.state.batches = BatchStore(app, FileStore(settings))
    install_handlers(app)
    loading = () if settings.lora_dir is None else (adapter_routes.router,)
    loading += () if settings.programs is None else (program_routes.router,)
    apis = (
        openai.router,
        responses.router,
        batches.router,
        anthropic.router,
        ollama.router,
        llama_server.router,
        pooling.router,
        audio.router,
    )
    for routes in (home.router, router, operator_routes.router, *apis, *loading, *routers):
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
    """FastAPI whose OpenAPI document says what errors are: JSON on every route, and none is a 422."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                for status, response in operation["responses"].items():
                    if status >= "400" and "application/json" not in (content := response.get("content", {})):
                        response["content"] = {"application/json": next(iter(content.values()), {})}
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


@asynccontextmanager
async def _lifespan(
    app: FastAPI, serving: Serving, pooling_models: PoolingModels, on_engine_end: Callable[[], None]
) -> AsyncIterator[None]:
    with SwitchInterval(WHILE_SERVING), FullCollections() as collections:
        housekeeping = Housekeeping(serving, collections)
        watch = asyncio.create_task(_load_and_watch(serving, pooling_models, housekeeping, on_engine_end))
        path = serving.settings.session_socket
        try:
            serving.programs = await open_programs(serving)
            async with nullcontext() if path is None else UnixListener(serving, path, app.state.session_listener):
                yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            if serving.programs is not None:
                await serving.programs.close()
            await app.state.batches.close()
            await app.state.mcp.close()
            await serving.sessions.close()
            await serving.close()
            await asyncio.to_thread(pooling_models.close)


async def _load_and_watch(
    serving: Serving, pooling_models: PoolingModels, housekeeping: Housekeeping, on_engine_end: Callable[[], None]
) -> None:
    """Load the models that are kept, then watch all of them until the server ends, or its only engine dies."""
    try:
        await serving.loaders.run(pooling_models.open)
        await serving.start()
        housekeeping.loaded()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        serving.failure = error
        return on_engine_end()
    stuck: set[ServedModel] = set()
    while serving.state != "dead":
        await asyncio.sleep(POLL_SECONDS)
        before, stuck = stuck, set(serving.stuck_models())
        for model in before ^ stuck:
            _log_stuck(serving, model, model in stuck)
        if not serving.models.is_single:
            serving.models.tend(time.monotonic())
        await housekeeping.tend(time.monotonic())
    logs.log(logs.CRITICAL, "the engine's worker has died")
    on_engine_end()


def _log_stuck(serving: Serving, model: ServedModel, is_stuck: bool) -> None:
    """Log that an engine got stuck, or that its step finished after all."""
    if is_stuck:
        seconds = round(model.step_seconds, 1)
        logs.warn("the engine is stuck in a step", model=model.name, seconds=seconds, requests=serving.in_flight)
    else:
        logs.info("the engine's step has finished", model=model.name, state=serving.state)


router = APIRouter(responses=COMMON)


@router.get(
    "/v1/health",
    summary="Whether the server is ready",
    responses=ok(Health) | {503: {"model": Health | ErrorResponse, "description": "Not ready"}},
)
@router.get(
    "/health",
    summary="Whether the server is ready",
    responses=ok(Health) | {503: {"model": Health | ErrorResponse, "description": "Not ready"}},
)
async def health(request: Request) -> JSONResponse:
    """200 when the server is ready; 503 while the model loads, while the engine is stuck in a step (with `since`),
    while the server drains, and after the engine has died."""
    serving: Serving = request.app.state.serving
    state, stuck = serving.state, serving.stuck_models()
    seconds = max((model.step_seconds for model in stuck), default=0.0)
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


@router.get("/stats", summary="Engine statistics", response_model=None, responses=ERRORS | ok(ServerStats))
async def stats(request: Request, model: str | None = None) -> dict[str, Any]:
    """The figures of `engine.stats()` and its latest steps, of one model; `headway top --url` shows them."""
    serving: Serving = request.app.state.serving
    served, loaded = await serving.models.peek(model)
    facts = loaded.engine.info
    about = {"name": served.name, "dtype": facts.dtype, "device": facts.device}
    return {"model": about, "stats": asdict(loaded.engine.stats()), "steps": loaded.steps()}
