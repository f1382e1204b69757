"""Checks of token ids, positions and row numbers in every form that callers pass: lists, numpy, torch, generators."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from headway.base.checks import as_integer, check_list
from headway.base.errors import ContextLengthExceeded, InvalidInput, InvalidToken, WrongType
from headway.base.text import short_repr


def token_ids(values: Any, vocab: int, what: str = "tokens") -> list[int]:
    """A list of ids inside the vocabulary."""
    ids = integers(values, what)
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        i, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab)
        raise InvalidToken(f"{what}[{i}] is {token}; this model's token ids are 0 to {vocab - 1}")
    return ids


def position_ids(values: Any, limit: int, what: str = "positions", why: str = "") -> list[int]:
    """A list of position ids below the model's context limit. `why` says why that is not what its config says."""
    positions = integers(values, what)
    for i, position in enumerate(positions):
        check_position(position, limit, f"{what}[{i}]", why)
    return positions


def check_position(position: int, limit: int, what: str = "position", why: str = "") -> None:
    """Raise unless a position id is inside the model's context limit."""
    if position < 0:
        raise InvalidInput(f"{what} is {position}; position ids start at 0")
    if position >= limit:
        raise ContextLengthExceeded(
            f"{what} is {position}; this model's context limit is {limit}{why and f' ({why})'}, so position ids end at "
            f"{limit - 1}; shorten the sequence, or give positions with input_at"
        )


def integers(values: Any, what: str) -> list[int]:
    """A list of plain ints; floats, bools, strings and nested lists are refused."""
    if isinstance(values, str | bytes):
        raise WrongType(f"{what} is text; it must be a list of integers (ctx.fill takes text)")
    if hasattr(values, "detach"):  # a torch tensor, maybe of a type that numpy lacks, or without values
        try:
            values = values.detach().cpu().numpy()
        except (TypeError, RuntimeError):
            raise WrongType(f"{what} is {short_repr(values)}; it must be a list of integers") from None
    if hasattr(values, "__array_interface__") and isinstance(values, Iterable):  # numpy, which need not be installed
        return _from_array(values, what)
    if isinstance(values, bool | type) or not isinstance(values, Iterable):
        raise WrongType(f"{what} is {short_repr(values)}; it must be a list of integers")
    if isinstance(values, list | tuple) and set(map(type, values)) <= {int}:  # the common case, without a check of each
        for extreme in (min(values), max(values)) if values else ():
            as_integer(extreme, what)
        return list(values)
    return [_integer(v, f"{what}[{i}]") for i, v in enumerate(check_list(values, what))]


def _from_array(values: Any, what: str) -> list[int]:
    if values.ndim != 1:
        raise WrongType(f"{what} has {values.ndim} dimensions; it must be a flat list of integers")
    if values.size and values.dtype.kind not in "iu":
        raise WrongType(f"{what} has dtype {values.dtype}; it must hold integers")
    return values.tolist()


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool":
        raise WrongType(f"{what} is {value}; it must be an integer")
    try:
        number = operator.index(value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value)
        return as_integer(number, what)
    except (TypeError, ValueError, RuntimeError):
        raise WrongType(f"{what} is {short_repr(value)}; it must be an integer") from None


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """The length of the common prefix of two sequences of tokens or characters."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
