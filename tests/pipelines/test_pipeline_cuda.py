"""Pipelines on a CUDA device: the numbers of the CPU, in whatever way rows are computed.

Needs a GPU and random models only. Run with `pytest -m gpu tests/pipelines`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.pipelines.backends import cuda_graphs as graphs
from headway.pipelines.backends.unpadded import VarlenAttention
from headway.pipelines.tasks.text_classification import TextClassification
from support import encoders

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEXTS = encoders.texts(200, seed=9)


def vectors(family: str, **more: Any) -> np.ndarray:
    model = encoders.model(family, "base")
    with hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer(family), **more) as p:
        return np.stack(p(TEXTS))


@pytest.mark.parametrize("family", encoders.FAMILIES)
def test_float32_gives_what_the_cpu_gives(family: str) -> None:
    got = vectors(family, device="cuda", dtype="float32")
    np.testing.assert_allclose(got, vectors(family, device="cpu"), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_packed_rows_in_half_precision(family: str, dtype: str) -> None:
    model = encoders.model(family, "classify", num_labels=3)
    words = encoders.tokenizer(family)
    with hw.pipeline("text-classification", model, tokenizer=words, device="cuda", dtype=dtype) as p:
        assert p.implementation.loaded.unpadded is not None
        assert isinstance(p.implementation.loaded.unpadded._attend, VarlenAttention)
        got = p(TEXTS, top_k=None)
    with hw.pipeline("text-classification", model, tokenizer=words, device="cpu") as p:
        want = p(TEXTS, top_k=None)
    for mine, other in zip(got, want):
        a, b = ({one["label"]: one["score"] for one in some} for some in (mine, other))
        assert all(abs(a[label] - b[label]) < 0.08 for label in b)
    got_v, want_v = vectors(family, device="cuda", dtype=dtype), vectors(family, device="cpu")
    assert ((got_v * want_v).sum(1) > 0.995).all()


TASKS: dict[str, tuple[str, Any]] = {
    "text-classification": ("classify", {"top_k": None}),
    "token-classification": ("tag", {"ignore_labels": []}),
    "sentence-embedding": ("base", {}),
    "feature-extraction": ("base", {"return_tensors": True}),
}


def often_enough(p: hw.Pipeline, **more: Any) -> list[Any]:
    """The texts' results, in the end of captured passes: how they are batched is a matter of time, so that a size may
    not come again at once."""
    for _ in range(30):
        results = list(p(TEXTS, **more))
        if p.stats()["replays"]:
            return list(p(TEXTS, **more))
    return results


@pytest.mark.parametrize("task", TASKS)
def test_captured_passes_give_what_launched_ones_give(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, more = TASKS[task]
    model, words = encoders.model("bert", head), encoders.tokenizer("bert")
    found: list[list[np.ndarray]] = []
    for most in (graphs.MOST, 0):
        monkeypatch.setattr(graphs, "MAX_GRAPHS", most)
        with hw.pipeline(task, model, tokenizer=words, device="cuda") as p:
            results = often_enough(p, **more)
            assert (p.stats()["replays"] > 0) == (most > 0)
            found.append([numbers(one) for one in results])
    for captured, launched in zip(*found):
        np.testing.assert_allclose(captured, launched, rtol=0.05, atol=0.02)


def numbers(result: Any) -> np.ndarray:
    """Everything in a result that is a number, in an order that near scores do not change."""
    if isinstance(result, list):
        key = "label" if "label" in result[0] else "index"
        return np.array([one["score"] for one in sorted(result, key=lambda one: str(one[key]))])
    return np.asarray(result).reshape(-1)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max"])
def test_captured_passes_pool_as_the_cpu_does(pooling: str) -> None:
    model, words = encoders.model("bert", "base"), encoders.tokenizer("bert")
    with hw.pipeline("sentence-embedding", model, tokenizer=words, device="cuda", pooling=pooling) as p:
        got = np.stack(often_enough(p))
        assert p.stats()["replays"] > 0
    with hw.pipeline("sentence-embedding", model, tokenizer=words, device="cpu", pooling=pooling) as p:
        want = np.stack(p(TEXTS))
    assert ((got * want).sum(1) > 0.995).all()


def test_a_task_of_ones_own_is_never_captured() -> None:
    class Own(TextClassification):
        def reduce(self, output: Any, batch: Any, options: Any) -> Any:
            assert len(batch.rows)  # a captured pass would not know them
            return super().reduce(output, batch, options)

    hw.register_task("own-classification", Own, replace=True)
    model, words = encoders.model("bert", "classify"), encoders.tokenizer("bert")
    with hw.pipeline("own-classification", model, tokenizer=words, device="cuda") as p:
        for _ in range(3):
            assert len(p(TEXTS)) == len(TEXTS)
        assert p.stats()["replays"] == 0


def test_batch_mates_change_nothing() -> None:
    model = encoders.model("bert", "base")
    with hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer("bert"), device="cuda") as p:
        alone = np.stack([p(text) for text in TEXTS[:40]])
        together = np.stack(p(TEXTS))[:40]
        assert ((alone * together).sum(1) > 0.9995).all()


def test_many_callers_and_the_whole_answer() -> None:
    model = encoders.model("bert", "classify", num_labels=3)
    with hw.pipeline(
        "text-classification", model, tokenizer=encoders.tokenizer("bert"), device="cuda", dtype="float32"
    ) as p:

        async def main() -> list[Any]:
            return await asyncio.gather(*map(p.submit, TEXTS))

        assert [one["label"] for one in asyncio.run(main())] == [one["label"] for one in p(TEXTS)]
        out = p.forward(TEXTS[:3], output_hidden_states=True)
        assert out.logits.device.type == "cpu"
        assert out.hidden_states[1].shape[0] == 3
        assert next(p.model.parameters()).device.type == "cuda"


def test_a_budget_is_found() -> None:
    model = encoders.model("bert", "classify", num_labels=3)
    with hw.pipeline("text-classification", model, tokenizer=encoders.tokenizer("bert"), device="cuda") as p:
        for _ in p(text for _ in range(200) for text in TEXTS):
            pass
        assert p.stats()["batches"] > 5


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(hw.Unsupported, match="cuda:99"):
        hw.pipeline(
            "sentence-embedding", encoders.model("bert", "base"), tokenizer=encoders.tokenizer("bert"), device="cuda:99"
        )
