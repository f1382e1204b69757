"""What routes need, at `request.app.state.serving`: the engine, the tenants, admission, and the server's state.

It lives on the event loop and nowhere else, so it has no lock. It never touches a request's body or an answer.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from headway.server import access_log as logs
from headway.server.auth import ANYONE, Keys, Tenant
from headway.server.errors import ApiError
from headway.server.metrics import Metrics
from headway.server.settings import Settings
from headway.server.threads import Threads

if TYPE_CHECKING:
    from headway.program.engine import Engine, EngineStats
    from headway.program.events import EventStream

MINUTE = 60.0
READERS = WRITERS = 2  # threads; more would only wait for each other and keep the event loop waiting
STEPS = 32  # whose times are kept for those who watch


class Serving:
    """One server's state: loading, ready, draining, stuck (a step of the engine does not end), dead (the engine's
    worker stopped) or failed (it never loaded)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = None if settings.key_file is None else Keys.read(settings.key_file)
        self.model_name = (*settings.served_names, settings.public_name)[0]
        self.loaded_at: int | None = None  # as time.time() says
        self.failure: BaseException | None = None
        self.draining = False
        self.loader: threading.Thread | None = None
        self.ends: set[Callable[[ApiError], None]] = set()  # of the requests under way; each ends one
        self.metrics = Metrics(settings.metrics_style, self.model_name, self._stats)
        self.reading, self.writing = Threads("read", READERS), Threads("write", WRITERS)
        self._engine: Engine | None = None
        self._events: EventStream | None = None
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._batch = 0
        self._all = _Load()
        self._loads: dict[str, _Load] = {}

    # -- the engine ------------------------------------------------------------------------------------------------

    def loaded(self, engine: Engine) -> None:
        """The engine is there."""
        self._engine, self.loaded_at = engine, int(time.time())
        self._events = engine.events(STEPS)

    @property
    def state(self) -> str:
        if self.failure is not None:
            return "failed"
        if self._engine is None:
            return "draining" if self.draining else "loading"
        if not self._engine.alive:
            return "dead"
        if self.draining:
            return "draining"
        return "stuck" if self.hangs else "ready"

    @property
    def hangs(self) -> bool:
        """Whether the engine's step does not end."""
        return self.step_seconds > self.settings.step_timeout

    @property
    def step_seconds(self) -> float:
        """How long the engine's step is on its way; 0 while it waits for work."""
        since = None if self._engine is None else self._engine.loop.busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def engine(self) -> Engine:
        """The engine; raises an `ApiError` (503) while it loads, and once its worker is dead."""
        state = self.state
        if self._engine is None or state == "dead":
            raise _unavailable(state, self.settings)
        return self._engine

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    def steps(self) -> dict[str, Any]:
        """The times of the latest steps in seconds, and how many passes the last one had."""
        while self._events is not None and (event := self._events.poll()) is not None:
            self._seconds.append(event.seconds)
            self._batch = event.passes
        return {"seconds": list(self._seconds), "batch": self._batch}

    def close(self) -> None:
        """Close the engine; waits for the step that runs, unless that does not end."""
        self.reading.close()
        self.writing.close()
        if self._events is not None:
            self._events.close()
        if self._engine is not None and not self.hangs:
            self._engine.close()

    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; answers carry the first."""
        return self.settings.served_names or (self.model_name,)

    def _stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()

    # -- requests --------------------------------------------------------------------------------------------------

    def tenant(self, request: Request) -> Tenant:
        """Whom a request belongs to; the walls have looked at its key already."""
        tenant = request.scope.get("state", {}).get("tenant")
        if tenant is None and self.keys is not None:  # a request that came past the walls
            raise ApiError(401, "this server needs an API key", code="invalid_api_key")
        return tenant or ANYONE

    def check_rate(self, tenant: Tenant) -> None:
        """Count a request of this minute, whatever it is for; raises a 429 where the tenant had its share."""
        with self._refusals():
            self._load(tenant).check_rate(tenant.limits.requests_per_minute)

    @contextmanager
    def counted(self, tenant: Tenant, *, tokens: int = 0) -> Iterator[None]:
        """Count a request in while something is done for it, also what computes no token: reading, counting, spelling.

        Raises as `admit` does. Leave it before `admit`: no other request can come between the two.
        """
        own = self._load(tenant)
        with self._refusals():
            self._check(tenant, own, tokens)
        for load in (self._all, own):
            load.add(tokens)
        try:
            yield
        finally:
            for load in (self._all, own):
                load.remove(tokens)

    @asynccontextmanager
    async def admit(self, tenant: Tenant, *, tokens: int) -> AsyncIterator[Ticket]:
        """Count a request in until the body ends.

        `tokens` is the most it may compute: prompt and answer, over all its choices. Raises an `ApiError`: 429 with
        Retry-After when the queue or the tenant's share of it is full, 503 while loading or draining, 400 when it
        alone is more than the queue ever takes. Tell the ticket of the prompt, of tokens and of the end.
        """
        with self.counted(tenant, tokens=tokens):
            ticket = Ticket(logs.request_id.get() or logs.new_request_id(), tenant, self.metrics)
            try:
                yield ticket
            except (asyncio.CancelledError, GeneratorExit):
                ticket.finish("abort")
                raise
            except BaseException:
                ticket.finish("error")
                raise
            finally:
                ticket.close()

    def _load(self, tenant: Tenant) -> _Load:
        return self._loads.setdefault(tenant.name, _Load())

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Count an error as a request that was not let in."""
        try:
            yield
        except ApiError as refusal:
            self.metrics.refused(str(refusal.code))
            raise

    def _check(self, tenant: Tenant, own: _Load, tokens: int) -> None:
        if (state := self.state) != "ready":
            raise _unavailable(state, self.settings)
        settings, limits = self.settings, tenant.limits
        for name, limit in (("max_queue_tokens", settings.max_queue_tokens), ("key's max_tokens", limits.max_tokens)):
            if limit is not None and tokens > limit:
                raise ApiError(
                    400,
                    f"this request may compute {tokens} tokens and the {name} is {limit}; ask for fewer with a shorter "
                    "prompt, max_tokens, n or best_of",
                    code="request_too_large",
                )
        self._all.check(settings.max_queue_requests, settings.max_queue_tokens, tokens, "the server's queue")
        own.check(limits.max_requests, limits.max_tokens, tokens, "this key's share of the queue")

    @property
    def under_way(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._all.requests


@dataclass(eq=False)
class _Load:
    """What was admitted and has not ended, and when requests of the last minute were."""

    requests: int = 0
    tokens: int = 0
    _recent: deque[float] = field(default_factory=deque)

    def check(self, max_requests: int | None, max_tokens: int | None, tokens: int, whose: str) -> None:
        if max_requests is not None and self.requests >= max_requests:
            raise _full(f"{whose} is full: {self.requests} requests of {max_requests}", "queue_full", 1)
        if max_tokens is not None and self.tokens + tokens > max_tokens:
            raise _full(
                f"{whose} is full: {self.tokens} tokens and {tokens} of this request make more than {max_tokens}",
                "queue_full",
                1,
            )

    def check_rate(self, per_minute: int | None) -> None:
        """Count a request of this minute, or refuse it."""
        if per_minute is None:
            return
        now = time.monotonic()
        while self._recent and self._recent[0] <= now - MINUTE:
            self._recent.popleft()
        if len(self._recent) >= per_minute:
            wait = math.ceil(self._recent[0] + MINUTE - now)
            raise _full(f"this key may make {per_minute} requests a minute", "rate_limit_exceeded", max(wait, 1))
        self._recent.append(now)

    def add(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens


class Ticket:
    """One admitted request, for whoever answers it to say what happened."""

    def __init__(self, request_id: str, tenant: Tenant, metrics: Metrics) -> None:
        self.request_id, self.tenant = request_id, tenant
        self._metrics, self._began = metrics, time.perf_counter()
        self._last: dict[int, float] = {}  # choice → when its latest token came
        self._prompt = self._generated = 0
        self._reason: str | None = None
        metrics.waiting.inc()

    def prompt(self, tokens: int) -> None:
        """The request has a prompt of so many tokens. Several prompts add up."""
        self._prompt += tokens
        self._metrics.prompt_tokens.inc(tokens)

    def tokens(self, count: int = 1, *, choice: int = 0) -> None:
        """So many tokens of a choice have just come."""
        now, before = time.perf_counter(), self._last.get(choice)
        if not self._last:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
        if before is None:
            self._metrics.first_token.observe(now - self._began)
        for _ in range(count if before is not None else count - 1):
            self._metrics.inter_token.observe((now - (before or now)) / count)
        self._last[choice] = now
        self._generated += count
        self._metrics.generated_tokens.inc(count)

    def finish(self, reason: str) -> None:
        """How it ended: stop, length, tool_calls; abort and error are known without you. The first one counts."""
        self._reason = self._reason or reason

    def close(self) -> None:
        metrics = self._metrics
        (metrics.running if self._last else metrics.waiting).dec()
        metrics.whole.observe(time.perf_counter() - self._began)
        metrics.prompt_size.observe(self._prompt)
        metrics.answer_size.observe(self._generated)
        metrics.finished(self._reason or "stop")


def _full(message: str, code: str, wait: int) -> ApiError:
    return ApiError(429, f"{message}; try again in {wait} s", code=code, headers={"Retry-After": str(wait)})


def _unavailable(state: str, settings: Settings) -> ApiError:
    message = {
        "loading": "the model is still loading; try again in a moment",
        "draining": "the server is shutting down and takes no new requests",
        "stuck": f"the engine's step has not ended within {settings.step_timeout:g} s; try again later",
        "failed": "the model could not be loaded; the server's log says why",
    }.get(state, "the engine has stopped; the server's log says why")
    return ApiError(503, message, code=state, headers={"Retry-After": "1"} if state == "loading" else {})
