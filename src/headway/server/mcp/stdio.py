"""MCP over the standard streams of a process: a message is a line.

A process serves many sessions. One that ends, writes what is not a message, writes a line that is too long, or says
nothing for as long as a call may take, is ended; the next session starts another one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from headway.base.config import child_environment
from headway.server import logs
from headway.server.mcp import messages
from headway.server.mcp.messages import McpError

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER")  # what a process gets of the environment
ERROR_LINES = 20  # of a process's standard error, in the log
END_SECONDS = 2.0  # for a process to end when its input does
WRITE_BYTES = 1 << 20  # that wait for a process to read them


class StdioTransport:
    """A process and the requests that wait for it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, max_bytes: int) -> None:
        self._name, self._process, self._max_bytes = name, process, max_bytes
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._ids = self._heard = 0  # ids given, and messages received
        self._why: McpError | None = None  # it ended
        self._closing = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._log_errors())]

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], env: Mapping[str, str], *, max_bytes: int
    ) -> StdioTransport:
        """Start the process of a command, in a group of its own."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=child_environment(only=PASSED_ON) | dict(env),
                limit=max_bytes,
                start_new_session=True,
            )
        except OSError as error:
            raise McpError(f"its command cannot be started: {error.strerror or type(error).__name__}") from None
        return cls(name, process, max_bytes)

    @property
    def is_alive(self) -> bool:
        return self._why is None

    async def request(self, method: str, params: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        """The result of a request."""
        if self._why is not None:
            raise self._why
        self._ids += 1
        id, heard = self._ids, self._heard
        answered = self._waiting[id] = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.request(id, method, params))
            async with asyncio.timeout(seconds):
                return messages.result_of(await answered)
        except TimeoutError:
            late = McpError(f"it did not answer within {seconds:g} s", code=408)
            if heard == self._heard:
                self._end(late)  # it hangs
            raise late from None
        finally:
            if self._waiting.pop(id, None) is not None and not answered.done() and self._why is None:
                with suppress(McpError):
                    self._send(messages.notification("notifications/cancelled", {"requestId": id}))

    async def notify(self, method: str, params: Mapping[str, Any], seconds: float) -> None:
        self._send(messages.notification(method, params))

    async def close(self) -> None:
        """End the process: its input ends, and if that does not help it is killed."""
        self._closing = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        self._end(McpError("the server is shutting down"))
        for task in self._tasks:  # a process that it started may hold its streams
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._process.wait()

    def _send(self, line: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        if self._why is not None or stdin.is_closing():
            raise self._why or McpError("its process has ended")
        if stdin.transport.get_write_buffer_size() > WRITE_BYTES:
            self._end(McpError("its process does not read what it gets"))
            raise McpError("its process does not read what it gets")
        stdin.write(line)

    async def _read(self) -> None:
        """Hand each message to the request that waits for it, until the process ends or misbehaves."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
                self._take(messages.parse(line) if line.strip() else {})
            self._end(McpError("its process has ended"))
        except ValueError:
            self._end(McpError(f"its process wrote a line of more than {self._max_bytes} bytes"))
        except McpError as error:
            self._end(error)
        except OSError:
            self._end(McpError("its process has ended"))

    def _take(self, message: Mapping[str, Any]) -> None:
        self._heard += 1
        if (answer := messages.answer_to(message)) is not None:
            self._send(answer)
        waiting = self._waiting.get(id) if isinstance(id := message.get("id"), int) else None
        if waiting is not None and "method" not in message and not waiting.done():
            waiting.set_result(message)

    async def _log_errors(self) -> None:
        """The first lines of standard error go to the log; the rest is read and forgotten."""
        stderr, lines = self._process.stderr, 0
        assert stderr is not None
        with suppress(OSError):
            while piece := await stderr.read(4096):
                for line in piece.decode("utf-8", "replace").splitlines()[: ERROR_LINES - lines]:
                    lines += 1
                    logs.info("mcp server", server=self._name, wrote=messages.shown(line))

    def _end(self, why: McpError) -> None:
        if self._why is not None:
            return
        self._why = why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(McpError(why.message, kind=why.kind, code=why.code))
                waiting.exception()  # somebody may have given up already
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not self._closing:
            logs.warn("an mcp server's process has ended", server=self._name, reason=why.message)
