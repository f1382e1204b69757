"""Captured steps: one graph for each padded size, captured the second time a size comes, replayed ever after.

The first time the work runs as it stands, which compiles its kernels and is a result in itself. Graphs share one stream
to be captured on and one pool of memory: they are replayed one after the other, and nothing in that pool outlives a
replay. Of many sizes those used last are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import field

import torch

from headway.base.dataclass import dataclass
from headway.base.system.log import log_event
from headway.runtime.memory import is_out_of_memory

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Of steps whose attention uses the matrix units. 448 rows are not among them: cuBLAS takes as long for them as for 700.
CHUNK_SIZES = (*range(64, 385, 64), *range(512, 1025, 64))
MORE_MEMORY = 64 << 20  # bytes that must have come free before a graph that found no memory is tried again
MOST = 4 * len(SIZES)  # graphs that are kept: steps, heads and samplers of every size, and some that look elsewhere


def padded(rows: int, sizes: Sequence[int] = SIZES) -> int | None:
    """The size of the graph that holds this many rows; None if there are too many."""
    return next((size for size in sizes if size >= rows), None)


@dataclass(eq=False)
class Graphs:
    """Graphs by key. `run` does the work once, or what was captured of it."""

    enabled: bool
    most: int = MOST
    graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = field(default_factory=dict)  # None: seen once
    _used: dict[Hashable, int] = field(default_factory=dict)
    _runs: int = 0
    _refused: dict[Hashable, int] = field(default_factory=dict)  # found no memory, and how much was free then
    _capture: _Capture | None = None
    _free_memory: Callable[[], int] = field(default_factory=lambda: free_memory)

    def run(self, key: Hashable | None, work: Callable[[], object]) -> None:
        """Do the work, which launches the same kernels on the same memory whenever the key is the same.

        Work without a key is done by hand each time.
        """
        if key is None:
            work()
            return
        self._runs += 1
        self._used[key] = self._runs
        graph = self.graphs.get(key)
        if graph is None and self.enabled and key in self.graphs and self._may_fit(key):
            graph = self._captured(key, work)
        if graph is not None:
            graph.replay()
            return
        if key not in self.graphs:
            self._make_room()
            self.graphs[key] = None
        work()

    def _captured(self, key: Hashable, work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """What the work launches, not yet run; None when there is no memory for it."""
        start = time.perf_counter()
        log_event(f"capturing a graph of {describe(key)}", graphs=self.captured)
        try:
            if self._capture is None:
                self._capture = _Capture()
            self.graphs[key] = graph = self._capture.take(work)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._refused[key] = self._free_memory()
            log_event(f"no memory is left for a graph of {describe(key)}; it is launched kernel by kernel")
            return None
        self._refused.pop(key, None)
        seconds = round(time.perf_counter() - start, 3)
        log_event(f"captured a graph of {describe(key)}", seconds=seconds, graphs=self.captured)
        return graph

    def _may_fit(self, key: Hashable) -> bool:
        """Whether there may be memory for its graph: it was not refused, or memory has come free since."""
        return key not in self._refused or self._free_memory() >= self._refused[key] + MORE_MEMORY

    def forget(self, which: Callable[[tuple[object, ...]], bool]) -> None:
        """Drop graphs by their keys, because the memory they use goes."""
        for key in [key for key in self.graphs if isinstance(key, tuple) and which(key)]:
            del self.graphs[key]

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(graph is not None for graph in self.graphs.values())

    def _make_room(self) -> None:
        """Let go of what was used longest ago, until one more may come."""
        while len(self.graphs) >= self.most:
            oldest = min(self.graphs, key=lambda key: self._used.get(key, 0))
            if self.graphs[oldest] is not None:
                torch.cuda.synchronize()  # it may be running
            del self.graphs[oldest]
        if len(self._used) > 2 * self.most:
            self._used = {key: self._used.get(key, 0) for key in self.graphs}
            self._refused = {key: free for key, free in self._refused.items() if key in self.graphs}


def free_memory() -> int:
    """Bytes that a capture could take: what the device has free, and what torch keeps and would give back."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def describe(key: Hashable) -> str:
    """A key in words: "step", 64 are 64 rows of a step."""
    if isinstance(key, tuple) and len(key) > 1:
        return f"{key[1] or 1} rows ({key[0]})"
    return str(key)


class _Capture:
    """Where graphs are captured: a stream and a pool of memory.

    A pool that no graph uses any longer is gone, and cannot be captured in again. So one graph stays.
    """

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        number = torch.zeros(1, device="cuda")
        self._first = self.take(number.zero_)

    def take(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The kernels that the work launches, not yet run. Unlike torch.cuda.graph it collects no garbage first."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # what it says is less than what went wrong
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
