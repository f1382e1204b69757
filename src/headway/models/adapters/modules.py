"""The linear layers of a family by the names that its files have, and which rows of each are which of the model's.

    attn.c_attn                 ──▶ q, k and v, one after the other (GPT-2)
    attention.query_key_value   ──▶ the rows of q, k and v by head (GPT-NeoX, Falcon)
    self_attn.q_proj            ──▶ q, all rows (Llama)
    mlp.experts.{}.gate_proj    ──▶ the gate of one expert
    mlp.experts.gate_up_proj    ──▶ gates and ups of all experts
    altup_projections.{}        ──▶ the matrix of one stream, outside of layers (Gemma 3n)

A family says once where its weights are (`Family.parts`); an adapter of such a matrix is cut as the matrix is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from headway.kernels.native.library import EXPERT_ROLES, STREAM_ROLES
from headway.models.config import ModelConfig
from headway.models.families import FAMILIES, by_name
from headway.models.families.family import Cut, Each, FirstOf, Part
from headway.models.nested import OLDER_TEXT, TEXT
from headway.models.weights.roles import (
    GGUF_PARTS,
    HF_NAMES,
    HF_PARTS,
    HF_STACKED_EXPERTS,
    SPLIT_QUERIES,
    part_of,
    parts_of,
)
from headway.models.weights.shapes import Shapes, layer_shapes, model_shapes

HEADS = ("lm_head", "embed_out")  # what folders call the output matrix
OUTER = ("input_projection", *STREAM_ROLES)  # matrices outside of layers, besides the output matrix
MODEL = "model."  # before the names of what is outside of layers


class Share(NamedTuple):
    """What a role has of a module's outputs: these rows, or all of them."""

    role: str
    rows: np.ndarray | None = None


class Module(NamedTuple):
    """A linear layer of the files: its matrix [N, K] and the roles that it is, one or more.

    Of experts, or streams, it is one of so many matrices, `{}` in its name standing for the number; or all of them, if
    `stacked`.
    """

    shape: tuple[int, int]
    shares: tuple[Share, ...]
    experts: int = 0
    stacked: bool = False
    turned: bool = False  # PEFT takes each for its transpose


def layer_modules(config: ModelConfig, layer: int, *, gguf: bool) -> dict[str, Module]:
    """The matrices of a layer, by what a folder or a GGUF file calls them after the layer."""
    family, shapes = by_name(config.family), layer_shapes(config, layer)
    own = _modules(parts_of(family, gguf=gguf), config, shapes)
    if gguf:
        return _modules(parts_of(family, (SPLIT_QUERIES,), gguf=True), config, shapes) | own
    if config.description.latent is not None and isinstance(up := family.parts.get("key_up"), Cut):
        # Keys and values of heads, which are two matrices for each head in the model.
        outputs, inputs = up.shape(config)
        (name,) = _names(up)
        own[name] = Module((outputs, inputs), (Share("key_up"), Share("value_up")))
    later = {role: part for role, part in HF_STACKED_EXPERTS.items() if role not in family.parts} | dict(family.modules)
    return _modules(later, config, shapes) | own


def outer_modules(config: ModelConfig, *, gguf: bool) -> dict[str, Module]:
    """The matrices outside of layers, but for the output matrix, by what a folder or a GGUF file calls them."""
    shapes = {role: shape for role, shape in model_shapes(config).items() if role in OUTER}
    found = _modules(parts_of(by_name(config.family), gguf=gguf), config, shapes)
    return {name.removeprefix(MODEL): module for name, module in found.items()}


def outer_names(*roles: str, gguf: bool = False) -> frozenset[str]:
    """What the matrices of these roles outside of layers are called in any family's folders, or GGUF files."""
    every = [family.gguf_parts if gguf else family.parts for family in FAMILIES]
    parts = [own[role] for own in (GGUF_PARTS if gguf else HF_PARTS, *every) for role in roles if role in own]
    return frozenset(name.removeprefix(MODEL) for part in parts for name in _names(part))


def layer_places() -> frozenset[str]:
    """What stands before the number of a decoder's layer in the names of modules, in any family's folders."""
    whole = {str(family.parts.get("layer", HF_NAMES["layer"])).partition("{")[0] for family in FAMILIES}
    bare = {place.partition(".")[2] for place in whole}  # of a model without a head
    outer = {f"{at}{place}" for at in (TEXT, OLDER_TEXT) for place in (*whole, *bare)}
    return frozenset(whole | bare | outer)


def _modules(parts: Mapping[str, Part], config: ModelConfig, shapes: Shapes) -> dict[str, Module]:
    found: dict[str, Module] = {}
    family = by_name(config.family)
    for role, shape in shapes.items():
        part = part_of(parts, role) if len(shape) == 2 or role in (*EXPERT_ROLES, *STREAM_ROLES) else None
        if part is None:
            continue
        *experts, count, inputs = shape
        rows, outputs = None, count
        if isinstance(part, Cut):
            if (cut := _rows_of(part, config, count)) is None:
                continue
            rows, outputs = cut
        for name in _names(part):
            known = found.get(name)
            shares = () if known is None else known.shares
            stacked = bool(experts) and not isinstance(part, Each)
            turned = isinstance(part, Cut) and family.turned_experts
            every = (*shares, Share(role, rows))
            found[name] = Module((outputs, inputs), every, *experts, stacked=stacked, turned=turned)
    return found


def _rows_of(part: Cut, config: ModelConfig, count: int) -> tuple[np.ndarray, int] | None:
    """The rows of a matrix that a part of it is, and how many the matrix has; None if it is not rows of a matrix."""
    whole = part.shape(config)
    for axis in (-2, -1):  # stored as [N, K], or as [K, N]
        numbered = np.expand_dims(np.arange(whole[axis]), -3 - axis)
        taken = np.asarray(part.take(numbered[None] if len(whole) == 3 else numbered, config))
        if taken.shape[-2:] == (count, 1) and len(taken.shape) == len(whole):
            return taken.reshape(-1), whole[axis]
    return None


def _names(part: Part) -> tuple[str, ...]:
    match part:
        case Cut(name) | str(name):
            names: tuple[str, ...] = (name,)
        case FirstOf(names):
            pass
        case Each(name):
            names = (name,)
    return tuple(name.removesuffix(".weight") for name in names)
