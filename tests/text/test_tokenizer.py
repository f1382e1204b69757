"""Str ↔ ids: SmolLM2's real vocabulary, byte-level and SentencePiece vocabularies made by hand, and files that lie."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer
from transformers.models.cohere.tokenization_cohere import CohereTokenizer

from headway.base.errors import BadModelFile, HeadwayError, InvalidInput, InvalidToken, Unsupported, WrongType
from headway.models.hub.store import resolve
from headway.text import Tokenizer
from headway.text.gguf_vocab import PRE_TOKENIZERS, merges_from_scores
from headway.text.tokenizer import byte_of_character
from support.properties import examples

TEXT = (
    "Hello, wörld! Don't WE'LL  日本語のテキスト 한국어 русский العربية हिन्दी ไทย Ελληνικά\n"
    "🤷🏽‍♂️👩‍👩‍👧 🇩🇪 \t\tdef f(x):\n        return x ** 2  # 12345 3.14 １２ ½ Ⅷ\r\n\n\n   <|im_start|> "
    "\x00\x07\x1b[0m\x7f \u200b\u2028\u00a0 a\n  12\n 7 fi e\u0301 ¿¡ £€ \U00010348 ~~~ {}[]();"
)


@pytest.fixture(scope="module")
def smollm2_metadata():
    fields = gguf.GGUFReader(resolve("smollm2")).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata):
    tokenizer = Tokenizer.from_gguf(smollm2_metadata)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def reference():
    """What transformers makes of the same file, with the pre-tokenizer that SmolLM2's own tokenizer.json has.

    transformers 5 takes plain GPT-2 splitting for every GGUF it does not list, SmolLM2's among them; the original has
    Digits(individual_digits) first, so that "\\n  12" is "\\n  ", "1", "2" and not "\\n ", " ", "1", "2".
    """
    path = resolve("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def byte_metadata(words=("in", "ing", "the", " the"), pre="gpt-2", **more):
    """A byte-level vocabulary: two special tokens, the 256 bytes, and `words` with merges that build them."""
    alphabet = {byte: char for char, byte in byte_of_character().items()}
    tokens = ["<|start|>", "<|stop|>", *(alphabet[b] for b in range(256))]
    merges = []
    for word in words:
        spelled = "".join(alphabet[b] for b in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
                tokens.append(spelled[:end])
    base = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": [3, 3] + [1] * len(tokens[2:]),
    }
    base |= {"bos_token_id": 0, "eos_token_id": 1}
    return {f"tokenizer.ggml.{name}": value for name, value in (base | more).items() if value is not None}


def spm_metadata(words=("▁hello", "▁world", "hello", "▁▁", "▁▁▁▁", "lo", "wor"), **more):
    """A SentencePiece vocabulary as Llama 2 has it: <unk> <s> </s>, the 256 bytes, pieces, characters."""
    pieces: list[str] = []
    for word in words:
        pieces += [word[:end] for end in range(2, len(word) + 1)]
    pieces = list(dict.fromkeys(pieces))
    characters = sorted(set("".join(pieces)) | set("abcdefghijklmnopqrstuvwxyz<>/s!▁é"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *characters, "<tool>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(characters))] + [0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(characters)) + [4]
    base = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    base |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in (base | more).items() if value is not None}


def built(metadata) -> Tokenizer:
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None
    return tokenizer


# --- SmolLM2


def test_smollm2_ids_equal_the_reference_on_a_multilingual_text(smollm2, reference):
    expected = reference.encode(TEXT, add_special_tokens=False)
    assert smollm2.encode(TEXT, special=True) == expected
    assert smollm2.encode(TEXT) != expected  # <|im_start|> is plain text here
    assert smollm2.encode(TEXT) == reference.encode(TEXT, add_special_tokens=False, split_special_tokens=True)


@settings(deadline=None, max_examples=examples(100))
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_smollm2_ids_equal_the_reference_on_any_text(smollm2, reference, text):
    ids = smollm2.encode(text, special=True)
    assert ids == reference.encode(text, add_special_tokens=False)
    missing = {0xF1, 0xF2, 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}  # bytes this vocabulary has no token for
    if not missing & set(text.encode()):
        assert smollm2.decode(ids) == text


def test_smollm2_roles(smollm2):
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.add_bos) == (1, (2,), False)
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"


def test_decode_equals_the_backend_for_whole_vocabulary(smollm2):
    ids = list(range(17, smollm2.vocab_size))
    assert smollm2.decode(ids) == smollm2.backend.decode(ids, skip_special_tokens=False)
    assert b"".join(map(smollm2.token_bytes, ids)).decode("utf-8", "replace") == smollm2.decode(ids)


def test_special_tokens_are_text_unless_asked_for(smollm2):
    ids = smollm2.encode("<|im_start|>hi", special=True)
    assert ids[0] == 1
    assert not smollm2.special_ids & set(smollm2.encode("<|im_start|>hi"))
    assert smollm2.decode(smollm2.encode("<|im_start|>hi")) == "<|im_start|>hi"
    assert smollm2.decode(ids) == "<|im_start|>hi"
    assert smollm2.decode(ids, skip_special=True) == "hi"
    assert smollm2.token_bytes(1) == b"<|im_start|>"


def test_token_text_is_printable(smollm2):
    assert [smollm2.token_text(id) for id in smollm2.encode("🤷 a\n")] == ["\\xf0\\x9f", "\\xa4", "\\xb7", " a", "\\n"]
    assert all(smollm2.token_text(id).isprintable() for id in range(smollm2.vocab_size))


def test_threads_do_not_disturb_each_other(smollm2):
    text = "<|im_end|>x"
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: smollm2.encode(text, special=bool(i % 2)), range(400)))
    assert all((ids[0] == 2) == bool(i % 2) for i, ids in enumerate(results))


# --- bad input


def test_bad_text_is_refused(smollm2):
    with pytest.raises(InvalidInput, match=r"U\+D83D at character 2"):
        smollm2.encode("ab\ud83d")
    with pytest.raises(WrongType, match="bytes"):
        smollm2.encode(b"ab")


@pytest.mark.parametrize("id", [-1, 49152, 2**70])
def test_ids_outside_the_vocabulary_are_named(smollm2, id):
    for call in (lambda: smollm2.decode([5, id]), lambda: smollm2.token_bytes(id), lambda: smollm2.token_text(id)):
        with pytest.raises(InvalidToken, match=rf"{id} .*49152"):
            call()


@pytest.mark.parametrize("ids", [["a"], [1.5], 7, [None]])
def test_ids_of_another_type_are_refused(smollm2, ids):
    with pytest.raises(WrongType):
        smollm2.decode(ids)


# --- byte-level vocabularies from GGUF metadata


@pytest.mark.parametrize("pre", sorted(set(PRE_TOKENIZERS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_splits_equal_transformers_where_it_knows_them(pre):
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = built(byte_metadata(pre=pre)).backend.pre_tokenizer
    assert ours is not None
    assert ours.pre_tokenize_str(TEXT) == theirs.pre_tokenize_str(TEXT)


def test_command_r_splits_as_its_own_tokenizer():
    ours, theirs = built(byte_metadata(pre="command-r")).backend, CohereTokenizer().backend_tokenizer
    assert ours.pre_tokenizer is not None
    assert theirs.pre_tokenizer is not None
    assert ours.pre_tokenizer.pre_tokenize_str(TEXT) == theirs.pre_tokenizer.pre_tokenize_str(TEXT)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("default", "ab 1234,, c", ["ab", "Ġ", "123", "4", ",,", "Ġc"]),
        ("gpt-2", "don't 1234  x", ["don", "'t", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "a\n  12", ["a", "ĊĠĠ", "1", "2"]),
        ("llama-bpe", "DON'T 12345!\n\nx", ["DON", "'T", "Ġ", "123", "45", "!ĊĊ", "x"]),
        ("qwen2", "ab 123", ["ab", "Ġ", "1", "2", "3"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("falcon", "ab 12345,x", ["ab", "Ġ", "123", "45", ",", "x"]),
        ("deepseek-llm", "ab 123\nc!", ["ab", "Ġ", "123", "Ċ", "c", "!"]),
        ("deepseek-coder", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("deepseek-v3", "ab 1234 (x", ["ab", "Ġ", "123", "4", "Ġ(", "x"]),
        *((pre, "DON'T 12345!\n\nx", ["DON", "'T", "Ġ", "123", "45", "!ĊĊ", "x"]) for pre in ("glm4", "chatglm-bpe")),
        ("stablelm2", "DON'T 12!\n\nx", ["DON", "'T", "Ġ", "1", "2", "!ĊĊ", "x"]),
        ("kimi-k2", "don't 1234 abCé", ["don't", "Ġ", "123", "4", "Ġab", "CÃ©"]),
        ("seed-coder", "ab 12!\n\nx", ["ab", "Ġ", "1", "2", "!", "ĊĊ", "x"]),
        ("minicpm5", "ab 12345x", ["ab", "Ġ", "123", "45", "x"]),
        ("youtu", "don't 12 abC", ["don't", "Ġ", "1", "2", "Ġab", "C"]),
        ("viking", "don't 12,  x", ["don't", "Ġ", "1", "2", ",Ġ", "Ġx"]),
        ("minerva-7b", "a\n  12", ["a", "ĊĠĠ", "1", "2"]),
    ],
)
def test_words_of_each_pre_tokenizer(pre, text, words):
    splitter = built(byte_metadata(pre=pre)).backend.pre_tokenizer
    assert splitter is not None
    assert [word for word, _ in splitter.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(pre):
    tokenizer = built(byte_metadata(pre=pre))
    text = TEXT.replace("e\u0301", "é")  # some families normalize to NFC
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chinese_characters_are_words_of_their_own_for_kimi():
    splitter = built(byte_metadata(pre="kimi-k2")).backend.pre_tokenizer
    assert splitter is not None
    assert [span for _, span in splitter.pre_tokenize_str("ab我想 c")] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize("pre", ["qwen2", "stablelm2"])
def test_characters_are_composed_as_the_models_own_tokenizer_does(pre):
    assert built(byte_metadata(pre=pre)).encode("e\u0301") == built(byte_metadata(pre=pre)).encode("é")
    assert built(byte_metadata(pre="gpt-2")).encode("e\u0301") != built(byte_metadata(pre="gpt-2")).encode("é")


def test_ignore_merges_takes_a_whole_word_first():
    metadata = byte_metadata(words=("in",), pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["ing"]  # no merge leads to it
    metadata["tokenizer.ggml.token_type"] += [1]
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert built(metadata).encode("ing") == [whole]
    assert built(metadata | {"tokenizer.ggml.pre": "dbrx"}).encode("ing") != [whole]


def test_user_defined_tokens_are_matched_whole_but_are_not_special():
    metadata = byte_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<think>", "<｜end▁of▁turn｜>"]
    metadata["tokenizer.ggml.token_type"] += [4, 3]
    tokenizer, size = built(metadata), len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.encode("<think>") == [size - 2]
    assert size - 2 not in tokenizer.special_ids
    assert tokenizer.decode([size - 2], skip_special=True) == "<think>"
    assert tokenizer.encode("<｜end▁of▁turn｜>", special=True) == [size - 1]
    assert tokenizer.decode([size - 1]) == "<｜end▁of▁turn｜>"


def test_end_of_turn_tokens_come_from_ids_and_template():
    metadata = byte_metadata(eot_token_id=0)
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3]
    ends = len(metadata["tokenizer.ggml.tokens"])
    assert built(metadata).eos_ids == (1, 0)
    metadata["tokenizer.chat_template"] = "{{ messages }}<|im_end|>"
    assert built(metadata).eos_ids == (1, 0, ends - 2)
    metadata["tokenizer.chat_template"] = "{{ messages }}<|end|><|return|>"
    assert built(metadata).eos_ids == (1, 0)


def test_begin_token_default_and_flag():
    assert built(byte_metadata()).add_bos is False
    assert built(byte_metadata(pre="llama-bpe")).add_bos is True
    assert built(byte_metadata(pre="llama-bpe", add_bos_token=False)).add_bos is False
    assert built(spm_metadata()).add_bos is True
    assert built(spm_metadata(bos_token_id=None, eos_token_id=None)).bos_id == 1


def test_no_tokenizer_is_none():
    assert Tokenizer.from_gguf({}) is None
    assert Tokenizer.from_gguf({"tokenizer.ggml.model": "no_vocab"}) is None


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(Unsupported, match=r"'klingon'.*gpt-2.*smollm"):
        Tokenizer.from_gguf(byte_metadata(pre="klingon"))
    with pytest.raises(Unsupported, match=r"'bert'.*gpt2, llama, gemma4"):
        Tokenizer.from_gguf(byte_metadata(model="bert"))


def test_a_file_of_gemma4_encodes_as_its_own_tokenizer():
    """SentencePiece's ▁ and bytes with merges of its own, over the whole text, as tokenizer.json has it."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*control, *octets], limit_alphabet=90)
    backend.train_from_iterator([Path(__file__).read_text()] * 2, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [2 if t == "<unk>" else 3 if t in control else 6 if t in octets else 1 for t in tokens]
    metadata = {"model": "gemma4", "tokens": tokens, "token_type": types, "add_bos_token": True}
    metadata |= {"merges": [" ".join(pair) for pair in model["merges"]], "bos_token_id": 2, "eos_token_id": 1}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    tokenizer = built(metadata)
    for text in (TEXT, "in  the house\n\n", " the", "日本"):
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.add_bos, tokenizer.bos_id) == (True, 2)
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(BadModelFile, match="merges is missing; the vocabulary of Gemma 4 needs it"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "tokens is a str"),
        ({"tokens": [1, 2]}, r"tokens\[0\] is 1"),
        ({"tokens": ["a", "a"]}, r"tokens\[1\] is 'a', and so is .*tokens\[0\]"),
        ({"tokens": ["a", "\ud800"]}, "not valid text"),
        ({"tokens": ["a", b"\xff"]}, "not valid text"),
        ({"tokens": ["a", "b" * 5000]}, "5000 characters"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"merges": ["a "]}, r"merges\[0\] is 'a '"),
        ({"merges": ["zz yy"]}, "do not form a tokenizer"),
        ({"merges": 4}, "merges is a int"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"token_type": 3}, "token_type is a int"),
        ({"bos_token_id": 2**40}, "bos_token_id is 1099511627776"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eot_token_id": True}, "eot_token_id is True"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
        ({"pre": 7}, "pre is 7"),
        ({"model": 7}, "model is 7"),
    ],
)
def test_lying_headers_are_named(change, said):
    with pytest.raises(BadModelFile, match=said):
        Tokenizer.from_gguf(byte_metadata(**change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [1.0]}, "scores has 1 entries"),
        ({"scores": [float("nan")] * len(spm_metadata()["tokenizer.ggml.tokens"])}, r"scores\[0\] is nan"),
        ({"add_space_prefix": 3}, "add_space_prefix is 3"),
    ],
)
def test_lying_sentencepiece_headers_are_named(change, said):
    with pytest.raises(BadModelFile, match=said):
        Tokenizer.from_gguf(spm_metadata(**change))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=4),
)  # fmt: skip


