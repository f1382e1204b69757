"""Drafts that a model's first layers make under an adapter."""

from __future__ import annotations

from pathlib import Path

import headway as hw


def own_drafts(folder: Path, adapter: hw.Adapter, tokens: list[int], count: int) -> hw.SpeculationStats:
    """What became of the drafts of the first layer while `count` tokens were generated."""
    drafter = hw.OwnLayers(1, adaptive=False)

    async def program(engine: hw.Engine) -> hw.SpeculationStats | None:
        async with engine.context().fill(tokens) as context:
            generation = context.generate(hw.Argmax(), max_tokens=count, adapter=adapter, speculate=drafter)
            await generation.tokens()
            return generation.speculation

    with hw.Engine(folder, dtype="float32", pages=32, threads=1) as engine:
        stats = engine.run(program)
    assert stats is not None
    return stats
