"""Native byte-pair encoding: a vocabulary and its merges, as a GGUF header has them.

The reference is the `tokenizers` package, which takes some 60 ms to build what this builds in 5.
"""

from __future__ import annotations

import ctypes
from typing import Protocol, runtime_checkable

import numpy as np

from headway.kernels.native.library import open_library


@runtime_checkable
class StringTable(Protocol):
    """Strings as they lie in a GGUF header: a length of 8 bytes, then UTF-8, which was checked."""

    raw: bytes

    def __len__(self) -> int: ...


def strings_size(data: np.ndarray, count: int) -> int | None:
    """The bytes that `count` strings take at the start of `data`; None if they do not fit, or one is not UTF-8, or
    there is no native library to look."""
    calls = open_library().calls
    size = -1 if calls is None else calls.hw_strings_size(data.ctypes.data, data.nbytes, count)
    return None if size < 0 else size


class Bpe:
    """Tokens by id, and words to ids. The words are spelled in the byte-level alphabet, which has no newline."""

    @classmethod
    def build(cls, tokens: StringTable, merges: StringTable, longest: int) -> Bpe | None:
        """None if these are not tokens of at most `longest` bytes, each once, and merges of them, or without the
        library."""
        calls = open_library().calls
        if calls is None:
            return None
        handle = calls.hw_bpe_new(tokens.raw, len(tokens), merges.raw, len(merges), longest)
        return cls(calls, handle, len(tokens), (tokens.raw, merges.raw)) if handle else None

    def __init__(self, calls: ctypes.CDLL, handle: int, count: int, strings: tuple[bytes, bytes]) -> None:
        self._calls, self._handle, self._count = calls, handle, count
        self._strings = strings  # the library reads them where they are

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, id: int) -> str:
        """The text of a token."""
        if not 0 <= id < self._count:
            raise IndexError(id)
        size = ctypes.c_int64()
        place = self._calls.hw_bpe_token(self._handle, id, size)
        return ctypes.string_at(place, size.value).decode()

    def find(self, token: str) -> int | None:
        """The id of a token."""
        text = token.encode()
        id = self._calls.hw_bpe_find(self._handle, text, len(text))
        return None if id < 0 else id

    def encode(self, words: list[str], *, whole: bool) -> list[int]:
        """The ids of words, one after the other; with `whole`, a word that is a token is one id."""
        text = "\n".join(words).encode()
        ids = (ctypes.c_int32 * max(len(text), 1))()
        count = self._calls.hw_bpe_encode(self._handle, text, len(text), whole, ids)
        if count < 0:
            raise MemoryError(f"not enough memory to encode {len(text)} bytes")
        return ids[:count]

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._calls.hw_bpe_free(self._handle)
