"""One step of a generation: the result, the step before it is taken, and the step in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from headway.base.dataclass import dataclass
from headway.base.errors import Closed
from headway.base.specs.probes import Value_co
from headway.program.output import Output, ProbeHandle, SampleHandle

if TYPE_CHECKING:
    from headway.program.execution import Execution
    from headway.program.forward import Forward

ProbeHandles: TypeAlias = ProbeHandle[Any] | tuple[ProbeHandle[Any], ...] | None  # of one probe, of several, of none


@dataclass(frozen=True)
class Step(Generic[Value_co]):
    """The tokens a step added, the text that became certain, what was probed, and why the generation ended, if so.

    `probes` has an entry for each row that the step has read, none where tokens were put in without a pass: the value
    of the probe, or, where `probe=` is a list, a tuple with the value of each.

    `retracted` is how many characters at the end of the text shown before no longer stand, because the program cut the
    context: delete them, then append `text`. `drafted` tokens were verified in this step and `accepted` of them kept.
    """

    tokens: tuple[int, ...]
    text: str
    probes: tuple[Value_co, ...] = ()
    finish: str | None = None
    retracted: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of_token(cls, token: int, text: str, retracted: int, probes: tuple[Any, ...] = ()) -> Step[Value_co]:
        """A step of one token; made for every token, so without the checks of a frozen dataclass's `__init__`."""
        step = object.__new__(cls)
        step.__dict__.update(tokens=(token,), text=text, retracted=retracted, probes=probes)
        return step


@dataclass(frozen=True, eq=False)
class Prepared(Generic[Value_co]):
    """A step that was not taken yet. `forward` is an ordinary pass that samples one token: add probes or masks to it.

    Then `await prepared.take()`. Or execute the pass yourself and hand `out.token(prepared.token)`, or any other token,
    to the generation's `accept`.
    """

    forward: Forward
    token: SampleHandle
    probe: ProbeHandles  # what `probe=` of the generation reads
    _mark: object = field(default=None, repr=False)  # the context it was prepared for
    _taken: Callable[[Prepared[Any]], Awaitable[Step[Any]]] | None = field(default=None, repr=False)

    async def take(self) -> Step[Value_co]:
        """Execute the pass and add the token it samples."""
        if self._taken is None:
            raise Closed("this step is taken by its generation, after the hook that was given it")
        return await self._taken(self)

    def execute(self) -> StepInFlight:
        """Submit the pass."""
        return StepInFlight(self.forward.execute(), self.token, self.probe)


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A step whose pass was submitted."""

    execution: Execution[Output]
    token: SampleHandle
    probe: ProbeHandles


def not_an_end() -> RuntimeError:
    """The error for a StopAsyncIteration that is not the generation's own: a loop would take it for the end."""
    return RuntimeError("a hook, constraint or mask rule of this generation raised StopAsyncIteration")


def probed(out: Output, handles: ProbeHandles) -> tuple[Any, ...]:
    """What the probes have read at one row: the entry of `Step.probes`, if there are any."""
    match handles:
        case None:
            return ()
        case ProbeHandle():
            return (read_probe(out, handles),)
        case _:
            return (tuple(read_probe(out, handle) for handle in handles),)


def read_probe(out: Output, handle: ProbeHandle[Any]) -> Any:
    """What a probe of any kind has read."""
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
            return value
    raise AssertionError(handle)
