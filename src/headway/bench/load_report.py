"""The report of a load test, as text and as JSON, under the names that vLLM's `bench serve` uses."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from headway.base.dataclass import dataclass
from headway.bench.load_generator import ArrivalPattern, LoadResult, RequestResult

WIDTH = 50
MS = 1e3


@dataclass(frozen=True)
class LatencyStats:
    """Mean, median, standard deviation and 99th percentile, in milliseconds."""

    mean: float
    median: float
    std: float
    p99: float

    @staticmethod
    def of(seconds: list[float]) -> LatencyStats | None:
        """None where nothing was measured."""
        import numpy as np

        if not seconds:
            return None
        ms = MS * np.asarray(seconds)
        return LatencyStats(float(ms.mean()), float(np.median(ms)), float(ms.std()), float(np.percentile(ms, 99)))


@dataclass(frozen=True)
class LatencyKind:
    """A latency's short name and heading."""

    short: str
    heading: str


FIRST_TOKEN = LatencyKind("TTFT", "Time to First Token")
PER_TOKEN = LatencyKind("TPOT", "Time per Output Token (excl. 1st token)")
INTER_TOKEN = LatencyKind("ITL", "Inter-token Latency")
END_TO_END = LatencyKind("E2EL", "End-to-end Latency")


class LoadReport:
    """What a server did under a load."""

    def __init__(self, load: LoadResult, pattern: ArrivalPattern, *, stream: bool, model: str) -> None:
        self.load, self.pattern, self.stream, self.model = load, pattern, stream, model
        self.good = [one for one in load.results if one.error is None]
        self.errors = [one.error for one in load.results if one.error is not None]
        self.prompt_tokens = sum(one.prompt_tokens for one in self.good)
        self.tokens = sum(one.tokens for one in self.good)

    def latencies(self) -> dict[LatencyKind, LatencyStats | None]:
        """Every latency that was measured; responses that were not streamed have only one."""
        end_to_end = {END_TO_END: LatencyStats.of([one.latency for one in self.good])}
        if not self.stream:
            return end_to_end
        firsts = [one.first for one in self.good if one.first is not None]
        paces = [one.per_token for one in self.good if one.per_token is not None]
        gaps = [gap for one in self.good for gap in one.gaps]
        return {
            FIRST_TOKEN: LatencyStats.of(firsts),
            PER_TOKEN: LatencyStats.of(paces),
            INTER_TOKEN: LatencyStats.of(gaps),
        } | end_to_end

    def to_json(self) -> dict[str, Any]:
        seconds = self.load.seconds
        figures: dict[str, Any] = {
            "model_id": self.model,
            "stream": self.stream,
            "request_rate": self.pattern.rate,
            "max_concurrency": self.pattern.concurrency,
            "duration": seconds,
            "completed": len(self.good),
            "failed": len(self.errors),
            "total_input_tokens": self.prompt_tokens,
            "total_output_tokens": self.tokens,
            "request_throughput": len(self.good) / seconds,
            "output_throughput": self.tokens / seconds,
            "total_token_throughput": (self.prompt_tokens + self.tokens) / seconds,
            "max_output_tokens_per_s": busiest_second(self.good),
            "max_concurrent_requests": self.load.peak,
            "errors": dict(Counter(self.errors)),
        }
        for kind, stats in self.latencies().items():
            for name in ("mean", "median", "std", "p99"):
                value = None if stats is None else getattr(stats, name)
                figures[f"{name}_{kind.short.lower()}_ms"] = value
        return figures

    def text(self) -> str:
        """The report as a table of lines."""
        figures = self.to_json()
        lines = [_heading(" Serving Benchmark Result ", "=")]
        lines += [_line(label, figures[name]) for label, name in LINES.items() if figures[name] is not None]
        for kind, stats in self.latencies().items():
            if stats is not None:
                lines.append(_heading(kind.heading, "-"))
                named = (("Mean", stats.mean), ("Median", stats.median), ("P99", stats.p99))
                lines += [_line(f"{name} {kind.short} (ms):", value) for name, value in named]
        return "\n".join([*lines, "=" * WIDTH])


LINES = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}


def busiest_second(results: list[RequestResult]) -> float | None:
    """The most tokens that arrived within any second; a request's tokens are spread evenly over its events."""
    arrivals = sorted((moment, one.tokens / len(one.events)) for one in results for moment in one.events)
    if not arrivals:
        return None
    most = within = 0.0
    window: deque[tuple[float, float]] = deque()
    for moment, tokens in arrivals:
        window.append((moment, tokens))
        within += tokens
        while window[0][0] <= moment - 1.0:
            within -= window.popleft()[1]
        most = max(most, within)
    return most


def _heading(text: str, mark: str) -> str:
    return text.center(WIDTH, mark)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