@settings(deadline=None, max_examples=examples(150))
@given(key=st.sampled_from(sorted({*byte_metadata(), *spm_metadata()})), junk=JUNK, spm=st.booleans())
def test_any_junk_in_a_header_is_an_error_of_ours_or_harmless(key, junk, spm):
    try:
        tokenizer = Tokenizer.from_gguf((spm_metadata() if spm else byte_metadata()) | {key: junk})
    except HeadwayError:
        return
    assert tokenizer is not None
    tokenizer.encode("a <s>")


# --- SentencePiece


def theirs(metadata, architecture="phi3"):
    """transformers' own conversion. For `phi3` it puts ▁ in front of every text, as SentencePiece, Llama 2's and
    Mistral's tokenizer.json do; for `llama` it leaves out the ▁ when the text starts with a space."""
    names = {"model": "tokenizer_type", "tokens": "tokens", "scores": "scores", "token_type": "token_type"}
    plain = {names[k]: metadata[f"tokenizer.ggml.{k}"] for k in names}
    return convert_gguf_tokenizer(architecture, plain)[0]


SPM_TEXT = st.text(st.sampled_from("helo wrd  \n!é日🤷abcxyz▁"), max_size=24)


@settings(deadline=None, max_examples=examples(150))
@given(text=SPM_TEXT)
def test_sentencepiece_ids_equal_transformers(text):
    metadata = spm_metadata()
    tokenizer = built(metadata)
    ids = tokenizer.encode(text)
    assert ids == theirs(metadata).encode(text, add_special_tokens=False).ids
    if not text.startswith((" ", "▁")):
        assert ids == theirs(metadata, "llama").encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert tokenizer.backend.decode(ids) == tokenizer.decode(ids)


