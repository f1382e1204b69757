"""The state machine that all reply formats share: text up to the next marker, and calls from start to end.

The state of a parser is a method. It is called repeatedly while it returns True, and returns False when it needs more
text. A state decides only by what it has consumed, never by where a delta ended, so the parts of a message do not
depend on how it was split. At the end `_last` is set and held-back text is emitted.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from typing import Self

from headway.base.errors import Closed, WrongType
from headway.text.replies.json_stream import SPACE, CallScanner
from headway.text.replies.parts import (
    BadToolCall,
    Content,
    ParseLimits,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

State = Callable[[], bool]


class Markers:
    """Markers to search for, each with the number of newlines around it that belong to it."""

    def __init__(self, around: Mapping[str, tuple[int, int]]) -> None:
        self.after = {marker: after for marker, (_, after) in around.items()}
        self._spelled = [n * "\n" + marker for marker, (before, _) in around.items() for n in range(before + 1)]
        self._longest = max(map(len, self._spelled))
        self._pattern = re.compile(
            "|".join(f"\n{{0,{before}}}{re.escape(marker)}" for marker, (before, _) in around.items())
        )

    def find(self, text: str, at: int, last: bool) -> int:
        """Where the first marker, or a possible prefix of one, begins; the end of the text if there is neither."""
        if (match := self._pattern.search(text, at)) is not None:
            return match.start()
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if not last and self.begins(text[start:]):
                return start
        return len(text)

    def begins(self, rest: str) -> bool:
        """Whether `rest` is a proper prefix of a marker."""
        return any(spelled.startswith(rest) and spelled != rest for spelled in self._spelled)

    def match(self, text: str, at: int) -> tuple[str, int] | None:
        """The marker at `at`, and where it ends."""
        match = self._pattern.match(text, at)
        return None if match is None else (match.group().lstrip("\n"), match.end())


class StreamParser:
    """Parses a reply's text, as it arrives, into parts.

    The markers of some formats are special tokens, so feed text with them: `TextStream(..., skip_special=False)`.
    """

    format = ""
    resume_at: Markers  # where parsing resumes after a malformed call
    closers: frozenset[str] = frozenset()  # markers that end a malformed call and are consumed with it

    def __init__(self, limits: ParseLimits | None = None, prompt: str = "") -> None:
        self.limits = limits or ParseLimits()
        self._text, self._at = "", 0
        self._last = False
        self._newlines = 0  # to skip if they come next
        self._out: list[Part] = []
        self._opened = 0
        self._started = 0
        self._index: int | None = None  # of the open call, once started
        self._kept: list[str] = []  # the raw text of the open call
        self._kept_chars = 0
        self._why = ""
        self._call = CallScanner(self.limits)
        self._code: list[str] = []
        self._state: State = self._begin(prompt)

    def feed(self, delta: str) -> list[Part]:
        """The parts that `delta` completes. No part contains a piece of a marker."""
        if self._last:
            raise Closed("the parser is finished; create a new one for another message")
        if not isinstance(delta, str):
            raise WrongType(f"delta is a {type(delta).__name__}; it must be a str")
        self._text, self._at = self._text[self._at :] + delta, 0
        return self._run()

    def finish(self) -> list[Part]:
        """The remaining parts: held-back text and unfinished calls. A complete call needs no end marker here."""
        if self._last:
            return []
        self._last = True
        return self._run()

    def copy(self) -> Self:
        """An independent parser in the same state."""
        return copy.deepcopy(self)

    def _begin(self, prompt: str) -> State:
        """The first state after a prompt that ends with `prompt`."""
        raise NotImplementedError

    def _run(self) -> list[Part]:
        while self._drop_newlines() or self._state():
            pass
        out, self._out = self._out, []
        return out

    def _drop_newlines(self) -> bool:
        if not self._newlines or self._at == len(self._text):
            return False
        if self._text[self._at] != "\n":
            self._newlines = 0
            return False
        self._at, self._newlines = self._at + 1, self._newlines - 1
        return True

    # --- text and markers

    def _plain(self, markers: Markers, emit: Callable[[str], None]) -> bool:
        """Emit text up to the next marker; whether there was any."""
        start, self._at = self._at, markers.find(self._text, self._at, self._last)
        if start == self._at:
            return False
        emit(self._text[start : self._at])
        return True

    def _marker(self, markers: Markers) -> str | None:
        """Consume the next marker and return it; None if there is none."""
        match = markers.match(self._text, self._at)
        if match is None:
            return None
        self._newlines = markers.after[match[0]]
        self._at = match[1]
        return match[0]

    def _skip_space(self) -> None:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in SPACE:
            self._at += 1
        self._keep(self._text[start : self._at])

    def _next(self) -> str:
        """The next character, "" if it has not arrived."""
        return self._text[self._at : self._at + 1]

    def _emit_content(self, text: str) -> None:
        if text and self._out and isinstance(last := self._out[-1], Content):
            self._out[-1] = Content(last.text + text)
        elif text:
            self._out.append(Content(text))

    def _emit_reasoning(self, text: str) -> None:
        if text and self._out and isinstance(last := self._out[-1], Reasoning):
            self._out[-1] = Reasoning(last.text + text)
        elif text:
            self._out.append(Reasoning(text))

    def _enter(self, state: State) -> bool:
        self._state = state
        return True

    # --- calls

    def _open(self, state: State, name: str | None = None, *, texts: bool = True) -> bool:
        """Start a call whose JSON `state` reads with `_scan`."""
        self._call = CallScanner(self.limits, name, texts=texts)
        if self._count_call():
            self._state = state
        return True

    def _count_call(self) -> bool:
        self._index = None
        self._opened += 1
        if self._opened > self.limits.calls:
            self._fail(f"the message has more than {self.limits.calls} calls")
            return False
        return True

    def _scan(self, *, doubtful: bool = False) -> bool:
        """Read more of the open call; whether it is complete or malformed (`why`).

        A `doubtful` call is started only once its arguments begin.
        """
        start = self._at
        self._at = self._call.feed(self._text, start)
        self._keep(self._text[start : self._at])
        if self._call.begun or not doubtful:
            self._emit_call()
        if not self._call.done and self._call.why is None and self._last:
            self._call.why = "the text ends inside the call"
        return self._call.done or self._call.why is not None

    def _emit_call(self) -> None:
        if self._index is None and self._call.name is not None:
            self._start(self._call.name)
        if self._index is not None and (delta := self._call.take()):
            self._write(delta)

    def _start(self, name: str) -> int:
        index, self._started = self._started, self._started + 1
        self._index = index
        self._out.append(ToolCallStart(index, name))
        return index

    def _complete(self, then: State) -> bool:
        """End the open call."""
        try:
            arguments = self._call.read()
        except ValueError as error:
            return self._emit_bad_call(str(error), then)
        assert self._index is not None
        self._out.append(ToolCallEnd(self._index, arguments, self._call.id))
        return self._close_call(then)

    def _close(self, markers: Markers, end: Callable[[], object], then: State, why: str) -> bool:
        """End the open call at what `end` consumes, or at the end of a text that stops before or inside it.

        `why` is the error if something other than one of `markers` follows the call.
        """
        self._skip_space()
        if end():
            return self._complete(then)
        if not markers.begins(self._text[self._at :]):
            return self._fail(why)
        if not self._last:
            return False
        self._at = len(self._text)
        return self._complete(then)

    def _fail(self, why: str) -> bool:
        """Mark the open call as malformed; its text extends to the next marker that ends it."""
        self._why = why
        return self._enter(self._malformed)

    def _malformed(self) -> bool:
        if self._plain(self.resume_at, self._keep):
            return True
        match = self.resume_at.match(self._text, self._at)
        if match is None and not self._last:
            return False
        if match is not None and match[0] in self.closers:
            self._marker(self.resume_at)
        return self._emit_bad_call(self._why, self._after_malformed)

    def _after_malformed(self) -> bool:
        raise NotImplementedError

    def _emit_bad_call(self, why: str, then: State) -> bool:
        self._out.append(BadToolCall("".join(self._kept).strip(SPACE), why, self._index))
        return self._close_call(then)

    def _close_call(self, then: State) -> bool:
        self._index, self._kept, self._kept_chars, self._code = None, [], 0, []
        return self._enter(then)

    def _keep(self, text: str) -> None:
        kept = text[: self.limits.call_chars - self._kept_chars]
        if kept:
            self._kept.append(kept)
            self._kept_chars += len(kept)

    # --- calls whose whole text is code: one argument, `code`

    def _open_code(self, state: State, name: str) -> bool:
        if self._count_call():
            self._start(name)
            self._write('{"code": "')
            self._state = state
        return True

    def _add_code(self, text: str) -> None:
        room = self.limits.call_chars - self._kept_chars
        self._keep(text)
        self._code.append(text[:room])
        if text[:room]:
            self._write(json.dumps(text[:room], ensure_ascii=False)[1:-1])
        if len(text) > room:
            self._fail(f"the call is longer than {self.limits.call_chars:,} characters")

    def _complete_code(self, then: State) -> bool:
        assert self._index is not None
        self._write('"}')
        self._out.append(ToolCallEnd(self._index, {"code": "".join(self._code)}))
        return self._close_call(then)

    def _write(self, delta: str) -> None:
        assert self._index is not None
        before = self._out[-1] if self._out else None
        if isinstance(before, ToolCallArguments):
            self._out[-1] = ToolCallArguments(self._index, before.delta + delta)
        else:
            self._out.append(ToolCallArguments(self._index, delta))
