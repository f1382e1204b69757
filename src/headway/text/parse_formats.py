"""The formats of replies: one machine for each family of chat templates.

What a template puts around a text belongs to the marker (the newline between content and `<tool_call>`, the two behind
`</think>`), and nothing else is stripped: rendering what was parsed gives the text that was parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from headway.text.parse_json import SPACE, wrong_name
from headway.text.parse_machine import Markers, State, StreamParser

CODE_TOOL = "code_interpreter"  # the name given to code behind Llama's <|python_tag|>


class Tagged(StreamParser):
    """Qwen and Hermes: `<think>…</think>`, then content, then `<tool_call>{"name": …, "arguments": …}</tool_call>`.

    `<think>` counts only before any content: behind it, it is text. `prompt` may end with `<think>`.
    """

    _ENDS = {"<|im_end|>": (0, 1), "<|endoftext|>": (0, 0)}
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
        self._skip_space()
        rest = self._text[self._at :]
        if self._marker(self._CLOSE) or (self._last and "</tool_call>".startswith(rest)):
            self._at = len(self._text) if self._last and len(rest) < len("</tool_call>") else self._at
            return self._complete(self._content)
        if "</tool_call>".startswith(rest):
            return False
        return self._spoil("something stands between the end of the call's JSON and </tool_call>")

    def _after_broken(self) -> bool:
        return self._go(self._content)


class Llama(StreamParser):
    """Llama 3: a message that is `{"name": …, "parameters": {…}}`, or several with `;` between, or `<|python_tag|>`.

    An object is a call when it opens the message and has a name and the beginning of its parameters before any other
    key; until then it is held back, and what turns out to be another object is content. Behind the tag stand JSON
    calls, `name.call(key="value", …)`, or code, which is a call of `code_interpreter` with the argument `code`.
    """

    _MARKS = Markers({"<|python_tag|>": (0, 0), "<|eot_id|>": (0, 0), "<|eom_id|>": (0, 0), "<|end_of_text|>": (0, 0)})
    _BETWEEN = re.compile(r"[ \t\n\r;]{0,32}")
    _SPACES = re.compile(r"[ \t\n\r]{0,32}")
    _METHOD = re.compile(r"[\w.]{0,256}")
    _CALL = re.compile(r'(\w+)\.call\(\s*((?:\w+="[^"\\\n]*"(?:\s*,\s*(?=\w)|\s*(?=\))))*)\)')
    broken_until = _MARKS

    def _begin(self, prompt: str) -> State:
        return self._first

    def _first(self) -> bool:
        return self._maybe_call(self._SPACES, silent=False)

    def _between(self) -> bool:
        return self._maybe_call(self._BETWEEN, silent=True)

    def _maybe_call(self, gap: re.Pattern[str], *, silent: bool) -> bool:
        """A call or a marker behind a gap; a `silent` gap belongs to them, otherwise it is content."""
        found = gap.match(self._text, self._at)
        assert found is not None
        end = found.end()
        rest = self._text[end:]
        if (not rest and not self._last) or self._MARKS.begins(rest):
            if not self._last:
                return False
        if rest.startswith("{"):
            self._keep(found.group())
            self._at = end
            return self._open(self._doubtful, texts=False)
        if silent and (not rest or self._MARKS.match(self._text, end)):
            self._at = end
        return self._go(self._content)

    def _doubtful(self) -> bool:
        if not self._scan(doubtful=True):
            return False
        if self._index is None:
            self._say("".join(self._kept))
            return self._leave(self._content)
        return self._spoil(self._call.why) if self._call.why else self._complete(self._between)

    def _content(self) -> bool:
        if self._plain(self._MARKS, self._say):
            return True
        found = self._marker(self._MARKS)
        return found is not None and (found != "<|python_tag|>" or self._go(self._tagged))

    def _tagged(self) -> bool:
        gap = self._SPACES.match(self._text, self._at)
        assert gap is not None
        if gap.end() == len(self._text) and not self._last:
            return False
        if self._text[gap.end() : gap.end() + 1] == "{":
            self._at = gap.end()
            return self._open(self._sure)
        method = self._METHOD.match(self._text, self._at)
        assert method is not None
        if method.end() == len(self._text) and len(method.group()) < 256 and not self._last:
            return False
        if re.fullmatch(r"\w+\.call", method.group()) and self._text[method.end() :].startswith("("):
            return self._go(self._method) if self._admit() else True
        return self._open_code(self._in_code, CODE_TOOL)

    def _sure(self) -> bool:
        if not self._scan():
            return False
        return self._spoil(self._call.why) if self._call.why else self._complete(self._between)

    def _method(self) -> bool:
        if self._plain(self._MARKS, self._keep):
            return True
        if not self._last and self._MARKS.match(self._text, self._at) is None:
            return False
        found = self._CALL.fullmatch("".join(self._kept).strip(SPACE))
        if found is None:
            return self._give_up('the call should be name.call(key="value", …)', self._content)
        return self._complete_method(found[1], re.findall(r'(\w+)="([^"]*)"', found[2]))

    def _in_code(self) -> bool:
        if self._plain(self._MARKS, self._add_code):
            return True
        if not self._last and self._MARKS.match(self._text, self._at) is None:
            return False
        return self._complete_code(self._content)

    def _after_broken(self) -> bool:
        return self._go(self._content)


class Mistral(StreamParser):
    """Mistral: `[TOOL_CALLS] [{"name": …, "arguments": …}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call.

    `[CALL_ID]id` may stand before `[ARGS]`; `[THINK]…[/THINK]` is reasoning. `prompt` may end with `[THINK]`.
    """

    _TEXT = Markers({"[TOOL_CALLS]": (0, 0), "[THINK]": (0, 0), "</s>": (0, 0)})
    _THINKING = Markers({"[/THINK]": (0, 0), "</s>": (0, 0)})
    _NAMED = Markers({"[ARGS]": (0, 0), "[CALL_ID]": (0, 0)})
    _NAME = re.compile(r"[^\[{]*")
    broken_until = Markers({"[TOOL_CALLS]": (0, 0), "</s>": (0, 0)})

    def _begin(self, prompt: str) -> State:
        self._list = False
        self._name: list[str] = []
        self._id: str | None = None
        return self._thought if prompt.endswith("[THINK]") else self._content

    def _content(self) -> bool:
        if self._plain(self._TEXT, self._say):
            return True
        match self._marker(self._TEXT):
            case None:
                return False
            case "[TOOL_CALLS]":
                self._list = False
                return self._go(self._calls)
            case "[THINK]":
                return self._go(self._thought)
        return True

    def _thought(self) -> bool:
        if self._plain(self._THINKING, self._think):
            return True
        return self._marker(self._THINKING) is not None and self._go(self._content)

    def _calls(self) -> bool:
        self._skip_space()
        match self._next():
            case "" if not self._last:
                return False
            case "[" if not self._NAMED.match(self._text, self._at):
                if not self._last and self._NAMED.begins(self._text[self._at :]):
                    return False
                self._take_one()
                self._list = True
                return self._go(self._first_item)
            case "{":
                return self._open(self._in_call)
        self._name, self._id = [], None
        return self._go(self._named)

    def _named(self) -> bool:
        found = self._NAME.match(self._text, self._at)
        assert found is not None
        self._add_name(found.group())
        if len("".join(self._name)) > self.limits.name_chars:
            return self._refuse(wrong_name("".join(self._name), self.limits) or "")
        match self._marker(self._NAMED), self._next():
            case "[ARGS]", _:
                return self._go(self._named_arguments)
            case "[CALL_ID]", _:
                return self._refuse("the call has two ids") if self._id is not None else self._begin_id()
            case None, "{":
                return self._go(self._named_arguments)
            case None, "":
                return self._last and self._refuse("the text ends inside the call")
        if not self._last and self._NAMED.begins(self._text[self._at :]):
            return False
        return self._refuse("'[' stands where [ARGS] should")
