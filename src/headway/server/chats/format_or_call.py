"""A constraint for messages that either call a tool or follow a format: `response_format` together with `tools`.

It is for messages whose first token may begin a call. Until the next ones decide, both may come. A message that begins
a call ends this constraint: the call has its own grammars. Any other follows the format to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidToken
from headway.program.constraints.constraint import Constraint
from headway.server.api.token_bounds import packed_mask
from headway.text.templates.messages import CallSyntax


def call_marker(form: CallSyntax) -> str:
    """The text that only a call begins with: a tag alone where there is one, since the model may space what follows."""
    tag = form.opening.split("{")[0].rstrip()
    return tag or form.opening


@dataclass(frozen=True)
class _State:
    """How far the tokens match: `lead` and `marker` count matched tokens, None when the message is something else."""

    lead: int | None = 0
    marker: int | None = 0
    followed: bool = False  # the format accepted the last token
    free: bool = False  # a call has begun


class FormatOrCall:
    """Allows `lead` and then what `format` allows, or `marker` and then anything."""

    def __init__(self, vocab: int, format: Constraint, marker: Sequence[int], lead: Sequence[int] = ()) -> None:
        self._vocab, self._format, self._marker, self._lead = vocab, format, tuple(marker), tuple(lead)
        self._states = [_State()]

    @property
    def is_call(self) -> bool:
        """Whether the message has begun a call."""
        return self._states[-1].free

    def mask(self) -> np.ndarray | None:
        state = self._states[-1]
        if state.free:
            return None
        bits = None
        if state.lead is not None:
            rest = self._lead[state.lead :]
            bits = packed_mask(rest[:1], self._vocab) if rest else self._format.mask()
            if bits is None:
                return None
        if state.marker is not None:
            opening = packed_mask([self._marker[state.marker]], self._vocab)
            bits = opening if bits is None else bits | opening
        return bits

    def accept(self, token: int) -> None:
        self._states.append(self._next(self._states[-1], token))

    def _next(self, state: _State, token: int) -> _State:
        if state.free:
            return _State(None, None, free=True)
        marker = state.marker if state.marker is not None and self._marker[state.marker] == token else None
        lead, followed = state.lead, False
        if lead is not None and lead < len(self._lead):
            lead = lead + 1 if self._lead[lead] == token else None
        elif lead is not None:
            followed = self._try_format(token, may_call=marker is not None)
            lead = lead if followed else None
        if lead is None and marker is None:
            raise InvalidToken(f"token {token} neither follows the format nor begins a tool call")
        if marker is None:
            return _State(lead, None, followed)
        marker += 1
        if marker < len(self._marker):
            return _State(lead, marker, followed)
        # Where the format allows a text that looks like a call, the message still follows the format.
        return _State(None, None, free=True) if lead is None else _State(lead, None, followed)

    def _try_format(self, token: int, *, may_call: bool) -> bool:
        """Whether the format takes a token; one that may begin a call only if its mask has it, which is known."""
        if (
            may_call
            and (bits := self._format.mask()) is not None
            and not bits[token // 32] >> np.uint32(token % 32) & 1
        ):
            return False
        try:
            self._format.accept(token)
        except HeadwayError:
            return False
        return True

    def rollback(self, n: int) -> None:
        undone = self._states[len(self._states) - n :]
        del self._states[len(self._states) - n :]
        if count := sum(state.followed for state in undone):
            self._format.rollback(count)

    def copy(self) -> FormatOrCall:
        twin = object.__new__(FormatOrCall)
        twin.__dict__.update(self.__dict__)
        format: Any = self._format
        twin._format, twin._states = format.copy(), list(self._states)
        return twin

    @property
    def wrapped(self) -> Constraint:
        return self._format

    @property
    def may_end(self) -> bool:
        return self._states[-1].free or (self._in_format and bool(getattr(self._format, "may_end", True)))

    @property
    def finished(self) -> bool:
        return self._in_format and bool(getattr(self._format, "finished", False))

    @property
    def _in_format(self) -> bool:
        return self._states[-1].lead == len(self._lead)
