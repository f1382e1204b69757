"""What tests on the scripted engine need: the right results, and steps taken by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import headway as hw
from headway.program.forward import Execution
from headway.runtime.batch import Batch
from headway.runtime.runner import SegmentResult
from headway.testing import ScriptedRunner, random_model, scripted_result

V = 97


def plain(tokens: Sequence[int]) -> int:
    """The token that the scripted model draws greedily behind these."""
    n = len(tokens)
    return scripted_result(tokens, range(n), np.tril(np.ones((n, n), bool)), n - 1) % V


def continued(prompt: Sequence[int], count: int) -> list[int]:
    """What greedy generation adds to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(plain(tokens))
    return tokens[len(prompt) :]


def numbers(n: int, seed: int = 0) -> list[int]:
    """A prompt that shares no page with one of another seed."""
    return np.random.default_rng(seed).integers(0, V, n).tolist()


class Faulty(ScriptedRunner):
    """Asks `before` about every batch that has rows; what that raises is the device's error."""

    def __init__(self, before: Callable[[Batch], None]) -> None:
        super().__init__(V, 16)
        self.before = before

    def execute(self, batch: Batch) -> list[SegmentResult]:
        if len(batch.segments):
            self.before(batch)
        return super().execute(batch)


def faulty_engine(before: Callable[[Batch], None], **options: Any) -> hw.Engine:
    """A scripted engine whose device can fail, or be slow."""
    model = random_model(layers=1, hidden_size=2, heads=1, kv_heads=1, head_dim=2, intermediate_size=1, vocab_size=V)
    return hw.Engine(model, runner=Faulty(before), threads=1, **options)


@dataclass(eq=False)
class Hand:
    """The engine's loop, one step at a call."""

    engine: hw.Engine
    step: Callable[[], None]

    def until(self, *executions: Execution[Any], limit: int = 10_000) -> int:
        """Step until all are done; how many steps it took."""
        taken = 0
        while not all(e.done() for e in executions):
            assert taken < limit, f"not done after {limit} steps"
            self.step()
            taken += 1
        return taken

    def compute(self, context: hw.Context, tokens: Sequence[int]) -> None:
        """Have these tokens in the context."""
        execution = context.forward().input(tokens).execute()
        self.until(execution)
        execution.result(0)


@contextmanager
def by_hand(engine: hw.Engine) -> Iterator[Hand]:
    with engine.loop.by_hand() as step:
        yield Hand(engine, step)


def greedy(context: hw.Context, tokens: Sequence[int]) -> tuple[Execution[hw.Output], hw.SampleHandle]:
    """A pass over tokens that draws the next one."""
    forward = context.forward().input(tokens)
    handle = forward.sample([-1], hw.Argmax())
    return forward.execute(), handle


def check_pages(engine: hw.Engine) -> None:
    """Every page is free, cached or held by somebody known."""
    loop = engine.loop
    with engine.lock:
        loop.drain()
        tables = [t.held() for t in loop.supply.tables if not t.closed]
        jobs = [[*job.pages, *job.back] for job in loop.jobs()]
        engine.allocator.check([*tables, *jobs, *(pin.pages for pin in loop.supply.pins.values())])
