"""Adapters as programs give them: one, one with a scale, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.base.checks import check_number
from headway.base.errors import InvalidInput, WrongType
from headway.base.specs.adapters import MAX_SCALE, AdapterMix
from headway.base.text import short_repr
from headway.models.adapters.adapter import Adapter
from headway.runtime.adapters import LoadedAdapter

if TYPE_CHECKING:
    from headway.program.engine import Engine

Scaled = tuple[Adapter, float]
AdapterArgument = Adapter | Scaled | Sequence[Adapter | Scaled] | AdapterMix  # a mix where it was read before


def mix_of(engine: Engine, given: AdapterArgument | None) -> AdapterMix | None:
    """The mix of an argument `adapter=`. It loads what is not loaded, so the caller must not hold the engine's lock."""
    if given is None or isinstance(given, AdapterMix):
        return given
    return AdapterMix.of(use_of(engine, adapter, scale) for adapter, scale in _scaled(given))


def use_of(engine: Engine, adapter: Adapter, scale: float) -> tuple[LoadedAdapter, float]:
    """One adapter, loaded, with its scale."""
    number = check_number(scale, "the scale of an adapter")
    if abs(number) > MAX_SCALE:
        raise InvalidInput(f"the scale of an adapter is {number:g}; it must be in [-{MAX_SCALE:g}, {MAX_SCALE:g}]")
    return engine._adapters.load(adapter), number


def _scaled(given: object) -> list[Scaled]:
    if isinstance(given, Adapter):
        return [(given, 1.0)]
    if _is_scaled(given):
        return [given]  # type: ignore[list-item]
    if not isinstance(given, list | tuple):
        raise WrongType(
            f"adapter is {short_repr(given)}; give hw.Adapter.load(folder), a pair with its scale, or a list of these"
        )
    return [(one, 1.0) if isinstance(one, Adapter) else _pair(one) for one in given]


def _is_scaled(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and not isinstance(given[1], Adapter | tuple)


def _pair(given: object) -> Scaled:
    if not _is_scaled(given):
        raise WrongType(f"{short_repr(given)} is not an adapter, nor a pair of an adapter and its scale")
    return given  # type: ignore[return-value]
