"""The sandbox's promises: whatever a program does, it is stopped, told why, and leaves nothing behind.

Each case runs beside a bystander, whose tokens stay the same; after each no page is held and no thread, socket or
process is left (`unharmed`). `docs/programs.md` lists the promises by the names of these tests.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from support.live import Live
from support.programs import ProgramServer, program_processes, workers

pytestmark = pytest.mark.usefixtures("unharmed")


@dataclass(frozen=True)
class Case:
    """A program, how it ends and what it is told."""

    source: str
    status: str
    told: str


LOOPS = {
    "a loop": Case("async def main(engine):\n    while True: pass", "stopped", "more than 1 seconds of CPU time"),
    "a loop that catches everything": Case(
        "async def main(engine):\n    while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass",
        "stopped",
        "seconds of CPU time",
    ),
    "a loop in C": Case("async def main(engine):\n    return 10 ** 10 ** 8", "stopped", "seconds of CPU time"),
    "a regular expression": Case(
        "import re\nasync def main(engine):\n    re.match(r'(a+)+b', 'a' * 60)", "stopped", "seconds of CPU time"
    ),
    "a loop at import": Case("while True: pass", "stopped", "seconds of CPU time"),
    "a loop that yields": Case(
        "import asyncio\nasync def main(engine):\n    while True: await asyncio.sleep(0)",
        "stopped",
        "seconds of CPU time",
    ),
}
MEMORY = {
    "memory in small pieces": Case(
        "async def main(engine):\n    kept = []\n    while True: kept.append(bytearray(1 << 20))",
        "raised",
        "MemoryError",
    ),
    "memory at once": Case("async def main(engine):\n    return len(bytearray(1 << 30))", "raised", "MemoryError"),
    "memory, and again": Case(
        "async def main(engine):\n    kept = []\n    while True:\n        try: kept.append(bytearray(1 << 20))\n"
        "        except MemoryError: pass",
        "stopped",
        "seconds of CPU time",
    ),
}
STACK = {
    "recursion": Case("def f(): f()\nasync def main(engine): f()", "raised", "RecursionError"),
    "recursion without a limit": Case(
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nasync def main(engine): f()",
        "stopped",
        "nested too deeply|aborted|CPU time",
    ),
}
WAITING = {
    "time.sleep": Case("import time\nasync def main(engine): time.sleep(60)", "raised", "await asyncio.sleep instead"),
    "time.sleep, imported anew": Case(
        "import sys\ndel sys.modules['time']\nimport time\nasync def main(engine): time.sleep(60)",
        "stopped",
        "await asyncio.sleep instead",
    ),
    "select": Case(
        "import select\nasync def main(engine): select.select([], [], [], 60)",
        "stopped|raised",
        "select|waited outside",
    ),
}
OUTSIDE = {
    "a file": Case("async def main(engine): open('/etc/passwd')", "raised", "FileNotFoundError"),
    "a new file": Case("async def main(engine): open('/tmp/x', 'w')", "raised", "FileNotFoundError"),
    "a folder": Case("import os\nasync def main(engine): os.listdir('/')", "raised", "FileNotFoundError"),
    "a socket": Case(
        "import socket\nasync def main(engine): socket.create_connection(('127.0.0.1', 80), 5)", "raised", "[Ee]rror"
    ),
    "a listening socket": Case(
        "import socket\nasync def main(engine): socket.create_server(('127.0.0.1', 0))", "raised", "Error"
    ),
    "a name": Case("import socket\nasync def main(engine): socket.gethostbyname('example.org')", "raised", "gaierror"),
    "a process": Case("import subprocess\nasync def main(engine): subprocess.run(['ls'])", "raised", "OSError"),
    "a fork": Case("import os\nasync def main(engine): os.fork()", "raised", "AttributeError|OSError"),
    "a thread": Case(
        "import threading\nasync def main(engine): threading.Thread(target=print).start()", "raised", "thread"
    ),
    "standard input": Case("async def main(engine): input()", "raised", "EOFError|RuntimeError|OSError"),
    "standard input, by its number": Case(
        "import os\nasync def main(engine): os.read(0, 1) + b'' or 1 / 0", "raised", "OSError|ZeroDivisionError"
    ),
    "a parent folder": Case("async def main(engine): open('../../etc/passwd')", "raised", "FileNotFoundError"),
    "a link": Case("import os\nasync def main(engine): os.symlink('/etc/passwd', 'x')", "raised", "Error"),
    "a mounted folder": Case("import os\nasync def main(engine): os.listdir(3)", "raised", "Error"),
    "a signal": Case("import os\nasync def main(engine): os.kill(1, 9)", "raised", "AttributeError|OSError"),
    "machine code": Case("import ctypes", "raised", "ModuleNotFoundError"),
    "a package": Case("import numpy", "raised", "ModuleNotFoundError"),
}
ENDINGS = {
    "it raises": Case("async def main(engine): 1 / 0", "raised", r"line 1, in main\n(.*\n)*ZeroDivisionError"),
    "sys.exit": Case("import sys\nasync def main(engine): sys.exit(3)", "raised", "SystemExit: 3"),
    "os._exit": Case("import os\nasync def main(engine): os._exit(3)", "stopped", "it exited"),
    "os.abort": Case("import os\nasync def main(engine): os.abort()", "stopped", "it aborted"),
    "no main": Case("x = 1", "raised", "write async def main"),
    "a main that is not async": Case("def main(engine): return 1", "raised", "async def"),
    "not Python": Case("to be or not to be?", "raised", "SyntaxError"),
    "no JSON": Case("async def main(engine): return object()", "raised", "cannot be sent as JSON"),
    "too much JSON": Case("async def main(engine): return 'x' * (9 << 20)", "stopped", "more than 8388608 bytes"),
    "an infinity": Case("async def main(engine): return float('inf')", "raised", "cannot be sent as JSON"),
}
MESSAGES = {
    "not a frame": Case("import wit_world\nasync def main(engine): wit_world.send('?')", "stopped", "malformed"),
    "not bytes": Case("import wit_world\nasync def main(engine): wit_world.send('€')", "stopped", "not one"),
    "too long": Case(
        "import wit_world\nasync def main(engine): wit_world.send('x' * (9 << 20))", "stopped", "at most 8388608"
    ),
    "out of order": Case(
        "from headway.remote.protocol.codec import encode\nimport wit_world\n"
        "async def main(engine):\n    for _ in range(2):\n"
        "        wit_world.send(encode({'type': 'bye', 'n': 7, 'ack': 0}).decode('latin-1'))\n"
        "    wit_world.recv(-1)\n    wit_world.recv(-1)",
        "stopped",
        "out_of_order",
    ),
    "another hello": Case(
        "from headway.remote.protocol.codec import encode\nimport wit_world\n"
        "async def main(engine):\n"
        "    wit_world.send(encode({'type': 'hello', 'version': 1, 'n': 1, 'ack': 0}).decode('latin-1'))\n"
        "    wit_world.recv(-1)\n    wit_world.recv(-1)",
        "stopped",
        "malformed",
    ),
    "a verb that is not one": Case(
        "async def main(engine): engine._connection.request('engine.close')", "raised|stopped", "not known"
    ),
}
ALL = LOOPS | MEMORY | STACK | WAITING | OUTSIDE | ENDINGS | MESSAGES


@pytest.mark.parametrize("name", ALL)
def test_a_program_is_stopped_and_told_why(ann: ProgramServer, name: str) -> None:
    case = ALL[name]
    ended = ann.run(case.source)
    assert re.fullmatch(case.status, ended["status"]), ended
    assert re.search(case.told, ended["error"]), ended
    assert ended["cpu_seconds"] < 3


ABOUT = """
import os, platform, sys

