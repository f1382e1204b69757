"""The reply format of Llama 3.

    {"name": "f", "parameters": {"a": 1}}                   a call: the message is the object
    {"name": "f", "parameters": {}}; {"name": …}            several
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}     the same after a tag, which may follow content
    <|python_tag|>search.call(query="a")                    a call of a built-in tool
    <|python_tag|>print(1)                                  code: a call of `code_interpreter` with the argument `code`

Without the tag, an object is a call only if it opens the message and has a name and the start of its parameters before
any other key. Until that is known it is held back; any other object is content.
"""

from __future__ import annotations

import json
import re

from headway.text.replies.json_stream import SPACE
from headway.text.replies.parts import ToolCallEnd
from headway.text.replies.state_machine import Markers, State, StreamParser

CODE_TOOL = "code_interpreter"
MAX_METHOD = 256
_FIRST_GAP = re.compile(r"[ \t\n\r]{0,32}")
_LATER_GAP = re.compile(r"[ \t\n\r;]{0,32}")
_METHOD = re.compile(rf"[\w.]{{0,{MAX_METHOD}}}")
_KEYWORD = re.compile(r'(\w+)="([^"\\\n]*)"')
_METHOD_CALL = re.compile(r'(\w+)\.call\(\s*((?:\w+="[^"\\\n]*"\s*(?:,\s*(?=\w)|(?=\))))*)\)')


class Llama(StreamParser):
    """Llama 3."""

    _MARKS = Markers({"<|python_tag|>": (0, 0), "<|eot_id|>": (0, 0), "<|eom_id|>": (0, 0), "<|end_of_text|>": (0, 0)})
    resume_at = _MARKS

    def _begin(self, prompt: str) -> State:
        self._gap = ""
        return self._first

    def _first(self) -> bool:
        return self._maybe_call(_FIRST_GAP)

    def _between(self) -> bool:
        return self._maybe_call(_LATER_GAP)

    def _maybe_call(self, gaps: re.Pattern[str]) -> bool:
        end = self._end_of(gaps)
        rest = self._text[end : end + 32]
        if not self._last and (not rest or self._MARKS.begins(rest)):
            return False
        self._gap = self._text[self._at : end]
        if rest.startswith("{"):
            self._at = end
            return self._open(self._doubtful, texts=False)
        if gaps is _LATER_GAP and (not rest or self._MARKS.match(rest, 0)):
            self._at = end  # what separates calls belongs to them
        return self._enter(self._content)

    def _doubtful(self) -> bool:
        if not self._scan(doubtful=True):
            return False
        if self._index is None:
            self._emit_content(self._gap + "".join(self._kept))
            return self._close_call(self._content)
        return self._fail(self._call.why) if self._call.why else self._complete(self._between)

    def _content(self) -> bool:
        if self._plain(self._MARKS, self._emit_content):
            return True
        marker = self._marker(self._MARKS)
        return marker is not None and (marker != "<|python_tag|>" or self._enter(self._tagged))

    def _tagged(self) -> bool:
        gap, method = self._end_of(_FIRST_GAP), self._end_of(_METHOD)
        if not self._last and (gap == len(self._text) or method == len(self._text)):
            return False
        if self._text.startswith("{", gap):
            self._at = gap
            return self._open(self._sure)
        name = self._text[self._at : method]
        if re.fullmatch(r"\w+\.call", name) and len(name) < MAX_METHOD and self._text.startswith("(", method):
            return self._enter(self._method) if self._count_call() else True
        return self._open_code(self._in_code, CODE_TOOL)

    def _sure(self) -> bool:
        if not self._scan():
            return False
        return self._fail(self._call.why) if self._call.why else self._complete(self._between)

    def _method(self) -> bool:
        if self._plain(self._MARKS, self._keep):
            return True
        if not self._at_end():
            return False
        if self._kept_chars == self.limits.call_chars:
            return self._emit_bad_call(f"the call is longer than {self.limits.call_chars:,} characters", self._content)
        match = _METHOD_CALL.fullmatch("".join(self._kept).strip(SPACE))
        pairs = [] if match is None else _KEYWORD.findall(match[2])
        if match is None or len(dict(pairs)) < len(pairs):
            return self._emit_bad_call('the call should be name.call(key="value", …), each key once', self._content)
        return self._complete_method(match[1], dict(pairs))

    def _complete_method(self, name: str, arguments: dict[str, str]) -> bool:
        index = self._start(name)
        self._write(json.dumps(arguments, ensure_ascii=False))
        self._out.append(ToolCallEnd(index, arguments))
        return self._close_call(self._content)

    def _in_code(self) -> bool:
        if self._plain(self._MARKS, self._add_code):
            return True
        return self._at_end() and self._complete_code(self._content)

    def _at_end(self) -> bool:
        return self._last or self._MARKS.match(self._text, self._at) is not None

    def _end_of(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        return self._at if match is None else match.end()

    def _after_malformed(self) -> bool:
        return self._enter(self._content)
