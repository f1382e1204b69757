"""Text in parts is the text of the whole, for any ids and any way to cut them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tokenizers import pre_tokenizers as pre

from headway.base.errors import Closed, InvalidToken
from headway.text import TextStream, Tokenizer
from headway.text.tokenizer import byte_of_character
from support.properties import examples


def byte_level() -> Tokenizer:
    alphabet = list(byte_of_character())
    tokens = ["<|a|>", "<|b|>", *alphabet, "ðŁ", "¤·", "Ġthe"]  # half an emoji, the other half, " the"
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [], "token_type": [3, 4] + [1] * 259}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    assert tokenizer is not None
    return tokenizer


def sentencepiece(prefix: bool) -> Tokenizer:
    pieces = ["▁", "▁▁", "▁hi", "a", "日", "▁a▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    metadata = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "add_space_prefix": prefix}
    metadata["token_type"] = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    assert tokenizer is not None
    return tokenizer


def word_piece() -> Tokenizer:
    backend = Backend(models.WordPiece({"[UNK]": 0, "un": 1, "##do": 2, "it": 3, ".": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre.Whitespace()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


TOKENIZERS = {
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(True),
    "sentencepiece-bare": sentencepiece(False),
    "wordpiece": word_piece(),
}


@st.composite
def sequences(draw, tokenizer: Tokenizer):
    """Chunks of ids: random ones, and the bytes of real characters, so that valid and broken UTF-8 both occur."""
    by_bytes = {}
    for id in range(tokenizer.vocab_size):
        by_bytes.setdefault(tokenizer.token_bytes(id), id)
    some = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    spelled = text.map(lambda t: [by_bytes[bytes([b])] for b in t.encode() if bytes([b]) in by_bytes])
    ids = [id for part in draw(st.lists(st.one_of(some, spelled), max_size=6)) for id in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [True, False])
@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_parts_make_the_whole(name, skip_special, data):
    tokenizer = TOKENIZERS[name]
    chunks = data.draw(sequences(tokenizer))
    stream = TextStream(tokenizer, skip_special=skip_special)
    parts = [stream.push(chunk) for chunk in chunks] + [stream.flush()]
    whole = tokenizer.decode([id for chunk in chunks for id in chunk], skip_special=skip_special)
    assert "".join(parts) == whole


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_a_character_is_never_split(name):
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.backend.token_to_id(c) for c in "ðŁ¤·"] if name == "byte-level" else [3 + b for b in "🤷".encode()]
    stream = TextStream(tokenizer)
    assert [stream.push([id]) for id in ids] == ["", "", "", "🤷"]
    assert stream.flush() == ""


def test_bytes_that_cannot_become_a_character_come_at_once():
    stream = TextStream(TOKENIZERS["sentencepiece"])
    byte = [3 + b for b in range(256)]
    assert stream.push(byte[0xFF]) == "\ufffd"
    assert stream.push(byte[0xF0]) == ""
    assert stream.push(byte[0x41]) == "\ufffdA"
    assert stream.push([byte[0xE6], byte[0x97]]) == ""
    assert stream.flush() == "\ufffd"


def test_the_leading_space_is_cut_once():
    tokenizer = TOKENIZERS["sentencepiece"]
    hi = tokenizer.backend.token_to_id("▁hi")
    stream = TextStream(tokenizer)
    assert [stream.push(id) for id in (1, hi, hi)] == ["", "hi", " hi"]
    named = TextStream(tokenizer, skip_special=False)
    assert [named.push(id) for id in (1, hi)] == ["<s>", " hi"]


def test_a_continuation_keeps_its_leading_space():
    tokenizer = TOKENIZERS["sentencepiece"]
    hi = tokenizer.backend.token_to_id("▁hi")
    beyond = tokenizer.vocab_size + 5  # ids of the model that the tokenizer lacks have no text
    for before, text in (([], "hi"), ([1], "hi"), ([1, beyond], "hi"), ([hi], " hi"), ([1, hi, 2], " hi")):
        stream = TextStream(tokenizer, after=before)
        assert stream.copy().push(hi) == stream.push(hi) == text, before


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=examples(100))
@given(data=st.data())
def test_a_prompt_and_its_continuation_make_the_whole(name, data):
    tokenizer = TOKENIZERS[name]
    visible = [id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids]
    if name != "wordpiece":  # a prompt that ends inside a character has no text to add to
        visible = [id for id in visible if b"\x20" <= tokenizer.token_bytes(id)[:1] < b"\x80"]
    ids = data.draw(st.lists(st.sampled_from(visible), max_size=8))
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(tokenizer, after=ids[:cut])
    assert tokenizer.decode(ids[:cut]) + stream.push(ids[cut:]) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "wordpiece"])
@pytest.mark.parametrize("skip_special", [True, False])
@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_a_prompt_that_ends_inside_a_character_is_continued_with_the_whole_character(name, skip_special, data):
    tokenizer = TOKENIZERS[name]
    ids = [id for chunk in data.draw(sequences(tokenizer)) for id in chunk]
    cut = data.draw(st.integers(0, len(ids)))
    stream, pieces = TextStream(tokenizer, skip_special, after=ids[:cut]), []
    for id in ids[cut:]:
        pieces.append(stream.copy().push(id))
        assert stream.push(id) == pieces[-1]
    before = tokenizer.decode(ids[:cut], skip_special=skip_special)
    whole = tokenizer.decode(ids, skip_special=skip_special)
    added = "".join(pieces) + stream.flush()
    assert whole in (before + added, before.removesuffix("\ufffd") + added)


def test_a_character_that_began_in_the_prompt_comes_whole_or_not_at_all():
    tokenizer, byte = TOKENIZERS["sentencepiece"], [3 + b for b in range(256)]
    first, *rest = [byte[b] for b in "🤷".encode()]
    for ids, parts in ((rest, ["", "", "🤷"]), ([byte[0x41], first], ["A", ""]), (rest[:1], [""])):
        stream = TextStream(tokenizer, after=[byte[0x41], first])
        assert [stream.push(id) for id in ids] == parts
        assert stream.flush() == ("\ufffd" if len(ids) == 2 else "")


def test_neighbors_matter_for_wordpiece_so_it_waits():
    stream = TextStream(TOKENIZERS["wordpiece"])
    assert stream.push([1, 2, 3, 4]) == ""
    assert stream.flush() == "undo it."


def test_copies_go_their_own_way():
    tokenizer = TOKENIZERS["byte-level"]
    first = tokenizer.backend.token_to_id("ðŁ")
    stream = TextStream(tokenizer)
    assert stream.push(first) == ""
    twin = stream.copy()
    assert twin.push(tokenizer.backend.token_to_id("¤·")) == "🤷"
    assert stream.flush() == "\ufffd"
    assert twin.push(tokenizer.backend.token_to_id("Ġthe")) == " the"


def test_a_bad_id_changes_nothing_and_a_flushed_stream_is_over():
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStream(tokenizer)
    with pytest.raises(InvalidToken, match="999"):
        stream.push([tokenizer.backend.token_to_id("ðŁ"), 999])
    assert stream.flush() == ""
    with pytest.raises(Closed):
        stream.push(5)


def test_cost_does_not_grow_with_what_came_before():
    class Counting(Tokenizer):
        looked = 0

        def token_bytes(self, id):
            Counting.looked += 1
            return super().token_bytes(id)

    stream = TextStream(Counting(TOKENIZERS["byte-level"].backend))
    for _ in range(500):
        stream.push(40)
    assert Counting.looked == 500