async def main(engine):
    told = [os.write(number, b"into nothing") for number in (1, 2)]
    given = [dict(os.environ), sys.argv, sys.orig_argv, sys.executable, sys.stdin.read()]
    return given, [os.getcwd(), platform.node(), os.uname().sysname, os.cpu_count()], told
"""


def test_a_program_is_given_no_environment_arguments_or_input(
    ann: ProgramServer, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = ann.run(ABOUT)
    assert ended["value"] == [[{}, [], [], "", ""], ["/", "(none)", "wasi", 1], [12, 12]]
    printed = capfd.readouterr()
    assert "into nothing" not in printed.out + printed.err


HOLDING = """
import asyncio
import headway as hw

async def main(engine, how):
    kept = [engine.context().fill(range(20)) for _ in range(4)]
    for ctx in kept:
        await ctx.flush()
    forks = [ctx.fork() for ctx in kept]
    running = [asyncio.ensure_future(f.generate(hw.Argmax(), max_tokens=200, stop_only=True).text()) for f in forks]
    await asyncio.sleep(0.01)
    print("holds pages")
    if how == "returns":
        return len(kept)
    if how == "raises":
        raise ValueError("on purpose")
    if how == "exits":
        import os
        os._exit(0)
    if how == "loops":
        while True:
            pass
    await asyncio.sleep(3600)
