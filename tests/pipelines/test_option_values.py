"""Values of any kind for the options of pipelines: taken, or refused with an error of ours that has a short message."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.pipelines.generation.options import GenerationOptions
from support import encoders, senses

VALUES: list[Any] = [
    10**5000, -(10**5000), 2**64, float("nan"), float("inf"), np.int64(-3), np.array([1, 2]), torch.tensor([1, 2]),
    torch.tensor(-1), "x" * 300, [10**5000], [-(10**5000)], object(),
]  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(GenerationOptions)])
def test_generation_options(name: str) -> None:
    for value in VALUES:
        said = name
        try:
            GenerationOptions(**{name: value})
        except hw.HeadwayError as error:
            said = str(error)
        assert name in said
        assert len(said) < 400


@pytest.mark.parametrize("name", ["quantize", "compile", "unpadded", "backend"])
def test_arguments(name: str) -> None:
    for value in VALUES:
        with pytest.raises(hw.HeadwayError, match=f"{name} is ") as caught:
            hw.pipeline("text-classification", "no/where", **{name: value})
        assert len(str(caught.value)) < 400


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[hw.Pipeline, tuple[Any, ...], dict[str, Any]]]:
    """A small pipeline for each of several tasks, and a call."""
    words = encoders.tokenizer("bert")

    def saved(name: str, *parts: Any) -> hw.Pipeline:
        folder = tmp_path_factory.mktemp(name)
        for part in parts:
            part.save_pretrained(folder)
        return hw.pipeline(name, str(folder), device="cpu")

    text, labels = ("the film",), {"candidate_labels": ["film", "bank"]}
    image, clip = (senses.images(1)[0],), senses.clip()
    ctc = (senses.wav2vec2("CTC"), senses.wave_extractor(), senses.letters())
    return {
        "text-classification": (saved("text-classification", encoders.model("bert", "classify"), words), text, {}),
        "token-classification": (saved("token-classification", encoders.model("bert", "tag"), words), text, {}),
        "fill-mask": (saved("fill-mask", encoders.model("bert", "fill"), words), ("a [MASK]",), {}),
        "zero-shot-image-classification": (saved("zero-shot-image-classification", *clip), image, labels),
        "automatic-speech-recognition": (saved("automatic-speech-recognition", *ctc), (senses.tone(0.3),), {}),
    }


@pytest.mark.parametrize(
    "task",
    ["text-classification", "token-classification", "fill-mask", "zero-shot-image-classification",
     "automatic-speech-recognition"],
)  # fmt: skip
def test_calls(tasks: dict[str, Any], task: str) -> None:
    """Every option that the task has, and those that every call takes, with every value."""
    pipe, args, keywords = tasks[task]
    for name in (*(field.name for field in fields(pipe.defaults)), "padding", "batch_size", "num_workers"):
        for value in [*VALUES, True, {}, [], [[]], {"a": 1}, "\ud800", np.int64(2), float]:
            said = ""
            try:
                pipe(*args, **(keywords | {name: value}))
            except hw.HeadwayError as error:
                said = str(error)
            assert len(said) < 700
    for value in (np.int64(3), torch.tensor(1), np.array(2.5)):
        with pytest.raises(hw.HeadwayError):
            pipe(value, **keywords)
