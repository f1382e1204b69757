"""Weight files to a `DescribedDecoder`: every weight that the description asks for, wherever the family keeps it.

All names and shapes are checked before the first weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import Unsupported
from headway.kernels.host.rope import frequencies
from headway.kernels.reference.quantized import tensor
from headway.models.config import ModelConfig
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.experts import ExpertWeights
from headway.models.families import by_name
from headway.models.families.family import Cut, Each, Either, Part
from headway.models.files.weights import Weights, open_weights
from headway.models.layers import Linear, fused
from headway.models.load import GGUF_NAMES, HF_NAMES, LoadProgress, check_all_used, check_weight
from headway.models.rows import half_split
from headway.models.shapes import has_experts, layer_shapes, model_shapes

HF_PARTS = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
    "router": "mlp.gate.weight",
    "expert_gate": Each("mlp.experts.{}.gate_proj.weight"),
    "expert_up": Each("mlp.experts.{}.up_proj.weight"),
    "expert_down": Each("mlp.experts.{}.down_proj.weight"),
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
    "sinks": "self_attn.sinks",
}
GGUF_PARTS = {
    "positions": "position_embd.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "shared_router": "ffn_gate_inp_shexp.weight",
    "sinks": "attn_sinks.weight",
}


def load_described(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, progress: LoadProgress | None = None
) -> DescribedDecoder:
    """The decoder in a Hugging Face folder or a GGUF file, its weights in one dtype on one device."""
    family = by_name(config.family)
    if path.is_file():
        parts: Mapping[str, Part] = {**_whole(GGUF_NAMES), **GGUF_PARTS, **family.gguf_parts}
    else:
        parts = {**_whole(HF_NAMES), **HF_PARTS, **family.parts}
    with open_weights(path) as weights:
        names = frozenset(weights.names())
        _build(
            _Reader(config, weights, parts, dtype, torch.device("meta"), names, path.is_file()), None
        )  # names and shapes alone
        return _build(_Reader(config, weights, parts, dtype, device, names, path.is_file()), progress)


def _whole(names: Mapping[str, str]) -> dict[str, str]:
    """The names with `.weight` after those of matrices."""
    return {role: name if name.endswith((".weight", ".")) else f"{name}.weight" for role, name in names.items()}


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading ones."""
    return _bare(shape[1:]) if len(shape) > 1 and shape[0] == 1 else tuple(shape)


