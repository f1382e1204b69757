"""Checks of values that come from outside: each returns the value as a plain Python one, or raises.

A wrong type raises `WrongType`, a value out of range `InvalidInput`; both name the value and what is allowed.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput, InvalidToken, WrongType
from headway.base.system.lazy_numpy import has_numpy
from headway.base.text import LONGEST, short_repr

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

LARGEST_LIST = 1 << 22  # elements that are read of an iterable
SNAPSHOT = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_integer(value: Any, name: str, low: int = 0, high: int | None = None) -> int:
    """`value` as an integer in [low, high]; numpy and tensor scalars are accepted, booleans and fractions are not."""
    value = as_integer(value, name)
    if value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidInput(f"{name} is {short_repr(value)}; it must be an integer {allowed}")
    return value


def as_integer(value: Any, name: str) -> int:
    """`value` as an integer of any range that a message can name."""
    if type(value) is int:
        if abs(value) >> LONGEST:
            raise InvalidInput(f"{name} is {short_repr(value)}; it must be an integer of at most {LONGEST} bits")
        return value
    boolean = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        if not boolean and getattr(value, "ndim", 0) == 0:  # a tensor with one element is not a scalar
            return as_integer(operator.index(value), name)
    except (TypeError, ValueError, RuntimeError):  # the last for tensors without values
        pass
    raise WrongType(f"{name} is {short_repr(value)} of type {type(value).__name__}; it must be an integer")


def check_token_id(value: Any, name: str) -> int:
    """`value` as a token id of some vocabulary."""
    if (number := as_integer(value, name)) < 0:
        raise InvalidToken(f"{name} is {number}; token ids are at least 0")
    return number


def check_number(value: Any, name: str) -> float:
    """`value` as a finite float; booleans, text and NaN are refused."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise WrongType(f"{name} is {short_repr(value)} of type {type(value).__name__}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidInput(f"{name} is {short_repr(value)}; it must be a finite number")
    return number


def check_timeout(value: Any) -> float | None:
    """`value` as seconds to wait; None, to wait for the end, stays None."""
    seconds = None if value is None else check_number(value, "timeout")
    if seconds is not None and seconds < 0:
        raise InvalidInput(
            f"timeout is {value}; it must be a number of seconds of at least 0, or None to wait for the end"
        )
    return seconds


def check_fraction(value: Any, name: str = "memory_fraction") -> float | None:
    """`value` as a float in (0, 1]; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InvalidInput(f"{name} is {short_repr(value)}; it must be a number above 0 and at most 1")
    return float(value)


def number_array(value: Any, name: str) -> np.ndarray:
    """A list, array or tensor as a numpy array of numbers; text, booleans and other objects are refused."""
    try:
        if hasattr(value, "detach"):  # a tensor, which may be on a device or of a type that numpy lacks
            value = value.detach().cpu()
            value = value.float().numpy() if value.dtype.itemsize < 4 else value.numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongType(f"{name} cannot be read as a numpy array: {error}") from None
    except MemoryError:
        raise InvalidInput(f"{name} is {short_repr(value)}, which does not fit in memory; give fewer numbers") from None
    if array.dtype.kind not in "iuf":
        raise WrongType(f"{name} is an array of {array.dtype}; it must be one of numbers")
    return array


def check_text(value: Any, name: str) -> str:
    """`value` as text that can be encoded: a lone surrogate is refused."""
    if not isinstance(value, str):
        raise WrongType(f"{name} is {short_repr(value)} of type {type(value).__name__}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{name} has a lone surrogate U+{ord(value[error.start]):04X} at character {error.start}; it is not Unicode"
        ) from None
    return value


def check_snapshot_name(name: object) -> str:
    """`name` as that of a saved context."""
    if not isinstance(name, str) or not SNAPSHOT.fullmatch(name):
        raise InvalidInput(
            f"the snapshot name {short_repr(name)} cannot be used; names have 1 to 128 of A–Z a–z 0–9 . _ -"
        )
    return name


def check_flag(value: Any, name: str) -> bool:
    """`value` as a bool; other values that are true or false are refused, except numpy's booleans."""
    if isinstance(value, bool) or (has_numpy() and isinstance(value, np.bool_)):
        return bool(value)
    raise WrongType(f"{name} is {short_repr(value)} of type {type(value).__name__}; it must be True or False")


def check_list(values: Any, name: str, of: str = "a list") -> list[Any]:
    """The elements of a list, array or other iterable; text, scalars and endless iterables are refused."""
    scalar = not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0
    if scalar or isinstance(values, str | bytes | type):
        raise WrongType(f"{name} is {short_repr(values)} of type {type(values).__name__}; it must be {of}")
    listed = list(islice(values, LARGEST_LIST + 1))
    if len(listed) > LARGEST_LIST:
        raise InvalidInput(f"{name} is {short_repr(values)}; it must be {of}, with at most {LARGEST_LIST} elements")
    return listed
