"""An adapter as a flag names it: NAME=FOLDER[:SCALE]."""

from __future__ import annotations

import re
from pathlib import Path

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.specs.adapters import MAX_SCALE

NAME = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True)
class AdapterSource:
    """The name of an adapter, where its files are, and its scale."""

    name: str
    path: Path
    scale: float = 1.0

    @classmethod
    def of(cls, text: str) -> AdapterSource:
        """From NAME=FOLDER, FOLDER or either with :SCALE; a folder or .gguf file without a name gives its own."""
        name, equals, rest = text.partition("=")
        if not equals or Path(text).exists():
            name, rest = "", text
        path, scale = Path(rest), 1.0
        before, colon, after = rest.rpartition(":")
        if colon and not path.exists():
            path, scale = Path(before), _scale(after, text)
        name = name or path.name.removesuffix(".gguf")
        if not NAME.fullmatch(name) or not rest:
            raise InvalidInput(
                f"the adapter {text!r} is not valid; it must be NAME=FOLDER or NAME=FOLDER:SCALE, and the name "
                "printable characters without spaces"
            )
        return cls(name, path, scale)


def _scale(text: str, given: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        raise InvalidInput(
            f"the adapter {given!r} has the scale {text!r}; it must be a number, as in NAME=FOLDER:0.5"
        ) from None
    if not abs(scale) <= MAX_SCALE:
        raise InvalidInput(f"the adapter {given!r} has the scale {text}; it must be in [-{MAX_SCALE:g}, {MAX_SCALE:g}]")
    return scale
