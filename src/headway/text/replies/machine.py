"""The machinery that all formats of replies share: text up to the next marker, and calls from their start to their end.

A parser is a machine whose state is a method. It is called again and again while it returns True, and returns False
when it needs more text. A state decides only by what it has consumed, never by where a piece of text ended, so the
parts of a message do not depend on how it was split. At the end `_last` is set and what was held back is let go.
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
    """Markers to look for, each with the newlines before and after it that belong to it."""

    def __init__(self, around: Mapping[str, tuple[int, int]]) -> None:
        self.after = {marker: after for marker, (_, after) in around.items()}
        self._spelled = [n * "\n" + marker for marker, (before, _) in around.items() for n in range(before + 1)]
        self._longest = max(map(len, self._spelled))
        self._pattern = re.compile(
            "|".join(f"\n{{0,{before}}}{re.escape(marker)}" for marker, (before, _) in around.items())
        )

    def find(self, text: str, at: int, last: bool) -> int:
        """Where the first marker begins, or what may become one; the end of the text when there is neither."""
        if (match := self._pattern.search(text, at)) is not None:
            return match.start()
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if not last and self.begins(text[start:]):
                return start
        return len(text)

    def begins(self, rest: str) -> bool:
        """Whether more text could make a marker of `rest`."""
        return any(spelled.startswith(rest) and spelled != rest for spelled in self._spelled)

    def match(self, text: str, at: int) -> tuple[str, int] | None:
        """The marker that stands at `at`, and where it ends."""
        match = self._pattern.match(text, at)
        return None if match is None else (match.group().lstrip("\n"), match.end())


class StreamParser:
    """Turns a reply's text, as it arrives, into its parts.

    The markers of some formats are special tokens, so feed text that shows them: `TextStream(..., skip_special=False)`.
    """

    format = ""
    broken_until: Markers  # where reading goes on after a call that cannot be read
    closers: frozenset[str] = frozenset()  # those of them that end the broken call and are consumed with it

    def __init__(self, limits: ParseLimits | None = None, prompt: str = "") -> None:
        self.limits = limits or ParseLimits()
        self._text, self._at = "", 0
        self._last = False
        self._newlines = 0  # to drop when they come next
        self._out: list[Part] = []
        self._opened = 0
        self._started = 0
        self._index: int | None = None  # of the open call, once it was announced
        self._kept: list[str] = []  # the raw text of the open call
        self._kept_chars = 0
        self._why = ""
        self._call = CallScanner(self.limits)
        self._code: list[str] = []
        self._state: State = self._begin(prompt)

    def feed(self, delta: str) -> list[Part]:
        """The parts that `delta` completes. No part holds a piece of a marker."""
        if self._last:
            raise Closed("the parser was finished; make a new one for another message")
        if not isinstance(delta, str):
            raise WrongType(f"the parser was fed a {type(delta).__name__}; it takes text")
        self._text, self._at = self._text[self._at :] + delta, 0
        return self._run()

    def finish(self) -> list[Part]:
        """The rest: what was held back, and calls that the text broke off. A complete call needs no end marker here."""
        if self._last:
            return []
        self._last = True
        return self._run()

    def copy(self) -> Self:
        """A parser at the same point; neither sees what the other is fed later."""
        return copy.deepcopy(self)

    def _begin(self, prompt: str) -> State:
        """The first state behind a prompt that ends with `prompt`."""
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
        """Lets text through up to the next marker; whether there was any."""
        start, self._at = self._at, markers.find(self._text, self._at, self._last)
        if start == self._at:
            return False
        emit(self._text[start : self._at])
        return True

    def _marker(self, markers: Markers) -> str | None:
        """The marker that stands next, consumed; None when there is none."""
        found = markers.match(self._text, self._at)
        if found is None:
            return None
        self._newlines = markers.after[found[0]]
        self._at = found[1]
        return found[0]

    def _skip_space(self) -> None:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in SPACE:
            self._at += 1
        self._keep(self._text[start : self._at])

    def _next(self) -> str:
        """The next character, "" when it has not come."""
        return self._text[self._at : self._at + 1]

    def _say(self, text: str) -> None:
        if text and self._out and isinstance(said := self._out[-1], Content):
            self._out[-1] = Content(said.text + text)
        elif text:
            self._out.append(Content(text))

    def _think(self, text: str) -> None:
        if text and self._out and isinstance(thought := self._out[-1], Reasoning):
            self._out[-1] = Reasoning(thought.text + text)
        elif text:
            self._out.append(Reasoning(text))

    def _go(self, state: State) -> bool:
        self._state = state
        return True

    # --- calls

    def _open(self, state: State, name: str | None = None, *, texts: bool = True) -> bool:
        """Begins a call whose JSON `state` reads with `_scan`."""
        self._call = CallScanner(self.limits, name, texts=texts)
        if self._admit():
            self._state = state
        return True

    def _admit(self) -> bool:
        self._index = None
        self._opened += 1
        if self._opened > self.limits.calls:
            self._spoil(f"the message has more than {self.limits.calls} calls")
            return False
        return True

    def _scan(self, *, doubtful: bool = False) -> bool:
        """Reads on in the open call; whether it came to its end, or to `why` it has none.

        A `doubtful` one is announced only when its arguments have begun.
        """
        start = self._at
        self._at = self._call.feed(self._text, start)
        self._keep(self._text[start : self._at])
        if self._call.begun or not doubtful:
            self._announce()
        if not self._call.done and self._call.why is None and self._last:
            self._call.why = "the text ends inside the call"
        return self._call.done or self._call.why is not None

    def _announce(self) -> None:
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
        """Ends the open call."""
        try:
            arguments = self._call.read()
        except ValueError as error:
            return self._give_up(str(error), then)
        assert self._index is not None
        self._out.append(ToolCallEnd(self._index, arguments, self._call.id))
        return self._leave(then)

    def _close(self, markers: Markers, end: Callable[[], object], then: State, why: str) -> bool:
        """Ends the open call at what `end` consumes, or at the end of a text that breaks off before or inside it.

        `why` says what is wrong when something else than one of `markers` stands behind the call.
        """
        self._skip_space()
        if end():
            return self._complete(then)
        if not markers.begins(self._text[self._at :]):
            return self._spoil(why)
        if not self._last:
            return False
        self._at = len(self._text)
        return self._complete(then)

    def _spoil(self, why: str) -> bool:
        """The open call cannot be read; its text goes on to the next marker that ends it."""
        self._why = why
        return self._go(self._broken)

    def _broken(self) -> bool:
        if self._plain(self.broken_until, self._keep):
            return True
        found = self.broken_until.match(self._text, self._at)
        if found is None and not self._last:
            return False
        if found is not None and found[0] in self.closers:
            self._marker(self.broken_until)
        return self._give_up(self._why, self._after_broken)

    def _after_broken(self) -> bool:
        raise NotImplementedError

    def _give_up(self, why: str, then: State) -> bool:
        self._out.append(BadToolCall("".join(self._kept).strip(SPACE), why, self._index))
        return self._leave(then)

    def _leave(self, then: State) -> bool:
        self._index, self._kept, self._kept_chars, self._code = None, [], 0, []
        return self._go(then)

    def _keep(self, text: str) -> None:
        kept = text[: self.limits.call_chars - self._kept_chars]
        if kept:
            self._kept.append(kept)
            self._kept_chars += len(kept)

    # --- calls whose whole text is code: one argument, `code`

    def _open_code(self, state: State, name: str) -> bool:
        if self._admit():
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
            self._spoil(f"the call is longer than {self.limits.call_chars:,} characters")

    def _complete_code(self, then: State) -> bool:
        assert self._index is not None
        self._write('"}')
        self._out.append(ToolCallEnd(self._index, {"code": "".join(self._code)}))
        return self._leave(then)

    def _write(self, delta: str) -> None:
        assert self._index is not None
        before = self._out[-1] if self._out else None
        if isinstance(before, ToolCallArguments):
            self._out[-1] = ToolCallArguments(self._index, before.delta + delta)
        else:
            self._out.append(ToolCallArguments(self._index, delta))
