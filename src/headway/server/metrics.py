"""The server's Prometheus metrics, in a registry of its own, under Headway's names or those vLLM's dashboards use.

Requests report through `serving.AdmittedRequest`; the engine's figures are read when the metrics are scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.server import logs

if TYPE_CHECKING:
    from headway.program.engine import EngineStats

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
    """The counters, gauges and histograms of one server."""

    def __init__(self, style: str, model_name: str, read: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        self._vllm = style == "vllm"
        self._labels = {"model_name": model_name, "engine": "0"} if self._vllm else {"model": model_name}
        self._read = read
        self.running = self._gauge("headway_requests_running", "Requests that are generating tokens")
        self.waiting = self._gauge("headway_requests_waiting", "Requests that were admitted and have no token yet")
        self.prompt_tokens = self._counter("headway_prompt_tokens", "Prompt tokens")
        self.generated_tokens = self._counter("headway_generated_tokens", "Generated tokens")
        self.first_token = self._histogram(
            "headway_time_to_first_token_seconds", "Time from admission to the first token", LONG_SECONDS
        )
        self.inter_token = self._histogram(
            "headway_inter_token_seconds", "Time between two tokens of a choice", SHORT_SECONDS
        )
        self.duration = self._histogram("headway_request_seconds", "Time from admission to the end", LONG_SECONDS)
        self.prompt_size = self._histogram("headway_request_prompt_tokens", "Prompt tokens per request", TOKEN_COUNTS)
        self.generated_size = self._histogram(
            "headway_request_generated_tokens", "Generated tokens per request", TOKEN_COUNTS
        )
        self.cache_queries = self._counter(
            "headway_prefix_cache_query_tokens", "Prompt tokens that were looked up in the prefix cache"
        )
        self.cache_hits = self._counter(
            "headway_prefix_cache_hit_tokens", "Prompt tokens that were in the prefix cache"
        )
        reason = "finished_reason" if self._vllm else "reason"
        self._finished = self._family(Counter, "headway_requests_finished", "Requests that ended, by reason", reason)
        self._rejected = self._family(
            Counter, "headway_requests_rejected", "Requests that were not admitted, by reason", "reason"
        )
        self._responses = self._family(Counter, "headway_http_responses", "HTTP responses", "method", "route", "status")
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def finished(self, reason: str) -> None:
        """Count a request that ended: stop, length, tool_calls, abort or error."""
        self._finished.labels(*self._labels.values(), reason).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._rejected.labels(*self._labels.values(), reason).inc()

    def responded(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response. `route` is one of our path patterns, never what a client sent."""
        self._responses.labels(*self._labels.values(), method, route, str(status)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Dropped log lines, and the engine's figures once it is loaded."""
        yield self._total("headway_log_lines_dropped", "Log lines that could not be written", logs.dropped_lines())
        stats = self._read()
        if stats is None:
            return
        yield self._current("headway_pages_total", "Pages in the KV cache", stats.pages_total)
        yield self._current("headway_pages_free", "Free pages", stats.pages_free)
        yield self._current("headway_pages_cached", "Pages held only by the prefix cache", stats.pages_cached)
        yield self._current("headway_pages_held", "Pages held by contexts", stats.pages_held)
        yield self._current(
            "headway_pages_used_ratio", "Fraction of pages held by contexts", stats.pages_held / stats.pages_total
        )
        yield self._current("headway_adapters", "LoRA adapters on the device", stats.adapters)
        yield self._current("headway_adapter_bytes", "Bytes of LoRA adapters on the device", stats.adapter_bytes)
        yield self._current("headway_passes_queued", "Passes queued or running", stats.queued)
        yield self._current("headway_batch_size_mean", "Mean passes per step", stats.batch_size_mean)
        yield self._total("headway_steps", "Engine steps", stats.steps)
        yield self._total("headway_passes", "Finished passes", stats.passes)
        yield self._total("headway_computed_tokens", "Computed tokens", stats.tokens)
        yield self._total("headway_cache_hit_pages", "Pages taken from the prefix cache", stats.cache_hits)
        yield self._total("headway_draft_tokens", "Draft tokens that were verified", stats.drafted)
        yield self._total("headway_accepted_draft_tokens", "Draft tokens that were kept", stats.accepted)
        yield self._total("headway_preemptions", "Contexts preempted for lack of pages", stats.preemptions)

    def _name(self, name: str) -> str:
        return VLLM_NAMES.get(name, name) if self._vllm else name

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(self._name(name), help, self._labels, registry=self.registry).labels(*self._labels.values())

    def _counter(self, name: str, help: str) -> Counter:
        return self._family(Counter, name, help).labels(*self._labels.values())

    def _family(self, kind: type[Counter], name: str, help: str, *labels: str) -> Counter:
        return kind(self._name(name), help, (*self._labels, *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(self._name(name), help, self._labels, registry=self.registry, buckets=buckets)
        return family.labels(*self._labels.values())

    def _current(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._name(name), help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _total(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(self._name(name), help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
