"""Who may come in: names in Host, web pages, keys, and what each key may do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import Server

from headway.base.errors import InvalidInput
from headway.server.keys import ApiKeys, TenantLimits, add_key, bearer_key
from headway.server.middleware.host_check import AllowedHosts
from headway.server.run import check_exposure
from headway.server.settings import ServerSettings

PAGE = "https://app.example.org"


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start({"cors_origins": [PAGE], "allowed_hosts": ["models.example.org"]}).ready()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    limits = {
        "wide": TenantLimits(),
        "twin": TenantLimits(),
        "one": TenantLimits(max_requests=1, max_tokens=500),
        "rare": TenantLimits(requests_per_minute=2),
        "few": TenantLimits(requests_per_minute=2),
    }
    return {"file": str(path)} | {name: add_key(path, name, limit) for name, limit in limits.items()}


@pytest.fixture(scope="module")
def closed(start: Callable[..., Server], keys: dict[str, str]) -> Server:
    return start({"key_file": keys["file"]}, step_seconds=0.005, pages=128).ready()


# -- hosts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "LOCALHOST:80", "127.0.0.1:65535", "[::1]:8000", "127.9.9.9", "Models.example.org"],
)
def test_this_machines_names_and_those_allowed_are_answered(server: Server, host: str) -> None:
    assert server.get("/health", {"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example.org",
        "evil.example.org:8000",
        "127.0.0.1.evil.example.org",
        "localhost.evil.example.org",
        "models.example.org.evil.example.org",
        "models.example.org.",
        "localhost.",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0.0.0.0",
        "8.8.8.8",
        "localhost@evil.example.org",
        "evil.example.org#localhost",
        "localhost, evil.example.org",
        "localhost:80:80",
        "localhost:port",
        "[::1",
        "[::2]",
        "",
        " ",
        "*",
    ],
)
def test_other_names_are_refused(server: Server, host: str) -> None:
    reply = server.get("/health", {"Host": host})
    assert reply.status == 400
    assert reply.error["code"] in {"host_not_allowed", "invalid_host"}
    assert "evil" not in reply.error["message"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example.org\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: evil.example.org\r\nX-Forwarded-Host: localhost\r\n\r\n",
        b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example.org\r\nConnection: close\r\n\r\n",
    ],
)
def test_a_host_that_is_missing_or_doubtful_is_refused(server: Server, head: bytes) -> None:
    reply = server.raw(head)
    assert reply.status == 400
    assert reply.error["message"]


def test_an_address_everywhere_needs_keys_or_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--allowed-host"):
        check_exposure(ServerSettings(host="0.0.0.0"))
    with pytest.raises(InvalidInput, match="--keys"):
        check_exposure(ServerSettings(host="::"))
    check_exposure(ServerSettings(host="0.0.0.0", allowed_hosts=("models.example.org",)))
    check_exposure(ServerSettings(host="0.0.0.0", key_file=tmp_path / "keys.json"))
    check_exposure(ServerSettings(host="127.0.0.1"))


def test_with_keys_an_address_everywhere_takes_any_name() -> None:
    AllowedHosts(ServerSettings(host="0.0.0.0"), has_keys=True).check([b"anything.example.org"])
    for settings, has_keys in ((ServerSettings(host="127.0.0.1"), True), (ServerSettings(host="10.0.0.1"), False)):
        AllowedHosts(settings, has_keys=has_keys).check([settings.host.encode()])
        with pytest.raises(Exception, match="--allowed-host"):
            AllowedHosts(settings, has_keys=has_keys).check([b"anything.example.org"])


def test_beyond_loopback_plain_addresses_are_names_too() -> None:
    check = AllowedHosts(ServerSettings(host="0.0.0.0", allowed_hosts=("models.example.org",)), has_keys=False).check
    for host in (b"models.example.org:80", b"10.1.2.3:8000", b"[fd00::1]:8000", b"127.0.0.1", b"localhost"):
        check([host])
    for host in (b"evil.example.org", b"0.0.0.0:8000", b"[::]", b"10.1.2.3.evil.org", b"167838211"):
        with pytest.raises(Exception, match="--allowed-host"):
            check([host])


# -- web pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["https://evil.example.org", "null", "http://app.example.org", PAGE + ".evil.org"])
def test_other_web_pages_are_refused_before_anything_is_done(server: Server, origin: str) -> None:
    before = server.stats()["tokens"]
    reply = server.ask("POST", "/tokens", {"prompt": [1], "max_tokens": 1}, {"Origin": origin})
    assert reply.status == 403
    assert "access-control-allow-origin" not in reply.headers
    assert server.stats()["tokens"] == before
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert server.ask("OPTIONS", "/tokens", headers=preflight).status == 403


def test_an_origin_after_another_is_refused(server: Server) -> None:
    origins = f"Origin: http://127.0.0.1:{server.port}\r\nOrigin: https://evil.example.org\r\nConnection: close\r\n"
    reply = server.raw(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{origins}\r\n".encode())
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")


def test_an_allowed_page_may_call(server: Server) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    asked = server.ask("OPTIONS", "/tokens", headers=preflight)
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (204, PAGE)
    assert asked.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    reply = server.ask("POST", "/tokens", {"prompt": [1], "max_tokens": 1}, {"Origin": PAGE})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "Origin" in reply.headers["vary"]
    assert server.get("/nothing", {"Origin": PAGE}).headers["access-control-allow-origin"] == PAGE


def test_a_page_of_the_server_itself_may_call(server: Server) -> None:
    host = f"127.0.0.1:{server.port}"
    assert server.get("/health", {"Host": host, "Origin": f"http://{host}"}).status == 200


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/stats"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokens"),
        ("GET", "/nothing"),
        ("GET", "/health/"),
        ("GET", "/health/../metrics"),
        ("GET", "//health"),
        ("OPTIONS", "/metrics"),
    ],
)
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {key}", "{key}", "Bearer {key}x", "Bearer " + "x" * 5000],
)
def test_every_path_is_closed_without_a_key(
    closed: Server, keys: dict[str, str], method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.format(key=keys["wide"])}
    reply = closed.ask(method, path, headers=headers)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.error["code"] == "invalid_api_key"


def test_health_is_open_and_a_key_opens_the_rest(closed: Server, keys: dict[str, str]) -> None:
    assert closed.get("/health").status == 200
    for scheme in ("Bearer", "bearer"):
        assert closed.get("/metrics", {"Authorization": f"{scheme} {keys['wide']}"}).status == 200
    assert closed.raw(
        f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {keys['wide']}\r\n"
        f"Authorization: Bearer {keys['twin']}\r\nConnection: close\r\n\r\n".encode()
    ).status == 401  # fmt: skip


def test_a_body_is_not_read_without_a_key(closed: Server) -> None:
    head = b"POST /tokens HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    assert closed.raw(head).status == 401


def test_a_key_has_its_own_share_of_the_cache(closed: Server, keys: dict[str, str]) -> None:
    prompt = list(range(2, 70))

    def hits(key: str) -> int:
        closed.tokens(prompt, 2, key=keys[key])
        return closed.get("/stats", {"Authorization": f"Bearer {keys['wide']}"}).json["stats"]["cache_hits"]

    first = hits("wide")
    second = hits("wide")
    assert second > first
    assert hits("twin") == second
    assert hits("twin") > second


def test_a_key_is_held_to_its_requests_at_once(closed: Server, keys: dict[str, str]) -> None:
    slow = threading.Thread(target=closed.tokens, args=([5] * 20, 450, keys["one"]))
    slow.start()
    watcher = {"Authorization": f"Bearer {keys['wide']}"}
    closed.until(lambda: closed.get("/stats", watcher).json["stats"]["pages_held"])
    reply = closed.tokens([5], 1, key=keys["one"])
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        reply = closed.ask("POST", path, body, {"Authorization": f"Bearer {keys['one']}"})
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert closed.tokens([5], 1, key=keys["wide"]).status == 200
    slow.join()
    assert closed.tokens([5], 1, key=keys["one"]).status == 200


def test_a_key_is_held_to_its_tokens(closed: Server, keys: dict[str, str]) -> None:
    reply = closed.tokens([5] * 20, 481, key=keys["one"])
    assert reply.status == 400
    assert "501" in reply.error["message"]
    assert "500" in reply.error["message"]


def test_a_key_is_held_to_its_requests_a_minute(closed: Server, keys: dict[str, str]) -> None:
    assert [closed.tokens([5], 1, key=keys["rare"]).status for _ in range(3)] == [200, 200, 429]
    reply = closed.tokens([5], 1, key=keys["rare"])
    assert reply.error["code"] == "rate_limit_exceeded"
    assert 1 <= int(reply.headers["retry-after"]) <= 60


def test_requests_of_every_kind_are_counted_but_for_those_that_watch(closed: Server, keys: dict[str, str]) -> None:
    key = {"Authorization": f"Bearer {keys['few']}"}
    assert [closed.get(path, key).status for path in ("/stats", "/metrics", "/stats")] == [200, 200, 200]
    assert closed.ask("POST", "/detokenize", {"tokens": [97]}, key).status == 400
    assert closed.get("/v1/models", key).status == 200
    for path in ("/detokenize", "/tokenize", "/v1/chat/completions", "/nothing"):
        reply = closed.ask("POST", path, {}, key)
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert closed.get("/stats", key).status == 200


def test_no_key_is_ever_written(closed: Server, keys: dict[str, str]) -> None:
    secrets = [key for name, key in keys.items() if name != "file"]
    closed.get("/metrics", {"Authorization": f"Bearer {keys['wide']}"})
    written = json.dumps(closed.lines) + "".join(closed.errors) + Path(keys["file"]).read_text()
    assert not any(secret in written for secret in secrets)
    assert '"tenant": "wide"' in written


# -- the key file ------------------------------------------------------------------------------------------------------


def test_the_file_has_hashes_and_belongs_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.json"
    first, second = add_key(path, "a"), add_key(path, "b", TenantLimits(max_requests=3))
    assert path.stat().st_mode & 0o077 == 0
    keys = ApiKeys.read(path)
    result = keys.find(first), keys.find(second)
    assert [tenant.name for tenant in result if tenant] == ["a", "b"]
    assert result[0]
    assert result[1]
    assert result[0].salt != result[1].salt
    assert result[1].limits == TenantLimits(max_requests=3)
    assert keys.find(first[:-1]) is None
    assert first != second


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not valid"),
        ("[]", "is not valid"),
        ('{"keys": []}', "no keys"),
        ('{"keys": [{"name": "a"}]}', "is not valid"),
        ('{"keys": [{"name": "a", "sha256": "00"}]}', "64 hex digits"),
        ('{"keys": [{"name": "a/b", "sha256": "%s"}]}', "needs a name"),
        ('{"keys": [{"name": "a", "sha256": "%s", "limit": {}}]}', "'limit'"),
        ('{"keys": [{"name": "a", "sha256": "%s", "limits": {"requests": 1}}]}', "'requests'"),
        ('{"keys": [{"name": "a", "sha256": "%s", "limits": {"max_requests": 0}}]}', "at least 1"),
        ('{"keys": [{"name": "a", "sha256": "%s", "limits": {"max_priority": NaN}}]}', "a finite number"),
        ('{"keys": [{"name": "a", "sha256": "%s"}, {"name": "a", "sha256": "%s"}]}', "two keys with the same name"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text.replace("%s", "0" * 64))
    with pytest.raises(InvalidInput, match=says):
        ApiKeys.read(path)


def test_a_file_that_anyone_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "a")
    path.chmod(0o666)
    with pytest.raises(InvalidInput, match="chmod"):
        ApiKeys.read(path)
    with pytest.raises(InvalidInput, match="--new-key"):
        ApiKeys.read(tmp_path / "nothing.json")


def test_a_name_is_given_once(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "a")
    with pytest.raises(InvalidInput, match="already"):
        add_key(tmp_path / "keys.json", "a")
    with pytest.raises(InvalidInput, match="is not valid"):
        add_key(tmp_path / "keys.json", "a\nb")


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("Bearer a", "a"),
        ("bearer  a ", "a"),
        ("Bearer", None),
        ("Bearer  ", None),
        ("Basic a", None),
        ("", None),
        ("Bearer \u00a0a\u00a0", "\u00a0a\u00a0"),
    ],
)
def test_a_key_is_taken_from_its_header(value: str, key: str | None) -> None:
    assert bearer_key(value) == key
