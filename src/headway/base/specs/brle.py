"""Binary run-length encoding: the form of masks everywhere in the engine.

`Brle` is an immutable bit vector stored as alternating run lengths, zeros first: `(3, 2, 4, 1)` is `000 11 0000 1`. It
owns the arithmetic on runs and knows nothing of polarity: its user decides whether a one means "attend" or "masked".
Work is proportional to the number of runs; only `to_bool` expands the bits.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, SupportsIndex

from headway.base.checks import as_integer, check_integer, check_list
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidMask, WrongType
from headway.base.text import short_repr

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

LONGEST_RUN = 1 << 40  # lengths stay in what a machine can index


@dataclass(frozen=True, slots=True)
class Brle:
    """Bits as alternating run lengths, zeros first, in canonical form: equal bits have equal runs."""

    runs: tuple[int, ...] = ()
    ends: tuple[int, ...] = field(init=False, compare=False, repr=False)  # where each run ends

    def __post_init__(self) -> None:
        _set(self, _canonical(_parse(self.runs, "runs")))

    @classmethod
    def from_runs(cls, runs: Iterable[SupportsIndex] | Brle, *, where: str = "runs") -> Brle:
        """The bits of alternating run lengths, zeros first. `where` names them in an error."""
        return runs if isinstance(runs, Brle) else _canonical_brle(_canonical(_parse(runs, where)))

    @classmethod
    def from_bool(cls, bits: Any) -> Brle:
        """The bits of a one-dimensional array or list of booleans."""
        bits = bool_array(bits, "bits")
        if bits.ndim != 1:
            raise InvalidMask(f"bits have shape {bits.shape}; it must have one dimension")
        return _from_array(bits)

    @classmethod
    def from_intervals(cls, length: int, intervals: Iterable[tuple[int, int]]) -> Brle:
        """`length` bits with ones in the half-open intervals, which may overlap and be unordered."""
        length = check_integer(length, "length", high=LONGEST_RUN)
        out, reached = _RunBuilder(), 0
        for start, stop in sorted(_pairs(intervals)):
            if not 0 <= start <= stop <= length:
                raise InvalidMask(f"interval ({start}, {stop}) must lie in [0, {length}]")
            if stop > reached:
                out.add(0, max(0, start - reached))
                out.add(1, stop - max(start, reached))
                reached = stop
        out.add(0, length - reached)
        return out.done()

    @classmethod
    def _span(cls, length: int, start: int, stop: int) -> Brle:
        """`length` bits with ones in [start, stop), where 0 ≤ start < stop ≤ length."""
        assert 0 <= start < stop <= length
        return _canonical_brle((start, stop - start, length - stop) if stop < length else (start, stop - start))

    @classmethod
    def _from_canonical(cls, runs: tuple[int, ...]) -> Brle:
        """The bits of canonical runs, unchecked: only the first may be 0, and not all are."""
        return _canonical_brle(runs)

    @classmethod
    def ones(cls, length: int) -> Brle:
        """`length` ones."""
        length = check_integer(length, "length", high=LONGEST_RUN)
        return _canonical_brle((0, length) if length else ())

    @classmethod
    def zeros(cls, length: int) -> Brle:
        """`length` zeros."""
        length = check_integer(length, "length", high=LONGEST_RUN)
        return _canonical_brle((length,) if length else ())

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __bool__(self) -> bool:
        raise WrongType("a Brle has no single truth value; use any(), all() or len()")

    def __invert__(self) -> Brle:
        if not self.runs:
            return self
        return _canonical_brle(self.runs[1:] if self.runs[0] == 0 else (0, *self.runs))

    def __and__(self, other: Brle) -> Brle:
        return _merge(self, other, operator.and_)

    def __or__(self, other: Brle) -> Brle:
        return _merge(self, other, operator.or_)

    def __getitem__(self, part: slice) -> Brle:
        """The bits `[start:stop]`, with Python's slice semantics."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise WrongType(
                f"a Brle is indexed by slices of step 1, not by {short_repr(part)}; use to_bool() for single bits"
            )
        start, stop = self._range(part.start, part.stop)
        out = _RunBuilder()
        for value, first, last in self._pieces(start, stop):
            out.add(value, last - first)
        return out.done()

    def concat(self, *others: Brle) -> Brle:
        """These bits followed by those of the others."""
        out = _RunBuilder()
        for part in (self, *others):
            if not isinstance(part, Brle):
                raise WrongType(f"concat was given {short_repr(part)} of type {type(part).__name__}; it takes Brles")
            for index, run in enumerate(part.runs):
                out.add(index & 1, run)
        return out.done()

    def count(self) -> int:
        """How many bits are one."""
        return sum(self.runs[1::2])

    def any(self, start: int | None = None, stop: int | None = None) -> bool:
        """Whether a bit of `[start:stop]` is one."""
        first, last = self._range(start, stop)
        return any(value for value, _, _ in self._pieces(first, last))

    def all(self, start: int | None = None, stop: int | None = None) -> bool:
        """Whether every bit of `[start:stop]` is one; true for an empty range."""
        first, last = self._range(start, stop)
        return all(value for value, _, _ in self._pieces(first, last))

    def _range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        """The ends of a slice, inside the bits."""
        try:
            first, last, _ = slice(start, stop).indices(len(self))
        except TypeError:
            raise WrongType(f"a slice of bits has {short_repr((start, stop))}; its ends must be integers") from None
        return first, last

    def intervals(self) -> Iterator[tuple[int, int]]:
        """The maximal half-open intervals of ones, in order."""
        return zip(self.ends[0::2], self.ends[1::2])

    def to_bool(self) -> np.ndarray:
        """A numpy array of booleans."""
        values = np.arange(len(self.runs)) % 2 == 1
        return np.repeat(values, np.asarray(self.runs, dtype=np.int64))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(bit, first, stop) of each run within [start, stop)."""
        index = bisect_right(self.ends, start)
        while start < stop:
            last = min(self.ends[index], stop)
            yield index & 1, start, last
            start, index = last, index + 1


def bool_array(values: Any, name: str) -> np.ndarray:
    """`values` (a list, array or tensor) as a numpy array of booleans; numbers are refused, except an empty list."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongType(f"{name} cannot be read as an array of booleans: {error}") from None
    if array.size == 0 and array.dtype != np.bool_:
        return np.zeros(array.shape, dtype=np.bool_)
    if array.dtype != np.bool_:
        raise WrongType(
            f"{name} has elements of type {array.dtype}; they must be booleans (convert with .astype(bool))"
        )
    return array


