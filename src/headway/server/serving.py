"""What routes use, at `request.app.state.serving`: the models, the tenants, admission, and the server's state.

Used only on the event loop, so it needs no lock. It never sees the contents of a request or a response.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from headway.base.dataclass import dataclass
from headway.server import logs
from headway.server.errors import ApiError
from headway.server.keys import ANYONE, ApiKeys, Tenant
from headway.server.metrics import Metrics, ModelMetrics
from headway.server.models import ModelLease, ModelSources, ServedModel, ServedModels
from headway.server.sessions.registry import Sessions
from headway.server.settings import ServerSettings
from headway.server.telemetry import CANCELLED, Inference, Traces, error_code, request_trace
from headway.server.threads import LoaderThreads, WorkerThreads

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.server.programs.programs import Programs


MINUTE = 60.0
READERS = WRITERS = 2  # threads; more would only contend for the GIL with each other and the event loop
SHOWN_MODELS = 20  # in a line of the log


class Serving:
    """One server's state: loading, ready, draining, stuck (an engine step takes longer than `step_timeout`), dead (the
    engine's worker stopped) or failed (the engine could not be loaded).

    With several models it loads until the kept ones are there, and never fails or dies: each model has a state of its
    own.
    """

    def __init__(self, settings: ServerSettings, sources: ModelSources) -> None:
        self.settings = settings
        self.keys = None if settings.key_file is None else ApiKeys.read(settings.key_file)
        self.failure: BaseException | None = None
        self.draining = False
        self.started_at: int | None = None  # when the models that are kept were loaded, a time.time() value
        self.cancels: set[Callable[[ApiError], None]] = set()  # one for each request in flight
        self.readers, self.writers = WorkerThreads("read", READERS), WorkerThreads("write", WRITERS)
        self.loaders = LoaderThreads()
        self.models = ServedModels(self, sources)
        self.metrics = Metrics(settings.metrics_style, self.models)
        self.traces = None if settings.otel is None else Traces(settings)
        self.sessions = Sessions(self)
        self.programs: Programs | None = None  # uploaded ones, where they are allowed
        self.body_bytes = 0  # of the bodies of all requests in flight
        self.last_body_at = 0.0  # when the last one with a body ended, a time.monotonic() value
        self._admitted: dict[AdmittedRequest, None] = {}  # in flight, oldest first
        self._total_load = _QueueLoad()
        self._tenant_loads: dict[str, _QueueLoad] = {}

    @classmethod
    async def of_engine(cls, settings: ServerSettings, engine: Engine) -> Serving:
        """One that is ready with an engine that was opened elsewhere, without an application."""
        serving = cls(settings, ModelSources.single(settings, lambda: engine, None))
        await serving.start()
        return serving

    # -- the models ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return "stuck" if (state := self._state) == "ready" and self.stuck_models() else state

    @property
    def _state(self) -> str:
        """The same, whatever a step takes."""
        if self.failure is not None:
            return "failed"
        only = self.models.default if self.models.is_single else None
        if only is not None and only.engine is not None and not only.engine.alive:
            return "dead"
        if self.draining:
            return "draining"
        return "loading" if self.started_at is None else "ready"

    def stuck_models(self) -> list[ServedModel]:
        """The models whose engine's current step takes longer than `step_timeout`."""
        return [one for one in self.models.all() if self.is_stuck(one)]

    def is_stuck(self, model: ServedModel) -> bool:
        return model.step_seconds > self.settings.step_timeout

    @property
    def default_model(self) -> ServedModel:
        """The model that requests without a name are for; raises an `ApiError` (400) where there is none."""
        if (model := self.models.default) is None:
            raise ApiError(
                400,
                "this server has several models and no default one; name a model",
                param="model",
                code="missing_field",
            )
        return model

    @property
    def engine(self) -> Engine:
        """The default model's engine; raises an `ApiError` (503) unless it is loaded and alive."""
        model = self.default_model
        if model.engine is None or not model.engine.alive:
            state = self.state if self.models.is_single else "loading" if model.state == "loading" else "absent"
            raise self.unavailable(state)
        return model.engine

    @property
    def model_name(self) -> str:
        """The default model's name, or an empty text where there is none."""
        return "" if self.models.default is None else self.models.default.name

    async def start(self) -> None:
        """Load the models that are kept; raises if the only one cannot be loaded."""
        await self.models.load_kept()
        self.started_at = int(time.time())
        if not self.models.is_single:  # the only one has said so itself
            logs.info("ready", models=[model.name for model in self.models.all()][:SHOWN_MODELS])

    def check_started(self) -> None:
        """Raise a 503 while the models that are kept load, and when the only one has failed."""
        if (state := self.state) in ("loading", "failed", "dead"):
            raise self.unavailable(state)

    async def close(self) -> None:
        """Close all engines; waits for their current steps unless they are stuck."""
        await self.models.close()
        self.readers.close()
        self.writers.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    def unavailable(self, state: str) -> ApiError:
        """The error of a server, or a model, in this state."""
        return _unavailable(state, self.settings)

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
    def queue_slot(self, tenant: Tenant, *, tokens: int = 0, model: ServedModel | None = None) -> Iterator[None]:
        """Hold a place in the queue while working on a request, including work that computes no tokens.

        Raises as `admit` does. Leave it before `admit`; no other request can take the place in between.
        """
        own = self._load(tenant)
        with self._count_rejections():
            self._check(tenant, own, tokens, model)
        for load in (self._total_load, own):
            load.add(tokens)
        try:
            yield
        finally:
            for load in (self._total_load, own):
                load.remove(tokens)

    @asynccontextmanager
    async def admit(
        self, tenant: Tenant, *, tokens: int, lease: ModelLease | None = None, model: str | None = None
    ) -> AsyncIterator[AdmittedRequest]:
        """Admit a request to the queue until the `async with` block ends.

        `tokens` is the most it may compute: its prompt and max_tokens, over all its choices. Raises an `ApiError`: 429
        with Retry-After when the queue or the tenant's share of it is full, 503 while loading or draining, 400 when the
        request alone exceeds the queue's limit. Report the prompt, the tokens and the finish reason to the result.
        `lease` is what it computes with, and is held; a model of another kind has a name only.
        """
        served, model = None if lease is None else lease.model, model or self.model_name
        with self.queue_slot(tenant, tokens=tokens, model=served), nullcontext() if lease is None else lease.again():
            id = logs.request_id.get() or logs.new_request_id()
            metrics = self.metrics.of(model if served is None else served.name)
            admitted = AdmittedRequest(id, tenant, metrics, model if lease is None else lease.name)
            admitted.context_length = None if lease is None else lease.engine.config.max_positions
            self._admitted[admitted] = None
            try:
                yield admitted
            except (asyncio.CancelledError, GeneratorExit):
                admitted.abort()
                raise
            except BaseException as error:
                admitted.fail(error)
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

    def _check(self, tenant: Tenant, own: _QueueLoad, tokens: int, model: ServedModel | None) -> None:
        only = self.models.default if self.models.is_single else model
        state = "stuck" if (state := self._state) == "ready" and only is not None and self.is_stuck(only) else state
        if state != "ready":
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

    def let_go_of_body(self, size: int) -> None:
        """Count the end of a request with a body of this size."""
        if size:
            self.body_bytes -= size
            self.last_body_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way for a client."""
        return bool(self.cancels) or self.in_flight > 0

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
    """One admitted request: reports its progress to the metrics, and what it came to also to the access log and to
    its trace."""

    def __init__(self, request_id: str, tenant: Tenant, metrics: ModelMetrics, model: str) -> None:
        self.request_id, self.tenant, self.model = request_id, tenant, model
        self.context_length: int | None = None
        self._log_values, self._trace = logs.request_values.get(), request_trace.get()
        self._metrics, self._start = metrics, time.perf_counter()
        self._first_token: float | None = None  # when it came
        self._token_times: dict[int, float] = {}  # choice → when its latest token came
        self._prompt = self._generated = 0
        self._cached = 0
        self._queue_seconds: float | None = None
        self._reasons: list[str] = []  # of its choices
        self._error: str | None = None
        self._ended: float | None = None
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
            self._first_token = self._first_token or now
            self._metrics.first_token.observe(now - self._start)
        for _ in range(count if before is not None else count - 1):
            self._metrics.inter_token.observe((now - (before or now)) / count)
        self._token_times[choice] = now
        self._generated += count
        self._metrics.generated_tokens.inc(count)

    def computed(self, *, cached: int, queue_seconds: float | None) -> None:
        """Count how many of the prompt's tokens were in the prefix cache; and how long it waited for its first step."""
        self._cached, self._queue_seconds = cached, queue_seconds
        self._metrics.cache_queries.inc(self._prompt)
        self._metrics.cache_hits.inc(cached)

    def progress(self) -> dict[str, Any]:
        """How far it is, for its own key: nothing of what it says."""
        return {
            "request_id": self.request_id,
            "n_ctx": self.context_length,
            "model": self.model,
            "is_processing": bool(self._token_times),  # it has tokens, and is not waiting for its prompt
            "prompt_tokens": self._prompt,
            "generated_tokens": self._generated,
            "seconds": round(time.perf_counter() - self._start, 3),
        }

    def finish(self, reason: str) -> None:
        """Add the finish reason of a choice: stop, length or tool_calls. The first one counts for the request."""
        self._reasons.append(reason)

    def fail(self, error: BaseException) -> None:
        """It ends with an error."""
        self._error = self._error or error_code(error)
        self._reasons.append("error")

    def abort(self) -> None:
        """It ends because its client left, its time is up, or the server stops."""
        self._error = self._error or CANCELLED
        self._reasons.append("abort")

    @property
    def reason(self) -> str:
        return self._reasons[0] if self._reasons else "stop"

    def figures(self) -> dict[str, Any]:
        """What it came to, for the log."""
        first, queued, ended = self._first_token, self._queue_seconds, self._ended or time.perf_counter()
        return {
            "model": self.model,
            "prompt_tokens": self._prompt,
            "cached_tokens": self._cached,
            "tokens": self._generated,
            "finish": self.reason,
            **({} if queued is None else {"queue_ms": round(queued * 1e3, 1)}),
            **({} if first is None else {"first_token_ms": round((first - self._start) * 1e3, 1)}),
            "compute_ms": round((ended - self._start) * 1e3, 1),
        }

    def close(self) -> None:
        metrics = self._metrics
        (metrics.running if self._token_times else metrics.waiting).dec()
        self._ended = time.perf_counter()
        metrics.duration.observe(self._ended - self._start)
        metrics.prompt_size.observe(self._prompt)
        metrics.generated_size.observe(self._generated)
        metrics.finished(self.reason)
        if self._log_values is not None:
            self._log_values |= self.figures()
        if self._trace is not None:
            self._trace.record(self._inference(self._ended))

    def _inference(self, ended: float) -> Inference:
        return Inference(
            model=self.model,
            request_id=self.request_id,
            began=self._start,
            ended=ended,
            queued=self._queue_seconds,
            first_token=self._first_token,
            last_token=max(self._token_times.values(), default=None),
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            tokens=self._generated,
            reasons=tuple(self._reasons) or ("stop",),
            error=self._error,
        )


def _queue_full(message: str, code: str, wait: int) -> ApiError:
    return ApiError(429, f"{message}; try again in {wait} s", code=code, headers={"Retry-After": str(wait)})


def _unavailable(state: str, settings: ServerSettings) -> ApiError:
    message = {
        "loading": "the model is still loading; try again in a moment",
        "draining": "the server is shutting down and accepts no new requests",
        "stuck": f"the engine's step has not finished within {settings.step_timeout:g} s; try again later",
        "failed": "the model could not be loaded; see the server's log",
        "absent": "the model is not loaded; a request to it loads it",
    }.get(state, "the engine has stopped; see the server's log")
    return ApiError(503, message, code=state, headers={"Retry-After": "1"} if state == "loading" else {})
