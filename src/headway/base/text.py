"""Text for people: byte counts, values cut to the length of an error message; and text of people: a check, a search."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from reprlib import Repr
from typing import Any

from headway.base.errors import InvalidInput

UNITS = {1000: ("B", "kB", "MB", "GB", "TB"), 1024: ("B", "KiB", "MiB", "GiB", "TiB")}
SHOWN = 80  # characters of a value in a message
LONGEST = 1024  # bits of an integer that is written out
PIECE = 64 << 10  # characters that are searched in one call, which holds the GIL

_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = SHOWN
_REPR.fillvalue = "…"


def format_bytes(count: float, base: int = 1024) -> str:
    """98.4 MiB, 1.6 GiB; with base 1000, as disks and networks count, 98.4 MB, 1.6 GB."""
    power = sum(count >= base**n for n in range(1, len(UNITS[base])))
    return f"{count / base**power:.{min(power, 1)}f} {UNITS[base][power]}"


def shorten(text: str, limit: int = SHOWN) -> str:
    """`text`, cut to `limit` characters with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def short_repr(value: Any, limit: int = SHOWN) -> str:
    """`repr(value)` on one line, cut to `limit` characters; a large value is never spelled out whole."""
    if isinstance(value, int) and abs(value) >> LONGEST:
        return f"an integer of {value.bit_length()} bits"  # Python does not write out the largest ones
    try:
        return shorten(" ".join(_REPR.repr(value).split()), limit)
    except Exception:  # a value's own repr may do anything
        return f"a value of type {type(value).__name__}"


def check_unicode(text: str) -> None:
    """Raise InvalidInput for a text with a lone surrogate, which has no UTF-8 encoding and so no tokens."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
            "it is not valid Unicode: decode its source with errors='replace'"
        ) from error


def find_all(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """As `pattern.finditer(text)`, in short calls, for a pattern whose matches have 1 to `longest` characters."""
    at = 0
    while at < len(text):
        stop = at + PIECE
        for match in pattern.finditer(text, at, stop + longest - 1):
            if match.start() >= stop:
                break
            yield match
            at = match.end()
        at = max(at, stop)


def replace_all(pattern: re.Pattern[str], new: Callable[[re.Match[str]], str], text: str, longest: int) -> str:
    """As `pattern.sub(new, text)`, in short calls; see `find_all`."""
    parts, at = [], 0
    for match in find_all(pattern, text, longest):
        parts += (text[at : match.start()], new(match))
        at = match.end()
    return "".join([*parts, text[at:]]) if parts else text
