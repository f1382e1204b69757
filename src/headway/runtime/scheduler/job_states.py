"""Recurrent state for jobs: where the rows of a pass start from, what they leave behind, and what is computed again.

A job pins the checkpoint that its next rows read; each step writes others, so that a step that fails can be repeated.
They belong to the table once the pass has succeeded. It alone talks to `States` on behalf of jobs. Bookkeeping under
the engine's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.base.dataclass import dataclass
from headway.kv.states import StateCheckpoint, States, TableStates
from headway.kv.table import PageTable
from headway.runtime.batch import Chunk, ChunkStates, rereads
from headway.runtime.job import Job
from headway.runtime.passes import Pass


@dataclass(eq=False)
class JobStates:
    """Pins and takes checkpoints for jobs."""

    states: States

    # -- before a step ---------------------------------------------------------------------------------------------

    def hits(self, keys: Sequence[bytes], pages: int) -> int:
        """How many of the pages found in the prefix cache serve: those up to the last one whose state is kept."""
        return next((n for n in range(pages, 0, -1) if self.states.find(keys[n - 1]) is not None), 0)

    def start_at(self, job: Job, key: bytes) -> None:
        """A job's first rows follow the page of this key, which is in the prefix cache."""
        checkpoint = self.states.find(key)
        assert checkpoint is not None
        assert checkpoint.length == job.base + job.done, "a key says how many slots there are"
        self._start_from(job, checkpoint)
        self.states.hold(checkpoint)
        job.saved.append(checkpoint)

    def find_start(self, job: Job) -> None:
        """Pin the state that a started job's next rows need, or have the slots up to it computed again."""
        if job.state is not None or not _needs_state(job):
            return
        assert job.replay is None
        if (checkpoint := _own(job).at(_point(job))) is not None:
            self._start_from(job, checkpoint)
        else:
            self.replay(job, job.table.length)

    def replay(self, job: Job, written_from: int) -> None:
        """Compute a table's slots again from the nearest state on; those before `written_from` have their pages."""
        table = job.table
        start = _own(job).nearest(min(written_from, _point(job)))
        job.replay = replay_pass(table)
        job.replayed = job.replay_from = start.length
        job.written_from = written_from
        self._start_from(job, start)

    def take(self, job: Job, chunk: Chunk) -> bool:
        """Have places for what a chunk leaves behind; False when there is none."""
        chunk.states = None
        if chunk.stop == chunk.start and not chunk.reread:
            return True
        assert job.state is not None
        end = self.states.take(chunk.base + chunk.stop)
        if end is None:
            return False
        saves = [(chunk.stop, end)]
        for length in self._worthwhile(job, chunk):
            if (more := self.states.take(length)) is None:
                break
            saves.append((length - chunk.base, more))
        chunk.states = ChunkStates(job.state, tuple(sorted(saves, key=lambda save: save[0])))
        return True

    def _worthwhile(self, job: Job, chunk: Chunk) -> list[int]:
        """Lengths at which a chunk leaves a state besides its end, the most useful first: where the next pass may begin
        again, the last page border, and every few pages."""
        table, first, end = job.table, chunk.base + chunk.start, chunk.base + chunk.stop
        size, whole = table.page_size, chunk.base + len(chunk.work.tokens)
        step = self.states.every * size
        wanted = [table.length - 1] if chunk.work is job.replay and rereads(job.work, table) else []
        wanted += [whole // size * size, *range(end // step * step, first, -step)]
        inside = [length for length in dict.fromkeys(wanted) if first < length < end]
        return inside[: max(0, self.states.available // 2 - 1)]

    def take_row(self, job: Job) -> bool:
        """Have a place for what a sequence's next decode row leaves behind; False when there is none."""
        if job.state is None:
            checkpoint = _own(job).at(job.table.length)
            assert checkpoint is not None, "a sequence that is behind is computed as a pass"
            self._start_from(job, checkpoint)
        before = job.row_states[-1] if job.row_states else job.state
        assert before is not None
        after = self.states.take(before.length + 1)
        if after is None:
            return False
        job.row_states.append(after)
        return True

    @staticmethod
    def rows(jobs: Sequence[Job]) -> np.ndarray:
        """The places before and after the last decode row of each job [N, 2]."""
        return np.array([_last_row(job) for job in jobs], np.int64).reshape(-1, 2)

    # -- after a step ----------------------------------------------------------------------------------------------

    def computed(self, job: Job, chunk: Chunk) -> None:
        """A chunk is done: what it left behind is the table's, if it was computed again, or the job's for now."""
        if chunk.states is None:
            return
        own, replayed = _own(job), chunk.work is job.replay
        for _, save in chunk.states.saves:
            if replayed:
                own.add(save)
                if key := _key_at(job, save.length):
                    self.states.register(save, key)
            else:
                self.states.hold(save)
                job.saved.append(save)
        *others, (_, end) = chunk.states.saves
        for _, save in others:
            self.states.unpin(save)
        self._start_from(job, end, pinned=True)
        chunk.states = None

    def replayed(self, job: Job) -> None:
        """The table's slots are computed again: the job's own rows may start before the last one, to read it."""
        if (checkpoint := _own(job).at(_point(job))) is not None:
            self._start_from(job, checkpoint)
        else:
            self._release(job)
        _own(job).thin()

    def register(self, job: Job) -> None:
        """What a job has left at page borders can be found by others."""
        size = job.table.page_size
        for save in job.saved:
            number, rest = divmod(save.length - job.base, size)
            if not rest and 0 < number <= len(job.keys):
                self.states.register(save, job.keys[number - 1])

    def finish(self, job: Job) -> None:
        """The pass has succeeded: what it has left is its table's. The table has not advanced yet."""
        own = _own(job)
        for save in job.saved:
            own.add(save)
        self.states.let_go(job.saved)
        job.saved = []

    def finished(self, job: Job) -> None:
        """The table has advanced."""
        self._release(job)
        _own(job).thin()

    def appended(self, job: Job) -> None:
        """A decode row has succeeded: its state is that of the table's new end. The table has not grown yet."""
        after = job.row_states.pop(0)
        assert after.length == job.table.length + 1
        _own(job).add(after)
        self._start_from(job, after, pinned=True)
        self.grown(job)

    @staticmethod
    def grown(job: Job) -> None:
        """A sequence grows by a token: where it ended before is kept only at a page border."""
        before = job.table.length
        _own(job).thin(but=before if before % job.table.page_size else -1)

    def void(self, job: Job, *, last: bool = False) -> None:
        """A decode row, the oldest in flight or the last, has come to nothing."""
        if job.row_states:
            self.states.unpin(job.row_states.pop(-1 if last else 0))

    def give_back(self, job: Job) -> None:
        """A job ends without success, or starts over."""
        if job.chunk is not None and job.chunk.states is not None:
            for _, save in job.chunk.states.saves:
                self.states.unpin(save)
            job.chunk.states = None
        while job.row_states:
            self.void(job)
        self.states.let_go(job.saved)
        job.saved = []
        self._release(job)

    def _start_from(self, job: Job, checkpoint: StateCheckpoint, *, pinned: bool = False) -> None:
        if not pinned:
            self.states.pin(checkpoint)
        self._release(job)
        job.state = checkpoint

    def _release(self, job: Job) -> None:
        if job.state is not None:
            self.states.unpin(job.state)
            job.state = None


def replay_pass(table: PageTable) -> Pass:
    """A pass over everything that a table's log has."""
    masks = table.masks
    return Pass(
        tokens=tuple(table.tokens),
        positions=tuple(table.positions),
        masks=None if all(m is None for m in masks) else tuple(masks),
        adapters=None if all(a is None for a in table.adapters) else tuple(table.adapters),
    )


def _own(job: Job) -> TableStates:
    assert job.table.states is not None
    return job.table.states


def _needs_state(job: Job) -> bool:
    """Whether a job has rows, or is there to bring its context up to date."""
    return bool(job.work.tokens) or not job.work.readouts or rereads(job.work, job.table)


def _point(job: Job) -> int:
    """The slots before the first row of a job."""
    return job.base - int(rereads(job.work, job.table))


def _key_at(job: Job, length: int) -> bytes | None:
    number, rest = divmod(length, job.table.page_size)
    return None if rest or not 0 < number <= len(job.table.keys) else job.table.keys[number - 1]


def _last_row(job: Job) -> tuple[int, int]:
    before, after = ([job.state, *job.row_states])[-2:]
    assert before is not None
    assert after is not None
    return before.place, after.place
