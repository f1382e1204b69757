"""Python programs as processes that start at once: each is forked from one process that has imported torch.

`forked("-m", "headway.cli.main", "run", "hi")` is a command line for `subprocess`, with arguments as Python takes them.
It behaves as the program itself: standard streams, environment, folder, signals and exit status are the program's. It
has no controlling terminal: a test that types ctrl-C starts its program by `sys.executable`.

The command is this file, run as a script. It hands its streams to the fork server, which is this file too and is
started once for a run of the tests.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from typing import NamedTuple, NoReturn

IMPORTED = (
    *("torch", "headway.program.engine", "headway.server.run", "headway.server.app", "headway.cli.terminal.answer"),
    *(
        f"headway.cli.{name}"
        for name in ("bench", "chat", "doctor", "lab", "models", "pipeline", "run", "serve", "top")
    ),
)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def forked(*arguments: str) -> list[str]:
    """A command line that runs Python with these arguments: `-c code …`, `-m module …` or `script …`."""
    if not hasattr(os, "pidfd_open"):  # not on Linux
        return [sys.executable, *arguments]
    return [sys.executable, "-I", "-S", __file__, _start_server(), *arguments]


@cache
def _start_server() -> str:
    """The address of the fork server, which ends when this process does."""
    folder = tempfile.TemporaryDirectory(prefix="headway-")
    atexit.register(folder.cleanup)
    address = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, __file__, "--listen", str(listener.fileno())]
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # which torch reads once, when it is imported
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment, start_new_session=True
        )
    atexit.register(server.communicate)  # its input ends, and with it the server
    return address


# -- the command -------------------------------------------------------------------------------------------------------


def _command(address: str, arguments: list[str]) -> None:
    """Have the program started, pass signals on to it, and end as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until they are passed on
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(connection, [b"\n"], [0, 1, 2])
    connection.sendall(json.dumps(request).encode() + b"\n")
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.sendall(b"%d\n" % number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    for stream in (0, 1, 2):  # whoever reads them sees the end when the program closes them
        os.close(stream)
    status = os.waitstatus_to_exitcode(int(connection.makefile("rb").readline()))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# -- the fork server ---------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A program that runs: its process, and the connection of its command."""

    pid: int
    pidfd: int
    connection: socket.socket


def _serve(listener: socket.socket) -> list[str]:
    """Start a program for every connection. Returns in the program's process, with its arguments."""
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()  # what is imported is looked through by no program
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                os._exit(0)
            elif key.fd == listener.fileno():
                connection, _ = listener.accept()
                _, streams, _, _ = socket.recv_fds(connection, 1, 3)
                request = json.loads(connection.makefile("rb").readline())
                if (pid := os.fork()) == 0:
                    connection.close()
                    _close(selector)
                    _become(request, streams)
                    return request["arguments"]
                for stream in streams:
                    os.close(stream)
                program = Program(pid, os.pidfd_open(pid), connection)
                selector.register(program.pidfd, selectors.EVENT_READ, program)
                selector.register(connection, selectors.EVENT_READ, program)
            elif key.fd == key.data.pidfd:
                _end(key.data, selector)
            elif numbers := key.data.connection.recv(256):
                for number in numbers.split():
                    os.kill(key.data.pid, int(number))
            else:  # the command was killed
                os.kill(key.data.pid, signal.SIGKILL)
                selector.unregister(key.fileobj)


def _end(program: Program, selector: selectors.BaseSelector) -> None:
    """Tell the command how its program ended."""
    _, status = os.waitpid(program.pid, 0)
    selector.unregister(program.pidfd)
    os.close(program.pidfd)
    if program.connection in selector.get_map():
        selector.unregister(program.connection)
        program.connection.sendall(b"%d\n" % status)
    program.connection.close()


def _close(selector: selectors.BaseSelector) -> None:
    """Close what the server waits for, in a program's process."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        elif key.fd != 0:
            os.close(key.fd)
    selector.close()


def _become(request: dict, streams: list[int]) -> None:
    """Turn a fork into the program's process: its streams, its folder and its environment."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)


def _run(arguments: list[str]) -> None:
    import runpy

    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")


def _exit(status: int) -> NoReturn:
    """End as the interpreter does, but leave memory to the system: clearing what is imported takes half a second."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or it is closed
            status = status or 120
    os._exit(status)


def _status(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    if sys.argv[1] == "--listen":
        sys.path[0] = ""  # the modules beside this one are the tests'
        arguments = _serve(socket.socket(fileno=int(sys.argv[2])))
        try:
            _run(arguments)
        except SystemExit as ended:
            _exit(_status(ended))
        _exit(0)  # other exceptions are the interpreter's
    else:
        _command(sys.argv[1], sys.argv[2:])
