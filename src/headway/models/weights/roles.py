"""Where a model's files keep each weight, by role: the names of Llama's, what a family has elsewhere, and checks.

`load` and `load_described` read the weights that this finds; every weight in the files must be one of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path

import numpy as np

from headway.base.arrays import aligned
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.host.rope import frequencies
from headway.models.config import ModelConfig
from headway.models.families import by_name
from headway.models.families.family import Cut, Each, Family, FirstOf, Part
from headway.models.families.parts import expert_parameters
from headway.models.files.weights import Weights
from headway.models.rope_keys import LONG_FACTORS, SHORT_FACTORS
from headway.models.weights.shapes import layer_shapes, model_shapes

HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "output": "lm_head.weight",
    "layer": "model.layers.{}.",
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "output": "output.weight",
    "layer": "blk.{}.",
    "input_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
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
    "token_inputs": "model.embed_tokens_per_layer.weight",
    "input_projection": "model.per_layer_model_projection.weight",
    "input_projection_norm": "model.per_layer_projection_norm.weight",
    "input_gate": "per_layer_input_gate.weight",
    "input_out": "per_layer_projection.weight",
    "post_input_norm": "post_per_layer_input_norm.weight",
}
HF_STACKED_EXPERTS = expert_parameters("mlp.experts")
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
    "token_inputs": "per_layer_token_embd.weight",
    "input_projection": "per_layer_model_proj.weight",
    "input_projection_norm": "per_layer_proj_norm.weight",
    "input_gate": "inp_gate.weight",
    "input_out": "proj.weight",
    "post_input_norm": "post_norm.weight",
}
SPLIT_QUERIES = f"{GGUF_NAMES['layer'].format(0)}{GGUF_NAMES['q']}.weight"  # in files that have q, k and v apart
FREQUENCIES = "rope_freqs.weight"  # in a GGUF file, a divisor of each frequency
# Tensors that carry nothing the config does not say.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|lm_head\.weight")


@dataclass(frozen=True, eq=False)
class Roles:
    """A model's weights by role."""

    config: ModelConfig
    weights: Weights
    parts: Mapping[str, Part]
    names: frozenset[str]
    gguf: bool
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, path: Path, config: ModelConfig, weights: Weights) -> Roles:
        """The roles of a Hugging Face folder or a GGUF file."""
        gguf, names = path.is_file(), frozenset(weights.names())
        return cls(config, weights, parts_of(by_name(config.family), names, gguf=gguf), names, gguf)

    def layer(self, i: int) -> str:
        """What goes before the names of a layer's weights."""
        return str(self.parts["layer"]).format(i)

    def part(self, role: str) -> Part:
        """Where a weight is."""
        if (part := part_of(self.parts, role)) is None:
            raise Unsupported(f"the {self.config.family} family has no name for the weight {role!r} in such files")
        return part

    def name(self, at: str, part: str | FirstOf) -> str:
        """The name of a weight; of several, the first that there is."""
        if isinstance(part, str):
            return at + part
        return at + next((name for name in part.names if at + name in self.names), part.names[-1])

    def claim(self, name: str, shape: tuple[int, ...]) -> str:
        """Mark a weight as used; raise if it is missing or has another shape. Returns its name in the files."""
        model = f"{str(self.parts['embedding']).partition('.')[0]}."
        if name not in self.names and name.removeprefix(model) in self.names:
            name = name.removeprefix(model)  # saved without the head
        bare = self.gguf  # such files do not tell [1, E] from [E]
        if name not in self.names or _bare(self.weights.shape(name)) != _bare(shape) or not bare:
            _check_weight(self.weights, self.names, name, shape)
        self.used.add(name)
        return name

    def check(self) -> None:
        """Raise for a weight that is missing, misshapen or not this model's, before any is read."""
        c = self.config
        places = [("", model_shapes(c)), *((self.layer(i), layer_shapes(c, i)) for i in range(c.layers))]
        for at, shapes in places:
            for role, shape in shapes.items():
                match self.part(role):
                    case Each(name):
                        for i in range(shape[0]):
                            self.claim(at + name.format(i), shape[1:])
                    case Cut(name, whole):
                        self.claim(at + name, whole(c))
                    case part:
                        self.claim(self.name(at, part), shape)
        self.frequencies()
        _check_all_used(self.weights, self.used, c.family, by_name(c.family).ignored)

    def frequencies(self) -> np.ndarray:
        """Rotation frequencies: [D/2], or a row for each layer where they have ropes of their own; zeros do not
        rotate."""
        c, ropes = self.config, self.config.description.ropes
        if ropes is None:
            return self._with_divisors(frequencies(c.rope))
        rows = np.zeros((c.layers, max(rope.dim for rope in (*ropes, c.rope)) // 2), np.float32)
        whole = self._with_divisors(frequencies(c.rope))  # of layers with the model's own rope
        for row, rope in zip(rows, ropes, strict=True):
            if rope.dim:
                row[: rope.dim // 2] = whole if rope == c.rope else frequencies(rope)
        return aligned(rows)

    def _with_divisors(self, inv_freq: np.ndarray) -> np.ndarray:
        longrope = self.config.rope.kind == "longrope"
        name = SHORT_FACTORS if longrope else FREQUENCIES
        if not self.gguf or name not in self.names:
            return aligned(inv_freq)
        for each in (name, *((LONG_FACTORS,) if longrope and LONG_FACTORS in self.names else ())):
            self.claim(each, inv_freq.shape)
        return aligned(inv_freq / self.weights.array(name))


def parts_of(family: Family, names: Collection[str] = (), *, gguf: bool) -> dict[str, Part]:
    """Where a family's folders or GGUF files keep each weight, by role, and what goes before those of a layer.

    Files with some of these names have q, k and v apart, or experts together, where others of the family do not.
    """
    shared: Mapping[str, Part] = GGUF_PARTS if gguf else HF_PARTS
    own: Mapping[str, Part] = family.gguf_parts if gguf else family.parts
    if gguf and SPLIT_QUERIES in names:
        own = {role: part for role, part in own.items() if not _is_of_qkv(part)}
    if not gguf and any(name.endswith(".mlp.experts.gate_up_proj") for name in names):
        shared = {**shared, **HF_STACKED_EXPERTS}
    return {**_whole(GGUF_NAMES if gguf else HF_NAMES), **shared, **own}


def part_of(parts: Mapping[str, Part], role: str) -> Part | None:
    """Where a weight is: a bias is beside its matrix, unless the family says otherwise."""
    part, base = parts.get(role), parts.get(role.removesuffix("_bias"))
    if part is None and isinstance(base, str):
        return base.removesuffix(".weight") + ".bias"
    if part is None and isinstance(base, FirstOf):
        return FirstOf(tuple(name.removesuffix(".weight") + ".bias" for name in base.names))
    return part


def _whole(names: Mapping[str, str]) -> dict[str, str]:
    """The names with `.weight` after those of matrices."""
    return {role: name if name.endswith((".weight", ".")) else f"{name}.weight" for role, name in names.items()}


def _is_of_qkv(part: Part) -> bool:
    """Whether it is cut from one matrix of q, k and v, which other files of the same family have apart."""
    return isinstance(part, Cut) and part.name.startswith("attn_qkv.")


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading ones."""
    return _bare(shape[1:]) if len(shape) > 1 and shape[0] == 1 else tuple(shape)


def _check_weight(weights: Weights, names: Collection[str], name: str, shape: tuple[int, ...]) -> None:
    """Raise if a weight is missing or has another shape."""
    if name not in names:
        raise BadModelFile(f"the weight {name!r} is missing; this config needs it with shape {list(shape)}")
    stored = tuple(weights.shape(name))
    if stored != shape:
        raise BadModelFile(f"the weight {name!r} has shape {list(stored)}; this config needs {list(shape)}")


def _check_all_used(weights: Weights, used: Collection[str], family: str, ignored: str | None = None) -> None:
    """Raise if there are weights that nobody has asked for, and that no pattern ignores."""
    extra = sorted(n for n in weights.names() if n not in used and not HARMLESS.fullmatch(n))
    extra = [n for n in extra if ignored is None or not re.fullmatch(ignored, n)]
    if extra:
        raise BadModelFile(
            f"{len(extra)} weights do not belong to this {family} config, such as {extra[0]!r}; "
            "the config and the weights belong to different models"
        )
