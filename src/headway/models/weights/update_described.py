"""New weights for decoders of torch that are described: layers are made again from what is given, and the rest kept."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import Unsupported
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.layers import Linear, tensors_of
from headway.models.quantized.int_experts import IntExperts
from headway.models.weights.given import GivenRoles
from headway.models.weights.load_described import DescribedReader, described_layer
from headway.models.weights.shapes import model_shapes


def described(decoder: Decoder, given: GivenRoles) -> Decoder:
    """The decoder with these weights in place of its own."""
    reader = _GivenReader(given, decoder.dtype, decoder.device)
    outer: dict[str, Any] = {
        role: reader.read(role, shape, None)
        for role, shape in model_shapes(given.config).items()
        if given.has(role, shape, None)
    }
    if "embedding" in outer and decoder.output is decoder.embedding:
        outer["output"] = outer["embedding"]
    layers = [_layer(decoder, given, reader, i) for i in range(len(decoder.layers))]
    return replace(decoder, layers=tuple(layers), **outer)


def _layer(decoder: Decoder, given: GivenRoles, reader: _GivenReader, i: int) -> Any:
    old = decoder.layers[i]
    if not given.in_layer(i):
        return old
    new, there = described_layer(reader, i), described_layer(_GivenMask(reader), i)
    return _merged(old, new, there, i)


class _GivenReader:
    """Weights by role: those that are given, zeros for the others (`RoleReader`)."""

    def __init__(self, given: GivenRoles, dtype: torch.dtype, device: torch.device) -> None:
        self.given, self.config, self.dtype, self.device = given, given.config, dtype, device
        self.last: dict[str, Tensor] = {}
        self._files = DescribedReader(given.config, dtype, device, given.roles, keep_experts=False)

    def read(self, role: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        if self.given.has(role, shape, layer):
            return self._files.read(role, shape, layer)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def kept(self, roles: tuple[str, ...], layer: int) -> None:
        return None

    def frequencies(self) -> Tensor:
        raise AssertionError("they are not weights")


class _GivenMask:
    """In the place of every weight of a reader, which numbers of it are given: ones and zeros."""

    dtype = torch.uint8

    def __init__(self, reader: _GivenReader) -> None:
        self._given, self.device, self.last = reader.given, reader.device, dict[str, Tensor]()
        self.config: ModelConfig = reader.config

    def read(self, role: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        given = self._given.has(role, shape, layer)
        return torch.full(shape, int(given), dtype=torch.uint8, device=self.device)

    def kept(self, roles: tuple[str, ...], layer: int) -> None:
        return None

    def frequencies(self) -> Tensor:
        raise AssertionError("they are not weights")


def _quantized(old: Any, there: Linear, layer: int) -> Any:
    """A matrix that its file has quantized, of which nothing may be there."""
    if any(mask.any() for mask in tensors_of(there)):
        if isinstance(old, IntExperts):
            raise Unsupported(f"layer {layer} has {old.label}, which are not updated; leave out quantize=")
        raise Unsupported(
            f"layer {layer} has {old.label} as in its file, which cannot be made from floats; load a model of floats, "
            "or this one with dtype='float16'"
        )
    return old


def _merged(old: Any, new: Any, there: Any, layer: int) -> Any:
    """The old value with every number that is there from the new one."""
    if isinstance(new, Linear) and not isinstance(old, Linear):
        return _quantized(old, there, layer)
    if isinstance(new, Tensor):
        if not isinstance(old, Tensor):
            raise Unsupported(f"weights of layer {layer} are kept in a format that cannot be made from floats")
        if not there.any():
            return old
        return new if there.all() else torch.where(there.bool(), new, old)
    if isinstance(new, tuple):
        parts: Any = (old, new, there)
        return tuple(_merged(a, b, c, layer) for a, b, c in zip(*parts, strict=True))
    if is_dataclass(new) and not isinstance(new, type) and tensors_of(new):
        names = [each.name for each in fields(new)]
        merged = {n: _merged(getattr(old, n), getattr(new, n), getattr(there, n), layer) for n in names}
        return replace(old, **{name: part for name, part in merged.items() if part is not getattr(old, name)})
    return old
