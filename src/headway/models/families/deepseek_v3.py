"""DeepSeek V3: latent attention; experts by sigmoid, with a correction, of the groups with the best two, and shared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import ExpertGroups
from headway.models.families.deepseek import DEFAULTS, describe_folder, folder_experts
from headway.models.families.deepseek_v2 import FAMILY as V2
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    keys.choice("scoring_func", "sigmoid", {"sigmoid": "sigmoid"})
    keys.choice("topk_method", "noaux_tc", {"noaux_tc": "noaux_tc"})
    groups = ExpertGroups(
        score="sigmoid",
        count=keys.size("n_group"),
        kept=keys.size("topk_group"),
        best=2,
        corrected=True,
        scale=keys.positive("routed_scaling_factor", 2.5),
    )
    experts = folder_experts(keys, groups, normalize=keys.bool("norm_topk_prob", True))
    return describe_folder(keys, config, experts, paired=keys.bool("rope_interleave", True))


FAMILY = replace(
    V2,
    name="deepseek-v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    kv_heads=128,
    defaults={
        **DEFAULTS,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    describe=describe,
    ignored=r"model\.layers\.61\..*",  # of the published model: a layer that drafts the token after the next
)
