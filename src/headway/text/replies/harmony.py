"""The harmony reply format of gpt-oss: messages on channels.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The recipient may also come before the channel (`<|start|>assistant to=functions.f<|channel|>commentary …`). A message
to `functions.f` is a call of `f`, one to `python` a call of `python` with the argument `code`, one to another
recipient a call of that name. `commentary` without a recipient is content between calls. A message with any other
channel or role is a `BadToolCall`.
"""

from __future__ import annotations

from headway.text.replies.json_stream import wrong_name
from headway.text.replies.parts import ToolCallArguments, ToolCallStart
from headway.text.replies.state_machine import Markers, State, StreamParser

CHANNELS = ("analysis", "commentary", "final")
MAX_HEADER = 1024
_ENDS = {"<|end|>": (0, 0), "<|return|>": (0, 0), "<|call|>": (0, 0)}
_STARTS = {"<|start|>": (0, 0), "<|channel|>": (0, 0)}


class Harmony(StreamParser):
    """Harmony. The reply continues `<|start|>assistant`, or whatever follows the prompt's last `<|start|>`."""

    _OPENING = Markers({**_STARTS, "<|message|>": (0, 0), " to=": (0, 0)})
    _TEXT = Markers({**_ENDS, **_STARTS})
    _HEADER = Markers({**_ENDS, "<|start|>": (0, 0), "<|message|>": (0, 0)})
    resume_at = _TEXT
    closers = frozenset(_ENDS)

    def _begin(self, prompt: str) -> State:
        self._state = self._opening
        after = prompt[prompt.rfind("<|start|>") :] if "<|start|>" in prompt else ""
        if after not in ("", "<|start|>assistant"):
            parts = self.feed(after)
            if self._index is not None:  # the prompt opened a call, which the reply continues
                self._out = [part for part in parts if isinstance(part, ToolCallStart | ToolCallArguments)]
        return self._state

    def _opening(self) -> bool:
        rest = self._text[self._at :]
        if self._OPENING.match(rest, 0):
            return self._enter(self._outside if rest.startswith("<|start|>") else self._header)
        if self._OPENING.begins(rest):
            return self._last and bool(rest) and self._enter(self._outside)
        return self._enter(self._outside)

    def _outside(self) -> bool:
        if self._plain(self._TEXT, self._emit_content):
            return True
        match = self._TEXT.match(self._text, self._at)
        if match is not None and match[0] == "<|channel|>":
            return self._enter(self._header)  # the channel belongs to the header
        match self._marker(self._TEXT):
            case None:
                return False
            case "<|start|>":
                return self._enter(self._header)
        return True

    def _header(self) -> bool:
        if self._kept_chars > MAX_HEADER:
            return self._fail(f"the header of the message is longer than {MAX_HEADER} characters")
        if self._plain(self._HEADER, self._keep):
            return True
        match = self._HEADER.match(self._text, self._at)
        if match is None and not self._last:
            return False
        if match is None or match[0] != "<|message|>":
            return self._fail(
                "the text ends inside the header of a message" if match is None else "a header ends early"
            )
        return self._body("".join(self._kept))

    def _body(self, header: str) -> bool:
        """Choose how to read the message by its header."""
        before, _, after = header.replace("<|constrain|>", " ").partition("<|channel|>")
        role, channel = (before.split() or ["assistant"])[0], (after.split() or [""])[0]
        recipients = {word[3:] for word in (*before.split(), *after.split()) if word.startswith("to=")}
        if role != "assistant" and not role.startswith("to="):
            return self._fail(f"the message has the role {role[:40]!r}; a reply is written by the assistant")
        if (channel and channel not in CHANNELS) or ("<|channel|>" in header and not channel):
            return self._fail(f"the message has the channel {channel[:40]!r}; harmony has {', '.join(CHANNELS)}")
        if len(recipients) > 1:
            return self._fail(f"the message has the recipients {', '.join(sorted(recipients))[:80]}; it can have one")
        self._keep(self._marker(self._HEADER) or "")
        if recipients:
            return self._to(recipients.pop())
        return self._close_call(self._reasoning if channel == "analysis" else self._message)

    def _to(self, recipient: str) -> bool:
        name = recipient.removeprefix("functions.")
        if why := wrong_name(name, self.limits):
            return self._fail(why)
        if recipient != "python":
            return self._open(self._in_call, name)
        self._kept, self._kept_chars = [], 0
        return self._open_code(self._in_code, name)

    def _message(self) -> bool:
        return self._plain(self._TEXT, self._emit_content) or self._end_message()

    def _reasoning(self) -> bool:
        return self._plain(self._TEXT, self._emit_reasoning) or self._end_message()

    def _end_message(self) -> bool:
        """Consume an end marker; the start of another message ends this one too."""
        match = self._TEXT.match(self._text, self._at)
        if match is not None and match[0] in _ENDS:
            self._marker(self._TEXT)
        return match is not None and self._enter(self._outside)

    def _in_code(self) -> bool:
        if self._plain(self._TEXT, self._add_code):
            return True
        return (self._end_message() or self._last) and self._complete_code(self._outside)

    def _in_call(self) -> bool:
        if not self._scan():
            return False
        return self._fail(self._call.why) if self._call.why else self._enter(self._closing)

    def _closing(self) -> bool:
        why = "there is text between the arguments and <|call|>"
        return self._close(self._TEXT, self._end_message, self._outside, why)

    def _after_malformed(self) -> bool:
        return self._enter(self._outside)
