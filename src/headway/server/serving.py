"""What routes use, at `request.app.state.serving`: the engine, the tenants, admission, and the server's state.

Used only on the event loop, so it needs no lock. It never sees the contents of a request or a response.
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

from headway.server import logs
from headway.server.adapters import ServedAdapters
from headway.server.errors import ApiError
from headway.server.keys import ANYONE, Keys, Tenant
from headway.server.metrics import Metrics
from headway.server.sessions.registry import Sessions
from headway.server.settings import ServerSettings
from headway.server.threads import WorkerThreads

if TYPE_CHECKING:
    from headway.program.engine import Engine, EngineStats
    from headway.program.events import EventStream
    from headway.program.generation.speculation.drafter import Drafter

MINUTE = 60.0
READERS = WRITERS = 2  # threads; more would only contend for the GIL with each other and the event loop
STEPS = 32  # latest steps whose times /stats shows


class Serving:
    """One server's state: loading, ready, draining, stuck (an engine step takes longer than `step_timeout`), dead (the
    engine's worker stopped) or failed (the engine could not be loaded)."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.keys = None if settings.key_file is None else Keys.read(settings.key_file)
        self.model_name = (*settings.served_names, settings.public_name)[0]
        self.loaded_at: int | None = None  # a time.time() value
        self.failure: BaseException | None = None
        self.draining = False
        self.loader: threading.Thread | None = None
        self.cancels: set[Callable[[ApiError], None]] = set()  # one for each request in flight
        self.adapters = ServedAdapters(settings)
        self.metrics = Metrics(settings.metrics_style, self.model_name, self._stats)
        self.readers, self.writers = WorkerThreads("read", READERS), WorkerThreads("write", WRITERS)
        self.drafter: Drafter | None = None  # of every request
        self.sessions = Sessions(self)
        self._engine: Engine | None = None
        self._events: EventStream | None = None
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._batch = 0
        self._admitted: dict[AdmittedRequest, None] = {}  # in flight, oldest first
        self._total_load = _QueueLoad()
        self._tenant_loads: dict[str, _QueueLoad] = {}

    # -- the engine ------------------------------------------------------------------------------------------------

    def set_engine(self, engine: Engine) -> None:
        """Use this engine, which has just been loaded."""
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
        return "stuck" if self.is_stuck else "ready"

    @property
    def is_stuck(self) -> bool:
        """Whether the engine's current step takes longer than `step_timeout`."""
        return self.step_seconds > self.settings.step_timeout

    @property
    def step_seconds(self) -> float:
        """How long the engine's current step has been running; 0 while it is idle."""
        since = None if self._engine is None else self._engine.busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def engine(self) -> Engine:
        """The engine; raises an `ApiError` (503) while it is loading and after its worker has died."""
        state = self.state
        if self._engine is None or state == "dead":
            raise _unavailable(state, self.settings)
        return self._engine

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    def steps(self) -> dict[str, Any]:
        """The seconds of the latest steps, and the number of passes in the last one."""
        while self._events is not None and (event := self._events.poll()) is not None:
            self._seconds.append(event.seconds)
            self._batch = event.passes
        return {"seconds": list(self._seconds), "batch": self._batch}

    def close(self) -> None:
        """Close the engine; waits for the current step unless the engine is stuck."""
        self.readers.close()
        self.writers.close()
        if self._events is not None:
            self._events.close()
        if self._engine is not None and not self.is_stuck:
            self._engine.close()

    def model_names(self) -> tuple[str, ...]:
        """The names clients may use for the model; responses carry the first."""
        return self.settings.served_names or (self.model_name,)

    def _stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()

    # -- requests --------------------------------------------------------------------------------------------------

    def tenant(self, request: Request) -> Tenant:
        """The tenant of a request; the middleware has already checked its key."""
        tenant = request.scope.get("state", {}).get("tenant")
        if tenant is None and self.keys is not None:  # a request that bypassed the middleware
            raise ApiError(401, "this server requires an API key", code="invalid_api_key")
        return tenant or ANYONE

    def check_rate(self, tenant: Tenant) -> None:
        """Count a request of any kind against the tenant's rate limit; raises a 429 when it is exceeded."""
        with self._count_rejections():
            self._load(tenant).check_rate(tenant.limits.requests_per_minute)

    @contextmanager
    def queue_slot(self, tenant: Tenant, *, tokens: int = 0) -> Iterator[None]:
        """Hold a place in the queue while working on a request, including work that computes no tokens.

        Raises as `admit` does. Leave it before `admit`; no other request can take the place in between.
        """
        own = self._load(tenant)
        with self._count_rejections():
            self._check(tenant, own, tokens)
        for load in (self._total_load, own):
            load.add(tokens)
        try:
            yield
        finally:
            for load in (self._total_load, own):
                load.remove(tokens)

    @asynccontextmanager
    async def admit(self, tenant: Tenant, *, tokens: int, model: str | None = None) -> AsyncIterator[AdmittedRequest]:
        """Admit a request to the queue until the `async with` block ends.

        `tokens` is the most it may compute: its prompt and max_tokens, over all its choices. Raises an `ApiError`: 429
        with Retry-After when the queue or the tenant's share of it is full, 503 while loading or draining, 400 when the
        request alone exceeds the queue's limit. Report the prompt, the tokens and the finish reason to the result.
        `model` is the name for the log; by default that of the engine's model.
        """
        with self.queue_slot(tenant, tokens=tokens):
            id = logs.request_id.get() or logs.new_request_id()
            admitted = AdmittedRequest(id, tenant, self.metrics, model or self.model_name)
            self._admitted[admitted] = None
            try:
                yield admitted
            except (asyncio.CancelledError, GeneratorExit):
                admitted.finish("abort")
                raise
            except BaseException:
                admitted.finish("error")
                raise
            finally:
                del self._admitted[admitted]
                admitted.close()

    def admitted(self, tenant: Tenant) -> list[AdmittedRequest]:
        """The requests of a tenant that are in flight, oldest first."""
        return [one for one in self._admitted if one.tenant is tenant or one.tenant.name == tenant.name]

    def _load(self, tenant: Tenant) -> _QueueLoad:
        return self._tenant_loads.setdefault(tenant.name, _QueueLoad())

    @contextmanager
    def _count_rejections(self) -> Iterator[None]:
        """Count an error as a request that was not admitted."""
        try:
            yield
        except ApiError as error:
            self.metrics.rejected(str(error.code))
            raise

    def _check(self, tenant: Tenant, own: _QueueLoad, tokens: int) -> None:
        if (state := self.state) != "ready":
            raise _unavailable(state, self.settings)
        settings, limits = self.settings, tenant.limits
        for name, limit in (
            ("max_queue_tokens", settings.max_queue_tokens),
            ("this key's max_tokens", limits.max_tokens),
        ):
            if limit is not None and tokens > limit:
                raise ApiError(
                    400,
                    f"this request may compute {tokens} tokens and {name} is {limit}; use a shorter prompt, or "
                    "a smaller max_tokens, n or best_of",
                    code="request_too_large",
                )
        self._total_load.check(settings.max_queue_requests, settings.max_queue_tokens, tokens, "the server's queue")
        own.check(limits.max_requests, limits.max_tokens, tokens, "this key's share of the queue")

    @property
    def in_flight(self) -> int:
        """The number of requests that were admitted and have not finished."""
        return self._total_load.requests