"""


@pytest.mark.parametrize("how", ["returns", "raises", "exits", "loops"])
def test_pages_and_passes_in_flight_end_with_the_program(ann: ProgramServer, how: str) -> None:
    ended = ann.run(HOLDING, how=how)
    assert ended["printed"] == "holds pages\n"
    assert ended["status"] == {"returns": "returned", "raises": "raised"}.get(how, "stopped")


def test_a_program_that_sleeps_is_killed(ann: ProgramServer, served: Live) -> None:
    id = ann.start(HOLDING, how="sleeps")
    served.until(lambda: "holds pages" in ann.ask("GET", f"/v1/programs/{id}/logs").body.decode())
    assert len(program_processes()) == 1
    about = ann.ask("DELETE", f"/v1/programs/{id}").json
    assert (about["status"], about["error"]) == ("stopped", "it was killed")
    assert program_processes() == []
    assert served.engine.stats().pages_held == 0 or served.until(served.is_quiet)


def test_a_program_ends_with_the_connection_that_started_it(ann: ProgramServer, served: Live) -> None:
    with ann.stream(HOLDING, how="sleeps") as answer:
        while b"holds pages" not in answer.readline():
            pass
        assert len(program_processes()) == 1
    served.until(lambda: not program_processes())
    last = lambda: ann.ask("GET", "/v1/programs").json["data"][-1]["error"]  # noqa: E731
    served.until(last)
    assert last() == "its client has gone away"


FLOOD = """
async def main(engine, what):
    n = 0
    while True:
        n += 1
        if what == "prints":
            print("x" * 200)
        elif what == "messages":
            engine.session.send("x" * 200)
        elif what == "topics":
            if n == 1:
                await engine.session.subscribe("own")
            await engine.session.publish("own", n)
            print(n)
        elif what == "requests":
            engine._connection.tell("engine.stats")
        else:
            engine.context()
"""


@pytest.mark.parametrize("what", ["prints", "messages", "requests", "contexts"])
def test_a_flood_is_held_back_and_ends(ann: ProgramServer, what: str) -> None:
    ended = ann.run(FLOOD, what=what)
    assert ended["status"] in ("stopped", "raised"), ended
    assert re.search("CPU time|max_contexts", ended["error"]), ended


HOARDS = """
async def main(engine, what):
    ask = engine._connection.ask
    await engine.session.subscribe("own")
    if what == "requests that wait":
        asked = [ask("program.receive") for _ in range(5000)]
    elif what == "a message":
        asked = [ask("program.publish", topic="own", value="x" * (65 << 10))]
    else:
        for _ in range(3):  # the topic has room for these
            await engine.session.publish("own", "x" * (20 << 10))
        asked = [ask("program.publish", topic="own", value="x" * (20 << 10)) for _ in range(4)]
    reply = await asked[-1][1].next()
    return [reply["error"]["message"], len(asked)]

