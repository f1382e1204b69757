"""Long recordings in pieces that overlap, so that the model hears what is before and behind each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.base.errors import InvalidInput
from headway.pipelines.inputs.audio import check_seconds


@dataclass(frozen=True)
class Piece:
    """A part of a recording, and how many samples at its ends belong to its neighbours."""

    wave: np.ndarray
    left: int
    right: int


def pieces_of(wave: np.ndarray, length: int, left: int, right: int) -> Iterator[Piece]:
    """`wave` in pieces of `length` samples, each of which shares `left` and `right` with its neighbours."""
    for start in range(0, len(wave), length - left - right):
        part, last = wave[start : start + length], start + length >= len(wave)
        before = left if start else 0
        if len(part) > before:
            yield Piece(part, before, 0 if last else right)
        if last:
            return


def check_pieces(chunk: Any, stride: Any) -> tuple[float, float] | float | None:
    """Refuse lengths of pieces that have no meaning; a stride as options keep it."""
    if chunk is not None:
        check_seconds("chunk_length_s", chunk, zero=True)
    if stride is None:
        return None
    if not chunk:
        raise InvalidInput(f"stride_length_s is {stride!r} and there are no pieces; pass chunk_length_s=... too")
    both = tuple(stride) if isinstance(stride, (list, tuple)) else (stride, stride)
    if len(both) != 2:
        raise InvalidInput(f"stride_length_s is {stride!r}; it takes seconds, or two of them: left and right")
    for one in both:
        check_seconds("stride_length_s", one, zero=True)
    if sum(both) >= chunk:
        raise InvalidInput(f"stride_length_s is {stride!r}, and pieces of {chunk} s must be longer than both strides")
    return both


class Pieces:
    """Recordings divided as a call asks, at multiples of what one frame of the model covers."""

    def __init__(self, rate: int, align: int) -> None:
        self._rate, self._align = rate, align

    def divide(self, wave: np.ndarray, chunk: float, stride: Any) -> list[Piece]:
        """The pieces of `wave`, at least one."""
        left, right = stride if stride is not None else (chunk / 6, chunk / 6)
        length, left, right = (self._samples(seconds) for seconds in (chunk, left, right))
        if length <= left + right:
            raise InvalidInput(
                f"pieces of {chunk} s are too short for this model with strides of {left} and {right} samples; "
                "take a larger chunk_length_s or a smaller stride_length_s"
            )
        return list(pieces_of(wave, length, left, right))

    def _samples(self, seconds: float) -> int:
        return int(round(seconds * self._rate / self._align) * self._align)
