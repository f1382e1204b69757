"""What runs next. Pure: jobs and a budget in, chunks out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from headway.kv.table import Mark, PageTable
from headway.runtime.passes import Pass, PassResult


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Job:
    """A submitted pass on its way: how far it is, what it holds."""

    work: Pass
    table: PageTable
    base: int  # the table's length when its first token comes
    arrived: float
    after: Job | None = None  # the pass of the same context that must end before it
    future: Future[PassResult] = field(default_factory=Future)
    done: int = 0  # tokens computed
    started: bool = False
    pages: list[int] = field(default_factory=list)  # taken for it, not yet the table's
    kept_pages: frozenset[int] | None = None
    values: dict[int, object] = field(default_factory=dict)
    on_success: Callable[[], None] = _nothing  # called under the lock when the table advances
    on_undo: Callable[[], None] = _nothing  # called under the lock when a pass that succeeded is taken back
    before: Mark | None = None  # what the table was, once it has advanced
    running: bool = False
    abandoned: bool = False
    steps: int = 0
    batch_size: int = 0

    @property
    def remaining(self) -> int:
        return len(self.work.tokens) - self.done


def choose(jobs: Iterable[Job], budget: int) -> list[tuple[Job, int]]:
    """The jobs of the next step and how many tokens of each: short ones first, then chunks of prompts in order.

    A pass that is not causal runs whole, and so may exceed the budget, alone if it must.
    """
    ready = [j for j in jobs if j.after is None]
    short = [j for j in ready if j.remaining <= 1]
    long = [j for j in ready if j.remaining > 1]
    chosen, left = [], budget
    for job in short + long:
        tokens = job.remaining if not job.work.causal else min(job.remaining, left)
        if chosen and tokens > left:
            continue
        if tokens < job.remaining and tokens < 1:
            continue
        chosen.append((job, tokens))
        left -= tokens
    return chosen
