"""A constraint for messages that either call a tool or follow a format: `response_format` together with `tools`.

Until the first tokens decide, both may come. A message that begins a call is free from there on, as without a format;
any other follows the format to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.base.errors import HeadwayError, InvalidToken
from headway.program.constraints.budget import is_slow
from headway.program.constraints.constraint import Constraint
from headway.server.openai.token_bounds import packed_mask
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
            followed = self._try_format(token)
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

    def _try_format(self, token: int) -> bool:
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
    def is_slow(self) -> bool:
        return is_slow(self._format)

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """In a thread: it touches nothing but the grammar."""
        grammar: Any = self._format
        grammar.settle(is_wanted)

    @property
    def may_end(self) -> bool:
        return self._states[-1].free or (self._in_format and bool(getattr(self._format, "may_end", True)))

    @property
    def finished(self) -> bool:
        return self._in_format and bool(getattr(self._format, "finished", False))

    @property
    def _in_format(self) -> bool:
        return self._states[-1].lead == len(self._lead)
