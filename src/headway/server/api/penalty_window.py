"""`repeat_last_n`: the tokens that penalties count, as llama-server's and Ollama's clients ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.program.engine import Engine
from headway.server.errors import bad_request

PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}  # and what turns them off
"""By the names of a completion's fields."""


def penalty_fields(last: int | None, fields: Mapping[str, Any], engine: Engine, where: str) -> dict[str, Any]:
    """What `repeat_last_n` changes of a request's fields: with 0 penalties count no token.

    Any value is taken where there is no penalty, and -1, all tokens, where it can be had: the repetition penalty may
    count the prompt too (`counts_prompt`), the other two count what is generated. `where` names the field.
    """
    file = engine.generation_defaults.repetition_penalty
    defaults = PENALTIES if file is None else {**PENALTIES, "repetition_penalty": file}
    active = [name for name, off in PENALTIES.items() if fields.get(name, defaults[name]) != off]
    if last is None or not active or (last == -1 and active == ["repetition_penalty"]):
        return {}
    if last == 0:
        return dict(PENALTIES)
    reason = "presence and frequency penalties count the generated tokens" if last == -1 else "penalties have no window"
    raise bad_request(
        f"{where} is {last!r:.60}, and {reason} here: remove it, pass 0 for no penalty, or -1 with repeat_penalty "
        "alone for all tokens",
        where,
        "unsupported",
    )


def counts_prompt(last: int | None) -> bool:
    """Whether the repetition penalty counts the prompt's tokens."""
    return last == -1
