"""From a batch's segments to groups of runs whose recurrent state advances together."""

from __future__ import annotations

import numpy as np

from headway.kernels.host.recurrent import StateGroup
from headway.runtime.batch import Batch


def plan_states(batch: Batch) -> list[StateGroup]:
    """Runs of one length go together; what a segment keeps in between cuts it into runs that follow each other."""
    groups: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for segment in batch.segments:
        if segment.states is None:
            assert len(segment.rows) == 0
            continue
        first, source = segment.rows.start, segment.states.source
        for turn, (stop, target) in enumerate(segment.states.saves):
            end = segment.rows.start + stop
            groups.setdefault((turn, end - first), []).append((first, source, target))
            first, source = end, target
        assert first == segment.rows.stop, "the state after the last row is kept"
    return [_group(length, groups[turn, length]) for turn, length in sorted(groups)]


def _group(length: int, runs: list[tuple[int, int, int]]) -> StateGroup:
    firsts, sources, targets = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    return StateGroup(firsts[:, None] + np.arange(length), sources, targets)
