"""Sampler specs: how to choose a token. They are checked when created.

`Argmax`, `Multinomial`, `TopK`, `TopP`, `MinP`, `TopKTopP` and `Typical` are short forms of `Sampling`, which has every
parameter; `resolve` converts them to it. Nothing here draws: that is `kernels/reference/sampling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from headway.base.checks import as_integer, check_number, check_token_id, number_array
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.specs.bias import DenseBias
from headway.base.specs.generation import PARAMETERS
from headway.base.specs.logits_rules import BREAKERS, LogitsRuleValues, check_breakers
from headway.base.specs.logits_rules import NAMES as RULES
from headway.base.specs.logits_rules import OFF as RULES_OFF
from headway.base.text import short_repr

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

NO_TOKEN, UNDECIDED = -1, -2  # in the place of a sampled token: its logits are not numbers; the fast path cannot tell


@dataclass(frozen=True)
class Argmax:
    """The likeliest token; ties go to the lowest id."""


@dataclass(frozen=True)
class Multinomial:
    """Any token, by its probability at this temperature."""

    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _set_checked(self)


@dataclass(frozen=True)
class TopK:
    """One of the `k` likeliest tokens."""

    k: int
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _set_checked(self, k=_count(self.k))


@dataclass(frozen=True)
class TopP:
    """One of the smallest set of tokens whose probabilities reach `p`."""

    p: float
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _set_checked(self, p=_share(self.p))


@dataclass(frozen=True)
class MinP:
    """One of the tokens at least `p` times as likely as the likeliest."""

    p: float
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _set_checked(self, p=PARAMETERS["min_p"].check(self.p, "p"))


@dataclass(frozen=True)
class TopKTopP:
    """Of the `k` likeliest tokens, one of the smallest set that reaches `p` of their probability."""

    k: int
    p: float
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _set_checked(self, k=_count(self.k), p=_share(self.p))


@dataclass(frozen=True)
class Typical:
    """One of the tokens whose surprise is nearest the entropy, the smallest set that reaches `p`."""

    p: float
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _set_checked(self, p=_share(self.p))


@dataclass(frozen=True)
class Sampling:
    """Every sampling parameter. The defaults turn each one off; `temperature=0` is argmax.

    `logit_bias` has a number for some tokens, or is an array with one for every token; -inf there rules a token out.
    Order: logit mask, `logit_bias`, penalties (repetition, then presence and frequency), temperature, `top_k`,
    `top_p`, `min_p`, `typical_p`, `epsilon_cutoff`, `eta_cutoff`; each filter works on the renormalized rest.

    DRY, XTC and mirostat come before all of these. They are rules of a generation: it and a chat take them,
    and a draw at a row of one pass does not.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | np.ndarray | None = None
    seed: int | None = None
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Iterable[str] = RULES_OFF.dry_sequence_breakers
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    def __post_init__(self) -> None:
        breakers = self.dry_sequence_breakers
        if breakers is not RULES_OFF.dry_sequence_breakers:
            breakers = check_breakers(breakers)
        _set_checked(self, logit_bias=_bias(self.logit_bias), **{BREAKERS: breakers})

    @property
    def rules(self) -> LogitsRuleValues:
        """The parameters of DRY, XTC and mirostat."""
        return LogitsRuleValues(**{name: getattr(self, name) for name in RULES})

    @property
    def has_rules(self) -> bool:
        """Whether DRY, XTC or mirostat is on, so that it needs a sequence to follow."""
        return bool(self.dry_multiplier or self.xtc_probability or self.mirostat)

    def without_rules(self) -> Sampling:
        """The same without DRY, XTC and mirostat."""
        if self.rules == RULES_OFF:
            return self
        return replace(self, **{name: getattr(RULES_OFF, name) for name in RULES})

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as (id, bias) pairs in id order; none where it is an array."""
        return self.logit_bias if isinstance(self.logit_bias, tuple) else ()

    @property
    def dense_bias(self) -> np.ndarray | None:
        """`logit_bias` as an array [V], where it was given as one."""
        return self.logit_bias.array if isinstance(self.logit_bias, DenseBias) else None

    @property
    def filters_rarely(self) -> bool:
        """Whether a filter is on that only the reference sampler has."""
        return (self.typical_p, self.epsilon_cutoff, self.eta_cutoff) != (1.0, 0.0, 0.0)

    @property
    def penalizes(self) -> bool:
        """Whether any penalty is on, so that the tokens seen so far matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


