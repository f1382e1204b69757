"""The masks users write: `Mask` for attention, `logit_mask` for tokens.

A `Mask` is an immutable description: symbolic (causal, window, sink, blocks, a function), raw rows, or a combination by
`&`, `|`, `~`. `bind` applies it to the rows of a pass: one `Brle` per row, 1 = ATTEND, restricted to causal slots. Both
external polarities end here: raw attention runs use 0 = attend, logit runs use 1 = allowed. It knows nothing of pages.

        slots   0 1 2 3 4 5 6 7
    row at 5    · · · █ █ █         Mask.window(3)
    row at 6    · · · · █ █ █
    row at 7    █ · · · · █ █ █     Mask.window(3) | Mask.sink(1, 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from headway.base.checks import as_integer, check_flag, check_integer, check_list
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, InvalidMask, InvalidToken, WrongType
from headway.base.specs.brle import LONGEST_RUN, Brle, bool_array
from headway.base.specs.mask_rules import (
    READ_BOOL,
    READ_RUNS,
    All,
    Blocks,
    Causal,
    Either,
    Function,
    Raw,
    RowPlace,
    Rule,
    SinkWindow,
    Window,
    attended,
    complement,
    leaves,
    pass_shape,
    raw_rules,
    text_of,
)
from headway.base.text import short_repr, shorten

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

PICTURE_ROWS = 64
LARGEST_ARRAY = 1 << 31  # elements of to_bool
LARGEST_PASS = 1 << 22  # rows that are bound at once
PICTURE_SLOTS = 128


@dataclass(frozen=True, repr=False)
class Mask:
    """What each row of a pass may attend to. Combine with `&`, `|`, `~`; `picture()` shows it."""

    tree: Rule

    @classmethod
    def causal(cls) -> Mask:
        """Every slot up to the row's own: the same as no mask."""
        return cls(Causal())

    @classmethod
    def window(cls, n: int) -> Mask:
        """The last `n` slots, the row's own included."""
        return cls(Window(check_integer(n, "window", low=1)))

    @classmethod
    def sink(cls, sink: int, window: int) -> Mask:
        """The first `sink` slots and the last `window`, the row's own included."""
        return cls(SinkWindow(check_integer(sink, "sink"), check_integer(window, "window", low=1)))

    @classmethod
    def blocks(cls, lengths: Iterable[int], sees: Iterable[tuple[int, int]] = ()) -> Mask:
        """Consecutive blocks of these lengths: a row sees its own block, and those that `sees` pairs it with.

        A pair is `(viewer, seen)`, by block number. Slots after the last block form an open block, numbered
        `len(lengths)`, that sees every block.
        """
        listed = check_list(lengths, "lengths")
        sizes = tuple(check_integer(length, f"lengths[{index}]") for index, length in enumerate(listed))
        pairs = {_pair(pair, len(sizes) + 1) for pair in check_list(sees, "sees")}
        return cls(Blocks(sizes, tuple(sorted(pairs))))

    @classmethod
    def rule(cls, fn: Callable[[int, np.ndarray], Any]) -> Mask:
        """Any function of position ids: `fn(row, slots)` gives a boolean for each slot, True = attend.

            Mask.rule(lambda row, slots: (slots < 4) | ((row - slots) % 8 == 0))

        `row` is the row's position id, `slots` an array of those of the slots that it may see, its own last. The
        function is called for each row while the pass is built, so it must be quick.
        """
        if not callable(fn):
            raise WrongType(f"the rule is {short_repr(fn)}; it must be a function of a row's and the slots' positions")
        return cls(Function(fn))

    @classmethod
    def from_bool(cls, attend: Any) -> Mask:
        """Rows of booleans, True = attend: an array `[rows, slots]`, one row `[slots]`, or a list of unequal rows.

        Rows have the lengths that `from_runs` describes; an array may also cover every slot up to the end of the pass.
        """
        rows = list(attend) if isinstance(attend, (list, tuple)) else attend
        if isinstance(rows, list) and rows and not np.isscalar(rows[0]):
            rows = [bool_array(row, f"attend row {index}") for index, row in enumerate(rows)]
            if len({row.shape for row in rows}) > 1:
                return cls(Raw(tuple(map(Brle.from_bool, rows)), READ_BOOL, rectangular=False))
        array = bool_array(rows, "attend")
        if array.ndim not in (1, 2):
            raise InvalidMask(f"attend has shape {array.shape}; expected [rows, slots], or [slots] for one row")
        return cls(Raw(tuple(map(Brle.from_bool, np.atleast_2d(array))), READ_BOOL, rectangular=True))

    @classmethod
    def from_runs(cls, rows: Iterable[Iterable[int] | Brle]) -> Mask:
        """Raw runs, one list per input row: alternating, zeros first, 0 = attend, 1 = masked.

        A row covers the slots before its token, with or without its own, which it sees if left out, even after `~`.
        """
        masked = [_raw_row(row, index) for index, row in enumerate(check_list(rows, "rows"))]
        return cls(Raw(tuple(~row for row in masked), READ_RUNS, rectangular=False))

    def __and__(self, other: Mask) -> Mask:
        return Mask(_joined(All, self, other))

    def __or__(self, other: Mask) -> Mask:
        return Mask(_joined(Either, self, other))

    def __invert__(self) -> Mask:
        return Mask(complement(self.tree))

    def __bool__(self) -> bool:
        raise WrongType("a Mask has no truth value; combine masks with & | ~, and compare with None by 'is'")

    @property
    def rows(self) -> int | None:
        """The number of input rows it describes; None for a symbolic mask, which fits any number."""
        raw = next(raw_rules(self.tree), None)
        return None if raw is None else len(raw.rows)

    @property
    def covers_pending(self) -> bool:
        """Whether it applies to the pending tokens of a pass too: symbolic masks do, raw rows do not."""
        return self.rows is None

    @property
    def polarity(self) -> str:
        """How its raw rows were read, for error messages."""
        read = dict.fromkeys(raw.read for raw in raw_rules(self.tree))
        return " and ".join(read) or "symbolic"

    @property
    def is_causal(self) -> bool:
        """Whether it is plainly every slot up to the row's own: the same as no mask."""
        return isinstance(self.tree, Causal)

    @property
    def needs_positions(self) -> bool:
        """Whether it looks at position ids, so that `bind` must be told them where they are not the slot numbers."""
        return any(isinstance(leaf, Function) for leaf in leaves(self.tree))

    def bind(
        self,
        first_slot: int,
        rows: int,
        *,
        causal: bool = True,
        total: int | None = None,
        positions: np.ndarray | None = None,
        pending: int = 0,
    ) -> tuple[Brle, ...]:
        """The effective rows, 1 = ATTEND, of `rows` consecutive tokens from slot `first_slot`.

        Each covers the slots up to and including its own or, with `causal=False`, `total` slots (by default all up to
        the last row). `positions` are the position ids of all slots. Errors say that the last `pending` slots before
        the first are pending tokens. A row may attend to nothing: `check_rows` refuses that.
        """
        first_slot = check_integer(first_slot, "first_slot", high=LONGEST_RUN)
        rows, causal = check_integer(rows, "rows", high=LARGEST_PASS), check_flag(causal, "causal")
        if causal and total is not None:
            raise InvalidInput(
                f"total is {short_repr(total)}, but a causal row ends at its own slot; leave it out or pass "
                "causal=False"
            )
        reached = first_slot + rows
        end = check_integer(reached if total is None else total, "total", reached, 2 * LONGEST_RUN)
        if self.rows not in (None, rows):
            shape = pass_shape(first_slot, rows, pending)
            raise InvalidMask(
                f"the attention mask has {self.rows} rows for {rows} input rows; give one row per input row. {shape}"
            )
        lengths = [first_slot + i + 1 if causal else end for i in range(rows)]
        places = (RowPlace(i, rows, first_slot, n, causal, pending, positions) for i, n in enumerate(lengths))
        return tuple(attended(self.tree, place) for place in places)

    def at(self, slot: int) -> Brle:
        """`bind(slot, 1)[0]`: what the token at a slot attends to. Fast for sliding masks, bound every step."""
        match self.tree:
            case Window(size) if type(slot) is int and size <= slot:
                return Brle._from_canonical((slot + 1 - size, size))
            case SinkWindow(sink, window) if type(slot) is int and 0 < sink < slot + 1 - window:
                return Brle._from_canonical((0, sink, slot + 1 - window - sink, window))
        return self.bind(slot, 1)[0]

    def to_bool(self, first_slot: int, rows: int, *, causal: bool = True) -> np.ndarray:
        """What the rows attend to, as an array `[rows, first_slot + rows]`, True = attend."""
        rows, first_slot = check_integer(rows, "rows"), check_integer(first_slot, "first_slot")
        if rows * (first_slot + rows) > LARGEST_ARRAY:
            raise InvalidInput(
                f"{short_repr(rows)} rows from slot {short_repr(first_slot)} are too many for an array, which has at "
                f"most {LARGEST_ARRAY} elements; take fewer rows, or to_runs() or picture()"
            )
        bound = self.bind(first_slot, rows, causal=causal)
        attend = np.zeros((len(bound), first_slot + rows), dtype=np.bool_)
        for line, row in zip(attend, bound):
            line[: len(row)] = row.to_bool()
        return attend

    def to_runs(self, first_slot: int, rows: int, *, causal: bool = True) -> list[list[int]]:
        """The rows as raw runs, zeros first, 0 = attend, 1 = masked, each including its own slot."""
        return [list((~row).runs) for row in self.bind(first_slot, rows, causal=causal)]

    def picture(self, first_slot: int | None = None, rows: int | None = None, *, causal: bool = True) -> str:
        """A text drawing, one line per row: █ attends, · does not; cut to the first rows and last slots if large."""
        first, bound, left_out = self._view(first_slot, rows, causal)
        skip = max(0, max((len(row) for row in bound), default=0) - PICTURE_SLOTS)
        lines = []
        for index, row in enumerate(bound):
            bits = "".join("█" if bit else "·" for bit in row[skip:].to_bool())
            lines.append(f"{first + index:>6} {'…' if skip else ''}{bits}")
        if left_out:
            lines.append(f"     … {left_out} more rows")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return text_of(self.tree)

    def _repr_html_(self) -> str:
        """The picture for a notebook."""
        title = f"<code>{escape(shorten(repr(self), 200))}</code>"
        try:
            first, bound, left_out = self._view(None, None, True)
        except InvalidInput as error:
            return f"<div>{title}<br><small>{escape(str(error))}</small></div>"
        note = f"rows at slots {first} … {first + len(bound) - 1}" + (f", {left_out} more left out" if left_out else "")
        return f"<div>{title}<br>{_svg(bound)}<br><small>{note}</small></div>"

    def _view(self, first_slot: int | None, rows: int | None, causal: bool) -> tuple[int, tuple[Brle, ...], int]:
        """(first slot, bound rows, number of rows left out) of a picture."""
        raw = next(raw_rules(self.tree), None)
        rows = (16 if raw is None else len(raw.rows)) if rows is None else rows
        first = (0 if raw is None else _guess_first(raw)) if first_slot is None else first_slot
        first, rows = (
            check_integer(first, "first_slot", high=LONGEST_RUN),
            check_integer(rows, "rows", high=LONGEST_RUN),
        )
        check_flag(causal, "causal")
        drawn = min(rows, PICTURE_ROWS) if raw is None else rows  # of many rows only those that are drawn are computed
        bound = self.bind(first, drawn, causal=causal, total=None if causal else first + rows)
        return first, bound[:PICTURE_ROWS], max(0, rows - PICTURE_ROWS)


