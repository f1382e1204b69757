"""Models of families that are not Llama's as GGUF files: names by the gguf package's own table, layouts and keys as
llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.gguf_files import add_tensors, finish, interleaved

A = gguf.MODEL_ARCH
ARCHS = {
    "gemma": A.GEMMA,
    "gemma2": A.GEMMA2,
    "gemma3_text": A.GEMMA3,
    "phi3": A.PHI3,
    "ministral3": A.MISTRAL3,
    "olmo2": A.OLMO2,
    "smollm3": A.SMOLLM3,
    "granite": A.GRANITE,
    "granitemoe": A.GRANITE_MOE,
    "cohere2": A.COHERE2,
    "stablelm": A.STABLELM,
    "gpt2": A.GPT2,
    "gpt_neox": A.GPTNEOX,
    "falcon": A.FALCON,
    "starcoder2": A.STARCODER2,
    "glm": A.CHATGLM,
    "glm4": A.GLM4,
    "mixtral": A.LLAMA,
    "qwen2_moe": A.QWEN2MOE,
    "qwen3_moe": A.QWEN3MOE,
    "olmoe": A.OLMOE,
    "gpt_oss": A.GPT_OSS,
    "llama4_text": A.LLAMA4,
    "olmo3": A.OLMO2,
    "phi": A.PHI2,
    "gemma3n_text": A.GEMMA3N,
    "gemma4_text": A.GEMMA4,
}
PERMUTED = ("ministral3", "smollm3", "granite", "granitemoe", "mixtral")
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
STREAMS = re.compile(r"(model\.altup_\w*projections)\.(\d+)\.weight")
HEADS = re.compile(r"(.*\.[qk]_layernorm)\.norms\.(\d+)\.weight")


def write_family(
    path: Path,
    folder: Path,
    model: Any,
    *,
    kind: str = "F32",
    metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """The model in a folder as a GGUF file; matrices in `kind`, the rest in F32."""
    c = _flat(model.config)
    arch = ARCHS[c.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _keys(writer, c)
    metadata(writer)
    tensors = _converted(load_file(folder / "model.safetensors"), c)
    add_tensors(writer, gguf.get_tensor_name_map(arch, c.num_hidden_layers), tensors, kind)
    if (getattr(c, "rope_parameters", None) or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(c))
    if (getattr(c, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        _longrope(writer, c)
    if c.model_type == "gemma4_text":
        writer.add_tensor("rope_freqs.weight", _turned(c))
    finish(writer)
    return path


def write_family_lora(path: Path, state: dict[str, Tensor], config: Any, *, alpha: float) -> Path:
    """An adapter's tensors, by PEFT's names, as a GGUF file: B's rows lie as those of the weights, and those of streams
    in one tensor."""
    c = _flat(config)
    arch = ARCHS[c.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    table = gguf.get_tensor_name_map(arch, c.num_hidden_layers)
    state = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    for side in "AB":
        for merged in {found[1] for name in state if (found := STREAMS.fullmatch(name.replace(f".lora_{side}", "")))}:
            names = sorted(name for name in state if name.startswith(f"{merged}.") and f".lora_{side}." in name)
            state[f"{merged}.lora_{side}.weight"] = torch.stack([state.pop(name) for name in names])
    for name in (name for name in state if ".lora_B." in name):
        module = name.partition(".lora_B.")[0]
        b = state[name].t() if c.model_type == "gpt2" and module != "lm_head" else state[name]
        ((_, rows),) = _converted({f"{module}.weight": b}, c)
        target = "output" if module == "lm_head" else table.get_name(module)
        assert target is not None, module
        for side, tensor in (("a", state[name.replace(".lora_B.", ".lora_A.")]), ("b", rows)):
            writer.add_tensor(f"{target}.weight.lora_{side}", tensor.detach().contiguous().numpy())
    finish(writer)
    return path


def _flat(c: Any) -> Any:
    """The config; that of layers with heads of their own as the converter reads it, with the heads of each."""
    if c.model_type != "gemma4_text":
        return c
    values = c.to_dict()
    own = [values.get("per_layer_config", {}).get(str(layer), {}) for layer in range(c.num_hidden_layers)]
    for key in ("head_dim", "num_key_value_heads"):
        values[f"every_{key}"] = [each.get(key, values[key]) for each in own]
    return SimpleNamespace(**values)


def _divisors(c: Any) -> np.ndarray:
    """What the frequencies of a plain rope are divided by, as transformers scales them."""
    dim, theta = c.head_dim, c.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](c, "cpu")
    return (plain / scaled).numpy()


def _longrope(writer: gguf.GGUFWriter, c: Any) -> None:
    """The factors, and what cos and sin are multiplied with."""
    rope, original = c.rope_parameters, c.rope_parameters["original_max_position_embeddings"]
    _, scale = ROPE_INIT_FUNCTIONS["longrope"](c, "cpu")
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(scale)
    for length in ("short", "long"):
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _turned(c: Any) -> np.ndarray:
    """The same for a rope of some pairs: the others are not rotated."""
    pairs = c.every_head_dim[-1] // 2
    turned = int(2 * pairs * c.rope_parameters["full_attention"].get("partial_rotary_factor", 1.0) / 2)
    return np.where(np.arange(pairs) < turned, 1.0, 1e30).astype(np.float32)


def _keys(writer: gguf.GGUFWriter, c: Any) -> None:
    """The metadata that the converter writes."""
    kind, heads = c.model_type, c.num_attention_heads
    dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    kv = {"gpt2": heads, "gpt_neox": heads}.get(kind, getattr(c, "num_key_value_heads", heads))
    inner = {"gpt2": getattr(c, "n_inner", None) or 4 * c.hidden_size}.get(kind, getattr(c, "intermediate_size", 0))
    if kind == "llama4_text":
        inner = c.intermediate_size_mlp
    if kind == "gemma4_text":
        kv = c.every_num_key_value_heads
    if kind == "gemma4_text" and c.use_double_wide_mlp:
        first = c.num_hidden_layers - c.num_kv_shared_layers
        inner = [inner if layer < first else 2 * inner for layer in range(c.num_hidden_layers)]
    if kind == "falcon":
        kv, inner = (c.num_kv_heads if c.new_decoder_architecture else 1), c.ffn_hidden_size
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_vocab_size(c.vocab_size)
    own = c.every_head_dim[-1] if kind == "gemma4_text" else dim
    writer.add_key_length(own)
    writer.add_value_length(own)
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(c, name):
            writer.add_layer_norm_eps(getattr(c, name))
    if hasattr(c, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = getattr(c, "rope_parameters", None) or {}
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    if kind != "gpt2":
        share = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(own * share))
        writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(c, "sliding_window", None) and kind != "qwen2_moe":
        writer.add_sliding_window(c.sliding_window)
    _more_keys(writer, c)


def _more_keys(writer: gguf.GGUFWriter, c: Any) -> None:
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("use_parallel_residual", writer.add_parallel_residual),
        ("clip_qkv", writer.add_clamp_kqv),
        ("num_experts", writer.add_expert_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if key == "num_local_experts" and hasattr(c, "num_experts"):
            continue
        if "expert" in key and c.model_type == "gemma4_text" and not c.enable_moe_block:
            continue
        if getattr(c, key, None) is not None:
            add(getattr(c, key))
    if c.model_type in ("olmo3", "gemma3n_text", "gemma4_text"):
        writer.add_sliding_window_pattern([own == "sliding_attention" for own in c.layer_types])
    if c.model_type in ("gemma3n_text", "gemma4_text"):
        writer.add_shared_kv_layers(c.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input or 0)
    if c.model_type == "gemma3n_text":
        writer.add_altup_active_idx(c.altup_active_idx)
        writer.add_altup_num_inputs(c.altup_num_inputs)
        shares = torch.tensor(c.activation_sparsity_pattern)
        writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    if c.model_type == "gemma4_text":
        writer.add_key_length_swa(c.head_dim)
        writer.add_value_length_swa(c.head_dim)
        writer.add_rope_dimension_count_swa(c.head_dim)
        if c.enable_moe_block:
            writer.add_expert_used_count(c.top_k_experts)
    if c.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(c.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(c.rope_parameters["llama_4_scaling_beta"])
    if c.model_type in ("gpt_oss", "llama4_text"):
        writer.add_expert_feed_forward_length(c.intermediate_size)
    if c.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(c.interleave_moe_layer_step)


def _converted(weights: dict[str, Tensor], c: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the file has them."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if found := EXPERT.fullmatch(name) or HEADS.fullmatch(name) or STREAMS.fullmatch(name):
            merged = f"{found[1]}.experts.{found[3]}.weight" if found.re is EXPERT else f"{found[1]}.weight"
            stacks.setdefault(merged, {})[int(found[2])] = tensor
        else:
            yield from _split(name, tensor, c)
    for name, parts in stacks.items():
        yield _renamed(name), torch.stack([parts[i] for i in sorted(parts)])


def _renamed(name: str) -> str:
    return re.sub(r"model\.layers\.(\d+)\.block_sparse_moe\.experts", r"layers.\1.feed_forward.experts", name)


GEMMA_NAMES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def _gemma_name(name: str, block: str) -> str:
    """A name that the converter changes before it looks it up."""
    found = next((own for end, own in GEMMA_NAMES.items() if name.endswith(f".{end}")), None)
    return name if found is None else block + found


def _split(name: str, tensor: Tensor, c: Any) -> Iterator[tuple[str, Tensor]]:
    kind, heads, layer = c.model_type, c.num_attention_heads, re.search(r"\.(\d+)\.", name)
    block = f"blk.{layer[1]}." if layer else ""
    if kind.startswith(("gemma3n", "gemma4")):
        name = _gemma_name(name, block)
    elif kind.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1
    elif kind in PERMUTED and ".q_proj." in name:
        tensor = interleaved(tensor, heads)
    elif kind in PERMUTED and ".k_proj." in name:
        tensor = interleaved(tensor, c.num_key_value_heads)
    elif kind == "gpt2" and re.search(r"c_\w+\.weight$", name):
        tensor = tensor.t()
    elif "query_key_value" in name:
        groups = {"gpt_neox": heads}.get(kind) or (c.num_kv_heads if c.new_decoder_architecture else 1)
        by_group = tensor.unflatten(0, (groups, -1, c.hidden_size // heads))
        tensor = torch.cat(
            [by_group[:, :-2].flatten(0, 2), by_group[:, -2].flatten(0, 1), by_group[:, -1].flatten(0, 1)]
        )
    elif name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = tensor.chunk(2, dim=1)
        yield f"{block}ffn_gate_exps.weight", gate
        yield f"{block}ffn_up_exps.weight", up
        return
    elif name.endswith("block_sparse_moe.output_linear.weight"):
        name = f"{block}ffn_down_exps.weight"
    elif name.endswith("block_sparse_moe.gate.weight"):
        name = f"{block}ffn_gate_inp.weight"
    elif kind == "llama4_text" and ".experts.gate_up_proj" in name:
        for role, own in zip(("gate", "up"), tensor.transpose(1, 2).chunk(2, dim=1), strict=True):
            yield f"{block}ffn_{role}_exps.weight", own
        return
    elif kind != "gemma4_text" and ".experts.gate_up_proj" in name:
        suffix = "bias" if name.endswith("_bias") else "weight"
        for i, role in enumerate(("gate", "up")):
            own = tensor[..., i::2]
            yield f"{block}ffn_{role}_exps.{suffix}", own if suffix == "bias" else own.transpose(1, 2)
        return
    elif ".experts.down_proj" in name:
        bias = name.endswith("_bias")
        name, tensor = (
            f"{block}ffn_down_exps.{'bias' if bias else 'weight'}",
            tensor if bias else tensor.transpose(1, 2),
        )
    elif name.endswith("self_attn.sinks"):
        name = f"{block}attn_sinks.weight"
    elif name.endswith("shared_expert_gate.weight"):
        tensor = tensor.squeeze(0)
    yield name, tensor
