"""A context that nobody refers to gives its pages back at once, without waiting for the garbage collector's cycles."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest

import headway as hw
from headway.testing import random_model


@pytest.fixture
def engine() -> Iterator[hw.Engine]:
    gc.collect()
    gc.disable()
    try:
        with hw.Engine(random_model(), pages=64) as engine:
            yield engine
    finally:
        gc.enable()


async def one_pass(ctx: hw.Context) -> None:
    fwd = ctx.fill([1, 2, 3]).forward()
    entropy = fwd.probe(-1, hw.Entropy())
    assert (await fwd.execute()).entropy(entropy) > 0


async def refused(ctx: hw.Context) -> None:
    await one_pass(ctx)
    fwd = ctx.forward().input([4])
    fwd.probe(9, hw.Entropy())
    with pytest.raises(hw.OutOfRange):
        await fwd.execute()


async def generated(ctx: hw.Context) -> None:
    await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=3).tokens()


@pytest.mark.parametrize("use", [one_pass, refused, generated])
def test_its_pages_are_free(engine: hw.Engine, use: Callable[[hw.Context], Awaitable[None]]) -> None:
    async def program(engine: hw.Engine) -> None:
        await use(engine.context())

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_a_forgotten_fork_leaves_its_parent_alone(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        ctx = engine.context().fill(range(20))
        await ctx.flush()
        held = engine.stats().pages_held
        await one_pass(ctx.fork())
        assert engine.stats().pages_held == held
        await one_pass(ctx)

    engine.run(program)
    assert engine.stats().pages_held == 0
