"""MCP servers that misbehave over HTTP: the path says how, and `tools/list` or `tools/call` is where it happens."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOOL = {"name": "go", "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False}}
RELEASE = threading.Event()  # ends what hangs


class Handler(BaseHTTPRequestHandler):
    """Does what its path says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen.append(("GET", self.path))  # type: ignore[attr-defined]
        self._send({})

    def do_DELETE(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((message["method"], self.path))  # type: ignore[attr-defined]
        id, how = message.get("id"), self.path.strip("/")
        if id is None:
            return self._send(None, 202)
        where, _, what = how.partition("-")
        if message["method"] == f"tools/{where}" or (where == "initialize" and message["method"] == where):
            return getattr(self, f"_{what}")(id)
        results = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}},
            "tools/list": {"tools": [TOOL]},
            "tools/call": {"content": [{"type": "text", "text": "gone"}]},
        }
        return self._result(id, results[message["method"]])

    # -- ways to misbehave -----------------------------------------------------------------------------------------

    def _redirect(self, id: int) -> None:
        self.send_response(307)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def _error(self, id: int) -> None:
        self._send({"secret": "of the server"}, 500)

    def _hang(self, id: int) -> None:
        RELEASE.wait(60)

    def _garbage(self, id: int) -> None:
        self._bytes(b"\x00\xff garbage")

    def _surrogate(self, id: int) -> None:
        self._bytes(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "\\ud800"}]}}' % id)

    def _deep(self, id: int) -> None:
        self._bytes(b"[" * 100_000)

    def _shapes(self, id: int) -> None:
        self._result(id, {"tools": [{"name": 3}]})

    def _twice(self, id: int) -> None:
        self._result(id, {"tools": [TOOL, TOOL]})

    def _pages(self, id: int) -> None:
        self._result(id, {"tools": [], "nextCursor": "again"})

    def _many(self, id: int) -> None:
        self._result(id, {"tools": [{**TOOL, "name": f"t{i}"} for i in range(1000)]})

    def _large(self, id: int) -> None:
        self._result(id, {"tools": [{**TOOL, "inputSchema": {"type": "object", "title": "x" * 300_000}}]})

    def _megabytes(self, id: int) -> None:
        self._result(id, {"content": [{"type": "text", "text": "x" * (3 << 20)}]})

    def _endless(self, id: int) -> None:
        """A stream of events that are not the answer."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        event = b"data: " + json.dumps({"jsonrpc": "2.0", "method": "notifications/x"}).encode() + b"\n\n"
        while not RELEASE.is_set():
            self.wfile.write(event * 100)

    def _other(self, id: int) -> None:
        self._result(id + 7, {"content": []})

    def _refuse(self, id: int) -> None:
        self._send({"jsonrpc": "2.0", "id": id, "error": {"code": -32000, "message": "not\ntoday"}})

    def _version(self, id: int) -> None:
        self._result(id, {"protocolVersion": "1999-01-01"})

    # -- responses -------------------------------------------------------------------------------------------------

    def _result(self, id: int, result: Any) -> None:
        self._send({"jsonrpc": "2.0", "id": id, "result": result})

    def _send(self, value: Any, status: int = 200) -> None:
        self._bytes(b"" if value is None else json.dumps(value).encode(), status)

    def _bytes(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are what is tested."""


@contextmanager
def hostile(certificate: tuple[Path, Path] | None = None) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The URL of a server, and the methods and paths that it saw."""
    RELEASE.clear()
    web = QuietServer(("127.0.0.1", 0), Handler)
    web.seen = []  # type: ignore[attr-defined]
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*certificate)
        web.socket = tls.wrap_socket(web.socket, server_side=True)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' * (certificate is not None)}://127.0.0.1:{web.server_port}", web.seen  # type: ignore[attr-defined]
    finally:
        RELEASE.set()
        web.shutdown()
        thread.join(30)
        web.server_close()
