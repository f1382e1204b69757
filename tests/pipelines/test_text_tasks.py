"""Every text task gives what transformers gives on the same small model, whatever the architecture."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headway as hw
from headway.pipelines.tasks.question_answering import QuestionAnsweringOptions
from support import encoders
from support.senses import same

SEED = 3
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


def ours(task: str, model: Any, family: str, **more: Any) -> hw.Pipeline:
    return hw.pipeline(task, model, tokenizer=encoders.tokenizer(family), device="cpu", **more)


def theirs(task: Any, model: Any, family: str, **more: Any) -> Any:
    return transformers.pipeline(task, model=model, tokenizer=encoders.tokenizer(family), device="cpu", **more)


close = partial(same, rel=2e-4, abs=2e-6)
# Hidden states of several layers, of about 1: their last digits are the order in which a product adds.
close_states = partial(same, rel=2e-4, abs=1e-5)


@pytest.mark.parametrize("family", encoders.FAMILIES)
class TestAgainstTransformers:
    def test_text_classification(self, family: str) -> None:
        model = encoders.model(family, "classify", num_labels=3)
        texts = encoders.texts(24)
        with ours("text-classification", model, family) as mine:
            peer = theirs("text-classification", model, family)
            close(mine(texts), peer(texts))
            close(mine(texts, top_k=2), peer(texts, top_k=2))
            close(mine(texts[0], top_k=None), peer(texts[0], top_k=None))
            close(mine(texts[0]), peer(texts[0]))
            pair = {"text": texts[0], "text_pair": texts[1]}
            close(mine(pair), peer(pair))
            close(mine(texts, function_to_apply="sigmoid"), peer(texts, function_to_apply="sigmoid"))

    def test_zero_shot_classification(self, family: str) -> None:
        labels = {"label2id": {"CONTRADICTION": 0, "NEUTRAL": 1, "ENTAILMENT": 2}}
        labels["id2label"] = {i: name for name, i in labels["label2id"].items()}
        model = encoders.model(family, "classify", **labels)
        with ours("zero-shot-classification", model, family) as mine:
            peer = theirs("zero-shot-classification", model, family)
            for more in ({}, {"multi_label": True}, {"hypothesis_template": "it is {}"}):
                asked = {"candidate_labels": ["film", "bank", "great"], **more}
                for text in encoders.texts(3):
                    close(mine(text, **asked), peer(text, **asked))
            close(mine("the film", candidate_labels="film"), peer("the film", candidate_labels="film"))

    @pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
    @pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
    def test_token_classification(self, family: str, strategy: str) -> None:
        model = encoders.model(family, "tag", id2label=TAGS, label2id={v: k for k, v in TAGS.items()})
        texts = [*encoders.texts(6), "anna at londonbank, paris!", "Ünknown ж word"]
        with ours("token-classification", model, family, aggregation_strategy=strategy) as mine:
            peer = theirs("token-classification", model, family, aggregation_strategy=strategy)
            close(mine(texts), peer(texts))
            close(mine(texts[0], ignore_labels=[]), peer(texts[0], ignore_labels=[]))

    def test_fill_mask(self, family: str) -> None:
        model = encoders.model(family, "fill")
        mask = encoders.tokenizer(family).mask_token
        texts = [f"the {mask} was great", f"{mask} works at a bank in london", f"the film was {mask}"]
        with ours("fill-mask", model, family) as mine:
            peer = theirs("fill-mask", model, family)
            close(mine(texts), peer(texts))
            close(mine(texts[0], top_k=2), peer(texts[0], top_k=2))
            close(mine(f"the {mask} was {mask}"), peer(f"the {mask} was {mask}"))
            targets = ["a", "t", "e"]
            close(mine(texts[0], targets=targets), peer(texts[0], targets=targets))

    def test_feature_extraction(self, family: str) -> None:
        model = encoders.model(family, "base")
        texts = encoders.texts(8)
        with ours("feature-extraction", model, family) as mine:
            peer = theirs("feature-extraction", model, family)
            close_states(mine(texts), peer(texts))
            found = mine(texts[0], return_tensors=True)
            torch.testing.assert_close(found, peer(texts[0], return_tensors=True), rtol=2e-4, atol=1e-5)

    @pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max"])
    def test_sentence_embedding_is_the_pooled_model(self, family: str, pooling: str) -> None:
        model, words = encoders.model(family, "base"), encoders.tokenizer(family)
        texts = encoders.texts(12)
        with ours("sentence-embedding", model, family, pooling=pooling) as mine:
            for text, vector in zip(texts, mine(texts)):
                with torch.no_grad():
                    states = model(**words(text, return_tensors="pt")).last_hidden_state[0]
                pooled = {"mean": states.mean(0), "cls": states[0], "last": states[-1], "max": states.amax(0)}[pooling]
                want = torch.nn.functional.normalize(pooled, dim=0).numpy()
                np.testing.assert_allclose(vector, want, rtol=2e-4, atol=2e-6)
                assert vector.dtype == np.float32
            raw = mine(texts[0], normalize=False, dimensions=5)
            assert raw.shape == (5,)

    def test_rerank_is_the_model_on_pairs(self, family: str) -> None:
        model, words = encoders.model(family, "classify", num_labels=1), encoders.tokenizer(family)
        documents = encoders.texts(9)
        with ours("rerank", model, family) as mine:
            found = mine(query="the bank", documents=documents)
            with torch.no_grad():
                logits = [float(model(**words("the bank", d, return_tensors="pt")).logits[0, 0]) for d in documents]
            assert [one["index"] for one in found] == sorted(range(9), key=lambda i: -logits[i])
            for one in found:
                assert one["text"] == documents[one["index"]]
                assert one["score"] == pytest.approx(1 / (1 + np.exp(-logits[one["index"]])), rel=2e-4)
            assert [one["index"] for one in mine(query="the bank", documents=documents, top_n=2)] == [
                one["index"] for one in found[:2]
            ]

    def test_question_answering_is_the_likeliest_span(self, family: str) -> None:
        if family == "deberta":
            pytest.skip("one tokenizer of its kind is enough")
        model = encoders.model(family, "answer")
        context = " ".join(encoders.texts(12))
        item = {"question": "the film", "context": context}
        with ours("question-answering", model, family) as mine:
            for more in ({}, {"align_to_words": False}, {"max_answer_len": 3}, {"top_k": 4}, {"doc_stride": 7}):
                close(mine(item, **more), spans_by_hand(model, family, item, **more))
            assert mine(question="the film", context=context) == mine(item)
            assert mine(question="the film", context=[context]) == [mine(item)]
            empty = mine(item, handle_impossible_answer=True, top_k=100_000)
            assert {"start": 0, "end": 0, "answer": ""}.items() <= next(e for e in empty if not e["answer"]).items()


def spans_by_hand(model: Any, family: str, item: dict[str, str], **more: Any) -> Any:
    """All spans of all windows, scored one by one."""
    options, words = QuestionAnsweringOptions(**more), encoders.tokenizer(family)
    window = encoders.LIMIT
    encoded = words(
        item["question"],
        item["context"],
        truncation="only_second",
        max_length=window,
        stride=options.doc_stride or min(window // 2, 128),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    found: dict[tuple[int, int], float] = {}
    for w in range(len(encoded["input_ids"])):
        inputs = {n: torch.tensor([encoded[n][w]]) for n in words.model_input_names}
        with torch.no_grad():
            out = model(**inputs)
        inside = [s == 1 for s in encoded.sequence_ids(w)]
        starts, ends = (_softmax_inside(x[0], inside) for x in (out.start_logits, out.end_logits))
        spans = [
            (starts[i] * ends[j], i, j)
            for i in range(len(inside))
            for j in range(i, min(i + options.max_answer_len, len(inside)))
            if inside[i] and inside[j]
        ]
        for score, i, j in sorted(spans, reverse=True)[: options.top_k]:
            place = (encoded["offset_mapping"][w][i][0], encoded["offset_mapping"][w][j][1])
            if options.align_to_words:
                first, last = encoded.token_to_word(w, i), encoded.token_to_word(w, j)
                place = (encoded.word_to_chars(w, first, 1)[0], encoded.word_to_chars(w, last, 1)[1])
            found[place] = max(score, found.get(place, 0.0))
    answers = [
        {"score": s, "start": a, "end": b, "answer": item["context"][a:b]}
        for (a, b), s in sorted(found.items(), key=lambda entry: -entry[1])
    ]
    return answers[0] if options.top_k == 1 else answers[: options.top_k]


def _softmax_inside(logits: torch.Tensor, inside: list[bool]) -> list[float]:
    return torch.where(torch.tensor(inside), logits, torch.tensor(-10000.0)).softmax(-1).tolist()


@pytest.mark.parametrize(("kind", "labels"), [("regression", 1), ("regression", 3), (None, 1), ("multi", 3)])
def test_heads_of_other_kinds(kind: str | None, labels: int) -> None:
    problem = {"multi": "multi_label_classification"}.get(kind or "", kind)
    model = encoders.model("bert", "classify", num_labels=labels, problem_type=problem)
    texts = encoders.texts(5)
    with ours("text-classification", model, "bert") as mine:
        peer = theirs("text-classification", model, "bert")
        close(mine(texts), peer(texts))
        close(mine(texts, top_k=None), peer(texts, top_k=None))


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_entities_of_a_long_text_in_pieces() -> None:
    model = encoders.model("bert", "tag", id2label=TAGS, label2id={v: k for k, v in TAGS.items()})
    text = " ".join(encoders.texts(20))
    with ours("token-classification", model, "bert") as mine:
        peer = theirs("token-classification", model, "bert", aggregation_strategy="simple", stride=8)
        close(mine(text, aggregation_strategy="simple", stride=8), peer(text))


def test_long_texts_in_pieces_are_averaged_by_length() -> None:
    model, words = encoders.model("bert", "classify", num_labels=3), encoders.tokenizer("bert")
    text = " ".join(encoders.texts(30))
    pieces = words(text, truncation=True, stride=4, return_overflowing_tokens=True)
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).logits[0] for ids in pieces["input_ids"]]
    weights = torch.tensor([float(len(ids)) for ids in pieces["input_ids"]])
    want = (torch.stack(rows) * weights[:, None]).sum(0).div(weights.sum()).softmax(-1)
    with ours("text-classification", model, "bert") as mine:
        found = mine(text, stride=4, top_k=None)
    got = {one["label"]: one["score"] for one in found}
    assert [got[f"LABEL_{i}"] for i in range(3)] == pytest.approx(want.tolist(), rel=1e-4)


def test_truncation_is_transformers_truncation() -> None:
    model = encoders.model("roberta", "classify", num_labels=3)
    text = " ".join(encoders.texts(30))
    with ours("text-classification", model, "roberta") as mine:
        peer = theirs("text-classification", model, "roberta")
        close(mine(text, truncation=True), peer(text, truncation=True))
        close(mine(text, truncation=True, max_length=9), peer(text, truncation=True, max_length=9))
