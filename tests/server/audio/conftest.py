"""A server with a small decoder, and random models that hear: Whisper with a window of two seconds, and CTC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from headway.server.pooling import PoolingModels
from support import senses
from support.live import Live, live
from support.small import small_engine


def saved(folder: Path, parts: Any) -> str:
    """The folder of a model with its processors."""
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """transformers warns of what random models write."""
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("models") / "small-whisper", senses.whisper(languages=True))


@pytest.fixture(scope="session")
def ctc_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    parts = (senses.wav2vec2("CTC", norm="layer"), senses.wave_extractor(mask=True), senses.letters())
    return saved(tmp_path_factory.mktemp("models") / "small-ctc", parts)


def speaking(pools: PoolingModels, tmp_path_factory: pytest.TempPathFactory, **settings: Any) -> Any:
    """A server with this speech model."""
    return live(small_engine(tmp_path_factory.mktemp("small") / "model"), pools, **settings)


@pytest.fixture(scope="session")
def whispers(whisper_folder: str) -> PoolingModels:
    """The models of `hearing`, which opens and closes them."""
    return PoolingModels({"audio": whisper_folder}, device="cpu")


@pytest.fixture(scope="session")
def hearing(whispers: PoolingModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with speaking(
        whispers, tmp_path_factory, max_audio_seconds=60.0, max_audio_bytes=32 << 20, audio_timeout=60.0
    ) as server:
        yield server


@pytest.fixture(scope="session")
def hearing_ctc(ctc_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with speaking(PoolingModels({"audio": ctc_folder}, device="cpu"), tmp_path_factory) as server:
        yield server
