"""Small models for users' tests: real decoders with random weights, made in memory from a config and a seed.

    engine = hw.Engine(random_model("qwen3", layers=3))

Needs torch and numpy only: no model files, no tokenizer, no network.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import InvalidInput
from headway.kernels.rope import Rope, frequencies
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.families import FAMILIES
from headway.models.layers import Layer, Linear
from headway.runtime.device import pick_device, pick_dtype

WINDOW = 8  # what a family with sliding windows gets, unless `windows` says otherwise


def random_model(
    family: str = "llama", *, seed: int = 0, dtype: str = "float32", device: str = "cpu", **overrides: Any
) -> Decoder:
    """A small decoder of a family, ready for `Engine(...)`. `overrides` are fields of `ModelConfig`.

    The same seed and config give the same weights on every device, up to the rounding of the dtype.
    """
    where = pick_device(device)
    return _build(random_config(family, **overrides), _Draw(seed, pick_dtype(dtype, where), where))


def random_config(family: str = "llama", **overrides: Any) -> ModelConfig:
    """The small config that `random_model` builds."""
    found = next((f for f in FAMILIES if f.name == family), None)
    if found is None:
        raise InvalidInput(f"family {family!r} is not known; it takes one of {', '.join(f.name for f in FAMILIES)}")
    known = {f.name for f in fields(ModelConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InvalidInput(f"{unknown[0]!r} is not a field of ModelConfig; its fields are {', '.join(sorted(known))}")
    layers, head_dim = overrides.get("layers", 2), overrides.get("head_dim", 16)
    defaults: dict[str, Any] = {
        "family": family,
        "vocab_size": 97,
        "hidden_size": 64,
        "layers": layers,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": head_dim,
        "intermediate_size": 84,
        "max_positions": 1024,
        "norm_eps": 1e-5,
        "rope": Rope(head_dim),
        "tied": False,
        "qkv_bias": found.qkv_bias is True,
        "o_bias": found.o_bias is True,
        "mlp_bias": found.mlp_bias is True,
        "qk_norm": found.qk_norm,
        "windows": (WINDOW if found.window == "all" else None,) * layers,
    }
    config = ModelConfig(**(defaults | overrides))
    if len(config.windows) != config.layers:
        raise InvalidInput(f"windows has {len(config.windows)} entries; {config.layers} layers need one each")
    return config


class _Draw:
    """Tensors from one seed, drawn in float32 on the CPU and then moved."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._device = dtype, device

    def normal(self, *shape: int, scale: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale + mean).to(self._device, self._dtype)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, scale=0.3, mean=1.0)

    def matrix(self, rows: int, width: int) -> Tensor:
        """Large enough that attention is peaked and logits differ."""
        return self.normal(rows, width, scale=1.5 / math.sqrt(width))

    def linear(self, rows: int, width: int, bias: bool) -> Linear:
        return Linear(self.matrix(rows, width), self.normal(rows, scale=0.3) if bias else None)


def _build(c: ModelConfig, draw: _Draw) -> Decoder:
    embedding = draw.matrix(c.vocab_size, c.hidden_size)
    return Decoder(
        config=c,
        embedding=embedding,
        layers=tuple(_layer(c, draw) for _ in range(c.layers)),
        final_norm=draw.norm(c.hidden_size),
        output=embedding if c.tied else draw.matrix(c.vocab_size, c.hidden_size),
        inv_freq=frequencies(c.rope).to(embedding.device),
    )


def _layer(c: ModelConfig, draw: _Draw) -> Layer:
    e, f, d = c.hidden_size, c.intermediate_size, c.head_dim
    return Layer(
        input_norm=draw.norm(e),
        qkv=draw.linear((c.heads + 2 * c.kv_heads) * d, e, c.qkv_bias),
        q_norm=draw.norm(d) if c.qk_norm else None,
        k_norm=draw.norm(d) if c.qk_norm else None,
        out=draw.linear(e, c.heads * d, c.o_bias),
        mlp_norm=draw.norm(e),
        gate_up=draw.linear(2 * f, e, c.mlp_bias),
        down=draw.linear(e, f, c.mlp_bias),
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=d,
        eps=c.norm_eps,
    )