def check_rows(rows: Sequence[Brle | None], *, where: str = "attention mask", read: str = "", pending: int = 0) -> None:
    """Raise if a bound row attends to nothing; None is a row without a mask.

    `read` says how the rows were read (`Mask.polarity`); the first `pending` rows are those of pending tokens.
    """
    for index, row in enumerate(rows):
        if row is not None and not row.any():
            name, how = row_name(index, pending), f"; the mask was read as {read}" if read else ""
            raise InvalidMask(f"{where}: {name} attends to none of its {len(row)} slots, it needs at least 1{how}")


def row_name(index: int, pending: int) -> str:
    """The name of a token of a pass in messages: rows are counted after the pending tokens."""
    return f"row {index - pending}" if index >= pending else f"pending token {index}"


def logit_mask(vocab: int, runs: Any = None, allow: Any = None, forbid: Any = None) -> np.ndarray:
    """Which of `vocab` tokens may be sampled, as an array of booleans; several forms are combined by AND.

    `runs` is a list of runs that sum to `vocab`, zeros first, 1 = allowed; or an array of `vocab` booleans; or a packed
    uint32 bitmask (token i is bit i % 32 of word i // 32). `allow` and `forbid` are token ids.
    """
    vocab = check_integer(vocab, "vocab", low=1)
    if runs is None and allow is None and forbid is None:
        raise InvalidInput("a logit mask needs runs, allow=ids or forbid=ids")
    allowed = np.ones(vocab, dtype=np.bool_) if runs is None else _logit_bits(runs, vocab)
    if allow is not None:
        chosen = np.zeros(vocab, dtype=np.bool_)
        chosen[_token_ids(allow, vocab, "allow")] = True
        allowed = allowed & chosen
    if forbid is not None:
        allowed = allowed.copy()
        allowed[_token_ids(forbid, vocab, "forbid")] = False
    if not allowed.any():
        raise InvalidMask(f"the logit mask allows none of {vocab} tokens (1 = allowed); allow at least one")
    return allowed


