"""The text that a custom tool is called with, from the JSON of its arguments as it comes."""

from __future__ import annotations

import json
import re

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_TEXT = re.compile(
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*+"
)


class CustomInput:
    """Decodes `{"input": "…"}` piece by piece."""

    def __init__(self) -> None:
        self._rest, self._begun = "", False

    def push(self, delta: str) -> str:
        """The text that a piece of the JSON adds. Half an escape waits for its other half."""
        self._rest += delta
        if not self._begun:
            begin = _BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._rest, self._begun = self._rest[begin.end() :], True
        match = _TEXT.match(self._rest)
        assert match is not None
        self._rest = self._rest[match.end() :]
        return json.loads(f'"{match.group()}"', strict=False)
