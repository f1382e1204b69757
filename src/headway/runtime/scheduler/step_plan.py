"""A planned step: whose rows it has, and the batch that the runner computes."""

from __future__ import annotations

from collections.abc import Sequence

from headway.base.dataclass import dataclass
from headway.runtime.batch import Batch, Chunk
from headway.runtime.job import Job
from headway.runtime.scheduler.chunks import is_prefill


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: whose rows it has, and the batch that the runner computes."""

    decode_jobs: Sequence[Job]
    chunks: Sequence[tuple[Job, Chunk]]
    batch: Batch

    @property
    def jobs(self) -> list[Job]:
        return [*self.decode_jobs, *(job for job, _ in self.chunks)]

    @property
    def prefill_tokens(self) -> int:
        """Tokens of long passes."""
        return sum(chunk.stop - chunk.start for job, chunk in self.chunks if is_prefill(job))

    @property
    def draws_late(self) -> bool:
        """Whether the token before it decides how a decode row is drawn: by its logit mask, or by penalties."""
        return any(job.decode is not None and job.decode.looks_back for job in self.decode_jobs)

    @property
    def live_decodes(self) -> set[Job]:
        """The jobs of its decode rows that count: the row stands where its table ends."""
        if self.batch.decode is None:
            return set()
        rows = zip(self.decode_jobs, self.batch.decode.slots.tolist(), strict=True)
        return {job for job, slot in rows if not job.abandoned and slot == job.table.length}
