"""Long recordings in overlapping chunks, so that the model hears what comes before and after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.pipelines.inputs.audio import check_seconds


@dataclass(frozen=True)
class AudioChunk:
    """A part of a recording, and how many samples at its ends its neighbors cover."""

    wave: np.ndarray
    left: int
    right: int


def split_audio(wave: np.ndarray, length: int, left: int, right: int) -> Iterator[AudioChunk]:
    """`wave` in chunks of `length` samples that share `left` and `right` samples with their neighbors."""
    for start in range(0, len(wave), length - left - right):
        part, last = wave[start : start + length], start + length >= len(wave)
        before = left if start else 0
        if len(part) > before:
            yield AudioChunk(part, before, 0 if last else right)
        if last:
            return


def check_chunking(chunk: Any, stride: Any) -> tuple[float, float] | float | None:
    """The stride as (left, right), after checking both options."""
    if chunk is not None:
        check_seconds("chunk_length_s", chunk, zero=True)
    if stride is None:
        return None
    if not chunk:
        raise InvalidInput(f"stride_length_s is {short_repr(stride)} but chunk_length_s is not set; pass it too")
    both = tuple(stride) if isinstance(stride, (list, tuple)) else (stride, stride)
    if len(both) != 2:
        raise InvalidInput(
            f"stride_length_s is {short_repr(stride)}; it must be a number of seconds, or two: left and right"
        )
    for one in both:
        check_seconds("stride_length_s", one, zero=True)
    if sum(both) >= chunk:
        raise InvalidInput(
            f"stride_length_s is {short_repr(stride)}, and chunks of {chunk} s must be longer than both strides"
        )
    return both


class AudioChunker:
    """Splits recordings at multiples of the model's frame length."""

    def __init__(self, rate: int, align: int) -> None:
        self._rate, self._align = rate, align

    def split(self, wave: np.ndarray, chunk: float, stride: Any) -> list[AudioChunk]:
        """The chunks of `wave`, at least one."""
        left, right = stride if stride is not None else (chunk / 6, chunk / 6)
        length, left, right = (self._samples(seconds) for seconds in (chunk, left, right))
        if length <= left + right:
            raise InvalidInput(
                f"chunks of {chunk} s are too short for this model with strides of {left} and {right} samples; "
                "pass a larger chunk_length_s or a smaller stride_length_s"
            )
        return list(split_audio(wave, length, left, right))

    def _samples(self, seconds: float) -> int:
        return int(round(seconds * self._rate / self._align) * self._align)
