"""Programs in the sandbox: the same API and the same results as in process, messages, topics, quotas, routes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.base.errors import InvalidInput, Unsupported
from headway.sandbox import artifact, runner
from headway.sandbox.artifact import private_folder
from headway.server.errors import ApiError
from headway.server.keys import ANYONE, Tenant, TenantLimits
from headway.server.programs.output import ProgramOutput
from headway.server.programs.programs import Programs
from headway.server.programs.run import Run
from headway.server.programs.store import InstalledPrograms
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.testing import random_model
from support.live import Live
from support.programs import ProgramServer, run_beside, workers

ROOT = Path(__file__).parents[2]
API = """
import asyncio
import headway as hw

async def main(engine, seed=3):
    lines = []
    async with engine.context(seed=seed) as ctx:
        ctx.fill("the quick brown")
        fwd = ctx.forward().input([5, 6]).attention_mask(hw.Mask.sink(2, 8))
        token = fwd.sample([-1], hw.Multinomial())
        top, entropy = fwd.probe(-1, hw.Distribution(k=3)), fwd.probe(-2, hw.Entropy())
        out = await fwd.execute()
        lines.append([out.token(token), [int(i) for i in out.distribution(top)[0]], round(out.entropy(entropy), 4)])
        forks = [ctx.fork().fill([n]) for n in range(3)]
        texts = await asyncio.gather(*(f.generate(hw.TopP(0.9), max_tokens=6).tokens() for f in forks))
        lines.append([[int(t) for t in each] for each in texts])
        grammar = hw.Grammar.regex("(yes|no|perhaps)!")
        lines.append(await ctx.fork().generate(hw.Argmax(), constrain=grammar, max_tokens=20).text())
        async for step in ctx.generate(hw.Argmax(), max_tokens=5, stop_only=True, probe=hw.Entropy()):
            lines.append([[int(t) for t in step.tokens], [round(p, 4) for p in step.probes]])
        lines.append([int(t) for t in await forks[0].generate(num_beams=2, max_tokens=4).tokens()])
        lines.append([ctx.seq_len, [int(t) for t in ctx.tokens], ctx.inner().committed_page_count])
        ctx.truncate(3)
        ctx.save("kept")
    with engine.open("kept") as again:
        lines.append([int(t) for t in again.tokens])
    engine.delete("kept")
    try:
        engine.context().fill([10 ** 9])
    except hw.InvalidToken as error:
        lines.append(str(error))
    return lines
"""


def test_a_program_gives_what_it_gives_in_process(ann: ProgramServer, served: Live) -> None:
    module: dict[str, Any] = {}
    exec(API, module)
    expected = json.loads(json.dumps(served.engine.run(module["main"])))
    ended = ann.run(API)
    assert ended["status"] == "returned", ended["error"]
    assert ended["value"] == expected


OWN = """
from array import array
import headway as hw

