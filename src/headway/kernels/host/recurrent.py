"""Groups of rows whose recurrent state advances together."""

from __future__ import annotations

from typing import Any

from headway.base.dataclass import dataclass


@dataclass(frozen=True, eq=False)
class StateGroup:
    """N runs of M consecutive rows each. Arrays, or tensors for torch.

    rows [N, M] are rows of the step, in order; a run starts from the state at its place in `sources` [N] and leaves its
    own in `targets` [N], which no run of the group reads.
    """

    rows: Any
    sources: Any
    targets: Any
