"""Byte-level BPE without the tokenizers package's model: native merges, and that package's way to split words.

Loading it keeps nobody waiting: what is native runs without the GIL, and the rest is done in small pieces, where the
package would hold the GIL for the whole vocabulary. The ids are the same; `tests/text` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from headway.base.text import find_all
from headway.kernels.native.bpe import Bpe
from headway.text.parts import LONGEST, composed, parts_of

if TYPE_CHECKING:
    import tokenizers

MAX_TOKEN_CHARS = 4096  # the longest real tokens are runs of a few hundred spaces or dashes


class NativeBpe:
    """Encodes text as a byte-level backend of the tokenizers package does: the same words, then native merges."""

    def __init__(
        self,
        bpe: Bpe,
        words: tokenizers.pre_tokenizers.PreTokenizer,
        *,
        control: Iterable[int],
        added: Mapping[int, str],
        composes: bool = False,
        ignore_merges: bool = False,
    ) -> None:
        """`added` tokens are found in texts before words are; those that are `control` only where names are read.
        `composes` brings texts into Unicode's form C."""
        from tokenizers import normalizers

        self._bpe, self._words, self._ignore_merges = bpe, words, ignore_merges
        self._normalizer = normalizers.NFC() if composes else None
        self.control, self.added = frozenset(control), dict(added)
        self._ids = {text: id for id, text in self.added.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._longest = max(map(len, self._ids), default=1)
        self._size = max(len(bpe), max(self.added, default=-1) + 1)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, id: int) -> bool:
        return 0 <= id < len(self._bpe) or id in self.added

    @property
    def normalizes(self) -> bool:
        return self._normalizer is not None

    def encode(self, text: str, *, special: bool, whole: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text; names of control tokens are plain text unless `special`. `whole` encodes a long word."""
        ids: list[int] = []
        begin = 0
        for match in find_all(self._names, text, self._longest) if self._names else ():
            id = self._ids[match[0]]
            if special or id not in self.control:
                ids += [*self._encode(text[begin : match.start()], whole), id]
                begin = match.end()
        return ids + self._encode(text[begin:], whole)

    def _encode(self, text: str, whole: Callable[[str], list[int]]) -> list[int]:
        if not text:
            return []
        if self._normalizer is not None:
            text = composed(text, self._normalizer)
        ids: list[int] = []
        for part in parts_of(text, self._words):
            if len(part) > LONGEST:
                ids += whole(part)
            else:
                words = [word for word, _ in self._words.pre_tokenize_str(part)]
                ids += self._bpe.encode(words, whole=self._ignore_merges)
        return ids

    def id_to_token(self, id: int) -> str | None:
        if (name := self.added.get(id)) is not None:
            return name
        return self._bpe[id] if 0 <= id < len(self._bpe) else None

    def token_to_id(self, token: str) -> int | None:
        id = self._bpe.find(token)
        return self._ids.get(token) if id is None else id


def merges_into(bpe: Bpe, name: str) -> bool:
    """Whether merges may spell a control token in plain text: that takes two tokens that do."""
    return any(bpe.find(name[:i]) is not None and bpe.find(name[i:]) is not None for i in range(1, len(name)))
