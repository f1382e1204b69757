"""Incremental detokenization: ids in, text out, never half a character.

The pieces add up to exactly `tokenizer.decode` of all ids; those of a stream that goes on after other ids, to what they
add to the text. A SentencePiece decoder strips a leading space: here, only where the text really begins. Bytes that may
still become a character are held back; invalid ones become U+FFFD at once. Each id is decoded once.

A decoder that depends on neighboring tokens (WordPiece etc.: `decoding.kind == "opaque"`) cannot stream: all its text
comes with `flush`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from headway.base.errors import Closed
from headway.text.tokenizer import Tokenizer, strip_front


class TextStream:
    """The text of a growing sequence of ids, which may go on `after` others."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, *, after: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self._last = tokenizer.last_with_text(after, skip_special=skip_special)  # None where the text begins
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.strip = tokenizer.decoding.strip if self._last is None else 0  # leading spaces still to be stripped
        self._opaque: list[int] | None = [] if tokenizer.decoding.kind == "opaque" else None
        self._done = False

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that `ids` complete. An id outside the vocabulary raises and changes nothing."""
        if self._done:
            raise Closed("the text stream is flushed; create a new one for another sequence")
        checked = self.tokenizer.check_ids([ids] if isinstance(ids, int) else ids)
        if self.skip_special:
            checked = [id for id in checked if id not in self.tokenizer.special_ids]
        if self._opaque is not None:
            self._opaque += checked
            return ""
        return self._cut(self._utf8.decode(b"".join(map(self.tokenizer.token_bytes, checked))))

    @property
    def holds(self) -> bool:
        """Whether it holds back bytes that may still become a character."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The remaining text, an incomplete character as U+FFFD. Ends the stream."""
        if self._done:
            return ""
        self._done = True
        if self._opaque is not None:
            return self._decode_opaque(self._opaque)
        return self._cut(self._utf8.decode(b"", final=True))

    def copy(self) -> TextStream:
        """An independent stream in the same state."""
        twin = TextStream(self.tokenizer, self.skip_special)
        twin._utf8.setstate(self._utf8.getstate())
        twin._last, twin.strip, twin._done = self._last, self.strip, self._done
        twin._opaque = None if self._opaque is None else list(self._opaque)
        return twin

    def _decode_opaque(self, ids: list[int]) -> str:
        if self._last is None:
            return self.tokenizer.decode(ids)
        before, whole = self.tokenizer.decode([self._last]), self.tokenizer.decode([self._last, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids)

    def _cut(self, text: str) -> str:
        text, self.strip = strip_front(text, self.strip)
        return text
