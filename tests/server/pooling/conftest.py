"""A server with a small decoder, the real embedding model, and random models for scores and labels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.server.pooling import PoolingModels
from support import encoders
from support.live import Live, live
from support.small import small_engine

LABELS = {0: "dull", 1: "fair", 2: "great"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a reranker and a classifier."""
    heads: dict[str, dict[str, Any]] = {"rerank": {"num_labels": 1}, "classify": {"id2label": LABELS}}
    created = {}
    for role, more in heads.items():
        folder = tmp_path_factory.mktemp("models") / f"small-{role}"
        encoders.model("bert", "classify", **more).save_pretrained(folder)
        encoders.tokenizer("bert").save_pretrained(folder)
        created[role] = str(folder)
    return created


@pytest.fixture(scope="module")
def served(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = tmp_path_factory.mktemp("small") / "model"
    pooling_models = PoolingModels({"embed": "minilm", **folders}, device="cpu")
    with live(
        small_engine(folder), pooling_models, max_inputs=64, max_queue_tokens=4000, max_vector_elements=150_000
    ) as server:
        yield server
