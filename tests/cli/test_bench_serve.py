"""`headway bench serve`: it counts what a server did, in the shape people know, and says what failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from headway.base.errors import InvalidInput
from headway.bench.http_client import Address, HttpClient
from headway.bench.load_generator import ArrivalPattern, LoadRequest, LoadResult, RequestResult, run_load, send
from headway.bench.load_report import LatencyStats, LoadReport, busiest_second
from headway.bench.serve import Workload
from headway.server.keys import add_key
from support.live import Live, live
from support.speaker import Stage, speaking_folder

Run = Callable[..., CompletedProcess[str]]
SMALL = ("--requests", "6", "--prompt", "20", "--tokens", "7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Live]:
    with live(Stage(folder).engine) as server:
        yield server


def test_a_running_server_is_measured(headway: Run, served: Live) -> None:
    done = headway("bench", "serve", "--url", served.url, *SMALL, "--concurrency", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"], found["errors"]) == (6, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * 20, 6 * 7)
    assert (found["max_concurrency"], found["request_rate"], found["model_id"]) == (3, None, "smollm2")
    assert 1 <= found["max_concurrent_requests"] <= 3
    assert found["output_throughput"] == pytest.approx(42 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(162 / found["duration"])
    for kind in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"median_{kind}_ms"] <= found[f"p99_{kind}_ms"]
    assert found["median_ttft_ms"] < found["median_e2el_ms"]
    assert "6 of 6 requests" in done.stderr


def test_the_table_has_the_lines_people_know(headway: Run, served: Live) -> None:
    done = headway("bench", "serve", "--url", served.url, *SMALL, "--rate", "200", "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    labels = [line[:40].rstrip() for line in lines]
    assert [label for label in labels if label.endswith(":")] == [
        "Successful requests:",
        "Failed requests:",
        "Maximum request concurrency:",
        "Request rate configured (RPS):",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Peak output token throughput (tok/s):",
        "Peak concurrent requests:",
        "Total token throughput (tok/s):",
        *(f"{name} {kind} (ms):" for kind in ("TTFT", "TPOT", "ITL", "E2EL") for name in ("Mean", "Median", "P99")),
    ]
    assert lines[1] == "Successful requests:                     6         "


def test_a_terminal_gets_a_bar(on_terminal: Callable[..., tuple[int, str]], served: Live) -> None:
    code, shown = on_terminal("bench", "serve", "--url", served.url, *SMALL, "--concurrency", "3")
    assert code == 0
    assert "6/6" in shown
    assert "Successful requests:" in shown


def test_a_server_of_its_own_is_started_and_stopped(headway: Run, folder: Path) -> None:
    own = ("--model", str(folder), "--threads", "1", "--no-stream")
    done = headway("bench", "serve", *own, *SMALL, "--range", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["completed"] == 6
    assert 6 * 10 <= found["total_input_tokens"] <= 6 * 30
    assert "median_ttft_ms" not in found
    assert found["median_e2el_ms"] > 0


def test_failures_are_counted_and_said(headway: Run, folder: Path) -> None:
    """Ten at a time are more than this server's queue takes."""
    with live(Stage(folder).engine, max_queue_requests=2) as served:
        done = headway("bench", "serve", "--url", served.url, "-r", "30", "-c", "10", "-p", "20", "-n", "50")
    assert done.returncode == 1
    assert "failed: HTTP 429: the server's queue is full" in done.stderr
    failed = next(line for line in done.stdout.splitlines() if line.startswith("Failed requests:"))
    assert int(failed.split(":")[1]) > 0


def test_a_key_comes_from_the_environment(headway: Run, folder: Path, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "bench")
    with live(Stage(folder).engine, key_file=tmp_path / "keys.json") as closed:
        url = ("bench", "serve", "--url", closed.url, *SMALL)
        assert "requires an API key" in headway(*url).stderr
        assert headway(*url, env={"HEADWAY_API_KEY": key}).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--url", "127.0.0.1"), "--url is '127.0.0.1'"),
        (
            ("--url", "http://127.0.0.1:1"),
            "no server answers at 127.0.0.1:1: Connection refused; start one with `headway serve`",
        ),
        (("--requests", "0"), "--requests is 0"),
        (("--concurrency", "0"), "--concurrency is 0"),
        (("--rate", "0"), "--rate is 0"),
        (("--range", "1"), "--range is 1"),
        (("--url", "http://127.0.0.1:1", "--threads", "2"), "--threads was given with --url"),
        (("--model", "/nowhere/at/all"), "the server did not start: "),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(headway: Run, arguments: tuple[str, ...], why: str) -> None:
    done = headway("bench", "serve", *arguments)
    assert done.returncode == 2
    assert why in done.stderr


