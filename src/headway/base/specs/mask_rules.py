"""The rules that attention masks are made of: which slots a row attends to, as data with one `match` per operation.

Symbolic rules apply to any row, raw rules hold bits for each row of a pass, the rest combine rules. Slots are counted
from the start of the sequence. Users write them with `Mask` (masks.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidMask
from headway.base.specs.brle import Brle, bool_array

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

READ_RUNS = "runs, zeros first, 0 = attend, 1 = masked"
READ_BOOL = "booleans, True = attend, False = masked"


@dataclass(frozen=True)
class Causal:
    """Every slot up to the row's own."""


@dataclass(frozen=True)
class Window:
    """The last `size` slots up to the row's own."""

    size: int


@dataclass(frozen=True)
class SinkWindow:
    """The first `sink` slots and the last `window` up to the row's own."""

    sink: int
    window: int


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks, the last one open; a row sees its own block and those paired with it."""

    lengths: tuple[int, ...]
    sees: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Function:
    """Whatever a function says of the row's position id and those of the slots."""

    fn: Callable[[int, np.ndarray], Any]


@dataclass(frozen=True)
class Raw:
    """One row of attend bits per input row, and how they were read."""

    rows: tuple[Brle, ...]
    read: str
    rectangular: bool


@dataclass(frozen=True)
class Not:
    """The complement of a symbolic rule."""

    rule: Causal | Window | SinkWindow | Blocks | Function


@dataclass(frozen=True)
class All:
    """The intersection of its parts."""

    parts: tuple[Rule, ...]


@dataclass(frozen=True)
class Either:
    """The union of its parts."""

    parts: tuple[Rule, ...]


Rule: TypeAlias = Causal | Window | SinkWindow | Blocks | Function | Raw | Not | All | Either


@dataclass(frozen=True)
class RowPlace:
    """The position of a row: the `row`-th of `rows` from slot `first`, over `length` slots."""

    row: int
    rows: int
    first: int
    length: int
    causal: bool
    pending: int = 0  # how many of the slots before the first row are pending tokens
    positions: np.ndarray | None = None  # the position ids of all slots; None: their numbers

    @property
    def slot(self) -> int:
        return self.first + self.row


def attended(rule: Rule, place: RowPlace) -> Brle:
    """The slots that the row at `place` attends to under `rule`."""
    match rule:
        case Causal():
            return _span(place, 0)
        case Window(size):
            return _span(place, place.slot + 1 - size)
        case SinkWindow(sink, window):
            return Brle.from_intervals(place.length, [(0, min(sink, place.length))]) | _span(
                place, place.slot + 1 - window
            )
        case Blocks():
            return Brle.from_intervals(place.length, _seen_blocks(rule, place))
        case Function(fn):
            return _called(fn, place)
        case Raw():
            return _fit(rule, place)
        case Not(inner):
            return ~attended(inner, place)
        case All(parts):
            first, *rest = (attended(part, place) for part in parts)
            for row in rest:
                first = first & row
            return first
        case Either(parts):
            first, *rest = (attended(part, place) for part in parts)
            for row in rest:
                first = first | row
            return first


def _span(place: RowPlace, start: int) -> Brle:
    """Ones from `start` up to and including the row's own slot."""
    return Brle._span(place.length, max(0, start), place.slot + 1)


def _seen_blocks(rule: Blocks, place: RowPlace) -> list[tuple[int, int]]:
    ends = list(accumulate(rule.lengths))
    own = bisect_right(ends, place.slot)
    if own == len(ends):
        return [(0, place.length)]
    starts, stops = [0, *ends], [*ends, place.length]
    seen = {own} | {block for viewer, block in rule.sees if viewer == own}
    return [(starts[b], min(stops[b], place.length)) for b in seen if starts[b] < place.length]


def _called(fn: Callable[[int, np.ndarray], Any], place: RowPlace) -> Brle:
    known = np.arange(place.length) if place.positions is None else place.positions[: place.length]
    slots = known.view()
    slots.flags.writeable = False
    seen = bool_array(fn(int(known[place.slot]), slots), "what the mask's rule returned")
    if seen.shape != (place.length,):
        raise InvalidMask(
            f"the mask's rule returned an array of shape {seen.shape} for row {place.row}; "
            f"expected a boolean for each of {place.length} slots"
        )
    return Brle.from_bool(seen)


def pass_shape(first: int, rows: int, pending: int) -> str:
    """The shape of a mask over a whole pass, in words."""
    before = f"{first - pending} computed slots, {pending} pending tokens" if pending else f"{first} computed slots"
    own = "1 row" if rows == 1 else f"{rows} rows"
    return f"A mask over this whole pass has shape [{rows}, {first + rows}]: {before} and {own}"


def _fit(raw: Raw, place: RowPlace) -> Brle:
    """A raw row over the slots of its place; a row of another length is an error."""
    row, slot = raw.rows[place.row], place.slot
    if len(row) == place.length:
        return row
    if place.causal and len(row) == slot:
        return row.concat(Brle.ones(1))
    if place.causal and raw.rectangular and len(row) == place.first + place.rows:
        return row[: slot + 1]
    expected = f"{slot} (those before its token) or {slot + 1} (with its own)" if place.causal else f"{place.length}"
    shape = pass_shape(place.first, place.rows, place.pending)
    raise InvalidMask(
        f"row {place.row} of the attention mask covers {len(row)} slots; expected {expected}. {shape}. "
        f"It was read as {raw.read}"
    )


def complement(rule: Rule) -> Rule:
    """The complement, by De Morgan down to the leaves, so that a raw row without its own slot never masks it."""
    match rule:
        case Raw(rows, read, rectangular):
            return Raw(tuple(~row for row in rows), read, rectangular)
        case Not(inner):
            return inner
        case All(parts):
            return Either(tuple(map(complement, parts)))
        case Either(parts):
            return All(tuple(map(complement, parts)))
        case leaf:
            return Not(leaf)


def leaves(rule: Rule) -> Iterator[Rule]:
    """The rules that are combined in a rule."""
    match rule:
        case All(parts) | Either(parts):
            for part in parts:
                yield from leaves(part)
        case Not(inner):
            yield inner
        case leaf:
            yield leaf


def raw_rules(rule: Rule) -> Iterator[Raw]:
    return (leaf for leaf in leaves(rule) if isinstance(leaf, Raw))


def text_of(rule: Rule) -> str:
    match rule:
        case Causal():
            return "Mask.causal()"
        case Window(size):
            return f"Mask.window({size})"
        case SinkWindow(sink, window):
            return f"Mask.sink({sink}, {window})"
        case Blocks(lengths, sees):
            return f"Mask.blocks({list(lengths)}" + (f", sees={list(sees)})" if sees else ")")
        case Function(fn):
            return f"Mask.rule({getattr(fn, '__name__', 'function')})"
        case Raw(rows, read):
            return f"Mask.{'from_runs' if read == READ_RUNS else 'from_bool'}(<{len(rows)} rows>)"
        case Not(inner):
            return f"~{text_of(inner)}"
        case All(parts):
            return " & ".join(f"({text_of(part)})" if isinstance(part, Either) else text_of(part) for part in parts)
        case Either(parts):
            return " | ".join(map(text_of, parts))
