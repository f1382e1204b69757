"""Where the time of a step goes, as data: seconds and bytes per phase, per token and summed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.system.machine import read_machine

if TYPE_CHECKING:
    from headway.models.config import ModelConfig
    from headway.models.decoder import Decoder
    from headway.models.quantized.cpu import QuantizedDecoder
    from headway.runtime.batch import Batch

PHASES = (  # in the order of native/api.h
    "embed",
    "norm",
    "qkv",
    "rope",
    "kv write",
    "attention",
    "output projection",
    "feed-forward",
    "head",
    "sample",
)


@dataclass(frozen=True)
class Phase:
    """One phase, summed: seconds, the bytes it had to move, and how often it ran."""

    name: str
    seconds: float
    bytes: int
    calls: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Sample:
    """One step: how many tokens it computed, and its phases."""

    tokens: int
    seconds: float
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Profile:
    """All recorded samples, their sum by phase, and the memory limit they can be held against (bytes per second)."""

    samples: tuple[Sample, ...]
    phases: tuple[Phase, ...]
    bandwidth_limit: float

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.samples)

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.samples)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a file."""
        phases = [
            {**asdict(p), "bandwidth": p.bandwidth, "of_limit": p.bandwidth / self.bandwidth_limit} for p in self.phases
        ]
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "bandwidth_limit": self.bandwidth_limit,
            "phases": phases,
            "samples": [asdict(s) for s in self.samples],
        }


class Profiler:
    """Collects marks while a step runs; off until enabled. Owned by the worker thread, read under the engine's lock."""

    def __init__(self, synchronize: Callable[[], None], device: str) -> None:
        self.enabled = False
        self.automatic = True  # every step becomes a sample; otherwise `record` says when
        self._synchronize = synchronize
        self._device = device
        self._measuring = False  # whether this step is measured; one that runs while it is enabled is not
        self._marked: set[str] = set()  # phases of this step
        self._last = 0.0
        self._current: dict[str, list[float]] = {}
        self._tokens = 0
        self._samples: list[Sample] = []

    def begin(self, tokens: int) -> None:
        self._measuring = self.enabled
        if self._measuring:
            self._tokens += tokens
            self._marked.clear()
            self._synchronize()
            self._last = time.perf_counter()

    @property
    def measuring(self) -> bool:
        """Whether the running step is measured."""
        return self._measuring

    def add(self, seconds: Mapping[str, float], calls: Mapping[str, int]) -> None:
        """What a runner measured itself of this step, by phase; the clock goes on from here."""
        for name, spent in seconds.items():
            if spent > 0:
                entry = self._current.setdefault(name, [0.0, 0, 0])
                entry[0] += spent
                entry[2] += calls[name]
                self._marked.add(name)
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        """The time since the last mark belongs to this phase."""
        if self._measuring:
            self._synchronize()
            now = time.perf_counter()
            entry = self._current.setdefault(name, [0.0, 0, 0])
            entry[0] += now - self._last
            entry[2] += 1
            self._marked.add(name)
            self._last = now

    def end(self, sizes: Mapping[str, int]) -> None:
        """The step is over; sizes says how many bytes each phase had to move."""
        if self._measuring:
            for name, size in sizes.items():
                if name in self._marked:
                    self._current[name][1] += size
            if self.automatic:
                self.record()

    def record(self) -> None:
        """Fold what was measured since the last record into the profile, as one sample."""
        if self._current:
            phases = tuple(
                Phase(n, self._current[n][0], int(self._current[n][1]), int(self._current[n][2]))
                for n in PHASES
                if n in self._current
            )
            self._samples.append(Sample(self._tokens, sum(p.seconds for p in phases), phases))
        self._current, self._tokens = {}, 0

    def take(self) -> Sample | None:
        """What was measured since the last record, as a sample that the profile does not keep."""
        before = len(self._samples)
        self.record()
        return self._samples.pop() if len(self._samples) > before else None

    def profile(self) -> Profile:
        """Everything recorded so far."""
        phases = []
        for name in PHASES:
            named = [p for s in self._samples for p in s.phases if p.name == name]
            if named:
                phases.append(
                    Phase(name, sum(p.seconds for p in named), sum(p.bytes for p in named), sum(p.calls for p in named))
                )
        return Profile(tuple(self._samples), tuple(phases), measure_bandwidth(self._device))


@lru_cache(maxsize=8)
def measure_bandwidth(device: str = "cpu", megabytes: int = 512) -> float:
    """Bytes per second that a plain reduction reads from this device's memory: the best of five, measured once."""
    if device.startswith("cpu"):
        return _host_bandwidth(megabytes << 20)
    import torch

    data = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    return data.nbytes / _best_time(lambda: data.sum().item())


def _host_bandwidth(size: int) -> float:
    threads = read_machine().fair_threads
    parts = np.array_split(np.ones(size // 4, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / _best_time(lambda: list(pool.map(np.max, parts)))


def _best_time(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _rotated(config: ModelConfig) -> int:
    """Numbers of a row's queries and keys, over all layers."""
    shapes = [(config.kv_shape(layer), layer in config.kv_layers) for layer in range(config.layers)]
    return sum((config.heads + shape.heads * own) * shape.dim for shape, own in shapes)


def step_bytes(decoder: Decoder | QuantizedDecoder, batch: Batch, page_size: int, kv_width: int) -> dict[str, int]:
    """Bytes that each phase of this step had to move, by arithmetic; `kv_width` bytes for a number in the KV cache."""
    config, width = decoder.config, decoder.dtype.itemsize
    slot = config.kv_values_per_token * kv_width
    rows = len(batch.tokens)
    pages = sum(len(s.pages) for s in batch.segments if len(s.rows))
    rows_read = len({row for s in batch.segments for _, row, _ in s.readouts})
    sizes = dict(decoder.nbytes()) if rows else {"head": decoder.output.nbytes}
    return sizes | {
        "embed": rows * config.hidden_size * width,
        "kv write": len(batch.write_rows) * slot,
        "attention": pages * page_size * slot,
        "rope": rows * _rotated(config) * width * 2,
        "sample": rows_read * config.vocab_size * 4,
    }
