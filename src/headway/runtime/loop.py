"""The loop: programs submit passes from any thread, one worker thread steps the device, outcomes come back.

    step:   plan ──▶ begin ──▶ apply        (scheduler/plan.py, runners/, scheduler/plan.py)

One lock guards all bookkeeping (tables, allocator, queue) and is held only for pure work. The worker owns the device
and sees frozen batches. Where the device computes concurrently with the host, the next step begins before the last one
is applied. While a step runs, results are delivered and programs submit what comes next.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from headway.base.errors import Closed, HeadwayError, RankLost
from headway.base.events import StepEvent
from headway.base.specs.samplers import UNDECIDED
from headway.base.system.log import log_event
from headway.base.system.switch_interval import WHILE_IN_FLIGHT, SwitchInterval
from headway.kv.allocator import Allocator, Edit
from headway.kv.states import States
from headway.kv.table import PageTable
from headway.models.adapters.bound import BoundAdapter
from headway.runtime.adapters import DeviceWeights
from headway.runtime.batch import Chunk, needed_pages
from headway.runtime.decode import Decode
from headway.runtime.edits import carry_out
from headway.runtime.job import FetchedFiles, Job, Queue
from headway.runtime.memory import step_error
from headway.runtime.outcome import resolve, wake_all
from headway.runtime.passes import Pass
from headway.runtime.runners.base import NoRunner, Runner, SegmentResult, StepResult
from headway.runtime.scheduler.admission import check_admission
from headway.runtime.scheduler.cache_tiers import CacheTiers
from headway.runtime.scheduler.job_states import JobStates
from headway.runtime.scheduler.kv_cache import KVCache
from headway.runtime.scheduler.plan import Scheduler
from headway.runtime.scheduler.step_plan import StepPlan
from headway.runtime.scheduler.step_time import StepTime
from headway.runtime.step_costs import StepCosts
from headway.runtime.worker.bookkeeping_lock import BookkeepingLock, check_may_wait
from headway.runtime.worker.gathering import Gathering
from headway.runtime.worker.in_flight import Failed, Started
from headway.runtime.worker.notifier import Notifier

IDLE_SECONDS = 30.0  # without work until memory goes back to the system


class Loop:
    """Owns the queue and the worker thread."""

    def __init__(
        self,
        runner: Runner,
        allocator: Allocator,
        *,
        budget: int,
        mixed_budget: int,
        trim: bool,
        positions: bool = True,
        step_time: StepTime | None = None,
        states: States | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.lock = BookkeepingLock()
        self.kv_cache = KVCache(allocator, None if states is None else JobStates(states))
        self.listeners: list[Callable[[StepEvent], None]] = []
        self._changed = threading.Condition(self.lock)
        self._runner, self._allocator, self._trim = runner, allocator, trim
        self._queue = Queue()
        self._scheduler = Scheduler(
            self._queue,
            self.kv_cache,
            runner,
            budget,
            mixed_budget,
            trim=trim,
            positions=positions,
            step_time=step_time,
        )
        self.counters = self._scheduler.counters
        self.step_costs = StepCosts()
        self._applied = 0.0  # when the last step was
        self._orders = itertools.count()
        self._released: deque[PageTable] = deque()  # a finalizer only appends here
        self._calls: deque[Callable[[], None]] = deque()  # device work that is not a pass
        self._in_flight: Started | None = None
        self._computing = False  # the device is at work, so that passes are prepared as they arrive
        self._gathering = Gathering()
        self._closing = self._paused = self._one_by_one = False
        self._suspended = False  # there are no pages: nothing may run
        self._asleep = False  # it waits for any work, not for programs to come back
        self._since: float | None = None  # when the worker began its current step
        self._died: BaseException | None = None
        self._lost: RankLost | None = None  # what the worker stops for, wherever it is
        self._on_start, self._on_idle = on_start, on_idle
        self._switch_interval = SwitchInterval(WHILE_IN_FLIGHT)
        self._notifier = Notifier()
        self._thread = threading.Thread(target=self._work, name="headway-worker", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------------------------

    def adopt(self, table: PageTable) -> PageTable:
        """Know a table, so that it can be preempted."""
        self.kv_cache.tables.add(table)
        return table

    def submit(
        self,
        table: PageTable,
        work: Pass,
        after: Job | None = None,
        on_success: Callable[[Mapping[int, object]], None] = lambda values: None,
        on_undo: Callable[[], None] = lambda: None,
    ) -> Job:
        """Queue a pass. What can never fit is refused here."""
        with self.lock:
            self.check_open()
            self._check_awake()
            self.drain()
            base = table.length if after is None else after.base + len(after.work.tokens)
            check_admission(table, base, len(work.tokens), pages=self._allocator.total)
            job = Job(work, table, base, next(self._orders), time.perf_counter(), after)
            job.on_success, job.on_undo = on_success, on_undo
            if after is not None:
                after.then = job
            if self._trim:
                job.kept_pages = needed_pages(work, base, table.page_size)
            self._queue.add(job)
            if self._computing:
                self._scheduler.prepare(job)
            # While the worker waits for many it looks by itself: waking it for each would take longer than the pass.
            if self._asleep or self._gathering.is_complete(len(self._queue)):
                self._changed.notify_all()
        return job

    def decode(self, job: Job, decode: Decode) -> None:
        """Let a pass that was submitted just now continue by itself. The caller has held the lock since."""
        job.decode = decode
        if job.after is None:
            decode.begin(job)

    def finish(self, job: Job) -> None:
        """Let a decoding sequence end after the token in flight, if there is one. The caller holds the lock."""
        if job.decode is not None and job.decodes and not job.decode.over:
            job.decode.finish(job)

    def use_tiers(self, tiers: CacheTiers) -> None:
        """Keep pages that leave the prefix cache."""
        with self.lock:
            self.kv_cache.tiers, tiers.on_fetched = tiers, self._fetched
            self._allocator.on_evicted = tiers.host.keep

    def _fetched(self, job: Job, files: FetchedFiles) -> None:
        """What a pass waited for has been read from files."""
        with self.lock:
            self.kv_cache.fetched(job, files)
            self._changed.notify_all()

    def next_token(self, job: Job) -> int | None:
        """The next token of a decoding sequence, if there is one. The caller holds the lock."""
        assert job.decode is not None
        if job.table.closed:  # what has failed before is no longer known here
            return None
        token = job.decode.take()
        if token is not None and job.decode.wake(job):
            self._changed.notify_all()
        return token

    def abandon(self, job: Job, error: HeadwayError | None = None) -> None:
        """Cancel a pass: it leaves the queue now, and what it did is undone.

        Whoever still waits for it gets the error; without one it counts as cancelled.
        """
        with self.lock:
            job.follow_up = None
            if job.then is not None and (job in self._queue or job.before is not None):
                self.abandon(job.then, error)
            if job.decodes:
                self._scheduler.stop(job)
            elif job in self._queue:
                self._queue.remove(job)
                job.abandoned = True
                if not job.running:
                    self.kv_cache.give_back(job)
            elif job.before is not None and not self.busy(job.table) and job.left is job.table.stamp:
                # It succeeded a moment before it was cancelled, and nobody has built on it.
                job.table.rewind(job.before)
                job.abandoned = True
                job.on_undo()
                job.settle()
        if error is None:
            job.outcome.cancel()
        else:
            job.outcome.fail(error)
        wake_all([job])

    def last_job(self, table: PageTable) -> Job | None:
        """The latest pass of this table that is queued or running."""
        return self._queue.last(table)

    def busy(self, table: PageTable) -> bool:
        """Whether a pass of this table is queued or running."""
        return self.last_job(table) is not None

    def jobs(self) -> list[Job]:
        """Passes that are queued or running, and decoding sequences that rest. The caller holds the lock."""
        return list(self._queue)

    @property
    def queued(self) -> int:
        """Jobs that are queued, running or resting: how many sequences share the next steps."""
        return len(self._queue)

    def waiting(self) -> int:
        """How many passes are queued or running."""
        with self.lock:
            return sum(not job.resting for job in self._queue)

    def make_room(self, pages: int, *tables: PageTable) -> bool:
        """Whether this many pages can be taken now, if idle contexts other than these must be preempted for it. The
        caller holds the lock."""
        self.drain()
        return self.kv_cache.make_room(pages, tables, self._queue)

    def release_later(self, table: PageTable) -> None:
        """Give a table's pages back soon; safe in a finalizer."""
        self._released.append(table)

    def drain(self) -> None:
        """Free what finalizers left. The caller holds the lock."""
        while self._released:
            table = self._released.popleft()
            for job in self._queue.of(table):
                self.abandon(job, Closed("the context was released while this pass was in flight"))
            table.close()
        if self.kv_cache.pins:
            self.kv_cache.expire_pins(time.monotonic())

    def call(self, fn: Callable[[], None], *, even_asleep: bool = False) -> None:
        """Run fn on the worker thread, after all edits noted so far, and wait for it."""
        check_may_wait()
        done, error = threading.Event(), []

        def wrapped() -> None:
            try:
                fn()
            except BaseException as e:
                error.append(e)
            finally:
                done.set()

        with self.lock:
            self.check_open()
            if not even_asleep:
                self._check_awake()
            self._calls.append(wrapped)
            self._changed.notify_all()
        done.wait()
        if error:
            raise error[0]

    @property
    def busy_since(self) -> float | None:
        """When the worker began the step that it is at, by time.monotonic; None while it waits for work.

        It takes no lock: whoever asks wants to know of a worker that may be stuck with it.
        """
        return self._since

    def check_open(self) -> None:
        if self._died is not None:
            raise _stopped(self._died) from self._died
        if self._closing:
            raise Closed("the engine is closed; create a new one")
        if not self._thread.is_alive():
            raise Closed(
                "a forked child has its parent's engine and none of the threads that run it; "
                'create the engine in the child, or start the child with "spawn"'
            )

    def lose(self, error: RankLost) -> None:
        """What computes is gone: the worker stops, with this error for everybody who waits. From any thread."""
        with self.lock:
            self._lost = error
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel what waits, let the running step end, stop the worker."""
        with self.lock:
            self._closing = True
            for job in list(self._queue):
                self.abandon(job, Closed("the engine was closed while this pass was in flight"))
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._notifier.join()

    # -- weights and memory, on the worker -----------------------------------------------------------------------------

    def load_adapter(self, adapter: BoundAdapter) -> DeviceWeights:
        """An adapter's weights on the device, uploaded by the worker, which owns it."""
        uploaded: list[DeviceWeights] = []
        self.call(lambda: uploaded.append(self._runner.load_adapter(adapter)))
        return uploaded[0]

    def replace_runner(self, runner: Runner) -> None:
        """Compute with another runner from the next step on."""
        with self.lock:
            self._runner = runner
            self._scheduler.replace_runner(runner)

    def forget_contents(self, *, recompute: bool) -> None:
        """The weights change: cached pages are forgotten, and contexts compute their slots again, or keep them as slots
        that no log explains. The caller holds the lock; no step is in flight."""
        self.drain()
        self.kv_cache.forget_contents(self._queue, recompute=recompute)
        self._scheduler.run_ahead.forget()

    def suspend(self) -> None:
        """Give up every page, with copies in host memory where a context cannot compute its slots again; no step runs
        until `resume`."""
        with self.lock:
            self.drain()
            self.kv_cache.preempt_all(self._queue)
            self._scheduler.run_ahead.forget()
            edits = self._allocator.take_edits()
            self._suspended = True
        self._begin(None, edits, None)
        self.replace_runner(NoRunner())

    def resume(self, runner: Runner) -> None:
        """Steps run again, by this runner."""
        with self.lock:
            self.replace_runner(runner)
            self._suspended = False
            self._changed.notify_all()

    def _check_awake(self) -> None:
        if self._suspended:
            raise Closed("the engine sleeps and has no pages; call engine.wake() first")

    # -- the worker ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._on_start()
            while self._next():
                self._rest()
        except BaseException as e:  # a fault of ours: nobody may be left waiting
            self._die(e)
        finally:
            self._since = None
            self._switch_interval.set(on=False)
            self._notifier.stop()

    def _next(self) -> bool:
        """Wait for work and do some: calls, or one step. False at the end."""
        self._since = time.monotonic()
        with self.lock:
            if self._in_flight is not None:
                self.drain()
            elif not self._ready():
                self._deliver(now=True)
                self._wait()
            if self._lost is not None and not self._closing:
                raise self._lost
            calls = [] if self._in_flight is not None else list(self._calls)
            if calls:
                self._calls.clear()
            elif self._closing and self._in_flight is None:
                self._deliver(now=True)
                return False
        if calls:
            self._run_calls(calls)
        else:
            self._step()
        return True

    def _step(self) -> None:
        """Plan a step, begin it, and apply the one before it; and this one too, unless the device overlaps."""
        before = self._in_flight
        with self.lock:
            hold = before is not None and (self._must_finish(before) or self._one_by_one)
            plan = None if hold else self._scheduler.plan(None if before is None else before.plan)
            edits = self._allocator.take_edits() if plan is not None or before is None else ()
            self._computing = plan is not None or before is not None
        if self._runner.overlaps:
            self._switch_interval.set(on=self._computing)  # setting the device to work takes hundreds of turns
        else:
            self._deliver()  # programs go on while this thread computes
        after = self._in_flight = self._begin(plan, edits, before)
        is_late = after is not None and before is not None and after.plan.draws_late
        if after is not None and not is_late:
            self._sample(after)
        if before is not None:
            self._apply(before)
        if is_late and self._in_flight is not None:  # its masks depend on the tokens just applied
            self._sample(self._in_flight)
        if self._in_flight is not None and (self._one_by_one or not self._runner.overlaps):
            started, self._in_flight = self._in_flight, None
            self._apply(started)
        followed = self._in_flight is None and self._follow_up()
        self._computing = self._in_flight is not None
        self._switch_interval.set(on=self._computing or followed)  # the device must not wait while programs take tokens
        if self._runner.overlaps and not followed:
            self._deliver(now=self._in_flight is None)

    def _follow_up(self) -> bool:
        """Have a pass that has ended, with none other in the queue, submit what follows before its program hears of it,
        so that the device need not wait for other threads. Whether it has; its result is then delivered while the next
        step runs."""
        follow_ups = [job.follow_up for job, error in self._scheduler.outbox if error is None]
        if len(follow_ups) != 1 or follow_ups[0] is None or self._queue:
            return False
        follow_ups[0]()
        return len(self._queue) > 0

    def _must_finish(self, started: Started) -> bool:
        """Whether nothing may begin before this step is applied."""
        return started.has_failed or bool(self._calls) or self._closing

    def _begin(self, plan: StepPlan | None, edits: tuple[Edit, ...], before: Started | None) -> Started | None:
        """Edit pages, and set the device to work on a plan.

        Edits go first and by themselves: a pass that fails must not take other contexts' pages with it.
        """
        began = time.perf_counter()
        damage = carry_out(edits, self._runner.edit) if edits else None
        if damage:
            with self.lock:
                if plan is None:
                    self._scheduler.recover(damage)
                else:
                    plan = self._scheduler.without_damaged(plan, damage, None if before is None else before.plan)
        if plan is None or not (plan.decode_jobs or plan.chunks):
            return None
        try:
            return Started(plan, self._runner.begin(plan.batch), began)
        except RankLost:
            raise
        except Exception as error:
            return Started(plan, Failed(error), began)

    def _sample(self, started: Started) -> None:
        """Have the decode rows sampled, among what their masks allow."""
        if started.plan.batch.decode is None:
            return
        with self.lock:
            masks = self._scheduler.masks(started.plan)
        try:
            started.step.masks(masks)
        except RankLost:
            raise
        except Exception as error:
            started.step = Failed(error)

    def _apply(self, started: Started) -> None:
        """Wait for a step, and fold its results in."""
        plan = started.plan
        try:
            result = started.step.result()
        except RankLost:
            raise
        except Exception as error:
            result = self._recompute(plan, error)
        now = time.perf_counter()
        seconds, alone = now - started.began, now - max(started.began, self._applied)  # steps overlap on some devices
        self._applied = now
        with self.lock:
            self.step_costs.note(plan.batch.rows, alone)
            if self.kv_cache.tiers is not None and not plan.decode_jobs:
                self.kv_cache.tiers.computed(plan.batch.rows, alone)
            self._scheduler.took(plan, alone)
            self._scheduler.apply(plan, result, None if self._in_flight is None else self._in_flight.plan)
            returning = 0 if plan.decode_jobs else sum(job.decode is None for job, _ in self._scheduler.outbox)
            self._gathering.begin(returning, seconds)
            if self.listeners:
                self._tell_listeners(plan, seconds)

    def _recompute(self, plan: StepPlan, error: Exception) -> StepResult:
        """The results of a step that failed: each pass again alone, so that only the guilty one fails.

        Decode rows are computed as passes in the next step; a step in flight that builds on this one is ignored.
        """
        with self.lock:
            dropped, self._in_flight = self._in_flight, None
            if dropped is not None and dropped.plan is not plan:
                self._scheduler.drop(dropped.plan, plan)
        if plan.decode_jobs:
            log_event(
                "a step failed; its decode rows are computed again as passes", rows=plan.batch.rows, why=str(error)
            )
        failure, alone = step_error(error), len(plan.chunks) == 1 and not plan.decode_jobs
        segments = [failure if alone else self._compute_alone(job, chunk, failure) for job, chunk in plan.chunks]
        return StepResult([UNDECIDED] * len(plan.decode_jobs), segments)

    def _compute_alone(self, job: Job, chunk: Chunk, failure: HeadwayError) -> SegmentResult | HeadwayError:
        """One pass of a step that failed, by itself."""
        with self.lock:
            batch = self._scheduler.alone(job, chunk)
        if batch is None:
            return failure
        try:
            (result,) = self._runner.begin(batch).result().segments
            return result
        except RankLost:
            raise
        except Exception as error:
            return step_error(error)

    def _run_calls(self, calls: list[Callable[[], None]]) -> None:
        """Device work that is not a pass, after all edits noted so far."""
        with self.lock:
            edits = () if self._suspended else self._allocator.take_edits()
        self._begin(None, edits, None)
        for call in calls:
            call()

    # -- waiting and telling ---------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Whether a step can be planned without the programs that have yet to receive their results."""
        self.drain()
        queued = sum(job.is_waiting for job in self._queue)
        ready = queued > 0 and self._gathering.is_complete(queued) and not self._suspended
        return bool(self._calls or self._closing or self._lost) or ready

    def _wait(self) -> None:
        """Wait for work, and a moment for programs that have just got a result to come back with their next pass."""
        idle_at, more = time.monotonic() + IDLE_SECONDS, False
        while not (self._has_work() or self._calls or self._closing or self._lost):
            self._asleep, self._since = True, None
            self._changed.wait(timeout=0.02 if more else 1.0)
            self.drain()
            if time.monotonic() < idle_at or self._suspended:
                continue
            if self._allocator.has_edits:
                self._calls.append(lambda: None)  # calls run after all edits
            elif not (more := self._on_idle()):
                idle_at = math.inf
        self._asleep, self._since = False, time.monotonic()
        while not (self._gathering.is_complete(len(self._queue)) or self._closing or self._calls):
            before = len(self._queue)
            if self._gathering.is_late:
                break
            if not self._changed.wait(self._gathering.gap) and len(self._queue) == before:
                break
        self.drain()
        self._gathering.end()

    def _has_work(self) -> bool:
        return not self._suspended and any(not (job.resting or job.waits_for_files) for job in self._queue)

    def _rest(self) -> None:
        """While somebody else takes the steps (headway.testing): only calls run on this thread."""
        while True:
            with self.lock:
                if not self._paused or self._closing:
                    return
                self._since, calls = None, list(self._calls)
                self._calls.clear()
                if not calls:
                    self._changed.wait()
            if calls:
                self._run_calls(calls)

    def _deliver(self, *, now: bool = False) -> None:
        """Have the outbox delivered: now, or concurrently with the step that is about to run."""
        box, self._scheduler.outbox = self._scheduler.outbox, []
        if now or self._paused:
            resolve(box)
            wake_all([job for job, _ in box])
        elif box:
            self._notifier.put(box)

    def _tell_listeners(self, plan: StepPlan, seconds: float) -> None:
        event = StepEvent(
            step=self.counters.steps,
            seconds=seconds,
            passes=len(plan.decode_jobs) + len(plan.chunks),
            rows=plan.batch.rows,
            queued=self.waiting(),
            pages_free=self._allocator.free,
            pages_cached=self._allocator.cached,
            pages_held=self._allocator.held,
            cache_hits=self.kv_cache.hits,
            pages_trimmed=self.counters.pages_trimmed,
            preemptions=self.kv_cache.preemptions,
            tokens=self.counters.tokens,
        )
        for listener in self.listeners:
            listener(event)

    def _die(self, error: BaseException) -> None:
        with self.lock:
            self._died = error
            running = [] if self._in_flight is None else self._in_flight.plan.jobs
            waiting = {*running, *self._queue}
            for job in list(self._queue):
                self._queue.remove(job)
            calls = list(self._calls)
        stopped = _stopped(error)
        self._scheduler.outbox += [(job, stopped) for job in waiting]
        self._deliver(now=True)
        for call in calls:
            call()


def _stopped(error: BaseException) -> Closed:
    """What whoever asks is told when the worker has stopped."""
    if isinstance(error, RankLost):
        return RankLost(str(error))
    return Closed(f"the engine's worker stopped after an internal error: {error!r}")