def test_what_the_model_cannot_hold_is_refused(headway: Run, served: Live) -> None:
    done = headway("bench", "serve", "--url", served.url, "-p", "65000", "-n", "600")
    assert done.returncode == 2
    assert "this model has 65536" in done.stderr


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_figures_of_known_times() -> None:
    one = RequestResult(began=10.0, ended=11.0, prompt_tokens=5, tokens=4, events=[10.4, 10.6, 10.7, 11.0])
    bad = RequestResult(began=10.0, ended=10.1, error="HTTP 429: full", status=429)
    found = LoadReport(LoadResult([one, bad], 2.0, 2), ArrivalPattern(2), stream=True, model="m").to_json()
    assert found["mean_ttft_ms"] == pytest.approx(400)
    assert found["mean_tpot_ms"] == pytest.approx(200)  # 0.6 s over three tokens
    assert found["mean_itl_ms"] == pytest.approx(200)
    assert found["median_itl_ms"] == pytest.approx(200)
    assert found["mean_e2el_ms"] == pytest.approx(1000)
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["output_throughput"] == 2.0
    assert found["errors"] == {"HTTP 429: full": 1}


def test_percentiles_and_peaks() -> None:
    spread = LatencyStats.of([n / 1000 for n in range(1, 102)])
    assert spread is not None
    assert (spread.mean, spread.median, spread.p99) == pytest.approx((51, 51, 100))
    assert LatencyStats.of([]) is None
    slow = RequestResult(0.0, tokens=4, events=[0.0, 2.0, 4.0, 6.0])
    fast = RequestResult(0.0, tokens=6, events=[4.5, 4.6, 4.7])
    assert busiest_second([slow]) == 1
    assert busiest_second([slow, fast]) == 7  # at 4.0 one, then three events of two tokens each
    assert busiest_second([]) is None


def test_lengths_vary_within_their_range_and_repeat_with_a_seed() -> None:
    workload = Workload(requests=200, prompt=20, tokens=10, range=0.5, warmup=1, seed=3)
    requests = workload.draw(97, stream=True, model=None)
    assert requests == workload.draw(97, stream=True, model=None)
    assert len(requests) == 201
    assert {len(request.prompt) for request in requests} == set(range(10, 31))
    assert {request.tokens for request in requests} == set(range(5, 16))
    assert all(len(request.prompt) + request.tokens <= workload.max_request_tokens for request in requests)


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:b", "http://a/?q=1", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidInput, match="--url"):
        Address.of(url)


def test_addresses() -> None:
    assert Address.of("https://models.example.org/api/") == Address("models.example.org", 443, True, "/api")
    assert Address.of("http://[::1]:8000", "k").headers[0] == ("Host", "[::1]:8000")
    assert "secret" not in repr(Address.of("http://a", "secret"))


def test_connections_are_kept_and_given_up(served: Live) -> None:
    """Requests one after the other share a connection; one that is left takes its connection along."""

    async def talk() -> list[int]:
        client, idle = HttpClient(Address.of(served.url)), []
        for _ in range(3):
            await send(client, LoadRequest((1, 2, 3), 2))
            idle.append(len(client._idle))
        async with client.request("POST", "/v1/completions", LoadRequest((1, 2, 3), 500).body()) as answer:
            async for _ in answer.events():
                break
        idle.append(len(client._idle))
        client.close()
        return idle

    assert asyncio.run(talk()) == [1, 1, 1, 0]
    served.until(served.is_quiet)


def test_a_concurrency_is_never_passed(served: Live) -> None:
    async def talk() -> LoadResult:
        client = HttpClient(Address.of(served.url))
        load = await run_load(client, [LoadRequest((i, 5, 6), 3) for i in range(12)], ArrivalPattern(concurrency=2))
        client.close()
        return load

    load = asyncio.run(talk())
    assert load.peak == 2
    assert all(one.error is None and one.tokens == 3 for one in load.results)
