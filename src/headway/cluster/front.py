"""The HTTP server that clients see: it checks, routes and forwards requests, and streams their responses back.

The middleware is that of every Headway server: limits, hosts, origins, keys and rates hold here, before anything
reaches a replica. A request gets a lease on a replica and goes there as it is. If the replica is lost before anything
was sent to the client, the request is tried elsewhere; afterwards the response ends with an error that says to send
it again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headway.base.dataclass import dataclass
from headway.cluster.leases import BOOK, HeldLease, Lease, NoPlace, ReplicaLost, ask_all, leased
from headway.cluster.prompts import PromptReader, owner
from headway.cluster.replica import SECRET
from headway.cluster.routing import RouteRequest
from headway.remote.protocol.codec import BadMessage, decode, decode_text
from headway.remote.protocol.limits import PATH
from headway.server import logs
from headway.server.errors import ApiError, error_body, route_path
from headway.server.keys import Tenant
from headway.server.metrics import CONTENT_TYPE
from headway.server.middleware import MIDDLEWARE
from headway.server.models import ModelSources
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.server.telemetry import request_trace

ATTEMPTS = 3  # replicas that a request is sent to
BUFFERED = 4 << 20  # bytes of a response that is read whole before it is sent on, so that it can be tried elsewhere
ELSEWHERE = ("draining", "loading", "dead", "failed", "stuck", "closed", "queue_full")  # codes worth another replica
LOST = "the replica that computed this response was lost; send the request again"
HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host", "origin",
     "content-length", SECRET.decode(), "x-request-id", "expect"}
)  # fmt: skip
OWN = frozenset({"connection", "keep-alive", "transfer-encoding", "x-request-id", "x-content-type-options", "date"})
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
        refused: _Answer | None = None
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

    async def _send(self, request: Request, body: bytes, route: RouteRequest) -> _Answer:
        """The answer of one replica, once its first bytes are here. The lease ends with the answer."""
        held = leased(self._handle(), route)
        lease = await held.__aenter__()
        answer = _Answer(self, held, lease, request.scope)
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

    async def _learn(self, lease: Lease) -> None:
        """Read the tokenizer and the template of the model that replicas serve now."""
        try:
            self._reader = await asyncio.to_thread(self._read, lease.model, lease.page_size)
        except Exception as error:
            logs.warn("prompts cannot be read for routing", model=lease.model, error=str(error)[:200])
            await asyncio.sleep(60)
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


class _Answer(Response):
    """The response of a replica: its beginning is read before any of it is sent, so that it can be tried elsewhere."""

    def __init__(self, front: Front, held: Any, lease: HeldLease, scope: Scope) -> None:
        self._front, self._held, self._lease, self._scope = front, held, lease, scope
        self._watch = asyncio.create_task(lease.lost())
        self._request: Any = None
        self._source: aiohttp.ClientResponse | None = None
        self._first, self._whole, self._closed = b"", False, False
        self.background = None

    @property
    def replica(self) -> str:
        return self._lease.lease.replica

    async def begin(self, request: Any) -> None:
        """Wait for the response's first bytes; for all of them where they are few or no stream."""
        self._request = request
        self._source = source = await self._or_lost(request.__aenter__())
        self.status_code = source.status
        streams = source.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))
        if streams:
            self._first = await self._or_lost(source.content.readany())
            return
        pieces, size = list[bytes](), 0
        while size < BUFFERED and (piece := await self._or_lost(source.content.readany())):
            pieces.append(piece)
            size += len(piece)
        self._first, self._whole = b"".join(pieces), size < BUFFERED

    @property
    def is_refused(self) -> bool:
        """Whether another replica may take what this one has refused."""
        if self.status_code not in (429, 503) or not self._whole:
            return False
        try:
            error = json.loads(self._first).get("error")
            code = error.get("code") if isinstance(error, dict) else None
        except (ValueError, AttributeError):
            return False
        return code in ELSEWHERE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._source is not None
        try:
            headers = [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in self._source.headers.items()
                if name.lower() not in OWN
            ]
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": not self._whole})
            if not self._whole:
                await self._stream(scope, send)
        finally:
            await self.close()

    async def _stream(self, scope: Scope, send: Send) -> None:
        assert self._source is not None
        try:
            while piece := await self._or_lost(self._source.content.readany()):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError):
            self._front.figures.lost += 1
            scope.setdefault("state", {})["error_event"] = _event_writer(route_path(scope))
            raise ApiError(503, LOST, code="replica_lost", headers={"Retry-After": "1"}) from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _or_lost(self, work: Any) -> Any:
        """What is awaited, unless the replica is lost first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # what it sent before may still be on its way
                await asyncio.wait({task}, timeout=1.0)
            if not task.done():
                raise ConnectionError("the replica has ended the lease")
            return task.result()
        finally:
            if not task.done():
                task.cancel()

    async def close(self) -> None:
        """End the request and its lease."""
        if self._closed:
            return
        self._closed = True
        if self._source is not None:
            self._source.close() if not self._whole else self._source.release()
        self._watch.cancel()
        await self._held.__aexit__(None, None, None)


def _event_writer(path: str) -> Callable[[ApiError], bytes]:
    """How a stream of this path tells of an error."""
    if path.startswith("/api/"):
        return lambda error: error_body(error, path) + b"\n"
    if path.startswith("/v1/messages"):
        return lambda error: b"event: error\ndata: " + error_body(error, path) + b"\n\n"
    if path.startswith("/v1/responses"):
        return lambda error: (
            b"event: error\ndata: "
            + json.dumps({"type": "error", "code": error.code, "message": error.message, "param": None}).encode()
            + b"\n\n"
        )
    return lambda error: b"data: " + error_body(error, path) + b"\n\n"


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


# -- metrics -----------------------------------------------------------------------------------------------------------


def merged_metrics(texts: list[tuple[str, bytes]]) -> bytes:
    """Metrics of several processes as one text; each sample says which replica it is of."""
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                merged.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(families.values())))
    return generate_latest(registry)


@dataclass(eq=False)
class _Families:
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def _no_engine() -> NoReturn:
    raise AssertionError("engines are in the replicas")
