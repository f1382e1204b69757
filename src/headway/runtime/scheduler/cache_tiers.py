"""The tiers below the pool's prefix cache: what they have, what is worth bringing back, what was brought.

        pool ──evicted──▶ host memory ──▶ folder
        pool ◀──copied─── host memory
        pool ◀──────── read by a thread ─ folder

A page comes back when that takes less time than computing its tokens, by what copies and prefills have taken so far.
It gets a page of the pool and an edit that fills it, noted before its key: whoever finds a page finds it written.
Bookkeeping under the engine's lock; pages are read from files by the folder's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headway.base.dataclass import dataclass
from headway.kv.allocator import Allocator, Load
from headway.kv.tiers.host_tier import HostTier
from headway.kv.tiers.page_folder import PageFolder
from headway.kv.tiers.page_store import FetchedPages, PageName, averaged
from headway.runtime.job import FetchedFiles, Job

COLD = 2  # steps that do not count: on some devices kernels are compiled then


class Found(NamedTuple):
    """A page that need not be computed: where it is in the pool, None if it is in a tier below."""

    key: bytes
    page: int | None


@dataclass(eq=False)
class CacheTiers:
    """Host memory and, where asked, a folder below it."""

    host: HostTier
    folder: PageFolder | None
    page_size: int
    on_fetched: Callable[[Job, FetchedFiles], None] = lambda job, files: (
        None
    )  # from the folder's thread: a job's pages have been read
    host_hits: int = 0
    folder_hits: int = 0
    misses: int = 0  # pages that turned out not to be there, and were computed
    _token_seconds: float | None = None  # of a prefill
    _steps: int = 0

    # -- what a copy and a token cost ------------------------------------------------------------------------------

    def computed(self, rows: int, seconds: float) -> None:
        """A step without decode rows took this long."""
        if rows >= self.page_size:
            self._steps += 1
            if self._steps > COLD:
                self._token_seconds = averaged(self._token_seconds, seconds / rows)

    def pays(self, pages: int, *, files: int = 0) -> bool:
        """Whether bringing pages back, so many of them from files, is faster than computing them."""
        copy, read = self.host.store.memory.page_seconds, None if self.folder is None else self.folder.page_seconds
        if self._token_seconds is None:
            return True
        return pages * (copy or 0.0) + files * (read or 0.0) <= pages * self.page_size * self._token_seconds

    # -- what is there ---------------------------------------------------------------------------------------------

    def has(self, key: bytes, job: Job) -> bool:
        """Whether a page can be brought back now."""
        return self.host.has(key) or key in self._files(job)

    def _files(self, job: Job) -> Mapping[bytes, bytes]:
        """What was read from files for a job."""
        fresh = job.fetched is not None and job.fetched.generation == self.host.store.generation
        return job.fetched.pages if job.fetched is not None and fresh else {}

    def fetch(self, job: Job, keys: Sequence[bytes]) -> list[bytes]:
        """Begin to read the pages that a job needs next from the folder, once; their keys, none if nothing is read."""
        if self.folder is None or job.fetched is not None:
            return []
        wanted = []
        for key in keys[: self.host.total]:
            if self.host.has(key):
                continue
            if not self.folder.has(key):
                break
            wanted.append(key)
        if not wanted or not self.pays(len(wanted), files=len(wanted)):
            return []
        job.is_reading, generation = True, self.host.store.generation
        self.folder.fetch(wanted, lambda pages: self.on_fetched(job, FetchedFiles(generation, pages)))
        return wanted

    # -- bringing it ------------------------------------------------------------------------------------------------

    def bring(self, allocator: Allocator, job: Job, keys: Sequence[bytes], more: int) -> tuple[list[int], list[int]]:
        """Pages with the contents of these keys, which the tiers have, and so many other fresh pages."""
        here, files = [key for key in keys if self.host.has(key)], self._files(job)
        with self.host.lent(here) as places:
            pages = allocator.take(len(keys) + more)
            page_of = dict(zip(keys, pages[: len(keys)], strict=True))
            edits: list[Load] = self.host.load(here, places, [page_of[key] for key in here])
            read = [key for key in keys if key not in set(here)]
            for first in range(0, len(read), self.host.at_once):
                part = read[first : first + self.host.at_once]
                source = FetchedPages(self.host.store.memory, [files[key] for key in part])
                names = tuple(PageName(key, self.host.store.generation) for key in part)
                edits.append(Load(source, tuple(range(len(part))), names, tuple(page_of[key] for key in part)))
            if read:
                job.fetched = FetchedFiles(self.host.store.generation, {})
            for edit in edits:
                allocator.edit(edit)
        for key, page in page_of.items():
            allocator.register(page, key)
        self.host_hits, self.folder_hits = self.host_hits + len(here), self.folder_hits + len(read)
        return pages[: len(keys)], pages[len(keys) :]

    def missed(self, key: bytes | None) -> None:
        """A page was not there after all."""
        self.misses += 1
        if key is not None:
            self.host.forget(key)

    def clear(self) -> None:
        """Drop everything, files too."""
        self.host.clear()
        if self.folder is not None:
            self.folder.clear()

    def forget_contents(self) -> None:
        """What is kept is no longer what its keys say. Files stay: their names say what computed them."""
        self.host.clear()

    def close(self) -> None:
        """Write what waits to be written, and end."""
        if self.folder is not None:
            self.folder.close()
