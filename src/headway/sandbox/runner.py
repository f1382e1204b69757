"""Starts programs from an event loop: one worker process, and for each program two sockets and a way to kill it."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.base.errors import HeadwayError, InvalidInput
from headway.sandbox.limits import LENGTH, ProgramLimits, json_text

RETRY = 0.005  # seconds
LARGE = 64 << 10  # bytes from which on JSON is read in a thread
SOURCE = Path(__file__).parents[2]


class Ended:
    """How a program's process ended: what the program said, its exit status, and the seconds of CPU time it used.

    The status is None where nobody knows how it ended, nor what it used: its worker is gone.
    """

    def __init__(self, outcome: dict[str, Any] | None, status: int | None, cpu: float) -> None:
        self.outcome, self.status, self.cpu = outcome, status, cpu


class Confined:
    """A program that runs: its session's socket, and its end."""

    def __init__(self, sandbox: Sandbox, number: int, session: socket.socket) -> None:
        self._sandbox, self.number, self.session = sandbox, number, session
        self.exited: asyncio.Future[tuple[int | None, float]] = asyncio.get_running_loop().create_future()
        self._outcome: asyncio.Task[dict[str, Any] | None]

    async def kill(self) -> None:
        """End its process now."""
        await self._sandbox._send({"kill": self.number})

    async def ended(self) -> Ended:
        """Wait until its process is gone."""
        status, cpu = await asyncio.shield(self.exited)
        outcome = await self._outcome
        return Ended(outcome, status, max(cpu, 0.0 if outcome is None else outcome.pop("cpu", 0.0)))


class Sandbox:
    """The worker process, started with the first program and again if it has died."""

    def __init__(self, command: list[str]) -> None:
        self._command = command  # the arguments of the worker
        self._numbers = itertools.count(1)
        self._running: dict[int, Confined] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._line = b""  # what has come of the worker's next message
        self._sending = asyncio.Lock()

    async def open(self) -> None:
        """Start the worker, and wait until it can run programs."""
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            own, its = socket.socketpair()
            own.setblocking(False)
            with its:
                self._process = await asyncio.to_thread(_spawn, its, self._command)
            self._socket, self._line = own, b""
            loop.add_reader(own, self._receive)
        await asyncio.shield(self._ready)

    async def read(self, source: str, limits: ProgramLimits, seconds: float) -> Ended:
        """Whether a source is Python at all: read where a program would run, so that a hang or a crash harms nobody."""
        confined = await self.start(source, None, limits)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await confined.ended()
        finally:
            await confined.kill()
            confined.session.close()
        return await confined.ended()

    async def start(self, source: str, args: dict[str, Any] | None, limits: ProgramLimits) -> Confined:
        """Start a program; one without arguments is read, and not run."""
        await self.open()
        session, its_session = socket.socketpair()
        control, its_control = socket.socketpair()
        confined = Confined(self, next(self._numbers), session)
        try:
            with its_session, its_control:
                self._running[confined.number] = confined
                await self._send({"start": confined.number}, its_session, its_control)
        except BaseException:
            session.close()
            control.close()
            self._running.pop(confined.number, None)
            raise
        given = {"source": source, "args": args, "limits": asdict(limits)}
        confined._outcome = asyncio.create_task(_talk(control, given, limits.message))
        return confined

    async def close(self) -> None:
        """End every program, and the worker."""
        if self._socket is None or self._process is None:
            return
        waiting = [one.exited for one in self._running.values()]
        for one in list(self._running.values()):
            await one.kill()
        if waiting:
            await asyncio.wait(waiting)
        process = self._process
        self._lost()
        await asyncio.to_thread(process.wait)

    # -- the worker --------------------------------------------------------------------------------------------------

    async def _send(self, message: dict[str, Any], *sockets: socket.socket) -> None:
        """Tell the worker something; what it has not read yet may fill the socket for a moment."""
        data, fds = json.dumps(message).encode() + b"\n", [one.fileno() for one in sockets]
        async with self._sending:
            while data and self._socket is not None:
                try:
                    data, fds = data[socket.send_fds(self._socket, [data], fds) :], []
                except BlockingIOError:
                    await asyncio.sleep(RETRY)
                except OSError:  # the worker is gone, which its end of the socket tells too
                    return

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._told(json.loads(line))
        if not data:
            self._lost()

    def _told(self, message: dict[str, Any]) -> None:
        assert self._ready is not None
        if "ready" in message:
            self._ready.set_result(None)
        else:
            confined = self._running.pop(message["ended"])
            confined.exited.set_result((message["status"], message["cpu"]))

    def _lost(self) -> None:
        """The worker is gone, and every program with it."""
        if self._socket is None or self._ready is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        ready, self._socket, self._ready = self._ready, None, None
        if not ready.done():
            ready.set_exception(HeadwayError("the sandbox's worker process could not start; its error is in the log"))
        for confined in self._running.values():
            confined.exited.set_result((None, 0.0))
        self._running.clear()


def _spawn(its: socket.socket, command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "headway.sandbox.worker", str(its.fileno()), *command],
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
    )


async def _talk(control: socket.socket, given: dict[str, Any], limit: int) -> dict[str, Any] | None:
    """Tell a program's process what to run, and wait for what came of it; None when it ended without a word."""
    reader, writer = await asyncio.open_unix_connection(sock=control)
    try:
        data = json.dumps(given).encode()
        writer.write(len(data).to_bytes(LENGTH, "little") + data)
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(LENGTH), "little")
        if size > 8 * limit + (1 << 16):  # JSON may write a character as six
            return {"stopped": f"what it returned has more than {limit} bytes"}
        data = await reader.readexactly(size)
        return _read(data) if size < LARGE else await asyncio.to_thread(_read, data)
    except (asyncio.IncompleteReadError, OSError):
        return None
    finally:
        writer.close()


def _read(data: bytes) -> dict[str, Any] | None:
    try:
        return _outcome(json.loads(data))
    except (ValueError, RecursionError):
        return None


def _outcome(given: Any) -> dict[str, Any] | None:
    """What a program's process says, which is not trusted: one of three words with a text, and the CPU time it used."""
    match given:
        case {"cpu": float(cpu), **rest}:
            return {**(_outcome(rest) or {"stopped": "it ended without a result"}), "cpu": cpu}
        case {"returned": str(text)}:
            return _returned(text)
        case {"raised": str(text)}:
            return {"raised": text}
        case {"stopped": str(text)}:
            return {"stopped": text}
    return None


def _returned(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json_text(value)
    except (RecursionError, InvalidInput):
        return {"stopped": "what it returned is nested too deeply"}
    except ValueError:
        return {"stopped": "what it returned is not JSON"}
    return {"returned": value}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
