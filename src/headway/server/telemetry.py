"""OpenTelemetry traces of requests, with the semantic conventions for generative AI; off unless `--otel` says where to.

    POST /v1/chat/completions      the HTTP request, continuing the client's trace (`traceparent`)
    └─ chat smollm2                the inference: model, sampling parameters, tokens, finish reasons
       ├─ queue                    admitted, and waiting for its first step
       ├─ prefill                  from then to the first token
       └─ decode                   from there to the last token

    session smollm2                a session of programs, from its first connection to its end

The access log begins and ends the first span, `serving.AdmittedRequest` records the others when it is closed: no API
has code of its own here. Spans wait in a bounded queue for a thread that sends them, so nothing here blocks; if nobody
takes them they are dropped, and the log says so once. They hold no text of prompts and responses, unless
`otel_bodies` is set. OpenTelemetry is imported only where traces are on.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.server import logs
from headway.server.errors import as_api_error

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from headway.server.settings import ServerSettings

MISSING = "--otel needs OpenTelemetry, which is not installed: pip install 'headway[otel]'"
TRACES_PATH = "/v1/traces"
MAX_QUEUED_SPANS, MAX_BATCH = 4096, 256
DELAY_MS = 1000  # between batches
CLOSE_SECONDS = 3.0  # for the spans in the queue to be sent, when the server ends
BODY_BYTES = 64 << 10  # of each body
SHOWN_REASONS = 64  # a request may have thousands of sequences
CANCELLED = "cancelled"

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/api/embed": "embeddings",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/score": "score",
    "/v1/score": "score",
    "/classify": "classify",
    "/v1/audio/transcriptions": "transcribe",
    "/v1/audio/translations": "translate",
}
"""A path → `gen_ai.operation.name`: a name of the conventions where they have one."""
OTHER_OPERATION = "inference"
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "n": "choice.count",
    "stream": "stream",
}
"""A field of a request → `gen_ai.request.…`. Stop strings are text of the client's, and left out."""

SESSION_COUNTS = {
    "context.new": "contexts",
    "pass.execute": "passes",
    "generation.new": "generations",
    "chat.new": "chats",
}
"""A verb of a session → what it is counted as, in `headway.session.…`."""

request_trace: ContextVar[RequestTrace | None] = ContextVar("headway_request_trace", default=None)


