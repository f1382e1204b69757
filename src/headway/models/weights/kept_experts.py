"""Experts that stay quantized on a device, as kernels read them; `kept_forms` says which do."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.host.quantized import GROUP
from headway.kernels.reference.quantized import tensor
from headway.models.families.family import Cut
from headway.models.files.codebooks import EXPONENTS
from headway.models.files.dequant import block_parts, packed_fp4
from headway.models.files.mxfp4_folder import KIND, Mxfp4Folder
from headway.models.files.weights import GgufWeights
from headway.models.quantized.fp4 import Fp4Experts
from headway.models.quantized.int_experts import SHARED, GroupedMatrix, IntExperts
from headway.models.weights.kept_forms import FORMS, stored_kind, weight_name
from headway.models.weights.roles import Roles
from headway.models.weights.shapes import layer_shapes

KeptExperts = Fp4Experts | IntExperts


def read_kept(roles: Roles, some: tuple[str, ...], layer: int, dtype: torch.dtype, device: torch.device) -> KeptExperts:
    """Experts' matrices that stay quantized, one below the other, without biases."""
    kind, gated = stored_kind(roles, some[0], layer), len(some) > 1
    assert kind is not None
    if kind != KIND:
        matrices = (GroupedMatrix.below(list(each)) for each in zip(*(_grouped(roles, r, layer, device) for r in some)))
        return IntExperts.of(FORMS[kind], matrices, dtype, gated=gated, exponent=EXPONENTS.get(kind, 0))
    found = [_packed(roles, role, layer, device) for role in some]
    codes, scales = (torch.cat(list(parts), 1) for parts in zip(*found, strict=True))
    return Fp4Experts.of(codes, scales, None, dtype, gated=gated)


def _raw(roles: Roles, role: str, layer: int, device: torch.device) -> Iterator[Tensor]:
    """The stored bytes of one role, expert by expert."""
    weights, shape = roles.weights, layer_shapes(roles.config, layer)[role]
    assert isinstance(weights, GgufWeights)
    for raw in weights.file.raw(roles.claim(weight_name(roles, role, layer), shape)).reshape(shape[0], -1):
        yield tensor(raw).to(device)


def _grouped(roles: Roles, role: str, layer: int, device: torch.device) -> Iterator[GroupedMatrix]:
    """The matrices of one role in integers, expert by expert."""
    kind, (_, n, k) = stored_kind(roles, role, layer), layer_shapes(roles.config, layer)[role]
    assert kind is not None
    for raw in _raw(roles, role, layer, device):
        parts = block_parts(kind, raw)
        stored = {"scale": parts.scale, "steps": parts.steps}
        stored |= {"minimum": parts.minimum, "minimum_steps": parts.minimum_steps}
        by_row: dict[str, Any] = {name: None if t is None else t.reshape(n, -1) for name, t in stored.items()}
        if parts.steps is None and parts.scale.numel() * GROUP < n * k:  # one for 256 inputs
            by_row["scale"] = parts.scale.reshape(n, -1).repeat_interleave(SHARED // GROUP, 1)
        yield GroupedMatrix(parts.quants.reshape(n, k), **by_row, zero=parts.zero)


def _packed(roles: Roles, role: str, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The codes [X, N, K / 2] and scales [X, N, K / 32] of one role in MXFP4."""
    part, weights = roles.part(role), roles.weights
    if isinstance(weights, GgufWeights):
        count, n, k = layer_shapes(roles.config, layer)[role]
        each = [packed_fp4(raw) for raw in _raw(roles, role, layer, device)]  # one at a time: it is read more than once
        codes, scales = (torch.stack(list(parts)) for parts in zip(*each, strict=True))
        return codes.view(count, n, k // 2), scales.view(count, n, k // GROUP)
    assert isinstance(weights, Mxfp4Folder)
    assert isinstance(part, Cut)
    count, k, n = whole = part.shape(roles.config)
    rows = part.take(np.arange(prod((count, n))).reshape(count, 1, n), roles.config).ravel()
    packed = weights.packed_rows(roles.claim(weight_name(roles, role, layer), whole), rows)
    codes, scales = (tensor(p).to(device) for p in packed)
    return codes.view(count, -1, k // 2), scales.view(count, -1, k // GROUP)
