"""The limits of a chat reply, and which tool it must call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.text import short_repr

Choice = Literal["auto", "required", "none"] | Mapping[str, Any]


@dataclass(frozen=True)
class ChatLimits:
    """The limits of a reply: tokens of one message, rounds of calls, seconds of one call and of the whole."""

    max_tokens: int = 512
    max_rounds: int = 8
    tool_timeout: float | None = 30.0
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("max_rounds", 0)):
            check_integer(getattr(self, name), name, least)
        for name in ("tool_timeout", "timeout"):
            seconds = getattr(self, name)
            if seconds is None:
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise InvalidInput(
                    f"{name} is {short_repr(seconds)}; it must be a number of seconds above 0, or None for no limit"
                )
