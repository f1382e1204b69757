"""OLMo 3: OLMo 2 with a window on three layers of four, whose rope is not scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.families.family import Family
from headway.models.families.olmo2 import DESCRIPTION
from headway.models.families.windows import alternating
from headway.models.keys import Keys
from headway.models.rope_keys import local_rope

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    windows = alternating(keys, config.layers, every=4)
    local = local_rope(keys, config.head_dim, config.max_positions, config.rope.theta)
    ropes = tuple(config.rope if window is None else local for window in windows)
    description = replace(
        DESCRIPTION, activation=keys.activation(), ropes=None if set(ropes) == {config.rope} else ropes
    )
    return replace(config, windows=windows, description=description)


FAMILY = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    gguf="olmo2",  # with a window
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    theta=500_000.0,
    eps=1e-5,
    describe=describe,
)
