"""One model of a server: its state, its engine while it is loaded, its adapters, and who uses it.

    absent ──▶ loading ──▶ ready ──▶ draining ──▶ absent

A draining model has no new users; it is closed when the last one has left. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from headway.base.dataclass import dataclass
from headway.server.adapters import ServedAdapters
from headway.server.models.sources import ModelSource
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.program.engine import Engine, EngineStats
    from headway.program.events import EventStream
    from headway.program.generation.speculation.drafter import Drafter

STEPS = 32  # latest steps whose times /stats shows
State = Literal["absent", "loading", "ready", "draining"]


@dataclass(eq=False)
class LoadedEngine:
    """An engine from its loading to its end, and how many requests and sessions use it."""

    engine: Engine
    drafter: Drafter | None
    events: EventStream
    requests: int = 0
    sessions: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    batch: int = 0

    @property
    def users(self) -> int:
        return self.requests + self.sessions

    def steps(self) -> dict[str, Any]:
        """The seconds of the latest steps, and the number of passes in the last one."""
        while (event := self.events.poll()) is not None:
            self.seconds.append(event.seconds)
            self.batch = event.passes
        return {"seconds": list(self.seconds), "batch": self.batch}


@dataclass(eq=False)
class Waiter:
    """Somebody who waits for a model; the engine is theirs when the future has it."""

    future: asyncio.Future[LoadedEngine]
    is_session: bool


class ServedModel:
    """A model under the names that clients use."""

    def __init__(self, source: ModelSource, settings: ServerSettings) -> None:
        self.source = source
        self.adapters = ServedAdapters(settings, source.adapters)
        self.state: State = "absent"
        self.loaded: LoadedEngine | None = None
        self.loaded_at: int | None = None  # a time.time() value
        self.used_at = 0.0  # a time.monotonic() value
        self.idle_timeout = settings.idle_timeout  # seconds without requests until it is unloaded
        self.bytes = 0  # of the memory that models share
        self.measured: int | None = None  # what it took the last time, where it alone decides that
        self.progress: tuple[int, int] | None = None  # layers loaded, and all of them
        self.loading_since = 0.0
        self.load_seconds: float | None = None  # that the last load took
        self.failure: BaseException | None = None  # of the last load, or what ended the engine
        self.failures = 0  # in a row
        self.retry_at = 0.0
        self.waiters: list[Waiter] = []

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_kept(self) -> bool:
        return self.source.is_kept

    @property
    def requests(self) -> int:
        return 0 if self.loaded is None else self.loaded.requests

    @property
    def may_leave(self) -> bool:
        """Whether its memory may be had for another model."""
        return self.state == "ready" and not self.is_kept and self.loaded is not None and not self.loaded.sessions

    @property
    def engine(self) -> Engine | None:
        return None if self.loaded is None else self.loaded.engine

    @property
    def shown_state(self) -> str:
        """Its state for clients: failed if it is absent because it could not be loaded."""
        return "failed" if self.state == "absent" and self.failure is not None else self.state

    @property
    def context_length(self) -> int | None:
        """The most tokens of one sequence, also before it is loaded."""
        if self.engine is not None:
            return self.engine.config.max_positions
        return None if self.source.sizes is None else self.source.sizes.context_length

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of its weights: as they are in memory, or on disk before they are loaded."""
        if self.engine is not None:
            return self.engine.info.weight_bytes
        return None if self.source.sizes is None else self.source.sizes.weight_bytes

    @property
    def step_seconds(self) -> float:
        """How long the engine's current step has been running; 0 while it is idle."""
        since = None if self.engine is None else self.engine.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def stats(self) -> EngineStats | None:
        return None if self.engine is None else self.engine.stats()

    @property
    def wait_seconds(self) -> int:
        """A guess at how long it will still load."""
        spent = time.monotonic() - self.loading_since
        if self.progress is not None and self.progress[0]:
            done, total = self.progress
            return min(60, max(1, round(spent * (total - done) / done)))
        before = self.load_seconds
        return 2 if before is None else min(60, max(1, round(before - spent)))
