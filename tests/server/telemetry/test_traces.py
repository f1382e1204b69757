"""OpenTelemetry traces: of all APIs, within the client's trace; and a collector that is away harms nobody."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import headway as hw
from headway.base.errors import InvalidInput, OutOfPages
from headway.server import telemetry
from headway.server.errors import ApiError
from headway.server.keys import ANYONE
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.testing import scripted_engine
from support.collector import collector
from support.faces import CALLS, SECRET, Call, Faces, Lines, form, written
from support.live import live
from support.small import at_rest, small_engine, tokens_of

SERVER, INTERNAL = 2, 1  # kinds of spans


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.path} {'stream' in (call.body or {})}")
def test_every_api_is_traced_by_the_conventions(faces: Faces, call: Call) -> None:
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    id, answer = faces.send(call, traceparent=f"00-{trace}-{parent}-01")
    assert answer.status == 200, answer.body
    spans, line = faces.spans.of(id), faces.line(id)
    (http,) = [one for one in spans if one.kind == SERVER]
    assert (http.name, http.trace, http.parent) == (f"POST {call.path}", trace, parent)
    assert http.attributes["http.request.method"] == "POST"
    assert http.attributes["http.route"] == http.attributes["url.path"] == call.path
    assert http.attributes["http.response.status_code"] == 200
    (own,) = [one for one in spans if one.parent == http.id]
    assert (own.name, own.kind, own.trace) == (f"{call.operation} {line['model']}", INTERNAL, trace)
    given = own.attributes
    assert given["gen_ai.operation.name"] == call.operation
    assert given["gen_ai.provider.name"] == "headway"
    assert given["gen_ai.request.model"] == given["gen_ai.response.model"] == line["model"]
    assert given["gen_ai.usage.input_tokens"] == line["prompt_tokens"]
    assert given["gen_ai.usage.output_tokens"] == line["tokens"]
    assert given["gen_ai.usage.cache_read.input_tokens"] == line["cached_tokens"]
    assert set(given["gen_ai.response.finish_reasons"]) <= {"stop", "length"}
    assert (given["server.address"], given["server.port"]) == ("127.0.0.1", faces.server.port)
    assert "error.type" not in {**given, **http.attributes}
    assert SECRET not in written(spans)
    assert http.start <= own.start <= own.end <= http.end
    phases = {one.name: one for one in spans if one.parent == own.id}
    hears = call.body is None
    assert sorted(phases) == (["decode", "prefill", "queue"] if call.is_text else ["decode", "prefill"] * hears)
    assert (given["gen_ai.usage.output_tokens"] > 0) == (call.is_text or hears)
    if call.is_text:
        queue, prefill, decode = (phases[name] for name in ("queue", "prefill", "decode"))
        times = [own.start, queue.start, queue.end, prefill.end, decode.end, own.end]
        assert times == sorted(times)
        assert (queue.end, prefill.end) == (prefill.start, decode.start)


def test_sampling_parameters_are_those_of_the_request(faces: Faces) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3, "temperature": 0.25, "n": 2}
    more = {"top_p": 0.5, "top_k": 9, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": [SECRET]}
    id, _ = faces.send(Call("/v1/chat/completions", "chat", body | more | {"stream": True}))
    (own,) = [one for one in faces.spans.of(id) if one.name.startswith("chat ")]
    found = {name[15:]: value for name, value in own.attributes.items() if name.startswith("gen_ai.request.")}
    expected = {"max_tokens": 3, "temperature": 0.25, "choice.count": 2, "top_p": 0.5, "top_k": 9, "seed": 11}
    expected |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "stream": True, "model": "smollm2"}
    assert found == expected
    assert len(own.attributes["gen_ai.response.finish_reasons"]) == 2
    ollama = {"num_predict": 3, "temperature": 0.25, "seed": 2**63}  # too large for the protocol
    id, _ = faces.send(Call("/api/chat", "chat", {"model": "smollm2", "messages": body["messages"], "options": ollama}))
    (own,) = [one for one in faces.spans.of(id) if one.name.startswith("chat ")]
    assert own.attributes["gen_ai.request.temperature"] == 0.25
    assert "gen_ai.request.seed" not in own.attributes


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
        ("/v1/chat/completions", {"messages": [], "max_tokens": 4}, 400),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("/nowhere", {}, 404),
    ],
)
def test_a_refusal_has_its_status_as_error_type(faces: Faces, path: str, body: dict, status: int) -> None:
    id, answer = faces.send(Call(path, "", body))
    assert answer.status == status
    (http,) = faces.spans.of(id)
    assert http.attributes["error.type"] == str(http.attributes["http.response.status_code"]) == str(status)
    assert not http.is_error


def test_what_fails_after_its_admission_has_its_code() -> None:
    """The code that its client gets, or the name of an error that is ours; a span of its own, without HTTP."""
    errors = {"out_of_pages": OutOfPages("none are left"), "RuntimeError": RuntimeError("a secret")}
    errors |= {"request_timeout": ApiError(504, "it took long", code="request_timeout")}

    async def fail_each(url: str) -> None:
        serving = await Serving.of_engine(ServerSettings(model="m", otel=url), scripted_engine(pages=16))
        assert serving.traces is not None
        for error in errors.values():
            telemetry.request_trace.set(serving.traces.row("/v1/chat/completions"))
            with suppress(type(error)):
                async with serving.admit(ANYONE, tokens=4) as admitted:
                    admitted.prompt(3)
                    admitted.tokens(1)
                    raise error
        await serving.close()

    with collector() as spans:
        asyncio.run(fail_each(spans.url))
        failed = [one for one in spans.spans if one.attributes]
        assert [one.attributes["error.type"] for one in failed] == list(errors)
        assert all(one.is_error and one.attributes["gen_ai.response.finish_reasons"] == ["error"] for one in failed)
        assert "secret" not in written(spans.spans)
        assert {one.name for one in spans.spans} == {"chat m", "prefill", "decode"}


def test_a_client_that_leaves_is_cancelled_and_no_error(faces: Faces) -> None:
    data = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    id = f"left-{secrets.token_hex(4)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: {id}\r\nContent-Length: {len(data)}"
    with socket.create_connection(("127.0.0.1", faces.server.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + data)
        connection.recv(500)
    spans, line = faces.spans.of(id), faces.line(id)
    if line["finish"] == "abort":
        assert {one.attributes["error.type"] for one in spans if one.attributes} == {"cancelled"}
    assert not any(one.is_error for one in spans)


def test_a_trace_goes_on_in_another_server(faces: Faces) -> None:
    """What a front of replicas sends along with a request."""
    traces = telemetry.Traces(ServerSettings(otel=faces.spans.url))
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    scope = {"method": "POST", "headers": [(b"traceparent", parent.encode())], "server": ("h", 1), "client": None}
    trace = traces.begin(scope, "/v1/completions")
    id, _ = faces.send(CALLS[0], traceparent=trace.traceparent() or "")
    trace.end("POST", "/v1/completions", 200, f"front-{id}", complete=True)
    traces.close()
    front = faces.spans.of(f"front-{id}")[0]
    assert (front.trace, front.parent) == ("a" * 32, "b" * 16)
    (http,) = [one for one in faces.spans.of(id) if one.kind == SERVER]
    assert (http.trace, http.parent) == (front.trace, front.id)


def test_polling_is_not_traced_and_bad_traceparents_begin_a_trace(faces: Faces) -> None:
    before = len(faces.spans.spans)
    faces.server.get("/health")
    faces.server.get("/metrics")
    for bad in ("", "x", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "a" * 31 + "-" + "1" * 16 + "-01"):
        id, _ = faces.send(Call("/v1/completions", "", {"prompt": "a", "max_tokens": 1}), traceparent=bad)
        (http,) = [one for one in faces.spans.of(id) if one.kind == SERVER]
        assert (http.parent, len(http.trace)) == ("", 32)
    assert not [one for one in faces.spans.spans[before:] if one.name.startswith("GET")]


def test_a_trace_that_is_not_sampled_is_not_sent(faces: Faces) -> None:
    trace = secrets.token_hex(16)
    call = Call("/v1/completions", "", {"prompt": "a", "max_tokens": 1})
    faces.send(call, traceparent=f"00-{trace}-{secrets.token_hex(8)}-00")
    id, _ = faces.send(call)
    faces.spans.of(id)  # the one after it has come
    assert not [one for one in faces.spans.spans if one.trace == trace]


def test_a_batch_has_a_span_for_each_row(faces: Faces) -> None:
    rows = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
        for i in range(3)
    ]
    border, text = "x", "\n".join(map(json.dumps, rows)).encode()
    head = {"content-type": f"multipart/form-data; boundary={border}"}
    data = form(text).replace(b'name="model"', b'name="purpose"').replace(b"small-whisper", b"batch")
    file = faces.server.ask("POST", "/v1/files", data, head).json["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = faces.server.post("/v1/batches", **asked).json
    where = f"/v1/batches/{batch['id']}"
    done = faces.server.until(
        lambda: (now := faces.server.get(where).json)["status"] in ("completed", "failed") and now
    )
    output = faces.server.get(f"/v1/files/{done['output_file_id']}/content").body.splitlines()
    ids = {json.loads(line)["response"]["request_id"] for line in output}

    def found() -> bool:
        seen = {one.attributes.get("headway.request.id") for one in list(faces.spans.spans) if not one.parent}
        return ids <= seen

    assert len(ids) == 3
    faces.server.until(found)


def test_a_session_is_a_span_with_what_its_program_did(faces: Faces) -> None:
    with hw.connect(faces.server.url) as engine:

        async def program(engine: hw.Engine) -> None:
            async with engine.context() as ctx:
                await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=2).tokens()

        engine.run(program)
    seen = faces.server.until(lambda: [one for one in list(faces.spans.spans) if one.name.startswith("session ")])
    given = seen[-1].attributes
    assert (seen[-1].kind, seen[-1].parent) == (SERVER, "")
    counted = {name: given[f"headway.session.{name}"] for name in ("contexts", "passes", "generations", "chats")}
    assert counted == {"contexts": 1, "passes": 0, "generations": 1, "chats": 0}
    assert given["gen_ai.operation.name"] == "session"
    assert "error.type" not in given
    assert len(given["headway.session.id"]) < 10  # with all of it anybody could resume it


def test_the_service_has_a_name(faces: Faces) -> None:
    id, _ = faces.send(CALLS[0])
    faces.spans.of(id)
    assert faces.spans.resources[0]["service.name"] == "headway"
    assert faces.spans.resources[0]["service.version"]
    assert set(faces.spans.paths) == {"/v1/traces"}


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_bodies_are_in_traces_only_where_the_operator_says_so(tmp_path: Path, lines: Lines) -> None:
    with collector() as spans:
        with live(small_engine(tmp_path / "model"), otel=spans.url, otel_bodies=True) as server:
            faces = Faces(server, lines, spans)
            call = Call("/v1/completions", "", {"prompt": SECRET, "max_tokens": 2, "user": "x" * 100_000})
            id, answer = faces.send(call)
        (http,) = [one for one in spans.of(id) if one.kind == SERVER]
    assert json.loads(http.attributes["headway.response.body"]) == answer.json
    assert http.attributes["headway.request.body"].startswith('{"prompt": "zebra"')
    assert len(http.attributes["headway.request.body"]) == telemetry.BODY_BYTES


# -- collectors that are away ------------------------------------------------------------------------------------------


def test_a_collector_that_is_away_harms_nobody(tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, the same tokens, a queue that is bounded; when it comes, it gets what comes then."""
    monkeypatch.setattr(telemetry, "MAX_QUEUED_SPANS", 16)
    monkeypatch.setattr(telemetry, "MAX_BATCH", 8)
    monkeypatch.setattr(telemetry, "DELAY_MS", 50)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    away = socket.socket()  # bound, so that the port is nobody else's until the collector comes
    away.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    away.bind(("127.0.0.1", 0))
    port = away.getsockname()[1]

    def said(message: str) -> list:
        return [one for one in lines.seen if one["message"].startswith(message) and str(port) in str(one)]

    with away, live(small_engine(tmp_path / "model"), otel=f"http://127.0.0.1:{port}") as server:
        faces, right = Faces(server, lines, None), tokens_of(server)  # type: ignore[arg-type]
        server.until(lambda: said("traces cannot be sent"))
        for _ in range(20):
            assert tokens_of(server) == right
        at_rest(server)
        with collector(port) as spans:

            def came() -> bool:
                faces.send(Call("/v1/completions", "", {"prompt": "a", "max_tokens": 1}))
                return bool(spans.spans)

            server.until(came)
        assert len(said("traces cannot be sent")) == 1


