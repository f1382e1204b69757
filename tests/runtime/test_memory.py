"""Memory: what pages may take, what is refused with which numbers, and what running out becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headway as hw
from headway.program.kv_cache.pool_size import _try_out, largest_step
from headway.runtime.batch import Batch
from headway.runtime.memory import MemoryBudget, Wish, pick_pages, read_memory, running_out, step_error
from headway.runtime.runners.base import SegmentResult
from headway.testing import ScriptedRunner, random_model

GIB = 1 << 30
CPU = torch.device("cpu")


def test_pages_get_what_weights_a_step_and_graphs_leave() -> None:
    room = MemoryBudget("cuda:0", total=100 * GIB, free=80 * GIB, fraction=0.9, taken=16 * GIB, work=GIB, graphs=GIB)
    assert room.allowed == 90 * GIB
    assert room.left == 72 * GIB  # of the share that is Headway's
    assert pick_pages(None, Wish(GIB, 1000, 4), room) == 72
    assert pick_pages(None, Wish(GIB, 50, 4), room) == 50  # more would never be used
    others = MemoryBudget("cuda:0", total=100 * GIB, free=30 * GIB, fraction=0.9, taken=16 * GIB, work=GIB, graphs=GIB)
    assert others.left == 28 * GIB  # another process has the rest


def test_too_little_is_refused_with_the_sum_and_a_way_out() -> None:
    room = MemoryBudget(
        "cuda:0", total=24 * GIB, free=6 * GIB, fraction=0.75, taken=16 * GIB, work=GIB, graphs=GIB // 2
    )
    with pytest.raises(hw.OutOfMemory) as refused:
        pick_pages(None, Wish(GIB // 4, 1000, 4), room)
    told = str(refused.value)
    for part in (
        "18.0 GiB (0.75 of 24.0 GiB) on cuda:0, of which 6.0 GiB are free",
        "weights and libraries take 16.0 GiB, a step 1.0 GiB, graphs 512.0 MiB",
        "512.0 MiB are left, which is 2 pages of 256.0 MiB",
        "needs 4 (1.0 GiB)",
        "max_batch_tokens",
        "quantize",
        "memory_fraction",
        "another device",
    ):
        assert part in told
    assert isinstance(refused.value, MemoryError)


def test_nothing_left_is_no_negative_number() -> None:
    room = MemoryBudget("cpu", total=GIB, free=GIB, fraction=0.1, taken=GIB // 2)
    assert room.left == 0
    with pytest.raises(hw.OutOfMemory, match="0 B are left, which is 0 pages"):
        pick_pages(None, Wish(1 << 20, 10, 1), room)


def test_pages_that_were_asked_for_stay_within_the_share() -> None:
    room = MemoryBudget("cpu", total=10 * GIB, free=8 * GIB, fraction=0.5, taken=GIB)
    assert pick_pages(4, Wish(GIB, 100, 1), room) == 4
    with pytest.raises(hw.OutOfPages, match=r"5 pages .* 4.0 GiB are left; at most 4 fit, or give a higher"):
        pick_pages(5, Wish(GIB, 100, 1), room)
    with pytest.raises(hw.OutOfPages, match="8192 MiB are free; at most 8 fit"):
        pick_pages(9, Wish(GIB, 100, 1), room)


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.floats(0.001, 1), st.integers(0, 1 << 40))
def test_pages_never_take_more_than_the_share_or_what_is_free(
    total: int, free: int, fraction: float, taken: int
) -> None:
    room = MemoryBudget("cpu", total, min(free, total), fraction, taken)
    try:
        pages = pick_pages(None, Wish(4096, 1 << 30, 1), room)
    except hw.OutOfMemory:
        assert room.left < 4096
    else:
        assert pages * 4096 <= min(room.free, fraction * total - taken + 1)
        assert pages == 1 << 30 or (pages + 1) * 4096 > room.left


def test_a_cpu_s_memory_is_that_of_its_container() -> None:
    found = read_memory(CPU)
    assert 0 < found.free <= found.total


def test_an_engine_on_a_cpu_keeps_to_its_share() -> None:
    total = read_memory(CPU).total
    model = random_model(max_positions=1 << 16)
    page = 2 * 16 * 4 * sum(layer.kv_heads * layer.head_dim for layer in model.layers)
    share = 64 * page / total
    with hw.Engine(model, device="cpu", memory_fraction=share, max_batch_tokens=64) as engine:
        pages, weights = engine.stats().pages_total, engine.info.weight_bytes
        assert pages == (int(share * total) - weights) // page
        assert 4 <= pages < 64
    with pytest.raises(hw.OutOfMemory, match=r"weights and libraries take .* left, which is \d+ pages"):
        hw.Engine(model, device="cpu", memory_fraction=share, max_batch_tokens=64 * 16)


@pytest.mark.parametrize("fraction", [0, 0.0, -0.1, 1.01, 2, float("nan"), True, "0.5", [0.5]])
def test_a_fraction_that_makes_no_sense_is_refused(fraction: Any) -> None:
    with pytest.raises(hw.InvalidInput, match=r"memory_fraction is .*; it must be a number above 0 and at most 1"):
        hw.Engine(random_model(), device="cpu", memory_fraction=fraction)


def test_the_largest_step_is_one_step_with_a_token_for_every_row() -> None:
    with hw.Engine(random_model(), device="cpu", pages=12, max_batch_tokens=160) as engine:
        drawn = engine.run(largest_step, 160)
        assert len(drawn) == 160
        assert engine.stats().steps == 1
        assert engine.stats().pages_held == 0


def test_a_trial_that_fails_says_so_but_not_for_weights_that_give_no_numbers() -> None:
    class Broken(ScriptedRunner):
        def execute(self, batch: Batch) -> list[SegmentResult]:
            raise RuntimeError("there is no C compiler")

    broken = random_model()
    broken.output.fill_(float("nan"))
    with pytest.raises(hw.PassFailed, match="no C compiler"):
        _try_out(lambda pages: hw.Engine(random_model(), runner=Broken(97, 16), pages=pages), 8, 16)
    assert _try_out(lambda pages: hw.Engine(broken, device="cpu", pages=pages), 8, 16) > 0


# -- running out -----------------------------------------------------------------------------------------------------


def test_running_out_becomes_one_sentence_with_numbers() -> None:
    told = r"ran out while weighing: .*are free on cpu; .* are used; try a smaller"
    with pytest.raises(hw.OutOfMemory, match=told), running_out(CPU, "weighing"):
        torch.empty(1 << 55)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), running_out(CPU, "weighing"):
        raise RuntimeError("something else")
    with pytest.raises(hw.OutOfMemory, match=r"^known$"), running_out(CPU, "weighing"):
        raise hw.OutOfMemory("known")


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_driver_that_runs_out_beside_the_allocator_is_told_the_same_way(said: str) -> None:
    found = str(step_error(RuntimeError(said)))
    assert found.startswith("memory ran out while computing a pass: ")
    assert "are free on" in found
    assert "fewer pages" in found
    with (
        pytest.raises(hw.OutOfMemory, match="memory ran out while loading"),
        running_out(torch.device("cpu"), "loading"),
    ):
        raise RuntimeError(said)


def test_a_step_that_runs_out_fails_with_numbers() -> None:
    asked = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")
    found = step_error(asked)
    assert isinstance(found, hw.PassFailed)
    assert "memory ran out while computing a pass: 20.00 GiB were asked for and" in str(found)
    assert "max_batch_tokens" in str(found)
    assert str(step_error(RuntimeError("odd"))) == "the device failed while computing a pass: odd"
    ours = hw.OutOfPages("ours")
    assert step_error(ours) is ours
