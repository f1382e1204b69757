"""An OpenTelemetry collector in this process: takes traces by OTLP over HTTP, and keeps their spans."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATIENCE = 120.0  # seconds until a test gives up; nothing is asserted about times


@dataclass(frozen=True)
class SpanSeen:
    """One span, as it came."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: int
    end: int
    is_error: bool
    attributes: dict[str, Any]


class Collector:
    """The spans that came, and what each batch said of the service."""

    def __init__(self) -> None:
        self.spans: list[SpanSeen] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        self.url = ""

    def take(self, path: str, data: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(data)
        self.paths.append(path)
        for resource in request.resource_spans:
            self.resources.append(_values(resource.resource.attributes))
            self.spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]

    def of(self, request_id: str) -> list[SpanSeen]:
        """The spans of a request, and those below them, once its first one has come."""
        end = time.monotonic() + PATIENCE
        while True:
            own = [one for one in list(self.spans) if one.attributes.get("headway.request.id") == request_id]
            if any(one.kind == 2 for one in own):
                ids = {one.id for one in own}
                return [*own, *(one for one in list(self.spans) if one.parent in ids and one not in own)]
            assert time.monotonic() < end, [one.name for one in self.spans]
            time.sleep(0.02)


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """A collector on a loopback port."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            assert self.headers["content-type"] == "application/x-protobuf"
            if found.status == 200:
                found.take(self.path, data)
            self.send_response(found.status)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _span(span: Any) -> SpanSeen:
    return SpanSeen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
