"""A model in memory: what `Decoder` (tensors of torch) and `QuantizedDecoder` (arrays) have in common."""

from __future__ import annotations


class AnyDecoder:
    """A model that an engine can compute."""

    __slots__ = ()
