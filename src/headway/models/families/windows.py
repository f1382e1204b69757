"""Which layers of a model have a sliding window."""

from __future__ import annotations

from collections.abc import Sequence

from headway.base.errors import BadModelFile
from headway.models.keys import Keys


def alternating(keys: Keys, layers: int, *, every: int, default: int = 4096) -> tuple[int | None, ...]:
    """The window of each layer, as `layer_types` says; without it, on all but every so-manieth."""
    if keys.has("sliding_window") and keys.get("sliding_window") is None:
        return (None,) * layers
    window = keys.size("sliding_window", default)
    kinds = keys.per_layer("layer_types", layers, {"sliding_attention": window, "full_attention": None})
    return kinds or tuple(window if (i + 1) % every else None for i in range(layers))


def gguf_windows(keys: Keys, layers: int, *, every: int) -> tuple[int | None, ...]:
    """The window of each layer of a GGUF file, which may list the layers that have one, or say that every so-manieth
    has none."""
    window, given = keys.size("attention.sliding_window"), keys.get("attention.sliding_window_pattern")
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != layers or any(type(has) is not bool for has in given):
            raise BadModelFile(
                f"GGUF: {keys.prefix}attention.sliding_window_pattern is {list(given)!r}; it must be true or false for "
                f"each of {layers} layers"
            )
        return tuple(window if has else None for has in given)
    every = keys.size("attention.sliding_window_pattern", every)
    return tuple(window if (i + 1) % every else None for i in range(layers))


def gguf_sizes(keys: Keys, key: str, layers: int) -> tuple[int, ...]:
    """A size of each layer, of a list or of a number for all."""
    given = keys.get(key)
    if not isinstance(given, Sequence) or isinstance(given, str):
        return (keys.size(key),) * layers
    if len(given) != layers or any(type(size) is not int or size < 1 for size in given):
        raise BadModelFile(
            f"GGUF: {keys.prefix}{key} is {list(given)!r}; it must be a positive integer for each of {layers} layers"
        )
    return tuple(given)