def packed_logit_mask(vocab: int, runs: Any) -> np.ndarray:
    """A logit mask in any form as a packed bitmask of its own, which nobody else changes."""
    if isinstance(runs, np.ndarray) and runs.dtype == np.uint32 and runs.shape == (-(-vocab // 32),):
        words = runs.astype("<u4")
        if vocab % 32:
            words[-1] &= np.uint32((1 << vocab % 32) - 1)
        if words.any():
            return words
    bits = np.zeros(-(-vocab // 32) * 32, np.bool_)
    bits[:vocab] = logit_mask(vocab, runs)
    return np.packbits(bits, bitorder="little").view("<u4")


def _joined(kind: type[All] | type[Either], left: Mask, right: Mask) -> All | Either:
    if not isinstance(right, Mask):
        raise WrongType(
            f"a Mask can be combined only with another Mask, not with {type(right).__name__}; see Mask.from_bool"
        )
    if left.rows is not None and right.rows is not None and left.rows != right.rows:
        raise InvalidMask(
            f"raw masks of {left.rows} and {right.rows} rows cannot be combined; the numbers of rows must be equal"
        )
    sides = (side.tree for side in (left, right))
    return kind(tuple(part for rule in sides for part in (rule.parts if isinstance(rule, kind) else (rule,))))


def _raw_row(row: Any, index: int) -> Brle:
    if not isinstance(row, Brle) and (not hasattr(row, "__iter__") or getattr(row, "ndim", 1) == 0):
        raise WrongType(
            f"row {index} of the attention mask is {short_repr(row)}; it must be a list of runs per row, e.g. [[3, 2]]"
        )
    return Brle.from_runs(row, where=f"row {index} of the attention mask ({READ_RUNS})")


def _pair(pair: Any, blocks: int) -> tuple[int, int]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise WrongType(f"sees has {short_repr(pair)}; it must be pairs of block numbers (viewer, seen)")
    viewer, seen = (
        check_integer(block, f"block number in {short_repr(tuple(pair))}", high=blocks - 1) for block in pair
    )
    return viewer, seen


def _guess_first(raw: Raw) -> int:
    """The slot of the first row, for a picture: the last column is the slot of the last row."""
    lengths = [len(row) for row in raw.rows]
    if raw.rectangular and lengths and lengths[0] >= len(lengths):
        return lengths[0] - len(lengths)
    return max([1, *(length - index for index, length in enumerate(lengths))]) - 1


def _svg(rows: tuple[Brle, ...]) -> str:
    """A drawing of at most PICTURE_ROWS × PICTURE_SLOTS cells, one rectangle per run."""
    slots = max((len(row) for row in rows), default=0)
    skip = max(0, slots - PICTURE_SLOTS)
    shapes = [f'<rect width="{slots - skip}" height="{len(rows)}" fill="#e8e8ec"/>']
    for index, row in enumerate(rows):
        for start, stop in row[skip:].intervals():
            shapes.append(f'<rect x="{start}" y="{index}" width="{stop - start}" height="1" fill="#3b6ea5"/>')
    size = f'width="{min(512, 12 * (slots - skip))}" viewBox="0 0 {slots - skip} {len(rows)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} shape-rendering="crispEdges">{"".join(shapes)}</svg>'


def _logit_bits(runs: Any, vocab: int) -> np.ndarray:
    """The allowed tokens from runs, booleans or a packed bitmask."""
    if isinstance(runs, Brle):
        return _logit_runs(runs, vocab)
    values = _logit_values(runs)
    if isinstance(values, np.ndarray) and values.dtype == np.uint32:
        return _unpacked(values, vocab)
    if not isinstance(values, np.ndarray) or values.dtype != np.bool_:
        return _logit_runs(Brle.from_runs(values, where="the logit mask (runs, zeros first, 1 = allowed)"), vocab)
    if values.size != vocab:
        raise InvalidMask(
            f"the logit mask has {values.size} booleans; expected one per token, {vocab} (True = allowed)"
        )
    return values.copy()


def _logit_values(runs: Any) -> np.ndarray | list[Any]:
    """Arrays stay arrays; a list becomes one only if it holds booleans, since integers are always runs."""
    if not hasattr(runs, "dtype"):
        values = check_list(runs, "the logit mask")
        return bool_array(values, "the logit mask") if values and isinstance(values[0], (bool, np.bool_)) else values
    try:
        array = np.asarray(runs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongType(f"the logit mask cannot be read as a numpy array: {error}") from None
    if array.ndim != 1:
        raise InvalidMask(f"the logit mask has shape {array.shape}; expected one dimension")
    return array


def _logit_runs(bits: Brle, vocab: int) -> np.ndarray:
    if len(bits) != vocab:
        raise InvalidMask(
            f"the logit mask's runs sum to {len(bits)}; expected {vocab}. It was read as runs, zeros first, 1 = allowed"
            " (for token ids use allow=ids, for a packed bitmask a uint32 array)"
        )
    return bits.to_bool()


def _unpacked(words: np.ndarray, vocab: int) -> np.ndarray:
    expected = -(-vocab // 32)
    if words.size != expected:
        raise InvalidMask(f"the packed logit mask has {words.size} words; expected {expected} for {vocab} tokens")
    octets = np.ascontiguousarray(words.astype("<u4")).view(np.uint8)
    return np.unpackbits(octets, bitorder="little")[:vocab].astype(np.bool_)


def _token_ids(ids: Any, vocab: int, name: str) -> list[int]:
    out = []
    for value in check_list(ids, name):
        token = as_integer(value, f"a token id in {name}")
        if not 0 <= token < vocab:
            raise InvalidToken(f"token id {token} in {name} is outside the vocabulary; ids are in [0, {vocab - 1}]")
        out.append(token)
    return out
