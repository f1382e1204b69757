"""A Job: one submitted pass, or one decoding sequence, from its arrival to its end; and the queue of them.

Mutable bookkeeping under the engine's lock. The scheduler alone moves a job on; programs see only its outcome.
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop
from asyncio import Future as AsyncFuture
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.specs.samplers import Sampling
from headway.kv.states import StateCheckpoint
from headway.kv.table import Mark, PageTable
from headway.runtime.batch import Chunk
from headway.runtime.decode import Decode
from headway.runtime.outcome import Outcome
from headway.runtime.passes import Pass, PassResult, PassStats

PATIENCE = 64  # steps after which a waiting pass gains on others: a prefill on decodes, any on those that hold pages


@dataclass(frozen=True, eq=False)
class FetchedFiles:
    """Pages that were read from files, by key; of no use once everything kept was dropped."""

    generation: int
    pages: Mapping[bytes, bytes]


def _nothing() -> None:
    pass


def _keep_all(values: Mapping[int, object]) -> None:
    pass


@dataclass(eq=False, slots=True)
class Job:
    """A pass in the engine: how far it is and what it holds.

    `pages` were allocated for it and do not belong to the table yet. `chunk` is what the step in flight computes of it
    or, laid out early, what the next step may compute. After its table was preempted, `replay` is the pass that
    computes the old slots again into `replay_pages`, before the job's own tokens. With `decode` the job is a sequence
    that feeds itself: `work` is then its first pass, or its next one wherever it runs as an ordinary pass.
    """

    work: Pass
    table: PageTable
    base: int  # the table's length when the job's first token is computed
    order: int  # of arrival
    arrived: float
    after: Job | None = None  # the pass of the same context that must finish first
    outcome: Outcome[PassResult] = field(default_factory=Outcome)
    waiters: list[tuple[AbstractEventLoop, AsyncFuture[None]]] = field(default_factory=list)
    on_success: Callable[[Mapping[int, object]], None] = _keep_all  # called under the lock when the table advances
    on_undo: Callable[[], None] = _nothing  # called under the lock when a pass that succeeded is taken back
    follow_up: Callable[[], None] | None = None  # submits what comes next: see `Loop._follow_up`
    done: int = 0  # tokens computed or found in the prefix cache
    started: bool = False
    pages: list[int] = field(default_factory=list)
    chunk: Chunk | None = None
    replay: Pass | None = None
    replay_pages: list[int] = field(default_factory=list)
    replayed: int = 0
    replay_from: int = 0  # where the replay began
    resumed: bool = False  # whether its old slots are there again, and nothing of its own was computed since
    written_from: int = 0  # slots before it have their keys and values: the replay computes their state alone
    state: StateCheckpoint | None = None  # the recurrent state that its next rows start from, pinned
    row_states: list[StateCheckpoint] = field(default_factory=list)  # of decode rows in flight, to write, pinned
    saved: list[StateCheckpoint] = field(default_factory=list)  # of its own slots so far, for the table
    keys: list[bytes] = field(default_factory=list)  # of the pass's whole pages, if they can be cached
    hits: int = 0  # pages found in the prefix cache
    is_reading: bool = False  # pages of it are read from files
    reader: Job | None = None  # another one for which pages are read that it waits for
    fetched: FetchedFiles | None = None  # these pages; they are read once
    kept_pages: frozenset[int] | None = None  # page numbers that attention needs; None: all
    values: dict[int, object] = field(default_factory=dict)
    before: Mark | None = None  # the table before it advanced
    left: object = None  # the table's stamp after it advanced
    then: Job | None = None  # the pass that is fed with this one's tokens
    running: bool = False  # it is in the step in flight
    abandoned: bool = False  # it failed or was cancelled: there is no result
    waited: int = 0  # steps since it was last chosen
    waited_before: int = 0  # steps waited before that, so that time spent waiting for pages is not forgotten
    steps: int = 0
    batch_size: int = 0
    pages_trimmed: int = 0  # left out of attention
    began: float = 0.0  # when it was first chosen for a step
    ended: float = 0.0
    decode: Decode | None = None
    resting: bool = False  # a decoding sequence whose buffer is full, or that is over

    @property
    def is_waiting(self) -> bool:
        """Whether it may be planned: it is neither fed by another pass, nor at rest, nor waits for files."""
        return self.after is None and not self.resting and not self.waits_for_files

    @property
    def waits_for_files(self) -> bool:
        """Whether it, or what it waits for, gets pages from files first."""
        others = (self.reader, self.after)
        return self.is_reading or any(job is not None and job.waits_for_files for job in others)

    @property
    def decodes(self) -> bool:
        """Whether it is a decoding sequence whose first token is known."""
        return self.decode is not None and self.decode.begun

    def settle(self) -> None:
        """Its result was delivered: it can no longer be undone, and keeps nothing alive."""
        self.before = self.then = None
        self.on_success, self.on_undo, self.follow_up = _keep_all, _nothing, None

    @property
    def remaining(self) -> int:
        """Tokens to compute, including old slots that must be replayed."""
        old = 0 if self.replay is None else len(self.replay.tokens) - self.replayed
        return old + len(self.work.tokens) - self.done

    @property
    def is_divisible(self) -> bool:
        """Whether it can be computed in chunks; a pass that is not causal runs whole."""
        return self.work.causal or self.replay is not None

    @property
    def pages_in_all(self) -> int:
        """Pages of its sequence once it has succeeded."""
        return -(-(self.base + len(self.work.tokens)) // self.table.page_size)

    @property
    def claim(self) -> tuple[float, int]:
        """Its claim on pages: the job with the larger one may preempt the other's context."""
        return self.table.bid + (self.waited_before + self.waited) // PATIENCE, -self.table.born

    @property
    def has_progress(self) -> bool:
        """Whether preempting it would lose tokens that it has computed and nobody else can use yet: its own, or old
        slots that it has computed again and that have been of no use yet."""
        own = not self.decodes and self.done > self.hits * self.table.page_size
        return self.started and (own or self.resumed or self.replayed > self.replay_from)

    def result(self) -> PassResult:
        """Its values and statistics, once it has succeeded."""
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

    def choose(self) -> None:
        """It is part of the next step."""
        self.running = True
        self.began = self.began or time.perf_counter()
        self.waited_before, self.waited = self.waited_before + self.waited, 0

    def reset(self) -> None:
        """Back to the start. Only `KVCache.give_back` calls this, after it has freed what the job held."""
        self.done = self.replayed = self.replay_from = self.written_from = self.hits = 0
        self.started, self.resumed, self.replay, self.chunk, self.state = False, False, None, None, None
        self.is_reading, self.reader = False, None
        self.pages, self.replay_pages, self.keys, self.row_states, self.saved = [], [], [], [], []
        self.values.clear()


Delivery = tuple[Job, HeadwayError | None]  # a job that failed with this error, or succeeded


class Queue:
    """Jobs that wait or run, in order of arrival, each found directly by its context."""

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
        """A context's jobs, in order of arrival."""
        return list(self._of.get(table, ()))

    def last(self, table: PageTable) -> Job | None:
        """A context's latest job."""
        of = self._of.get(table)
        return of[-1] if of else None
