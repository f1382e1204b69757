"""Random models of known shapes to benchmark: the same weights every time, in any floating-point format.

Every tensor has its own seed and is rounded to float16: the float16 and float32 models hold the same weights, and a
file in another format can be written tensor by tensor without a second copy of the model in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
SPREAD = 0.2  # of norm weights around 1


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama decoder with tied embeddings."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    positions: int
    theta: float

    @property
    def layer_weights(self) -> int:
        """Parameters in the matrices of all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    def prefill_flops(self, tokens: int) -> tuple[int, int]:
        """FLOPs of a prefill: in the matmuls, and in causal attention."""
        attention = 2 * tokens * (tokens + 1) * self.heads * self.head_dim * self.layers
        return 2 * (tokens * self.layer_weights + self.head_weights), attention


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", 2, 64, 2, 1, 32, 96, 49_152, 8192, 10_000.0),
        ModelShape("smol", 30, 576, 9, 3, 64, 1536, 49_152, 8192, 100_000.0),
        ModelShape("1b", 16, 2048, 32, 8, 64, 8192, 128_256, 8192, 500_000.0),
    )
}


def find_shape(name: str) -> ModelShape:
    """The shape of this name."""
    if name not in SHAPES:
        raise InvalidInput(f"the shape {name!r} is not known; it must be one of {', '.join(SHAPES)}")
    return SHAPES[name]


def tensors(shape: ModelShape, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, in float16."""
    import torch

    for index, (name, size) in enumerate(sizes(shape)):
        generator = torch.Generator().manual_seed(1_000_003 * seed + index)
        drawn = torch.randn(size, generator=generator)
        scaled = 1 + SPREAD * drawn if len(size) == 1 else drawn / math.sqrt(size[1])
        yield name, scaled.to(torch.float16)


def write_folder(shape: ModelShape, folder: Path, form: str, seed: int = 0) -> Path:
    """Write a Hugging Face folder with a model of this shape in `form` (f32, bf16, f16), without a tokenizer."""
    import torch
    from safetensors.torch import save_file

    if form not in FORMATS:
        raise InvalidInput(f"the format {form!r} is not known; it must be one of {', '.join(FORMATS)}")
    dtype = getattr(torch, FORMATS[form])
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(dtype) for name, tensor in tensors(shape, seed)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape, FORMATS[form]), indent=2) + "\n")
    return folder


def sizes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight's Hugging Face name and size, in the order they are drawn."""
    e, f, q, kv = shape.hidden, shape.inner, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (e,),
        "self_attn.q_proj": (q, e),
        "self_attn.k_proj": (kv, e),
        "self_attn.v_proj": (kv, e),
        "self_attn.o_proj": (e, q),
        "post_attention_layernorm": (e,),
        "mlp.gate_proj": (f, e),
        "mlp.up_proj": (f, e),
        "mlp.down_proj": (e, f),
    }
    yield "model.embed_tokens.weight", (shape.vocab, e)
    for layer in range(shape.layers):
        yield from ((f"model.layers.{layer}.{part}.weight", size) for part, size in parts.items())
    yield "model.norm.weight", (e,)


def _config(shape: ModelShape, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
