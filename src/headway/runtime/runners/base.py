"""The Runner: a frozen batch in, values out. The one seam between bookkeeping and the device.

A runner that overlaps with the host returns from `begin` while the device computes; others compute when the result is
asked for. A runner without a fast path for decode rows turns them into ordinary rows (`as_segments`, `Deferred`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampling
from headway.kv.allocator import Edit
from headway.models.adapters.bound import BoundAdapter
from headway.runtime.adapters import DeviceWeights
from headway.runtime.batch import Batch, DecodeRows, Segment, SegmentStates, needed_of
from headway.runtime.passes import DecodeMask, Readout

DECODE_LIMIT = 256  # decode rows of a step, for runners that hold the logits of each


@dataclass(frozen=True, eq=False)
class SegmentResult:
    """The values of a segment's readouts by their index in the pass, and its last row's residual if it was wanted."""

    values: Mapping[int, object]
    state: object


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step computed: a token for each decode row, and the values of each segment; or an error in its place.

    NO_TOKEN stands for a decode row whose logits are not numbers, UNDECIDED for one that must run as a pass. `probed`
    has the values of each decode row's probes; it is empty where no row has any.
    """

    tokens: Sequence[int | HeadwayError]
    segments: Sequence[SegmentResult | HeadwayError]
    probed: Sequence[Sequence[object]] = ()


class InFlight(Protocol):
    """A step that the device computes."""

    def masks(self, masks: Sequence[DecodeMask | None]) -> None:
        """Have the decode rows sampled, each among the tokens that its mask allows. Called once, if there are any."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. What it raises is the fault of the whole step."""
        ...


class Runner(Protocol):
    """Computes batches in the order in which they come."""

    @property
    def overlaps(self) -> bool:
        """Whether `begin` returns while the device computes."""
        ...

    @property
    def decode_limit(self) -> int:
        """Decode rows that a step may have; 0 while every pass is to be measured by itself."""
        ...

    def samples(self, how: Sampling) -> bool:
        """Whether decode rows can sample like this."""
        ...

    def reads(self, what: Probe, how: Sampling) -> bool:
        """Whether decode rows that sample like this can be probed like that."""
        ...

    def load_adapter(self, adapter: BoundAdapter) -> DeviceWeights:
        """An adapter's weights on the device. They go with their last reference."""
        ...

    def edit(self, edits: Sequence[Edit]) -> None:
        """Clear, copy and move pages, in order, before the next step."""
        ...

    def begin(self, batch: Batch) -> InFlight:
        """Start a step."""
        ...


class NoRunner:
    """In the place of a runner while there is no memory to compute in."""

    overlaps = False
    decode_limit = 0

    def samples(self, how: Sampling) -> bool:
        return False

    def reads(self, what: Probe, how: Sampling) -> bool:
        return False

    def load_adapter(self, adapter: BoundAdapter) -> DeviceWeights:
        raise AssertionError("there is no memory")

    def edit(self, edits: Sequence[Edit]) -> None:
        raise AssertionError("there are no pages")

    def begin(self, batch: Batch) -> InFlight:
        raise AssertionError("there are no pages")


class Deferred:
    """A step that is computed when its result is asked for, with decode rows as ordinary rows."""

    def __init__(self, batch: Batch, page_size: int, execute: Callable[[Batch], Sequence[SegmentResult]]) -> None:
        self._batch, self._page_size, self._execute = batch, page_size, execute
        self._masks: Sequence[DecodeMask | None] = ()

    def masks(self, masks: Sequence[DecodeMask | None]) -> None:
        self._masks = masks

    def result(self) -> StepResult:
        count = self._batch.decode_count
        results = self._execute(as_segments(self._batch, self._masks, self._page_size))
        probes = None if self._batch.decode is None else self._batch.decode.probes
        probed = [] if probes is None else [_probed(result, len(p)) for result, p in zip(results, probes, strict=False)]
        return StepResult([_token(result) for result in results[:count]], results[count:], probed)


def _token(result: SegmentResult) -> int | HeadwayError:
    token = result.values[0]
    assert isinstance(token, int | HeadwayError)
    return token


def _probed(result: SegmentResult, count: int) -> tuple[object, ...]:
    return tuple([result.values[1 + i] for i in range(count)])


def as_segments(batch: Batch, masks: Sequence[DecodeMask | None], page_size: int) -> Batch:
    """The batch with its decode rows as segments of one row each, ahead of the others."""
    rows = batch.decode
    if rows is None:
        return batch
    assert (rows.tokens >= 0).all(), "only a runner that overlaps knows tokens that the host does not"
    count, firsts = len(rows), [0, *rows.page_ends.tolist()]
    segments = []
    for i, slot in enumerate(rows.slots.tolist()):
        pages, mask = rows.pages[firsts[i] : firsts[i + 1]], None if rows.masks is None else rows.masks[i]
        pages = pages[: slot // page_size + 1]
        if mask is None:
            numbers = np.arange(len(pages))
        else:
            numbers = np.array(sorted(needed_of((mask,), slot, slot + 1, page_size)))
        segments.append(
            Segment(
                rows=range(i, i + 1),
                slots=rows.slots[i : i + 1],
                pages=pages[numbers],
                numbers=numbers,
                masks=(mask,),
                slot_positions=np.arange(slot + 1),  # decode rows of models with windows stand at their slots
                readouts=tuple([(at, i, readout) for at, readout in enumerate(_readouts(rows, i, masks[i]))]),
                keep_last=False,
                kept=None,
                before_position=-1,
                adapters=None if rows.adapters is None else rows.adapters[i : i + 1],
                states=None if rows.states is None else _one_row(rows.states[i]),
            )
        )
    return Batch(
        tokens=np.concatenate((rows.tokens, batch.tokens)),
        positions=np.concatenate((rows.positions, batch.positions)),
        write_rows=np.concatenate((np.arange(count), batch.write_rows + count)),
        write_slots=np.concatenate((rows.write_slots, batch.write_slots)),
        segments=(*segments, *(_moved(segment, count) for segment in batch.segments)),
    )


def _readouts(rows: DecodeRows, i: int, mask: DecodeMask | None) -> tuple[Readout, ...]:
    """How a decode row samples, and its probes."""
    probes = () if rows.probes is None else rows.probes[i]
    adjustments = None if rows.adjustments is None else rows.adjustments[i]
    readout = rows.readouts[i] if adjustments is None else adjustments.counted(rows.readouts[i])
    return (replace(readout, async_mask=mask), *probes)


def _one_row(states: np.ndarray) -> SegmentStates:
    before, after = states.tolist()
    return SegmentStates(before, ((1, after),))


def _moved(segment: Segment, by: int) -> Segment:
    """A segment whose rows come after `by` others."""
    readouts = tuple((index, row if row < 0 else row + by, readout) for index, row, readout in segment.readouts)
    return segment._replace(rows=range(segment.rows.start + by, segment.rows.stop + by), readouts=readouts)
