"""Figures of traffic, as text and as JSON, under the names that vLLM's `bench serve` gives them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from headway.bench.traffic import Outcome, Pace, Traffic

WIDTH = 50
MS = 1e3


@dataclass(frozen=True)
class Spread:
    """Mean, median, deviation and 99th percentile of milliseconds."""

    mean: float
    median: float
    std: float
    p99: float

    @staticmethod
    def of(seconds: list[float]) -> Spread | None:
        """None where there is nothing to speak of."""
        import numpy as np

        if not seconds:
            return None
        ms = MS * np.asarray(seconds)
        return Spread(float(ms.mean()), float(np.median(ms)), float(ms.std()), float(np.percentile(ms, 99)))


@dataclass(frozen=True)
class Kind:
    """A latency: its short name, and its heading."""

    short: str
    heading: str


FIRST = Kind("TTFT", "Time to First Token")
PER_TOKEN = Kind("TPOT", "Time per Output Token (excl. 1st token)")
BETWEEN = Kind("ITL", "Inter-token Latency")
WHOLE = Kind("E2EL", "End-to-end Latency")


class Report:
    """What a server did with some traffic."""

    def __init__(self, traffic: Traffic, pace: Pace, *, stream: bool, model: str) -> None:
        self.traffic, self.pace, self.stream, self.model = traffic, pace, stream, model
        self.good = [one for one in traffic.outcomes if one.error is None]
        self.errors = [one.error for one in traffic.outcomes if one.error is not None]
        self.prompt_tokens = sum(one.prompt_tokens for one in self.good)
        self.tokens = sum(one.tokens for one in self.good)

    def spreads(self) -> dict[Kind, Spread | None]:
        """Each latency there is; whole answers have one."""
        whole = {WHOLE: Spread.of([one.latency for one in self.good])}
        if not self.stream:
            return whole
        firsts = [one.first for one in self.good if one.first is not None]
        paces = [one.per_token for one in self.good if one.per_token is not None]
        gaps = [gap for one in self.good for gap in one.gaps]
        return {FIRST: Spread.of(firsts), PER_TOKEN: Spread.of(paces), BETWEEN: Spread.of(gaps)} | whole

    def to_json(self) -> dict[str, Any]:
        seconds = self.traffic.seconds
        found: dict[str, Any] = {
            "model_id": self.model,
            "stream": self.stream,
            "request_rate": self.pace.rate,
            "max_concurrency": self.pace.concurrency,
            "duration": seconds,
            "completed": len(self.good),
            "failed": len(self.errors),
            "total_input_tokens": self.prompt_tokens,
            "total_output_tokens": self.tokens,
            "request_throughput": len(self.good) / seconds,
            "output_throughput": self.tokens / seconds,
            "total_token_throughput": (self.prompt_tokens + self.tokens) / seconds,
            "max_output_tokens_per_s": busiest_second(self.good),
            "max_concurrent_requests": self.traffic.peak,
            "errors": dict(Counter(self.errors)),
        }
        for kind, spread in self.spreads().items():
            for name in ("mean", "median", "std", "p99"):
                value = None if spread is None else getattr(spread, name)
                found[f"{name}_{kind.short.lower()}_ms"] = value
        return found

    def text(self) -> str:
        """A table of lines."""
        figures = self.to_json()
        lines = [_heading(" Serving Benchmark Result ", "=")]
        lines += [_line(label, figures[name]) for label, name in LINES.items() if figures[name] is not None]
        for kind, spread in self.spreads().items():
            if spread is not None:
                lines.append(_heading(kind.heading, "-"))
                named = (("Mean", spread.mean), ("Median", spread.median), ("P99", spread.p99))
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


def busiest_second(outcomes: list[Outcome]) -> float | None:
    """The most tokens that came within any second; those of a request count evenly for its events."""
    came = sorted((moment, one.tokens / len(one.events)) for one in outcomes for moment in one.events)
    if not came:
        return None
    most = within = 0.0
    window: deque[tuple[float, float]] = deque()
    for moment, tokens in came:
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