@dataclass(frozen=True, eq=False)
class _Reader:
    """Weights by role."""

    config: ModelConfig
    weights: Weights
    parts: Mapping[str, Part]
    dtype: torch.dtype
    device: torch.device
    names: frozenset[str]
    bare: bool  # the files do not tell [1, E] from [E]
    used: set[str] = field(default_factory=set)
    last: dict[str, Tensor] = field(default_factory=dict)

    def read(self, role: str, shape: tuple[int, ...], at: str) -> Tensor:
        """The weight of a role, which must have this shape; `at` goes before its name."""
        match self._part(role):
            case Each(name):
                return torch.stack([self._tensor(at + name.format(i), shape[1:]) for i in range(shape[0])])
            case Cut(name, whole, take):
                tensor = take(self._tensor(at + name, whole(self.config)), self.config)
                assert tensor.shape == shape, (role, tensor.shape, shape)
                return self._halves(role, tensor.contiguous())
            case Either(names):
                found = next((name for name in names if at + name in self.names), names[-1])
                return self._halves(role, self._tensor(at + found, shape))
            case name:
                return self._halves(role, self._tensor(at + name, shape))

    def _part(self, role: str) -> Part:
        """Where a weight is: a bias is beside its matrix, unless the family says otherwise."""
        found, base = self.parts.get(role), self.parts.get(role.removesuffix("_bias"))
        if found is None and isinstance(base, str):
            found = base.removesuffix(".weight") + ".bias"
        if found is None and isinstance(base, Either):
            found = Either(tuple(name.removesuffix(".weight") + ".bias" for name in base.names))
        if found is None:
            raise Unsupported(f"the {self.config.family} family has no name for the weight {role!r} in such files")
        return found

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        model = f"{str(self.parts['embedding']).partition('.')[0]}."
        if name not in self.names and name.removeprefix(model) in self.names:
            name = name.removeprefix(model)  # saved without the head
        if name not in self.names or _bare(self.weights.shape(name)) != _bare(shape) or not self.bare:
            check_weight(self.weights, self.names, name, shape)
        self.used.add(name)
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        if name not in self.last:  # several weights may be cut from one
            self.last.clear()
            self.last[name] = self.weights.load(name, dtype=self.dtype, device=self.device)
        return self.last[name].view(shape)

    def _halves(self, role: str, tensor: Tensor) -> Tensor:
        c = self.config
        if c.interleaved_weights and role.removesuffix("_bias") in ("q", "k"):
            return half_split(tensor, c.head_dim, c.rope.dim)
        return tensor

    def frequencies(self) -> Tensor:
        """A row of rotation frequencies for each layer; zeros do not rotate."""
        c = self.config
        ropes = c.description.ropes or (c.rope,) * c.layers
        none = torch.zeros(c.rope.dim // 2)
        return torch.stack([tensor(frequencies(rope)) if rope.dim else none for rope in ropes]).to(self.device)


def _build(reader: _Reader, progress: LoadProgress | None) -> DescribedDecoder:
    c = reader.config
    outer = {role: reader.read(role, shape, "") for role, shape in model_shapes(c).items()}
    layers = []
    for i in range(c.layers):
        layers.append(_layer(reader, i))
        if progress is not None:
            progress(i + 1, c.layers)
    check_all_used(reader.weights, reader.used, c.family, by_name(c.family).ignored)
    outer.setdefault("output", outer["embedding"])
    return DescribedDecoder(config=c, layers=tuple(layers), inv_freq=reader.frequencies(), **outer)


def _layer(reader: _Reader, i: int) -> DescribedLayer:
    c, at = reader.config, str(reader.parts["layer"]).format(i)
    shapes = layer_shapes(c, i)

    def read(role: str) -> Tensor:
        return reader.read(role, shapes[role], at)

    def linear(*roles: str) -> Linear:
        return Linear(*(_stack(read, [r + s for r in roles]) for s in ("", "_bias") if roles[0] + s in shapes))

    norms: dict[str, Any] = {role: read(role) for role in shapes if "norm" in role}
    norms.setdefault("input_norm", norms.get("post_attention_norm"))  # not used
    norms.setdefault("mlp_norm", norms.get("post_mlp_norm", norms["input_norm"]))  # not used
    norms = {"q_norm": None, "k_norm": None, **norms}
    if has_experts(c, i):
        gate_up, down, experts = linear("expert_gate", "expert_up"), linear("expert_down"), _experts(c, linear, shapes)
    else:
        gate_up = linear("gate", "up") if c.description.gated else linear("up")
        down, experts = linear("down"), None
    return DescribedLayer(
        qkv=linear("q", "k", "v"),
        out=linear("o"),
        gate_up=gate_up,
        down=down,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        eps=c.norm_eps,
        description=c.description,
        experts=experts,
        sinks=read("sinks") if "sinks" in shapes else None,
        **norms,
    )


def _stack(read: Callable[[str], Tensor], roles: list[str]) -> Tensor:
    """Matrices, or those of experts, with their rows one after the other."""
    parts = [read(role) for role in roles]
    by_expert = roles[0].startswith("expert_")
    return torch.cat(parts, 1) if by_expert and len(parts) > 1 else fused(parts) if not by_expert else parts[0]


def _experts(c: ModelConfig, linear: Callable[..., Linear], shapes: Mapping[str, object]) -> ExpertWeights:
    what = c.description.experts
    assert what is not None
    if "shared_up" not in shapes:
        return ExpertWeights(what, linear("router"))
    shared = (linear("shared_gate", "shared_up"), linear("shared_down"), linear("shared_router"))
    return ExpertWeights(what, linear("router"), *shared)