def test_sentencepiece_special_and_user_defined_tokens():
    metadata = spm_metadata()
    tokenizer, reference = built(metadata), theirs(metadata)
    for text in ("<s>hello</s> world", "a<tool>b", "hello <unk> <0x41>"):
        assert tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False).ids
        assert not tokenizer.special_ids & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode("<s>hello</s> <0x41>")) == "<s>hello</s> <0x41>"
    assert tokenizer.special_ids == {0, 1, 2}


def test_space_prefix_is_honoured():
    with_prefix, without = built(spm_metadata()), built(spm_metadata(add_space_prefix=False))
    assert with_prefix.token_text(with_prefix.encode("hello")[0]) == " hello"
    assert without.token_text(without.encode("hello")[0]) == "hello"
    for tokenizer in (with_prefix, without):
        for text in ("hello", " hello", "  hello  ", ""):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_bytes():
    tokenizer = built(spm_metadata())
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.token_text(3 + 0xF0) == "\\xf0"
    assert tokenizer.decode([3 + b for b in "日".encode()] + [3 + 0xFF]) == "日\ufffd"


def test_given_merges_win_over_scores():
    metadata = spm_metadata(merges=["l o"])
    tokenizer = built(metadata)
    assert [tokenizer.token_text(id) for id in tokenizer.encode("hello")] == [" ", "h", "e", "l", "lo"]


