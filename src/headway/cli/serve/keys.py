"""`headway serve --new-key`: an API key with limits of its own; and limits as flags give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from headway.base.errors import InvalidInput
from headway.cli.flags.declare import BadValue
from headway.cli.flags.shared import integer, number
from headway.cli.terminal.render import emit_json, note


def make_key(path: Path | None, name: str, limits: Sequence[str], *, admin: bool, as_json: bool) -> None:
    from headway.server.keys import TenantLimits, add_key

    if path is None:
        raise InvalidInput("--new-key needs --keys FILE, where the key's hash is stored")
    secret = add_key(path, name, TenantLimits(**named_limits(TenantLimits, limits)), admin=admin)
    if as_json:
        emit_json({"name": name, "key": secret, "file": str(path)})
    else:
        print(secret)
        note(f"this key is shown only once; {path} has its hash under the name {name}")


def named_limits(of: type[Any], given: Sequence[str]) -> dict[str, Any]:
    """Parsed `NAME=N` values for the numeric fields of a dataclass."""
    known = {f.name: f.type for f in fields(of) if f.name != "port" and str(f.type).split(" ")[0] in ("int", "float")}
    values: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            raise InvalidInput(
                f"--limit {text!r} is not known; it must be NAME=N with NAME one of {', '.join(sorted(known))}"
            )
        values[name] = _limit(text, value, integral=str(known[name]).startswith("int"))
    return values


def _limit(text: str, value: str, *, integral: bool) -> float:
    try:
        return integer(value) if integral else number(value)
    except BadValue:
        kind = "an integer" if integral else "a number"
        raise InvalidInput(f"--limit {text!r} has {value!r}; it must be NAME=N, where N is {kind}") from None
