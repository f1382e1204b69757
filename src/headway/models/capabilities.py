"""What can be done with a model: known from its config, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from headway.models.config import ModelConfig
from headway.models.families import is_llama_like
from headway.models.shapes import has_experts

ATTENTION, FEED_FORWARD = ("q", "k", "v", "o"), ("gate", "up", "down")


@dataclass(frozen=True)
class Capabilities:
    """What an engine of this model can do. What it cannot is refused where it is asked for."""

    runner: str  # what computes: the native step, Triton kernels or torch; empty before loading
    reason: str  # why it is not a faster one, if it is not
    fast: bool  # whether the native step and the Triton kernels have this model's layers
    adapters: tuple[str, ...]  # linear layers that LoRA may change, by role, in one layer or more
    adapts_head: bool  # whether LoRA may change the output matrix
    quantize: bool  # whether `quantize=` takes it
    keeps_quantized: bool  # whether quantized weights of a file stay so; else they become floats
    update_weights: bool
    shift_pages: bool  # `append_from(shift=)`: keys can be rotated to other positions

    @classmethod
    def of(cls, config: ModelConfig, *, runner: str = "", reason: str = "") -> Capabilities:
        plain = is_llama_like(config)
        dense = any(not has_experts(config, layer) for layer in range(config.layers))
        mlp = FEED_FORWARD if config.description.gated else FEED_FORWARD[1:]
        return cls(
            runner=runner,
            reason=reason,
            fast=plain,
            adapters=ATTENTION + (mlp if dense else ()),
            adapts_head=config.description.logit_scale == 1.0 and config.description.logit_cap is None,
            quantize=plain,
            keeps_quantized=plain,
            update_weights=plain,
            shift_pages=not config.description.learned_positions,
        )

    def missing(self) -> tuple[str, ...]:
        """What is refused, in words."""
        without = [role for role in ATTENTION + FEED_FORWARD if role not in self.adapters]
        words = (
            (self.fast, "the native step and Triton kernels (torch computes it)"),
            (not without, f"adapters of {', '.join(without)}"),
            (self.adapts_head, "adapters of the output matrix"),
            (self.quantize, "quantize="),
            (self.keeps_quantized, "quantized weights of a file in memory (they become floats)"),
            (self.update_weights, "update_weights"),
            (self.shift_pages, "append_from with a shift"),
        )
        return tuple(word for has, word in words if not has)


def why_not_fast(config: ModelConfig) -> str | None:
    """Why neither the native step nor the Triton kernels compute a model of this config, in words, or None."""
    if is_llama_like(config):
        return None
    others = ", ".join(config.description.differences())
    return f"it computes Llama's layers, and {config.family} has {others or 'its weights in files of another layout'}"