@dataclass(eq=False)
class _QueueLoad:
    """The admitted requests that have not finished, and the times of those of the last minute."""

    requests: int = 0
    tokens: int = 0
    _recent: deque[float] = field(default_factory=deque)

    def check(self, max_requests: int | None, max_tokens: int | None, tokens: int, whose: str) -> None:
        if max_requests is not None and self.requests >= max_requests:
            raise _queue_full(f"{whose} is full: {self.requests} of {max_requests} requests", "queue_full", 1)
        if max_tokens is not None and self.tokens + tokens > max_tokens:
            raise _queue_full(
                f"{whose} is full: {self.tokens} tokens plus {tokens} of this request exceed {max_tokens}",
                "queue_full",
                1,
            )

    def check_rate(self, per_minute: int | None) -> None:
        """Count a request, or raise when there were `per_minute` in the last minute."""
        if per_minute is None:
            return
        now = time.monotonic()
        while self._recent and self._recent[0] <= now - MINUTE:
            self._recent.popleft()
        if len(self._recent) >= per_minute:
            wait = math.ceil(self._recent[0] + MINUTE - now)
            raise _queue_full(
                f"this key is limited to {per_minute} requests per minute", "rate_limit_exceeded", max(wait, 1)
            )
        self._recent.append(now)

    def add(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens


class AdmittedRequest:
    """One admitted request: reports its progress to the metrics, and what it came to also to the access log."""

    def __init__(self, request_id: str, tenant: Tenant, metrics: Metrics, model: str) -> None:
        self.request_id, self.tenant, self._model = request_id, tenant, model
        self._log_values = logs.request_values.get()
        self._first_token: float | None = None
        self._metrics, self._start = metrics, time.perf_counter()
        self._token_times: dict[int, float] = {}  # choice → when its latest token came
        self._prompt = self._generated = 0
        self._reason: str | None = None
        metrics.waiting.inc()

    def prompt(self, tokens: int) -> None:
        """Count the tokens of a prompt; several prompts add up."""
        self._prompt += tokens
        self._metrics.prompt_tokens.inc(tokens)

    def tokens(self, count: int = 1, *, choice: int = 0) -> None:
        """Count tokens of a choice that were just generated."""
        now, before = time.perf_counter(), self._token_times.get(choice)
        if not self._token_times:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
        if before is None:
            self._first_token = self._first_token or now - self._start
            self._metrics.first_token.observe(now - self._start)
        for _ in range(count if before is not None else count - 1):
            self._metrics.inter_token.observe((now - (before or now)) / count)
        self._token_times[choice] = now
        self._generated += count
        self._metrics.generated_tokens.inc(count)

    def cached(self, tokens: int) -> None:
        """Count how many of the prompt's tokens were in the prefix cache."""
        self._metrics.cache_queries.inc(self._prompt)
        self._metrics.cache_hits.inc(tokens)

    def progress(self) -> dict[str, Any]:
        """How far it is, for its own key: nothing of what it says."""
        return {
            "request_id": self.request_id,
            "model": self._model,
            "is_processing": bool(self._token_times),  # it has tokens, and is not waiting for its prompt
            "prompt_tokens": self._prompt,
            "generated_tokens": self._generated,
            "seconds": round(time.perf_counter() - self._start, 3),
        }

    def finish(self, reason: str) -> None:
        """Set the finish reason: stop, length or tool_calls (`admit` sets abort and error). The first one counts."""
        self._reason = self._reason or reason

    def close(self) -> None:
        metrics = self._metrics
        (metrics.running if self._token_times else metrics.waiting).dec()
        metrics.duration.observe(time.perf_counter() - self._start)
        metrics.prompt_size.observe(self._prompt)
        metrics.generated_size.observe(self._generated)
        metrics.finished(self._reason or "stop")
        if self._log_values is not None:
            self._log_values |= {"model": self._model, "prompt_tokens": self._prompt}
            if self._first_token is not None:
                self._log_values |= {
                    "tokens": self._generated,
                    "finish": self._reason or "stop",
                    "first_token_ms": round(self._first_token * 1e3, 1),
                }


def _queue_full(message: str, code: str, wait: int) -> ApiError:
    return ApiError(429, f"{message}; try again in {wait} s", code=code, headers={"Retry-After": str(wait)})


def _unavailable(state: str, settings: ServerSettings) -> ApiError:
    message = {
        "loading": "the model is still loading; try again in a moment",
        "draining": "the server is shutting down and accepts no new requests",
        "stuck": f"the engine's step has not finished within {settings.step_timeout:g} s; try again later",
        "failed": "the model could not be loaded; see the server's log",
    }.get(state, "the engine has stopped; see the server's log")
    return ApiError(503, message, code=state, headers={"Retry-After": "1"} if state == "loading" else {})
