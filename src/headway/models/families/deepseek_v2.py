"""DeepSeek V2: latent attention; experts by softmax, of the groups with the best one, and shared ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.models.description import ExpertGroups
from headway.models.families.deepseek import DEFAULTS, GGUF_PARTS, PARTS, describe_folder, describe_gguf, folder_experts
from headway.models.families.family import Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    keys.choice("scoring_func", "softmax", {"softmax": "softmax"})
    grouped = keys.choice("topk_method", "greedy", {"greedy": "", "group_limited_greedy": "grouped"})
    if keys.bool("norm_topk_prob", False):
        raise Unsupported(
            "config.json: norm_topk_prob is true; weights of experts that sum to 1 are for the deepseek-v3 family"
        )
    groups = ExpertGroups(
        score="softmax",
        count=keys.size("n_group") if grouped else 1,
        kept=keys.size("topk_group") if grouped else 1,
        scale=keys.positive("routed_scaling_factor", 1.0),
    )
    return describe_folder(keys, config, folder_experts(keys, groups, normalize=False), paired=True)


FAMILY = Family(
    name="deepseek-v2",
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    gguf="deepseek2",  # files of both versions say so
    latent=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eps=1e-6,
    keys={"head_dim": "qk_rope_head_dim"},
    defaults={
        **DEFAULTS,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    describe=describe,
    describe_gguf=describe_gguf,
    parts=PARTS,
    gguf_parts=GGUF_PARTS,
)
