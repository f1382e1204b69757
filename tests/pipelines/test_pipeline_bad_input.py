"""What is refused, and how it is said; what is empty and still answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headway as hw
from support import encoders

LONG = "the film " * 100


@pytest.fixture(scope="module")
def tasks() -> Iterator[dict[str, hw.Pipeline]]:
    labels = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}
    models = {
        "text-classification": encoders.model("bert", "classify", num_labels=2),
        "zero-shot-classification": encoders.model("bert", "classify", **labels),
        "token-classification": encoders.model("bert", "tag", num_labels=3),
        "fill-mask": encoders.model("bert", "fill"),
        "question-answering": encoders.model("bert", "answer"),
        "feature-extraction": encoders.model("bert", "base"),
        "sentence-embedding": encoders.model("bert", "base"),
        "sentence-similarity": encoders.model("bert", "base"),
        "rerank": encoders.model("bert", "classify", num_labels=1),
    }
    made = {
        name: hw.pipeline(name, model, tokenizer=encoders.tokenizer("bert"), device="cpu")
        for name, model in models.items()
    }
    yield made
    for p in made.values():
        p.close()


@pytest.mark.parametrize(
    "name", ["text-classification", "token-classification", "feature-extraction", "sentence-embedding"]
)
class TestTexts:
    def test_an_empty_text_is_its_special_tokens(self, tasks: dict[str, hw.Pipeline], name: str) -> None:
        p = tasks[name]
        alone, among = p(""), p(["the film", "", "great"])[1]
        if name == "token-classification":
            assert alone == among == []
        elif name == "text-classification":
            assert alone["label"] == among["label"]
        else:
            np.testing.assert_allclose(np.array(alone), np.array(among), rtol=1e-4, atol=2e-6)

    @pytest.mark.parametrize("bad", [None, 3, 1.5, b"bytes", object(), {"x": 1}])
    def test_what_is_no_text_is_named(self, tasks: dict[str, hw.Pipeline], name: str, bad: Any) -> None:
        with pytest.raises((hw.WrongType, hw.InvalidInput)):
            tasks[name](bad)
        with pytest.raises((hw.WrongType, hw.InvalidInput), match="item 1:"):
            tasks[name](["the film", bad])

    def test_a_long_text_is_an_error_unless_asked(self, tasks: dict[str, hw.Pipeline], name: str) -> None:
        p = tasks[name]
        with pytest.raises(
            hw.InvalidInput, match=r"has 202 tokens and the limit is 64; pass truncation=True .*stride=n"
        ):
            p(LONG)
        p(LONG, truncation=True)
        more = {"aggregation_strategy": "simple"} if name == "token-classification" else {}
        p(LONG, stride=8, **more)
        with pytest.raises(hw.InvalidInput, match="the limit is 10"):
            p("the film " * 10, max_length=10)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"max_length": 100}, "max_length is 100 and the model takes at most 64"),
            ({"max_length": 0}, "max_length is 0"),
            ({"truncation": "yes"}, "truncation is 'yes'"),
            ({"stride": -1}, "stride is -1"),
            ({"stride": 4, "truncation": True}, "only one of them"),
            ({"colour": "red"}, "'colour' is not an option of this task; it takes"),
            ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ],
    )
    def test_options_that_make_no_sense(
        self, tasks: dict[str, hw.Pipeline], name: str, given: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(hw.InvalidInput, match=words):
            tasks[name]("the film", **given)

    def test_a_stride_that_leaves_no_room(self, tasks: dict[str, hw.Pipeline], name: str) -> None:
        more = {"aggregation_strategy": "simple"} if name == "token-classification" else {}
        with pytest.raises(hw.InvalidInput, match="too few for a stride of 62"):
            tasks[name](LONG, stride=62, **more)


@pytest.mark.parametrize(
    ("name", "item", "given", "words"),
    [
        ("text-classification", {"text": "a", "other": "b"}, {}, 'keys "text" and "text_pair"'),
        ("text-classification", "a", {"top_k": 0}, "top_k is 0"),
        ("text-classification", "a", {"function_to_apply": "relu"}, "function_to_apply is 'relu'"),
        ("zero-shot-classification", "a", {}, "candidate_labels is missing"),
        ("zero-shot-classification", "a", {"candidate_labels": []}, "candidate_labels is empty"),
        ("zero-shot-classification", "", {"candidate_labels": "a"}, "empty text"),
        ("zero-shot-classification", "a", {"candidate_labels": "a", "hypothesis_template": "x"}, "needs one {}"),
        ("token-classification", "a", {"aggregation_strategy": "most"}, "aggregation_strategy is 'most'"),
        ("token-classification", "a", {"ignore_labels": "O"}, "it must be a list"),
        ("token-classification", "a", {"stride": 2}, "aggregation_strategy other than none"),
        ("fill-mask", "the film", {}, r"has no \[MASK\]"),
        ("fill-mask", "the [MASK]", {"targets": ["zebra"]}, "'zebra' is not a token"),
        ("fill-mask", "the [MASK]", {"targets": []}, "targets is empty"),
        ("fill-mask", "the [MASK]", {"top_k": 10_000}, "top_k is 10000 and the vocabulary has"),
        ("fill-mask", "the [MASK]", {"stride": 3}, "takes no stride"),
        ("question-answering", "why", {}, "question"),
        ("question-answering", {"question": "why"}, {}, "a question and a context"),
        ("question-answering", {"question": " ", "context": "a"}, {}, "both need text"),
        ("question-answering", {"question": "a", "context": "b"}, {"max_answer_len": 0}, "max_answer_len is 0"),
        ("question-answering", {"question": "a", "context": "b"}, {"truncation": True}, "windows"),
        ("question-answering", {"question": LONG, "context": "b"}, {}, "leaves too few of 64 tokens"),
        ("question-answering", {"question": "the " * 40, "context": LONG}, {}, "leaves too few of 64 tokens"),
        ("rerank", {"query": LONG, "documents": ["b"]}, {"truncation": True}, "leaves too few of 64 tokens"),
        ("sentence-embedding", "a", {"pooling": "sum"}, "pooling is 'sum'"),
        ("sentence-embedding", "a", {"dimensions": 33}, "dimensions is 33 and the model's vectors have 32"),
        ("sentence-embedding", "a", {"normalize": "l2"}, "normalize is 'l2'"),
        ("sentence-similarity", {"source_sentence": "a", "sentences": []}, {}, "sentences is empty"),
        ("sentence-similarity", {"source_sentence": "a", "sentences": "b"}, {}, "must be a list"),
        ("rerank", {"query": "a", "documents": ["b", None]}, {}, "None"),
        ("rerank", {"query": "a"}, {}, "query and documents"),
        ("rerank", {"query": "a", "documents": ["b"]}, {"top_n": 0}, "top_n is 0"),
        ("rerank", {"query": "a", "documents": ["b"]}, {"function_to_apply": "softmax"}, "softmax"),
    ],
)
def test_each_task_says_what_it_needs(
    tasks: dict[str, hw.Pipeline], name: str, item: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises((hw.InvalidInput, hw.WrongType), match=words):
        tasks[name](item, **given)


def test_a_list_of_mixed_types_is_answered_where_it_can_be(tasks: dict[str, hw.Pipeline]) -> None:
    p, items = tasks["text-classification"], ["the film", 3, b"the film", {"text": "a", "text_pair": "b"}, ["a"], None]
    found = p(items, on_error="return")
    assert [type(one) for one in found] == [dict, hw.WrongType, hw.WrongType, dict, hw.WrongType, hw.WrongType]
    assert found[0]["score"] == pytest.approx(p("the film")["score"], rel=1e-4)
    with pytest.raises(hw.WrongType, match=r"item 1: expected a string .*, got 3"):
        p(items)


def test_nothing_given(tasks: dict[str, hw.Pipeline]) -> None:
    for p in tasks.values():
        with pytest.raises(hw.InvalidInput, match="no input"):
            p()


def test_models_that_do_not_fit_their_task() -> None:
    words = encoders.tokenizer("bert")
    with pytest.raises(hw.UnsupportedModel, match="no label 'entailment'"):
        hw.pipeline("zero-shot-classification", encoders.model("bert", "classify"), tokenizer=words, device="cpu")
    with pytest.raises(hw.UnsupportedModel, match="has 2 outputs; a reranker has one"):
        hw.pipeline("rerank", encoders.model("bert", "classify"), tokenizer=words, device="cpu")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is not known"),
        ({"dtype": "autocast:int8"}, "autocast must be"),
        ({"device": "quantum"}, "'quantum' is not known"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"compile": "yes"}, "compile is 'yes'"),
        ({"unpadded": "maybe"}, "unpadded is 'maybe'"),
        ({"backend": "jax"}, "backend is 'jax'"),
        ({"pooling": "sum"}, "pooling is 'sum'"),
    ],
)
def test_bad_arguments_of_pipeline(given: dict[str, Any], words: str) -> None:
    options = {"device": "cpu"} | given
    with pytest.raises(hw.InvalidInput, match=words):
        hw.pipeline(
            "sentence-embedding", encoders.model("bert", "base"), tokenizer=encoders.tokenizer("bert"), **options
        )


@pytest.mark.parametrize("given", [("text-generation", "x" * 5000), (None, "x" * 5000), ("fill-mask", "org\0" * 99)])
def test_a_model_that_no_file_can_be_called_is_not_found(given: tuple[str | None, str]) -> None:
    with pytest.raises(hw.ModelNotFound, match="there is no model") as error:
        hw.pipeline(*given)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("task", ["x" * 5000, [0] * 5000])
def test_a_long_task_is_not_echoed_whole(task: Any) -> None:
    with pytest.raises(hw.HeadwayError, match="task") as error:
        hw.pipeline(task, "smollm2")
    assert len(str(error.value)) < 600
