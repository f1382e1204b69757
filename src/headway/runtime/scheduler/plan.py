"""The turn: which passes the next step computes, and what their results change.

Turns are formed from the queue under the token budget and folded back into jobs and tables when the device is done.
Bookkeeping under the engine's lock: no thread, no device. A pass that comes while the device computes is prepared then:
its pages are taken and its chunk is laid out. What forms and applies a turn keeps the device waiting, so it is only
what depends on the step that has just ended; figures and results are put together afterwards (`Job.result`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from headway.base.errors import DeadlineExceeded, HeadwayError, InvalidMask, OutOfPages, PassFailed
from headway.base.masks import check_rows
from headway.kv.table import Log, PageTable
from headway.runtime.batch import Chunk, joined, lay_out, needed_pages
from headway.runtime.edits import Damage
from headway.runtime.passes import BEFORE
from headway.runtime.results import Answer
from headway.runtime.runners.base import SegmentResult
from headway.runtime.scheduler.kv_cache import Start, Supply
from headway.runtime.scheduler.order import Job, Queue, ordered

Turn = list[tuple[Job, Chunk]]
Some = TypeVar("Some", bound=Chunk | None)


@dataclass
class Counters:
    """What the loop has done so far."""

    steps: int = 0
    passes: int = 0
    tokens: int = 0
    batch_passes: int = 0
    pages_trimmed: int = 0


class Turns:
    """Forms turns and applies their results. Answers gather in `outbox`: a job, and its error if it failed."""

    def __init__(self, queue: Queue, supply: Supply, budget: int, *, trim: bool) -> None:
        self.counters = Counters()
        self.outbox: list[Answer] = []
        self._queue, self._supply, self._budget, self._trim = queue, supply, budget, trim

    # -- while a step runs -----------------------------------------------------------------------------------------

    def prepare(self, job: Job) -> None:
        """Take a pass's pages and lay its first chunk out, as far as the running step cannot change them.

        Nothing is taken where pages are short: who has the larger claim is seen when the next turn is formed.
        """
        after, table = job.after, job.table
        if after is None:
            if not table.is_aside and self._supply.start(job, self._queue, ahead=True) is Start.READY:
                tokens = _share(job, self._budget, alone=False)
                job.chunk = None if tokens is None else _chunk(job, tokens)
        elif _nearly_done(after) and not any(r.row == BEFORE for r in job.work.readouts):
            whole = len(job.work.tokens)
            if whole <= self._budget and self._supply.take_ahead(job, after):
                assert after.chunk is not None
                job.chunk = lay_out(
                    job.work,
                    table,
                    joined(after.chunk.table_pages, job.pages),
                    base=job.base,
                    part=(0, whole),
                    kept=job.kept_pages,
                    before_position=after.work.positions[-1] if after.work.positions else _last_position(table),
                )

    # -- before a step ---------------------------------------------------------------------------------------------

    def form(self) -> Turn:
        """Chunks for the next step, under the token budget, with pages for every pass that starts.

        Passes that are too late, or blocked with nobody left to make room, are refused.
        """
        self._expire()
        self._renew()
        turn: Turn = []
        blocked: list[Job] = []
        left = self._budget
        for job in ordered(self._queue):
            if left <= 0 and job.remaining > 0:
                job.waited += 1
                continue
            outcome = Start.READY if job.started else self._supply.start(job, self._queue)
            if outcome is Start.BLOCKED:
                blocked.append(job)
            tokens = _share(job, left, alone=not turn) if outcome is Start.READY else None
            if tokens is None:
                job.waited += 1
                continue
            left -= tokens
            turn.append((job, _chosen(job, tokens)))
        if not turn and blocked:
            first = max(blocked, key=lambda job: job.claim)
            if self._supply.start(first, self._queue, force=True) is Start.READY:
                return self._form_alone(first)
            self.fail(first, self._no_room(first))
        return turn

    def _renew(self) -> None:
        """Streaks that have gone on take part with the token that is next."""
        for job in list(self._queue):
            if job in self._queue and job.goes_on and job.base != job.table.length and not job.resting:
                self.renew(job)

    def renew(self, job: Job) -> None:
        """The next token of a streak, as an ordinary pass."""
        assert job.streak is not None
        table = job.table
        self._supply.give_back(job)
        job.base, job.work = table.length, job.streak.pass_for(table)
        job.kept_pages = needed_pages(job.work, job.base, table.page_size) if self._trim else None
        try:
            check_rows(job.work.masks or ())
        except InvalidMask as error:  # which is known only when the streak comes there
            self.fail(job, error)

    def _form_alone(self, job: Job) -> Turn:
        tokens = _share(job, self._budget, alone=True)
        assert tokens is not None
        return [(job, _chosen(job, tokens))]

    def _expire(self) -> None:
        """Refuse passes whose context's time is over."""
        now = time.monotonic()
        for job in [j for j in self._queue if j.table.deadline < now]:
            if job in self._queue:
                self.fail(job, late())

    def _no_room(self, job: Job) -> OutOfPages:
        table, pool = job.table, self._supply.allocator
        need = -(-(job.base + len(job.work.tokens)) // table.page_size)
        return OutOfPages(
            f"this pass needs {need} pages for its context; of {pool.total} pages {pool.available} are free and "
            f"{pool.held} are held, by pinned prefixes or by the context itself; "
            "unpin some, or create the engine with a larger pages="
        )

    def without(self, turn: list[tuple[Job, Some]], damage: Damage) -> list[tuple[Job, Some]]:
        """The turn without passes that need what was spoilt before it began: they fail, and their contexts recover."""
        hurt = self._supply.hurt(damage)
        rest: list[tuple[Job, Some]] = []
        for job, chunk in turn:
            error = hurt.get(job.table) or damage.of([*job.pages, *job.back])
            if error is None and not job.abandoned:
                rest.append((job, chunk))
                continue
            job.running = False
            if job.abandoned or error is None:
                self._supply.give_back(job)
            else:
                self.fail(job, error)
        self.recover(damage)
        return rest

    def recover(self, damage: Damage) -> None:
        """Contexts give up what was spoilt, to be computed again; where that cannot be, their passes fail."""
        hurt = self._supply.hurt(damage)
        self._supply.recover(damage, hurt, self._queue)
        for table, error in hurt.items():
            for job in self._queue.of(table) if table.lost is not None else ():
                if job in self._queue:
                    self.fail(job, error)

    # -- after a step ----------------------------------------------------------------------------------------------

    def apply(self, turn: Turn, results: Sequence[SegmentResult | HeadwayError], tokens: int) -> None:
        """Fold the results of a step that computed this many tokens into jobs and tables."""
        size, now = len(turn), time.perf_counter()
        if turn:
            self.counters.steps += 1
            self.counters.batch_passes += size
            self.counters.tokens += tokens
        for (job, chunk), result in zip(turn, results, strict=True):
            job.running, job.chunk = False, None
            if job.abandoned:
                self._supply.give_back(job)
                continue
            error = _error(result)
            if error is not None:
                self.fail(job, error)
                continue
            assert isinstance(result, SegmentResult)
            job.steps += 1
            job.batch_size = max(job.batch_size, size)
            if chunk.work is job.replay:
                self._replayed(job, chunk, result)
                continue
            job.values.update(result.values)
            job.done = chunk.stop
            if job.goes_on:
                self._drawn(job, result)
                continue
            self._supply.computed(job)
            if job.done == len(job.work.tokens):
                self._finish(job, result, now)

    def _replayed(self, job: Job, chunk: Chunk, result: SegmentResult) -> None:
        """Old slots are back; when all are, the job's own tokens are next."""
        job.replayed = chunk.stop
        if job.replayed == len(chunk.work.tokens):
            if job.table.state is None:
                job.table.state = result.state
            self._supply.brought_back(job)

    def _drawn(self, job: Job, result: SegmentResult) -> None:
        """A streak has computed a token and drawn the next."""
        streak, token, pages = job.streak, job.values[0], job.pages
        assert streak is not None
        assert isinstance(token, int)
        if job.kept_pages is not None:
            job.pages_trimmed = _trimmed(job)
            self.counters.pages_trimmed += job.pages_trimmed
        streak.walks = False
        if streak.stops(job):
            self._supply.give_back(job)
        else:
            streak.draw(job, token, job.work.mask(0), result.state)
            assert pages == job.pages == []
            self._supply.finished(job)
            job.started = False
            self.counters.passes += 1
        self.tell(job)

    def tell(self, job: Job) -> None:
        """A streak has drawn: whoever waits for it is told."""
        if job.waiters:
            self.outbox.append((job, None))

    def stop(self, job: Job) -> None:
        """A streak ends here: what its program has not taken is cut off."""
        streak, table = job.streak, job.table
        assert streak is not None
        if job in self._queue:
            self._queue.remove(job)
        job.abandoned = True
        self._supply.give_back(job)
        streak.cut(table)
        if job.running:
            table.wipe()

    def _finish(self, job: Job, result: SegmentResult, now: float) -> None:
        """The pass succeeded: the table advances, and a pass that waits for its token gets it."""
        work, table, count = job.work, job.table, len(job.work.tokens)
        self._queue.remove(job)
        job.before, job.ended = table.mark(), now
        if job.kept_pages is not None or table.has_discards:
            job.pages_trimmed = _trimmed(job)
            self.counters.pages_trimmed += job.pages_trimmed
        masks = (None,) * count if work.masks is None else work.masks
        log = Log(work.tokens, work.positions, masks, 0 if work.causal else work.rows)
        table.advance(log, job.pages, commit=work.commit, keys=job.keys)
        if count:
            table.state = result.state
        if table.token_budget is not None:
            table.token_budget -= count
        self._supply.finished(job)
        job.pages, job.left = [], table.stamp
        job.on_success()
        later = job.then
        if later is not None and later.after is job:
            later.after, later.work = None, later.work.fed(job.values, table.tokens)
            if later.chunk is not None:
                later.started, later.chunk.work = True, later.work
            if later.streak is not None:
                later.streak.begin(later)
        self.counters.passes += 1
        self.outbox.append((job, None))

    def fail(self, job: Job, error: HeadwayError) -> None:
        """A pass failed: it is undone, and with it the passes that wait for its tokens."""
        self._queue.remove(job)
        job.abandoned = True
        if not job.running:  # else what it holds is given back when its step ends
            self._supply.give_back(job)
        self.outbox.append((job, error))
        for later in self._queue.of(job.table):
            if later.after is job:
                self.fail(later, PassFailed(f"the pass whose token this one takes failed: {error}"))


def late() -> DeadlineExceeded:
    return DeadlineExceeded("the context's deadline has passed; give it more time with deadline=, or create a new one")


def _share(job: Job, left: int, *, alone: bool) -> int | None:
    """How many tokens of a job fit; a pass that is not causal runs whole, alone if it must."""
    if job.replay is not None:
        return min(len(job.replay.tokens) - job.replayed, left)
    rest = len(job.work.tokens) - job.done
    if not job.work.causal:
        return rest if rest <= left or alone else None
    return min(rest, left)


def _nearly_done(job: Job) -> bool:
    """Whether the running step computes the last of its tokens."""
    return job.running and not job.abandoned and job.replay is None and job.chunk is not None and job.chunk.ends


def _chosen(job: Job, tokens: int) -> Chunk:
    """This many tokens of a job for the next step, laid out before or now."""
    job.chosen()
    ahead = job.chunk
    if ahead is None or (ahead.start, ahead.stop) != (job.done, job.done + tokens):
        job.chunk = ahead = _chunk(job, tokens)
    return ahead


def _chunk(job: Job, tokens: int) -> Chunk:
    table, pages = job.table, job.table.physical
    work, base, done, kept = job.work, job.base, job.done, job.kept_pages
    if job.replay is not None:
        work, base, done, kept = job.replay, 0, job.replayed, None
        pages = pages.copy()
        pages[table.absent()] = job.back
    else:
        assert job.base == table.length
        pages = joined(pages, job.pages)
    part, before = (done, done + tokens), _last_position(table)
    return lay_out(work, table, pages, base=base, part=part, kept=kept, before_position=before)


def _last_position(table: PageTable) -> int:
    return table.positions[-1] if table.length else -1


def _trimmed(job: Job) -> int:
    """How many pages attention left out; the table has not advanced yet."""
    table, kept = job.table, job.kept_pages
    pages = job.pages_in_all
    if kept is None:
        return table.pages.count(None)
    return pages - sum(table.pages[n : n + 1] != [None] for n in kept if n < pages)


def _error(result: SegmentResult | HeadwayError) -> HeadwayError | None:
    """Why a pass failed on the device, or the first of its values that is an error."""
    if isinstance(result, HeadwayError):
        return result
    for value in result.values.values():
        if isinstance(value, HeadwayError):
            return value
    return None
