"""Parses a model's reply as it is generated: steps in, parts out."""

from __future__ import annotations

from collections.abc import Sequence

from headway.program.generation.generator import Step
from headway.text.replies import Content, Part, Reply, collect, reply_parser
from headway.text.stream import TextStream
from headway.text.tokenizer import Tokenizer, strip_front


class ReplyReader:
    """Content, reasoning and calls of one assistant message, however many generations write it.

    Markers of some formats are special tokens, which the text of a step leaves out. So tokens are parsed, each when all
    of its text is certain. Without a format everything is content; `special` keeps special tokens in it. A message is a
    text of its own: the leading space that the tokenizer puts at the beginning of a text is not part of it, unless the
    message `continues` a text of the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: str | None,
        prompt: str = "",
        *,
        special: bool = False,
        continues: bool = False,
    ) -> None:
        self._tokenizer, self._special, self._continues = tokenizer, special, continues
        self._parser = None if format is None else reply_parser(format, prompt=prompt)
        self._parts: list[Part] = []
        self.text = ""  # all that was read, special tokens included
        self.begin(())

    def begin(self, before: Sequence[int]) -> None:
        """A generation continues the message after these tokens of its context."""
        self._shown = TextStream(self._tokenizer, after=before)
        self._raw = TextStream(self._tokenizer, skip_special=False, after=before)
        read = self._shown if self._parser is None else self._raw
        own = not self.text and not self._continues
        self._strip = self._tokenizer.decoding.strip - read.strip if own else 0  # spaces still to be stripped
        self._held: list[tuple[int, int]] = []  # tokens, and how many characters are shown with each
        self._certain = ""
        self._known = self._read = 0

    def push(self, step: Step) -> list[Part]:
        """The parts that a step completes."""
        if self._parser is None and not self._special:
            return self._write_drawn(step.text)
        for token in step.tokens:
            if token < self._tokenizer.vocab_size:  # ids the tokenizer lacks have no text
                self._known += len(self._shown.push([token]))
                self._held.append((token, self._known))
        self._certain += step.text
        text = self._released()
        if step.finish is not None:
            text += self._certain[self._read :]  # of a token that also held the beginning of a stop
        return self._write_drawn(text)

    def write(self, text: str) -> list[Part]:
        """The parts that a text completes which was filled in, not drawn."""
        self.text += text
        if self._parser is not None:
            return self._keep(self._parser.feed(text))
        return self._keep([Content(text)] if text else [])

    def finish(self) -> list[Part]:
        """The rest: what was held back."""
        return [] if self._parser is None else self._keep(self._parser.finish())

    @property
    def reply(self) -> Reply:
        """The message so far."""
        return collect(self._parts)

    def _released(self) -> str:
        ready = [(token, end) for token, end in self._held if end <= len(self._certain)]
        del self._held[: len(ready)]
        self._read = ready[-1][1] if ready else self._read
        return "".join(self._raw.push([token]) for token, _ in ready)

    def _write_drawn(self, text: str) -> list[Part]:
        text, self._strip = strip_front(text, self._strip)
        return self.write(text)

    def _keep(self, parts: list[Part]) -> list[Part]:
        self._parts += parts
        return parts
