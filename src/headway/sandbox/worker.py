"""The worker: a process that starts each program in a child of its own, and tells the server how it ended.

The server sends lines of JSON: {"start": n} with two sockets, the program's session and its control; {"kill": n} ends
it at once. The worker answers {"ended": n, "status", "cpu"}. It has one thread, so that forking is safe, and ends with
the server.

    python -m headway.sandbox.worker FD wasm FILE        a child runs the guest
    python -m headway.sandbox.worker FD process JSON     a child executes this command
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.sandbox.limits import ProgramLimits, receive_frame, send_json

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
HIGH = 64  # file descriptors out of the way
NICE = 5  # the engine comes first
GRACE = 5  # seconds of CPU time beyond a program's limit after which the kernel ends it
Run = Callable[[socket.socket, socket.socket], None]


class SandboxWorker:
    """The children of one server."""

    def __init__(self, server: socket.socket, run: Run) -> None:
        self._server, self._run = server, run
        self._children: dict[int, int] = {}  # a program's number by its process
        self._wake, self._woken = os.pipe()
        self._line = b""  # what has come of the next message
        self._sockets: list[int] = []  # that have come, two for each program to start

    def serve(self) -> None:
        """Until the server is gone."""
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd == self._wake:
                        os.read(self._wake, 4096)
                        self._reap()
                    elif not self._take():
                        return
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)

    def _take(self) -> bool:
        """What the server has sent; False at its end."""
        try:
            data, fds, _, _ = socket.recv_fds(self._server, 4096, 64)
        except ConnectionError:
            return False
        *lines, self._line = (self._line + data).split(b"\n")
        self._sockets += fds
        for line in lines:
            match json.loads(line):
                case {"start": number}:
                    self._start(number)
                case {"kill": number}:
                    for pid in [pid for pid, one in self._children.items() if one == number]:
                        os.kill(pid, signal.SIGKILL)
        return bool(data)

    def _start(self, number: int) -> None:
        session, control = (socket.socket(fileno=self._sockets.pop(0)) for _ in range(2))
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(own, session, control)
        self._children[pid] = number
        session.close()
        control.close()

    def _become(self, worker: int, session: socket.socket, control: socket.socket) -> None:
        """In the child: run one program, and nothing after it."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != worker:  # it was gone before
                os._exit(1)
            self._server.close()
            for other in self._sockets:
                os.close(other)
            self._run(session, control)
        except BaseException as error:
            with suppress(OSError):
                send_json(control, {"stopped": f"the sandbox failed: {type(error).__name__}: {error}"})
        finally:
            os._exit(0)

    def _reap(self) -> None:
        while self._children:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            number, cpu = self._children.pop(pid), used.ru_utime + used.ru_stime
            message = {"ended": number, "status": os.waitstatus_to_exitcode(status), "cpu": round(cpu, 3)}
            self._server.sendall(json.dumps(message).encode() + b"\n")


def prctl(option: int, value: int) -> None:
    """A setting of this process that Linux has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def received(control: socket.socket) -> dict[str, Any]:
    """What the server wants run."""
    frame = receive_frame(control)
    if frame is None:
        os._exit(0)
    return json.loads(frame)


def limit_process(limits: ProgramLimits, grace: int = GRACE) -> None:
    """The kernel's own limits, behind those of the sandbox: CPU time, no cores, no new privileges, and
    the engine comes first."""
    cpu = math.ceil(limits.cpu) + grace
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def wasm_runner(path: str) -> Run:
    """Runs guests; the machine code is mapped once, for all of them."""
    from wasmtime.component import Component

    from headway.sandbox.artifact import wasm_engine
    from headway.sandbox.wasm import Guest

    engine = wasm_engine()
    component = Component.deserialize_file(engine, path)
    gc.collect()
    gc.freeze()

    def run(session: socket.socket, control: socket.socket) -> None:
        given = received(control)
        limits = ProgramLimits(**given["limits"])
        limit_process(limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        ended = Guest(engine, component, session, limits).run(given["source"], json.dumps(given["args"]))
        send_json(control, ended)

    return run


def process_runner(command: list[str]) -> Run:
    """Executes a command that finds the two sockets under the numbers 3 and 4."""

    def run(session: socket.socket, control: socket.socket) -> None:
        high = [fcntl.fcntl(s.fileno(), fcntl.F_DUPFD, HIGH) for s in (session, control)]
        for fd, place in zip(high, (3, 4), strict=True):
            os.dup2(fd, place, inheritable=True)
        os.closerange(5, 256)
        os.execvp(command[0], command)

    return run


def main() -> None:
    """Of the worker's process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when it ends
        signal.signal(number, signal.SIG_IGN)
    fd, kind, what = sys.argv[1:]
    server = socket.socket(fileno=int(fd))
    run = wasm_runner(what) if kind == "wasm" else process_runner(json.loads(what))
    server.sendall(b'{"ready": true}\n')
    SandboxWorker(server, run).serve()


if __name__ == "__main__":
    main()
