"""Experts as GGUF metadata describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.models.description import Experts
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def gguf_experts(keys: Keys, config: ModelConfig, *, normalize: bool = True) -> Experts:
    """The experts of a file; those without a size of their own have the feed-forward's."""
    return Experts(
        count=keys.size("expert_count"),
        per_token=keys.size("expert_used_count"),
        size=keys.size("expert_feed_forward_length", config.intermediate_size),
        normalize=normalize,
    )