def need_opentelemetry() -> None:
    """Raise an error that names the extra to install, if OpenTelemetry is not there."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise Unsupported(MISSING) from None


@dataclass(frozen=True)
class Inference:
    """What one admitted request came to. Times are `time.perf_counter()` values."""

    model: str
    request_id: str
    began: float
    ended: float
    queued: float | None  # seconds
    first_token: float | None
    last_token: float | None
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    reasons: tuple[str, ...]
    error: str | None  # a code


class Traces:
    """The traces of one server: begins them, and sends them to a collector."""

    def __init__(self, settings: ServerSettings) -> None:
        need_opentelemetry()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)  # it would repeat itself; we warn once
        version = importlib.metadata.version("headway")
        own = Resource({"service.name": "headway", "service.version": version})
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()),  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
            shutdown_on_exit=False,
        )
        url = traces_url(settings.otel or "")
        exporter = _warning_once(OTLPSpanExporter(endpoint=url), url)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, MAX_QUEUED_SPANS, DELAY_MS, max_export_batch_size=MAX_BATCH)
        )
        self._tracer = self._provider.get_tracer("headway", version)
        self._settings = settings

    def begin(self, scope: Mapping[str, Any], path: str) -> RequestTrace:
        """The trace of an HTTP request, which goes on with the client's if that sent one."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = _client_context(scope)
        host, port = scope.get("server") or (self._settings.host, self._settings.port)
        client, agent = scope.get("client"), _header(scope, b"user-agent")
        attributes: dict[str, Any] = {
            "http.request.method": scope["method"],
            "url.path": path[:256],
            "url.scheme": self._settings.scheme,
            "server.address": str(host),
            **({} if port is None else {"server.port": port}),
            **({} if not client else {"client.address": client[0]}),
            **({} if agent is None else {"user_agent.original": agent[:256]}),
        }
        span = self._tracer.start_span(
            scope["method"], context, kind=SpanKind.SERVER, attributes=attributes, start_time=time.time_ns()
        )
        where = {name: attributes[name] for name in ("server.address", "server.port") if name in attributes}
        keeps = self._settings.otel_bodies and span.is_recording() and not _is_form(scope)
        trace = RequestTrace(self._tracer, OPERATIONS.get(path, OTHER_OPERATION), where, keeps_bodies=keeps)
        trace.span, trace.parent = span, set_span_in_context(span, context)
        return trace

    def row(self, path: str) -> RequestTrace:
        """The trace of a request that did not come over HTTP: a row of a batch."""
        return RequestTrace(self._tracer, OPERATIONS.get(path, OTHER_OPERATION), {}, keeps_bodies=False)

    def session(self, model: str, session_id: str) -> SessionTrace:
        """The trace of a session of programs."""
        return SessionTrace(self._tracer, model, session_id)

    def close(self) -> None:
        """Send what is in the queue, within some seconds: a collector that does not respond keeps no server."""
        thread = threading.Thread(target=self._provider.shutdown, name="headway-otel-close", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: Tracer, operation: str, where: Mapping[str, Any], *, keeps_bodies: bool) -> None:
        self.operation, self.keeps_bodies = operation, keeps_bodies
        self.span: Span | None = None  # of the HTTP request
        self.parent: TraceContext | None = None  # of the inference
        self._tracer, self._where = tracer, dict(where)
        self._parameters: dict[str, Any] = {}
        self._bodies: dict[str, bytearray] = {"request": bytearray(), "response": bytearray()}

    def asked(self, body: Any) -> None:
        """Note the sampling parameters that a request has set."""
        given = {name: getattr(body, name, None) for name in PARAMETERS}
        self._parameters = {PARAMETERS[name]: value for name, value in given.items() if value is not None}
        format = getattr(getattr(body, "response_format", None), "type", None)
        if format in ("json_object", "json_schema"):
            self._parameters["output.type"] = "json"

    def traceparent(self) -> str | None:
        """The header by which another server goes on with the trace."""
        if self.span is None:
            return None
        own = self.span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}" if own.is_valid else None

    def keep(self, which: str, piece: bytes) -> None:
        """Keep a piece of the request's or the response's body, up to a size."""
        kept = self._bodies[which]
        kept += piece[: BODY_BYTES - len(kept)]

    def end(self, method: str, route: str, status: int | None, request_id: str, *, complete: bool) -> None:
        """End the span of the HTTP request. Without a status the client left before there was a response."""
        from opentelemetry.trace import StatusCode

        if (span := self.span) is None:
            return
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("headway.request.id", request_id)
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if status is None or not complete:
            span.set_attribute("error.type", CANCELLED)
        elif status >= 400:
            span.set_attribute("error.type", str(status))
        if status is not None and status >= 500:
            span.set_status(StatusCode.ERROR)
        for which, body in self._bodies.items():
            if body:
                span.set_attribute(f"headway.{which}.body", bytes(body).decode("utf-8", "backslashreplace"))
        span.end()

    def record(self, done: Inference) -> None:
        """The span of the inference and those of its phases, which are over."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        now, clock = time.time_ns(), time.perf_counter()

        def at(moment: float) -> int:
            return now - round((clock - moment) * 1e9)

        span = self._tracer.start_span(
            f"{self.operation} {done.model}",
            self.parent,
            kind=SpanKind.INTERNAL,
            attributes=self._attributes(done),
            start_time=at(done.began),
        )
        if done.error is not None:
            span.set_attribute("error.type", done.error)
            if done.error != CANCELLED:
                span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span, self.parent)
        for name, begin, end in _phases(done):
            self._tracer.start_span(name, inside, start_time=at(begin)).end(at(end))
        span.end(at(done.ended))

    def _attributes(self, done: Inference) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "headway",
            "gen_ai.request.model": done.model,
            "gen_ai.response.model": done.model,
            "gen_ai.usage.input_tokens": done.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
            "gen_ai.usage.output_tokens": done.tokens,
            "gen_ai.response.finish_reasons": done.reasons[:SHOWN_REASONS],
            "headway.request.id": done.request_id,
            **self._where,
        }
        for name, value in self._parameters.items():
            attributes["gen_ai.output.type" if name == "output.type" else f"gen_ai.request.{name}"] = value
        if done.first_token is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = done.first_token - done.began
        return {name: value for name, value in attributes.items() if _fits(value)}


class SessionTrace:
    """The span of one session, over as many connections as it takes: what its program did, as counts."""

    def __init__(self, tracer: Tracer, model: str, session_id: str) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        attributes = {
            "gen_ai.operation.name": "session",
            "gen_ai.provider.name": "headway",
            "gen_ai.request.model": model,
            "headway.session.id": session_id,
        }
        self._span = tracer.start_span(f"session {model}", Context(), kind=SpanKind.SERVER, attributes=attributes)
        self._counts = dict.fromkeys(SESSION_COUNTS.values(), 0)

    def asked(self, verb: str) -> None:
        """Count what the program asks for."""
        if (name := SESSION_COUNTS.get(verb)) is not None:
            self._counts[name] += 1

    def end(self, reason: str) -> None:
        """The session was closed: by its program, or for a reason of `docs/protocol.md`."""
        for name, count in self._counts.items():
            self._span.set_attribute(f"headway.session.{name}", count)
        if reason != "bye":
            self._span.set_attribute("error.type", reason)
        self._span.end()


def error_code(error: BaseException) -> str:
    """What kind of error it is, in a word: the code that a client gets, or the name of its type."""
    known = as_api_error(error) if isinstance(error, Exception) else None
    if known is None or known.status == 500:
        return type(error).__name__
    return known.code or str(known.status)


def traces_url(endpoint: str) -> str:
    """Where traces are sent to: below the collector's address, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def _phases(done: Inference) -> list[tuple[str, float, float]]:
    """The times of a request that generated tokens: waiting, up to its first token, and from there on."""
    if done.first_token is None or done.last_token is None:
        return []
    started = min(done.began + (done.queued or 0.0), done.first_token)
    queue = [] if done.queued is None else [("queue", done.began, started)]
    return [*queue, ("prefill", started, done.first_token), ("decode", done.first_token, done.last_token)]


def _fits(value: Any) -> bool:
    """Whether the protocol can carry it: its integers have 64 bits, and a seed may be larger."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _client_context(scope: Mapping[str, Any]) -> TraceContext | None:
    """The trace that the client's headers name, if they are well-formed."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: value for name in ("traceparent", "tracestate") if (value := _header(scope, name.encode()))}
    return TraceContextTextMapPropagator().extract(carrier) if "traceparent" in carrier else None


def _header(scope: Mapping[str, Any], name: bytes) -> str | None:
    values = [value for given, value in scope["headers"] if given == name]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _is_form(scope: Mapping[str, Any]) -> bool:
    return (_header(scope, b"content-type") or "").startswith("multipart/")


def _warning_once(inner: SpanExporter, url: str) -> SpanExporter:
    """The exporter, with one line in the log when spans can no longer be sent, and one when they can again."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class WarningExporter(SpanExporter):
        lost = 0  # spans since the last that were sent

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = inner.export(spans)
            if result is not SpanExportResult.SUCCESS:
                if not self.lost:
                    logs.warn("traces cannot be sent; requests go on without them", url=url)
                self.lost += len(spans)
            elif self.lost:
                logs.info("traces are sent again", lost=self.lost)
                self.lost = 0
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    return WarningExporter()
