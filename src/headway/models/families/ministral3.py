"""Ministral 3: Mistral with yarn. Its queries grow with their position beyond the length of its training.

GGUF files of Mistral Small 3 have its name too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import BadModelFile
from headway.models.families.family import Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    """As far as queries do not grow."""
    keys.check_silu(config.family)
    scaling = keys.get("rope_parameters") or keys.get("rope_scaling")
    if not isinstance(scaling, dict):
        raise BadModelFile("config.json has neither rope_parameters nor rope_scaling, which this architecture needs")
    rope = Keys(scaling, "config.json, rope parameters")
    return _limited(config, rope.float("llama_4_scaling_beta"), rope.size("original_max_position_embeddings"))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    """The same, or Mistral Small 3, whose queries do not grow."""
    return _limited(config, keys.float("attention.temperature_scale", 0.0), config.rope.original_positions)


def _limited(config: ModelConfig, growth: float, original: int) -> ModelConfig:
    if not growth or config.max_positions <= original:
        return config
    why = f"queries grow with their position from there to {config.max_positions}, which is not supported"
    return replace(config, max_positions=original, limit_reason=why)


FAMILY = Family(
    name="ministral3",
    architectures=("Ministral3ForCausalLM",),
    model_types=("ministral3",),
    outer={"Mistral3ForConditionalGeneration": "ministral3"},
    gguf="mistral3",
    interleaved_gguf=True,
    window="given",
    head_dim=128,
    kv_heads=8,
    eps=1e-5,
    describe=describe,
    describe_gguf=describe_gguf,
)
