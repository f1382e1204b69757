"""The parameters of DRY, XTC and mirostat, checked together. What they do is in `program/generation/logits_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.base.checks import check_list
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.specs.generation import PARAMETERS
from headway.base.text import short_repr

MAX_BREAKERS, MAX_BREAKER = 64, 40  # texts, and the characters of one
NUMBERS = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta"),
)
BREAKERS = "dry_sequence_breakers"
NAMES = (*NUMBERS, BREAKERS)
SWITCHES = {"dry": "dry_multiplier", "xtc": "xtc_probability", "mirostat": "mirostat"}


@dataclass(frozen=True)
class LogitsRuleValues:
    """The parameters of all three, checked; the defaults turn them off."""

    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    @classmethod
    def of(cls, given: Mapping[str, Any], base: LogitsRuleValues | None = None) -> LogitsRuleValues:
        """From the parameters that were given, by name, and a base for the others.

        Raises for one that has no effect because its rule is off.
        """
        base = cls() if base is None else base
        values = {name: PARAMETERS[name].check(given[name]) for name in NUMBERS if given.get(name) is not None}
        if (texts := given.get(BREAKERS)) is not None:
            values[BREAKERS] = check_breakers(texts)
        for rule, switch in SWITCHES.items():
            idle = [name for name in values if name.startswith(rule) and name != switch]
            if idle and switch not in values and not getattr(base, switch):
                raise InvalidInput(f"{idle[0]} is {short_repr(values[idle[0]])} without {switch}, which turns it on")
        return replace(base, **values)

    @property
    def is_off(self) -> bool:
        return not (self.dry_multiplier or self.xtc_probability or self.mirostat)


OFF = LogitsRuleValues()


def check_breakers(texts: Any) -> tuple[str, ...]:
    """Texts that no repeated sequence goes across."""
    listed = [texts] if isinstance(texts, str) else check_list(texts, BREAKERS, "a list of texts")
    if not all(isinstance(text, str) for text in listed):
        raise WrongType(f"{BREAKERS} is {short_repr(texts)}; it must be a list of texts")
    if len(listed) > MAX_BREAKERS or not all(0 < len(text) <= MAX_BREAKER for text in listed):
        raise InvalidInput(f"{BREAKERS} must be at most {MAX_BREAKERS} texts of 1 to {MAX_BREAKER} characters")
    return tuple(listed)
