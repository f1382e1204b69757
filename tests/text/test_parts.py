"""Long texts are encoded in parts: with the words, and so the tokens, of the whole."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from headway.models.files.gguf import read_header
from headway.models.hub.store import resolve
from headway.text import Tokenizer
from headway.text.gguf_vocab import PRE_TOKENIZERS, _pre_tokenizer
from headway.text.parts import PART, composed, cuts_anywhere, parts_of

PIECES = (
    *("  ", "\n\n", "don't", "1234567", "ing the", "e\u0301"),
    *("!?...", " \t ", "日本語", "x" * 40, "'S", "_a_b", "\r\n "),
)
TEXTS = st.lists(st.one_of(st.text(max_size=9), st.sampled_from(PIECES)), max_size=60).map("".join)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(text=TEXTS, size=st.integers(17, 60))
@example(text="¢\u09bc" + "x" * 40, size=17)  # Falcon's digits are those of bytes, too
def test_parts_have_the_words_of_the_whole(name: str, text: str, size: int) -> None:
    words = _pre_tokenizer(PRE_TOKENIZERS[name])
    parts = list(parts_of(text, words, size))
    assert "".join(parts) == text
    found = [word for part in parts for word, _ in words.pre_tokenize_str(part)]
    assert found == [word for word, _ in words.pre_tokenize_str(text)]
    assert cuts_anywhere(words)


def test_what_depends_on_its_surroundings_is_not_cut() -> None:
    assert not cuts_anywhere(None)
    assert not cuts_anywhere(pre_tokenizers.Metaspace())
    assert not cuts_anywhere(pre_tokenizers.ByteLevel(add_prefix_space=True))
    assert cuts_anywhere(pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)]))


@pytest.mark.parametrize("text", ["e\u0301" * PART, "a" * PART + "\u0301" * 9, "일" * PART + "b", "가\u11a8 " * PART])
def test_a_long_text_is_composed_as_a_whole(text: str) -> None:
    assert composed(text, normalizers.NFC()) == unicodedata.normalize("NFC", text)


def test_a_long_text_has_the_same_tokens_natively_and_in_parts() -> None:
    metadata = dict(read_header(resolve("smollm2")).metadata)
    lists = {key: list(metadata[key]) for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")}
    native, other = Tokenizer.from_gguf(metadata), Tokenizer.from_gguf(metadata | lists)
    assert native is not None
    assert other is not None
    text = "".join(PIECES) * 300 + "a" * (20 * PART) + "".join(PIECES) * 300
    whole = other._plain_backend().encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert native.encode(text) == other.encode(text) == whole
