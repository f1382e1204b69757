"""Small tokenizers in model folders, as transformers saves them: byte-level BPE and SentencePiece's."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import generate_merges

from headway.text.gguf_vocab import DIGITS, PRE_TOKENIZERS


def untrained(pre: str) -> Tokenizer:
    """A byte-level tokenizer without tokens, pre-tokenized as `pre` says."""
    how = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=how.ignore_merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = [digits if step == DIGITS else pre_tokenizers.Split(Regex(step), "isolated") for step in how.steps]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if how.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def byte_level(folder: Path, pre: str) -> Tokenizer:
    """A small tokenizer in the folder, pre-tokenized as `pre` says, with a chat template."""
    tokenizer = untrained(pre)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0].content }}!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def pieces(folder: Path, *, prefix: bool) -> tuple[Tokenizer, Any]:
    """A small tokenizer by SentencePiece, in the folder as transformers converts it, and SentencePiece's own."""
    words = io.BytesIO()
    text = Path(__file__).read_text()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=words,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    own = sentencepiece.SentencePieceProcessor(model_proto=words.getvalue())
    vocab = {own.id_to_piece(i): i for i in range(own.get_piece_size())}
    scores = {piece: own.get_score(i) for piece, i in vocab.items()}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=generate_merges(vocab, scores, ["<unk>", "<s>", "</s>", "<tool>"]),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer, own
