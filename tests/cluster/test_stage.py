"""`HeadwayStage` as Ray Data calls it, without Ray: columns in, the same columns with results and errors out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headway.cluster import HeadwayStage

pytestmark = pytest.mark.usefixtures("smollm2_path")


def test_results_are_those_of_the_rows_whatever_their_batch():
    names = [f"key{i}" for i in range(4)]
    prompts: list[Any] = ["The sky is", "The sea is", 3, "The sky is"]
    stage = HeadwayStage("generate", options={"max_tokens": 6, "temperature": 1.0}, key="id", threads=1, pages=128)

    def called(*numbers: int) -> list[tuple[Any, ...]]:
        columns = {"id": [names[i] for i in numbers], "prompt": [prompts[i] for i in numbers]}
        batch = {name: np.array(column, dtype=object) for name, column in columns.items()}
        return list(zip(*(stage(batch)[name] for name in ("id", "prompt", "result", "error")), strict=True))

    whole = called(0, 1, 2, 3)
    assert [(row[0], row[1]) for row in whole] == list(zip(names, prompts, strict=True))
    assert [row[2] is None for row in whole] == [row[3] is not None for row in whole] == [False, False, True, False]
    assert json.loads(whole[2][3]) == "the prompt is 3; it must be a text or a list of token ids"
    texts = [json.loads(row[2])["text"] for row in whole if row[2] is not None]
    assert texts[0] != texts[2]  # one prompt, two keys
    assert called(3, 2) + called(1) + called(0) == [whole[i] for i in (3, 2, 1, 0)]
