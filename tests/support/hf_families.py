"""Small random Hugging Face models of the families that are not Llama's, one or more for each way they differ."""

from __future__ import annotations

from typing import Any

from support.hf import build_hf

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}

# class → name → config; the first of each is the quick case.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "Gemma": {"gemma": {"head_dim": 24}, "gemma-mqa": {"head_dim": 16, "num_key_value_heads": 1}},
    "Gemma2": {
        "gemma2": {
            "head_dim": 24,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "num_hidden_layers": 3,
        },
        "gemma2-head-scale": {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
        "gemma2-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 16},
    },
    "Gemma3Text": {
        "gemma3": {
            "head_dim": 24,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "gemma3-pattern": {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            "num_hidden_layers": 7,
        },
    },
    "Ministral3": {
        "ministral3": {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                **{"original_max_position_embeddings": 512, "llama_4_scaling_beta": 0.3},
                **{"mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
    },
    "Phi3": {
        "phi3": {"pad_token_id": 0, "sliding_window": 7},
        "phi3-partial": {
            "pad_token_id": 0,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
        "phi3-longrope": {
            "pad_token_id": 0,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.2, 2.5, 3.0],
                "long_factor": [2.0, 2.1, 2.3, 2.7, 3.0, 4.2, 6.5, 9.0],
                "original_max_position_embeddings": 128,
            },
        },
    },
    "Phi": {"phi": {"hidden_act": "gelu_new"}, "phi-gelu": {"hidden_act": "gelu", "num_key_value_heads": 4}},
    "Olmo2": {"olmo2": {}, "olmo2-mha": {"num_key_value_heads": 4, "attention_bias": True}},
    "Olmo3": {
        "olmo3": {
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    },
    "SmolLM3": {
        "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
        "smollm3-every-fourth": {"num_hidden_layers": 5, "pad_token_id": 0, "tie_word_embeddings": False},
    },
    "Granite": {
        "granite": {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    },
    "Cohere2": {
        "cohere2": {
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.3,
        },
        "cohere2-pattern": {"sliding_window": 5, "num_hidden_layers": 5, "attention_bias": True},
    },
    "StableLm": {
        "stablelm": {"use_qkv_bias": True},
        "stablelm-parallel-normed": {"use_parallel_residual": True, "qk_layernorm": True},
    },
    "GPT2": {"gpt2": GPT, "gpt2-inner": {**GPT, "n_inner": 52, "activation_function": "gelu"}},
    "GPTNeoX": {
        "gpt-neox": {"num_key_value_heads": 4},
        "gpt-neox-serial": {"num_key_value_heads": 4, "use_parallel_residual": False, "attention_bias": False},
    },
    "GPTJ": {"gptj": {**GPT, "rotary_dim": 8}},
    "Falcon": {
        "falcon": {"num_kv_heads": 4},
        "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        "falcon-new-one-norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "falcon-serial": {"parallel_attn": False, "multi_query": False, "tie_word_embeddings": False},
    },
    "Starcoder2": {"starcoder2": {"sliding_window": 6}, "starcoder2-no-bias": {"use_bias": False}},
    "Glm": {"glm": {"head_dim": 16, "pad_token_id": 0}},
    "Glm4": {"glm4": {"head_dim": 16, "pad_token_id": 0}},
    "Mixtral": {"mixtral": {"num_local_experts": 5, "sliding_window": 7}},
    "Qwen2Moe": {
        "qwen2-moe": {**EXPERTS, "shared_expert_intermediate_size": 36},
        "qwen2-moe-dense-layer": {
            **EXPERTS,
            "shared_expert_intermediate_size": 36,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    },
    "Qwen3Moe": {
        "qwen3-moe": {**EXPERTS, "head_dim": 24, "norm_topk_prob": True},
        "qwen3-moe-sparse": {**EXPERTS, "head_dim": 16, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    },
    "Olmoe": {
        "olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
        "olmoe-clip": {"num_experts": 4, "num_experts_per_tok": 4, "clip_qkv": 1.5, "norm_topk_prob": True},
    },
    "GraniteMoe": {
        "granite-moe": {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    },
    "GptOss": {
        "gpt-oss": {
            "num_local_experts": 5,
            "head_dim": 16,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False},
        },
    },
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 36}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2, "shared_intermediate_size": 20}
# Families with recurrent layers, in the same way.
RECURRENT: dict[str, dict[str, dict[str, Any]]] = {
    "Lfm2": {
        "lfm2": {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 4,
        },
        "lfm2-bias": {
            "num_hidden_layers": 3,
            "full_attn_idxs": [0],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    },
    "Qwen3Next": {
        "qwen3-next": {**DELTA, **SHARED, "mlp_only_layers": [1]},
        "qwen3-next-first": {
            **DELTA,
            **SHARED,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 6,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    },
    "Qwen3_5Text": {"qwen3.5": DELTA},
    "Qwen3_5MoeText": {"qwen3.5-moe": {**DELTA, **SHARED}},
    "Mamba2": {
        "mamba2": {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 12, "chunk_size": 16},
        "mamba2-bias": {
            "hidden_size": 24,
            "num_heads": 6,
            "head_dim": 8,
            "n_groups": 1,
            "state_size": 5,
            "chunk_size": 8,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": [0.2, 0.9],
            "tie_word_embeddings": True,
        },
    },
    "GraniteMoeHybrid": {
        "granite-hybrid": {
            **MAMBA,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
        "granite-hybrid-dense": {
            **MAMBA,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "attention_bias": True,
            "attention_multiplier": 0.25,
        },
    },
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "n_group": 4,
    "topk_group": 2,
}
MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}
# Families with latent or chunked attention, in the same way.
LATENT_AND_CHUNKED: dict[str, dict[str, dict[str, Any]]] = {
    "DeepseekV2": {
        "deepseek-v2": {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_parameters": MSCALE,
        },
        "deepseek-v2-lite": {**LATENT, "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 1},
    },
    "DeepseekV3": {
        "deepseek-v3": {**LATENT, "rope_parameters": MSCALE},
        "deepseek-v3-halves": {
            **LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
        "deepseek-v3-dense": {**LATENT, "num_hidden_layers": 2, "first_k_dense_replace": 2, "attention_bias": True},
    },
    "Llama4Text": {
        "llama4": {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 52,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 6,
            "floor_scale": 5,
            "attn_scale": 0.4,
        },
        "llama4-published": {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
        "llama4-plain": {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "intermediate_size_mlp": 52,
            "moe_layers": [0],
            "no_rope_layers": [0, 1, 1],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "num_local_experts": 4,
            "attention_chunk_size": 9,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
}
LAYERS = {
    "head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
# Families whose layers differ from each other, in the same way.
PER_LAYER: dict[str, dict[str, dict[str, Any]]] = {
    "Gemma3nText": {
        "gemma3n": {
            **LAYERS,
            "vocab_size_per_layer_input": 90,
            "intermediate_size": [84, 52, 84, 40, 84, 60],
            "activation_sparsity_pattern": [0.9, 0.0, 0.7, 0.0, 0.5, 0.0],
            "laurel_rank": 6,
            "altup_num_inputs": 3,
            "final_logit_softcapping": 6.0,
        },
        "gemma3n-published": {
            **LAYERS,
            "layer_types": None,
            "intermediate_size": 84,
            "num_kv_shared_layers": 1,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
            "laurel_rank": 64,
            "query_pre_attn_scalar": 256,
        },
        "gemma3n-second-stream": {
            **LAYERS,
            "num_hidden_layers": 5,
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "laurel_rank": 10,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_key_value_heads": 4,
        },
    },
    "Gemma4Text": {
        "gemma4": {
            **LAYERS,
            "global_head_dim": 24,
            "use_double_wide_mlp": True,
            "rope_parameters": PROPORTIONAL,
            "final_logit_softcapping": 6.0,
        },
        "gemma4-experts": {
            **LAYERS,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 28,
            "use_bidirectional_attention": "vision",
            "rope_parameters": PROPORTIONAL,
        },
        "gemma4-even": {
            **LAYERS,
            "global_head_dim": 16,
            "num_hidden_layers": 5,
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "rope_parameters": None,
        },
    },
}
MODELS = {
    "Gemma3nText": "Gemma3nForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Llama4Text": "Llama4ForCausalLM",
    "Gemma3Text": "Gemma3ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}
EVERY = CASES | RECURRENT | LATENT_AND_CHUNKED | PER_LAYER
NAMES = [name for group in EVERY.values() for name in group]
QUICK = [next(iter(group)) for group in CASES.values()]
OTHERS = [name for group in CASES.values() for name in list(group)[1:]]


def family_model(name: str, seed: int = 0, **changes: Any) -> tuple[dict[str, Any], Any]:
    """The config and model of a case, with changes."""
    for kind, group in EVERY.items():
        if name in group:
            return build_hf(f"{kind}Config", MODELS.get(kind, f"{kind}ForCausalLM"), {**group[name], **changes}, seed)
    raise KeyError(name)
