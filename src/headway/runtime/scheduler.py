"""What runs next. Pure: jobs and their ranks in, an order out.

Fairness, for the rows of a step: a pass that has waited n steps ranks as if its context's bid were n higher. So a newer
pass with a higher bid overtakes it for at most as many steps as the bids differ; bids lie between -1000 and 1000.
For pages, which are dear to move, it takes PATIENCE steps to rank one higher, and among equals the older context wins:
contexts that fit run on, the youngest wait, and none waits for ever. A pass that got pages by waiting keeps that rank
to its end, so that it is not set aside again before it has computed anything of use.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from asyncio import Future as AsyncFuture
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from headway.kv.table import Mark, PageTable
from headway.runtime.passes import Pass, PassResult

BID_LIMIT = 1000.0
PATIENCE = 64  # steps after which a waiting pass gains on others: a prompt on decodes, any on those that hold pages


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Job:
    """A submitted pass on its way: how far it is, what it holds.

    `pages` were taken for it and are not yet the table's. When its table was set aside, `replay` is the pass that
    computes the old slots again into `back`, before the job's own.
    """

    work: Pass
    table: PageTable
    base: int  # the table's length when its first token comes
    order: int  # of arrival
    arrived: float
    after: Job | None = None  # the pass of the same context that must end before it
    future: Future[PassResult] = field(default_factory=Future)
    waiters: list[tuple[AbstractEventLoop, AsyncFuture[None]]] = field(default_factory=list)
    on_success: Callable[[], None] = _nothing  # called under the lock when the table advances
    on_undo: Callable[[], None] = _nothing  # called under the lock when a pass that succeeded is taken back
    done: int = 0  # tokens computed or found in the cache
    started: bool = False
    pages: list[int] = field(default_factory=list)
    replay: Pass | None = None
    back: list[int] = field(default_factory=list)
    replayed: int = 0
    keys: list[bytes] = field(default_factory=list)  # of the pass's whole pages, when they can be cached
    hits: int = 0  # pages found in the cache
    kept_pages: frozenset[int] | None = None
    values: dict[int, object] = field(default_factory=dict)
    before: Mark | None = None  # what the table was, once it has advanced
    left: object = None  # the table's stamp when it had advanced
    then: Job | None = None  # the pass that takes its tokens
    running: bool = False
    abandoned: bool = False  # it failed, or nobody wants it: there is no result
    waited: int = 0  # steps in which it was not chosen, since it last was
    waited_before: int = 0  # the same until then: what it has waited for pages is not forgotten when it gets some
    steps: int = 0
    batch_size: int = 0

    def settle(self) -> None:
        """Its result was delivered: it can no longer be undone, and holds on to nothing."""
        self.before = self.then = None
        self.on_success = self.on_undo = _nothing

    @property
    def remaining(self) -> int:
        """Tokens to compute, old slots that must come back included."""
        old = 0 if self.replay is None else len(self.replay.tokens) - self.replayed
        return old + len(self.work.tokens) - self.done

    @property
    def claim(self) -> tuple[float, int]:
        """Its claim on pages: the larger one may set the other's context aside."""
        return self.table.bid + (self.waited_before + self.waited) // PATIENCE, -self.table.born

    def chosen(self) -> None:
        """It is part of the next step."""
        self.running = True
        self.waited_before, self.waited = self.waited_before + self.waited, 0

    def reset(self) -> None:
        """Back to the start; what it held is the caller's to give back."""
        self.done = self.replayed = self.hits = 0
        self.started, self.replay = False, None
        self.pages, self.back, self.keys = [], [], []
        self.values.clear()


def ordered(jobs: Iterable[Job]) -> list[Job]:
    """Jobs that may run, in the order they are given tokens: decodes and the impatient first, then prompts."""
    ready = [job for job in jobs if job.after is None]
    return sorted(ready, key=lambda j: (j.remaining > 1 and j.waited < PATIENCE, -j.table.bid - j.waited, j.order))
