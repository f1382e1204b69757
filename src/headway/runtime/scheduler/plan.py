"""The scheduler: what the next step computes, and what its results change. The one place where that is decided.

A step has decode rows (one for each decoding sequence, run_ahead.py) and chunks of passes (prefills in pieces, single
passes, replays), formed together under the token budget: continuous batching. It may be planned while the step before
is in flight; then it takes only what cannot depend on that step: decode rows by reference to its tokens, and passes it
does not touch. Bookkeeping under the engine's lock: no thread, no device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidMask, OutOfPages, PassFailed
from headway.base.specs.masks import check_rows
from headway.kv.table import Log
from headway.runtime.batch import Batch, Chunk, joined, lay_out, needed_pages, pack
from headway.runtime.edits import Damage
from headway.runtime.job import PATIENCE, Delivery, Job, Queue
from headway.runtime.passes import BEFORE, DecodeMask
from headway.runtime.runners.base import Runner, SegmentResult, StepResult
from headway.runtime.scheduler.admission import late
from headway.runtime.scheduler.chunks import (
    chosen_chunk,
    is_nearly_done,
    is_prefill,
    last_position,
    new_chunk,
    tokens_that_fit,
    trimmed_pages,
)
from headway.runtime.scheduler.kv_cache import KVCache, Start
from headway.runtime.scheduler.order import ordered
from headway.runtime.scheduler.run_ahead import RunAhead
from headway.runtime.scheduler.step_plan import StepPlan
from headway.runtime.scheduler.step_time import StepTime


@dataclass
class Counters:
    """What the engine has done so far."""

    steps: int = 0
    passes: int = 0
    tokens: int = 0
    batch_passes: int = 0
    pages_trimmed: int = 0
    drafted: int = 0  # tokens that drafters proposed and passes computed
    accepted: int = 0  # of these, tokens that were kept


class Scheduler:
    """Plans steps and applies their results. Deliveries gather in `outbox`: a job, and its error if it failed."""

    def __init__(
        self,
        queue: Queue,
        kv_cache: KVCache,
        runner: Runner,
        budget: int,
        mixed_budget: int,
        *,
        trim: bool,
        positions: bool,
        step_time: StepTime | None = None,
    ) -> None:
        self.counters = Counters()
        self.outbox: list[Delivery] = []
        self.run_ahead = RunAhead(kv_cache, runner, positions=positions, trim=trim)
        self._queue, self._kv_cache, self._runner = queue, kv_cache, runner
        self._budget, self._mixed_budget = budget, min(budget, mixed_budget)
        self._step_time = step_time
        self._trim, self._positions = trim, positions
        self._draining = False  # a job waits that cannot be planned while a step is in flight

    def replace_runner(self, runner: Runner) -> None:
        """Plan for another runner."""
        self._runner = runner
        self.run_ahead.replace_runner(runner)

    # -- when a pass arrives ---------------------------------------------------------------------------------------

    def prepare(self, job: Job) -> None:
        """Allocate a pass's pages and lay its first chunk out, as far as the step in flight cannot change them.

        Nothing is allocated when pages are scarce: who has the larger claim is decided when the next step is planned.
        """
        after, table = job.after, job.table
        if after is None:
            if not table.must_replay and self._kv_cache.start(job, self._queue, ahead=True) is Start.READY:
                tokens = tokens_that_fit(job, self._budget, alone=False)
                job.chunk = None if tokens is None else new_chunk(job, tokens)
        elif is_nearly_done(after) and not any(r.row == BEFORE for r in job.work.readouts):
            whole = len(job.work.tokens)
            if whole <= self._budget and self._kv_cache.take_ahead(job, after):
                assert after.chunk is not None
                job.chunk = lay_out(
                    job.work,
                    table,
                    joined(after.chunk.table_pages, job.pages),
                    base=job.base,
                    part=(0, whole),
                    kept=job.kept_pages,
                    before_position=after.work.positions[-1] if after.work.positions else last_position(table),
                )

    # -- before a step ---------------------------------------------------------------------------------------------

    def plan(self, in_flight: StepPlan | None) -> StepPlan | None:
        """The next step, or None if there is nothing to compute, or nothing before the step in flight is applied.

        Jobs whose deadline has passed, or that are blocked with nobody left to preempt, are refused.
        """
        if in_flight is None:
            self._draining = False
        elif self._draining or not in_flight.decode_jobs:
            return None  # without decode rows there is nothing to be ahead of
        self._expire()
        ahead = set() if in_flight is None else in_flight.live_decodes
        busy = {} if in_flight is None else {job.table: job for job in in_flight.jobs}
        decodes: list[Job] = []
        slots: list[int] = []
        chunks: list[tuple[Job, Chunk]] = []
        blocked: list[Job] = []
        left, most, run_ahead = self._budget, self._runner.decode_limit, self.run_ahead
        prefills = self._prefill_tokens(candidates := self._candidates())
        for job in candidates:
            flies = job in ahead
            if not flies and (job.running or busy.get(job.table, job) is not job):
                continue  # the step in flight computes it, or still writes to its context, though for nothing
            if job.decodes:
                slot = run_ahead.next_slot(job, flies)
                if slot is None:
                    continue
                if left <= 0:
                    job.waited += 1
                    continue
                if len(decodes) < most and run_ahead.fits(job, slot):
                    if run_ahead.give_page(job, slot, ahead=in_flight is not None):
                        job.running = True  # now: what comes next must not preempt it
                        decodes.append(job)
                        slots.append(slot)
                        left -= 1
                        continue
                    self._draining = in_flight is not None
                if flies or not self._renewed(job):
                    continue  # it is computed as a pass, once its row in flight is applied
            room = self._room(job, left, len(decodes), prefills)
            if room <= 0 and job.remaining > 0:
                job.waited += 1
                continue
            chunk = self._start(job, room, blocked, ahead=in_flight is not None, alone=not (decodes or chunks))
            if chunk is None:
                job.waited += 1
                continue
            left -= chunk.stop - chunk.start
            prefills -= chunk.stop - chunk.start if is_prefill(job) else 0
            chunks.append((job, chunk))
        if blocked and not (decodes or chunks) and in_flight is None:
            chunks = self._forced(blocked)
        if decodes:
            rows = self.run_ahead.lay_out(decodes, slots, () if in_flight is None else in_flight.decode_jobs)
            return StepPlan(decodes, chunks, pack([c for _, c in chunks], rows, positions=self._positions))
        if chunks:
            self.run_ahead.forget()
            return StepPlan((), chunks, self._packed(chunks))
        return None

    def _prefill_tokens(self, candidates: Sequence[Job]) -> int:
        """How many tokens of prefills the step may have: fewer where somebody waits for its other rows."""
        if self._step_time is None or all(map(is_prefill, candidates)):
            return self._budget
        return self._step_time.prefill_tokens

    def _room(self, job: Job, left: int, decodes: int, prefills: int) -> int:
        """How many tokens of a job the step may have: beside decode rows a smaller budget, of which prefills have at
        least half."""
        room = left
        if decodes and job.is_divisible:
            taken = self._budget - decodes - left
            room = min(left, max(self._mixed_budget - decodes, self._mixed_budget // 2) - taken)
        return min(room, prefills) if is_prefill(job) else room

    def _candidates(self) -> Sequence[Job]:
        """Jobs that may run, in the order in which they get tokens."""
        decodes: list[Job] = []
        others: list[Job] = []
        for job in self._queue:
            if job.is_waiting:
                (decodes if job.decodes else others).append(job)
        if len(decodes) + bool(others) <= self._mixed_budget:  # each decode gets its token: their order is free
            whole = [job for job in others if not job.is_divisible and job.waited >= PATIENCE]
            rest = others if not whole else [job for job in others if job not in whole]
            return [*whole, *decodes, *ordered(rest)]
        return ordered([*decodes, *others])

    def _renewed(self, job: Job) -> bool:
        """The next token of a decoding sequence as an ordinary pass; False if its mask is refused."""
        assert job.decode is not None
        table = job.table
        if job.base == table.length:
            return True  # it is one already
        self._kv_cache.give_back(job)
        job.base, job.work = table.length, job.decode.next_pass(table)
        job.kept_pages = needed_pages(job.work, job.base, table.page_size) if self._trim else None
        try:
            check_rows(job.work.masks or ())
        except InvalidMask as error:  # which is known only when the sequence gets there
            self.fail(job, error)
            return False
        return True

    def _start(self, job: Job, left: int, blocked: list[Job], *, ahead: bool, alone: bool) -> Chunk | None:
        """The chunk of a job that fits into what is left of the budget, with pages for the whole pass."""
        if not job.started:
            if ahead and job.table.must_replay:
                self._draining = True
                return None
            start = self._kv_cache.start(job, self._queue, ahead=ahead)
            if start is Start.BLOCKED:
                blocked.append(job)
                self._draining = ahead
            if start is not Start.READY:
                return None
        chunk = self._chosen(job, left, alone=alone)
        if chunk is not None and chunk.states is None and self._lacks_states(job, chunk):
            blocked.append(job)
            self._draining = ahead
            job.running = False
            return None
        return chunk

    def _chosen(self, job: Job, left: int, *, alone: bool) -> Chunk | None:
        """The next tokens of a started job for a step; None if none of them fit."""
        if self._kv_cache.states is not None:
            self._kv_cache.states.find_start(job)
        tokens = tokens_that_fit(job, left, alone=alone)
        return None if tokens is None else chosen_chunk(job, tokens)

    def _lacks_states(self, job: Job, chunk: Chunk) -> bool:
        """Whether there are no places for the recurrent state that a chunk leaves behind."""
        states = self._kv_cache.states
        return states is not None and not states.take(job, chunk)

    def _forced(self, blocked: list[Job]) -> list[tuple[Job, Chunk]]:
        """Nothing can run: the blocked job with the largest claim preempts any context without a pass, or fails."""
        job = max(blocked, key=lambda job: (job.started, job.claim))
        if not job.started and self._kv_cache.start(job, self._queue, force=True) is not Start.READY:
            self.fail(job, self._no_room(job))
            return []
        chunk = self._chosen(job, self._budget, alone=True)
        assert chunk is not None
        if self._lacks_states(job, chunk):
            self._kv_cache.free_states(job, self._queue)
            assert not self._lacks_states(job, chunk)
        return [(job, chunk)]

    def _packed(self, chunks: Sequence[tuple[Job, Chunk]]) -> Batch:
        return pack([chunk for _, chunk in chunks], positions=self._positions)

    def _expire(self) -> None:
        """Refuse passes whose context's deadline has passed."""
        now = time.monotonic()
        for job in [j for j in self._queue if j.table.deadline < now]:
            if job in self._queue:
                self.fail(job, late())

    def _no_room(self, job: Job) -> OutOfPages:
        table, pool = job.table, self._kv_cache.allocator
        need = -(-(job.base + len(job.work.tokens)) // table.page_size)
        return OutOfPages(
            f"this pass needs {need} pages for its context; of {pool.total} pages {pool.available} are free and "
            f"{pool.held} are held, by pinned prefixes or by the context itself; "
            "unpin some, or create the engine with a larger pages="
        )

    # -- when something fails --------------------------------------------------------------------------------------

    def without_damaged(self, plan: StepPlan, damage: Damage, still: StepPlan | None) -> StepPlan:
        """The plan without passes whose pages were damaged before it began: they fail, and their contexts recover.

        Decode rows are computed as passes in the next step.
        """
        self.run_ahead.fall_back(plan.decode_jobs, set() if still is None else set(still.decode_jobs))
        affected = self._kv_cache.affected(damage)
        chunks: list[tuple[Job, Chunk]] = []
        for job, chunk in plan.chunks:
            error = affected.get(job.table) or damage.of([*job.pages, *job.replay_pages])
            if error is None and not job.abandoned:
                chunks.append((job, chunk))
                continue
            job.running = False
            if job.abandoned or error is None or error in damage.misses:  # a page that was missed is computed instead
                self._kv_cache.give_back(job)
            else:
                self.fail(job, error)
        self.recover(damage)
        return StepPlan((), chunks, self._packed(chunks))

    def recover(self, damage: Damage) -> None:
        """Contexts give up damaged pages, to compute them again; where that is impossible, their passes fail."""
        affected = self._kv_cache.affected(damage)
        self._kv_cache.recover(damage, affected, self._queue)
        for table, error in affected.items():
            for job in self._queue.of(table) if table.lost is not None else ():
                if job in self._queue:
                    self.fail(job, error)

    def alone(self, job: Job, chunk: Chunk) -> Batch | None:
        """The batch of one pass by itself, after a step of several failed; None if nobody wants it any more."""
        return None if job.abandoned else self._packed([(job, chunk)])  # its table may have changed meanwhile

    def drop(self, plan: StepPlan, still: StepPlan) -> None:
        """Ignore a step in flight that follows a failed one, `still`: its rows and passes start over."""
        self.run_ahead.fall_back(plan.decode_jobs, set(still.decode_jobs))
        for job, _ in plan.chunks:
            job.running = False
            self._kv_cache.give_back(job)

    # -- after a step ----------------------------------------------------------------------------------------------

    @staticmethod
    def masks(plan: StepPlan) -> list[DecodeMask | None]:
        """The logit mask of each decode row, now that the tokens it computes are known."""
        return [None if job.abandoned or job.decode is None else job.decode.logit_mask for job in plan.decode_jobs]

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step took this long; before it is applied."""
        if self._step_time is not None:
            prefill = plan.prefill_tokens
            self._step_time.note(plan.batch.rows - prefill, prefill, seconds)

    def apply(self, plan: StepPlan, result: StepResult, in_flight: StepPlan | None) -> None:
        """Fold a step's results into jobs and tables, while the next one may be in flight."""
        now, size = time.perf_counter(), len(plan.decode_jobs) + len(plan.chunks)
        self.counters.steps += 1
        self.counters.batch_passes += size
        self.counters.tokens += plan.batch.computed
        if plan.batch.decode is not None:
            self._apply_decodes(plan, result, set() if in_flight is None else set(in_flight.decode_jobs))
        for (job, chunk), segment in zip(plan.chunks, result.segments, strict=True):
            self._apply_chunk(job, chunk, segment, size, now)

    def _apply_decodes(self, plan: StepPlan, result: StepResult, still: set[Job]) -> None:
        rows, run = plan.batch.decode, self.run_ahead
        assert rows is not None
        for job, error in run.apply(plan.decode_jobs, rows, result, still):
            self.fail(job, error)
        for job in plan.decode_jobs:
            self.announce(job)
        self.counters.passes, run.sampled = self.counters.passes + run.sampled, 0
        self.counters.pages_trimmed, run.pages_trimmed = self.counters.pages_trimmed + run.pages_trimmed, 0

    def _apply_chunk(
        self, job: Job, chunk: Chunk, result: SegmentResult | HeadwayError, batch_size: int, now: float
    ) -> None:
        job.running = False
        error = None if job.abandoned else _error(result)
        if job.abandoned or error is not None:
            if error is None:
                self._kv_cache.give_back(job)
            else:
                self.fail(job, error)
            job.chunk = None
            return
        assert isinstance(result, SegmentResult)
        job.chunk = None
        if self._kv_cache.states is not None:
            self._kv_cache.states.computed(job, chunk)
        job.steps += 1
        job.batch_size = max(job.batch_size, batch_size)
        if chunk.work is job.replay:
            self._apply_replay(job, chunk, result)
            return
        job.values.update(result.values)
        job.done, job.resumed = chunk.stop, False
        if job.decodes:
            self._apply_decode_pass(job, result)
            return
        self._kv_cache.computed(job)
        if job.done == len(job.work.tokens):
            self._finish(job, result, now)

    def _apply_replay(self, job: Job, chunk: Chunk, result: SegmentResult) -> None:
        """Old slots are computed again; after the last one the job's own tokens are next."""
        job.replayed = chunk.stop
        if job.replayed == len(chunk.work.tokens):
            if job.table.state is None:
                job.table.state = result.state
            self._kv_cache.resumed(job)
            if self._kv_cache.states is not None:
                self._kv_cache.states.replayed(job)

    def _apply_decode_pass(self, job: Job, result: SegmentResult) -> None:
        """A decoding sequence has computed a token as an ordinary pass, and sampled the next."""
        decode, token, pages = job.decode, job.values[0], job.pages
        assert decode is not None
        assert isinstance(token, int)
        if job.kept_pages is not None:
            job.pages_trimmed = trimmed_pages(job)
            self.counters.pages_trimmed += job.pages_trimmed
        decode.as_pass = False
        if decode.cannot_continue(job):
            self._kv_cache.give_back(job)
        else:
            if (states := self._kv_cache.states) is not None:
                states.finish(job)
                states.grown(job)
            values = tuple([job.values[1 + i] for i in range(len(decode.probes))])
            decode.append(job, token, job.work.mask(0), result.state, values)
            assert pages == job.pages == []
            self._kv_cache.finished(job)
            job.started, job.keys = False, []
            self.counters.passes += 1
        self.announce(job)

    def announce(self, job: Job) -> None:
        """A decoding sequence has a token: wake whoever waits for it."""
        if job.waiters:
            self.outbox.append((job, None))

    def stop(self, job: Job) -> None:
        """End a decoding sequence here: what its program has not taken is cut off."""
        decode, table = job.decode, job.table
        assert decode is not None
        if job in self._queue:
            self._queue.remove(job)
        job.abandoned = True
        self.run_ahead.forget()
        self._kv_cache.give_back(job)
        decode.cut(table)
        if job.running:
            table.wipe()

    def _finish(self, job: Job, result: SegmentResult, now: float) -> None:
        """The pass succeeded: the table advances, and a pass that waits for its token gets it."""
        work, table, count = job.work, job.table, len(job.work.tokens)
        self._queue.remove(job)
        job.before, job.ended = table.mark(), now
        if job.kept_pages is not None or table.has_discards:
            job.pages_trimmed = trimmed_pages(job)
            self.counters.pages_trimmed += job.pages_trimmed
        masks = (None,) * count if work.masks is None else work.masks
        log = Log(work.tokens, work.positions, masks, 0 if work.causal else work.rows, work.adapters)
        if (states := self._kv_cache.states) is not None:
            states.finish(job)
        table.advance(log, job.pages, commit=work.commit, keys=job.keys)
        if states is not None:
            states.finished(job)
        if count:
            table.state = result.state
        if table.token_budget is not None:
            table.token_budget -= count
        self._kv_cache.finished(job)
        job.pages = []
        job.on_success(job.values)
        job.left = table.stamp
        then = job.then
        if then is not None and then.after is job:
            then.after, then.work = None, then.work.fed(job.values, table.tokens)
            if then.chunk is not None:
                then.started, then.chunk = True, replace(then.chunk, work=then.work)
            if then.decode is not None:
                then.decode.begin(then)
        self.counters.passes += 1
        self.outbox.append((job, None))

    def fail(self, job: Job, error: HeadwayError) -> None:
        """A pass failed: it is undone, and with it the passes that wait for its tokens."""
        self._queue.remove(job)
        job.abandoned = True
        self.run_ahead.forget()  # its error keeps its program's frames alive, and with them the context
        if not job.running:  # else what it holds is given back when its step ends
            self._kv_cache.give_back(job)
        self.outbox.append((job, error))
        for then in self._queue.of(job.table):
            if then.after is job:
                self.fail(then, PassFailed(f"the pass whose token this one takes failed: {error}"))


def _error(result: SegmentResult | HeadwayError) -> HeadwayError | None:
    """Why a pass failed on the device, or the first of its values that is an error."""
    if isinstance(result, HeadwayError):
        return result
    for value in result.values.values():
        if isinstance(value, HeadwayError):
            return value
    return None
