"""What a forward looks at on its way, for probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.kernels.host.attention import AttentionGroup


@dataclass(eq=False)
class Hooks:
    """Hooks into a forward: rows of the residual before layer l (`hidden`) and attention groups of layer l (`scores`),
    each of one row.

    The forward fills `hidden_out` with rows [R, E], and `scores_out` with probabilities [H, S] for each group.
    """

    hidden: Mapping[int, np.ndarray] = field(default_factory=dict)
    scores: Mapping[int, Sequence[AttentionGroup]] = field(default_factory=dict)
    hidden_out: dict[int, Any] = field(default_factory=dict)
    scores_out: dict[int, list[Any]] = field(default_factory=dict)
