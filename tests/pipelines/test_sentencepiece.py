"""Translators whose tokenizers are sentencepiece's own: Marian's two models and vocabulary, M2M100's codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers

import headway as hw
from support import encoders, writers

SOURCE = [*encoders.texts(200, seed=1), *(" ".join(encoders.WORDS),) * 5]
TARGET = [text[::-1] for text in SOURCE]
TEXTS = ["the film was great", "anna works at a bank in paris", "a", "dull Ж film"]


def trained(folder: Path, name: str, lines: list[str]) -> list[str]:
    """A sentencepiece model `name` of these lines; its pieces."""
    text = folder / "lines.txt"
    text.write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / name), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    path = folder / f"{name}.model"
    loaded = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [loaded.id_to_piece(i) for i in range(loaded.get_piece_size())]


def marian_folder(folder: Path, *marks: str) -> Path:
    """A random Marian model with source.spm, target.spm and vocab.json, as they are published."""
    pieces = {*trained(folder, "source", SOURCE), *trained(folder, "target", TARGET)} - {"<s>", "</s>", "<unk>"}
    for side in ("source", "target"):
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
    vocabulary = ["</s>", "<unk>", *sorted(pieces), *marks, "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocabulary)}))
    names = {"source_lang": "eng", "target_lang": "fra", "model_max_length": writers.LIMIT}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer", **names}))
    ids = {"pad_token_id": len(vocabulary) - 1, "eos_token_id": 0, "decoder_start_token_id": len(vocabulary) - 1}
    writers.model("marian", vocab_size=len(vocabulary), **ids).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marian_folder(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def translate(marian: Path) -> Iterator[hw.Pipeline]:
    with hw.pipeline("translation", marian, device="cpu", max_new_tokens=8) as p:
        yield p


def alone(folder: Path, text: str, **more: Any) -> str:
    """What transformers makes of a text with the same files."""
    words: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = model.generate(**words(text, return_tensors="pt"), **{"max_new_tokens": 8, **more})
    return words.decode(found[0], skip_special_tokens=True)


def test_marian_translates_with_its_own_tokenizer(marian: Path, translate: hw.Pipeline) -> None:
    assert type(translate.tokenizer).__name__ == "MarianTokenizer"
    found = translate(TEXTS)
    assert found == [{"translation_text": alone(marian, text)} for text in TEXTS]
    assert len({one["translation_text"] for one in found}) > 1
    assert translate(TEXTS[0], num_beams=3) == [{"translation_text": alone(marian, TEXTS[0], num_beams=3)}]


def test_long_texts_are_refused_cut_or_divided(marian: Path, translate: hw.Pipeline) -> None:
    words: Any = transformers.AutoTokenizer.from_pretrained(marian)
    text = " ".join(encoders.WORDS * 4)
    with pytest.raises(hw.InvalidInput, match=f"the limit is {writers.LIMIT}; pass truncation=True"):
        translate(text)
    ids = words(text, truncation=True, max_length=writers.LIMIT)["input_ids"]
    assert len(ids) == writers.LIMIT
    batch = translate.preprocess(text, truncation=True)
    assert batch.inputs["input_ids"][0].tolist() == ids
    whole = words(text, add_special_tokens=False)["input_ids"]
    pieces = translate.preprocess(text, stride=7, max_input_length=20).inputs["input_ids"].tolist()
    found = [[id for id in piece if id not in words.all_special_ids] for piece in pieces]
    joined = found[0] + [id for piece in found[1:] for id in piece[7:]]
    assert joined == whole
    assert all(len(piece) <= 20 for piece in pieces)
    assert set(translate(text, stride=7, max_input_length=20)[0]) == {"translation_text"}
    with pytest.raises(hw.InvalidInput, match="leave 4 for text, too few for a stride of 7"):
        translate(text, stride=7, max_input_length=5)


def test_a_target_is_named_by_its_mark(tmp_path: Path) -> None:
    folder = marian_folder(tmp_path, ">>fra<<", ">>deu<<")
    with hw.pipeline("translation", folder, device="cpu", max_new_tokens=8) as p:
        for language in ("fra", "deu"):
            want = alone(folder, f">>{language}<< {TEXTS[1]}")
            assert p(TEXTS[1], tgt_lang=language) == [{"translation_text": want}]
        with pytest.raises(hw.InvalidInput, match="does not know the language 'rus'"):
            p(TEXTS[1], tgt_lang="rus")


def test_m2m100_is_told_its_languages(tmp_path: Path) -> None:
    pieces = trained(tmp_path, "sentencepiece.bpe", SOURCE)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = [*special, *(piece for piece in pieces if piece not in special)]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocabulary)}))
    words = transformers.M2M100Tokenizer(
        str(tmp_path / "vocab.json"), str(tmp_path / "sentencepiece.bpe.model"), model_max_length=writers.LIMIT
    )
    shape: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "vocab_size": 256}
    shape |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    torch.manual_seed(0)
    config = transformers.M2M100Config(**shape, max_position_embeddings=64, pad_token_id=1, decoder_start_token_id=2)
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3)
    with hw.pipeline("translation", model, tokenizer=words, device="cpu", max_new_tokens=6) as p:
        found = p(TEXTS[:2], src_lang="en", tgt_lang="fr")
        words.src_lang = "en"
        for text, one in zip(TEXTS, found):
            ids = model.generate(
                **words(text, return_tensors="pt"), forced_bos_token_id=words.get_lang_id("fr"), max_new_tokens=6
            )
            assert one == {"translation_text": words.decode(ids[0], skip_special_tokens=True)}


@pytest.mark.slow
def test_without_sentencepiece_the_extra_is_named(marian: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['sentencepiece'] = None\n"
        "import headway as hw\n"
        f"try: hw.pipeline('translation', {str(marian)!r}, device='cpu')\n"
        "except hw.HeadwayError as error: print(type(error).__name__, error)"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "headway[pipelines]" in done.stdout, done.stdout + done.stderr
