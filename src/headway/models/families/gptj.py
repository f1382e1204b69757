"""GPT-J: one layer norm for parallel attention and feed-forward, neighboring dimensions rotated, an output bias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import BadModelFile
from headway.kernels.host.rope import Rope
from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.families.gpt2 import KEYS
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    rotated = keys.int("rotary_dim", config.head_dim if keys.has("rotary_dim") else 64)
    if not 2 <= rotated <= config.head_dim or rotated % 2:
        raise BadModelFile(f"config.json: rotary_dim is {rotated}; it must be even, from 2 to {config.head_dim}")
    description = Description(
        norm="layer",
        norm_bias=True,
        parallel=True,
        one_norm=True,
        gated=False,
        activation=keys.activation("activation_function", "gelu_new"),
        head_bias=True,
    )
    return replace(config, rope=Rope(rotated), description=description)


FAMILY = Family(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    model_types=("gptj",),
    gguf=None,
    mlp_bias=True,
    inner=4,
    eps=1e-5,
    interleaved_hf=True,
    keys=KEYS,
    ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    describe=describe,
    parts={
        "embedding": "transformer.wte.weight",
        "final_norm": "transformer.ln_f.weight",
        "layer": "transformer.h.{}.",
        "input_norm": "ln_1.weight",
        "q": "attn.q_proj.weight",
        "k": "attn.k_proj.weight",
        "v": "attn.v_proj.weight",
        "o": "attn.out_proj.weight",
        "up": "mlp.fc_in.weight",
        "down": "mlp.fc_out.weight",
    },
)
