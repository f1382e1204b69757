"""A server inside the process, without HTTP: what computes the rows of a batch job on this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from headway.base.errors import InvalidInput
from headway.jobs.job import DEFAULT_MODEL, RowWork, rows_of
from headway.jobs.requests import RequestWorker, RowRequest, RowResponse, key_in_column
from headway.jobs.run import PipelineWorker, Worker
from headway.server.app import create_app
from headway.server.keys import ANYONE
from headway.server.pooling import PoolingModels
from headway.server.route_calls import call_route, routes_of
from headway.server.serving import Serving
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.program.engine import Engine

ANY_TOKENS = 1 << 40  # the queue is limited by the number of rows in flight


@contextmanager
def open_worker(
    work: RowWork, *, find: Callable[[str], Any] = str, open_engine: Callable[[Any], Engine] | None = None
) -> Iterator[Worker]:
    """What computes rows on this machine: one engine, or a pipeline.

    `find` turns a model's name into what is loaded, `open_engine` loads it.
    """
    import headway as hw

    rows = rows_of(work)
    if rows is None:
        clash = work.options.keys() & {"model", "tokenizer", *work.engine}
        if clash:
            raise InvalidInput(f"{min(clash)!r} is not an option of the task; it has an argument of its own")
        path = None if work.model is None else str(find(work.model))
        with hw.pipeline(work.task, path, **work.engine, **work.options) as pipeline:
            yield PipelineWorker(pipeline, work.columns, lambda value: key_in_column(value, work.key))
        return
    name = work.model or DEFAULT_MODEL

    def opened() -> Engine:
        path = find(name)
        return hw.Engine(path, **work.engine) if open_engine is None else open_engine(path)

    pooling = PoolingModels(work.pooling, device=work.engine.get("device", "auto"), find=find)
    with InProcessServer(name, opened, pooling, concurrency=work.concurrency) as server:
        yield RequestWorker(server.send, rows, work.concurrency)


class InProcessServer:
    """The server's routes over one engine, on an event loop in a thread. `with InProcessServer(…) as server:`"""

    def __init__(
        self, model: str, open_engine: Callable[[], Engine], pooling_models: PoolingModels, *, concurrency: int
    ) -> None:
        settings = ServerSettings(model=model, max_queue_requests=concurrency + 1, max_queue_tokens=ANY_TOKENS)
        self._app = create_app(settings, open_engine, pooling_models=pooling_models)
        self._routes = routes_of(self._app)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headway-batch", daemon=True)
        self._calls: set[asyncio.Task[RowResponse]] = set()
        self._lifespan = self._app.router.lifespan_context(self._app)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._loaded())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._closed())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def send(self, request: RowRequest) -> Future[RowResponse]:
        """The response to a request, to come."""
        return asyncio.run_coroutine_threadsafe(self._call(request), self._loop)

    async def _call(self, request: RowRequest) -> RowResponse:
        call = asyncio.create_task(call_route(self._routes, self._app, request, ANYONE, reveal=True))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await call

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _loaded(self) -> None:
        await self._lifespan.__aenter__()
        serving: Serving = self._app.state.serving
        while serving.state == "loading":
            await asyncio.sleep(0.01)
        if serving.failure is not None:
            raise serving.failure

    async def _closed(self) -> None:
        for call in (calls := list(self._calls)):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._lifespan.__aexit__(None, None, None)