def test_merges_are_made_of_normal_tokens_only():
    merges = merges_from_scores(["a", "b", "ab", "c", "abc"], [1, 1, 1, 3, 1], [0, 0, -1, 0, -2])
    assert merges == [("a", "b")]


# --- folders


def write_folder(folder: Path, backend: Backend, **files: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def loaded(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def backend():
    return built(byte_metadata()).backend


def test_folder_without_a_tokenizer_is_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_folder_roles(tmp_path, backend):
    write_folder(
        tmp_path,
        backend,
        tokenizer_config={"bos_token": {"content": "<|start|>"}, "eos_token": "<|stop|>", "add_bos_token": True},
        generation_config={"eos_token_id": [7, 1]},
    )
    tokenizer = loaded(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (0, (7, 1), True)
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|stop|>"}
    assert tokenizer.encode("the <|stop|>") == built(byte_metadata()).encode("the <|stop|>")


def test_folder_reads_the_special_tokens_map_and_the_template(tmp_path, backend):
    write_folder(
        tmp_path,
        backend,
        tokenizer_config={"bos_token": None, "chat_template": "<|start|>{{ messages }}<|im_end|>"},
        special_tokens_map={"eos_token": "<|stop|>", "additional_special_tokens": ["in"]},
        generation_config={"eos_token_id": 5},
    )
    tokenizer = loaded(tmp_path)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (None, False, (5, 1))
    assert tokenizer.backend.token_to_id("in") in tokenizer.special_ids


def test_begin_token_from_the_post_processor(tmp_path, backend):
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer = loaded(write_folder(tmp_path, backend))
    assert (tokenizer.bos_id, tokenizer.add_bos) == (0, True)
    assert 0 not in tokenizer.encode("the", special=True)
    tokenizer = loaded(write_folder(tmp_path, backend, tokenizer_config={"add_bos_token": False}))
    assert tokenizer.add_bos is False


def test_two_begin_tokens_are_refused(tmp_path, backend):
    pair = [("<|start|>", 0), ("<|stop|>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<|start|> <|stop|> $A", special_tokens=pair)
    with pytest.raises(Unsupported, match=r"<\|start\|>.*<\|stop\|>"):
        Tokenizer.from_folder(write_folder(tmp_path, backend))


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path, backend):
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(loaded(write_folder(tmp_path, backend)).encode("abcde")) == 5


def test_merges_of_a_file_never_make_a_special_token_from_text(tmp_path):
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}
    backend = Backend(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = loaded(write_folder(tmp_path, backend))
    assert tokenizer.encode("<s>", special=True) == [4]
    assert tokenizer.encode("<s>") == [3, 2]


def whole_copy(backend: Backend) -> Backend:
    """A backend of its own that takes special tokens for plain text."""
    copy = Backend.from_str(backend.to_str())
    copy.encode_special_tokens = True
    return copy


@pytest.fixture(scope="module")
def smollm2_copy(smollm2):
    return whole_copy(smollm2.backend)


PARTS = ["<|im_start|>", "<|endoftext|>", "<|im", "_end|>", " ", "user", "é", "12"]


@settings(deadline=None, max_examples=examples(60))
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8))
def test_plain_text_is_cut_as_by_a_backend_of_its_own(smollm2, smollm2_copy, parts):
    text = "".join(parts)
    assert smollm2.encode(text) == smollm2_copy.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("gap", [0, 7])
def test_tokens_that_a_file_adds_keep_their_ids_in_plain_text(tmp_path, backend, gap):
    backend.add_tokens([AddedToken("in", special=False), AddedToken(" extra", lstrip=True, special=False)])
    backend.add_special_tokens([AddedToken("<|more|>", special=True)])
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["id"] += gap if token["id"] >= 260 and token["content"] != "in" else 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = loaded(tmp_path)
    for text in ("the <|more|> in  extra ing", " extra<|stop|>in", "<|more|>"):
        assert tokenizer.encode(text) == whole_copy(tokenizer.backend).encode(text, add_special_tokens=False).ids


def test_unigram_text_never_becomes_a_special_token(tmp_path):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -2.0) for c in "</s>ab")]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = loaded(write_folder(tmp_path, backend, tokenizer_config={"eos_token": "</s>"}))
    assert tokenizer.encode("a</s>", special=True) == [6, 1]
    assert tokenizer.encode("a</s>") == [6, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config": "[]"}, "holds a list"),
        ({"tokenizer_config": {"bos_token": 3}}, "bos_token .* is 3"),
        ({"tokenizer_config": {"add_bos_token": "x"}}, "add_bos_token .* is 'x'"),
        ({"tokenizer_config": {"add_bos_token": True}}, "bos_token is not in the vocabulary"),
        ({"special_tokens_map": {"additional_special_tokens": 4}}, "additional_special_tokens"),
        ({"generation_config": {"eos_token_id": "x"}}, "eos_token_id .* is 'x'"),
        ({"generation_config": {"eos_token_id": [-1]}}, r"eos_token_id .* is \[-1\]"),
        ({"tokenizer_config": {"chat_template": [3]}}, "chat_template .* entry 3"),
    ],
)
def test_broken_neighbors_are_named(tmp_path, backend, files, said):
    with pytest.raises(BadModelFile, match=said):
        Tokenizer.from_folder(write_folder(tmp_path, backend, **files))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_a_broken_tokenizer_json_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_long_texts_are_encoded_without_the_global_lock(smollm2: Tokenizer) -> None:
    """And into the same ids as by the call for short ones."""
    text = TEXT * 2000
    stop, count = threading.Event(), 0

    def others() -> None:
        nonlocal count
        while not stop.wait(0.001):
            count += 1

    def encoded() -> tuple[list[int], int]:
        """The ids, and how often the other thread ran meanwhile."""
        before = count
        return smollm2.encode(text), count - before

    thread = threading.Thread(target=others)
    thread.start()
    tries = [encoded() for _ in range(3)]
    stop.set()
    thread.join()
    assert tries[0][0] == smollm2._plain_backend().encode(text, add_special_tokens=False).ids
    assert max(ran for _, ran in tries) > 3  # hundreds of times; in one call that holds the lock, never