def _parse(runs: Any, where: str) -> list[int]:
    """The run lengths as Python integers; an error names the first bad one."""
    if isinstance(runs, (bytearray, set, frozenset, dict, type)):
        raise WrongType(f"{where} must be a list of run lengths, not {short_repr(runs)} of type {type(runs).__name__}")
    out = []
    try:
        values = runs.tolist() if hasattr(runs, "tolist") else runs
    except RuntimeError as error:  # a tensor without values
        raise WrongType(f"{where} is {short_repr(runs)}, which cannot be read: {error}") from None
    for index, run in enumerate(check_list(values, where, "a list of run lengths")):
        number = run if type(run) is int else as_integer(run, f"{where}: run {index}")
        if not 0 <= number <= LONGEST_RUN:
            allowed = "at least 0" if number < 0 else f"at most {LONGEST_RUN}"
            raise InvalidMask(f"{where}: run {index} is {short_repr(number)}; a run length must be {allowed}")
        out.append(number)
    return out


def _pairs(intervals: Any) -> list[tuple[int, int]]:
    pairs = []
    for pair in check_list(intervals, "intervals", "a list of (start, stop) pairs"):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise WrongType(f"intervals has {short_repr(pair)}; it must be a list of (start, stop) pairs")
        pairs.append((as_integer(pair[0], "the start of an interval"), as_integer(pair[1], "the stop of an interval")))
    return pairs


class _RunBuilder:
    """Collects runs in order and merges neighbors of the same value."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs = [0]

    def add(self, value: int, length: int) -> None:
        if length == 0:
            return
        if (len(self.runs) - 1) & 1 == value:
            self.runs[-1] += length
        else:
            self.runs.append(length)

    def done(self) -> Brle:
        return _canonical_brle(() if self.runs == [0] else tuple(self.runs))


def _canonical(runs: list[int]) -> tuple[int, ...]:
    out = _RunBuilder()
    for index, run in enumerate(runs):
        out.add(index & 1, run)
    return () if out.runs == [0] else tuple(out.runs)


def _set(brle: Brle, runs: tuple[int, ...]) -> None:
    object.__setattr__(brle, "runs", runs)
    object.__setattr__(brle, "ends", tuple(accumulate(runs)))


def _canonical_brle(runs: tuple[int, ...]) -> Brle:
    """A Brle of runs that are already canonical."""
    brle = object.__new__(Brle)
    _set(brle, runs)
    return brle


def _from_array(bits: np.ndarray) -> Brle:
    if bits.size == 0:
        return _canonical_brle(())
    changes = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    runs = np.diff(changes, prepend=0, append=bits.size).tolist()
    return _canonical_brle((0, *runs) if bits[0] else tuple(runs))


def _merge(left: Brle, right: Brle, combine: Callable[[int, int], int]) -> Brle:
    if not isinstance(right, Brle):
        raise WrongType(f"a Brle can be combined only with another Brle, not with {short_repr(right)}")
    if len(left) != len(right):
        raise InvalidMask(f"bits of lengths {len(left)} and {len(right)} cannot be combined; the lengths must be equal")
    out, at, length = _RunBuilder(), 0, len(left)
    i, j = bisect_right(left.ends, 0), bisect_right(right.ends, 0)
    while at < length:
        stop = min(left.ends[i], right.ends[j])
        out.add(combine(i & 1, j & 1), stop - at)
        i, j, at = i + (left.ends[i] == stop), j + (right.ends[j] == stop), stop
    return out.done()
