"""Random models of known shapes on a device, and what bytes and operations allow them there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headway.kernels.host.rope import Rope, frequencies
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.layers import DecoderLayer, Linear

SHAPES = {  # hidden, layers, heads, key heads, head size, inner, vocabulary, tied
    "8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "1b": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "tiny": (64, 2, 4, 2, 16, 96, 300, False),
}


@dataclass(frozen=True)
class Limits:
    """What the device was measured to do: bytes read and bfloat16 operations, a second."""

    bandwidth: float
    operations: float


def config(name: str) -> ModelConfig:
    hidden, layers, heads, kv_heads, dim, inner, vocab, tied = SHAPES[name]
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=inner,
        max_positions=1 << 17,
        norm_eps=1e-5,
        rope=Rope(dim, 500_000.0),
        tied=tied,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * layers,
    )


def published(c: ModelConfig) -> dict[str, Any]:
    """The same as the fields of a `config.json`."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope.theta},
        "tie_word_embeddings": c.tied,
    }


def random_decoder(name: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder of this shape with weights drawn on the device."""
    c = config(name)
    e, f, d = c.hidden_size, c.intermediate_size, c.head_dim

    def matrix(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=device, dtype=dtype) * width**-0.5

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    layers = tuple(
        DecoderLayer(
            input_norm=ones(e),
            qkv=Linear(matrix((c.heads + 2 * c.kv_heads) * d, e)),
            q_norm=None,
            k_norm=None,
            out=Linear(matrix(e, c.heads * d)),
            mlp_norm=ones(e),
            gate_up=Linear(matrix(2 * f, e)),
            down=Linear(matrix(e, f)),
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=d,
            eps=c.norm_eps,
        )
        for _ in range(c.layers)
    )
    embedding = matrix(c.vocab_size, e)
    output = embedding if c.tied else matrix(c.vocab_size, e)
    return Decoder(c, embedding, layers, ones(e), output, torch.from_numpy(frequencies(c.rope)).to(device))


def make_certain(decoder: Decoder) -> Decoder:
    """The same weights, changed in place so that the likeliest token leads by far: layers add little to a row, and the
    head knows each embedding as the token after it. What a step costs stays the same."""
    for layer in decoder.layers:
        layer.out.weight.mul_(0.02)
        layer.down.weight.mul_(0.02)
    assert not decoder.config.tied
    decoder.output.copy_(decoder.embedding.roll(1, 0))
    return decoder


def measure(device: torch.device) -> Limits:
    """A large copy, counting bytes read and written, and a large product, on random numbers."""
    if device.type != "cuda":
        return Limits(1e10, 1e11)
    data, out = torch.randn(1 << 29, device=device), torch.empty(1 << 29, device=device)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied, multiplied = _seconds(lambda: out.copy_(data)), _seconds(lambda: torch.mm(a, b))
    return Limits(2 * data.nbytes / copied, 2 * 8192**3 / multiplied)


def _seconds(work: Callable[[], object], count: int = 10) -> float:
    for _ in range(3):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def decode_limit(c: ModelConfig, rows: int, context: int, limits: Limits, width: float = 2.0) -> float:
    """The least seconds of a step with these sequences, by bytes (weights, KV cache) or by operations."""
    weights = c.parameters - (0 if c.tied else c.vocab_size * c.hidden_size)
    read = weights * width + rows * context * c.kv_values_per_token * 2
    operations = 2 * rows * (weights + context * c.kv_values_per_token * c.heads / c.kv_heads)
    return max(read / limits.bandwidth, operations / limits.operations)


def prompt_limit(c: ModelConfig, tokens: int, limits: Limits) -> float:
    """Seconds a prompt takes at least, by its operations; only its last token goes through the head."""
    matrices = c.parameters - 2 * c.vocab_size * c.hidden_size + (c.vocab_size * c.hidden_size if c.tied else 0)
    attention = 2 * tokens * tokens * c.heads * c.head_dim * c.layers
    return (2 * tokens * matrices + attention) / limits.operations
