"""Captured steps: one graph for each padded size, captured the second time a size comes, replayed ever after.

The first time the work runs as it stands, which compiles its kernels and is a result in itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def padded(rows: int) -> int | None:
    """The size of the graph that holds so many rows; None when there are too many."""
    return next((size for size in SIZES if size >= rows), None)


@dataclass(eq=False)
class Graphs:
    """Graphs by key. `run` does the work once, or what was captured of it."""

    enabled: bool
    graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = field(default_factory=dict)

    def run(self, key: Hashable | None, work: Callable[[], None]) -> None:
        """Do the work, which launches the same kernels on the same memory whenever the key is the same.

        Work without a key is done by hand each time.
        """
        if key is None:
            work()
            return
        graph = self.graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        if not self.enabled or key not in self.graphs:
            self.graphs[key] = None
            work()
            return
        self.graphs[key] = graph = _captured(work)
        graph.replay()


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The kernels that the work launches, not yet run. Unlike torch.cuda.graph it collects no garbage first."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph
