"""OLMo 2: norms after attention and feed-forward, queries and keys normed over all their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


DESCRIPTION = Description(norm_place="after", qk_norm="row")


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    return replace(config, description=replace(DESCRIPTION, activation=keys.activation()))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    if keys.get("attention.sliding_window"):
        raise Unsupported("GGUF: an olmo2 file with a sliding window is OLMo 3, which is read from folders alone")
    return replace(config, description=DESCRIPTION)


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    gguf="olmo2",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    eps=1e-5,
    describe=describe,
    describe_gguf=describe_gguf,
)
