"""One server with every API: a small decoder, models of other kinds, a collector, and the lines of its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from headway.server import logs, telemetry
from headway.server.pooling import PoolingModels
from support import encoders, senses
from support.collector import collector
from support.faces import Faces, Lines
from support.live import live
from support.small import small_engine


@pytest.fixture(scope="session")
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger(logs.LOGGER)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture(scope="session")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of random models: vectors, a ranking, labels, speech."""
    transformers.logging.set_verbosity_error()
    root = tmp_path_factory.mktemp("models")
    kinds: dict[str, Any] = {
        "embed": (encoders.model("bert", "base"), encoders.tokenizer("bert")),
        "rerank": (encoders.model("bert", "classify", num_labels=1), encoders.tokenizer("bert")),
        "classify": (encoders.model("bert", "classify"), encoders.tokenizer("bert")),
        "audio": senses.whisper(languages=True),
    }
    names = {role: "small-whisper" if role == "audio" else f"small-{role}" for role in kinds}
    for role, parts in kinds.items():
        for part in parts:
            part.save_pretrained(root / names[role])
    return {role: str(root / name) for role, name in names.items()}


@pytest.fixture(scope="session")
def faces(pooled: dict[str, str], lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    engine = small_engine(tmp_path_factory.mktemp("small") / "model", template="qwen")
    with pytest.MonkeyPatch.context() as patch, collector() as spans:
        patch.setattr(telemetry, "DELAY_MS", 50)
        with live(engine, PoolingModels(pooled, device="cpu"), otel=spans.url) as server:
            yield Faces(server, lines, spans)
