"""The hooks of a generation: what a program does before every pass, and between a row's logits and its draw (what other
engines call a logits processor).

Hooks run in the program, not in the engine: the device goes on with other programs' passes meanwhile. They may be
async functions. What one raises is raised by the step; the context then has the tokens that it had before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, InvalidMask, WrongType
from headway.base.text import short_repr
from headway.program.draw import check_logits
from headway.program.generation.steps import Prepared
from headway.runtime.passes import Readout
from headway.runtime.readout import sample_row

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.generation.generator import Generation
    from headway.program.generation.logits_rules import LogitsRules

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
    rules: LogitsRules | None = None  # DRY, XTC and mirostat, before it

    @classmethod
    def of(cls, prepare: object, logits: object, rules: LogitsRules | None = None) -> GenerationHooks | None:
        """From the arguments of `generate`; None without hooks."""
        for name, hook in (("prepare", prepare), ("logits", logits)):
            if hook is not None and not callable(hook):
                raise WrongType(f"{name} is {short_repr(hook)}; it must be a function, async or not")
        if prepare is None and logits is None and rules is None:
            return None
        return cls(prepare, logits, rules)  # type: ignore[arg-type]

    @property
    def reads_logits(self) -> bool:
        return self.logits is not None or self.rules is not None

    async def before(self, prepared: Prepared) -> None:
        """Call the first hook."""
        if self.prepare is not None:
            await _awaited(self.prepare(prepared))

    async def token(
        self, logits: np.ndarray, drawn: int, readout: Readout, position: int, generation: Generation
    ) -> int:
        """The token of a row: `drawn` where rules and hook leave the logits as they are, else drawn from theirs."""
        row, allowed = logits, readout.permitted()
        if self.rules is not None:
            row = self.rules.apply(row, allowed, generation.context, generation.generated)
        if self.logits is not None:
            row = await changed_logits(self.logits, row, generation)
        if np.array_equal(row, logits):
            return drawn
        if allowed is not None and not (allowed & (row > -np.inf)).any():
            raise InvalidMask("the logits that the hook returned are -inf for every token that may come here")
        return sample_row(row, readout, position)


async def changed_logits(hook: LogitsHook | None, logits: np.ndarray, where: Generation | RunningBeam) -> np.ndarray:
    """The logits [V] that a hook makes of these, checked."""
    assert hook is not None
    given = logits.copy()
    returned = await _awaited(hook(given, where))
    row = check_logits(given if returned is None else returned, "the logits that the hook returned")
    if row.shape != logits.shape:
        raise InvalidInput(
            f"the logits that the hook returned have shape {row.shape}; expected {logits.shape}, one for each token"
        )
    return row


async def _awaited(result: Any) -> Any:
    return await result if isawaitable(result) else result
