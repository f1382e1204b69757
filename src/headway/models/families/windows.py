"""Which layers of a model have a sliding window."""

from __future__ import annotations

from headway.models.keys import Keys


def alternating(keys: Keys, layers: int, *, every: int, default: int = 4096) -> tuple[int | None, ...]:
    """The window of each layer, as `layer_types` says; without it, on all but every so-manieth."""
    if keys.has("sliding_window") and keys.get("sliding_window") is None:
        return (None,) * layers
    window = keys.size("sliding_window", default)
    kinds = keys.per_layer("layer_types", layers, {"sliding_attention": window, "full_attention": None})
    return kinds or tuple(window if (i + 1) % every else None for i in range(layers))
