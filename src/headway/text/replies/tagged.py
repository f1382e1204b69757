"""The reply format of Qwen and Hermes.

    <think>
    reasoning
    </think>

    content
    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

`<think>` counts only before any content: later it is text, as is a `</think>` that closes nothing.
"""

from __future__ import annotations

from headway.text.replies.state_machine import Markers, State, StreamParser


class Tagged(StreamParser):
    """Qwen and Hermes. If the prompt ends with `<think>`, the reply begins inside the reasoning."""

    _ENDS = {"<|im_end|>": (0, 1), "<|endoftext|>": (0, 0)}  # noqa: RUF012
    _FRESH = Markers({"<think>": (1, 1), "<tool_call>": (1, 0), **_ENDS})
    _LATER = Markers({"<tool_call>": (1, 0), **_ENDS})
    _THINKING = Markers({"</think>": (1, 2), **_ENDS})
    _CLOSE = Markers({"</tool_call>": (0, 0)})
    resume_at = Markers({"</tool_call>": (0, 0), "<tool_call>": (0, 0), **_ENDS})
    closers = frozenset(["</tool_call>"])

    def _begin(self, prompt: str) -> State:
        self._fresh = True
        if not prompt.rstrip("\n").endswith("<think>"):
            return self._content
        self._newlines = 0 if prompt.endswith("\n") else 1
        return self._reasoning

    def _content(self) -> bool:
        markers = self._FRESH if self._fresh else self._LATER
        if self._plain(markers, self._emit_fresh):
            return True
        match self._marker(markers):
            case None:
                return False
            case "<think>":
                return self._enter(self._reasoning)
            case "<tool_call>":
                return self._open(self._in_call)
        return True

    def _emit_fresh(self, text: str) -> None:
        self._fresh = self._fresh and not text.strip()
        self._emit_content(text)

    def _reasoning(self) -> bool:
        if self._plain(self._THINKING, self._emit_reasoning):
            return True
        return self._marker(self._THINKING) is not None and self._enter(self._content)

    def _in_call(self) -> bool:
        if not self._scan():
            return False
        return self._fail(self._call.why) if self._call.why else self._enter(self._closing)

    def _closing(self) -> bool:
        why = "there is text between the end of the call and </tool_call>"
        return self._close(self._CLOSE, lambda: self._marker(self._CLOSE), self._content, why)

    def _after_malformed(self) -> bool:
        return self._enter(self._content)
