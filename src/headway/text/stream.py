"""Incremental detokenization: ids in, text out, never half a character.

The pieces add up to exactly `tokenizer.decode` of all ids; those of a stream that goes on after other ids, to what they
add to the text. A SentencePiece decoder strips a leading space: here, only where the text really begins. Bytes that may
still become a character are held back; invalid ones become U+FFFD at once. Where the ids before end inside a character,
it is in the text once its last byte is there; if that never comes, its U+FFFD belongs to the text before. Each id is
decoded once.

A decoder that depends on neighboring tokens (WordPiece etc.: `decoding.kind == "opaque"`) cannot stream: all its text
comes with `flush`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from headway.base.errors import Closed
from headway.text.tokenizer import Tokenizer, strip_front

LONGEST = 4  # bytes of a character


class TextStream:
    """The text of a growing sequence of ids, which may go on `after` others."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, *, after: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self._last = tokenizer.last_with_text(after, skip_special=skip_special)  # None where the text begins
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = self._begin_inside(after)  # whether it began inside a character that is still not decided
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
        return self._cut(self._decoded(b"".join(map(self.tokenizer.token_bytes, checked))))

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
        return self._cut(self._decoded(b"", final=True))

    def copy(self) -> TextStream:
        """An independent stream in the same state."""
        twin = TextStream(self.tokenizer, self.skip_special)
        twin._utf8.setstate(self._utf8.getstate())
        twin._last, twin.strip, twin._done, twin._begun = self._last, self.strip, self._done, self._begun
        twin._opaque = None if self._opaque is None else list(self._opaque)
        return twin

    def _begin_inside(self, after: Sequence[int]) -> bool:
        """Decode the bytes of a character that the ids before may end inside; whether they do."""
        if self._last is None or self.tokenizer.decoding.kind == "opaque":
            return False
        end, special = b"", self.tokenizer.special_ids if self.skip_special else ()
        for id in reversed(after):
            if len(end) >= LONGEST or (end and end[0] < 0x80):
                break
            if self.tokenizer.has(id) and id not in special:
                end = self.tokenizer.token_bytes(id) + end
        self._utf8.decode(end)
        return self.holds

    def _decoded(self, data: bytes, *, final: bool = False) -> str:
        """The text that bytes complete, without the U+FFFD of a character that began before."""
        text = self._utf8.decode(data, final)
        if text and self._begun:
            self._begun = False
            return text.removeprefix("\ufffd")
        return text

    def _decode_opaque(self, ids: list[int]) -> str:
        if self._last is None:
            return self.tokenizer.decode(ids)
        before, whole = self.tokenizer.decode([self._last]), self.tokenizer.decode([self._last, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids)

    def _cut(self, text: str) -> str:
        text, self.strip = strip_front(text, self.strip)
        return text
