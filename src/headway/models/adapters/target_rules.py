"""Which modules a PEFT config targets: names, patterns, layers; and how long its patterns may take.

A pattern is somebody else's: one that backtracks could hold the interpreter for hours.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.base.specs.adapters import OUTSIDE
from headway.base.text import short_repr
from headway.models.adapters.modules import HEADS

MAX_STEPS = 100_000_000  # of one match, at worst
MAX_SECONDS = 3.0  # of the processor, for all matches of an adapter
Result = TypeVar("Result")
REPEATS = re.compile(r"[*+]|\{\d*,\d*\}")


class Patterns:
    """Matches the patterns of one config, with an end to it."""

    def __init__(self, where: str) -> None:
        self._where, self._spent = where, 0.0

    def match(self, pattern: str, module: str) -> re.Match[str] | None:
        """What `re.match` finds. Raises where it could take too long, or all of them have."""
        repeats = len(REPEATS.findall(pattern))
        if math.comb(len(module) + repeats, repeats) > MAX_STEPS:
            raise Unsupported(
                f"{self._where} has the pattern {short_repr(pattern)}, which repeats {repeats} times and could take "
                f"for ever on a name of {len(module)} characters, {short_repr(module)}: list the modules"
            )
        return self._timed(lambda: re.match(pattern, module))

    def compile(self, pattern: str) -> None:
        """Raise `re.error` unless it is a pattern."""
        self._timed(lambda: re.compile(pattern))

    def names(self, names: str | tuple[str, ...], module: str) -> bool:
        """Whether names, or a pattern of the whole name, mean a module."""
        if isinstance(names, str):
            return self.match(rf"(?:{names})\Z", module) is not None
        return module in names or any(module.endswith(f".{name}") for name in names)

    def key_of(self, keys: Iterable[str], module: str) -> str:
        """The first pattern that a module's name ends with, or its name."""
        return next((key for key in keys if self.match(rf"(.*\.)?({key})$", module)), module)

    def _timed(self, work: Callable[[], Result]) -> Result:
        start = time.thread_time()
        result = work()
        self._spent += time.thread_time() - start
        if self._spent > MAX_SECONDS:
            raise Unsupported(
                f"{self._where} has patterns that take more than {MAX_SECONDS:g} seconds on its modules' names; list "
                "the modules"
            )
        return result


@dataclass(frozen=True, eq=False)
class TargetRules:
    """Which modules the config says have LoRA, by PEFT's rules."""

    modules: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    place: str = "model.layers."  # what the tensors' names have before the number of a layer

    def name(self, layer: int, module: str) -> str:
        """What a module of a layer, or one outside of them, is called in full."""
        if layer == OUTSIDE:
            return self.place.removesuffix("layers.") + module
        return f"{self.place}{layer}.{module}"

    def has_parameter(self, name: str) -> bool:
        """Whether a parameter, such as `model.layers.0.mlp.experts.down_proj`, has LoRA; `weight` may be left out."""
        return any(f".{each}".endswith(f".{key}") for key in self.parameters for each in (name, f"{name}.weight"))

    def has(self, module: str, patterns: Patterns) -> bool:
        """Whether a module, such as `model.layers.0.mlp.up_proj`, has LoRA."""
        if self.has_parameter(f"{module}.weight"):
            return True
        if patterns.names(self.excluded, module):
            return False
        if isinstance(self.modules, str):
            if self.modules.lower() == "all-linear":
                return module not in HEADS  # which PEFT does not count among them
            return patterns.names(self.modules, module)
        if module in self.modules:
            return True
        if not patterns.names(self.modules, module):
            return False
        return self.layers is None or self._layer(module, patterns) in self.layers

    def _layer(self, module: str, patterns: Patterns) -> int | None:
        """The number of the module's layer, where `layers_pattern` says layers are."""
        own = [rf"(?:^|.*?\.){p}\.(?P<number>\d+)\." for p in self.layers_patterns]
        for pattern in own or [r".*?\.[^.]*\.(?P<number>\d+)\."]:
            if (match := patterns.match(pattern, module)) is not None:
                return int(match["number"])
        return None
