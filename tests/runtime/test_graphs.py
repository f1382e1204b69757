"""Which graphs are kept, describe of and tried: the bookkeeping, which needs no GPU."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from headway.runtime.runners.cuda.graphs import MORE_MEMORY, SIZES, Graphs, describe, padded


def test_work_without_graphs_runs_every_time() -> None:
    done: list[int] = []
    graphs = Graphs(enabled=False)
    for _ in range(3):
        graphs.run(("step", 8), lambda: done.append(8))
        graphs.run(None, lambda: done.append(0))
    assert done == [8, 0] * 3
    assert graphs.captured == 0
    assert list(graphs.graphs) == [("step", 8)]


def test_what_was_used_longest_ago_goes_first() -> None:
    graphs = Graphs(enabled=False, most=3)
    for size in (1, 2, 4, 1, 8, 1, 16):
        graphs.run(("step", size), lambda: None)
        assert len(graphs.graphs) <= 3
    assert set(graphs.graphs) == {("step", 1), ("step", 8), ("step", 16)}


def test_keys_that_never_come_back_take_no_room() -> None:
    graphs = Graphs(enabled=False, most=4)
    for address in range(1000):
        graphs.run(("head", 8, address), lambda: None)
    assert len(graphs.graphs) == 4
    assert len(graphs._used) <= 12


class Full:
    """A device on which there is no room for a graph."""

    def __init__(self, error: Exception) -> None:
        self.error, self.tried = error, 0

    def take(self, work: object) -> NoReturn:
        self.tried += 1
        raise self.error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")], ids=str
)
def test_where_there_is_no_memory_for_a_graph_its_kernels_are_launched(error: Exception) -> None:
    done: list[int] = []
    device: Any = Full(error)
    graphs = Graphs(enabled=True, _capture=device, _free_memory=lambda: 0)
    for i in range(4):
        graphs.run(("step", 8), lambda i=i: done.append(i))
    assert done == [0, 1, 2, 3]
    assert (device.tried, graphs.captured) == (1, 0)


def test_a_graph_that_found_no_memory_is_tried_again_when_memory_came_free() -> None:
    device: Any = Full(torch.OutOfMemoryError("CUDA out of memory."))
    free = [1000]
    graphs = Graphs(enabled=True, _capture=device, _free_memory=lambda: free[-1])
    tried = []
    for more in (0, 0, 0, MORE_MEMORY - 1, 1, 0, MORE_MEMORY):
        free.append(free[-1] + more)
        graphs.run(("step", 8), lambda: None)
        tried.append(device.tried)
    assert tried == [0, 1, 1, 1, 2, 2, 3]


def test_what_else_goes_wrong_in_a_capture_is_told() -> None:
    device: Any = Full(RuntimeError("CUDA error: an illegal memory access was encountered"))
    graphs = Graphs(enabled=True, _capture=device)
    graphs.run(("step", 8), lambda: None)
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.run(("step", 8), lambda: None)


def test_keys_in_words() -> None:
    assert describe(("step", 64)) == "64 rows (step)"
    assert describe(("head", 0, 123456)) == "1 rows (head)"
    assert describe("odd") == "odd"


def test_a_size_is_the_next_that_holds_the_rows() -> None:
    assert [padded(n) for n in (1, 3, 17, 512)] == [1, 4, 24, 512]
    assert padded(513) is None
    assert list(SIZES) == sorted(SIZES)
