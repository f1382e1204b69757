"""How a server begins and ends: loading, a full queue, signals, time-outs, and an engine that dies."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from server_process import PATIENCE, Reply, Server, alone

import headway as hw
from headway.base.errors import InvalidInput
from headway.runtime.batch import Batch
from headway.runtime.runners.base import SegmentResult
from headway.server.run import serve
from headway.server.settings import ServerSettings
from headway.testing import ScriptedRunner, random_model, scripted_engine
from support.forked import forked
from support.live import live
from support.small import small_folder
from support.speaker import Speaker

PROMPT = list(range(20, 40))
DEADLY = [13] * 40
COMMAND = ("-m", "headway.cli.main", "serve", "--json", "--port", "0")


@pytest.fixture
def later() -> Any:
    """Ask in the background: `later(server.tokens, …)` → a future."""
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


def in_flight(server: Server, requests: int) -> None:
    """Wait until so many requests have been admitted."""
    lines = server.until(lambda: server.get("/metrics").body.decode().splitlines())
    names = ("headway_requests_running{", "headway_requests_waiting{")

    def count() -> int:
        lines = server.get("/metrics").body.decode().splitlines()
        return int(sum(float(line.split(" ")[-1]) for line in lines if line.startswith(names)))

    assert lines
    server.until(lambda: count() == requests)


# -- beginning ---------------------------------------------------------------------------------------------------------


def test_health_is_red_while_the_model_loads(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(load_until=str(tmp_path / "loaded")).listening()
    reply = server.get("/health")
    assert (reply.status, reply.json) == (503, {"status": "loading"})
    refused = server.tokens(PROMPT, 2)
    assert (refused.status, refused.error["code"]) == (503, "loading")
    assert refused.headers["retry-after"] == "1"
    assert server.get("/stats").status == 503
    assert server.get("/metrics").status == 200
    (tmp_path / "loaded").touch()
    server.ready()
    reply = server.get("/health")
    assert (reply.status, reply.json) == (200, {"status": "ready"})
    assert server.tokens(PROMPT, 2).status == 200


def test_a_server_that_is_told_to_stop_while_it_loads_stops(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(load_until=str(tmp_path / "never")).listening()
    server.until(lambda: server.get("/health").status == 503)
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    server = Server(forked(*COMMAND, "--model", str(tmp_path / "nothing")))
    assert server.end() == 2
    assert "nothing" in server.lines[-1]["error"]["message"]


def test_a_port_that_is_taken_is_named_before_anything_is_loaded() -> None:
    def load() -> hw.Engine:
        raise AssertionError("nothing was to be loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"127.0.0.1:{port}"):
            serve(ServerSettings(port=port), load)


# -- a full queue ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists no step of `small` ends."""
    return tmp_path_factory.mktemp("held") / "held"


@pytest.fixture(scope="module")
def small(start: Callable[..., Server], held: Path) -> Server:
    limits = {"max_queue_requests": 3, "max_queue_tokens": 1000}
    return start(limits, pages=128, held_by=str(held)).ready()


def test_a_queue_full_of_requests_says_when_to_come_back(small: Server, held: Path, later: Any) -> None:
    right = alone(PROMPT, 100)
    held.touch()
    pending = [later(small.tokens, PROMPT, 100) for _ in range(3)]
    in_flight(small, 3)
    refused = small.tokens(PROMPT, 1)
    held.unlink()
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "1"
    assert "3 of 3 requests" in refused.error["message"]
    assert all(reply.result().json["tokens"] == right for reply in pending)
    assert small.tokens(PROMPT, 1).status == 200
    small.until(small.is_quiet)


def test_a_queue_full_of_tokens_says_when_to_come_back(small: Server, held: Path, later: Any) -> None:
    held.touch()
    pending = later(small.tokens, PROMPT, 250)
    in_flight(small, 1)
    refused = small.tokens(PROMPT, 750)
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert "1000" in refused.error["message"]
    fits = later(small.tokens, PROMPT, 10)
    in_flight(small, 2)
    held.unlink()
    assert fits.result().status == 200
    assert pending.result().status == 200


