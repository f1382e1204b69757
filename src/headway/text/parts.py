"""Where a long text may be cut so that the tokens of its parts are those of the whole.

Byte-level tokenizers split a text into words first, from left to right, and merge nothing across words. So a text may
be cut where a word begins that is not after a space. With rules that look behind, or ahead for more than spaces, or put
something in front of a text, it is not cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

PART = 8192  # characters that are split into words in one call, which holds the GIL
LONGEST = 16 * PART  # characters in which a cut is looked for; a text without one is one part
MARGIN = 16  # characters behind a cut that were seen: rules look ahead by a few
_ASCII = re.compile("[\x00-\x7f]")
_SPACE_ENDS = r"(?!\S)"  # no word ends with a space where a text is cut
_LOOKS = re.compile(r"\(\?<?[=!]|\\[bB]")  # behind or ahead
LOCAL = ("ByteLevel", "Digits", "Punctuation", "Split", "Whitespace", "WhitespaceSplit")


def cuts_anywhere(pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer | None) -> bool:
    """Whether texts may be cut where words begin."""
    return pre_tokenizer is not None and _is_local(json.loads(pre_tokenizer.__getstate__()))


def _is_local(step: dict[str, Any]) -> bool:
    if step["type"] == "Sequence":
        return all(map(_is_local, step["pretokenizers"]))
    rule = str(step.get("pattern", {}).get("Regex", "")).replace(_SPACE_ENDS, "")
    return step["type"] in LOCAL and not step.get("add_prefix_space") and not _LOOKS.search(rule)


def parts_of(text: str, words: tokenizers.pre_tokenizers.PreTokenizer, size: int = PART) -> Iterator[str]:
    """A text in parts of about `size` characters. The last one is longer if there is no cut in LONGEST."""
    at, length = 0, size
    while at + length < len(text) and length <= LONGEST:
        window = text[at : at + length]
        spans = [span for _, span in words.pre_tokenize_str(window)]
        starts = [start for (_, end), (start, _) in pairwise(spans) if end <= start]  # some end within a character
        if cut := next((s for s in reversed(starts) if s <= length - MARGIN and _ends(window[s - 1])), 0):
            yield window[:cut]
            at, length = at + cut, size
        else:
            length *= 2
    yield text[at:]


def _ends(character: str) -> bool:
    """Whether a part may end with a character: not with a space, which words are cut from by what follows."""
    return character.isprintable() and character != " "


def composed(text: str, normalizer: tokenizers.normalizers.Normalizer) -> str:
    """A text in Unicode's form C, by a normalizer. An ASCII character never composes with what comes before it."""
    if text.isascii():
        return text
    parts, at = [], 0
    while at < len(text):
        end = _next_ascii(text, at + PART)
        parts.append(normalizer.normalize_str(text[at:end]))
        at = end
    return "".join(parts)


def _next_ascii(text: str, at: int) -> int:
    """Where the first ASCII character from a place on is, or the end."""
    while at < len(text):
        if match := _ASCII.search(text, at, at + PART):
            return match.start()
        at += PART
    return len(text)