class Even:
    def __init__(self, vocab): self.vocab = vocab
    def mask(self): return array("I", [0x55555555] * ((self.vocab + 31) // 32))
    def accept(self, token): pass
    def rollback(self, n): pass

async def main(engine):
    def shifted(logits, generation):
        logits[7] = 1e9
    async with engine.context() as ctx:
        ctx.fill([1, 2, 3])
        fork = ctx.fork()
        even = await ctx.generate(hw.Argmax(), max_tokens=4, stop_only=True, constrain=Even(engine.vocab_size)).tokens()
        sevens = await fork.generate(hw.Argmax(), max_tokens=3, stop_only=True, logits=shifted).tokens()
        drafted = await ctx.generate(hw.Argmax(), max_tokens=3, speculate=hw.PromptLookup()).tokens()
    return [int(t) % 2 for t in even], [int(t) for t in sevens], len(drafted)
"""


def test_callables_of_a_program_run_in_the_sandbox(ann: ProgramServer) -> None:
    ended = ann.run(OWN)
    assert ended["status"] == "returned", ended["error"]
    assert ended["value"] == [[0] * 4, [7] * 3, 3]


TALK = """
async def main(engine, greeting="hello"):
    print(greeting, "…", end="")
    print()
    while (value := await engine.session.receive()) is not None:
        engine.session.send({"got": value})
    return "done"
"""


def test_messages_prints_and_the_value_stream(ann: ProgramServer) -> None:
    id = ann.start(TALK, greeting="grüß dich")
    for value in ("a", {"b": [1, 2.5, None]}, None):
        assert ann.ask("POST", f"/v1/programs/{id}/messages", value=value).status == 200
    started, printed, first, second, end = ann.follow(id)
    assert started == {"type": "started", "id": id}
    assert printed["text"] == "grüß dich …\n"
    assert [first["value"], second["value"]] == [{"got": "a"}, {"got": {"b": [1, 2.5, None]}}]
    assert (end["status"], end["value"]) == ("returned", "done")
    assert [event["n"] for event in ann.follow(id, after=2)[1:]] == [3, 4]
    assert ann.ask("GET", f"/v1/programs/{id}/logs").body.decode() == "grüß dich …\n"
    late = ann.ask("POST", f"/v1/programs/{id}/messages", value=1)
    assert late.status == 400
    assert "has ended" in late.error["message"]


TOPIC = """
async def main(engine, role, n=60):
    if role == "reads":
        sub = await engine.session.subscribe("numbers")
        print("ready")
        return [await sub.next() for _ in range(n)]
    return [await engine.session.publish("numbers", i) for i in range(n)]
"""


def test_programs_of_a_key_talk_by_topic(ann: ProgramServer, served: Live) -> None:
    readers = [ann.start(TOPIC, role="reads") for _ in range(2)]
    for id in readers:
        served.until(lambda id=id: b"ready" in ann.ask("GET", f"/v1/programs/{id}/logs").body)
    assert ann.run(TOPIC, role="writes")["value"] == [2] * 60
    assert [ann.follow(id)[-1]["value"] for id in readers] == [list(range(60))] * 2


IMPATIENT = """
import asyncio

async def main(engine):
    got, missed = [], 0
    while len(got) < 40:
        try:
            got.append(await asyncio.wait_for(engine.session.receive(), 0.01 if missed < 50 else None))
        except TimeoutError:
            missed += 1
            if missed == 1:
                print("missed")
    return got, missed > 0
"""


def test_a_message_is_not_lost_when_its_receiver_gave_up(ann: ProgramServer, served: Live) -> None:
    id = ann.start(IMPATIENT)
    served.until(lambda: b"missed" in ann.ask("GET", f"/v1/programs/{id}/logs").body)
    for n in range(40):
        assert ann.ask("POST", f"/v1/programs/{id}/messages", value=n).status == 200
    assert ann.follow(id)[-1]["value"] == [list(range(40)), True]


def test_programs_are_installed_and_run_by_name(ann: ProgramServer, bob: ProgramServer) -> None:
    source = "async def main(engine, x): return x + 1"
    assert ann.ask("PUT", "/v1/installed_programs/adds", source=source).json["bytes"] == len(source)
    assert [one["name"] for one in ann.ask("GET", "/v1/installed_programs").json["data"]] == ["adds"]
    assert bob.ask("GET", "/v1/installed_programs").json["data"] == []
    id = ann.ask("POST", "/v1/programs", name="adds", args={"x": 41}).json["id"]
    assert ann.follow(id)[-1]["value"] == 42
    assert bob.ask("POST", "/v1/programs", name="adds").status == 404
    for name, text, told in (
        ("..", source, "not a name"),
        ("a b", source, "not a name"),
        ("broken", "def", "not valid Python: invalid syntax"),
        ("long", "#" * (300 << 10), "max_program_bytes"),
    ):
        refused = ann.ask("PUT", f"/v1/installed_programs/{name.replace(' ', '%20')}", source=text)
        assert refused.status in (400, 404), name
        assert refused.status == 404 or re.search(told, refused.error["message"]), refused.error
    assert ann.ask("DELETE", "/v1/installed_programs/adds").status == 200
    assert ann.ask("DELETE", "/v1/installed_programs/adds").status == 404


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("source", ["(" * 150_000, "-" * 200_000 + "1", "x" + ".x" * 100_000])
def test_a_source_that_is_hard_to_read_is_read_in_the_sandbox(ann: ProgramServer, source: str) -> None:
    refused = ann.ask("PUT", "/v1/installed_programs/hard", source=source)
    assert refused.status == 400
    assert refused.error["message"] == "the program cannot be read: its calls were nested too deeply"


@pytest.mark.usefixtures("guest")
def test_a_source_whose_reader_is_lost_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = workers(), runner.Sandbox.start

    async def lost(sandbox: runner.Sandbox, *given: Any) -> Any:
        confined = await start(sandbox, *given)
        for worker in set(workers()) - set(before):
            os.kill(worker, signal.SIGKILL)
        return confined

    async def trial(programs: Programs) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(runner.Sandbox, "start", lost)
            with pytest.raises(ApiError, match="the process that reads programs has ended; try again") as refused:
                await programs.install(ANYONE, "own", "#" * (200 << 10))
        assert refused.value.status == 503
        await programs.install(ANYONE, "own", "x = 1")

    with_programs(trial)


def test_what_is_python_is_what_the_sandbox_s_python_says(ann: ProgramServer) -> None:
    source = "try: pass\nexcept ValueError, TypeError: pass\nasync def main(engine): return 1"  # since Python 3.14
    assert ann.ask("PUT", "/v1/installed_programs/new", source=source).status == 200
    assert ann.follow(ann.ask("POST", "/v1/programs", name="new").json["id"])[-1]["value"] == 1
    assert ann.ask("DELETE", "/v1/installed_programs/new").status == 200


def test_installed_programs_survive_the_server(tmp_path: Path) -> None:
    settings = ServerSettings(program_dir=tmp_path)
    InstalledPrograms(settings).install(ANYONE, "kept", "x = 1")
    assert InstalledPrograms(settings).find(ANYONE, "kept") == "x = 1"


def test_quotas_are_those_of_a_key(ann: ProgramServer, bob: ProgramServer) -> None:
    waits = "async def main(engine): await engine.session.receive()"
    ids = [ann.start(waits) for _ in range(8)]
    full = ann.ask("POST", "/v1/programs", source=waits)
    assert full.status == 429
    assert "8 programs running" in full.error["message"]
    assert bob.run("async def main(engine): return 1")["value"] == 1
    for id in ids:
        ann.ask("DELETE", f"/v1/programs/{id}")
    long = ann.ask("POST", "/v1/programs", source="#" * (300 << 10))
    assert long.status == 400
    assert "max_program_bytes" in long.error["message"]
    both = ann.ask("POST", "/v1/programs", source=waits, name="x")
    assert both.status == 400


async def ended(run: Run) -> dict[str, Any]:
    return [json.loads(event) async for event in run.output.follow()][-1]


def with_programs(trial: Callable[[Programs], Awaitable[None]], **limits: Any) -> None:
    """Run something with the programs of a server beside a small engine."""

    async def outer(engine: hw.Engine) -> None:
        settings = ServerSettings(programs="sandbox", **limits)
        programs = await Programs.prepared(await Serving.of_engine(settings, engine), print)
        try:
            await trial(programs)
        finally:
            await programs.close()

    with hw.Engine(random_model(), pages=16, threads=1) as engine:
        asyncio.run(outer(engine))


LOOPS = "async def main(engine):\n    while True: pass"
WAITS = "async def main(engine): await engine.session.receive()"


@pytest.mark.usefixtures("guest")
def test_cpu_time_is_counted_by_key_and_hour() -> None:
    async def trial(programs: Programs) -> None:
        end = await ended(programs.start(ANYONE, LOOPS, {}))
        assert end["status"] == "stopped"
        assert "0.3 seconds of CPU time" in end["error"]
        with pytest.raises(ApiError, match="seconds of CPU time an hour"):
            programs.start(ANYONE, "async def main(engine): pass", {})
        other = Tenant("other", "salt", TenantLimits(program_cpu=5))
        assert (await ended(programs.start(other, "async def main(engine): return 1", {})))["value"] == 1

    with_programs(trial, max_key_cpu=0.3)


@pytest.mark.usefixtures("guest")
def test_programs_at_once_share_the_cpu_time_of_their_key() -> None:
    """However many run, together they use no more than the key has; what one leaves is there for the next."""

    async def trial(programs: Programs) -> None:
        waits = programs.start(ANYONE, WAITS, {})
        loops = [programs.start(ANYONE, LOOPS, {}) for _ in range(2)]
        assert [run.granted for run in (waits, *loops)] == pytest.approx([0.4, 0.4, 0.2])
        with pytest.raises(
            ApiError, match="those that run may use the rest; wait for one of them, or stop one"
        ) as full:
            programs.start(ANYONE, WAITS, {})
        assert full.value.status == 429
        used = [(await ended(run))["cpu_seconds"] for run in loops]
        assert 0.5 < sum(used) < 1.0
        waits.inbox.offer(None)
        await ended(waits)
        assert programs.start(ANYONE, WAITS, {}).granted > 0

    with_programs(trial, max_key_cpu=1.0, max_program_cpu=0.4)


ELSEWHERE = """
import ctypes, json, select, socket, sys
from headway.sandbox import wasm, worker

class Library:
    def __getattr__(self, name): raise AttributeError(name)

sys.platform, ctypes.CDLL = "darwin", lambda name: Library()
del select.POLLRDHUP, socket.SOCK_SEQPACKET
sys.argv = ["worker", *sys.argv[1:]]
worker.main()
"""


@pytest.mark.usefixtures("guest")
def test_programs_need_nothing_that_only_linux_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker, without what other systems lack."""
    spawn = subprocess.Popen
    elsewhere = lambda command, **how: spawn([command[0], "-c", ELSEWHERE, *command[3:]], **how)  # noqa: E731
    monkeypatch.setattr(runner.subprocess, "Popen", elsewhere)
    monkeypatch.delattr(socket, "SOCK_SEQPACKET")

    async def trial(programs: Programs) -> None:
        assert (await ended(programs.start(ANYONE, "async def main(engine): return 5", {})))["value"] == 5
        many = [programs.start(ANYONE, "async def main(engine, n): return n", {"n": n}) for n in range(12)]
        assert [(await ended(run))["value"] for run in many] == list(range(12))
        waits = programs.start(ANYONE, WAITS, {})
        waits.stop("enough")
        assert (await ended(waits))["error"] == "enough"

    with_programs(trial)


@pytest.mark.usefixtures("guest")
def test_a_program_whose_worker_is_lost_is_charged() -> None:
    """Nobody can say what it has used: it has used what it could."""

    before = workers()

    async def trial(programs: Programs) -> None:
        run = programs.start(ANYONE, WAITS.replace(" await", "\n    print('on')\n    await"), {})
        events = run.output.follow()
        assert json.loads(await anext(events))["text"] == "on\n"
        await asyncio.sleep(0.5)
        (worker,) = set(workers()) - set(before)
        os.kill(worker, signal.SIGKILL)
        end = [json.loads(event) async for event in events][-1]
        assert end["error"] == "the process that starts programs has ended, and with it this program"
        assert end["cpu_seconds"] == 0.4
        with pytest.raises(ApiError, match=r"have used its 0\.4 seconds"):
            programs.start(ANYONE, WAITS, {})

    with_programs(trial, max_key_cpu=0.4, max_program_cpu=0.4)


def test_a_program_runs_for_a_time_at_most(guest: Path) -> None:
    settings = ServerSettings(programs="sandbox", max_program_seconds=0.5)
    with hw.Engine(random_model(), pages=16, threads=1) as engine:
        source = "import asyncio\nasync def main(engine): await asyncio.sleep(3600)"
        _, events = run_beside(engine, settings, source)
    assert events[-1]["error"] == "it ran longer than 0.5 seconds"


NESTED = """
import json
async def main(engine, depth, how):
    value = json.loads("[" * depth + "]" * depth)
    if how == "publish":
        await engine.session.publish("topic", value)
    elif how == "send":
        engine.session.send(value)
    elif how == "return":
        return value
"""


@pytest.mark.parametrize("how", ["publish", "send", "return"])
def test_values_that_are_nested_deeply_are_refused_and_never_an_error_of_the_server(
    ann: ProgramServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    statuses = set()
    for depth in (100, 700, *range(760, 960, 25), 962, 970, 974, 976, 978, 1000, 2000):
        ended = ann.run(NESTED, depth=depth, how=how)
        statuses.add(ended["status"])
        assert ended["status"] == "returned" or re.search("deeply|recursion", ended["error"]), ended["error"]
        assert depth > 700 or ended["status"] == "returned"
        assert ann.ask("GET", f"/v1/programs/{ended['id']}").status == 200
        assert ann.ask("GET", "/v1/programs").status == 200
    assert "returned" in statuses
    assert len(statuses) > 1
    assert not [line for line in caplog.records if "failed" in line.message]


def test_a_message_that_is_nested_deeply_is_refused(ann: ProgramServer) -> None:
    id = ann.start("async def main(engine):\n    while await engine.session.receive(): pass")
    statuses = []
    for depth in (100, 700, *range(760, 980, 2), 2000):
        body = b'{"value": ' + b"[" * depth + b"]" * depth + b"}"
        answer = ann.post_bytes(f"/v1/programs/{id}/messages", body)
        assert answer.status == 200 or "nested too deeply" in answer.error["message"], answer.body[:200]
        statuses.append(answer.status)
    assert statuses == sorted(statuses)
    assert {*statuses} == {200, 400}
    ann.ask("DELETE", f"/v1/programs/{id}")


def test_output_waits_for_a_reader_and_drops_without_one() -> None:
    async def trial() -> None:
        output = ProgramOutput(400)
        for n in range(100):
            await output.add("print", text=f"{n:03}")
        assert output.bytes <= 400
        events = output.follow()
        first = json.loads(await anext(events))
        second = json.loads(await anext(events))
        assert first == {"type": "dropped", "count": second["n"] - 1}
        adding = asyncio.create_task(_add(output, 20))
        await asyncio.sleep(0.01)
        assert not adding.done()  # the reader would lose an event
        numbers = [second["n"]] + [json.loads(event)["n"] async for event in events]
        await adding
        assert numbers == list(range(numbers[0], 122))

    asyncio.run(trial())


async def _add(output: ProgramOutput, count: int) -> None:
    for n in range(count):
        await output.add("print", text=f"{n:03}")
    await output.add("end", "null", status="returned")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "own")
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707, 0o722):
        folder.chmod(mode)
        with pytest.raises(InvalidInput, match="others may write"):
            private_folder(folder)


def test_without_the_guest_one_is_told_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "BUILT", tmp_path / "program.wasm")
    with pytest.raises(Unsupported, match="make programs"):
        artifact.find_guest()


