"""A tokenizer.json read in slices, natively, gives what the tokenizers package gives."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import BadModelFile
from headway.kernels.native.library import open_library
from headway.text import Tokenizer
from headway.text.tokenizer import byte_of_character
from headway.text.tokenizer_json import SLICE, read_byte_level
from support.big_tokenizer import big_tokenizer
from support.properties import examples

pytestmark = pytest.mark.skipif(open_library().calls is None, reason="there is no native library here")
BYTES = {byte: character for character, byte in byte_of_character().items()}
NAMES = ["<s>", "</s>", "<|im_start|>", "<|im", "|>", "<think>", "the"]
TEXTS = st.lists(st.one_of(st.text(max_size=12), st.sampled_from((*NAMES, "  ", "\n\n", "don't", "1234", "é", "é"))))
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LATER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
}


def pair(folder: Path, made: dict[str, Any], **config: Any) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of the file as it is laid out, and as the tokenizers package reads it: with its keys in order."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = []
    for in_order in (False, True):
        (folder / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=in_order, sort_keys=in_order))
        found.append(Tokenizer.from_folder(folder))
    first, second = found
    assert first is not None
    assert second is not None
    assert second._native is None
    return first, second


def check_same(native: Tokenizer, reference: Tokenizer) -> None:
    for name in ("vocab_size", "special_ids", "decoding", "bos_id", "eos_ids", "add_bos", "special_tokens", "_added"):
        assert getattr(native, name) == getattr(reference, name), name
    assert native.vocabulary() == reference.vocabulary()
    assert native.normalizes == reference.normalizes
    for id, name in enumerate(native.vocabulary()):
        assert native.has(id) == (name is not None)
        assert name is None or (native.token_to_id(name), native.token_bytes(id)) == (id, reference.token_bytes(id))


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """A tokenizer.json with merges drawn at random, and whether it can be read natively."""
    missing = {BYTES[byte] for byte in draw(st.sampled_from([b"", b"x", b"z\xc3"]))}
    tokens = [letter for letter in BYTES.values() if letter not in missing]
    merges, parts = [], [BYTES[byte] for byte in b"aabtheing ' 12" if BYTES[byte] not in missing]
    for _ in range(draw(st.integers(1, 12))):
        left, right = draw(st.sampled_from(parts)), draw(st.sampled_from(parts))
        merges.append([left, right])
        if left + right not in tokens:
            tokens.append(left + right)
            parts.append(left + right)
    legacy, odd = draw(st.booleans()), draw(st.sampled_from(["", "", "", "strip", "normalized", "unknown", "suffix"]))
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
    if draw(st.booleans()):
        tokens += [name for name in names[:2] if name not in tokens]
    ids, added = {token: id for id, token in enumerate(tokens)}, []
    for i, name in enumerate(names):
        id = ids.get(name, len(tokens) + sum(one["id"] >= len(tokens) for one in added))
        strip, normalized = odd == "strip" and i == 0, odd == "normalized" and i == 1
        flags = {"single_word": False, "lstrip": strip, "rstrip": False, "normalized": normalized}
        added.append({"id": id, "content": name, **flags, "special": name not in ("<think>", "the")})
    words = draw(st.sampled_from([BYTE_LEVEL, {"type": "Sequence", "pretokenizers": [DIGITS, LATER]}]))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "a" if odd == "unknown" else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": "e" if odd == "suffix" else None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": draw(st.booleans()),
        "vocab": ids,
        "merges": [" ".join(merge) for merge in merges] if legacy else merges,
    }
    made = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": draw(st.sampled_from([None, {"type": "NFC"}])),
        "pre_tokenizer": words,
        "post_processor": _template(added) if draw(st.booleans()) else None,
        "decoder": BYTE_LEVEL,
        "model": model,
    }
    return made, not odd and "|>" not in names  # which two tokens may merge into


def _template(added: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A step that puts <s> before every text, where there is one."""
    id = next((entry["id"] for entry in added if entry["content"] == "<s>"), None)
    if id is None:
        return None
    return PROCESSOR | {"special_tokens": {"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}}}


@settings(max_examples=examples(200), deadline=None)
@given(drawn=files(), parts=TEXTS, eos=st.sampled_from([None, "</s>", "<think>", "a", "nothing"]))
def test_any_file_gives_the_same_ids(drawn: tuple[dict[str, Any], bool], parts: list[str], eos: str | None) -> None:
    made, is_plain = drawn
    with TemporaryDirectory() as folder:
        config = {} if eos is None else {"eos_token": eos, "bos_token": "<s>"}
        native, reference = pair(Path(folder), made, **config)
    assert native._native is not None or not is_plain or eos == "<think>"
    check_same(native, reference)
    text = "".join(parts)
    for special in (False, True):
        ids = reference.encode(text, special=special)
        assert native.encode(text, special=special) == ids
        assert native.decode(ids) == reference.decode(ids)


def test_a_large_file_is_read_natively_and_is_the_same(tmp_path: Path) -> None:
    made = big_tokenizer(12_000)
    assert len(json.dumps(made["model"]["merges"])) > 4 * SLICE  # in slices
    native, reference = pair(tmp_path, made, eos_token="</s>")
    assert native._native is not None
    check_same(native, reference)
    text = "".join(list(made["model"]["vocab"])[4000:6000]) + " the end</s>"
    assert native.encode(text, special=True) == reference.encode(text, special=True)
    assert native.backend.to_str() == reference.backend.to_str()


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_may_be_laid_out_in_any_way(tmp_path: Path, indent: int | None, legacy: bool) -> None:
    """Names that look like the file's own punctuation do not mislead what cuts it in slices."""
    made = big_tokenizer(3000)
    model = made["model"]
    hostile = ['",', '": 1,', '",[', '],["', '"vocab":{', '"merges":[', "\\", '\\"', "}", "]", '"}', '"]']
    for number, name in enumerate(hostile * 40):
        model["vocab"].setdefault(name * (1 + number // len(hostile)), len(model["vocab"]))
    for entry in made["added_tokens"]:
        entry["id"] = len(model["vocab"]) + made["added_tokens"].index(entry)
    if legacy:
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
    text = json.dumps(made, ensure_ascii=False, indent=indent)
    assert len(text) > 3 * SLICE
    (tmp_path / "tokenizer.json").write_text(text)
    found = Tokenizer.from_folder(tmp_path)
    assert found is not None
    assert found._native is not None
    (tmp_path / "tokenizer.json").write_text(json.dumps(made, sort_keys=True))
    reference = Tokenizer.from_folder(tmp_path)
    assert reference is not None
    check_same(found, reference)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab": {"a": 0, "b": 2}},
        {"vocab": {"a": 0, "b": True}},
        {"vocab": {"a": 0, "b": -1}},
        {"merges": [["a", "q"]]},
        {"merges": [["a"]]},
        {"merges": ["a b c"]},
        {"merges": [7]},
        {"type": "WordLevel"},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, {"type": "Split"}]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}},
        {"pre_tokenizer": [BYTE_LEVEL]},
        {"decoder": {"type": "ByteLevel", "trim_offsets": 7}},
    ],
)
def test_what_is_not_plain_is_left_to_the_package(tmp_path: Path, change: dict[str, Any]) -> None:
    made = big_tokenizer(300)
    made["added_tokens"] = []
    made |= {key: value for key, value in change.items() if key in made}
    made["model"] |= {key: value for key, value in change.items() if key in made["model"]}
    data = json.dumps(made).encode()
    assert read_byte_level(data) is None
    assert read_byte_level(data[: len(data) // 2]) is None
    assert read_byte_level(b"\xff" + data) is None
    (tmp_path / "tokenizer.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadModelFile, match=r"not a usable tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
