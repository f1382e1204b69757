"""The next tokens of a job as a chunk: how many fit a step, and how they are laid out. Pure."""

from __future__ import annotations

from headway.kv.table import PageTable
from headway.runtime.batch import Chunk, joined, lay_out
from headway.runtime.job import Job
from headway.runtime.scheduler.step_time import SHORT


def is_prefill(job: Job) -> bool:
    """Whether a job is long and can be cut: its tokens wait for those of others."""
    return not job.decodes and job.is_divisible and _length(job) > SHORT


def _length(job: Job) -> int:
    return len(job.work.tokens) + (0 if job.replay is None else len(job.replay.tokens))


def tokens_that_fit(job: Job, left: int, *, alone: bool) -> int | None:
    """How many tokens of a job fit; a pass that is not causal runs whole, alone if it must."""
    if job.replay is not None:
        return min(len(job.replay.tokens) - job.replayed, left)
    rest = len(job.work.tokens) - job.done
    if not job.is_divisible:
        return rest if rest <= left or alone else None
    return min(rest, left)


def is_nearly_done(job: Job) -> bool:
    """Whether the step in flight computes the last of its tokens."""
    return job.running and not job.abandoned and job.replay is None and job.chunk is not None and job.chunk.is_last


def chosen_chunk(job: Job, tokens: int) -> Chunk:
    """The next tokens of a job for a step, laid out before or now."""
    job.choose()
    chunk = job.chunk
    other = chunk is None or chunk.work is not (job.replay or job.work)
    if chunk is None or other or (chunk.start, chunk.stop) != (job.done, job.done + tokens):
        job.chunk = chunk = new_chunk(job, tokens)
    return chunk


def new_chunk(job: Job, tokens: int) -> Chunk:
    table, pages = job.table, job.table.physical
    work, base, done, kept = job.work, job.base, job.done, job.kept_pages
    written_from = 0
    if job.replay is not None:
        work, base, done, kept, written_from = job.replay, 0, job.replayed, None, job.written_from
        if job.replay_pages:
            pages = pages.copy()
            pages[table.absent()] = job.replay_pages
    else:
        assert job.base == table.length
        pages = joined(pages, job.pages)
    where = {"base": base, "part": (done, done + tokens), "written_from": written_from}
    return lay_out(work, table, pages, **where, kept=kept, before_position=last_position(table))


def last_position(table: PageTable) -> int:
    return table.positions[-1] if table.length else -1


def trimmed_pages(job: Job) -> int:
    """How many pages attention left out; the table has not advanced yet."""
    table, kept = job.table, job.kept_pages
    pages = job.pages_in_all
    if kept is None:
        return table.pages.count(None)
    return pages - sum(table.pages[n : n + 1] != [None] for n in kept if n < pages)
