"""What DeepSeek's families share: latent attention, experts that are chosen by groups, shared ones without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.host.rope import yarn_scale
from headway.models.description import Description, ExpertGroups, Experts, LatentAttention
from headway.models.families.family import Cut, Part
from headway.models.families.gguf_experts import gguf_experts
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

ONLY = {"moe_layer_freq": 1, "mlp_bias": False}  # what transformers takes as given, or has nowhere else


def describe_folder(keys: Keys, config: ModelConfig, experts: Experts, *, paired: bool) -> ModelConfig:
    """The config of a folder whose layers have these experts, but for the first few."""
    for key, value in ONLY.items():
        if (given := keys.get(key)) is not None and given != value:
            raise Unsupported(f"config.json: {key} is {given!r}; the {config.family} family has {value!r} alone")
    if config.kv_heads != config.heads:
        raise BadModelFile(
            f"config.json: num_key_value_heads is {config.kv_heads}; each of {config.heads} heads has keys of its own"
        )
    if not keys.has("q_lora_rank"):
        raise BadModelFile("config.json has no key 'q_lora_rank'; it must be a size, or null where queries have none")
    latent = LatentAttention(
        size=keys.size("kv_lora_rank"),
        rotated=config.head_dim,
        key_dim=keys.size("qk_nope_head_dim"),
        value_dim=keys.size("v_head_dim"),
        query_size=0 if keys.get("q_lora_rank") is None else keys.size("q_lora_rank"),
        paired=paired,
    )
    dense = min(keys.size("first_k_dense_replace", least=0), config.layers)
    experts = replace(
        experts,
        shared_size=experts.size * keys.size("n_shared_experts"),
        shared_gated=False,
        dense_layers=frozenset(range(dense)),
    )
    return with_latent(config, latent, experts, keys.activation())


def with_latent(
    config: ModelConfig, latent: LatentAttention, experts: Experts, activation: str = "silu"
) -> ModelConfig:
    """The config of a model with latent attention: one key head, as wide as a slot."""
    rope, scale = config.rope, latent.query_dim**-0.5
    if rope.kind not in ("default", "yarn"):
        raise Unsupported(f"rope type {rope.kind!r} is not supported with latent attention; use default or yarn")
    if rope.dim != latent.rotated:
        raise Unsupported(f"{rope.dim} of {latent.rotated} dimensions are rotated; latent attention rotates all")
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_scale(rope.factor, rope.mscale_all_dim) ** 2
    description = Description(
        latent=latent,
        attention_scale=scale,
        activation=activation,
        experts=experts if len(experts.dense_layers) < config.layers else None,
    )
    return replace(config, kv_heads=1, head_dim=latent.width, description=description)


def folder_experts(keys: Keys, groups: ExpertGroups, *, normalize: bool) -> Experts:
    """The experts of a folder."""
    count, each = keys.size("n_routed_experts"), keys.size("num_experts_per_tok")
    check_groups("config.json", count, each, groups, ("n_group", "topk_group"))
    size = keys.size("moe_intermediate_size")
    return Experts(count=count, per_token=each, size=size, normalize=normalize, groups=groups)


def check_groups(source: str, experts: int, each: int, groups: ExpertGroups, names: tuple[str, str]) -> None:
    """Raise for groups from which a row's experts cannot be chosen; `names` are the keys of `count` and `kept`."""
    count, kept = groups.count, groups.kept
    if experts % count:
        raise BadModelFile(f"{source}: {names[0]} is {count}; {experts} experts cannot be divided into so many groups")
    if kept > count:
        raise BadModelFile(f"{source}: {names[1]} is {kept}; it must be at most {names[0]}, which is {count}")
    size = experts // count
    if size < groups.best:
        raise BadModelFile(f"{source}: {names[0]} is {count}; a group of {experts} experts has {size}, and needs 2")
    if each > kept * size:
        raise BadModelFile(
            f"{source}: a token goes to {each} experts, and {names[1]}, which is {kept}, leaves it {kept * size}"
        )


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    """The config of a GGUF file, of either family: the file says what scores experts."""
    score: Any = {1: "softmax", 2: "sigmoid"}.get(gate := keys.int("expert_gating_func", 1))
    if score is None:
        raise Unsupported(f"GGUF: {keys.prefix}expert_gating_func is {gate}; supported are 1 (softmax) and 2 (sigmoid)")
    dense = frozenset(range(min(keys.size("leading_dense_block_count", 0, least=0), config.layers)))
    groups = ExpertGroups(
        score=score,
        count=keys.size("expert_group_count", 1),
        kept=keys.size("expert_group_used_count", 1),
        best=2 if score == "sigmoid" else 1,
        corrected=any(name.endswith("exp_probs_b.bias") for name in tensors),
        scale=keys.positive("expert_weights_scale", 1.0),
    )
    experts = gguf_experts(keys, config, normalize=keys.bool("expert_weights_norm", False))
    check_groups("GGUF", experts.count, experts.per_token, groups, ("expert_group_count", "expert_group_used_count"))
    shared = experts.size * keys.size("expert_shared_count")
    rotated = keys.size("rope.dimension_count")
    latent = LatentAttention(
        size=keys.size("attention.kv_lora_rank"),
        rotated=rotated,
        key_dim=keys.size("attention.key_length_mla") - rotated,
        value_dim=keys.size("attention.value_length_mla"),
        query_size=keys.size("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else 0,
        eps=config.norm_eps,
    )
    if latent.key_dim < 1 or config.head_dim != latent.width:
        raise BadModelFile(
            f"GGUF: {keys.prefix}attention.key_length is {config.head_dim}; a latent vector of {latent.size} numbers "
            f"and a rotated key of {rotated} make {latent.width}"
        )
    experts = replace(experts, groups=groups, shared_size=shared, shared_gated=False, dense_layers=dense)
    return with_latent(config, latent, experts)


def _rows_of_head(first: bool) -> Cut:
    """A head's rows of the matrix that makes keys, and then values, of a latent vector; those of keys transposed."""

    def sizes(c: ModelConfig) -> LatentAttention:
        assert c.description.latent is not None
        return c.description.latent

    def take(tensor: Any, c: ModelConfig) -> Any:
        heads, keys = tensor.reshape(c.heads, -1, tensor.shape[-1]), sizes(c).key_dim
        return heads[:, :keys].swapaxes(1, 2) if first else heads[:, keys:]

    def shape(c: ModelConfig) -> tuple[int, ...]:
        return c.heads * (sizes(c).key_dim + sizes(c).value_dim), sizes(c).size

    return Cut("self_attn.kv_b_proj.weight", shape, take)


PARTS: dict[str, Part] = {
    "q_down": "self_attn.q_a_proj.weight",
    "q_down_norm": "self_attn.q_a_layernorm.weight",
    "q_up": "self_attn.q_b_proj.weight",
    "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_down_norm": "self_attn.kv_a_layernorm.weight",
    "key_up": _rows_of_head(first=True),
    "value_up": _rows_of_head(first=False),
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
    "router_correction": "mlp.gate.e_score_correction_bias",
}
GGUF_PARTS: dict[str, Part] = {
    "q_down": "attn_q_a.weight",
    "q_down_norm": "attn_q_a_norm.weight",
    "q_up": "attn_q_b.weight",
    "kv_down": "attn_kv_a_mqa.weight",
    "kv_down_norm": "attn_kv_a_norm.weight",
    "key_up": "attn_k_b.weight",
    "value_up": "attn_v_b.weight",
    "router_correction": "exp_probs_b.bias",
}
# What a config that is silent means, in both families.
DEFAULTS = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
