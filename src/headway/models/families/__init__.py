"""The supported families. A family is a small file: what its config means and where it differs from plain Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.base.errors import UnsupportedModel
from headway.models.description import PLAIN
from headway.models.families import (
    cohere2,
    deepseek_v2,
    deepseek_v3,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    granite_moe,
    lfm2,
    llama,
    llama4,
    mamba2,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
    stablelm,
    starcoder2,
)
from headway.models.families.family import Family

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    cohere2.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    falcon.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma3n.FAMILY,
    gemma4.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    gpt_oss.FAMILY,
    gptj.FAMILY,
    granite.FAMILY,
    granite_hybrid.FAMILY,
    granite_moe.FAMILY,
    lfm2.FAMILY,
    llama4.FAMILY,
    mamba2.FAMILY,
    ministral3.FAMILY,
    mixtral.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    olmoe.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5_moe.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    smollm3.FAMILY,
    stablelm.FAMILY,
    starcoder2.FAMILY,
)


def by_architecture(name: str) -> Family:
    """The family whose config.json says this architecture."""
    for family in FAMILIES:
        if name in family.architectures:
            return family
    known = ", ".join(sorted(a for family in FAMILIES for a in family.architectures))
    raise UnsupportedModel(f"the architecture {name!r} is not supported; supported are {known}")


def by_gguf(name: str, *, experts: bool = False) -> Family:
    """The family whose GGUF files say this architecture, and have experts or not."""
    named = [family for family in FAMILIES if name == family.gguf]
    for family in named:
        if family.experts == experts:
            return family
    if named:
        return named[0]
    known = ", ".join(sorted({family.gguf for family in FAMILIES if family.gguf}))
    raise UnsupportedModel(f"the GGUF architecture {name!r} is not supported; supported are {known}")


def by_name(name: str) -> Family:
    """The family of this name."""
    return next(family for family in FAMILIES if family.name == name)


def is_llama_like(config: ModelConfig) -> bool:
    """Whether a model has Llama's layers, in files that have Llama's names: what the Triton kernels read."""
    family = by_name(config.family)
    return config.description == PLAIN and not family.parts and not family.gguf_parts
