"""An engine's speed, measured through its public API: prefill, decode, forks, time to first token.

Greedy, to the full length (end-of-text tokens do not end a sequence), over random prompts, so that the prefix cache
never hits. The time to a sequence's first token counts as prefill, the rest as decode.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass

if TYPE_CHECKING:
    import headway as hw


Stamped = list[tuple[int, float]]  # tokens, and when each arrived


@dataclass(frozen=True)
class DecodeTiming:
    """One run: seconds until every sequence had its first token, then seconds for `tokens` more in all of them."""

    prompt_seconds: float
    seconds: float
    tokens: int
    chosen: tuple[int, ...] = ()  # the tokens of the first sequence

    @property
    def rate(self) -> float:
        """Decoded tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Summary:
    """Median, minimum and maximum."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        return Summary(statistics.median(values), min(values), max(values))

    @property
    def spread(self) -> float:
        """max - min, as a fraction of the median."""
        return (self.max - self.min) / self.median if self.median else 0.0


class SpeedTest:
    """Times an engine on random prompts."""

    def __init__(self, engine: hw.Engine, seed: int = 0) -> None:
        self.engine, self._random = engine, random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids."""
        return self._random.choices(range(self.engine.vocab_size), k=tokens)

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> DecodeTiming:
        """All prompts at once, each continued by `tokens`."""

        async def one(prompt: Sequence[int]) -> Stamped:
            async with self.engine.context() as ctx:
                return await _stamped(ctx.fill(prompt), tokens)

        async def everyone(_: hw.Engine) -> tuple[float, list[Stamped]]:
            began = time.perf_counter()
            return began, await asyncio.gather(*map(one, prompts))

        return _timing(*self.engine.run(everyone))

    def fork(self, prompt: Sequence[int], forks: int, tokens: int) -> DecodeTiming:
        """One prompt, computed once, and forks of it that each go on by `tokens`."""

        async def branches(engine: hw.Engine) -> tuple[float, list[Stamped]]:
            began = time.perf_counter()
            async with engine.context() as ctx:
                await ctx.fill(prompt[:-1]).flush()
                twins = [ctx.fork().fill(prompt[-1:]) for _ in range(forks)]
                stamped = await asyncio.gather(*(_stamped(twin, tokens) for twin in twins))
                for twin in twins:
                    twin.release()
                return began, stamped

        return _timing(*self.engine.run(branches))

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""
        return self.decode([prompt], 1).prompt_seconds


async def _stamped(ctx: hw.Context, tokens: int) -> Stamped:
    import headway as hw

    stamped: Stamped = []
    async for step in ctx.generate(hw.Argmax(), max_tokens=tokens, stop_only=True):
        moment = time.perf_counter()
        stamped += [(token, moment) for token in step.tokens]
    assert len(stamped) == tokens, (len(stamped), tokens)
    return stamped


def _timing(began: float, runs: list[Stamped]) -> DecodeTiming:
    ready = max(stamped[0][1] for stamped in runs)  # every sequence has its first token
    ended = max(stamped[-1][1] for stamped in runs)
    after = sum(moment > ready for stamped in runs for _, moment in stamped)
    return DecodeTiming(ready - began, ended - ready, after, tuple(token for token, _ in runs[0]))


def pages_for(sequences: int, slots: int, page_size: int = 16) -> int:
    """Pages that `sequences` of `slots` tokens need, twice over, so that cached pages need not be evicted."""
    return 2 * sequences * (2 + -(-slots // page_size)) + 16


def step_bytes(engine: hw.Engine) -> int:
    """Bytes of weights that one step reads."""
    if engine.info.tensor_parallel > 1:
        return engine.info.weight_bytes
    return sum(engine.decoder.nbytes().values())


def path_of(engine: hw.Engine) -> str:
    """This engine's runner and weight format."""
    return f"{engine.info.runner}; {engine.info.format}"
