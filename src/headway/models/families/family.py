"""What a family may differ in. The one decoder is configured by this and the model's own config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """A named set of differences.

    `qkv_bias`, `o_bias` and `mlp_bias` are True, False, or the name of the config key that decides.
    `window` says which layers a `sliding_window` binds: none, all, or those the config lists (`layers`).
    """

    name: str
    architectures: tuple[str, ...]
    gguf: str | None
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "all", "layers"] = "none"
    theta: float = 10_000.0
    head_dim: int | None = None  # when the config is silent; else hidden size / heads
    kv_heads: int | None = None  # when the config is silent; else as many as heads
    interleaved_gguf: bool = False  # its GGUF files store q and k rows for rotation of neighboring pairs
