"""What bias and penalties do to the logits of a decoding sequence's next token: kept up from token to token.

One entry for each token that has a bias or was seen. A runner that has them in decode rows takes the arrays as they
are; for an ordinary pass they become a readout's `seen` and `generated` again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.base.specs.samplers import Sampling
from headway.runtime.passes import Readout

UNSEEN = -1  # in the place of a count: the token has a bias, and has not come


class Adjustments:
    """The entries of one sequence. `penalizes` unless they are a bias alone, which no token changes."""

    def __init__(self, readout: Readout) -> None:
        how = readout.what
        assert isinstance(how, Sampling)
        self.how, self.penalizes = how, how.penalizes
        bias = dict(how.bias)
        seen, counts = (readout.seen, readout.generated) if self.penalizes else ((), {})
        ids = sorted({*bias, *seen, *counts})
        self._at = {token: i for i, token in enumerate(ids)}
        self._ids, self._counts = np.array(ids, np.int32), np.full(len(ids), UNSEEN, np.int32)
        self._biases = np.array([bias.get(token, 0.0) for token in ids]) if bias else None
        for token in seen:
            self._counts[self._at[token]] = 0
        for token, count in counts.items():
            self._counts[self._at[token]] = count

    def __len__(self) -> int:
        return len(self._at)

    @property
    def ids(self) -> np.ndarray:
        """The tokens [n] int32."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> np.ndarray:
        """How often each was generated [n] int32; `UNSEEN` for one that never came."""
        return self._counts[: len(self)]

    @property
    def biases(self) -> np.ndarray | None:
        """What is added to the logit of each [n] float64; None where there is no bias."""
        return None if self._biases is None else self._biases[: len(self)]

    def add(self, token: int) -> None:
        """The sequence has generated a token."""
        if not self.penalizes:
            return
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._grow()
        self._ids[at], self._counts[at] = token, max(self._counts[at], 0) + 1

    def counted(self, readout: Readout) -> Readout:
        """The readout of the next token."""
        if not self.penalizes:
            return readout
        pairs = [pair for pair in zip(self.ids.tolist(), self.counts.tolist(), strict=True) if pair[1] != UNSEEN]
        generated = {token: count for token, count in pairs if count}
        return replace(readout, seen=tuple(sorted(token for token, _ in pairs)), generated=generated)

    def _grow(self) -> None:
        more = max(64, len(self._ids) // 2)
        self._ids = np.pad(self._ids, (0, more))
        self._counts = np.pad(self._counts, (0, more), constant_values=UNSEEN)
        if self._biases is not None:
            self._biases = np.pad(self._biases, (0, more))