"""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("requests that wait", r"4096 requests of this session wait for their replies"),
        ("a message", r"66562 bytes of JSON; max_program_output is 65536"),
        ("messages", r"61446 bytes of messages of this program wait for subscribers"),
    ],
)
def test_what_waits_on_the_server_is_bounded(ann: ProgramServer, what: str, told: str) -> None:
    ended = ann.run(HOARDS, what=what)
    assert ended["status"] == "returned", ended
    assert re.search(told, ended["value"][0]), ended


def test_a_flood_that_nobody_reads_keeps_its_latest_part(ann: ProgramServer, served: Live) -> None:
    id = ann.start(FLOOD, what="prints")
    served.until(lambda: ann.ask("GET", f"/v1/programs/{id}").json["status"] != "running")
    started, dropped, *events = ann.follow(id)
    assert started["type"] == "started"
    assert dropped["type"] == "dropped"
    assert dropped["count"] == events[0]["n"] - 1 > 0
    assert [event["n"] for event in events] == list(range(events[0]["n"], events[-1]["n"] + 1))
    assert sum(len(event.get("text", "")) for event in events) <= 64 << 10


def test_a_topic_that_nobody_reads_holds_its_publisher_back(ann: ProgramServer, served: Live) -> None:
    id = ann.start(FLOOD, what="topics")

    def published() -> list[bytes]:
        return ann.ask("GET", f"/v1/programs/{id}/logs").body.split()

    served.until(lambda: len(published()) >= 256)
    time.sleep(0.3)
    assert len(published()) == 256  # it waits, and computes nothing
    assert ann.ask("GET", f"/v1/programs/{id}").json["status"] == "running"
    ann.ask("DELETE", f"/v1/programs/{id}")


REACH = """
from headway.remote.context import RemoteContext

async def main(engine):
    own = engine.context().fill([1, 2, 3])
    await own.flush()
    seen = []
    for number in [*range(-5, 30), 1 << 40]:
        if number != own._number:
            try:
                seen.append(RemoteContext(engine, number).tokens)
            except Exception as error:
                assert "has no context" in str(error), error
    for name in ("secret", "../secret"):
        found = engine.open(name) if "/" not in name else None
        seen += [] if found is None else [name]
    sub = await engine.session.subscribe("topic")
    assert await engine.session.publish("topic", "mine") == 1
    seen.append(await sub.next())
    return seen
"""
SECRET = """
import asyncio

async def main(engine):
    ctx = engine.context().fill([7, 7, 7, 7])
    await ctx.flush()
    ctx.save("secret")
    sub = await engine.session.subscribe("topic")
    print("ready")
    await asyncio.sleep(3600)
"""


def test_a_program_reaches_nothing_of_another_key(ann: ProgramServer, bob: ProgramServer, served: Live) -> None:
    id = bob.start(SECRET)
    served.until(lambda: "ready" in bob.ask("GET", f"/v1/programs/{id}/logs").body.decode())
    try:
        ended = ann.run(REACH)
        assert ended["status"] == "returned", ended
        assert ended["value"] == ["mine"]
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/logs"), ("POST", "/messages")):
            body = {"value": 1} if method == "POST" else {}
            assert ann.ask(method, f"/v1/programs/{id}{path}", **body).status == 404
        assert id not in str(ann.ask("GET", "/v1/programs").json)
    finally:
        assert bob.ask("DELETE", f"/v1/programs/{id}").status == 200
        assert bob.run("async def main(engine): return engine.delete('secret')")["value"] is True


HOLDS = """
async def main(engine):
    kept = [engine.context().fill([7] * 20) for _ in range(4)]
    for ctx in kept:
        await ctx.flush()
    print("ready")
    return await engine.session.receive()
"""
PRIES = """
import asyncio
from headway.remote.context import RemoteContext

async def main(engine):
    listening = asyncio.ensure_future(engine.session.receive())
    for number in range(-3, 12):
        other = RemoteContext(engine, number)
        for reach in (other.fork, lambda: other.tokens):
            try:
                return number, str(reach())
            except Exception as error:
                assert "has no context" in str(error), error
        other.release()
    print("pried")
    return await listening
"""


def test_a_program_reaches_nothing_of_another_one_of_its_key(ann: ProgramServer, served: Live) -> None:
    holder = ann.start(HOLDS)
    served.until(lambda: b"ready" in ann.ask("GET", f"/v1/programs/{holder}/logs").body)
    pries = ann.start(PRIES)
    served.until(
        lambda: (
            b"pried" in ann.ask("GET", f"/v1/programs/{pries}/logs").body
            or ann.ask("GET", f"/v1/programs/{pries}").json["status"] != "running"
        )
    )
    assert ann.ask("POST", f"/v1/programs/{holder}/messages", value="for the holder").status == 200
    assert ann.follow(holder)[-1]["value"] == "for the holder"
    assert ann.ask("POST", f"/v1/programs/{pries}/messages", value="for the other").status == 200
    assert ann.follow(pries)[-1]["value"] == "for the other"


def test_a_worker_that_dies_takes_nothing_else_down(ann: ProgramServer, served: Live) -> None:
    id = ann.start(HOLDING, how="sleeps")
    served.until(lambda: "holds pages" in ann.ask("GET", f"/v1/programs/{id}/logs").body.decode())
    (worker,) = workers()
    os.kill(worker, signal.SIGKILL)
    assert ann.follow(id)[-1]["status"] == "stopped"
    assert ann.run("async def main(engine): return 1")["value"] == 1
    assert len(workers()) == 1


DOES = """
import asyncio, json, os, random
import headway as hw
import wit_world

