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
MODELS = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
QUICK = [next(iter(group)) for group in CASES.values()]
OTHERS = [name for group in CASES.values() for name in list(group)[1:]]


def family_model(name: str, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """The config and model of a case."""
    for kind, group in CASES.items():
        if name in group:
            return build_hf(f"{kind}Config", MODELS.get(kind, f"{kind}ForCausalLM"), group[name], seed)
    raise KeyError(name)
