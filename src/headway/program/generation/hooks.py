"""The hooks of a generation: what a program does before every pass, and between a row's logits and its draw (what other
engines call a logits processor).

Hooks run in the program, not in the engine: the device goes on with other programs' passes meanwhile. They may be
async functions. What one raises is raised by the step; the context then has the tokens that it had before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from headway.base.errors import InvalidInput, InvalidMask, WrongType
from headway.base.text import short_repr
from headway.program.draw import check_logits
from headway.program.generation.steps import Prepared
from headway.runtime.passes import Readout
from headway.runtime.readout import sample_row

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.generation.generator import Generation

PrepareHook: TypeAlias = Callable[[Prepared], Awaitable[None] | None]
# The second argument is the generation, or the beam: both have `context` and `generated`.
LogitsHook: TypeAlias = Callable[[np.ndarray, Any], Awaitable[np.ndarray | None] | np.ndarray | None]


@dataclass(frozen=True, eq=False)
class RunningBeam:
    """A beam of a search, as a `logits` hook sees it: its context, to be read or forked, and its tokens so far."""

    context: Context
    generated: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GenerationHooks:
    """`prepare` gets each pass before it is executed; `logits` gets a row's logits before a token is drawn."""

    prepare: PrepareHook | None
    logits: LogitsHook | None

    @classmethod
    def of(cls, prepare: object, logits: object) -> GenerationHooks | None:
        """From the arguments of `generate`; None without hooks."""
        for name, hook in (("prepare", prepare), ("logits", logits)):
            if hook is not None and not callable(hook):
                raise WrongType(f"{name} is {short_repr(hook)}; it must be a function, async or not")
        return None if prepare is None and logits is None else cls(prepare, logits)  # type: ignore[arg-type]

    async def before(self, prepared: Prepared) -> None:
        """Call the first hook."""
        if self.prepare is not None:
            await _awaited(self.prepare(prepared))

    async def token(
        self, logits: np.ndarray, drawn: int, readout: Readout, position: int, generation: Generation
    ) -> int:
        """The token of a row: `drawn` where the second hook leaves the logits as they are, else drawn from its own."""
        row = await changed_logits(self.logits, logits, generation)
        if np.array_equal(row, logits):
            return drawn
        allowed = readout.permitted()
        if allowed is not None and not (allowed & (row > -np.inf)).any():
            raise InvalidMask("the logits that the hook returned are -inf for every token that may come here")
        return sample_row(row, readout, position)


async def changed_logits(hook: LogitsHook | None, logits: np.ndarray, where: Generation | RunningBeam) -> np.ndarray:
    """The logits [V] that a hook makes of these, checked."""
    assert hook is not None
    given = logits.copy()
    found = await _awaited(hook(given, where))
    row = check_logits(given if found is None else found, "the logits that the hook returned")
    if row.shape != logits.shape:
        raise InvalidInput(
            f"the logits that the hook returned have shape {row.shape}; expected {logits.shape}, one for each token"
        )
    return row


async def _awaited(result: Any) -> Any:
    return await result if isawaitable(result) else result
