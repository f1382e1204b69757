"""OLMo 2: norms after attention and feed-forward, queries and keys normed over all their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.kernels.host.rope import Rope
from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.families.windows import gguf_windows
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


DESCRIPTION = Description(norm_place="after", qk_norm="row")


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    return replace(config, description=replace(DESCRIPTION, activation=keys.activation()))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    if not keys.get("attention.sliding_window"):
        return replace(config, description=DESCRIPTION)
    windows = gguf_windows(keys, config.layers, every=4)  # it is OLMo 3
    local = Rope(config.rope.dim, keys.float("rope.freq_base_swa", config.rope.theta))
    ropes = tuple(config.rope if window is None else local for window in windows)
    return replace(config, family="olmo3", windows=windows, description=replace(DESCRIPTION, ropes=ropes))


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
