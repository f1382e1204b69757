"""Every kind of tokenizer.json that models come with: ids, text and streams as the tokenizers package has them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headway.text import TextStream
from headway.text import Tokenizer as Ours
from support.properties import examples
from support.tokenizer_folders import untrained

CORPUS = [
    *Path(__file__).read_text().splitlines(),
    "Ünïcödé 中文字符 こんにちは ١٢٣ ｆｕｌｌ ﬁne e\u0301 ½ 🙂 12345 don't DON'T",
] * 3
CORPUS += [f"{i:03}" for i in range(300)] * 2
SPECIAL = ("<s>", "</s>", "<|im_end|>")
# Bits of texts: what rules of words, normalizers and added tokens look at.
BITS = (
    *(
        "the ",
        "tokens",
        " of",
        "don't",
        "DON'T've",
        "12345678",
        " ",
        "  ",
        "\n",
        "\n\n ",
        "\t",
        "é",
        "e\u0301",
        "ﬁ",
        "½",
    ),
    *("中文", "ﾊﾟ", "🙂", "👩\u200d💻", "\u3000", "\u00a0", "١٢٣", "Straße", "İ", "\u0378", "\ue000", "a\u0300\u0323"),
    *("_x_", "--", "…", "▁", "<0x41>", "<tool>", "<user>", "Think", "<pad>", "xx", "\u0000", "\u2028", *SPECIAL),
)


def byte_level(pre: str) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        tokenizer = untrained(pre)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trained(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=[*SPECIAL]))
        return tokenizer

    return build


def trained(tokenizer: Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(CORPUS, trainer)


def falcon() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    triples = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
    steps = [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(False),
        pre_tokenizers.Digits(),
        triples,
    ]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[*SPECIAL]))
    return tokenizer


def prefixed_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[*SPECIAL]))
    return tokenizer


def grouped_digits() -> Tokenizer:
    """Digits in groups of three from the right, as rules that look ahead have it."""
    tokenizer = Tokenizer(models.BPE())
    groups = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*\b)"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([groups, pre_tokenizers.ByteLevel(False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[*SPECIAL]))
    return tokenizer


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces(scheme: str) -> Callable[[], Tokenizer]:
    """SentencePiece BPE with byte fallback: spaces by a normalizer, or by Metaspace and its prepend_scheme."""

    def build() -> Tokenizer:
        words = Tokenizer(models.BPE())
        words.normalizer = normalizers.Replace(" ", "▁")
        words.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated")
        trained(words, trainers.BpeTrainer(vocab_size=400, limit_alphabet=60))
        model = json.loads(words.to_str())["model"]
        names = ["<unk>", *SPECIAL, *BYTES, *sorted(model["vocab"], key=model["vocab"].get)]
        vocab, merges = {name: id for id, name in enumerate(names)}, [tuple(pair) for pair in model["merges"]]
        found = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        found.add_special_tokens(["<unk>", *SPECIAL])
        strip = [decoders.Strip(" ", 1, 0)] if scheme in ("normal", "always", "first") else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        found.decoder = decoders.Sequence(steps)
        if scheme in ("normal", "bare"):
            prepend = [normalizers.Prepend("▁")] if scheme == "normal" else []
            found.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        else:
            found.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
        return found

    return build


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trained(tokenizer, trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>"))
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trained(tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", *SPECIAL]))
    return tokenizer


RULES = ("gpt-2", "llama-bpe", "gpt-4o", "qwen2", "qwen35", "tekken", "deepseek-v3", "command-r")
KINDS: dict[str, Callable[[], Tokenizer]] = {
    **{pre: byte_level(pre) for pre in RULES},
    **{f"pieces-{scheme}": pieces(scheme) for scheme in ("normal", "bare", "always", "first", "never")},
    **{"falcon": falcon, "prefixed": prefixed_byte_level, "grouped": grouped_digits},
    **{"unigram": unigram, "word-piece": word_piece},
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ours, Path]:
    """Our tokenizer of a folder, and its file; tokens of every kind are added."""
    tokenizer = KINDS[request.param]()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("Think", normalized=True)])
    tokenizer.add_tokens([AddedToken("<user>", lstrip=True, rstrip=True), AddedToken("xx", single_word=True)])
    tokenizer.add_special_tokens([AddedToken("<pad>", normalized=False, special=True, lstrip=True)])
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer.save(str(folder / "tokenizer.json"))
    ours = Ours.from_folder(folder)
    assert ours is not None
    return ours, folder / "tokenizer.json"


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)

    def bit() -> str:
        rare = rng.choice((rng.randrange(0xD800), rng.randrange(0x10000, 0x20000)))
        return rng.choice(BITS) if rng.random() < 0.9 else chr(rare)

    found = ["".join(bit() for _ in range(rng.randrange(1, 25))) for _ in range(count)]
    long = "".join(rng.choice(BITS[:15]) for _ in range(3000))
    return [*found, "", long, "0123456789" * 1500 + " 1234567 ", "ab " * 4000 + "<user>  x"]


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_the_package(pair: tuple[Ours, Path], special: bool) -> None:
    ours, file = pair
    theirs = Tokenizer.from_file(str(file))
    theirs.encode_special_tokens = not special
    for text in texts(examples(120), 3):
        ids = ours.encode(text, special=special)
        if not special and file.parent.name.startswith("unigram"):  # where text may spell the name of a special token
            assert not ours.special_ids.intersection(ids) - {theirs.token_to_id("<unk>")}, text[:200]
        else:
            assert ids == theirs.encode(text, add_special_tokens=False).ids, text[:200]


def test_texts_and_streams_are_those_of_the_package(pair: tuple[Ours, Path]) -> None:
    ours, file = pair
    theirs, rng = Tokenizer.from_file(str(file)), random.Random(5)
    for text in texts(examples(120), 4):
        ids = theirs.encode(text, add_special_tokens=False).ids
        for skip in (False, True):
            whole = ours.decode(ids, skip_special=skip)
            assert whole == theirs.decode(ids, skip_special_tokens=skip), text[:200]
            stream, parts, at = TextStream(ours, skip), [], 0
            while at < len(ids):
                step = rng.randrange(1, 4)
                parts.append(stream.push(ids[at : at + step]))
                at += step
            assert "".join([*parts, stream.flush()]) == whole, text[:200]
