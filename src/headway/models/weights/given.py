"""The weights of an update as files would have them: a trainer's names are those of transformers in memory.

mlp.experts.gate_up_proj [X, 2F, E]   ──▶ mlp.experts.0.gate_proj.weight … (what a folder of the family has)
model.language_model.layers.0.…       ──▶ model.layers.0.…
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.arrays import from_tensor, widen
from headway.base.errors import InvalidInput
from headway.models.config import ModelConfig
from headway.models.families import by_name
from headway.models.families.family import Cut, Each, FirstOf, Part
from headway.models.nested import OLDER_TEXT, TEXT, text_names
from headway.models.weights.roles import Roles, part_of, parts_of
from headway.models.weights.shapes import layer_shapes, model_shapes

if TYPE_CHECKING:
    import torch

EXPERTS = re.compile(r"(?P<layer>.*\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(?P<part>gate_up_proj|down_proj)")
ROUTER = re.compile(r"(?P<layer>.*\.layers\.\d+\.)(?:mlp\.gate|block_sparse_moe\.router)\.weight")


class GivenFiles:
    """Tensors or arrays in the place of a folder's (`Weights`)."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def stored(self, name: str) -> str:
        return "F32"

    def array(self, name: str, dtype: str = "float32") -> np.ndarray:
        """A copy in float32: the caller may go on training his."""
        return np.array(widen(from_tensor(self._tensors[name])))

    def load(self, name: str, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        import torch

        return torch.as_tensor(self._tensors[name]).to(device=device, dtype=dtype, copy=True)


class GivenRoles:
    """The same by role: which there are, and their values."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Any]) -> None:
        parts, files = parts_of(by_name(config.family), gguf=False), GivenFiles(tensors)
        self.config = config
        self.roles = Roles(config, files, parts, frozenset(tensors), gguf=False)  # type: ignore[arg-type]

    def at(self, layer: int | None) -> str:
        """What goes before the names of a layer's weights, or of the model's."""
        return "" if layer is None else self.roles.layer(layer)

    def has(self, role: str, shape: tuple[int, ...], layer: int | None) -> bool:
        """Whether there is a new weight for a role."""
        names = part_names(self.roles.part(role), self.at(layer), shape)
        return any(name in self.roles.names for name in names)

    def in_layer(self, layer: int) -> bool:
        """Whether there is a new weight for a layer."""
        return any(self.has(role, shape, layer) for role, shape in layer_shapes(self.config, layer).items())


def part_names(part: Part, at: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The names that a weight may have in a folder; one for each expert."""
    match part:
        case Each(name):
            return tuple(at + name.format(i) for i in range(shape[0]))
        case FirstOf(names):
            return tuple(at + name for name in names)
        case Cut(name):
            return (at + name,)
        case name:
            return (at + name,)


def folder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of a model by the names that they have in its family's folders, with their shapes."""
    roles, found = GivenRoles(config, {}), dict[str, tuple[int, ...]]()
    layers = [(i, layer_shapes(config, i)) for i in range(config.layers)]
    for layer, shapes in [(None, model_shapes(config)), *layers]:
        for role, shape in shapes.items():
            part = roles.roles.part(role)
            whole = part.shape(config) if isinstance(part, Cut) else shape[1:] if isinstance(part, Each) else shape
            found |= dict.fromkeys(part_names(part, roles.at(layer), shape), whole)
    return found


def folder_names(config: ModelConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by the names of the family's folders."""
    family = by_name(config.family)
    parts = parts_of(family, gguf=False)
    if any(isinstance(name, str) and name.startswith((TEXT, OLDER_TEXT)) for name in tensors):
        tensors = {own: tensors[name] for own, name in text_names(tensors).items()}
    used, found = folder_shapes(config), dict[str, Any]()
    for name, tensor in tensors.items():
        if name not in used and family.ignored is not None and re.fullmatch(family.ignored, str(name)):
            continue
        for own, part in _in_folder(str(name), tensor, parts, config):
            if own in found:
                raise InvalidInput(f"the weight {own!r} is given twice, once as {name!r}; give it once")
            found[own] = part
    return found


def _in_folder(name: str, tensor: Any, parts: Mapping[str, Part], config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """A tensor as the folder has it: itself, under another name, or in pieces."""
    experts = config.description.experts
    if name == "lm_head.weight":
        yield str(parts["output"]), tensor
    elif (match := EXPERTS.fullmatch(name)) and experts is not None and len(tensor.shape) == 3:
        gates = match["part"] == "gate_up_proj"
        for role in ("expert_gate", "expert_up") if gates else ("expert_down",):
            part, rows = part_of(parts, role), slice(None)
            if gates and isinstance(part, Each):
                _check_stack(name, tensor, experts.count, 2 * experts.size)
                rows = slice(experts.size) if role == "expert_gate" else slice(experts.size, None)
            if isinstance(part, Each):
                _check_stack(name, tensor, experts.count, None)
                yield from ((match["layer"] + part.name.format(i), tensor[i, rows]) for i in range(experts.count))
            elif role != "expert_up":
                assert isinstance(part, str | Cut), part
                yield match["layer"] + (part.name if isinstance(part, Cut) else part), tensor
    elif (match := ROUTER.fullmatch(name)) and isinstance(router := part_of(parts, "router"), str):
        yield match["layer"] + router, tensor
    else:
        yield name, tensor


def _check_stack(name: str, tensor: Any, count: int, rows: int | None) -> None:
    shape = list(tensor.shape)
    if shape[0] != count or (rows is not None and shape[1] != rows):
        needed = f"{count} experts" + ("" if rows is None else f" of {rows} rows")
        raise InvalidInput(f"the weight {name!r} has shape {shape}; this model needs {needed}")


def check_whole_experts(config: ModelConfig, tensors: Mapping[str, Any]) -> None:
    """Raise where some experts of a layer are given and others are not: they are kept together."""
    parts = parts_of(by_name(config.family), gguf=False)
    given = GivenRoles(config, {})
    for layer in range(config.layers):
        for role, shape in layer_shapes(config, layer).items():
            if not isinstance(part := part_of(parts, role), Each):
                continue
            names = part_names(part, given.at(layer), shape)
            missing = [name for name in names if name not in tensors]
            if missing and len(missing) < len(names):
                raise InvalidInput(f"the weight {missing[0]!r} is missing; give it with the others of its layer")
