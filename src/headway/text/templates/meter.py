"""Limits on rendering an untrusted template: the size of a result is estimated before it is computed.

One `Meter` counts a rendering's CPU time, the characters and elements it produces, and the size of every value. What
could become large in one operation (`*`, `**`, `%`, `format`, `replace`, `join`, `center`, `indent`, …) is checked
first, which raises `LimitExceeded`. Knows nothing of Jinja.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Iterable
from typing import Any

MAX_INT_BITS = 4096
MAX_WIDTH = 1_000_000  # for center(…), zfill(…), batch(…) and the like
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class LimitExceeded(Exception):
    """A rendering exceeded one of its limits."""


class Meter:
    """What one rendering has used, and its limits."""

    def __init__(self, *, seconds: float, work: int, size: int) -> None:
        self.seconds, self.work, self.size = seconds, work, size
        self._end = time.thread_time() + seconds
        self._used = 0
        self._steps = 0

    def step(self, cost: int = 1) -> None:
        """One operation that handles `cost` characters or elements."""
        self._used += cost + 1
        self._steps += 1
        if self._used > self.work:
            raise LimitExceeded(f"it produced more than {self.work:,} characters and elements")
        if (self._steps & 15 == 0 or cost > 10_000) and time.thread_time() > self._end:
            raise LimitExceeded(f"it ran for more than {self.seconds:g} s")

    def fits(self, size: int) -> None:
        """Refuse a value of `size` before it is created."""
        if size > self.size:
            raise LimitExceeded(f"a value of {size:,} characters or elements is larger than {self.size:,}")

    def weigh(self, value: Any) -> int:
        """The deep size of `value`, counting shared parts each time they appear."""
        if isinstance(value, str):
            return len(value)
        total, looked, stack = 0, 0, [value]
        while stack:
            item = stack.pop()
            looked += 1
            total += len(item) if isinstance(item, str) else 1
            if isinstance(item, list | tuple | set | frozenset):
                stack.extend(item)
            elif isinstance(item, dict):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, int) and item.bit_length() > MAX_INT_BITS:
                raise LimitExceeded(f"an integer has more than {MAX_INT_BITS} bits")
            if looked & 1023 == 0:
                self.step(1024)
                self.fits(max(total, looked + len(stack)))
        self.step(looked & 1023)
        self.fits(total)
        return total

    def passed(self, value: Any) -> Any:
        """`value`, counted as produced."""
        if isinstance(value, str):
            self.fits(len(value))
            self.step(len(value))
        elif isinstance(value, list | tuple | dict | set | frozenset | int):
            self.weigh(value)
        elif isinstance(value, _VIEWS):
            self.step(len(value))
        else:
            self.step()
        return value


def check_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Check the size of a binary operator's result."""
    match operator:
        case "*":
            _check_product(meter, left, right)
        case "**":
            _check_power(left, right)
        case "+":
            _check_sum(meter, left, right)
        case "%":
            _check_percent(meter, left, right)


def _check_product(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | list | tuple):
            meter.fits(meter.weigh(value) * max(count, 0))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise LimitExceeded(f"an integer of about {bits:,} bits is larger than {MAX_INT_BITS} bits")


def _check_sum(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        meter.fits(len(left) + len(right))


def _check_percent(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str):
        if re.search(r"%[^A-Za-z%]*(\d{5}|\*)", left):
            raise LimitExceeded("a width in a % format is too large")
        meter.fits(len(left) + left.count("%") * (9999 + meter.weigh(right)))


def check_braces(meter: Meter, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the size of `text.format`'s result."""
    fields = [spec or "" for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
    if any("{" in spec or re.search(r"\d{5}", spec) for spec in fields):
        raise LimitExceeded("a width in a format string is too large, or computed")
    meter.fits(len(text) + len(fields) * (9999 + meter.weigh([*args, *kwargs.values()])))


def _check_replace(meter: Meter, text: Any, old: Any, new: Any, *_: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    meter.fits(len(text) + text.count(old) * len(new))


def _check_join(meter: Meter, items: list[Any], separator: Any) -> None:
    meter.fits(meter.weigh(items) + len(items) * len(str(separator)))


def _check_indent(meter: Meter, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = len(width) if isinstance(width, str) else int(width)
    text = str(text)
    meter.fits(len(text) + (text.count("\n") + 1) * size)


def _check_width(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise LimitExceeded(f"the argument {value} is larger than {MAX_WIDTH:,}")


def checked_method(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a method of a plain value, after checking the size of its result."""
    meter.step()
    _check_width((*args, *kwargs.values()))
    if name == "replace" and len(args) >= 2:
        _check_replace(meter, owner, *args)
    if name == "join" and len(args) == 1:
        args = (_listed(meter, args[0]),)
        _check_join(meter, args[0], owner)
    return args


def _listed(meter: Meter, items: Iterable[Any]) -> list[Any]:
    listed = []
    for item in items:
        meter.step()
        listed.append(item)
    return listed


def checked_filter(meter: Meter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter, after checking the size of its result."""
    if name in ("default", "d"):
        return args
    _check_width((*args[1:], *kwargs.values()))
    match name:
        case "replace":
            _check_replace(meter, *args, *kwargs.values())
        case "indent":
            _check_indent(meter, *args, **kwargs)
        case "format":
            _check_percent(meter, str(args[0]), [*args[1:], *kwargs.values()])
        case "join":
            args = (_listed(meter, args[0]), *args[1:])
            _check_join(meter, args[0], args[1] if len(args) > 1 else kwargs.get("d", ""))
        case "list" | "sort" | "unique" | "reverse" | "sum" if not isinstance(args[0], str | dict):
            args = (_listed(meter, args[0]), *args[1:])
    if name == "round":
        precision = args[1] if len(args) > 1 else kwargs.get("precision", 0)
        _check_bits(4 * abs(precision))
    if name == "sum" and not isinstance(args[2] if len(args) > 2 else kwargs.get("start", 0), int | float):
        raise LimitExceeded("sum adds numbers only")
    return args
