"""A server that runs programs: start one, follow it to its end, and see that nothing of it is left."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
import time
from collections import Counter
from typing import Any

import psutil

import headway as hw
from headway.server.keys import ANYONE
from headway.server.programs.programs import Programs
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from support.live import PATIENCE, Live


class ProgramServer:
    """A live server with keys, used by one of them."""

    def __init__(self, served: Live, key: str | None = None) -> None:
        self.served, self._headers = served, {} if key is None else {"authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, **body: Any) -> Any:
        return self.served.ask(method, path, body or None, self._headers)

    def post_bytes(self, path: str, body: bytes) -> Any:
        """A body that need not be JSON."""
        return self.served.ask("POST", path, body, self._headers)

    def start(self, source: str, **args: Any) -> str:
        """Start a program; its id."""
        answer = self.ask("POST", "/v1/programs", source=source, args=args)
        assert answer.status == 200, answer.body
        return answer.json["id"]

    def follow(self, id: str, after: int = 0) -> list[dict[str, Any]]:
        """Its events, the last of which is its end."""
        answer = self.ask("GET", f"/v1/programs/{id}/events?after={after}")
        assert answer.status == 200, answer.body
        lines = answer.body.decode().split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line]

    def run(self, source: str, **args: Any) -> dict[str, Any]:
        """Run a program to its end, which must come, and see what it printed and sent."""
        id = self.start(source, **args)
        events = self.follow(id)
        assert events[-1]["type"] == "end", events
        return {
            **events[-1],
            "id": id,
            "printed": "".join(event["text"] for event in events if event["type"] == "print"),
            "sent": [event["value"] for event in events if event["type"] == "message"],
        }

    def stream(self, source: str, **args: Any) -> http.client.HTTPResponse:
        """A program that ends with its connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=PATIENCE)
        body = json.dumps({"source": source, "args": args, "stream": True})
        connection.request("POST", "/v1/programs", body, {"content-type": "application/json", **self._headers})
        return connection.getresponse()


def run_beside(
    engine: hw.Engine, settings: ServerSettings, source: str, message: Any = None, **args: Any
) -> tuple[str, list[dict[str, Any]]]:
    """Run a program beside an engine, without a server; the confinement that was in force, and its events."""
    held, others = engine.stats().pages_held, (workers(), program_processes())

    async def trial() -> tuple[str, list[dict[str, Any]]]:
        serving = await Serving.of_engine(settings, engine)
        programs = await Programs.prepared(serving, print)
        try:
            started = programs.start(ANYONE, source, args)
            started.inbox.offer(message)
            return programs.confinement, [json.loads(event) async for event in started.output.follow()]
        finally:
            await programs.close()

    found = asyncio.run(trial())
    assert engine.stats().pages_held == held
    assert (workers(), program_processes()) == others
    return found


def workers() -> list[int]:
    """The sandbox's worker processes of this process."""
    return [one.pid for one in _children(os.getpid()) if "headway.sandbox.worker" in " ".join(_command(one))]


def program_processes() -> list[int]:
    """The processes of programs that run here, and theirs."""
    found, queue = [], [one.pid for worker in workers() for one in _children(worker)]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += [one.pid for one in _children(pid)]
    return found


def left_over() -> Counter[str]:
    """What a program could leave in the server's process: threads by name, and sockets."""
    pools = ("asyncio_", "AnyIO")
    found = Counter(t.name for t in threading.enumerate() if not t.name.startswith(pools))
    found["sockets"] = _sockets()
    return found


def settled(before: Counter[str], served: Live) -> None:
    """Wait until nothing is left of the programs that ran (what earlier tests held may go meanwhile)."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if served.is_quiet() and not program_processes() and left_over() <= before:
            return
        time.sleep(0.01)
    raise AssertionError((served.engine.stats(), program_processes(), left_over(), before))


def _sockets() -> int:
    return len(psutil.Process().net_connections("all"))


def _children(pid: int) -> list[psutil.Process]:
    try:
        return [child for child in psutil.Process(pid).children() if _lives(child)]
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
