"""Models with recurrent layers as GGUF files: names by the gguf package's own table, layouts as llama.cpp has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.gguf_files import add_tensors, finish, interleaved
from support.hf_families import DELTA, RECURRENT, SHARED, build_hf, family_model

A = gguf.MODEL_ARCH
RECURRENT_ARCHS = {
    "lfm2": A.LFM2,
    "mamba2": A.MAMBA2,
    "granitemoehybrid": A.GRANITE_HYBRID,
    "qwen3_next": A.QWEN3NEXT,
    "qwen3_5_text": A.QWEN35,
    "qwen3_5_moe_text": A.QWEN35MOE,
}

# More models that such files can say: class and config.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-groups": ("Mamba2", {**RECURRENT["Mamba2"]["mamba2"], "n_groups": 1, "tie_word_embeddings": True}),
    "qwen3-next-plain": ("Qwen3Next", {**DELTA, **SHARED}),  # llama.cpp has no dense layers
}


def recurrent_model(name: str, **changes: Any) -> Any:
    """A random model with recurrent layers by its name."""
    if name not in MORE:
        return family_model(name, seed=3, **changes)[1]
    kind, config = MORE[name]
    return build_hf(f"{kind}Config", f"{kind}ForCausalLM", config | changes, 3)[1]


def write_recurrent(
    path: Path,
    folder: Path,
    model: Any,
    *,
    kind: str = "F32",
    metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """The model in a folder as a GGUF file; large matrices in `kind`, the rest in F32."""
    c = model.config
    arch = RECURRENT_ARCHS[c.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _keys(writer, c)
    metadata(writer)
    tensors = _converted(load_file(folder / "model.safetensors"), c)
    add_tensors(writer, gguf.get_tensor_name_map(arch, c.num_hidden_layers), tensors, kind)
    finish(writer)
    return path


def _keys(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_vocab_size(c.vocab_size)
    if c.model_type == "mamba2":
        inner = c.num_heads * c.head_dim
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        _ssm(writer, c.conv_kernel, inner, c.state_size, heads=c.num_heads, groups=c.n_groups)
        writer.add_layer_norm_rms_eps(c.layer_norm_epsilon)
        return
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_context_length(c.max_position_embeddings)
    writer.add_head_count(c.num_attention_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if c.model_type == "lfm2":
        writer.add_head_count_kv([0 if k == "conv" else c.num_key_value_heads for k in c.layer_types])
        writer.add_feed_forward_length(_lfm2_inner(c))
        writer.add_shortconv_l_cache(c.conv_L_cache)
        writer.add_layer_norm_rms_eps(c.norm_eps)
        return
    if c.model_type == "granitemoehybrid":
        _granite_keys(writer, c)
        return
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rotated = int(dim * c.rope_parameters.get("partial_rotary_factor", 0.25))
    writer.add_rope_dimension_count(rotated)
    if c.model_type.startswith("qwen3_5"):  # pairs for time, height and width, which are one for text
        writer.add_rope_dimension_sections([rotated // 2 - 1, 1, 0, 0])
    _ssm(
        writer,
        c.linear_conv_kernel_dim,
        c.linear_value_head_dim * c.linear_num_value_heads,
        c.linear_key_head_dim,
        heads=c.linear_num_value_heads,
        groups=c.linear_num_key_heads,
    )
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 4)
    if hasattr(c, "num_experts"):
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if hasattr(c, "intermediate_size"):
        writer.add_feed_forward_length(c.intermediate_size)


def _granite_keys(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_head_count_kv([0 if kind == "linear_attention" else c.num_key_value_heads for kind in c.layer_types])
    writer.add_feed_forward_length(c.intermediate_size if c.num_local_experts else c.shared_intermediate_size)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_scaling_finetuned(c.position_embedding_type == "rope")
    writer.add_embedding_scale(c.embedding_multiplier)
    writer.add_attention_scale(c.attention_multiplier)
    writer.add_residual_scale(c.residual_multiplier)
    writer.add_logit_scale(c.logits_scaling)
    inner = c.mamba_expand * c.hidden_size
    _ssm(writer, c.mamba_d_conv, inner, c.mamba_d_state, heads=c.mamba_n_heads, groups=c.mamba_n_groups)
    if c.num_local_experts:
        writer.add_expert_count(c.num_local_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)


def _granite(name: str, tensor: Tensor, block: str, c: Any) -> Iterator[tuple[str, Tensor]]:
    """Gates and ups apart, rows of queries and keys by neighboring pairs."""
    end = "_shexp" if c.num_local_experts else ""
    if name.endswith("_moe.input_linear.weight"):
        for role, part in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"{block}ffn_{role}_exps.weight", part
    elif name.endswith("_moe.output_linear.weight"):
        yield f"{block}ffn_down_exps.weight", tensor
    elif name.endswith("shared_mlp.input_linear.weight"):
        for role, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{block}ffn_{role}{end}.weight", part
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{block}ffn_down{end}.weight", tensor
    elif ".q_proj." in name or ".k_proj." in name:
        yield name, interleaved(tensor, c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads)
    else:
        yield name, tensor


def _lfm2_inner(c: Any) -> int:
    if not c.block_auto_adjust_ff_dim:
        return c.intermediate_size
    inner = int(c.block_ffn_dim_multiplier * int(2 * c.intermediate_size / 3))
    return -(-inner // c.block_multiple_of) * c.block_multiple_of


def _ssm(writer: gguf.GGUFWriter, taps: int, inner: int, state: int, *, heads: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def _converted(weights: dict[str, Tensor], c: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the file has them."""
    experts: dict[str, dict[int, Tensor]] = {}
    delta = c.model_type.startswith("qwen3")
    for name, tensor in weights.items():
        block = f"blk.{name.split('layers.')[1].split('.')[0]}." if "layers." in name else ""
        if ".experts." in name:
            before, _, rest = name.partition(".experts.")
            number, _, role = rest.partition(".")
            experts.setdefault(f"{before}.experts.{role}", {})[int(number)] = tensor
            continue
        if delta and c.model_type != "qwen3_next":
            tensor = _tiled(name, tensor, c)
        if name.endswith("A_log"):
            rates = -tensor.exp()
            yield f"{block}ssm_a", rates if delta else rates[:, None]
        elif name.endswith((".mixer.D", ".mamba.D")):
            yield f"{block}ssm_d", tensor[:, None]
        elif name.endswith("dt_bias"):
            yield f"{block}ssm_dt.bias", tensor
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            yield name, tensor.squeeze(1)
        elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
            groups = c.mamba_n_groups if ".mamba." in name else c.n_groups
            yield f"{block}ssm_norm.weight", tensor.reshape(groups, -1)
        elif c.model_type == "granitemoehybrid":
            yield from _granite(name, tensor, block, c)
        elif name.endswith("in_proj_qkvz.weight"):
            qkv, z = _by_part(tensor, c)
            yield f"{block}attn_qkv.weight", qkv
            yield f"{block}attn_gate.weight", z
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor.squeeze(0)
        elif delta and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            yield name, tensor + 1
        else:
            yield name, tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[i] for i in sorted(parts)])