def test_what_never_fits_is_refused_for_good(small: Server) -> None:
    refused = small.tokens(PROMPT, 981)
    assert (refused.status, refused.error["code"]) == (400, "request_too_large")
    assert "1001" in refused.error["message"]
    assert small.tokens(PROMPT, 1).status == 200


def test_a_request_that_takes_too_long_is_ended_and_says_so(start: Callable[..., Server], later: Any) -> None:
    small = start({"request_timeout": 4}, step_seconds=0.01).ready()  # time enough for a first token
    pending = later(small.tokens, PROMPT, 900), later(small.tokens, PROMPT, 900, stream=True)
    slow, stream = (future.result() for future in pending)
    assert (slow.status, slow.error["code"]) == (504, "request_timeout")
    assert slow.headers["x-should-retry"] == "false"
    assert stream.status == 200
    *events, last = [event.removeprefix("data: ") for event in stream.body.decode().split("\n\n") if event]
    assert all(event.isdecimal() for event in events)
    assert json.loads(last)["error"]["code"] == "request_timeout"
    small.until(small.is_quiet)


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "stream"), [(signal.SIGTERM, True), pytest.param(signal.SIGINT, False, marks=pytest.mark.slow)]
)
def test_a_signal_lets_what_is_under_way_finish(
    start: Callable[..., Server], later: Any, tmp_path: Path, number: int, stream: bool
) -> None:
    right, held = alone(PROMPT, 100), tmp_path / "held"
    server = start(held_by=str(held)).ready()
    held.touch()
    pending = later(server.tokens, PROMPT, 100, stream=stream)
    in_flight(server, 1)
    server.signal(number)
    server.until(lambda: server.logged("draining"))
    assert server.get("/health").json == {"status": "draining"}
    refused = server.tokens(PROMPT, 1)
    held.unlink()
    assert (refused.status, refused.error["code"]) == (503, "draining")
    events = "".join(f"data: {token}\n\n" for token in right) + "data: [DONE]\n\n"
    assert pending.result().body.decode() == events if stream else pending.result().json["tokens"] == right
    assert server.end() == 0
    assert not server.errors


def test_what_does_not_finish_in_time_is_ended(start: Callable[..., Server], later: Any) -> None:
    server = start({"drain_timeout": 0.5}, step_seconds=0.02).ready()
    whole, stream = later(server.tokens, PROMPT, 500), later(server.tokens, PROMPT, 500, stream=True)
    in_flight(server, 2)
    server.signal(signal.SIGTERM)
    assert (whole.result().status, whole.result().error["code"]) == (503, "draining")
    last = stream.result().body.decode().rstrip().rsplit("\n\n", 1)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert server.end() == 0


def test_a_second_signal_does_not_wait(start: Callable[..., Server], later: Any) -> None:
    server = start({"drain_timeout": 600}, step_seconds=0.1).ready()
    pending: Future[Reply] = later(server.tokens, PROMPT, 900)
    in_flight(server, 1)
    server.signal(signal.SIGTERM)
    server.until(lambda: server.logged("draining"))
    server.signal(signal.SIGINT)
    assert pending.result().status == 503
    assert server.end() == 128 + signal.SIGINT


# -- an engine that dies -----------------------------------------------------------------------------------------------


def test_a_dead_worker_turns_health_red_and_ends_the_process(start: Callable[..., Server], later: Any) -> None:
    server = start(step_seconds=0.02).ready()
    bystanders = [later(server.tokens, PROMPT, 500), later(server.tokens, PROMPT, 500, stream=True)]
    in_flight(server, 2)
    deadly = server.tokens(DEADLY, 5)
    assert deadly.status in (500, 503)
    reply = server.get("/health")
    assert (reply.status, reply.json) == (503, {"status": "dead"})
    assert server.tokens(PROMPT, 1).status == 503
    for reply in (deadly, bystanders[0].result()):
        assert reply.status in (500, 503)
        assert "SystemExit" not in reply.error["message"]
        assert "Traceback" not in reply.error["message"]
    last = bystanders[1].result().body.decode().rstrip().rsplit("\n\n", 1)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "closed"
    assert server.end() == 1
    assert any("worker has died" in line["message"] for line in server.lines)


