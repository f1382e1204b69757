"""The server's Prometheus metrics, in a registry of its own, under Headway's names or those vLLM's dashboards use.

Requests report through `serving.AdmittedRequest`; the engine's figures are read when the metrics are scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.server import logs

if TYPE_CHECKING:
    from headway.program.engine import EngineStats
    from headway.server.models import ServedModels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_COUNTS = tuple(float(2**i) for i in range(0, 18))

# Headway's name → vLLM's name for the same metric. Metrics that are not here have one name in both styles.
VLLM_NAMES = {
    "headway_requests_running": "vllm:num_requests_running",
    "headway_requests_waiting": "vllm:num_requests_waiting",
    "headway_requests_finished": "vllm:request_success",
    "headway_prompt_tokens": "vllm:prompt_tokens",
    "headway_generated_tokens": "vllm:generation_tokens",
    "headway_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "headway_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "headway_request_seconds": "vllm:e2e_request_latency_seconds",
    "headway_request_prompt_tokens": "vllm:request_prompt_tokens",
    "headway_request_generated_tokens": "vllm:request_generation_tokens",
    "headway_pages_used_ratio": "vllm:kv_cache_usage_perc",
    "headway_preemptions": "vllm:num_preemptions",
    "headway_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "headway_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
    "headway_prefix_cache_query_tokens": "vllm:prefix_cache_queries",
    "headway_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
}


class Metrics:
    """The counters, gauges and histograms of one server. Those of a model carry its name."""

    def __init__(self, style: str, models: ServedModels) -> None:
        self.registry = CollectorRegistry()
        self._vllm = style == "vllm"
        self._labels = ("model_name", "engine") if self._vllm else ("model",)
        self._models = models
        self._of: dict[str, ModelMetrics] = {}
        reason = "finished_reason" if self._vllm else "reason"
        self.families = {
            "running": self._gauge("headway_requests_running", "Requests that are generating tokens"),
            "waiting": self._gauge("headway_requests_waiting", "Requests that were admitted and have no token yet"),
            "prompt_tokens": self._counter("headway_prompt_tokens", "Prompt tokens"),
            "generated_tokens": self._counter("headway_generated_tokens", "Generated tokens"),
            "first_token": self._histogram(
                "headway_time_to_first_token_seconds", "Time from admission to the first token", LONG_SECONDS
            ),
            "inter_token": self._histogram(
                "headway_inter_token_seconds", "Time between two tokens of a choice", SHORT_SECONDS
            ),
            "duration": self._histogram("headway_request_seconds", "Time from admission to the end", LONG_SECONDS),
            "prompt_size": self._histogram("headway_request_prompt_tokens", "Prompt tokens per request", TOKEN_COUNTS),
            "generated_size": self._histogram(
                "headway_request_generated_tokens", "Generated tokens per request", TOKEN_COUNTS
            ),
            "cache_queries": self._counter(
                "headway_prefix_cache_query_tokens", "Prompt tokens that were looked up in the prefix cache"
            ),
            "cache_hits": self._counter(
                "headway_prefix_cache_hit_tokens", "Prompt tokens that were in the prefix cache"
            ),
        }
        self._finished = self._counter("headway_requests_finished", "Requests that ended, by reason", reason)
        self._rejected = self._counter(
            "headway_requests_rejected", "Requests that were not admitted, by reason", "reason"
        )
        self._responses = self._counter("headway_http_responses", "HTTP responses", "method", "route", "status")
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        if (first := models.default) is not None:
            self.of(first.name)

    def of(self, model: str) -> ModelMetrics:
        """The metrics of a model. `model` is a name that the server has, never what a client sent."""
        if model not in self._of:
            self._of[model] = ModelMetrics(self, self._values(model))
        return self._of[model]

    def count_finished(self, values: tuple[str, ...], reason: str) -> None:
        self._finished.labels(*values, reason).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._rejected.labels(*self._values(self._default), reason).inc()

    def responded(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response. `route` is one of our path patterns, never what a client sent."""
        self._responses.labels(*self._values(self._default), method, route, str(status)).inc()

    @property
    def _default(self) -> str:
        return "" if self._models.default is None else self._models.default.name

    def _values(self, model: str) -> tuple[str, ...]:
        return (model, "0") if self._vllm else (model,)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Dropped log lines, what the models take, and the figures of those that are loaded."""
        models = self._models
        yield self._total(
            "headway_log_lines_dropped", "Log lines that could not be written", {"": logs.dropped_lines()}
        )
        yield self._total("headway_model_loads", "Models that were loaded", {"": models.loads})
        yield self._total("headway_model_unloads", "Models that were unloaded", {"": models.unloads})
        yield self._total("headway_model_load_failures", "Models that could not be loaded", {"": models.failed_loads})
        if models.budget is not None:
            yield self._current("headway_model_memory_bytes", "Memory that models may take", {"": models.budget})
        known = models.all()
        states = {one.name: float(one.state == "ready") for one in known}
        yield self._current("headway_model_ready", "Whether a model is loaded and takes requests", states)
        taken = {one.name: one.bytes for one in known if one.bytes}
        yield self._current("headway_model_bytes", "Memory that a model takes, at most", taken)
        stats = {one.name: figures for one in known if (figures := one.stats()) is not None}
        for kind, name, help, read in ENGINE_FIGURES:
            values = {model: read(figures) for model, figures in stats.items()}
            if values:
                yield (self._current if kind == "gauge" else self._total)(name, help, values)

    def _name(self, name: str) -> str:
        return VLLM_NAMES.get(name, name) if self._vllm else name

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(self._name(name), help, self._labels, registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(self._name(name), help, (*self._labels, *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(self._name(name), help, self._labels, registry=self.registry, buckets=buckets)

    def _current(self, name: str, help: str, values: Mapping[str, float]) -> Metric:
        return self._filled(GaugeMetricFamily(self._name(name), help, labels=self._labels), values)

    def _total(self, name: str, help: str, values: Mapping[str, float]) -> Metric:
        return self._filled(CounterMetricFamily(self._name(name), help, labels=self._labels), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
        for model, value in values.items():
            family.add_metric(self._values(model or self._default), value)
        return family


class ModelMetrics:
    """What the requests of one model report."""

    running: Gauge
    waiting: Gauge
    prompt_tokens: Counter
    generated_tokens: Counter
    first_token: Histogram
    inter_token: Histogram
    duration: Histogram
    prompt_size: Histogram
    generated_size: Histogram
    cache_queries: Counter
    cache_hits: Counter

    def __init__(self, metrics: Metrics, values: tuple[str, ...]) -> None:
        self._metrics, self._values = metrics, values
        for name, family in metrics.families.items():
            setattr(self, name, family.labels(*values))

    def finished(self, reason: str) -> None:
        """Count a request that ended: stop, length, tool_calls, abort or error."""
        self._metrics.count_finished(self._values, reason)


ENGINE_FIGURES: tuple[tuple[str, str, str, Callable[[EngineStats], float]], ...] = (
    ("gauge", "headway_pages_total", "Pages in the KV cache", lambda s: s.pages_total),
    ("gauge", "headway_pages_free", "Free pages", lambda s: s.pages_free),
    ("gauge", "headway_pages_cached", "Pages held only by the prefix cache", lambda s: s.pages_cached),
    ("gauge", "headway_pages_held", "Pages held by contexts", lambda s: s.pages_held),
    (
        "gauge",
        "headway_pages_used_ratio",
        "Fraction of pages held by contexts",
        lambda s: s.pages_held / s.pages_total,
    ),
    ("gauge", "headway_adapters", "LoRA adapters on the device", lambda s: s.adapters),
    ("gauge", "headway_adapter_bytes", "Bytes of LoRA adapters on the device", lambda s: s.adapter_bytes),
    ("gauge", "headway_passes_queued", "Passes queued or running", lambda s: s.queued),
    ("gauge", "headway_batch_size_mean", "Mean passes per step", lambda s: s.batch_size_mean),
    ("counter", "headway_steps", "Engine steps", lambda s: s.steps),
    ("counter", "headway_passes", "Finished passes", lambda s: s.passes),
    ("counter", "headway_computed_tokens", "Computed tokens", lambda s: s.tokens),
    ("counter", "headway_cache_hit_pages", "Pages taken from the prefix cache", lambda s: s.cache_hits),
    ("gauge", "headway_cache_host_pages", "Cached pages in host memory", lambda s: s.cache_host_pages),
    ("gauge", "headway_cache_host_bytes", "Bytes of cached pages in host memory", lambda s: s.cache_host_bytes),
    ("counter", "headway_cache_host_saved_pages", "Pages copied to host memory", lambda s: s.cache_host_saves),
    ("counter", "headway_cache_host_hit_pages", "Pages copied back from host memory", lambda s: s.cache_host_hits),
    ("gauge", "headway_cache_folder_pages", "Cached pages in files", lambda s: s.cache_folder_pages),
    ("gauge", "headway_cache_folder_bytes", "Bytes of cached pages in files", lambda s: s.cache_folder_bytes),
    ("counter", "headway_cache_folder_hit_pages", "Pages read back from files", lambda s: s.cache_folder_hits),
    ("counter", "headway_cache_tier_errors", "Cached pages lost below the pool", lambda s: s.cache_tier_errors),
    ("counter", "headway_draft_tokens", "Draft tokens that were verified", lambda s: s.drafted),
    ("counter", "headway_accepted_draft_tokens", "Draft tokens that were kept", lambda s: s.accepted),
    ("counter", "headway_preemptions", "Contexts preempted for lack of pages", lambda s: s.preemptions),
)