def _by_part(tensor: Tensor, c: Any) -> tuple[Tensor, Tensor]:
    """Rows by key heads as all queries, all keys and all values, and the gates."""
    share = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
    heads = tensor.unflatten(0, (c.linear_num_key_heads, -1))
    parts = heads.split([c.linear_key_head_dim, c.linear_key_head_dim, share, share], 1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    return torch.cat((q, k, v)), z


def _tiled(name: str, tensor: Tensor, c: Any) -> Tensor:
    """With the value heads of a key head apart, each key head's first ones first."""
    keys, share, dim = (
        c.linear_num_key_heads,
        c.linear_num_value_heads // c.linear_num_key_heads,
        c.linear_value_head_dim,
    )

    def turned(rows: Tensor, width: int) -> Tensor:
        return rows.unflatten(0, (keys, share, width)).transpose(0, 1).flatten(0, 2)

    both = 2 * keys * c.linear_key_head_dim
    if name.endswith(("in_proj_qkv.weight", "linear_attn.conv1d.weight")):
        return torch.cat((tensor[:both], turned(tensor[both:], dim)))
    if name.endswith("in_proj_z.weight"):
        return turned(tensor, dim)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return turned(tensor, 1)
    return turned(tensor.T.contiguous(), dim).T.contiguous() if name.endswith("linear_attn.out_proj.weight") else tensor