async def main(engine, seed):
    rng, kept = random.Random(seed), [engine.context()]

    async def one():
        ctx = rng.choice(kept)
        what = rng.randrange(16)
        if what == 0: kept.append(engine.context(seed=seed).fill(range(rng.randrange(1, 60))))
        elif what == 1: kept.append(ctx.fork())
        elif what == 2: await ctx.flush()
        elif what == 3: await ctx.generate(hw.Multinomial(seed=seed), max_tokens=rng.randrange(1, 20)).text()
        elif what == 4: ctx.truncate(rng.randrange(1, 9))
        elif what == 5: ctx.release()
        elif what == 6: await asyncio.wait_for(ctx.generate(hw.Argmax(), max_tokens=50).text(), 0.01)
        elif what == 7:
            async for step in ctx.generate(hw.Argmax(), max_tokens=20):
                if rng.random() < 0.3: break
        elif what == 8: print("x" * rng.randrange(5000))
        elif what == 9: engine.session.send(list(range(rng.randrange(500))))
        elif what == 10:
            fwd = ctx.forward().input([1, 2]); fwd.probe(-1, hw.Logits()); await fwd.execute()
        elif what == 11: ctx.inner().reserve_working_pages(rng.randrange(1, 4))
        elif what == 12: ctx.fill([3])
        elif what == 13: await asyncio.sleep(rng.random() / 50)
        elif what == 14: kept.clear(); kept.append(engine.context())
        elif what == 15: await engine.session.publish("t", seed)

    for _ in range(rng.randrange(1, 60)):
        try:
            if rng.random() < 0.3:
                await asyncio.gather(*(one() for _ in range(rng.randrange(1, 5))), return_exceptions=True)
            else:
                await one()
        except (hw.HeadwayError, TimeoutError):
            pass
    end = rng.randrange(8)
    if end == 0: os._exit(1)
    if end == 1: os.abort()
    if end == 2: raise ValueError(seed)
    if end == 3: wit_world.send("".join(chr(rng.randrange(256)) for _ in range(rng.randrange(200))))
    if end == 4: await asyncio.sleep(3600)
    if end == 5:
        from headway.remote.protocol.codec import encode
        kind = rng.choice(["request", "return", "bye", "hello"])
        message = {"type": kind, "id": rng.randrange(9), "n": rng.randrange(99), "ack": rng.randrange(9)}
        wit_world.send(encode(message | {"verb": "context.fork", "args": {}}).decode("latin-1"))
        await asyncio.sleep(0.1)
    return seed
"""


@pytest.mark.slow
def test_random_programs_leave_nothing_behind(ann: ProgramServer, served: Live) -> None:
    rng = random.Random(time.time())
    statuses: Counter[str] = Counter()
    for _ in range(20):
        ids = [ann.start(DOES, seed=rng.randrange(1 << 30)) for _ in range(6)]
        time.sleep(rng.random())
        for id in ids:
            if rng.random() < 0.3:
                assert ann.ask("DELETE", f"/v1/programs/{id}").status == 200
        served.until(lambda: not served.engine.stats().queued)
        for id in ids:
            end = time.monotonic() + 3
            while ann.ask("GET", f"/v1/programs/{id}").json["status"] == "running" and time.monotonic() < end:
                time.sleep(0.02)
            ann.ask("DELETE", f"/v1/programs/{id}")
            statuses[ann.ask("GET", f"/v1/programs/{id}").json["status"]] += 1
        served.until(lambda: served.is_quiet() and not program_processes())
    assert min(statuses[status] for status in ("returned", "raised", "stopped")) > 0, statuses
