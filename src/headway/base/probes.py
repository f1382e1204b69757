"""What people ask about a row without choosing a token: probe values, checked when they are made.

Token ids and layers are checked against the model where the probe meets it; here only what is wrong for any model is
refused. A probe sees the model's own logits unless it says `masked=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from headway.base.checks import check_integer, check_list, check_number, check_token_id
from headway.base.errors import InvalidInput, WrongType

REDUCTIONS = (None, "mean", "max")


@dataclass(frozen=True)
class Rank:
    """Where one token stands: its log-probability (nats, -inf when it cannot come); the likeliest has the rank 1."""

    id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class Ranked:
    """What a `Ranking` found: the drawn tokens in the order of their samplers, those of `ids`, and the likeliest.

    Of the likeliest, those that cannot come are left out.
    """

    drawn: tuple[Rank, ...]
    ids: tuple[Rank, ...]
    best: tuple[Rank, ...]


@dataclass(frozen=True)
class Logits:
    """The row's V logits, float32."""

    masked: bool = False

    def __post_init__(self) -> None:
        _settle(self, masked=_flag(self.masked))


@dataclass(frozen=True)
class Distribution:
    """The `k` likeliest tokens and their probabilities at this temperature; `k=0` is the whole vocabulary."""

    temperature: float = 1.0
    k: int = 0
    masked: bool = False

    def __post_init__(self) -> None:
        if (temperature := check_number(self.temperature, "temperature")) <= 0:
            raise InvalidInput(
                f"temperature is {temperature}; a distribution needs one above 0 (Argmax() reads the top token)"
            )
        _settle(self, temperature=temperature, k=check_integer(self.k, "k"), masked=_flag(self.masked))


@dataclass(frozen=True)
class Logprob:
    """The log-probability (nats) of one token."""

    id: int
    masked: bool = False

    def __post_init__(self) -> None:
        _settle(self, id=check_token_id(self.id, "id"), masked=_flag(self.masked))


@dataclass(frozen=True)
class Logprobs:
    """The log-probabilities (nats) of several tokens, in the order given."""

    ids: Iterable[int]
    masked: bool = False

    def __post_init__(self) -> None:
        _settle(self, ids=_listed(self.ids, "ids", check_token_id), masked=_flag(self.masked))


@dataclass(frozen=True)
class Entropy:
    """The entropy of the row's distribution, in nats."""

    masked: bool = False

    def __post_init__(self) -> None:
        _settle(self, masked=_flag(self.masked))


@dataclass(frozen=True)
class Hidden:
    """The hidden state that enters layer `layer`: 0 is the embedding, the last is after the final norm."""

    layer: int

    def __post_init__(self) -> None:
        _settle(self, layer=check_integer(self.layer, "layer"))


@dataclass(frozen=True)
class AttentionScores:
    """How much the row attends to each slot in a layer: one line per head, or their `reduce`d one."""

    layer: int
    reduce: Literal["mean", "max"] | None = None

    def __post_init__(self) -> None:
        if not (self.reduce is None or isinstance(self.reduce, str)):
            raise WrongType(f"reduce is {self.reduce!r}; expected None, 'mean' or 'max'")
        if self.reduce not in REDUCTIONS:
            raise InvalidInput(f"reduce is {self.reduce!r}; it must be None, 'mean' or 'max'")
        _settle(self, layer=check_integer(self.layer, "layer"))


@dataclass(frozen=True)
class Ranking:
    """Where tokens stand at the row: those that its samplers draw, `ids`, and the `k` likeliest (0 for none of these).

    `processed` ranks them as the row's first sampler does, behind its mask, bias, penalties, temperature and filters
    (at temperature 0, where one token takes all, in front of the last two); without it by the model's own logits.
    """

    k: int = 0
    ids: Iterable[int] = ()
    processed: bool = False

    def __post_init__(self) -> None:
        flag = _flag(self.processed, "processed")
        _settle(self, k=check_integer(self.k, "k"), ids=_listed(self.ids, "ids", check_token_id), processed=flag)


@dataclass(frozen=True)
class LogitLens:
    """Per layer, the `k` likeliest tokens if the model ended there; `k=0` is the whole vocabulary."""

    layers: Iterable[int]
    k: int

    def __post_init__(self) -> None:
        _settle(self, layers=_listed(self.layers, "layers", check_integer), k=check_integer(self.k, "k"))


Probe: TypeAlias = Logits | Distribution | Logprob | Logprobs | Entropy | Ranking | Hidden | AttentionScores | LogitLens


def _settle(probe: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(probe, name, value)


def _flag(value: Any, name: str = "masked") -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise WrongType(f"{name} is {value!r}; expected True or False")
    return bool(value)


def _listed(values: Any, name: str, check: Callable[[Any, str], int]) -> tuple[int, ...]:
    listed = check_list(values, name, "a list of integers")
    return tuple(check(value, f"{name}[{index}]") for index, value in enumerate(listed))
