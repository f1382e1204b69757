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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from headway.base.samplers import Sampling
from headway.kv.table import Mark, PageTable
from headway.runtime.batch import Chunk
from headway.runtime.outcome import Outcome
from headway.runtime.passes import Pass, PassResult, PassStats
from headway.runtime.scheduler.decode import Streak

BID_LIMIT = 1000.0
PATIENCE = 64  # steps after which a waiting pass gains on others: a prompt on decodes, any on those that hold pages


def _nothing() -> None:
    pass


@dataclass(eq=False, slots=True)
class Job:
    """A submitted pass on its way: how far it is, what it holds.

    `pages` were taken for it and are not yet the table's. `chunk` is what the running step computes of it or, laid out
    ahead, what the next one may. When its table was set aside, `replay` is the pass that
    computes the old slots again into `back`, before the job's own.
    """

    work: Pass
    table: PageTable
    base: int  # the table's length when its first token comes
    order: int  # of arrival
    arrived: float
    after: Job | None = None  # the pass of the same context that must end before it
    outcome: Outcome[PassResult] = field(default_factory=Outcome)
    waiters: list[tuple[AbstractEventLoop, AsyncFuture[None]]] = field(default_factory=list)
    on_success: Callable[[], None] = _nothing  # called under the lock when the table advances
    on_undo: Callable[[], None] = _nothing  # called under the lock when a pass that succeeded is taken back
    done: int = 0  # tokens computed or found in the cache
    started: bool = False
    pages: list[int] = field(default_factory=list)
    chunk: Chunk | None = None
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
    pages_trimmed: int = 0  # left out of attention
    ended: float = 0.0
    streak: Streak | None = None  # it repeats itself
    resting: bool = False  # it waits for its program, not for its turn

    @property
    def goes_on(self) -> bool:
        """Whether it is a streak that has begun."""
        return self.streak is not None and self.streak.begun

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
    def pages_in_all(self) -> int:
        """Pages of its sequence when it has succeeded."""
        return -(-(self.base + len(self.work.tokens)) // self.table.page_size)

    @property
    def claim(self) -> tuple[float, int]:
        """Its claim on pages: the larger one may set the other's context aside."""
        return self.table.bid + (self.waited_before + self.waited) // PATIENCE, -self.table.born

    def result(self) -> PassResult:
        """Its values and figures, once it has succeeded."""
        readouts = self.work.readouts
        stats = PassStats(
            rows=self.work.rows,
            pages=self.pages_in_all - self.pages_trimmed,
            pages_trimmed=self.pages_trimmed,
            cache_hits=self.hits,
            batch_size=self.batch_size,
            steps=self.steps,
            seconds=self.ended - self.arrived,
            seeds=tuple([r.seed for r in readouts if isinstance(r.what, Sampling)]),
        )
        return PassResult(tuple([self.values[i] for i in range(len(readouts))]), stats)

    def chosen(self) -> None:
        """It is part of the next step."""
        self.running = True
        self.waited_before, self.waited = self.waited_before + self.waited, 0

    def reset(self) -> None:
        """Back to the start; `Supply.give_back` alone calls this, once it has given back what the job held."""
        self.done = self.replayed = self.hits = 0
        self.started, self.replay, self.chunk = False, None, None
        self.pages, self.back, self.keys = [], [], []
        self.values.clear()


class Queue:
    """Jobs that wait or run, in the order they came, each found at once by its context."""

    def __init__(self) -> None:
        self._jobs: dict[Job, None] = {}
        self._of: dict[PageTable, list[Job]] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def add(self, job: Job) -> None:
        self._jobs[job] = None
        self._of.setdefault(job.table, []).append(job)

    def remove(self, job: Job) -> None:
        del self._jobs[job]
        of = self._of[job.table]
        of.remove(job)
        if not of:
            del self._of[job.table]

    def of(self, table: PageTable) -> list[Job]:
        """A context's jobs, in the order they came."""
        return list(self._of.get(table, ()))

    def last(self, table: PageTable) -> Job | None:
        """A context's latest job."""
        of = self._of.get(table)
        return of[-1] if of else None


def ordered(jobs: Iterable[Job]) -> list[Job]:
    """Jobs that may run, in the order they are given tokens: decodes and the impatient first, then prompts."""
    return sorted([job for job in jobs if job.after is None and not job.resting], key=_rank)


def _rank(job: Job) -> tuple[bool, float, int]:
    return job.remaining > 1 and job.waited < PATIENCE, -job.table.bid - job.waited, job.order
