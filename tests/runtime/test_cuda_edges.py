"""The CUDA runner at its edges, in Triton's interpreter: what it keeps, what it lays out, what it is told to draw."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.base.errors import InvalidInput, Unsupported  # noqa: E402
from headway.base.specs.brle import Brle  # noqa: E402
from headway.kernels.triton import layout  # noqa: E402
from headway.kv.tensor_pool import TensorPool  # noqa: E402
from headway.models.decoder import Decoder  # noqa: E402
from headway.runtime.batch import Batch, DecodeRows, pack  # noqa: E402
from headway.runtime.device import pick_device  # noqa: E402
from headway.runtime.passes import Readout  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_step  # noqa: E402
from headway.runtime.runners.cuda.arrays import StepInts  # noqa: E402
from headway.runtime.runners.cuda.model import MIXED, CudaModel  # noqa: E402
from headway.testing import random_model  # noqa: E402
from support.run_ahead import watched  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: there is no device to keep busy."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_step, "PROGRAMS", 8)


def tiny(**options: Any) -> Decoder:
    """The interpreter takes its time for every row, head and tile, so there are few of them."""
    sizes: dict[str, Any] = {"layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}
    return random_model(device=DEVICE, **(sizes | options))


def model_of() -> CudaModel:
    decoder = tiny()
    c = decoder.config
    pool = TensorPool(
        layers=c.layers,
        pages=4,
        page_size=16,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
        by_head=True,
    )
    return CudaModel(decoder, pool)


def test_the_parts_of_a_growing_number_of_rows_do_not_pile_up() -> None:
    model = model_of()
    rooms = {}
    for rows in range(1, 301):  # one decode more beside every prompt
        room = model._scratch_for(MIXED, rows)
        assert len(room.arrived) >= rows
        rooms[id(room)] = room
    assert sum(len(room.arrived) for room in rooms.values()) <= 4 * 300


def test_single_rows_are_the_same_in_one_call_of_attention_and_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one(engine: hw.Engine, i: int) -> np.ndarray:
        async with engine.context() as ctx:
            await ctx.fill([(5 * i + n) % 97 for n in range(2 + 3 * i)]).flush()
            forward = ctx.forward().input([i + 1] if i else list(range(5)))
            handles = forward.probe(-1, hw.Logits()), forward.probe(-1, hw.Hidden(1))  # looking inside, by hand
            out = await forward.execute()
            return np.concatenate([out.logits(handles[0]), out.hidden(handles[1])])

    async def several(engine: hw.Engine) -> list[np.ndarray]:
        return list(await asyncio.gather(*(one(engine, i) for i in range(4))))

    found = []
    for mode, most in (("triton", 2), ("triton", 512), ("off", 512)):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        monkeypatch.setattr(cuda_step, "SINGLES", most)
        with hw.Engine(tiny(), pages=64, threads=1) as engine:
            found.append(engine.run(several))
    for few, many, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(few, many)
        np.testing.assert_allclose(few, expected, rtol=1e-4, atol=1e-4)


def test_of_no_single_rows_there_is_no_call() -> None:
    assert list(cuda_step._in_calls(None)) == [None]
    for rows, counts in ((0, []), (1, [1]), (512, [512]), (513, [512, 1])):
        calls = cuda_step._in_calls(torch.arange(rows))
        assert [len(which) for which in calls if which is not None] == counts


def test_a_row_that_sees_nothing_is_laid_out_as_one_wherever_it_stands() -> None:
    empty, some = Brle.zeros(4), Brle.from_intervals(4, [(1, 3)])
    for masks in ((empty,), (empty, some), (some, empty), (some, empty, some), (empty, empty)):
        count = len(masks)
        rows = DecodeRows(
            tokens=np.ones(count, np.int64),
            positions=np.full(count, 3),
            slots=np.full(count, 3),
            write_slots=np.arange(count) * 16 + 19,
            pages=1 + np.arange(count),
            page_ends=1 + np.arange(count),
            masks=masks,
            readouts=(Readout(0, hw.Sampling(temperature=0.0), seed=0),) * count,
            seeds=np.zeros(count, np.uint64),
        )
        host = np.full(512, 77, np.int32)
        step, batch = StepInts((None,), 16), pack((), rows)
        numbers = step.read(batch)
        assert step.fill(host, batch, numbers, 16) == step.size(numbers, 16)
        head = host[: layout.columns(1) * 16].reshape(-1, 16)[layout.run_field(0) :, :count]
        for column, mask in zip(head.T, masks, strict=True):
            expected = (1, 1, 3) if mask is some else (0, 0, 0)
            assert tuple(column[[layout.RUN_COUNT, layout.FIRST, layout.END]]) == expected


@pytest.mark.parametrize("mode", [pytest.param("triton", marks=pytest.mark.slow), "off", "auto"])
def test_a_generation_whose_mask_comes_to_see_nothing_ends_there(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hw.Mask.sink(1, 1) & hw.Mask.window(9) & ~hw.Mask.window(1)  # slot 0 alone, and from slot 9 on none

    async def one(engine: hw.Engine, mask: hw.Mask | None) -> tuple[int, list[int]]:
        async with engine.context() as ctx:
            await ctx.fill([1, 2, 3, 4, 5]).flush()
            found = list[int]()
            with (
                pytest.raises(hw.InvalidMask, match="attends to none of its 10 slots")
                if mask is not None
                else nullcontext()
            ):
                steps = ctx.fill([6]).generate(hw.Argmax(), max_tokens=6, stop_only=True, attention_mask=mask)
                async for step in steps:
                    found += step.tokens
            return ctx.seq_len, found

    async def several(engine: hw.Engine) -> list[tuple[int, list[int]]]:
        return list(await asyncio.gather(*(one(engine, mask) for mask in (first, None))))

    monkeypatch.setenv("HEADWAY_NATIVE", mode)
    with hw.Engine(tiny(seed=1), pages=64, threads=1) as engine:
        alone = [engine.run(one, first), engine.run(one, None)]
        assert [len(tokens) for _, tokens in alone] == [4, 6]
        assert engine.run(several) == alone
        assert engine.stats().pages_held == 0


def test_a_temperature_that_float32_has_no_room_for_draws_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = list(range(5000, 5010))  # in the second piece of a row

    async def drawn(engine: hw.Engine, temperature: float) -> list[int]:
        async with engine.context() as ctx:
            forward = ctx.forward().input([1, 2, 3]).mask(allow=allowed)
            handles = [
                forward.sample([-1], hw.Multinomial(temperature, seed=2)),
                forward.sample([-2], hw.TopP(0.5, temperature=temperature, seed=2)),
            ]
            out = await forward.execute()
            return [out.token(h) for h in handles]

    async def several(engine: hw.Engine) -> list[list[int]]:
        return list(await asyncio.gather(*(drawn(engine, t) for t in (1e-40, 1e35, 1e39, 1e300))))

    found = []
    for mode in ("triton", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(tiny(vocab_size=9001), pages=32, threads=1) as engine:
            found.append(engine.run(several))
    assert found[0] == found[1]
    assert all(token in allowed for tokens in found[0] for token in tokens)


def test_a_step_whose_result_nobody_asks_for_takes_nothing_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step leaves the one behind it in flight, and nobody reads that."""

    async def drawn(engine: hw.Engine) -> int:
        async with engine.context() as ctx:
            forward = ctx.forward().input([1, 2, 3])
            handle = forward.sample([-1], hw.Multinomial(seed=1))
            return (await forward.execute()).token(handle)

    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    with hw.Engine(tiny(), pages=16, threads=1) as engine:
        runner, batches = engine._loop._runner, list[Batch]()
        begin = runner.begin
        monkeypatch.setattr(runner, "begin", lambda batch: (batches.append(batch), begin(batch))[1])
        expected = engine.run(drawn)
        for _ in range(3):
            engine._loop.call(lambda: (begin(batches[0]), None)[1])
        assert engine.run(drawn) == expected


@pytest.mark.slow
def test_steps_after_one_that_was_measured_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured_in_the_middle(engine: hw.Engine) -> None:
        async with engine.context() as ctx:
            steps = ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=14, stop_only=True)
            engine._profiler.enabled = True  # as the Lab does for a pass of its own, whoever else generates
            for _ in range(3):
                await anext(steps)
            engine._profiler.enabled = False
            with watched(engine) as counted:
                await steps.tokens()
            assert sum(counted.rows) > 5

    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    with hw.Engine(tiny(), pages=16, threads=1) as engine:
        engine.run(measured_in_the_middle)
        assert engine._profiler.take() is None  # nothing behind the last sample


@pytest.mark.parametrize("name", ["cuda:128", "cuda:256", "cuda:512", "cuda:999999"])
def test_a_device_number_that_wraps_around_is_no_device(name: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=name):
        pick_device(name)
