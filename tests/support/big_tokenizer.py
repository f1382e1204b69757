"""The tokenizer.json of a byte-level tokenizer with as many tokens and merges as a test wants."""

from __future__ import annotations

from typing import Any

from headway.text.tokenizer import byte_of_character

NAMES = ("<s>", "</s>")
STEP = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def big_tokenizer(count: int) -> dict[str, Any]:
    """A file in the layout of the tokenizers package: `count` tokens, and two special ones after them."""
    vocab = {letter: id for id, letter in enumerate(byte_of_character())}
    spelled = [letter for letter in vocab if letter.isascii() and letter.isalpha()]
    pairs = ((left, right) for left in spelled for right in spelled[:52])
    merges: list[list[str]] = []
    while len(vocab) < count:
        left, right = next(pairs)
        vocab[left + right] = len(vocab)
        merges.append([left, right])
        spelled.append(left + right)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    options = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(vocab) + i, "content": name, **plain} for i, name in enumerate(NAMES)],
        "normalizer": None,
        "pre_tokenizer": STEP,
        "post_processor": None,
        "decoder": STEP,
        "model": {"type": "BPE", **options, **flags, "vocab": vocab, "merges": merges},
    }
