"""One step of a generation: the result, the step before it is taken, and the step in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from headway.program.forward import Execution, Forward
from headway.program.output import Output, ProbeHandle, SampleHandle


@dataclass(frozen=True)
class Step:
    """The tokens a step added, the text that became certain, its probe's values, and why the generation ended, if so.

    `retracted` is how many characters at the end of the text shown before no longer stand, because the program cut the
    context: delete them, then append `text`.
    """

    tokens: tuple[int, ...]
    text: str
    probes: tuple[Any, ...] = ()
    finish: str | None = None
    retracted: int = 0

    @classmethod
    def of_token(cls, token: int, text: str, retracted: int) -> Step:
        """A step of one token; made for every token, so without the checks of a frozen dataclass's `__init__`."""
        step = object.__new__(cls)
        step.__dict__.update(tokens=(token,), text=text, retracted=retracted)
        return step


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step that was not taken yet. `forward` is an ordinary pass that samples one token: add probes or masks to it.

    Then `await prepared.take()`. Or execute the pass yourself and hand `out.token(prepared.token)`, or any other token,
    to the generation's `accept`.
    """

    forward: Forward
    token: SampleHandle
    probe: ProbeHandle[Any] | None  # what `probe=` of the generation reads
    mark: object = field(default=None, repr=False)  # the context it was prepared for
    taken: Callable[[Prepared], Awaitable[Step]] | None = field(default=None, repr=False)

    async def take(self) -> Step:
        """Execute the pass and add the token it samples."""
        assert self.taken is not None
        return await self.taken(self)

    def execute(self) -> StepInFlight:
        """Submit the pass."""
        return StepInFlight(self.forward.execute(), self.token, self.probe)


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A step whose pass was submitted."""

    execution: Execution[Output]
    token: SampleHandle
    probe: ProbeHandle[Any] | None


def probed(out: Output, handle: ProbeHandle[Any] | None) -> tuple[Any, ...]:
    """What a probe of any kind has read."""
    if handle is None:
        return ()
    readers = (
        out.distribution,
        out.logits,
        out.logprobs,
        out.entropy,
        out.ranking,
        out.hidden,
        out.attention,
        out.lens,
    )
    for reader in readers:
        value = reader(handle)
        if value is not None:
            return (value,)
    raise AssertionError(handle)
