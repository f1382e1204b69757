"""The KV cache as the scheduler sees it: pages for passes, from prefix hits, free pages, cached pages, preemption.

It alone talks to the allocator on behalf of jobs. Everything here is bookkeeping under the engine's lock.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from itertools import takewhile

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, Unsupported
from headway.kv.allocator import Allocator
from headway.kv.prefix import chain, root
from headway.kv.table import PageTable
from headway.runtime.edits import Damage
from headway.runtime.job import PATIENCE, FetchedFiles, Job, Queue
from headway.runtime.scheduler.cache_tiers import CacheTiers, Found
from headway.runtime.scheduler.job_states import JobStates, replay_pass

SPARE = 4  # pages are handed out early while more than one page in SPARE is free


class Start(Enum):
    """The result of starting a job."""

    READY = "ready"
    WAITS = "waits for another pass that computes the same pages"
    BLOCKED = "there are no pages for it"


@dataclass(frozen=True)
class Pin:
    """Cached pages that are held until a time on time.monotonic's clock."""

    pages: tuple[int, ...]
    until: float


@dataclass(eq=False)
class KVCache:
    """Who holds pages, who computes which page, and whom to preempt."""

    allocator: Allocator
    states: JobStates | None = None  # of a model with recurrent layers
    caching: bool = True
    tables: weakref.WeakSet[PageTable] = field(default_factory=weakref.WeakSet)
    computing: dict[bytes, Job] = field(default_factory=dict)
    hits: int = 0
    preemptions: int = 0
    pins: dict[object, Pin] = field(default_factory=dict)
    tiers: CacheTiers | None = None  # where pages go that leave the prefix cache

    def start(self, job: Job, queue: Queue, *, force: bool = False, ahead: bool = False) -> Start:
        """Give a job every page it needs, or none. With `force`, any context without a pass may be preempted for it.

        With `ahead`, while a step is in flight, nobody is preempted and it gets no page when pages are scarce.
        """
        table, size = job.table, job.table.page_size
        fresh = max(0, -(-(job.base + len(job.work.tokens)) // size) - len(table.pages))
        if fresh == 0 and not table.is_preempted:  # most decodes: the last page has room
            job.started = True
            return Start.READY
        keys, readable = self._keys(job), _readable(job) // size
        cached = self._find(keys[:readable], job)
        if self.states is not None:
            cached = [] if table.is_preempted else cached[: self.states.hits(keys, len(cached))]
        if len(cached) < readable and self._in_progress(keys, len(cached), job):
            return Start.WAITS
        if len(cached) < readable and not force and self._fetch(job, keys, readable):
            return Start.WAITS
        old = self._old_pages(table, job)
        here = [page for _, page in (*old, *cached) if page is not None]
        fresh, back = fresh - len(cached), len(table.absent()) - len(old)
        more = fresh + back + len(old) + len(cached) - len(here)
        if ahead and not self.plenty(more):
            return Start.BLOCKED
        self.allocator.share(here)
        if not self._make_room(more, job, queue, force):
            self.allocator.drop(here)
            return Start.BLOCKED
        job.started, job.reader = True, None
        job.keys, job.hits, job.done = keys, len(cached), len(cached) * size
        (job.replay_pages, job.pages), taken = self._take(job, (old, cached), fresh + back)
        job.pages += taken[:fresh]
        for key in keys[len(cached) :]:
            self.computing.setdefault(key, job)
        if self.states is not None and cached:
            self.states.start_at(job, keys[len(cached) - 1])
        if table.is_preempted:
            job.replay_pages += taken[fresh:]
            self._replay(job, table.absent()[0] + len(old))
        return Start.READY

    def _take(self, job: Job, found: Sequence[Sequence[Found]], more: int) -> tuple[list[list[int]], list[int]]:
        """The pages of what was found, those in the pool shared already and others copied from the tiers below; and so
        many fresh ones."""
        away = [key for part in found for key, page in part if page is None]
        if self.tiers is None or not away:
            return [[page for _, page in part if page is not None] for part in found], self.allocator.take(more)
        brought, taken = self.tiers.bring(self.allocator, job, away, more)
        page_of = dict(zip(away, brought, strict=True))
        return [[page_of[key] if page is None else page for key, page in part] for part in found], taken

    def take_ahead(self, job: Job, after: Job) -> bool:
        """Pages for a pass that is fed by the running one; they are given back like those of a started one."""
        size, tokens = job.table.page_size, len(job.work.tokens)
        fresh = max(0, -(-(job.base + tokens) // size) - len(job.table.pages) - len(after.pages))
        if fresh and (tokens >= size or not self.plenty(fresh)):  # whole pages of it may be in the cache
            return False
        job.pages = self.allocator.take(fresh)
        return True

    def plenty(self, pages: int) -> bool:
        """Whether this many pages can be taken before it is known who else needs some."""
        return self.allocator.available - pages >= max(1, self.allocator.total // SPARE)

    def _replay(self, job: Job, known: int) -> None:
        """Restore a preempted table after its first `known` pages: from host memory, or by a pass over its log."""
        table = job.table
        if table.host is not None or table.length <= known * table.page_size:
            self.resumed(job)
        elif self.states is not None:
            self.states.replay(job, known * table.page_size)
        else:
            job.replay, job.replayed = replay_pass(table), known * table.page_size

    def resumed(self, job: Job) -> None:
        """The old slots of a table are computed again."""
        job.table.resume(job.replay_pages)
        job.replay, job.replay_pages, job.replayed, job.replay_from = None, [], 0, 0
        job.resumed = True

    def computed(self, job: Job) -> None:
        """A chunk is done: others can find its whole pages already."""
        if not job.keys:
            return
        size = job.table.page_size
        for i in range(job.hits, min(len(job.keys), job.done // size)):
            self.allocator.register(job.pages[i], job.keys[i])
            self.stop_computing(job, job.keys[i])
        if self.states is not None:
            self.states.register(job)

    def give_back(self, job: Job) -> None:
        """A job ends without success, or starts over."""
        if job.started:
            job.table.wipe()
        for key in job.keys:
            self.stop_computing(job, key)
        self.allocator.drop([*job.pages, *job.replay_pages])
        if self.states is not None:
            self.states.give_back(job)
        job.reset()

    def finished(self, job: Job) -> None:
        """A job's pages are its table's now."""
        self.hits += job.hits
        for key in job.keys:
            self.stop_computing(job, key)

    def stop_computing(self, job: Job, key: bytes) -> None:
        """A job no longer computes the page of this key."""
        if self.computing.get(key) is job:
            del self.computing[key]

    # -- the cache -------------------------------------------------------------------------------------------------

    def _keys(self, job: Job) -> list[bytes]:
        """Keys of the pass's whole pages; none if they cannot be cached or do not start at a page boundary."""
        table, work, size = job.table, job.work, job.table.page_size
        plain = self.caching and work.causal and work.commit and not work.feeds
        aligned = job.base % size == 0 and len(table.pages) == job.base // size == table.committed
        if not (plain and aligned) or table.last_key is None or table.spans or not table.repeatable:
            return []
        return chain(table.last_key, work.tokens, work.positions, work.masks, size, adapters=work.adapters)

    def _find(self, keys: Iterable[bytes], job: Job) -> list[Found]:
        """The leading pages that need not be computed: they are in the prefix cache, or worth a copy from below it."""
        found, away = [], 0
        for key in keys:
            page = self.allocator.find(key)
            if page is None and (self.tiers is None or not self.tiers.has(key, job)):
                break
            away += page is None
            found.append(Found(key, page))
        if away and self.tiers is not None and not self.tiers.pays(away):
            found = found[: next(i for i, (_, page) in enumerate(found) if page is None)]
        return found

    def _fetch(self, job: Job, keys: list[bytes], readable: int) -> bool:
        """Whether a job waits for pages that are read from files, while nobody else computes them."""
        if self.tiers is None or self.states is not None:
            return False
        at = next((i for i, key in enumerate(keys) if self.allocator.find(key) is None), len(keys))
        wanted = self.tiers.fetch(job, [key for key in keys[at:readable] if self.allocator.find(key) is None])
        if not wanted:
            return False
        job.keys = keys
        for key in wanted:
            self.computing.setdefault(key, job)
        return True

    def _in_progress(self, keys: list[bytes], at: int, job: Job) -> bool:
        """Whether another job computes, or reads, the page of a key."""
        other = self.computing.get(keys[at], job) if at < len(keys) else job
        job.reader = None if other is job else other
        return other is not job

    def fetched(self, job: Job, files: FetchedFiles) -> None:
        """What a job waited for has been read. Until it starts, others may have the same pages."""
        job.is_reading, job.fetched = False, files
        for key in job.keys:
            self.stop_computing(job, key)

    def _old_pages(self, table: PageTable, job: Job) -> list[Found]:
        """The first pages of a preempted table that are still in the prefix cache, or below it."""
        if table.host is not None or not table.is_preempted:
            return []
        first = table.absent()[0]
        own = zip(table.keys[first:], table.pages[first:], strict=False)
        return self._find([key for key, _ in takewhile(lambda page: page[0] and not page[1], own) if key], job)

    def clear(self) -> int:
        """Forget every cached page; returns how many became free."""
        if self.tiers is not None:
            self.tiers.clear()
        if self.states is not None:
            self.states.states.forget_keys()
        return self.allocator.clear_cache()

    def pin(self, name: object, pages: Sequence[int], until: float) -> None:
        """Hold pages under a name, in place of what it held before."""
        self.allocator.share(pages)
        self.unpin(name)
        self.pins[name] = Pin(tuple(pages), until)

    def unpin(self, name: object) -> bool:
        """Release the pages of a name; False if it held none."""
        pin = self.pins.pop(name, None)
        if pin is not None:
            self.allocator.drop(pin.pages)
        return pin is not None

    def expire_pins(self, now: float) -> None:
        """Release pins whose time is over."""
        for name in [n for n, pin in self.pins.items() if pin.until < now]:
            self.unpin(name)

    def cached_prefix(self, salt: str, tokens: Sequence[int], size: int) -> list[int]:
        """The cached pages that hold the beginning of a plain sequence."""
        pages = map(self.allocator.find, chain(root(salt), tokens, range(len(tokens)), None, size))
        return [page for page in takewhile(lambda page: page is not None, pages) if page is not None]

    # -- preemption -------------------------------------------------------------------------------------------------

    def make_room(self, pages: int, spared: Sequence[PageTable], queue: Queue) -> bool:
        """Whether this many pages can be taken now, without a pass. Contexts without a pass, but the spared ones, are
        preempted for it, as for a pass that could not run otherwise; as few as possible, or none."""
        short = pages - self.allocator.available
        if short <= 0:
            return True
        idle = [t for t in self.tables if t not in spared and not t.closed and queue.last(t) is None]
        victims = self._fewest(short, idle, PageTable.held)
        for victim in victims or ():
            self.preempt(victim, queue)
        return victims is not None

    def _make_room(self, pages: int, job: Job, queue: Queue, force: bool) -> bool:
        """Whether this many pages can be taken now. As few contexts as possible are preempted for it, or none."""
        short = pages - self.allocator.available
        if short <= 0:
            return True
        victims = self._victims(short, job, queue, force)
        for table in victims or ():
            self.preempt(table, queue)
        return victims is not None

    def preempt(self, table: PageTable, queue: Queue) -> None:
        """A context gives up its pages; a pass of it that had started begins again."""
        for job in queue.of(table):
            if job.started:
                self.give_back(job)
        table.preempt()
        self.preemptions += 1

    def free_states(self, but: Job, queue: Queue) -> None:
        """Every other job gives up the recurrent state it holds: a decoding sequence computes it again, and a pass that
        had started begins again. No step is in flight."""
        for job in queue:
            if job is not but and job.state is not None:
                self.give_back(job)

    def preempt_all(self, queue: Queue) -> None:
        """Every context gives up its pages, and nothing stays cached or pinned."""
        for table in [t for t in self.tables if not t.closed]:
            self._start_over(table, queue)
            if table.held():
                table.preempt()
        for name in list(self.pins):
            self.unpin(name)
        self.allocator.evict(self.allocator.cached)  # to the tiers below, where there are some
        self._empty()

    def forget_contents(self, queue: Queue, *, recompute: bool) -> None:
        """What pages hold is no longer what their keys say: contexts compute it again, or keep it without keys."""
        tables = [t for t in self.tables if not t.closed and t.length]
        fixed = [t for t in tables if not t.log_suffices]
        if recompute and fixed:
            raise Unsupported(
                f"{len(fixed)} contexts or saved contexts have discarded, moved or cut-off slots and cannot be "
                "computed again under new weights; release them, or give contexts='keep'"
            )
        for table in tables:
            self._start_over(table, queue)
            if recompute:
                table.recover(None, "")
                table.state = None
            elif not table.is_preempted or table.host is not None:
                table.alter(0)
                table.keys = [None] * len(table.keys)
        self._empty()
        if self.tiers is not None:
            self.tiers.forget_contents()

    def _start_over(self, table: PageTable, queue: Queue) -> None:
        """Passes of a context that had started begin again."""
        for job in queue.of(table):
            if job.started or job.chunk is not None or job.state is not None:
                self.give_back(job)

    def _empty(self) -> None:
        for name in list(self.pins):
            self.unpin(name)
        self.allocator.clear_cache()
        if self.states is not None:
            self.states.states.forget_all()

    def affected(self, damage: Damage) -> dict[PageTable, HeadwayError]:
        """The contexts that hold damaged pages."""
        errors = {t: damage.of(t.held(), t.host) for t in self.tables if not t.closed}
        return {table: error for table, error in errors.items() if error is not None}

    def recover(self, damage: Damage, affected: Mapping[PageTable, HeadwayError], queue: Queue) -> None:
        """Take damaged pages out of the prefix cache; passes that hold some begin again, and contexts give them up."""
        for page, error in damage.pages.items():
            if self.tiers is not None and error in damage.misses:
                self.tiers.missed(self.allocator.key_of(page))
            self.allocator.forget(page)
        for job in queue:
            waits = (job.started or job.chunk is not None) and not job.running
            if waits and (job.table in affected or damage.of([*job.pages, *job.replay_pages])):
                self.give_back(job)
        for table, error in affected.items():
            hosts = [damage.sources[p] for p in table.held() if p in damage.sources]
            table.recover(hosts[0] if hosts else None, str(error))

    def _victims(self, pages: int, job: Job, queue: Queue, force: bool) -> list[PageTable] | None:
        """Whom to preempt to get this many pages; None if all candidates together do not have them.

        Saved contexts first, then the lowest bid, then the youngest; never one with a larger claim than the job's, and
        never a pass that has computed something unless the job's own bid is higher: so every pass that started ends.
        """
        waiting = {j.table: j for j in queue if j.after is None and not j.resting}

        def may_go(table: PageTable) -> bool:
            if table is job.table or table.closed:
                return False
            own = waiting.get(table)
            if own is None:
                return table.idle_first or force or (table.bid, -table.born) < job.claim
            if own.has_progress:  # it has all its pages and will end: only a higher bid may undo its work
                return not own.running and own.table.bid + own.waited_before // PATIENCE < job.table.bid
            return not own.running and own.claim < job.claim

        def holdings(table: PageTable) -> list[int]:
            own = waiting.get(table)
            return table.held() if own is None else [*table.held(), *own.pages, *own.replay_pages]

        return self._fewest(pages, filter(may_go, self.tables), holdings)

    def _fewest(
        self, pages: int, tables: Iterable[PageTable], holdings: Callable[[PageTable], list[int]]
    ) -> list[PageTable] | None:
        """The first of these tables that free this many pages if all of them go; None if they do not have them."""
        left = Counter[int]()  # pages that would lose holders, and how many
        gained, chosen = 0, []
        for table in sorted(tables, key=lambda t: (not t.idle_first, t.bid, -t.born)):
            pages_here = holdings(table)
            left.update(pages_here)
            gained += sum(left[p] == self.allocator.holders(p) for p in pages_here)
            chosen.append((table, pages_here))
            if gained >= pages:  # contexts whose pages others hold anyway may stay
                return [t for t, here in chosen if any(left[p] == self.allocator.holders(p) for p in here)]
        return None


def _readable(job: Job) -> int:
    """How many leading tokens may come from the cache: those before the first row that is read."""
    rows = [max(0, r.row) for r in job.work.readouts]
    return min([*rows, len(job.work.tokens)])