def test_a_collector_that_never_responds_does_not_keep_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "CLOSE_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with live(small_engine(tmp_path / "model"), otel=url) as server:
            right = tokens_of(server)
            time.sleep(1.2)  # a batch is on its way
            assert tokens_of(server) == right


# -- the extra and the address -----------------------------------------------------------------------------------------


def test_without_the_extra_there_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None\n"
        "from headway.cli.main import main\n"
        "sys.argv = ['headway', 'serve', '--otel', 'http://localhost:4318']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr == ("headway: --otel needs OpenTelemetry, which is not installed: pip install 'headway[otel]'\n")


def test_opentelemetry_is_imported_only_where_traces_are_on() -> None:
    code = "import sys, headway.server.run, headway.server.app; print('opentelemetry.sdk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("bad", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a b", "http://u:p@host"])
def test_an_address_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(InvalidInput, match="otel is"):
        ServerSettings(otel=bad)


def test_bodies_need_traces() -> None:
    with pytest.raises(InvalidInput, match="give --otel URL too"):
        ServerSettings(otel_bodies=True)


def test_the_path_is_added_to_the_collectors_address() -> None:
    for given in ("http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"):
        assert telemetry.traces_url(given) == "http://a:4318/v1/traces"
    assert telemetry.traces_url("https://a/otel") == "https://a/otel/v1/traces"
