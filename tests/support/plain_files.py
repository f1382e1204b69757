"""Model folders written byte by byte, for machines that have torch and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file; its tensors start wherever the header ends, at odd addresses too."""
    header, at = dict[str, object](), 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def write_llama(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 96,
    vocab: int = 97,
    dtype: torch.dtype = torch.bfloat16,
    tied: bool = False,
) -> Path:
    """A random Llama in a Hugging Face folder, without a tokenizer."""
    generator, kv = torch.Generator().manual_seed(0), hidden // heads * kv_heads
    parts = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": shape for name, shape in parts.items()}
        shapes |= {f"{at}mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,)} | ({} if tied else {"lm_head.weight": (vocab, hidden)})
    drawn = {n: torch.randn(s, generator=generator).mul_(s[-1] ** -0.5).to(dtype) for n, s in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", drawn)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def finite_bytes(count: int, seed: int = 0) -> bytes:
    """Random bytes that are finite numbers in every floating type and packed format."""
    drawn = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (drawn & 0xBF).numpy().tobytes()  # the highest bit of every exponent is clear
