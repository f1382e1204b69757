"""The HTTP server that clients see: it checks, routes and forwards requests, and streams their responses back.

The middleware is that of every Headway server: limits, hosts, origins, keys and rates hold here, before anything
reaches a replica. A request gets a lease on a replica and goes there as it is. If the replica is lost before anything
was sent to the client, the request is tried elsewhere; afterwards the response ends with an error that says to send
it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import aiohttp
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from headway.base.dataclass import dataclass
from headway.cluster.answers import LOST, Answer
from headway.cluster.leases import BOOK, HeldLease, Lease, NoPlace, ReplicaLost, ask_all, leased
from headway.cluster.merged_metrics import merged_metrics
from headway.cluster.prompts import PromptReader, owner
from headway.cluster.replica import SECRET
from headway.cluster.routing import RouteRequest
from headway.remote.protocol.codec import BadMessage, decode, decode_text
from headway.remote.protocol.limits import PATH
from headway.server import logs
from headway.server.errors import ApiError, route_path
from headway.server.keys import Tenant
from headway.server.metrics import CONTENT_TYPE
from headway.server.middleware import MIDDLEWARE
from headway.server.models import ModelSources
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.server.telemetry import request_trace

ATTEMPTS = 3  # replicas that a request is sent to
READ_AGAIN_SECONDS = 60.0  # after a model whose prompts cannot be read; its requests are routed by load meanwhile
HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host", "origin",
     "content-length", SECRET.decode(), "x-request-id", "expect"}
)  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(eq=False)
class FrontFigures:
    """Counters of a front."""

    requests: int = 0
    retries: int = 0
    lost: int = 0
    prompt_pages: int = 0
    held_pages: int = 0  # of them, that the chosen replica was thought to hold


class Front:
    """Routes and forwards. `read` makes a `PromptReader` for a model; until there is one, requests have no keys."""

    def __init__(
        self, settings: ServerSettings, handle: Callable[[], Any], read: Callable[[str, int], PromptReader]
    ) -> None:
        elsewhere = ModelSources.single(settings, _no_engine, None)
        self.serving, self.figures = Serving(settings, elsewhere), FrontFigures()
        self._handle, self._read = handle, read
        self._reader: PromptReader | None = None
        self._reading: asyncio.Task[None] | None = None
        self._client: aiohttp.ClientSession | None = None

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health, methods=["GET", "HEAD"]),
            Route("/metrics", self._metrics),
            Route("/replicas", self._replicas),
            WebSocketRoute(PATH, self._session),
            Route("/{path:path}", self._forward, methods=METHODS),
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(each, serving=self.serving) for each in MIDDLEWARE],
            lifespan=self._lifespan,
        )
        app.state.serving, app.state.routes = self.serving, tuple(routes)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self._client:
            yield
        if self.serving.traces is not None:
            await asyncio.to_thread(self.serving.traces.close)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _forward(self, request: Request) -> Response:
        body, route = await request.body(), RouteRequest()
        route = await self._route(route_path(request.scope), body, self.serving.tenant(request))
        self.figures.requests += 1
        refused: Answer | None = None
        for attempt in range(ATTEMPTS):
            self.figures.retries += attempt > 0
            try:
                answer = await self._send(request, body, route)
            except ReplicaLost as lost:
                route = replace(route, avoid=route.avoid | {_replica(lost)})
                continue
            except NoPlace as error:
                if refused is not None:
                    break
                raise ApiError(503, str(error), code="busy", headers={"Retry-After": "1"}) from None
            if not answer.is_refused:
                return answer
            refused = answer
            route = replace(route, avoid=route.avoid | {answer.replica})
            if BOOK.replicas is not None and not BOOK.replicas - route.avoid:
                break  # nobody else could take it
        if refused is not None:
            return refused
        raise ApiError(503, f"{ATTEMPTS} replicas were lost; send the request again", code="replica_lost",
                       headers={"Retry-After": "1"})  # fmt: skip

    async def _route(self, path: str, body: bytes, tenant: Tenant) -> RouteRequest:
        reader = self._reader
        if reader is None:
            return RouteRequest(home=tenant.name) if path.startswith(("/v1/files", "/v1/batches")) else RouteRequest()
        return await self.serving.readers.run(lambda: reader.route(path, body, salt=tenant.salt, tenant=tenant.name))

    async def _send(self, request: Request, body: bytes, route: RouteRequest) -> Answer:
        """The answer of one replica, once its first bytes are here. The lease ends with the answer."""
        held = leased(self._handle(), route)
        lease = await held.__aenter__()
        answer = Answer(held, lease, self._count_lost)
        try:
            self._count(route, lease.lease)
            await answer.begin(self._opened(request, body, lease.lease))
            return answer
        except BaseException as error:
            await answer.close()
            if isinstance(error, (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)):
                raise _lost(lease.lease.replica) from error
            raise

    def _opened(self, request: Request, body: bytes, lease: Lease) -> Any:
        assert self._client is not None
        url = lease.url + route_path(request.scope)
        query = request.scope["query_string"].decode("latin-1")
        return self._client.request(
            request.method,
            f"{url}?{query}" if query else url,
            data=body,
            headers=_headers(request.scope, lease),
            allow_redirects=False,
        )

    def _count(self, route: RouteRequest, lease: Lease) -> None:
        self.figures.prompt_pages += len(route.keys)
        self.figures.held_pages += lease.pages
        if (self._reader is None or self._reader.model != lease.model) and self._reading is None:
            self._reading = asyncio.create_task(self._learn(lease))

    def _count_lost(self) -> None:
        self.figures.lost += 1

    async def _learn(self, lease: Lease) -> None:
        """Read the tokenizer and the template of the model that replicas serve now."""
        try:
            self._reader = await asyncio.to_thread(self._read, lease.model, lease.page_size)
        except Exception as error:
            logs.warn("prompts cannot be read for routing", model=lease.model, error=str(error)[:200])
            await asyncio.sleep(READ_AGAIN_SECONDS)
        finally:
            self._reading = None

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def _session(self, socket: WebSocket) -> None:
        """Frames of a session, both ways, on the replica that has it: the first message may name it."""
        await socket.accept()
        try:
            async with asyncio.timeout(self.serving.settings.header_timeout):
                first = await socket.receive()
        except TimeoutError:
            return await socket.close(1008, "no hello came in time")
        if first["type"] == "websocket.disconnect":
            return
        route = RouteRequest(replica=owner(_resumed(first)))
        try:
            async with leased(self._handle(), route) as held:
                await self._relay(socket, first, held)
        except (NoPlace, ReplicaLost, aiohttp.ClientError, ConnectionError) as error:
            with suppress(RuntimeError):
                await socket.close(1012, f"lost: {error}"[:120])

    async def _relay(self, socket: WebSocket, first: Any, held: HeldLease) -> None:
        assert self._client is not None
        lease = held.lease
        headers = {SECRET.decode(): lease.secret}
        if (key := socket.headers.get("authorization")) is not None:
            headers["authorization"] = key
        elif (key := socket.headers.get("x-api-key")) is not None:
            headers["x-api-key"] = key
        most = self.serving.settings.max_body_bytes * 4
        async with self._client.ws_connect(lease.url + PATH, headers=headers, max_msg_size=most) as other:
            tasks = [
                asyncio.create_task(_upstream(socket, other, first)),
                asyncio.create_task(_downstream(socket, other)),
                asyncio.create_task(held.lost()),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if tasks[2] in done:
                    raise ReplicaLost(LOST)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    # -- the front's own routes ----------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        if self.serving.draining:
            return JSONResponse({"status": "draining"}, 503)
        count = len(await self._about())
        return JSONResponse({"status": "ready" if count else "loading", "replicas": count}, 200 if count else 503)

    async def _replicas(self, request: Request) -> Response:
        replicas, figures = await self._about(), self.figures
        for one in replicas:
            one["leases"] = BOOK.leases[one["replica"]]
        routing = {name: getattr(figures, name) for name in FrontFigures.__annotations__}
        return JSONResponse({"replicas": replicas, "routing": routing})

    async def _about(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = []
        with suppress(Exception):  # those that are gone
            await ask_all(self._handle(), "about", replicas.append)
        return sorted(replicas, key=lambda one: one["replica"])

    async def _metrics(self, request: Request) -> Response:
        texts: list[tuple[str, bytes]] = [("front", self.serving.metrics.text())]
        with suppress(Exception):
            await ask_all(self._handle(), "metrics", texts.append)
        return Response(merged_metrics(texts), headers={"content-type": CONTENT_TYPE})


def _lost(replica: str) -> ReplicaLost:
    lost = ReplicaLost(LOST)
    lost.replica = replica  # type: ignore[attr-defined]
    return lost


def _replica(lost: ReplicaLost) -> str:
    return getattr(lost, "replica", "")


def _headers(scope: Scope, lease: Lease) -> list[tuple[str, str]]:
    """The headers of a request that a replica gets."""
    kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    headers = [(name, value) for name, value in kept if name not in HOP]
    id = scope.get("state", {}).get("request_id", "")
    if (trace := request_trace.get()) is not None and (parent := trace.traceparent()) is not None:
        headers = [*((name, value) for name, value in headers if name != "traceparent"), ("traceparent", parent)]
    return [*headers, ("x-request-id", id), (SECRET.decode(), lease.secret)]


def _resumed(message: Mapping[str, Any]) -> Any:
    """The session that a first message wants to resume."""
    try:
        data, text = message.get("bytes"), message.get("text")
        hello = decode(data, bounded=True) if data is not None else decode_text(text or "", bounded=True)
        resume = hello.get("resume")
        return resume.get("session") if isinstance(resume, dict) else None
    except BadMessage:
        return None  # the replica says what is wrong with it


async def _upstream(socket: WebSocket, other: aiohttp.ClientWebSocketResponse, first: Any) -> None:
    message = first
    while message["type"] != "websocket.disconnect":
        if (data := message.get("bytes")) is not None:
            await other.send_bytes(data)
        else:
            await other.send_str(message.get("text") or "")
        message = await socket.receive()


async def _downstream(socket: WebSocket, other: aiohttp.ClientWebSocketResponse) -> None:
    try:
        async for message in other:
            if message.type == aiohttp.WSMsgType.BINARY:
                await socket.send_bytes(message.data)
            elif message.type == aiohttp.WSMsgType.TEXT:
                await socket.send_str(message.data)  # type: ignore[attr-defined]
        code = other.close_code
        if code is None or code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
            raise ReplicaLost(LOST)
        await socket.close(code)
    except (WebSocketDisconnect, RuntimeError):
        return  # the client is gone


def _no_engine() -> NoReturn:
    raise AssertionError("engines are in the replicas")
