"""Replies in the format of Qwen and Hermes.

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

from headway.text.replies.machine import Markers, State, StreamParser


class Tagged(StreamParser):
    """Qwen and Hermes. The prompt may end with `<think>`: the reply then begins inside the reasoning."""

    _ENDS = {"<|im_end|>": (0, 1), "<|endoftext|>": (0, 0)}  # noqa: RUF012
    _FRESH = Markers({"<think>": (1, 1), "<tool_call>": (1, 0), **_ENDS})
    _LATER = Markers({"<tool_call>": (1, 0), **_ENDS})
    _THINKING = Markers({"</think>": (1, 2), **_ENDS})
    _CLOSE = Markers({"</tool_call>": (0, 0)})
    broken_until = Markers({"</tool_call>": (0, 0), "<tool_call>": (0, 0), **_ENDS})
    closers = frozenset(["</tool_call>"])

    def _begin(self, prompt: str) -> State:
        self._fresh = True
        if not prompt.rstrip("\n").endswith("<think>"):
            return self._content
        self._newlines = 0 if prompt.endswith("\n") else 1
        return self._thought

    def _content(self) -> bool:
        markers = self._FRESH if self._fresh else self._LATER
        if self._plain(markers, self._say_fresh):
            return True
        match self._marker(markers):
            case None:
                return False
            case "<think>":
                return self._go(self._thought)
            case "<tool_call>":
                return self._open(self._in_call)
        return True

    def _say_fresh(self, text: str) -> None:
        self._fresh = self._fresh and not text.strip()
        self._say(text)

    def _thought(self) -> bool:
        if self._plain(self._THINKING, self._think):
            return True
        return self._marker(self._THINKING) is not None and self._go(self._content)

    def _in_call(self) -> bool:
        if not self._scan():
            return False
        return self._spoil(self._call.why) if self._call.why else self._go(self._closing)

    def _closing(self) -> bool:
        why = "something stands between the end of the call and </tool_call>"
        return self._close(self._CLOSE, lambda: self._marker(self._CLOSE), self._content, why)

    def _after_broken(self) -> bool:
        return self._go(self._content)
