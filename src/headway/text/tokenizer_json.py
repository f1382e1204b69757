"""Reads a tokenizer.json of byte-level BPE so that other threads go on meanwhile, for a server that is answering.

The tokenizers package reads such a file in one call, which holds the GIL for hundreds of milliseconds. Here the
vocabulary and the merges are parsed in slices, and the native library does the rest without the GIL. What is not plain
byte-level BPE, is laid out otherwise or is wrong is left to the package, which also knows what to say of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.kernels.native.bpe import Bpe
from headway.text.native_bpe import MAX_TOKEN_CHARS, NativeBpe, merges_into
from headway.text.parts import cuts_anywhere

if TYPE_CHECKING:
    import tokenizers

SLICE = 1 << 15  # characters that are parsed in one call, which takes a fraction of a millisecond
VOCAB, MERGES = re.compile(r'"vocab"\s*:\s*\{'), re.compile(r'"merges"\s*:\s*\[')
ENTRY, PAIR, LINE = re.compile(r',(?=\s*")'), re.compile(r",(?=\s*\[)"), re.compile(r',(?=\s*")')
MARK = "\0"  # where the vocabulary was, in the rest of the file
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False}  # what added tokens must not ask for


@dataclass(frozen=True, eq=False)
class ByteLevelFile:
    """A tokenizer.json of byte-level BPE: its vocabulary, its added tokens, and all else as the package reads it."""

    bpe: Bpe
    added: dict[int, str]
    special: frozenset[int]  # of the added ones
    frame: tokenizers.Tokenizer  # words, decoder and template, with a vocabulary of the letter a
    composes: bool
    ignore_merges: bool

    def token_to_id(self, token: str) -> int | None:
        id = self.bpe.find(token)
        return next((one for one, text in self.added.items() if text == token), None) if id is None else id

    def native(self, more: Iterable[str] = ()) -> NativeBpe | None:
        """The tokenizer, in which `more` tokens are special; None if the package has to look at them."""
        marked = {self.token_to_id(text): text for text in more}
        if marked.keys() & self.added.keys() or None in marked:
            return None
        added = self.added | {id: text for id, text in marked.items() if id is not None}
        control = self.special | (added.keys() - self.added.keys())
        if any(merges_into(self.bpe, added[id]) for id in control):
            return None
        words = self.frame.pre_tokenizer
        assert words is not None
        how = {"composes": self.composes, "ignore_merges": self.ignore_merges}
        return NativeBpe(self.bpe, words, control=control, added=added, **how)


def read_byte_level(data: bytes) -> ByteLevelFile | None:
    """The tokenizer in the bytes of a tokenizer.json; None where the tokenizers package has to read it."""
    try:
        parts = _parts(data.decode())
        return None if parts is None else _read(*parts)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # it is not what it should be
        return None


def _read(rest: dict[str, Any], vocab: dict[str, int], merges: Iterator[Any]) -> ByteLevelFile | None:
    model, entries = rest["model"], rest.get("added_tokens") or []
    added = _added(entries, vocab, rest.get("normalizer") is None)
    if added is None or not _is_plain(model) or not _is_byte_level(rest):
        return None
    letter = {"a": vocab["a"]} if "a" in vocab else {}
    small = rest | {"added_tokens": [], "model": model | {"vocab": letter, "merges": [], "unk_token": None}}
    frame = _made(small)
    if frame is None or not cuts_anywhere(frame.pre_tokenizer):
        return None
    bpe = Bpe.build(_Strings(_by_id(vocab)), _Strings(map(_merge, merges)), MAX_TOKEN_CHARS)
    if bpe is None or not _never_unknown(model, bpe):
        return None
    special = frozenset(entry["id"] for entry in entries if entry["special"])
    return ByteLevelFile(bpe, added, special, frame, rest.get("normalizer") is not None, bool(model["ignore_merges"]))


def _made(state: dict[str, Any]) -> tokenizers.Tokenizer | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(state))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic inside tokenizers is not an Exception
        return None


# --- the file in slices


def _parts(text: str) -> tuple[dict[str, Any], dict[str, int], Iterator[Any]] | None:
    """The file without its vocabulary and merges, and those; None for another layout.

    The package writes the vocabulary first and the merges last. That the rest is JSON with a mark where the vocabulary
    was, and that every slice is JSON, shows that they were cut where they begin and end.
    """
    start = _after(VOCAB, '"vocab"', text, 0)
    second = start and _after(MERGES, '"merges"', text, start)
    if not start or not second:
        return None
    end, last = text.rindex("}", start, second), text.rindex("]", second)
    rest = json.loads(f'{text[:start]}"\\u0000": 0{text[end:second]}{text[last:]}')
    model = rest["model"]
    if model.get("type") != "BPE" or model["vocab"] != {MARK: 0} or model["merges"] != []:
        return None
    vocab: dict[str, int] = {}
    for part in _slices(text, start, end, ENTRY, "{}"):
        vocab |= part
    pairs = text[second : second + SLICE].lstrip().startswith("[")
    slices = _slices(text, second, last, PAIR if pairs else LINE, "[]")
    return rest, vocab, (merge for part in slices for merge in part)


def _after(pattern: re.Pattern[str], key: str, text: str, start: int) -> int | None:
    """Where the value of a key begins. `find` is quick; the pattern is tried only where the key is."""
    while (start := text.find(key, start)) >= 0:
        if (match := pattern.match(text, start)) is not None:
            return match.end()
        start += len(key)
    return None


def _slices(text: str, start: int, end: int, cut: re.Pattern[str], ends: str) -> Iterator[Any]:
    """The entries between two places, some at a time. A cut inside of a string or a pair leaves what is not JSON."""
    while end - start > 2 * SLICE:
        for match in cut.finditer(text, start + SLICE, start + 2 * SLICE):
            try:
                part = json.loads(f"{ends[0]}{text[start : match.start()]}{ends[1]}")
            except json.JSONDecodeError:
                continue
            yield part
            start = match.end()
            break
        else:
            raise ValueError("an entry is as long as a slice")
    yield json.loads(f"{ends[0]}{text[start:end]}{ends[1]}")


# --- what is byte-level BPE


def _added(entries: list[Any], vocab: dict[str, int], may_be_normalized: bool) -> dict[int, str] | None:
    """The added tokens by id; None if they are more than names that are found in texts."""
    added: dict[int, str] = {}
    normalized = {entry["normalized"] for entry in entries}
    if len(normalized) > 1 or (normalized == {True} and not may_be_normalized):
        return None
    following = len(vocab)
    for entry in entries:
        text, id = entry["content"], entry["id"]
        if not text or text in added.values() or any(entry[name] is not value for name, value in PLAIN.items()):
            return None
        if vocab.get(text, following) != id:  # the package would number it otherwise
            return None
        following += text not in vocab
        added[id] = text
    return added


def _is_plain(model: dict[str, Any]) -> bool:
    """Whether merges are all that the model does."""
    return not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))


def _is_byte_level(rest: dict[str, Any]) -> bool:
    """Whether words are spelled in the byte-level alphabet, there and back, and texts at most composed before."""
    words, normalizer = rest["pre_tokenizer"] or {}, rest.get("normalizer")
    steps = words["pretokenizers"] if words.get("type") == "Sequence" else [words]
    return (
        any(step.get("type") == "ByteLevel" for step in steps)
        and (rest["decoder"] or {}).get("type") == "ByteLevel"
        and (normalizer is None or normalizer == {"type": "NFC"})
    )


def _never_unknown(model: dict[str, Any], bpe: Bpe) -> bool:
    """Whether a byte without a token encodes to nothing, or every byte has one."""
    from tokenizers.pre_tokenizers import ByteLevel

    plain = model.get("unk_token") is None and not model.get("byte_fallback")
    return plain or all(bpe.find(letter) is not None for letter in ByteLevel.alphabet())


def _by_id(vocab: dict[str, int]) -> list[str]:
    """The tokens in the order of their ids, which must be all of 0 to the last."""
    tokens: list[str | None] = [None] * len(vocab)
    for token, id in vocab.items():
        if type(id) is not int or id < 0 or tokens[id] is not None:
            raise ValueError(f"the id {id!r} is not one, or is used twice")
        tokens[id] = token
    return [token for token in tokens if token is not None]


def _merge(merge: Any) -> str:
    """A merge as two tokens with a space between."""
    left, right = merge if isinstance(merge, list) else merge.split(" ")
    if " " in left or " " in right:
        raise ValueError(f"the merge {merge!r} has a space in a token")
    return f"{left} {right}"


class _Strings:
    """Strings as the native library reads them: a length of 8 bytes, then UTF-8."""

    def __init__(self, texts: Iterable[str]) -> None:
        raw, self._count = bytearray(), 0
        for text in texts:  # one by one: a list of them would take a while to be freed, in one go
            item = text.encode()
            raw += len(item).to_bytes(8, "little") + item
            self._count += 1
        self.raw = bytes(raw)

    def __len__(self) -> int:
        return self._count
