"""What the server counts, for Prometheus: a registry of its own, under Headway's names or those vLLM's dashboards use.

Requests report through their ticket (`serving.Ticket`); what the engine knows is read from it when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from headway.program.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SIZES = tuple(float(2**i) for i in range(0, 18))

# Headway's name → the one vLLM has for the same thing. What is not here keeps its own name in both styles.
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
}


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self, style: str, model_name: str, read: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        self._vllm = style == "vllm"
        self._labels = {"model_name": model_name, "engine": "0"} if self._vllm else {"model": model_name}
        self._read = read
        self.running = self._gauge("headway_requests_running", "Requests that have their first token and not the last")
        self.waiting = self._gauge("headway_requests_waiting", "Requests that were admitted and have no token yet")
        self.prompt_tokens = self._counter("headway_prompt_tokens", "Tokens of prompts")
        self.generated_tokens = self._counter("headway_generated_tokens", "Tokens that were generated")
        self.first_token = self._histogram("headway_time_to_first_token_seconds", "From admission to a token", LONG)
        self.inter_token = self._histogram("headway_inter_token_seconds", "Between two tokens of a choice", SHORT)
        self.whole = self._histogram("headway_request_seconds", "From admission to the end", LONG)
        self.prompt_size = self._histogram("headway_request_prompt_tokens", "Tokens of a request's prompt", SIZES)
        self.answer_size = self._histogram("headway_request_generated_tokens", "Tokens of a request's answer", SIZES)
        reason = "finished_reason" if self._vllm else "reason"
        self._finished = self._family(Counter, "headway_requests_finished", "Requests that ended, by how", reason)
        self._refused = self._family(Counter, "headway_requests_refused", "Requests that were not admitted", "reason")
        self._answers = self._family(Counter, "headway_http_responses", "Answers", "method", "route", "status")
        self.registry.register(self)

    def finished(self, reason: str) -> None:
        """A request ended: stop, length, tool_calls, abort or error."""
        self._finished.labels(*self._labels.values(), reason).inc()

    def refused(self, reason: str) -> None:
        """A request was not admitted."""
        self._refused.labels(*self._labels.values(), reason).inc()

    def answered(self, method: str, route: str, status: int) -> None:
        """An answer went out. `route` is a pattern of ours, never what a client wrote."""
        self._answers.labels(*self._labels.values(), method, route, str(status)).inc()

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the engine says now; nothing while there is none."""
        stats = self._read()
        if stats is None:
            return
        yield self._now("headway_pages_total", "Pages of the pool", stats.pages_total)
        yield self._now("headway_pages_free", "Pages that hold nothing", stats.pages_free)
        yield self._now("headway_pages_cached", "Pages that only the prefix cache holds", stats.pages_cached)
        yield self._now("headway_pages_held", "Pages that contexts hold", stats.pages_held)
        yield self._now("headway_pages_used_ratio", "Their share of all", stats.pages_held / stats.pages_total)
        yield self._now("headway_passes_queued", "Passes that are queued or running", stats.queued)
        yield self._now("headway_batch_size_mean", "Passes in a step, on average", stats.batch_size_mean)
        yield self._sum("headway_steps", "Steps of the engine", stats.steps)
        yield self._sum("headway_passes", "Passes it finished", stats.passes)
        yield self._sum("headway_computed_tokens", "Tokens it computed", stats.tokens)
        yield self._sum("headway_cache_hit_pages", "Pages taken from the prefix cache", stats.cache_hits)
        yield self._sum("headway_preemptions", "Contexts set aside for want of pages", stats.preemptions)

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

    def _now(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._name(name), help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _sum(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(self._name(name), help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
