"""What a task gives for one item, a list, a stream and from submit: as the table of the page on pipelines says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.pipelines.registry import BUILT_IN
from support import encoders, senses, writers
from support.senses import same

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
LABELS = {"candidate_labels": ["film", "bank"]}
ENTAILS = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}
TEXTS = ["the film was great", "anna works at a bank in paris"]
WRAPPED = ("text-classification", "text2text-generation", "summarization", "translation")  # a list of one for a text
KINDS: dict[str, type] = {"a dict": dict, "a list": list, "a vector": np.ndarray}


def table() -> dict[str, tuple[str, str]]:
    """task → what the page says one item gives, and what a list gives."""
    found: dict[str, tuple[str, str]] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 4:
            found |= dict.fromkeys(re.findall("`([^`]+)`", cells[0]), (cells[2], cells[3]))
    return found


def of_text(task: str) -> tuple[Any, Any, dict[str, Any]]:
    """(model, its tokenizer, an item) as `hw.pipeline` takes them."""
    heads = {"token-classification": "tag", "fill-mask": "fill", "question-answering": "answer"}
    labels = {"zero-shot-classification": ENTAILS, "rerank": {"num_labels": 1}}
    head = heads.get(task, "classify" if "classification" in task or task == "rerank" else "base")
    return encoders.model("bert", head, **labels.get(task, {})), encoders.tokenizer("bert"), {}


def opened(task: str) -> hw.Pipeline:
    """A small pipeline for a task."""
    images = {
        "image-classification": lambda: (senses.classifier("vit"), senses.square("ViT")),
        "image-feature-extraction": lambda: (senses.classifier("vit").vit, senses.square("ViT")),
        "zero-shot-image-classification": senses.clip,
        "image-to-text": senses.git,
        "visual-question-answering": senses.vilt,
    }
    if task in images:
        model, processor, *words = images[task]()
        given = {"tokenizer": words[0]} if words else {}
        return hw.pipeline(task, model, image_processor=processor, device="cpu", **given)
    if task in ("automatic-speech-recognition", "audio-classification"):
        hears = task == "automatic-speech-recognition"
        model = senses.wav2vec2("CTC") if hears else senses.wav2vec2("SequenceClassification", num_labels=4)
        given = {"tokenizer": senses.letters()} if hears else {}
        return hw.pipeline(task, model, feature_extractor=senses.wave_extractor(), device="cpu", **given)
    if task in ("summarization", "text2text-generation") or task.startswith("translation"):
        return hw.pipeline(task, writers.model("t5"), tokenizer=writers.tokenizer(), device="cpu", max_new_tokens=4)
    model, words, _ = of_text(task)
    return hw.pipeline(task, model, tokenizer=words, device="cpu")


def items(task: str) -> tuple[list[Any], dict[str, Any]]:
    """Two items of a task, and the options it needs."""
    match task:
        case "fill-mask":
            return [f"{text} [MASK]" for text in TEXTS], {}
        case "question-answering":
            return [{"question": "who works", "context": text} for text in TEXTS], {}
        case "sentence-similarity":
            return [{"source_sentence": text, "sentences": TEXTS} for text in TEXTS], {}
        case "rerank":
            return [{"query": text, "documents": TEXTS} for text in TEXTS], {}
        case "zero-shot-classification":
            return TEXTS, LABELS
        case "zero-shot-image-classification":
            return senses.images(2), LABELS
        case "visual-question-answering":
            return [{"image": one, "question": "the film"} for one in senses.images(2)], {}
        case "image-to-text":
            return senses.images(2), {"max_new_tokens": 4}
        case "image-classification" | "image-feature-extraction":
            return senses.images(2), {}
        case "automatic-speech-recognition" | "audio-classification":
            return [senses.tone(0.7), senses.tone(1.1, seed=1)], {}
    return TEXTS, {}


def plain(value: Any) -> Any:
    """Vectors as lists, so that results can be compared."""
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.fixture(params=[task for task in BUILT_IN if task != "text-generation"])
def task(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def p(task: str) -> Iterator[hw.Pipeline]:
    with opened(task) as made:
        yield made


def test_one_a_list_a_stream_and_submit_agree_and_are_what_the_page_says(task: str, p: hw.Pipeline) -> None:
    some, options = items(task)
    ones = [p(item, **options) for item in some]
    kind = next(kind for words, kind in KINDS.items() if table()[task][0].startswith(words))
    assert all(isinstance(one, kind) for one in ones)
    if task in WRAPPED:
        assert all(len(one) == 1 and one == [one[0]] and one[key] == one[0][key] for one in ones for key in one[0])
        ones = [one[0] for one in ones]

    async def submitted() -> list[Any]:
        return await asyncio.gather(*(p.submit(item, **options) for item in some))

    for found in (p(some, **options), list(p(iter(some), **options)), asyncio.run(submitted())):
        same(list(map(plain, found)), list(map(plain, ones)), rel=1e-3, abs=1e-5)
    (single,) = p([some[0]], **options)
    same(plain(single), plain(ones[0]), rel=1e-3, abs=1e-5)


def test_the_engines_results_have_the_same_rule(smollm2: hw.Engine) -> None:
    with hw.pipeline("text-generation", smollm2, max_new_tokens=3, do_sample=False) as p:
        one = p("The capital of France")
        assert isinstance(one, list)
        assert table()["text-generation"][0].startswith("a list")
        assert p(["The capital of France"]) == [one] == list(p(iter(["The capital of France"])))
        assert asyncio.run(p.submit("The capital of France")) == one


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("text-classification", {"top_k": 1}),
        ("question-answering", {"top_k": 2}),
        ("text2text-generation", {"num_beams": 2, "num_return_sequences": 2}),
    ],
)
def test_what_is_asked_for_in_the_plural_is_a_list(task: str, more: dict[str, Any]) -> None:
    some, options = items(task)
    with opened(task) as p:
        assert isinstance(p(some[0], **options, **more), list)
        assert all(isinstance(one, list) for one in p(some, **options, **more))


def test_the_page_tells_of_every_task() -> None:
    known = table()
    assert set(BUILT_IN) <= set(known)
    for task, (one, many) in known.items():
        kind = "a dict" if task.startswith(WRAPPED) else next(words for words in KINDS if one.startswith(words))
        assert many.split(";")[0] == {"a dict": "dicts", "a list": "lists", "a vector": "vectors"}[kind]
