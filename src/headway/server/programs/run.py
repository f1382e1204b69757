"""One run of a program: its state, its messages, its end. Used on the event loop only."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput
from headway.sandbox.limits import json_text
from headway.server.keys import Tenant
from headway.server.programs.output import ProgramOutput
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.server.programs.programs import Programs

WAITING = 256  # messages to a program, or of one topic, that it has not taken


class Messages:
    """Values for a program that it has not taken: at most 256, and a number of bytes of JSON.

    They are kept as JSON: the objects of many small lists take twenty times the room of their text.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._texts: deque[str] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def offer(self, value: Any) -> bool:
        """Add a value if there is room for it."""
        return self._offer(json_text(value))

    def _offer(self, text: str) -> bool:
        if not self._closed and self._texts and (len(self._texts) >= WAITING or self._bytes + len(text) > self._limit):
            return False
        self._texts.append(text)
        self._bytes += len(text)
        self._notify()
        return True

    async def put(self, value: Any) -> None:
        """Add a value once there is room for it."""
        await self.put_text(json_text(value))

    async def put_text(self, text: str) -> None:
        """The same for a value that is JSON already."""
        while not self._offer(text):
            await self._changed.wait()

    async def get(self) -> Any:
        """The oldest value, once there is one."""
        while not self._texts:
            await self._changed.wait()
        text = self._texts.popleft()
        self._bytes -= len(text)
        self._notify()
        return json.loads(text)

    def close(self) -> None:
        """Nobody takes any more; whoever waits for room goes on."""
        self._closed = True
        self._texts.clear()
        self._notify()

    def _notify(self) -> None:
        """Wake everyone who waits, now; who waits later waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


class Run:
    """A program that runs, or has run."""

    def __init__(
        self,
        programs: Programs,
        tenant: Tenant,
        settings: ServerSettings,
        granted: float,
        *,
        name: str | None = None,
        model: str | None = None,
    ) -> None:
        self.id = f"program-{secrets.token_hex(8)}"
        self.programs, self.tenant, self.name = programs, tenant, name
        self.model = model  # beside which it runs; None: the server's first
        self.status = "running"  # returned, raised or stopped at the end
        self.created, self._began = int(time.time()), time.monotonic()
        self.granted = granted  # seconds of CPU time that it may use; 0 once they are charged
        self.seconds = self.cpu = 0.0
        self.value: Any = None
        self.error: str | None = None
        self.output = ProgramOutput(settings.max_program_output)
        self._most_bytes, self._most_topics = settings.max_program_output, settings.max_topics
        self.inbox = Messages(self._most_bytes)
        self.topics: dict[str, Messages] = {}
        self._publishing = 0  # bytes of its messages that wait for subscribers
        self.why: str | None = None  # it is to stop, and why
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.status == "running"

    @property
    def elapsed(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began

    def stop(self, why: str) -> None:
        """End it at once."""
        if self.is_running and self.why is None:
            self.why = why
            self.stopping.set()

    def about(self) -> dict[str, Any]:
        """What its key may know of it."""
        seconds = self.elapsed if self.is_running else self.seconds
        return {
            "id": self.id,
            "object": "program",
            "name": self.name,
            "model": self.model,
            "status": self.status,
            "created_at": self.created,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(self.cpu, 3),
            "value": self.value,
            "error": self.error,
        }

    # -- its session's verbs -----------------------------------------------------------------------------------------

    def subscribe(self, topic: str) -> None:
        """Receive what others publish under a topic from now on."""
        if topic not in self.topics and len(self.topics) >= self._most_topics:
            raise InvalidInput(f"this program has {len(self.topics)} topics; max_topics is {self._most_topics}")
        self.topics.setdefault(topic, Messages(self._most_bytes))

    def unsubscribe(self, topic: str) -> None:
        """Whoever waits to publish goes on."""
        if (messages := self.topics.pop(topic, None)) is not None:
            messages.close()

    async def publish(self, topic: str, value: Any) -> int:
        """Give a value to the subscribers of a topic once each has room for it; how many there are."""
        text, most = json_text(value), self._most_bytes
        if len(text) > most:
            raise InvalidInput(f"the message has {len(text)} bytes of JSON; max_program_output is {most}")
        if self._publishing + len(text) > most:
            raise InvalidInput(
                f"{self._publishing} bytes of messages of this program wait for subscribers, and with {len(text)} more "
                f"they would exceed max_program_output, which is {most}; await publish before the next"
            )
        queues = self.programs.subscribers(self.tenant, topic)
        self._publishing += len(text)
        try:
            await asyncio.gather(*(queue.put_text(text) for queue in queues))
        finally:
            self._publishing -= len(text)
        return len(queues)

    async def finish(self, outcome: dict[str, Any], cpu: float) -> None:
        """It has ended: {"returned": value}, {"raised": traceback} or {"stopped": why}."""
        for topic in list(self.topics):
            self.unsubscribe(topic)
        self.seconds, self.cpu = self.elapsed, cpu
        ((status, value),) = outcome.items()
        if status == "returned":
            self.value = value
        else:
            self.error = value
        await self.output.release()
        self.status = status
        text, told = (json_text(value), {}) if status == "returned" else (None, {"error": value})
        seconds, used = round(self.seconds, 3), round(cpu, 3)
        await self.output.add("end", text, status=status, **told, seconds=seconds, cpu_seconds=used)
