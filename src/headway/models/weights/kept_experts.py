"""Experts that stay quantized on a device: which weights of a file do, and their codes and scales as kernels read them.

A folder's and a GGUF file's experts in MXFP4 stay so, but for float16, which cannot hold every scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import torch
from torch import Tensor

from headway.kernels.host.quantized import GROUP
from headway.kernels.reference.quantized import tensor
from headway.models.families.family import Cut, Each, FirstOf
from headway.models.files.dequant import packed_fp4
from headway.models.files.mxfp4_folder import KIND, Mxfp4Folder
from headway.models.files.weights import GgufWeights
from headway.models.quantized.fp4 import Fp4Experts
from headway.models.weights.roles import Roles
from headway.models.weights.shapes import has_experts, layer_shapes

EXPERTS = (("expert_gate", "expert_up"), ("expert_down",))  # roles whose matrices are one operand


def kept_kind(roles: Roles, some: tuple[str, ...], layer: int, dtype: str) -> str | None:
    """The format in which experts' matrices stay where floats are of this type; None if they become floats."""
    kinds = {_stored(roles, role, layer) for role in some}
    return KIND if kinds == {KIND} and dtype != "float16" else None


def kept_names(roles: Roles, dtype: str) -> Iterator[tuple[str, str]]:
    """The names of all weights that stay quantized, each once, and their formats."""
    names: dict[str, str] = {}
    for layer in range(roles.config.layers):
        if not has_experts(roles.config, layer):
            continue
        for some in EXPERTS:
            if (kind := kept_kind(roles, some, layer, dtype)) is not None:
                names |= {_name(roles, role, layer): kind for role in some}
    yield from names.items()


def read_kept(roles: Roles, some: tuple[str, ...], layer: int, dtype: torch.dtype, device: torch.device) -> Fp4Experts:
    """Experts' matrices that stay in MXFP4, one below the other, without biases."""
    found = [_packed(roles, role, layer, device) for role in some]
    codes, scales = (torch.cat(list(parts), 1) for parts in zip(*found, strict=True))
    return Fp4Experts.of(codes, scales, None, dtype, gated=len(some) > 1)


def _name(roles: Roles, role: str, layer: int) -> str:
    part, at = roles.part(role), roles.layer(layer)
    assert not isinstance(part, Each)
    return roles.name(at, part) if isinstance(part, str | FirstOf) else at + part.name


def _stored(roles: Roles, role: str, layer: int) -> str | None:
    """The type of a weight that holds the matrices of all experts, whole."""
    part, weights = roles.part(role), roles.weights
    if isinstance(part, Cut) == isinstance(weights, GgufWeights) or isinstance(part, Each):
        return None
    return weights.stored(_name(roles, role, layer))


def _packed(roles: Roles, role: str, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The codes [X, N, K / 2] and scales [X, N, K / 32] of one role."""
    name, part, weights = _name(roles, role, layer), roles.part(role), roles.weights
    if isinstance(weights, GgufWeights):
        count, n, k = shape = layer_shapes(roles.config, layer)[role]
        raw = weights.file.raw(roles.claim(name, shape)).reshape(count, -1)
        each = [packed_fp4(tensor(raw[i]).to(device)) for i in range(count)]  # one at a time: it is read more than once
        codes, scales = (torch.stack(list(parts)) for parts in zip(*each, strict=True))
        return codes.view(count, n, k // 2), scales.view(count, n, k // GROUP)
    assert isinstance(weights, Mxfp4Folder)
    assert isinstance(part, Cut)
    count, k, n = whole = part.shape(roles.config)
    rows = part.take(np.arange(prod((count, n))).reshape(count, 1, n), roles.config).ravel()
    codes, scales = (tensor(p).to(device) for p in weights.packed_rows(roles.claim(name, whole), rows))
    return codes.view(count, -1, k // 2), scales.view(count, -1, k // GROUP)
