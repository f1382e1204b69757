"""The judge: a decoder-only transformer as one dense computation, and nothing else.

One sequence, the whole mask as a matrix, no cache, no pages, no batching, plain torch. It imports nothing from the
package under test and is itself checked against transformers. It reads a Hugging Face config.json (old or new spelling)
and the tensors under their Hugging Face names, and refuses what it does not model rather than guess.

Letters: n tokens, E hidden size, H heads, K key/value heads, D head size, L layers, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, eq=False)
class Result:
    """Everything one pass computes."""

    logits: Tensor  # [n, V]
    hidden: list[Tensor]  # L + 1 of [n, E]: embeddings, then each layer's output, the last one after the final norm
    attention: list[Tensor]  # L of [H, n, n]: probabilities, exactly 0 where masked
    layer_outputs: list[Tensor]  # L of [n, E]: the residual stream after each layer, no final norm


@dataclass(frozen=True)
class Shape:
    """What the oracle needs of a config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    windows: tuple[int | None, ...]  # one for each layer


class Oracle:
    """A model to run densely: `config` is config.json as a dict, `weights` are tensors under Hugging Face names."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.shape = read_shape(config)
        self.inv_freq, self.rope_gain = rope_frequencies(config, self.shape.head_dim)
        self.weights = {name: tensor.detach().to(dtype) for name, tensor in weights.items()}
        self._check_names()

    @torch.no_grad()
    def run(self, tokens: Sequence[int] | Tensor, positions: Sequence[int] | Tensor, attend: Tensor) -> Result:
        """Each row's results; `attend[i, j]` says that row i may attend to slot j and already holds causality.

        A model's own sliding window is applied here, by position id: row i keeps slot j only if pos_i - pos_j < window.
        """
        tokens, positions = torch.as_tensor(tokens), torch.as_tensor(positions)
        self._check_inputs(tokens, positions, attend)
        cos, sin = self._rotation(positions)  # [n, D] each
        x = self.weights["model.embed_tokens.weight"][tokens]  # [n, E]
        hidden, attention, outputs = [x], [], []
        for layer, window in enumerate(self.shape.windows):
            mask = attend & within_window(positions, window)
            at = f"model.layers.{layer}."
            mixed, probs = self._attention(at + "self_attn.", self._norm(x, at + "input_layernorm"), cos, sin, mask)
            x = x + mixed
            x = x + self._mlp(at + "mlp.", self._norm(x, at + "post_attention_layernorm"))
            attention.append(probs)
            outputs.append(x)
        hidden += [*outputs[:-1], self._norm(x, "model.norm")]
        return Result(self._head(hidden[-1]), hidden, attention, outputs)

    @torch.no_grad()
    def unembed(self, stream: Tensor) -> Tensor:
        """Logits [n, V] read from a residual stream [n, E]: final norm, then head. What a logit lens shows."""
        return self._head(self._norm(stream, "model.norm"))

    def _attention(self, at: str, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        q = self._linear(x, at + "q_proj").unflatten(-1, (shape.heads, shape.head_dim))  # [n, H, D]
        k = self._linear(x, at + "k_proj").unflatten(-1, (shape.kv_heads, shape.head_dim))  # [n, K, D]
        v = self._linear(x, at + "v_proj").unflatten(-1, (shape.kv_heads, shape.head_dim))  # [n, K, D]
        if at + "q_norm.weight" in self.weights:
            q, k = self._norm(q, at + "q_norm"), self._norm(k, at + "k_norm")
        group = shape.heads // shape.kv_heads
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin).repeat_interleave(group, dim=1)  # [n, H, D]
        v = v.repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(shape.head_dim)  # [H, n, n]
        probs = masked_softmax(scores, mask)
        mixed = torch.einsum("hij,jhd->ihd", probs, v).flatten(1)  # [n, H·D]
        return self._linear(mixed, at + "o_proj"), probs

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        gate = self._linear(x, at + "gate_proj")
        return self._linear(gate * torch.sigmoid(gate) * self._linear(x, at + "up_proj"), at + "down_proj")

    def _head(self, x: Tensor) -> Tensor:
        name = "model.embed_tokens.weight" if self.shape.tied else "lm_head.weight"
        return x @ self.weights[name].T

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.weights[name + ".weight"] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.shape.eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # The reference takes angles in float32 whatever the model's dtype. Far along a context that rounding is larger
        # than all others together, so float64 here means: exact arithmetic on the same angles.
        angles = positions[:, None].to(torch.float32) * self.inv_freq  # [n, D/2]
        angles = torch.cat((angles, angles), dim=-1).to(self.dtype)  # [n, D]
        return angles.cos() * self.rope_gain, angles.sin() * self.rope_gain

    def _check_inputs(self, tokens: Tensor, positions: Tensor, attend: Tensor) -> None:
        n = tokens.shape[0]
        if tokens.shape != (n,) or positions.shape != (n,) or attend.shape != (n, n) or attend.dtype != torch.bool:
            raise ValueError(
                f"tokens [n], positions [n] and a bool attend [n, n] are needed, got {tuple(tokens.shape)}, "
                f"{tuple(positions.shape)} and {attend.dtype} {tuple(attend.shape)}"
            )
        vocab = self.weights["model.embed_tokens.weight"].shape[0]
        if bool(((tokens < 0) | (tokens >= vocab)).any()):
            raise ValueError(f"token ids must lie in 0 … {vocab - 1}, got {tokens.tolist()}")

    def _check_names(self) -> None:
        # A tensor nobody reads is a model the oracle does not understand, so it may not judge it.
        known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        for layer in range(self.shape.layers):
            at = f"model.layers.{layer}."
            known |= {at + part + ".weight" for part in ("input_layernorm", "post_attention_layernorm")}
            known |= {at + f"self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in ("weight", "bias")}
            known |= {at + f"mlp.{x}_proj.{kind}" for x in ("gate", "up", "down") for kind in ("weight", "bias")}
            known |= {at + f"self_attn.{x}_norm.weight" for x in "qk"}
        if unknown := sorted(set(self.weights) - known):
            raise ValueError(f"the oracle has no use for {len(unknown)} tensors, the first being {unknown[0]!r}")


def read_shape(config: dict[str, Any]) -> Shape:
    """The shape a config.json describes; keys left out take the value the family's reference gives them."""
    family = config["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"the oracle models {', '.join(FAMILIES)}, not {family!r}")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"the oracle models hidden_act 'silu' only, not {act!r}")
    heads = config["num_attention_heads"]
    usual_kv_heads = {"llama": heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]
    usual_head_dim = 128 if family == "qwen3" else config["hidden_size"] // heads
    return Shape(
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", usual_kv_heads) or heads,
        head_dim=config.get("head_dim") or usual_head_dim,
        eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        windows=layer_windows(config),
    )


def layer_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Each layer's sliding window, or None where a layer sees everything."""
    layers, family = config["num_hidden_layers"], config["model_type"]
    if family == "llama":
        return (None,) * layers
    window = config.get("sliding_window", 4096)
    if family == "mistral":
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        window = None
    first = config.get("max_window_layers", 28)
    usual = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    types = config.get("layer_types") or usual
    if window is None and "sliding_attention" in types:
        raise ValueError(f"layer_types {types} has sliding layers, but the config gives them no window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def rope_frequencies(config: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Radians per position [D/2] in float32, and the factor on cos and sin."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    if (rotated := rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError(f"the oracle rotates whole heads, not {rotated} of each")
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [D/2]
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope["factor"], 1.0
        case "llama3":
            return _llama3(plain, rope, trained_length(config, rope)), 1.0
        case "yarn":
            return _yarn(plain, rope, trained_length(config, rope), theta, config)
        case other:
            raise ValueError(f"the oracle models rope types default, linear, llama3 and yarn, not {other!r}")


def trained_length(config: dict[str, Any], rope: dict[str, Any]) -> int:
    """The context length a model had before its rope was stretched; a file may say so in three places."""
    key = "original_max_position_embeddings"
    return config.get(key) or rope.get(key) or config["max_position_embeddings"]


def _llama3(plain: Tensor, rope: dict[str, Any], trained: int) -> Tensor:
    """Slow turns are stretched, fast ones kept, and those between blended by how often they turn while training."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = trained * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope["factor"]


def _yarn(
    plain: Tensor, rope: dict[str, Any], trained: int, theta: float, config: dict[str, Any]
) -> tuple[Tensor, float]:
    """Like llama3's blend, but as a ramp over the index of the frequency, and with a gain on cos and sin."""
    factor = rope["factor"] or config["max_position_embeddings"] / trained
    half = plain.shape[0]

    def index_turning(times: float) -> float:
        return half * math.log(trained / (times * 2 * math.pi)) / math.log(theta)

    low, high = index_turning(rope.get("beta_fast") or 32), index_turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1 - stretched) * plain + stretched * plain / factor, _yarn_gain(rope, factor)


def _yarn_gain(rope: dict[str, Any], factor: float) -> float:
    if (gain := rope.get("attention_factor")) is not None:
        return gain

    def gain_at(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
    return gain_at(top) / gain_at(bottom) if top and bottom else gain_at(1.0)


def within_window(positions: Tensor, window: int | None) -> Tensor:
    """Which slots [n, n] a row's window reaches, by position id; what lies ahead of the row is always within it."""
    distance = positions[:, None] - positions[None, :]
    return torch.ones_like(distance, dtype=torch.bool) if window is None else distance < window


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [n, H, D] turned by their position: the first half of a head pairs with its second half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Probabilities [H, n, n] over the slots that `mask` [n, n] leaves; a row left with none has no answer."""
    if not bool(mask.any(-1).all()):
        blind = (~mask.any(-1)).nonzero().flatten().tolist()
        raise ValueError(f"rows {blind} attend to nothing; each row needs one slot inside its mask and window")
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
