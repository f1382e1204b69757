"""Native byte-pair encoding of a GGUF file's vocabulary gives what the tokenizers package gives."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import BadModelFile
from headway.kernels.native.bpe import strings_size
from headway.kernels.native.library import open_library
from headway.models.files.gguf import Strings, read_header
from headway.models.hub.store import resolve
from headway.text import Tokenizer
from headway.text.gguf_vocab import PRE_TOKENIZERS, read_native
from headway.text.tokenizer import byte_of_character
from support.properties import examples

pytestmark = pytest.mark.skipif(open_library().calls is None, reason="there is no native library here")
TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
NAMES = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im", "|>", "<|", "<user>", "<user")
TEXTS = st.lists(st.one_of(st.text(max_size=12), st.sampled_from((*NAMES, "  ", "\n\n", "don't", "1234", "ing the"))))
BYTES = {byte: character for character, byte in byte_of_character().items()}


def packed(texts: Iterable[str]) -> Strings:
    """Strings as a GGUF header has them."""
    items = [text.encode() for text in texts]
    return Strings(b"".join(struct.pack("<Q", len(item)) + item for item in items), len(items))


def listed(metadata: dict) -> dict:
    return metadata | {key: list(metadata[key]) for key in (TOKENS, MERGES)}


def pair(metadata: dict) -> tuple[Tokenizer, Tokenizer]:
    """The native tokenizer, and that of the tokenizers package."""
    native, reference = Tokenizer.from_gguf(metadata), Tokenizer.from_gguf(listed(metadata))
    assert native is not None
    assert reference is not None
    assert read_native(metadata) is not None
    assert read_native(listed(metadata)) is None
    return native, reference


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Tokenizer]:
    return pair(dict(read_header(resolve("smollm2")).metadata))


def test_the_default_models_tokenizer_is_the_same(smollm2: tuple[Tokenizer, Tokenizer]) -> None:
    native, reference = smollm2
    for name in ("vocab_size", "special_ids", "decoding", "bos_id", "eos_ids", "add_bos", "special_tokens", "_added"):
        assert getattr(native, name) == getattr(reference, name), name
    ids = range(native.vocab_size)
    assert [native.token_bytes(id) for id in ids] == [reference.token_bytes(id) for id in ids]
    assert native.backend.to_str() == reference.backend.to_str()


@settings(max_examples=examples(150), deadline=None)
@given(parts=TEXTS, special=st.booleans())
def test_any_text_has_the_same_ids(smollm2: tuple[Tokenizer, Tokenizer], parts: list[str], special: bool) -> None:
    native, reference = smollm2
    text = "".join(parts)
    assert native.encode(text, special=special) == reference.encode(text, special=special)


def test_a_long_word_is_encoded_in_time(smollm2: tuple[Tokenizer, Tokenizer]) -> None:
    native, reference = smollm2
    word = "abcdefghij" * 20_000
    assert native.encode(word) == reference.encode(word)


@st.composite
def vocabularies(draw: st.DrawFn) -> dict:
    """Merges drawn at random over an alphabet that may lack bytes, control tokens and user-defined ones."""
    missing = draw(st.sets(st.sampled_from("xyz01 é"), max_size=3))
    gone = {BYTES[byte] for character in missing for byte in character.encode()}
    tokens = [character for character in BYTES.values() if character not in gone]
    merges: list[str] = []
    parts = [BYTES[byte] for byte in b"aabtheing ' 12" if BYTES[byte] not in gone]
    for _ in range(draw(st.integers(1, 12))):
        left, right = draw(st.sampled_from(parts)), draw(st.sampled_from(parts))
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
            parts.append(left + right)
    tokens += ["<|endoftext|>", "<|im_start|>", "<user>", "<us"]
    kinds = [1] * (len(tokens) - 4) + [3, 3, 4, draw(st.sampled_from((1, 4)))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": draw(st.sampled_from(sorted(PRE_TOKENIZERS))),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": len(tokens) - 4,
        "tokenizer.ggml.bos_token_id": len(tokens) - 4,
        TOKENS: packed(tokens),
        MERGES: packed(merges),
    }


@settings(max_examples=examples(150), deadline=None)
@given(metadata=vocabularies(), parts=TEXTS, special=st.booleans())
def test_any_vocabulary_and_pre_tokenizer_gives_the_same_ids(metadata: dict, parts: list[str], special: bool) -> None:
    native, reference = pair(metadata)
    text = "".join(parts)
    assert native.encode(text, special=special) == reference.encode(text, special=special)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({TOKENS: ["a", "b", "a"]}, "is 'a', and so is"),
        ({TOKENS: ["a", "b", "x" * 5000]}, "5000 characters"),
        ({TOKENS: ["a", "b", "ab"], MERGES: ["a"]}, "a merge is two tokens"),
        ({TOKENS: ["a", "b", "ab"], MERGES: ["a "]}, "a merge is two tokens"),
        ({TOKENS: ["a", "b"], MERGES: ["a b"]}, "do not form a tokenizer"),
        ({TOKENS: ["a", "b"], MERGES: ["a c"]}, "do not form a tokenizer"),
    ],
)
def test_what_is_wrong_is_said_by_the_one_that_knows(change: dict, said: str) -> None:
    base = {"tokenizer.ggml.model": "gpt2", TOKENS: ["a", "b"], MERGES: []}
    metadata = {key: packed(value) if isinstance(value, list) else value for key, value in (base | change).items()}
    with pytest.raises(BadModelFile, match=said):
        Tokenizer.from_gguf(metadata)


def test_an_empty_token_keeps_its_id() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", TOKENS: packed(["a", "", "b"]), MERGES: packed([])}
    assert read_native(metadata) is None
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [0, 2]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=9), st.text(max_size=5).map(str.encode)), max_size=6), st.integers(0, 9))
def test_strings_are_measured_where_all_are_utf8(items: list[bytes], cut: int) -> None:
    raw = b"".join(struct.pack("<Q", len(item)) + item for item in items)
    try:
        expected: int | None = len(raw) if all(item.decode() is not None for item in items) else None
    except UnicodeDecodeError:
        expected = None
    assert strings_size(np.frombuffer(raw + bytes(3), np.uint8), len(items)) == expected
    if items and cut:
        assert strings_size(np.frombuffer(raw[: max(len(raw) - cut, 0)], np.uint8), len(items)) is None
