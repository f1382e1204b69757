"""Who goes first: a pure function of the waiting jobs.

Rows of a step: a pass that has waited n steps ranks as if its context's bid were n higher. So a newer pass with a
higher bid overtakes it for at most as many steps as the bids differ; bids lie between -1000 and 1000.
Pages are expensive to move: it takes PATIENCE steps to rank one higher (`Job.claim`), and among equals the older
context wins. Contexts that fit run on, the youngest wait, and none waits forever. A pass that got its pages by waiting
keeps that rank to its end, so that it is not preempted again before it has computed anything useful.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.runtime.job import PATIENCE, Job

BID_LIMIT = 1000.0


def ordered(jobs: Iterable[Job]) -> list[Job]:
    """Jobs in the order in which they get tokens: decodes and passes out of patience first, then prefills."""
    return sorted(jobs, key=_rank)


def _rank(job: Job) -> tuple[bool, float, int]:
    return job.remaining > 1 and job.waited < PATIENCE, -job.table.bid - job.waited, job.order
