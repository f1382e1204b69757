"""The output of a pass, read through typed handles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.specs.probes import (
    AttentionScores,
    Distribution,
    Entropy,
    Hidden,
    LogitLens,
    Logits,
    Logprob,
    Logprobs,
    Probe,
    Ranked,
    Ranking,
)
from headway.runtime.passes import PassResult, PassStats

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

P_co = TypeVar("P_co", bound=Probe, covariant=True)


@dataclass(frozen=True, eq=False)
class SampleHandle:
    """Names the tokens that one `sample` call draws."""

    owner: object
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class ProbeHandle(Generic[P_co]):
    """Names what one `probe` call reads; its type says which method of `Output` reads it."""

    owner: object
    first: int
    probe: P_co


class Output:
    """The results of one pass. A handle of another kind reads as None; a handle of another pass raises."""

    def __init__(self, owner: object, result: PassResult) -> None:
        self._owner, self._result = owner, result

    def __repr__(self) -> str:
        stats = self.stats
        return f"<Output: {len(self._result.values)} values of {stats.rows} rows, {1e3 * stats.seconds:.1f} ms>"

    @property
    def stats(self) -> PassStats:
        """Rows, pages, pages trimmed, cache hits, batch size, time, seeds used."""
        return self._result.stats

    def token(self, handle: SampleHandle) -> int:
        """The one token of a handle."""
        tokens = self.tokens(handle)
        if tokens is not None and len(tokens) != 1:
            raise InvalidInput(f"this handle names {len(tokens)} tokens; read them with out.tokens(handle)")
        return tokens[0] if tokens is not None else None  # type: ignore[return-value]

    def tokens(self, handle: SampleHandle) -> list[int]:
        """The tokens of a handle, one for each row it was given."""
        if not self._mine(handle) or not isinstance(handle, SampleHandle):
            return None  # type: ignore[return-value]
        return [int(v) for v in self._result.values[handle.first : handle.first + handle.count]]  # type: ignore[call-overload]

    def distribution(self, handle: ProbeHandle[Distribution]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and probabilities, likeliest first."""
        return self._value(handle, Distribution)

    def logits(self, handle: ProbeHandle[Logits]) -> np.ndarray:
        """The V logits, float32; `bytes()` of the array is the raw form."""
        return self._value(handle, Logits)

    def logprobs(self, handle: ProbeHandle[Logprob] | ProbeHandle[Logprobs]) -> np.ndarray:
        """Log-probabilities in nats, one for each id the probe named."""
        return self._value(handle, Logprob, Logprobs)

    def entropy(self, handle: ProbeHandle[Entropy]) -> float:
        """The entropy in nats."""
        return self._value(handle, Entropy)

    def ranking(self, handle: ProbeHandle[Ranking]) -> Ranked:
        """The ranks of tokens: those drawn, those named, the likeliest."""
        return self._value(handle, Ranking)

    def hidden(self, handle: ProbeHandle[Hidden]) -> np.ndarray:
        """A hidden state [E], float32."""
        return self._value(handle, Hidden)

    def attention(self, handle: ProbeHandle[AttentionScores]) -> np.ndarray:
        """Attention probabilities, [H, slots] or [slots] when reduced; 0 where masked."""
        return self._value(handle, AttentionScores)

    def lens(self, handle: ProbeHandle[LogitLens]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and probabilities for each layer of the probe, likeliest first."""
        return self._value(handle, LogitLens)

    def _value(self, handle: object, *kinds: type) -> Any:
        if not self._mine(handle) or not isinstance(handle, ProbeHandle) or not isinstance(handle.probe, kinds):
            return None
        return self._result.values[handle.first]

    def _mine(self, handle: object) -> bool:
        if not isinstance(handle, SampleHandle | ProbeHandle):
            return False
        if handle.owner is not self._owner:
            raise InvalidInput(
                "this handle belongs to another pass; read it from the output of the pass that it was created by"
            )
        return True
