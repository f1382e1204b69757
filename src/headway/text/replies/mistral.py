"""The reply format of Mistral.

    [THINK]reasoning[/THINK]content[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc"}, …]
    [THINK]reasoning[/THINK]content[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}

`[CALL_ID]` and `[ARGS]` are optional.
"""

from __future__ import annotations

from headway.text.replies.json_stream import SPACE, wrong_name
from headway.text.replies.state_machine import Markers, State, StreamParser


class Mistral(StreamParser):
    """Mistral, both syntaxes. If the prompt ends with `[THINK]`, the reply begins inside the reasoning."""

    _TEXT = Markers({"[TOOL_CALLS]": (0, 0), "[THINK]": (0, 0), "</s>": (0, 0)})
    _THINKING = Markers({"[/THINK]": (0, 0), "</s>": (0, 0)})
    _HEAD = Markers({"[ARGS]": (0, 0), "{": (0, 0), "[TOOL_CALLS]": (0, 0), "</s>": (0, 0)})
    resume_at = Markers({"[TOOL_CALLS]": (0, 0), "</s>": (0, 0)})

    def _begin(self, prompt: str) -> State:
        self._listed = False
        return self._reasoning if prompt.endswith("[THINK]") else self._content

    def _content(self) -> bool:
        if self._plain(self._TEXT, self._emit_content):
            return True
        match self._marker(self._TEXT):
            case None:
                return False
            case "[TOOL_CALLS]":
                return self._enter(self._calls)
            case "[THINK]":
                return self._enter(self._reasoning)
        return True

    def _reasoning(self) -> bool:
        if self._plain(self._THINKING, self._emit_reasoning):
            return True
        return self._marker(self._THINKING) is not None and self._enter(self._content)

    def _calls(self) -> bool:
        self._skip_space()
        match self._next():
            case "" if not self._last:
                return False
            case "[":
                self._listed = True
                return self._step(self._first_item)
            case "{":
                self._listed = False
                return self._open(self._in_call)
        self._listed = False
        return self._enter(self._head)

    def _head(self) -> bool:
        """The name, and perhaps the id, up to the arguments."""
        if self._kept_chars > 2 * self.limits.name_chars + len("[CALL_ID]") + 32:
            return self._fail(f"the call has a name longer than {self.limits.name_chars} characters")
        if self._plain(self._HEAD, self._keep):
            return True
        match = self._HEAD.match(self._text, self._at)
        if match is None:
            return self._last and self._fail("the text ends inside the call")
        if match[0] not in ("[ARGS]", "{"):
            return self._fail("the call has no arguments; it must have an object, {} for none")
        name, _, id = "".join(self._kept).strip(SPACE).partition("[CALL_ID]")
        if why := wrong_name(name, self.limits) or (id and wrong_name(id, self.limits, "id")):
            return self._fail(why)
        if match[0] == "[ARGS]":
            self._keep(self._marker(self._HEAD) or "")
        self._open(self._in_call, name)
        self._call.id = id or None
        return True

    def _first_item(self) -> bool:
        self._skip_space()
        return self._step(self._content) if self._next() == "]" else self._item()

    def _item(self) -> bool:
        self._skip_space()
        match self._next():
            case "{":
                return self._open(self._in_call)
            case "":
                return self._last and self._fail("the text ends inside the list of calls")
        return self._fail(f"{self._next()!r} in the list of calls should be an object")

    def _in_call(self) -> bool:
        if not self._scan():
            return False
        return self._fail(self._call.why) if self._call.why else self._complete(self._after_call)

    def _after_call(self) -> bool:
        if not self._listed:
            return self._enter(self._content)
        self._skip_space()
        match self._next():
            case ",":
                return self._step(self._item)
            case "]":
                return self._step(self._content)
            case "":
                return self._last and self._enter(self._content)
        return self._fail(f"{self._next()!r} in the list of calls should be a comma or ]")

    def _step(self, state: State) -> bool:
        self._at += 1
        return self._enter(state)

    def _after_malformed(self) -> bool:
        return self._enter(self._content)
