"""DeepSeek models as GGUF files: names by the gguf package's own table, layouts and keys as llama.cpp's converter
writes them, with a matrix for keys and one for values in place of the one that makes both."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from support.gguf_families import EXPERT
from support.gguf_files import add_tensors, finish
from support.hf_families import LATENT, MSCALE

DEEPSEEK_ARCHS = {"deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2, "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2}

SAME = {**MSCALE, "mscale": 0.6}  # such files have one of the two alone
# Models that such files can say: class and config.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-yarn": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "rope_parameters": SAME, "routed_scaling_factor": 2.0},
    ),
    "deepseek-v3-yarn": ("DeepseekV3", {**LATENT, "rope_parameters": SAME}),
    "deepseek-v2-plain": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "tie_word_embeddings": True}),
}


def write_deepseek(
    path: Path,
    folder: Path,
    model: Any,
    *,
    kind: str = "F32",
    metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    **changes: Any,
) -> Path:
    """The model in a folder as a GGUF file; matrices in `kind`, the rest in F32. `changes` are keys of the file."""
    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in (_keys(model.config) | changes).items():
        name = f"deepseek2.{key}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case _:
                writer.add_string(name, value)
    metadata(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, model.config.num_hidden_layers)
    add_tensors(writer, names, _converted(load_file(folder / "model.safetensors"), model.config).items(), kind)
    finish(writer)
    return path


def _keys(c: Any) -> dict[str, Any]:
    rope, sigmoid = c.rope_parameters, c.model_type == "deepseek_v3"
    keys: dict[str, Any] = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.q_lora_rank": c.q_lora_rank,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "attention.value_length_mla": c.v_head_dim,
        "rope.dimension_count": c.qk_rope_head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "leading_dense_block_count": c.first_k_dense_replace,
        "expert_count": c.n_routed_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_shared_count": c.n_shared_experts,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": bool(c.norm_topk_prob),
        "expert_gating_func": 2 if sigmoid else 1,
    }
    if sigmoid or c.topk_method != "greedy":
        keys |= {"expert_group_count": c.n_group, "expert_group_used_count": c.topk_group}
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return keys


def _converted(weights: dict[str, torch.Tensor], c: Any) -> dict[str, torch.Tensor]:
    """The tensors as the file has them: experts stacked, keys' and values' matrices apart."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if expert := EXPERT.fullmatch(name):
            stacks.setdefault(f"{expert[1]}.experts.{expert[3]}.weight", {})[int(expert[2])] = tensor
        elif name.endswith("kv_b_proj.weight"):
            heads = tensor.view(c.num_attention_heads, -1, c.kv_lora_rank)
            keys, values = heads.split((c.qk_nope_head_dim, c.v_head_dim), 1)
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = values
        else:
            found[re.sub(r"e_score_correction_bias$", "e_score_correction.bias", name)] = tensor
    return found | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in stacks.items()}
