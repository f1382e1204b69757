"""The engine's own runner, with somebody who looks at its batches on the way in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import headway as hw
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampling
from headway.kv.allocator import Edit
from headway.models.adapters.bound import BoundAdapter
from headway.runtime.adapters import DeviceWeights
from headway.runtime.batch import Batch
from headway.runtime.runners.base import InFlight, Runner
from support.eventually import eventually


class WatchedRunner:
    """Delegates to the runner of an engine, in its place; `before` is called with every batch."""

    def __init__(self, engine: hw.Engine) -> None:
        self.engine = engine
        self.inner: Runner = engine._loop._runner
        self.overlaps = self.inner.overlaps
        engine._loop._runner = self

    def before(self, batch: Batch) -> None:
        """What it raises is the device's error."""

    @property
    def decode_limit(self) -> int:
        return self.inner.decode_limit

    def samples(self, how: Sampling) -> bool:
        return self.inner.samples(how)

    def reads(self, what: Probe, how: Sampling) -> bool:
        return self.inner.reads(what, how)

    def edit(self, edits: Sequence[Edit]) -> None:
        self.inner.edit(edits)

    def load_adapter(self, adapter: BoundAdapter) -> DeviceWeights:
        return self.inner.load_adapter(adapter)

    def begin(self, batch: Batch) -> InFlight:
        self.before(batch)
        return self.inner.begin(batch)


class PatientRunner(WatchedRunner):
    """Leaves the programs their time, however busy the machine is: a step begins once they have taken every token that
    was drawn for them."""

    def before(self, batch: Batch) -> None:
        eventually(self._have_programs_taken_all)

    def _have_programs_taken_all(self) -> bool:
        with self.engine._lock:
            return not any(job.decode is not None and job.decode.buffer for job in self.engine._loop.jobs())


def tokens_of(batch: Batch) -> list[int]:
    """All tokens of a batch, those of decode rows first."""
    if batch.decode is None:
        return batch.tokens.tolist()
    return np.concatenate((batch.decode.tokens, batch.tokens)).tolist()
