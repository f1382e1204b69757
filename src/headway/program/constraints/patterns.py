"""Patterns of JSON schemas: ECMAScript's, translated to the dialect of the grammar compiler (Rust's).

Where the two dialects differ with an error, the compiler's error stands; where they would differ silently, the pattern
is translated here or refused.
"""

from __future__ import annotations

import re

from headway.base.errors import InvalidInput
from headway.base.text import short_repr

PATTERN = 4096  # characters of a pattern

# The compiler's dates know how long a month is but not which years are leap years; there is no year 0, and a second 60
# comes only with notice.
LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
REAL_DAY = f"^(?:{LEAP}-02-29|[0-9]{{4}}-(?:02-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-[0-3][0-9]))"
REAL_YEAR = "^(?:[1-9]|0[1-9]|00[1-9]|000[1-9])"
REAL_SECOND = "^[^:]*:[0-9]{2}:[0-5]"

# Patterns are ECMAScript's; the compiler's classes are Unicode's, so the short ones are written out.
SPACES = " \\t\\n\\v\\f\\r\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9\\x00]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_\\x00]",
    "s": f"[{SPACES}]",
    "S": f"[^{SPACES}\\ufeff\\u0085\\x1c-\\x1f\\x00]",  # no dialect counts these as letters
}
ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|.)", re.DOTALL)
ANY_CHARACTER = "[^\\n\\r\\u2028\\u2029\\x00]"
# A class with all control characters lets \" and \\ pass in the compiler's quoting. U+0000 is never written: it can go.
WITHOUT_NULL = "--\\x00]"


def ecma_pattern(pattern: str) -> str:
    """An ECMAScript pattern in the compiler's dialect (Rust's), where the two would differ without an error."""
    if len(pattern) > PATTERN:
        raise InvalidInput(f"a pattern of the JSON schema has {len(pattern)} characters; at most {PATTERN} are allowed")
    out, inside, at = [], False, 0
    while at < len(pattern):
        match = ESCAPE.match(pattern, at)
        part = match[0] if match else pattern[at]
        out.append(_ecma_part(part, pattern, at, inside))
        inside = part != "]" if inside else part == "["
        at += len(part)
    return "".join(out)


def _ecma_part(part: str, pattern: str, at: int, inside: bool) -> str:
    """One character or escape of a pattern, rewritten."""
    following = pattern[at + 1 : at + 3]
    if part == "(" and following[:1] == "?" and not inside and following[1:] not in (":", "=", "!", "<"):
        raise InvalidInput(f"the pattern {short_repr(pattern)} sets flags with (?; they are not part of ECMAScript")
    if inside and pattern[at : at + 2] == "--":
        raise InvalidInput(f"the pattern {short_repr(pattern)} has -- inside brackets; write \\- for a hyphen")
    if part[:2] in ("\\p", "\\P"):
        return part if inside else f"[{part}{WITHOUT_NULL}"
    if part.startswith("\\"):
        return CLASSES.get(part[1:], part)
    if inside:
        return "]" + WITHOUT_NULL if part == "]" else "\\" + part if part in "[&~" else part
    return {"[": "[[", ".": ANY_CHARACTER}.get(part, part)


def real_times(format: object) -> list[str]:
    """Patterns that a date or time must match besides the compiler's own, which allows some that do not exist."""
    days, seconds = [REAL_DAY, REAL_YEAR], [REAL_SECOND]
    return {"date": days, "date-time": days + seconds, "time": seconds}.get(str(format), [])
