"""Values of any kind for the options of pipelines: taken, or refused with an error of ours that has a short message."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.pipelines.generation.options import GenerationOptions

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
