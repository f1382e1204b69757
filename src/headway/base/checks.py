"""Checks of single values: integers, finite numbers, token ids. Errors name the value and the limit."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from headway.base.errors import InvalidInput, InvalidToken, WrongType


def whole(value: Any, name: str, *, low: int = 0, below: int | None = None) -> int:
    """`value` as a Python integer of at least `low` and below `below`."""
    if type(value) is not int:
        value = integer(value, name)
    if value < low or (below is not None and value >= below):
        limit = f"at least {low}" if below is None else f"in [{low}, {below - 1}]"
        raise InvalidInput(f"{name} is {value}; it must be {limit}")
    return value


def integer(value: Any, name: str) -> int:
    """`value` as a Python integer: numpy and tensor scalars are, booleans and fractions are refused."""
    if type(value) is int:
        return value
    boolean = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        if not boolean and getattr(value, "ndim", 0) == 0:  # a tensor of one element is not a number
            return operator.index(value)
    except TypeError:
        pass
    raise WrongType(f"{name} is {short(value)} of type {type(value).__name__}; expected an integer")


def real(value: Any, name: str) -> float:
    """`value` as a finite Python float; booleans, text and NaN are refused."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise WrongType(f"{name} is {value!r} of type {type(value).__name__}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidInput(f"{name} is {value}; it must be a finite number")
    return number


def token_id(value: Any, name: str) -> int:
    """`value` as a token id that some vocabulary may have."""
    if (number := integer(value, name)) < 0:
        raise InvalidToken(f"{name} is {number}; token ids are at least 0")
    return number


def short(value: Any, limit: int = 60) -> str:
    """`repr(value)`, cut to `limit` characters, for error messages."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