def test_the_guest_of_an_installed_wheel_is_found(guest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel,) = artifact.BUILT.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith(".wasm")]
        assert "headway_guest/program.wasm" in packed.namelist()
        assert {"headway_guest/__init__.py", f"headway_guest-{hw.__version__}.dist-info/METADATA"} <= set(names)
        packed.extractall(tmp_path, names)
    (tmp_path / "headway_guest/program.wasm").write_bytes(b"its bytes")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert artifact.find_guest() == tmp_path / "headway_guest/program.wasm"


def test_a_server_without_programs_has_no_routes_of_them(tmp_path: Path) -> None:
    from headway.server.app import create_app

    app = create_app(ServerSettings(), lambda: None)  # type: ignore[arg-type, return-value]
    assert not [route for route in app.state.routes if "program" in getattr(route, "path", "")]


def test_many_programs_at_once(ann: ProgramServer) -> None:
    source = (
        "import headway as hw\nasync def main(engine, n):\n    async with engine.context(seed=n) as ctx:\n"
        "        return [int(t) for t in await ctx.fill([n]).generate(hw.Multinomial(), max_tokens=8).tokens()]"
    )
    ended: dict[int, Any] = {}

    def one(n: int) -> None:
        ended[n] = ann.run(source, n=n)["value"]

    threads = [threading.Thread(target=one, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ended[n] for n in range(6)] == [ann.run(source, n=n)["value"] for n in range(6)]


def test_the_guide_has_the_measured_cost_of_a_pass() -> None:
    measured = json.loads((ROOT / "benchmarks/results/programs.json").read_text())["results"]["on this machine"]
    more = measured["sandbox"]["pass_ms"] - measured["in process"]["pass_ms"]
    assert f"each awaited pass takes {more:.1f} ms longer than in process" in (ROOT / "docs/programs.md").read_text()


def test_every_promise_names_tests_that_exist() -> None:
    page = (ROOT / "docs/programs.md").read_text().partition("## What the sandbox promises")[2]
    promises = [
        line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| a program", "| --"))
    ]
    assert len(promises) > 10
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for line in promises:
        named = re.findall(r"`(test_\w+)`", line)
        assert named, line
        assert [name for name in named if f"def {name}(" not in tests] == []
