"""Decode rows: one row for each decoding sequence, as flat arrays that go up by one from step to step.

Where the device computes concurrently with the host, the next step begins before the host knows the last one's tokens:
the device has them. A row that was begun for nothing, because its sequence has ended meanwhile, is ignored, and what it
wrote is wiped. Bookkeeping under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.base.errors import HeadwayError
from headway.base.specs.adapters import Mixes
from headway.base.specs.brle import Brle
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import NO_TOKEN, UNDECIDED, Sampling
from headway.runtime.adjustments import Adjustments
from headway.runtime.batch import DecodeRows, joined, needed_of
from headway.runtime.decode import RUN_AHEAD, Decode
from headway.runtime.job import Job
from headway.runtime.passes import Readout
from headway.runtime.readout import not_a_number
from headway.runtime.runners.base import Runner, StepResult
from headway.runtime.scheduler.kv_cache import KVCache

Failures = list[tuple[Job, HeadwayError]]
Masks = tuple[Brle | None, ...] | None  # as in DecodeRows


class RunAhead:
    """Lays out the decode rows of a step and applies their tokens.

    Without `positions` the model has no sliding windows, and attention does not look at position ids.
    """

    def __init__(self, kv_cache: KVCache, runner: Runner, *, positions: bool, trim: bool) -> None:
        self._kv_cache, self._runner, self._positions, self._trim = kv_cache, runner, positions, trim
        self._jobs: list[Job] = []  # of the last rows that were laid out
        self._rows: DecodeRows | None = None
        self._tables: list[np.ndarray] = []
        self.sampled = self.pages_trimmed = 0

    def replace_runner(self, runner: Runner) -> None:
        """Lay rows out for another runner."""
        self._runner = runner
        self.forget()

    def forget(self) -> None:
        """Keep no job alive; the next rows are laid out anew."""
        self._jobs, self._rows, self._tables = [], None, []

    # -- before a step ---------------------------------------------------------------------------------------------

    @staticmethod
    def next_slot(job: Job, in_flight: bool) -> int | None:
        """The slot of a sequence's next token, after the one in flight if there is one; None if it wants no token."""
        if not in_flight:
            return job.table.length
        decode = _decode(job)
        if decode.left <= 1 or len(decode.buffer) + 1 >= RUN_AHEAD:
            return None
        return job.table.length + 1

    def fits(self, job: Job, slot: int) -> bool:
        """Whether the token at a slot can be a decode row; else it is computed as an ordinary pass."""
        decode, table = _decode(job), job.table
        if decode.fast is None:
            what = decode.readout.what
            plain = not decode.readout.is_biased
            decode.fast = plain and isinstance(what, Sampling) and self._runner.samples(what)
            decode.fast = decode.fast and all(self._reads(probe.what, what) for probe in decode.probes)
        if table.must_replay or decode.as_pass or not decode.fast or job.replay is not None or job.keys:
            return False
        if decode.mask is not None:
            mask = decode.attends(slot)
            if mask is not None and not mask.any():
                return False  # a row that attends to nothing is refused as a pass
        return not self._positions or decode.positions_in_order(table)

    def _reads(self, what: Sampling | Probe, how: Sampling | Probe) -> bool:
        return isinstance(what, Probe) and isinstance(how, Sampling) and self._runner.reads(what, how)

    def give_page(self, job: Job, slot: int, *, ahead: bool) -> bool:
        """Have a page for the token at a slot, and a place for the recurrent state after it; False if there is none to
        spare."""
        states, allocator = self._kv_cache.states, self._kv_cache.allocator
        if slot // job.table.page_size >= len(job.table.pages) + len(job.pages):
            if allocator.available < 1 or (ahead and not self._kv_cache.plenty(1)):
                return False
            job.pages += allocator.take(1)
        return states is None or states.take_row(job)

    def lay_out(self, jobs: list[Job], slots: list[int], before: Sequence[Job]) -> DecodeRows:
        """The rows of these jobs; `before` are those of the decode rows in flight, whose tokens are not known yet."""
        masks = _masks(jobs, slots)
        same = self._rows is not None and jobs == self._jobs and slots == (self._rows.slots + 1).tolist()
        tokens = _tokens(jobs, slots, before)
        rows = self._next(slots, tokens, masks) if same else self._collect(jobs, slots, tokens, masks)
        self._jobs, self._rows = jobs, rows
        for job in jobs:
            job.chunk, job.started = None, False
        return rows

    def _collect(self, jobs: list[Job], slots: list[int], tokens: np.ndarray, masks: Masks) -> DecodeRows:
        """The rows of these jobs, collected from their tables; most were in the step before, one slot back."""
        size = jobs[0].table.page_size
        known = {} if self._rows is None else dict(zip(self._jobs, zip(self._tables, self._rows.slots.tolist())))
        tables = []
        for job, slot in zip(jobs, slots, strict=True):
            table, before = known.get(job, (None, -1))
            same = table is not None and before == slot - 1 and slot % size  # no page has come since
            tables.append(table if same else joined(job.table.physical, job.pages))
        self._tables = tables
        last = np.array([table[slot // size] for table, slot in zip(self._tables, slots, strict=True)])
        readouts = tuple([_decode(job).readout for job in jobs])
        at = np.array(slots)
        return DecodeRows(
            tokens=tokens,
            positions=np.array([job.table.next_position + slot - job.table.length for job, slot in zip(jobs, slots)]),
            slots=at,
            write_slots=last * size + at % size,
            pages=np.concatenate(self._tables),
            page_ends=np.cumsum([len(table) for table in self._tables]),
            masks=masks,
            readouts=readouts,
            seeds=np.array([r.seed for r in readouts], np.uint64),
            adapters=_adapters(jobs),
            probes=_probes(jobs),
            states=self._states(jobs),
            adjustments=_adjustments(jobs),
            group=object(),
        )

    def _states(self, jobs: Sequence[Job]) -> np.ndarray | None:
        return None if self._kv_cache.states is None else self._kv_cache.states.rows(jobs)

    def _next(self, at: list[int], tokens: np.ndarray, masks: Masks) -> DecodeRows:
        """The rows of the same jobs, one slot on."""
        rows, jobs, size = self._rows, self._jobs, self._jobs[0].table.page_size
        assert rows is not None
        slots, write_slots = rows.slots + 1, rows.write_slots + 1
        pages, ends = rows.pages, rows.page_ends
        begun = np.flatnonzero(slots % size == 0)
        for i in begun.tolist():
            self._tables[i] = joined(jobs[i].table.physical, jobs[i].pages)
            write_slots[i] = self._tables[i][at[i] // size] * size
        if len(begun):
            pages, ends = np.concatenate(self._tables), np.cumsum([len(table) for table in self._tables])
        return DecodeRows(
            tokens=tokens,
            positions=rows.positions + 1,
            slots=slots,
            write_slots=write_slots,
            pages=pages,
            page_ends=ends,
            masks=masks,
            readouts=rows.readouts,
            seeds=rows.seeds,
            adapters=rows.adapters,
            probes=rows.probes,
            states=self._states(jobs),
            adjustments=rows.adjustments,
            group=rows.group,
        )

    # -- after a step ----------------------------------------------------------------------------------------------

    def apply(self, jobs: Sequence[Job], rows: DecodeRows, result: StepResult, still: set[Job]) -> Failures:
        """Take the tokens of a step over, while the jobs in `still` are in flight again. The jobs that failed."""
        failed: Failures = []
        masks, states, tokens = rows.masks, self._kv_cache.states, result.tokens
        if result.probed:
            tokens = [_unless_failed(token, row) for token, row in zip(tokens, result.probed, strict=True)]
        for i, (job, token, slot) in enumerate(zip(jobs, tokens, rows.slots.tolist(), strict=True)):
            job.running = job in still
            decode = _decode(job)
            if job.abandoned or decode.over or slot != job.table.length:
                job.table.wipe()  # for nothing: its step before failed, was the last, or is repeated
            elif isinstance(token, HeadwayError):
                job.table.wipe()
                failed.append((job, token))
            elif token < 0:  # no token, or the fast sampler cannot tell
                job.table.wipe()
                decode.as_pass = True
                if token == NO_TOKEN:
                    failed.append((job, not_a_number()))
            elif decode.cannot_continue(job):
                job.table.wipe()
            else:
                mask = None if masks is None else masks[i]
                if mask is not None and self._trim:
                    self._count_trimmed(job, mask, slot)
                if states is not None:
                    states.appended(job)
                decode.append(job, token, mask, values=result.probed[i] if result.probed else ())
                self.sampled += 1
                self._free_pages(job)
                continue
            if states is not None:
                states.void(job)
            self._free_pages(job)
        if failed:
            self.forget()
        return failed

    def fall_back(self, jobs: Sequence[Job], still: set[Job]) -> None:
        """Decode rows came to nothing: each is computed again as an ordinary pass."""
        for job in jobs:
            job.running = job in still
            _decode(job).as_pass = True
            if not job.running:
                job.table.wipe()
            if self._kv_cache.states is not None:
                self._kv_cache.states.void(job, last=True)
            self._free_pages(job)
        self.forget()

    def _free_pages(self, job: Job) -> None:
        """A job that is not in flight holds no pages besides its table's."""
        if job.pages and not job.running:
            self._kv_cache.allocator.drop(job.pages)
            job.pages = []

    def _count_trimmed(self, job: Job, mask: Brle, slot: int) -> None:
        """Count pages that attention left out."""
        size = job.table.page_size
        self.pages_trimmed += slot // size + 1 - len(needed_of((mask,), slot, slot + 1, size))


def _masks(jobs: list[Job], slots: list[int]) -> Masks:
    if all(_decode(job).mask is None for job in jobs):
        return None
    masks = [_decode(job).attends(slot) for job, slot in zip(jobs, slots, strict=True)]
    return None if all(mask is None for mask in masks) else tuple(masks)


def _adapters(jobs: list[Job]) -> Mixes | None:
    mixes = tuple([_decode(job).adapters for job in jobs])
    return None if all(mix is None for mix in mixes) else mixes


def _probes(jobs: list[Job]) -> tuple[tuple[Readout, ...], ...] | None:
    probes = tuple([_decode(job).probes for job in jobs])
    return probes if any(probes) else None


def _adjustments(jobs: list[Job]) -> tuple[Adjustments | None, ...] | None:
    adjustments = tuple([_decode(job).adjustments for job in jobs])
    return None if all(one is None for one in adjustments) else adjustments


def _unless_failed(token: int | HeadwayError, values: Sequence[object]) -> int | HeadwayError:
    """A row's token. Where a probe has failed the row is computed again as a pass, which says why."""
    failed = any(isinstance(value, HeadwayError) for value in values)
    return UNDECIDED if failed and isinstance(token, int) and token >= 0 else token


def _tokens(jobs: list[Job], slots: list[int], before: Sequence[Job]) -> np.ndarray:
    """The token of each row, or -1 - i for the one that row i of the step in flight samples."""
    place = {job: i for i, job in enumerate(before)}
    return np.array(
        [
            -1 - place[job] if slot > job.table.length else _decode(job).token
            for job, slot in zip(jobs, slots, strict=True)
        ]
    )


def _decode(job: Job) -> Decode:
    assert job.decode is not None
    return job.decode
