"""GPT-2: learned positions, layer norms, biases, a feed-forward without a gate; matrices are stored transposed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.kernels.host.rope import Rope
from headway.models.description import Description
from headway.models.families.family import LAYER_NORM_GGUF, Family
from headway.models.families.parts import stacked, transposed
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "rms_norm_eps": "layer_norm_epsilon",
}  # what config.json of GPT-2 and GPT-J calls these
DESCRIPTION = Description(norm="layer", norm_bias=True, gated=False, activation="gelu_tanh", learned_positions=True)


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    for key, plain in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if keys.bool(key, plain) != plain:
            raise Unsupported(f"config.json: {key} is {not plain}; only {plain} is supported")
    activation = keys.activation("activation_function", "gelu_new")
    return replace(config, rope=Rope(0), description=replace(DESCRIPTION, activation=activation))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, rope=Rope(0), description=DESCRIPTION)


FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    gguf="gpt2",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    inner=4,
    eps=1e-5,
    tied=True,
    keys=KEYS,
    gguf_keys=LAYER_NORM_GGUF,
    ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "embedding": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "final_norm": "transformer.ln_f.weight",
        "layer": "transformer.h.{}.",
        "input_norm": "ln_1.weight",
        "mlp_norm": "ln_2.weight",
        **stacked("attn.c_attn", ("q", "k", "v"), transposed=True),
        **transposed("attn.c_proj", "o"),
        **transposed("mlp.c_fc", "up"),
        **transposed("mlp.c_proj", "down"),
    },
    gguf_parts=stacked("attn_qkv", ("q", "k", "v")),
)