Sampler: TypeAlias = Argmax | Multinomial | TopK | TopP | MinP | TopKTopP | Typical | Sampling


def resolve(sampler: Sampler) -> Sampling:
    """Any sampler as a `Sampling`."""
    match sampler:
        case Sampling():
            return sampler
        case Argmax():
            return Sampling(temperature=0.0)
        case Multinomial(temperature, seed):
            return Sampling(temperature, seed=seed)
        case TopK(k, temperature, seed):
            return Sampling(temperature, top_k=k, seed=seed)
        case TopP(p, temperature, seed):
            return Sampling(temperature, top_p=p, seed=seed)
        case MinP(p, temperature, seed):
            return Sampling(temperature, min_p=p, seed=seed)
        case TopKTopP(k, p, temperature, seed):
            return Sampling(temperature, top_k=k, top_p=p, seed=seed)
        case Typical(p, temperature, seed):
            return Sampling(temperature, typical_p=p, seed=seed)
    name = sampler.__name__ if isinstance(sampler, type) else None
    hint = f"an instance, {name}(...)" if name else "one of Argmax(), TopP(0.9), Sampling(...)"
    raise WrongType(f"{short_repr(sampler)} is not a sampler; use {hint}")


def _set_checked(sampler: Any, **checked: Any) -> None:
    """Write checked values into a frozen sampler; the table checks those that have its names."""
    for field in fields(sampler):
        parameter, value = PARAMETERS.get(field.name), getattr(sampler, field.name)
        if field.name not in checked and parameter is not None and not (field.name == "seed" and value is None):
            checked[field.name] = parameter.check(value)
    for name, value in checked.items():
        object.__setattr__(sampler, name, value)


def _share(value: Any) -> float:
    return PARAMETERS["top_p"].check(value, "p")


def _count(value: Any) -> int:
    if (number := as_integer(value, "k")) < 1:
        raise InvalidInput(f"k is {number}; it must be an integer of at least 1 (Multinomial() keeps every token)")
    return number


def bias_array(value: Any, name: str, vocab: int | None = None) -> np.ndarray:
    """An array of biases, one for each of `vocab` tokens, as float64 that nobody changes; -inf rules a token out."""
    array = number_array(value, name)
    if array.ndim != 1 or (vocab is not None and array.size != vocab):
        wanted = "one number for every token" if vocab is None else f"({vocab},), one number for every token"
        raise InvalidInput(f"{name} has shape {array.shape}; expected {wanted}")
    array = array.astype(np.float64)
    if np.isnan(array).any() or (array == np.inf).any():
        worst = int(np.flatnonzero(np.isnan(array) | (array == np.inf))[0])
        raise InvalidInput(f"{name} is {array[worst]} at token {worst}; it must be a number, or -inf to rule it out")
    array.flags.writeable = False
    return array


def _bias(value: Any) -> tuple[tuple[int, float], ...] | DenseBias:
    """(id, bias) pairs in id order, from a mapping, pairs or None; or a bias for every token, from an array."""
    if value is None:
        return ()
    if isinstance(value, DenseBias):
        return value
    if hasattr(value, "dtype") and getattr(value, "ndim", 0) >= 1:
        return DenseBias(bias_array(value, "logit_bias"))
    if isinstance(value, (str, bytes, type)) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0:
        raise WrongType(f"logit_bias is {short_repr(value)}; it must be a mapping from token id to number")
    pairs = {}
    for pair in value.items() if isinstance(value, Mapping) else value:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WrongType(
                f"logit_bias has {short_repr(pair)}; "
                "it must be a mapping from token id to number, or (id, number) pairs"
            )
        token = check_token_id(pair[0], "a token id in logit_bias")
        if token in pairs:
            raise InvalidInput(f"logit_bias has token {token} twice; give each token one number")
        pairs[token] = check_number(pair[1], f"logit_bias of token {token}")
    return tuple(sorted(pairs.items()))
