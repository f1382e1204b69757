"""What a server says about itself: logs, request ids, metrics, stats; and what it never says."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import QUIET, Server

from headway.base.errors import InvalidInput
from headway.cli.top_server import ServerWatch
from headway.server import logs
from headway.server.keys import ApiKeys, TenantLimits, add_key
from headway.server.models import ModelSources
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from support.forked import forked

SECRET = [7, 7, 42, 42, 77]
SENT = "my secret prompt"


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start().ready()


@pytest.fixture(scope="module")
def other(start: Callable[..., Server]) -> Server:
    return start({"metrics_style": "vllm", "served_names": ["tiny"], "log_prompts": True}).ready()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/health/", 404),
        ("GET", "/redoc", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%00", 404),
        ("PUT", "/health", 405),
        ("GET", "/tokens", 405),
        ("BREW", "/health", 405),
        ("GET", "/fail", 500),
    ],
)
def test_errors_have_one_shape_and_nothing_of_the_inside(server: Server, method: str, path: str, status: int) -> None:
    reply = server.ask(method, path, headers={"X-Request-Id": "mine-1"})
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"] == "mine-1"
    assert not re.search(r"Traceback|\.py|0x[0-9a-f]{4}|site-packages|passwd|RuntimeError", reply.error["message"])


@pytest.mark.parametrize(
    ("method", "path", "methods"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/conversations/conv_1", "DELETE, GET, POST"),
        ("POST", "/v1/responses/compact", "DELETE, GET"),
    ],
)
def test_a_method_that_a_path_does_not_have_is_told_those_it_has(
    server: Server, method: str, path: str, methods: str
) -> None:
    reply = server.ask(method, path)
    assert reply.status == 405
    assert (reply.headers["allow"], reply.error["message"]) == (methods, f"this path takes another method: {methods}")


def test_what_failed_is_in_the_log_under_its_id_without_its_text(server: Server) -> None:
    server.get("/fail", {"X-Request-Id": "mine-2"})
    (line,) = server.until(lambda: server.logged("a request failed", request_id="mine-2"))
    assert line["error"] == "RuntimeError"
    assert line["frames"][-1].endswith(" fail")
    assert "passwd" not in str(line)


# -- logs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", "req:1.2_3-4", "x" * 128])
def test_a_well_formed_request_id_is_kept(server: Server, given: str) -> None:
    assert server.get("/health", {"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "<script>", "é", 'a"b'])
def test_another_is_replaced(server: Server, given: str) -> None:
    created = server.ask("GET", "/health", headers={"X-Request-Id": given}).headers["x-request-id"]
    assert re.fullmatch(r"req-[0-9a-f]{24}", created)


def test_every_request_is_a_line_without_what_it_says(server: Server) -> None:
    body = {"prompt": SECRET, "max_tokens": 3, "note": SENT}
    server.ask("POST", "/tokens?secret=query", body, {"X-Request-Id": "line", "Authorization": f"Bearer {SENT}"})
    (line,) = server.until(lambda: server.logged("request", request_id="line"))
    assert (line["method"], line["path"], line["status"]) == ("POST", "/tokens", 200)
    assert line["bytes_in"] > 0
    assert line["bytes_out"] > 0
    assert line["complete"] is True
    written = str(server.lines) + str(server.errors)
    assert SENT not in written
    assert "secret=query" not in written
    assert str(SECRET)[1:-1] not in written


def test_prompts_are_written_only_when_asked_for(other: Server) -> None:
    other.ask("POST", "/tokens", {"prompt": SECRET, "max_tokens": 3, "note": SENT}, {"X-Request-Id": "line"})
    (line,) = other.until(lambda: other.logged("body", request_id="line"))
    assert SENT in line["body"]
    other.get("/fail", {"X-Request-Id": "text"})
    (line,) = other.until(lambda: other.logged("a request failed", request_id="text"))
    assert "passwd" in line["text"]


def test_no_line_can_be_forged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(as_json=False)
    logs.info("request", path='/a" level=error\nfake line', id="plain")
    logs.flush()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('request path="/a\\" level=error\\nfake line" id=plain')


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(server: Server, headers: dict[str, str] | None = None) -> dict[str, float]:
    text = server.get("/metrics", headers).body.decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_requests_and_tokens_are_counted(server: Server) -> None:
    before = figures(server)
    for stream in (True, False):
        assert server.tokens(list(range(20)), 7, stream=stream).status == 200
    answers = 'method="POST",model="scripted",route="/tokens",status="200"'
    responses = f"headway_http_responses_total{{{answers}}}"
    wanted = before.get(responses, 0.0) + 2  # a response counts once it is sent, which its client may see first
    server.until(lambda: figures(server).get(responses, 0.0) >= wanted)
    after = figures(server)

    def added(name: str, labels: str = 'model="scripted"') -> float:
        return after[f"{name}{{{labels}}}"] - before.get(f"{name}{{{labels}}}", 0.0)

    assert added("headway_prompt_tokens_total") == 40
    assert added("headway_generated_tokens_total") == 14
    assert added("headway_time_to_first_token_seconds_count") == 2
    assert added("headway_inter_token_seconds_count") == 12
    assert added("headway_request_seconds_count") == 2
    assert added("headway_requests_finished_total", 'model="scripted",reason="length"') == 2
    assert added("headway_request_generated_tokens_sum") == 14
    assert added("headway_http_responses_total", answers) == 2
    assert added("headway_computed_tokens_total") > 0
    assert after['headway_requests_running{model="scripted"}'] == 0
    assert after['headway_requests_waiting{model="scripted"}'] == 0
    assert after['headway_pages_total{model="scripted"}'] == 64


def test_what_clients_write_makes_no_new_names(server: Server) -> None:
    for i in range(5):
        server.ask(f"M{i}", f"/nothing/{i}")

    def names() -> list[str]:
        return [name for name in figures(server) if name.startswith("headway_http_responses_total")]

    server.until(lambda: any('method="other",model="scripted",route="other"' in name for name in names()))
    assert not [name for name in names() if "nothing" in name or "M1" in name]


def test_vllms_dashboards_find_their_names(other: Server) -> None:
    before = figures(other)
    other.tokens(list(range(20)), 7)
    result = figures(other)
    labels = 'engine="0",model_name="tiny"'
    for name, value in {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prompt_tokens_total": 20,
        "vllm:generation_tokens_total": 7,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 6,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_prompt_tokens_count": 1,
        "vllm:request_generation_tokens_sum": 7,
        "vllm:num_preemptions_total": 0,
    }.items():
        assert result[f"{name}{{{labels}}}"] - before[f"{name}{{{labels}}}"] == value, name
    assert result['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] >= 1


def test_stats_are_the_engines_own(server: Server) -> None:
    server.tokens(list(range(20)), 7)
    response = server.get("/stats").json
    assert response["model"] == {"name": "scripted", "dtype": "float32", "device": "cpu"}
    assert response["stats"]["pages_total"] == 64
    assert response["stats"]["passes"] >= 7
    assert response["steps"]["batch"] == 1
    assert all(seconds >= 0 for seconds in response["steps"]["seconds"])


@pytest.fixture
def locked(start: Callable[..., Server], tmp_path: Path) -> tuple[Server, str]:
    key = add_key(tmp_path / "keys.json", "watcher")
    return start({"key_file": str(tmp_path / "keys.json")}).ready(), key


def test_a_server_is_watched_until_it_ends(locked: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    server, key = locked
    url = f"http://127.0.0.1:{server.port}"
    with pytest.raises(InvalidInput, match="requires an API key"):
        ServerWatch(url)
    monkeypatch.setenv("HEADWAY_API_KEY", key)
    watch = ServerWatch(url)
    server.tokens(list(range(20)), 7, key=key)
    server.until(lambda: watch.refresh() or watch.stats.tokens >= 26)
    assert watch.line().startswith(f"scripted · float32 · cpu · {url}")
    assert "of 64 pages" in watch.line()
    assert len(watch.seconds) == watch.stats.steps
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    server.until(lambda: watch.refresh() or watch.over)
    assert "closed" in watch.line()


@pytest.mark.slow
def test_top_shows_a_server_line_by_line(locked: tuple[Server, str]) -> None:
    server, key = locked
    command = forked("-m", "headway.cli.main", "top", "--url", f"http://127.0.0.1:{server.port}")
    env = os.environ | QUIET | {"HEADWAY_API_KEY": key}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as top:
        assert top.stderr is not None
        assert "of 64 pages" in top.stderr.readline()
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        rest = top.stderr.read()
    assert "closed" in rest.splitlines()[-1]
    assert top.returncode == 0


# -- the command -------------------------------------------------------------------------------------------------------


def headway(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = forked("-m", "headway.cli.main", "serve", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | QUIET)


def test_a_key_is_printed_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    done = headway("--keys", str(path), "--new-key", "team", "--limit", "max_requests=4")
    assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    assert key.startswith("hw-")
    assert key not in path.read_text()
    tenant = ApiKeys.read(path).find(key)
    assert tenant is not None
    assert (tenant.name, tenant.limits.max_requests) == ("team", 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--new-key", "a"), "--keys FILE"),
        (("--keys", "/nowhere/keys.json"), "no key file"),
        (("--limit", "max_everything=1"), "max_queue_requests"),
        (("--limit", "max_n=0"), "greater than 0"),
        (("--limit", "max_n=many"), "an integer"),
        (("--host", "0.0.0.0"), "--allowed-host"),
        (("--host", "256.1.1.1"), "cannot listen"),
        (("--port", "70000"), "65535"),
        (("--cors-origin", "example.org"), "https://app.example.org"),
        (("--allowed-host", "http://a"), "host name without a port"),
        (("--metrics-style", "other"), "vllm"),
        (("--request-timeout", "-1"), "greater than 0"),
        (("--unix-socket", "/tmp/headway.sock"), "not at 127.0.0.1:0; leave out --host and --port"),
        (("--model", "a=smollm2", "--model", "b=/nowhere"), "there is no model '/nowhere'"),
    ],
)
@pytest.mark.slow
def test_a_mistake_on_the_command_line_is_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    done = headway("--port", "0", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_connection_is_kept_for_the_next_request(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(3):
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b'{"status":"ready"}')
    assert connection.sock is not None
    connection.close()


@pytest.mark.parametrize("size", [100, 70_000, 200_000, 2_000_000])  # a large one is read in pieces
def test_a_connection_is_kept_after_a_body_of_any_size(server: Server, size: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    used = set()
    for _ in range(3):
        connection.request("POST", "/tokens", json.dumps({"prompt": [3], "max_tokens": 1}).ljust(size))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("connection") is None
        response.read()
        assert connection.sock is not None
        used.add(connection.sock.getsockname())
    assert len(used) == 1
    connection.close()


def test_a_response_says_that_a_request_sent_ahead_is_dropped(server: Server) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(health * 2)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK") == 1
    assert b"\r\nconnection: close\r\n" in received.lower()


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("smollm2", "smollm2"),
        ("org/name", "org/name"),
        ("/secret/place/model", "model"),
        ("/secret/place/model.Q8_0.gguf", "model.Q8_0"),
        ("./here/model", "model"),
        ("here/model.gguf", "model"),
    ],
)
def test_a_model_is_never_called_by_its_folder(model: str, shown: str) -> None:
    assert _named(ServerSettings(model=model)) == (shown,)
    assert _named(ServerSettings(model=model, served_names=("mine", "yours"))) == ("mine", "yours")


def _named(settings: ServerSettings) -> tuple[str, ...]:
    """The names that clients see."""
    return Serving(settings, ModelSources.single(settings, lambda: pytest.fail("not loaded"), None)).models.names()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"port": -1}, r"\[0, 65535\]"),
        ({"metrics_style": "both"}, "headway or vllm"),
        ({"allowed_hosts": ("a:8000",)}, "without a port"),
        ({"cors_origins": ("https://a/path",)}, "https://app.example.org"),
        ({"served_names": ("a b",)}, "without spaces"),
        ({"max_n": 0}, "max_n is 0"),
        ({"max_n": 1.5}, "an integer"),
        ({"max_queue_tokens": True}, "max_queue_tokens is True"),
        ({"body_timeout": float("nan")}, "body_timeout is nan"),
        ({"write_timeout": float("inf")}, "write_timeout is inf"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        ServerSettings(**wrong)


# -- what a request came to, and where to look -------------------------------------------------------------------------


def test_a_line_has_the_model_tokens_reason_and_first_token(server: Server) -> None:
    server.ask("POST", "/tokens", {"prompt": SECRET, "max_tokens": 3}, {"X-Request-Id": "facts"})
    (line,) = server.until(lambda: server.logged("request", request_id="facts"))
    assert (line["model"], line["prompt_tokens"], line["tokens"], line["finish"]) == ("scripted", 5, 3, "length")
    assert 0 < line["first_token_ms"] <= line["ms"]


def test_the_process_is_among_the_metrics(server: Server) -> None:
    values = figures(server)
    assert values["process_resident_memory_bytes"] > 1e6
    assert values["process_open_fds"] > 3


def test_rejected_requests_count_under_their_own_route(start: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "ada", TenantLimits(requests_per_minute=1))
    server = start({"key_file": str(keys)}).ready()
    mine = {"Authorization": f"Bearer {key}"}
    assert server.ask("POST", "/v1/completions", {}).status == 401
    assert server.ask("POST", "/v1/completions", {}, mine).status == 400
    assert server.ask("POST", "/v1/completions", {}, mine).status == 429

    def is_counted(status: str) -> bool:
        line = rf'headway_http_responses_total{{.*route="/v1/completions",status="{status}"}} 1\.0'
        return re.search(line, server.get("/metrics", mine).body.decode()) is not None

    for status in ("401", "429"):
        server.until(lambda status=status: is_counted(status))


def test_top_without_a_key_says_so(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    add_key(keys, "ada")
    server = start({"key_file": str(keys)}).ready()
    monkeypatch.delenv("HEADWAY_API_KEY", raising=False)
    with pytest.raises(InvalidInput, match="requires an API key, and HEADWAY_API_KEY is not set"):
        ServerWatch(f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HEADWAY_API_KEY", "wrong")
    with pytest.raises(InvalidInput, match="HEADWAY_API_KEY is not one of its keys"):
        ServerWatch(f"http://127.0.0.1:{server.port}")


def test_the_root_links_to_what_there_is(server: Server) -> None:
    links = server.get("/").json["links"]
    assert {"models", "api", "health"} <= set(links)
    assert "lab" not in links  # this server has none
    page = server.get("/", {"Accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert b'href="docs"' in page.body  # without scripts; with them it lists these links


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/slots/0", "not saved or erased by slot"),
        ("POST", "/v1/v1/chat/completions", "must not end in /v1"),
        ("POST", "/v1/assistants", "POST /v1/chat/completions"),
        ("GET", "/redoc", "/openapi.json"),
        ("GET", "/nothing", "GET /docs"),
        ("GET", "/v1/files/file-1/parts", "GET /docs"),  # of an API that is here
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/metric", "did you mean /metrics?"),
        ("GET", "/labels", "GET /docs"),
        ("GET", "/lab/", "this server has no Lab"),
        ("POST", "/v1/audio/speech", "hw.pipeline"),
    ],
)
def test_a_path_that_does_not_exist_names_one_that_does(server: Server, method: str, path: str, hint: str) -> None:
    reply = server.ask(method, path, {} if method == "POST" else None)
    assert reply.status == 404
    assert hint in reply.error["message"]
