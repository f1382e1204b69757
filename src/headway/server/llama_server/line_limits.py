"""What ends a completion at a line: `t_max_predict_ms` and `n_indent`, as editors ask for it."""

from __future__ import annotations

import time

from headway.server.openai.completions import TextCut

BLANKS = " \t"


class LineLimits:
    """Reads the text of one sequence as it comes, and says where it ends."""

    def __init__(self, seconds: float, indent: int) -> None:
        """After `seconds` from the first text on the next line break ends it, and before that a line which is indented
        by fewer than `indent` blanks; 0 is no limit."""
        self._seconds, self._indent = seconds, indent
        self._begun: float | None = None
        self._blanks: int | None = None  # of the line so far, while it has nothing else; None where it has, or is first

    def __call__(self, text: str) -> TextCut | None:
        """Where a piece of text ends the sequence; None while it goes on."""
        if self._begun is None:
            self._begun = time.monotonic()
        if self._indent and (cut := self._unindented(text)) is not None:
            return TextCut(text[:cut], cut + 1)
        if self._seconds and "\n" in text and time.monotonic() - self._begun > self._seconds:
            line = text.index("\n") + 1
            return TextCut(text[:line], line)
        return None

    def _unindented(self, text: str) -> int | None:
        """Where a line with too few blanks has its first other character."""
        for at, one in enumerate(text):
            if self._blanks is not None and one in BLANKS:
                self._blanks += 1
            elif self._blanks is not None and self._blanks < self._indent:
                return at
            else:
                self._blanks = 0 if one == "\n" else None
        return None
