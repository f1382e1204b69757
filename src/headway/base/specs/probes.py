"""Probe specs: what to read at a row without choosing a token. They are checked when created.

Only what is wrong for any model is refused here; token ids and layers are checked when a pass is built. A probe sees
the model's raw logits unless it has `masked=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from headway.base.checks import check_flag, check_integer, check_list, check_number, check_token_id
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import TypeVar as TypeVarWithDefault

    Array: TypeAlias = np.ndarray
    Value_co = TypeVarWithDefault("Value_co", covariant=True, default=Any)
else:  # typing has defaults from Python 3.13, and numpy need not be installed
    Array = Any
    Value_co = TypeVar("Value_co", covariant=True)

REDUCTIONS = (None, "mean", "max")


class ProbeOf(Generic[Value_co]):
    """A probe whose value has this type. What `ctx.generate(probe=...)` gives back is typed by it."""


class Rank(NamedTuple):
    """One token's log-probability (nats, -inf if impossible) and its rank; the likeliest has rank 1."""

    id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class Ranked:
    """The result of a `Ranking`: the sampled tokens in the order of their samplers, those of `ids`, and the likeliest.

    Impossible tokens are left out of the likeliest.
    """

    drawn: tuple[Rank, ...]
    ids: tuple[Rank, ...]
    best: tuple[Rank, ...]


@dataclass(frozen=True)
class Logits(ProbeOf[Array]):
    """The row's V logits, float32."""

    masked: bool = False

    def __post_init__(self) -> None:
        _set(self, masked=check_flag(self.masked, "masked"))


@dataclass(frozen=True)
class Distribution(ProbeOf[tuple[Array, Array]]):
    """The `k` likeliest tokens and their probabilities at this temperature; `k=0` is the whole vocabulary."""

    temperature: float = 1.0
    k: int = 0
    masked: bool = False

    def __post_init__(self) -> None:
        if (temperature := check_number(self.temperature, "temperature")) <= 0:
            raise InvalidInput(
                f"temperature is {temperature}; it must be above 0 for a distribution (Argmax() reads the top token)"
            )
        _set(self, temperature=temperature, k=check_integer(self.k, "k"))
        _set(self, masked=check_flag(self.masked, "masked"))


@dataclass(frozen=True)
class Logprob(ProbeOf[Array]):
    """The log-probability (nats) of one token."""

    id: int
    masked: bool = False

    def __post_init__(self) -> None:
        _set(self, id=check_token_id(self.id, "id"), masked=check_flag(self.masked, "masked"))


@dataclass(frozen=True)
class Logprobs(ProbeOf[Array]):
    """The log-probabilities (nats) of several tokens, in the order given."""

    ids: Iterable[int]
    masked: bool = False

    def __post_init__(self) -> None:
        _set(self, ids=_listed(self.ids, "ids", check_token_id), masked=check_flag(self.masked, "masked"))


@dataclass(frozen=True)
class Entropy(ProbeOf[float]):
    """The entropy of the row's distribution, in nats."""

    masked: bool = False

    def __post_init__(self) -> None:
        _set(self, masked=check_flag(self.masked, "masked"))


@dataclass(frozen=True)
class Hidden(ProbeOf[Array]):
    """The hidden state that enters layer `layer`; 0 is the embedding, the number of layers is after the final norm."""

    layer: int

    def __post_init__(self) -> None:
        _set(self, layer=check_integer(self.layer, "layer"))


@dataclass(frozen=True)
class AttentionScores(ProbeOf[Array]):
    """The row's attention to each slot in a layer, per head or reduced over heads."""

    layer: int
    reduce: Literal["mean", "max"] | None = None

    def __post_init__(self) -> None:
        if not (self.reduce is None or isinstance(self.reduce, str)):
            raise WrongType(f"reduce is {short_repr(self.reduce)}; it must be None, 'mean' or 'max'")
        if self.reduce not in REDUCTIONS:
            raise InvalidInput(f"reduce is {short_repr(self.reduce)}; it must be None, 'mean' or 'max'")
        _set(self, layer=check_integer(self.layer, "layer"))


@dataclass(frozen=True)
class Ranking(ProbeOf[Ranked]):
    """Ranks of tokens at the row: those its samplers draw, `ids`, and the `k` likeliest (0 for none).

    `processed` ranks them as the row's first sampler sees them: after mask, bias, penalties, temperature and filters
    (at temperature 0, before the last two); without it, by the model's raw logits.
    """

    k: int = 0
    ids: Iterable[int] = ()
    processed: bool = False

    def __post_init__(self) -> None:
        flag = check_flag(self.processed, "processed")
        _set(self, k=check_integer(self.k, "k"), ids=_listed(self.ids, "ids", check_token_id), processed=flag)


@dataclass(frozen=True)
class LogitLens(ProbeOf[list[tuple[Array, Array]]]):
    """Per layer, the `k` likeliest tokens if the model ended there; `k=0` is the whole vocabulary."""

    layers: Iterable[int]
    k: int

    def __post_init__(self) -> None:
        _set(self, layers=_listed(self.layers, "layers", check_integer), k=check_integer(self.k, "k"))


Probe: TypeAlias = Logits | Distribution | Logprob | Logprobs | Entropy | Ranking | Hidden | AttentionScores | LogitLens


def _set(probe: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(probe, name, value)


def _listed(values: Any, name: str, check: Callable[[Any, str], int]) -> tuple[int, ...]:
    listed = check_list(values, name, "a list of integers")
    return tuple(check(value, f"{name}[{index}]") for index, value in enumerate(listed))
