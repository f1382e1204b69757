"""Where a server listens: with TLS, on a Unix socket, behind a proxy's prefix."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from server_process import PATIENCE, Server, alone

import headway as hw
from headway.base.errors import InvalidInput
from headway.server.middleware.tls import SPARE
from headway.server.run import _listen_at, check_certificate
from headway.server.settings import ServerSettings

FOLDER = Path(__file__).parent
CERTIFICATE, KEY = FOLDER / "localhost.pem", FOLDER / "localhost.key"  # self-signed, for tests only


def test_tls_is_spoken_and_nothing_else(start: Callable[..., Server]) -> None:
    server = start({"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(KEY)}).ready()
    assert server.logged("listening")[0]["url"].startswith("https://")
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=PATIENCE)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4, "stream": True})
    connection.request("POST", "/tokens", body, {"Origin": f"https://127.0.0.1:{server.port}"})
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.close()
    with server.connect() as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ConnectionResetError):
            assert not plain.recv(100).startswith(b"HTTP")
    with pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(
            socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE), server_hostname="localhost"
        )
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_sessions_are_held_over_tls(start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start({"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(KEY)}).ready()
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))

    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as ctx:
            return list(await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=4, stop_only=True).tokens())

    with hw.connect(f"https://localhost:{server.port}") as engine:
        assert engine.run(program) == alone([1, 2, 3], 4)


REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


class Handshake:
    """A TLS client by hand, over bytes."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        self._come, self._go = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(CERTIFICATE))
        self._tls = context.wrap_bio(self._come, self._go, server_hostname="localhost")

    def begin(self) -> Handshake:
        """Send the first message, and no other."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self.socket.sendall(self._go.read())
        return self

    def end(self, request: bytes) -> bytes:
        """Send the last message and a request with it; returns the answer."""
        while True:
            self._come.write(self.socket.recv(1 << 16))
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                break
        self._tls.write(request)
        self.socket.sendall(self._go.read())
        answer = b""
        while piece := self.socket.recv(1 << 16):
            self._come.write(piece)
            with suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                while text := self._tls.read(1 << 16):
                    answer += text
            if answer.endswith(b"}"):
                break
        return answer

    def is_closed(self) -> bool:
        """Whether the server has closed it; what it sent is dropped."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 16):
                pass
            return True
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True


def test_handshakes_that_are_not_finished_are_bounded_in_number(start: Callable[..., Server]) -> None:
    limits = {"max_connections": 4, "header_timeout": 1000}
    server = start({"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(KEY)} | limits).ready()
    assert Handshake(server).begin().end(REQUEST).startswith(b"HTTP/1.1 200")
    held = [Handshake(server) for _ in range(4 + SPARE + 8)]
    server.until(lambda: sum(one.is_closed() for one in held) == 8)
    for one in held[: SPARE + 2]:  # the first ones are those that may go on
        one.socket.close()
    held = held[SPARE + 2 :]
    server.until(lambda: Handshake(server).begin().end(REQUEST).startswith(b"HTTP/1.1 200"))
    more = [Handshake(server).begin() for _ in range(6)]
    assert b"503" in more[0].end(REQUEST)[:20]  # with those still in their handshakes it is one too many
    server.signal(signal.SIGTERM)  # nor does the server wait for them
    assert server.end() == 0
    assert all(one.is_closed() for one in more[1:])


def test_a_handshake_that_is_not_finished_ends(start: Callable[..., Server]) -> None:
    server = start({"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(KEY), "header_timeout": 0.5}).ready()
    silent, begun = Handshake(server), Handshake(server).begin()
    server.until(silent.is_closed)
    server.until(begun.is_closed)
    assert Handshake(server).begin().end(REQUEST).startswith(b"HTTP/1.1 200")


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for certificate in (wrong, tmp_path / "none.pem"):
        with pytest.raises(InvalidInput, match="cannot be used"):
            check_certificate(ServerSettings(ssl_certfile=certificate, ssl_keyfile=KEY))
    with pytest.raises(InvalidInput, match="needs both"):
        ServerSettings(ssl_certfile=CERTIFICATE)


def test_a_unix_socket_is_for_its_user_and_goes_with_the_server(start: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "headway.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # what a server that was killed leaves behind
    server = start({"unix_socket": str(path)})
    server.until(lambda: server.logged("ready"))
    assert path.stat().st_mode & 0o007 == 0
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE)
        client.connect(str(path))
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    with pytest.raises(InvalidInput, match="cannot listen on"):
        _listen_at(path, ServerSettings())  # it is in use
    assert path.exists()
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert not path.exists()


def test_a_session_socket_in_use_is_not_taken_over(start: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "sessions.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # what a server that was killed leaves behind
    server = start({"session_socket": str(path)}).ready()
    other = start({"session_socket": str(path)})
    assert other.end() != 0
    assert "choose another --session-socket" in "".join(other.errors), other.errors
    assert path.stat().st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))  # still the first server's
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert not path.exists()


def test_a_prefix_that_a_proxy_removes(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start({"root_path": "/llm"}).ready()
    assert server.get("/health").status == 200
    assert server.get("/").json["links"]["models"] == "/llm/v1/models"
    assert server.get("/openapi.json").json["servers"] == [{"url": "/llm"}]
    assert server.get("/v1/messages/x").json["type"] == "error"  # an API's own errors
    assert server.get("/metrics").body.count(b'route="/health"') > 0
    for path in ("llm", "/llm/", "/a b", "/?"):
        with pytest.raises(InvalidInput, match="root_path is"):
            ServerSettings(root_path=path)