def test_an_engine_is_alive_until_it_is_closed() -> None:
    engine = scripted_engine(pages=8)
    assert engine.alive
    engine.close()
    assert not engine.alive


def test_an_engine_whose_worker_died_is_not_alive() -> None:
    class Deadly(ScriptedRunner):
        def execute(self, batch: object) -> list[Any]:
            raise SystemExit

    with hw.Engine(random_model(), runner=Deadly(97, 16), pages=8, threads=1) as engine:
        assert engine.alive

        async def one_pass(engine: hw.Engine) -> None:
            async with engine.context() as ctx:
                ctx.fill([1, 2, 3])
                await ctx.flush()

        with pytest.raises(hw.HeadwayError, match="worker stopped"):
            engine.run(one_pass)
        assert not engine.alive


# -- an engine that hangs ----------------------------------------------------------------------------------------------


class Hanging(Speaker):
    """A device whose steps do not end while `goes_on` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def execute(self, batch: Batch) -> list[SegmentResult]:
        self.goes_on.wait(PATIENCE)
        return super().execute(batch)


def test_a_step_that_does_not_end_turns_health_red_until_it_ends(tmp_path: Path, later: Any) -> None:
    device = Hanging()
    engine = hw.Engine(small_folder(tmp_path / "model"), runner=device, threads=1, pages=64)
    with live(engine, step_timeout=0.05) as server:
        device.goes_on.clear()
        began = datetime.now(UTC)
        try:
            pending = later(server.post, "/v1/completions", prompt="a", max_tokens=2, ignore_eos=True)
            reply = server.until(lambda: (found := server.get("/health")).status == 503 and found)
            since = datetime.fromisoformat(reply.json["since"])
            assert reply.json == {"status": "stuck", "since": reply.json["since"]}
            assert began - timedelta(seconds=1) < since < datetime.now(UTC)
            refused = server.post("/v1/completions", prompt="a", max_tokens=1)
            assert (refused.status, refused.error["code"]) == (503, "stuck")
            assert "0.05 s" in refused.error["message"]
            assert not pending.done()
        finally:
            device.goes_on.set()
        assert pending.result().status == 200
        server.until(lambda: server.get("/health").json == {"status": "ready"})
        server.until(lambda: server.post("/v1/completions", prompt="a", max_tokens=1).status == 200)


def test_a_server_ends_without_a_step_that_does_not(start: Callable[..., Server], later: Any) -> None:
    server = start({"step_timeout": 0.05, "drain_timeout": 0.1}, step_seconds=3600).ready()
    pending = later(server.tokens, PROMPT, 5)
    server.until(lambda: server.get("/health").json["status"] == "stuck")
    server.signal(signal.SIGTERM)
    assert server.end() == 1
    assert server.logged("exiting while the engine is stuck")
    reply = pending.exception() or pending.result()
    assert isinstance(reply, OSError | HTTPException) or reply.status == 503


def test_a_server_that_ends_has_not_hung(start: Callable[..., Server]) -> None:
    """However short a step may be: the worker ended with the server."""
    server = start({"step_timeout": 1e-9}).ready()
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert not server.logged("exiting while the engine is stuck")


def test_an_engine_that_waits_for_work_is_not_stuck(tmp_path: Path) -> None:
    """However long it does: there is no step that could end."""
    engine = hw.Engine(small_folder(tmp_path / "model"), runner=Hanging(), threads=1, pages=64)
    with live(engine, step_timeout=1e-9) as server:
        server.complete("a", max_tokens=3)
        server.until(lambda: server.get("/health").status == 200)
